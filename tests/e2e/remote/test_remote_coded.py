"""Coded pages between two servers: a conversation goes on at the other one, in time if need be.

By default one codec, on two ranks; the long form has another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.server import TINYLM, Server
from testkit.workload import ASSETS
from tests.e2e.hier_server import (
    NUM_TOKENS,
    PAGE,
    SLOT_BYTES,
    answers_as_computed,
    ask,
    by_tier,
    connected,
    hier_args,
    real_prompts,
    settled,
    state,
)
from tests.tiers.remote.remote_cases import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
]

PROFILE = ["--hier-kv-profile", str(ASSETS / "tinylm.hkp")]
WAIT = ["--hier-kv-prefetch-policy", "wait_complete"]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def start(folder: Path, port: int, codec: str, *more: str, model: Path | str = TINYLM) -> Server:
    """A server with DRAM and a remote store, which codes pages for it."""
    folder.mkdir()
    args = [
        *hier_args(folder, disk_gb=0, host_pages=600),
        *WAIT,
        *more,
        "--hier-kv-codec",
        f"remote={codec}",
    ]
    args += ["--hier-kv-remote-url", f"redis://127.0.0.1:{port}?timeout=30s"]
    return Server(args, model=model, log_path=folder / "log", stop="kill")


def host(server: Server) -> dict[str, int]:
    counts: dict[str, int] = state(server)["host"]
    return counts


def num_stored(server: Server) -> int:
    counts = host(server)
    return counts.get("remote_written_pages", 0) + counts.get("remote_duplicate_pages", 0)


def quality(answer: dict[str, Any]) -> str:
    details = answer["meta_info"].get("cached_tokens_details") or {}
    found: str = (details.get("hier_kv") or {}).get("quality", "")
    return found


def ask_exact(server: Server, prompt: list[int]) -> dict[str, Any]:
    """As `ask`, from exact KV only."""
    params: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    params["custom_params"] = {"hier_kv_exact": True}
    return server.generate(input_ids=prompt, sampling_params=params, return_logprob=True)


def learn(server: Server, prompts: Iterator[list[int]]) -> None:
    """Shows a server text until it codes what it uploads."""
    for prompt in prompts:
        ask(server, prompt, 1)
        if until(lambda: host(server).get("remote_coded_pages", 0) > 0, 2.0):
            return
        settled(server)
    raise AssertionError(f"nothing was coded: {host(server)}")


def upload(server: Server, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """A turn; returns what was said so far and how many whole pages of it are in the store."""
    settled(server)  # or pages of a turn before would be counted among these
    before = num_stored(server)
    answer = ask(server, prompt, num_tokens)
    num_pages = (len(prompt) + num_tokens - 1) // PAGE
    assert until(lambda: num_stored(server) >= before + num_pages), host(server)
    return [*prompt, *answer["output_ids"]], num_pages


@pytest.mark.sampled("hier-2")
@pytest.mark.parametrize(("codec", "level"), [("hier", 2), ("cachegen-paper", 1)])
def test_a_conversation_goes_on_at_another_server(
    tmp_path: Path, redis: RedisServer, codec: str, level: int
) -> None:
    first_turn, second_turn = real_prompts([1500, 300])
    given = PROFILE if codec == "hier" else []
    with start(tmp_path / "one", redis.port, codec, *given) as one:
        connected(one)
        if not given:
            learn(one, real_prompts([1100] * 100, seed=9))
        said, num_pages = upload(one, first_turn, 40)
        prompt = [*said, *second_turn]
        expected = ask(one, prompt)
        assert host(one)["remote_coded_pages"] >= num_pages
    # The second server has no profile: what it decodes with comes from the store.
    with start(tmp_path / "two", redis.port, codec) as two:
        connected(two)
        moved = ask(two, prompt)
        assert by_tier(moved)["remote"] >= 0.95 * num_pages * PAGE, (by_tier(moved), host(two))
        # Counted a moment after they can be loaded.
        assert until(lambda: host(two).get("saved_lossy_pages", 0) >= num_pages), host(two)
        found = settled(two)["host"]
        assert quality(moved) == quality(ask(two, prompt)) == "lossy"
        exact = ask_exact(two, prompt)
    assert found[f"remote_level_{level}_pages"] >= 0.95 * num_pages
    assert found.get("remote_failed_pages", 0) == found.get("remote_failures", 0) == 0
    assert 0 < found["remote_bytes_in"] < num_pages * SLOT_BYTES / 3
    # All that the store and the device have of it is lossy: it is computed from the beginning.
    assert sum(by_tier(exact).values()) == 0
    assert quality(exact) != "lossy"
    assert answers_as_computed(expected, exact)
