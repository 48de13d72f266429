"""Servers of two tensor parallel ranks on one store: each rank finds its own share, and only that.

Page stores are late by chance, each rank by its own, and SGLang's rank consensus checker is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from testkit.rank_requests import ENVIRONMENT, WAYS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    connected,
    real_prompts,
    state,
    tokens_and_logprobs,
)
from tests.e2e.remote.test_remote import Store, eventually, make_server, redis_store, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FIRST_TOKENS, ANSWER_TOKENS, SECOND_TOKENS = 700, 20, 200
REUSABLE = (FIRST_TOKENS + ANSWER_TOKENS - 1) // PAGE
JITTER_MS = 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with redis_store(tmp_path) as made:
        yield made


def ranks_server(store: Store, folder: Path, name: str) -> Server:
    env = {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}
    return make_server(store, folder, name, WAYS["tp"], env=env)


def have_counted(server: Server, name: str, num: float) -> bool:
    """Whether a counter of every rank is as high."""
    hosts = [rank["host"] for rank in state(server)["tp_ranks"]]
    assert len(hosts) == 2
    return all(host.get(name, 0) >= num for host in hosts)


def test_ranks_continue_a_conversation_and_other_numbers_of_ranks_do_not_meet_it(
    store: Store, tmp_path: Path
) -> None:
    first, second = real_prompts([FIRST_TOKENS, SECOND_TOKENS], seed=7)
    with ranks_server(store, tmp_path, "one") as server:
        connected(server)
        prompt = [*first, *ask(server, first, ANSWER_TOKENS)["output_ids"], *second]
        eventually(partial(have_counted, server, "remote_written_pages", REUSABLE))
        expected = tokens_and_logprobs(ask(server, prompt))  # a device hit
    with ranks_server(store, tmp_path, "two") as server:
        connected(server)
        moved = ask(server, prompt)
        assert by_tier(moved)["remote"] >= 0.95 * REUSABLE * PAGE, (by_tier(moved), state(server))
        assert tokens_and_logprobs(moved) == expected
        # Counted a moment after they can be loaded.
        eventually(partial(have_counted, server, "remote_promoted_pages", 0.95 * REUSABLE))
        assert server.log().count("Rank consensus checker is enabled") == 2
    alone = make_server(store, tmp_path, "alone")
    try:
        start([alone])
        assert by_tier(ask(alone, prompt)) == {}
        assert state(alone)["host"].get("remote_found_pages", 0) == 0
    finally:
        alone.kill()
