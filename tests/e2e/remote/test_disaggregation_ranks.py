"""Prefill and decode servers of two ranks, and of models with MLA; the store has pages as they are.

SGLang's rank consensus checker is on. Marks of some requests are lost on their way to one rank.

By default latent rows; the long form has K and V of every head, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.tiers.store import PutShare
from testkit.rank_requests import ENVIRONMENT, WAYS
from testkit.server import TINYLM, Server
from testkit.slow import ENV_LOST_MARKS, FIRST_LOST_ROOM
from tests.e2e.hier_server import PAGE, ranks_of, real_prompts, settled
from tests.e2e.remote.latent_model import write_latent_model
from tests.e2e.remote.prefill_decode import (
    ANSWER_TOKENS,
    FIRST_TOKENS,
    PATIENCE_S,
    SAME,
    TURN_TOKENS,
    Pair,
    Turn,
    converse,
    counted,
    plain_turns,
    running_pair,
)
from tests.e2e.remote.test_remote_latent_ranks import page_hashes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TURNS = 3
ENV = {**ENVIRONMENT, ENV_LOST_MARKS: "1"}


def known_turns(folder: Path, args: list[str], model: Path) -> list[Turn]:
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    server = Server(
        [*SAME, *args],
        model=model,
        log_path=folder / "plain.log",
        env=ENVIRONMENT,
        stop="kill",
        start_timeout_s=PATIENCE_S,
    )
    with server as plain:
        return plain_turns(plain, parts)


@pytest.mark.long
def test_two_ranks_hand_their_shares_on(tmp_path: Path) -> None:
    turns = known_turns(tmp_path, WAYS["tp"], TINYLM)
    with running_pair(tmp_path / "pair", WAYS["tp"], env=ENV) as pair:
        converse(pair, turns)
        for server in pair.servers:
            assert server.log().count("Rank consensus checker is enabled") == 2
        _check_that_all_ranks_leave_what_is_foreign_to_one(pair)


def _check_that_all_ranks_leave_what_is_foreign_to_one(pair: Pair) -> None:
    """One rank alone would keep it out of its tree, and what ranks have in theirs must not differ.

    What is asked next goes on from what both have.
    """
    prompts = list(real_prompts([310, 310], seed=8))
    before = counted(pair.decode, "saved_pages"), counted(pair.decode, "duplicate_pages")
    pair.ask(prompts[0], room=FIRST_LOST_ROOM)
    assert counted(pair.decode, "received_foreign_requests") == [1, 1]
    assert (counted(pair.decode, "saved_pages"), counted(pair.decode, "duplicate_pages")) == before
    pair.ask(prompts[0])
    pair.ask(prompts[1])
    assert counted(pair.decode, "received_foreign_requests") == [1, 1]
    num_pages = 2 * ((310 + ANSWER_TOKENS - 1) // PAGE)
    assert counted(pair.decode, "saved_pages") == [each + num_pages for each in before[0]]


@pytest.mark.sampled("2")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_latent_rows_are_handed_on_and_each_is_stored_once(num_ranks: int, tmp_path: Path) -> None:
    args = WAYS["tp"] if num_ranks > 1 else []
    model = write_latent_model(tmp_path / "model")
    turns = known_turns(tmp_path, args, model)
    with running_pair(tmp_path / "pair", args, model=model, env=ENV) as pair:
        converse(pair, turns)
        said = [*turns[-1].prompt, *turns[-1].answer[0]]
        hashes = page_hashes(said[:-1])
        shares = [
            int(PutShare(rank, num_ranks).has(hashes).sum()) if num_ranks > 1 else len(hashes)
            for rank in range(num_ranks)
        ]
        for rank, host in enumerate(each["host"] for each in ranks_of(_settled(pair))):
            written = host.get("remote_written_pages", 0)
            assert host["saved_pages"] == len(hashes)
            # The prefill server puts what it computed; what the store has is not put again.
            assert written <= shares[rank] <= written + host.get("remote_duplicate_pages", 0), host
            assert bool(host.get("remote_left_pages", 0)) == (num_ranks > 1)


def _settled(pair: Pair) -> dict[str, object]:
    return settled(pair.decode, PATIENCE_S)
