"""Context parallel ranks on the real server: each has K and V of all tokens, one keeps the pages.

By default a prefill's tokens are divided among two ranks (SGLang's zigzag strategy). By the long
form each rank computes all of them, too, and a server of the other division finds no page of this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.rank_requests import ENVIRONMENT
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    ask,
    by_tier,
    check_agreed,
    connected,
    every_rank,
    real_prompts,
    settled,
    tokens_and_logprobs,
)
from tests.e2e.updates.weight_models import qwen3

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

PAGE = 64
# Behind what is reused of the second one too few tokens are left to be divided among ranks.
LENGTHS = [150, 130, 5 * PAGE, 700]
PROMPTS = list(real_prompts(LENGTHS, seed=3))
REUSABLE = [(length - 1) // PAGE * PAGE for length in LENGTHS]
BASE = ["--tp-size", "2", "--attn-cp-size", "2", "--attention-backend", "cpu_extend"]
BASE += ["--page-size", str(PAGE), "--chunked-prefill-size", "256", "--max-total-tokens", "4096"]
BASE += ["--enable-hier-kv", "--hier-kv-host-size", "0.1", "--hier-kv-disk-size", "0.5"]
BASE += ["--hier-kv-prefetch-policy", "wait_complete", "--hier-kv-write-policy", "write_through"]
BASE += ["--hier-kv-disk-segment-size", "0.03"]
WAYS = {"zigzag": ["--enable-prefill-cp", "--cp-strategy", "zigzag"], "repeated": []}


def make_server(way: str, folder: Path, *args: str) -> Server:
    """A server of two ranks, not started yet."""
    every = [*BASE, *WAYS[way], "--hier-kv-disk-dir", str(folder / "disk"), *args]
    return Server(
        every, model=folder / "model", log_path=folder / "server.log", env=ENVIRONMENT,
        stop="kill", start_timeout_s=300,
    )  # fmt: skip


def answers(server: Server, tier: str) -> list[dict[str, Any]]:
    """Answers to all prompts, of which all that can be reused comes from one tier."""
    found = [ask(server, prompt) for prompt in PROMPTS]
    assert [by_tier(answer)[tier] for answer in found] == REUSABLE, tier
    settled(server)
    return found


def check_hits(server: Server, hits: list[dict[str, Any]], tier: str) -> None:
    """What comes from a tier answers as a device hit does, to the bit."""
    found = answers(server, tier)
    assert list(map(tokens_and_logprobs, found)) == list(map(tokens_and_logprobs, hits)), tier


@pytest.mark.sampled("zigzag")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_restored_answers_as_a_device_hit(way: str, tmp_path: Path) -> None:
    qwen3(tmp_path / "model")
    with make_server(way, tmp_path) as server:
        for prompt in PROMPTS:
            assert ask(server, prompt)["meta_info"]["cached_tokens"] == 0
        hits = answers(server, "device")
        flush_device(server)
        check_hits(server, hits, "host")
        keeper, reader = every_rank(server)
        assert keeper["pages_kept_by_tp_rank"] == reader["pages_kept_by_tp_rank"] == 0
        assert keeper["host"]["host_pages"] > 0
        assert reader["host"]["host_pages"] == 0
        check_agreed(server.log(), 2)
    (tmp_path / "store").mkdir()
    remote = ["--hier-kv-remote-url", f"file://{tmp_path / 'store'}?size=1GB"]
    with make_server(way, tmp_path, *remote) as server:  # after a kill -9
        check_hits(connected(server), hits, "disk")
        check_agreed(server.log(), 2)


@pytest.mark.long
def test_another_division_finds_nothing(tmp_path: Path) -> None:
    """Products of a part of a prefill are of other shapes, and may round otherwise."""
    qwen3(tmp_path / "model")
    with make_server("zigzag", tmp_path) as server:
        shared = [ask(server, prompt) for prompt in PROMPTS]
        settled(server)
    with make_server("repeated", tmp_path) as server:
        whole = [ask(server, prompt) for prompt in PROMPTS]
    assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in whole)
    likely = [[tokens_and_logprobs(each)[1][0] for each in way] for way in (shared, whole)]
    assert likely[0] == pytest.approx(likely[1], abs=0.1)  # the same but for rounding
