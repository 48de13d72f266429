"""Lossy KV in the running server: reported, handed on, and kept from requests for exact KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    NUM_TOKENS,
    PAGE,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
    tokens_and_logprobs,
)

pytestmark = pytest.mark.e2e

HOST_PAGES, DOCUMENT_PAGES = 50, 12
EXACT = {"hier_kv_exact": True}


def quality(answer: dict[str, Any]) -> str:
    """What the answer says of the KV that it reused."""
    details = answer["meta_info"]["cached_tokens_details"] or {}
    return str(details.get("hier_kv", {}).get("quality", ""))


def ask_exact(server: Server, prompt: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return server.generate(
        input_ids=prompt,
        sampling_params={
            "max_new_tokens": num_tokens, "ignore_eos": True, "custom_params": EXACT
        },
        return_logprob=True,
    )  # fmt: skip


def leave_on_disk_only(server: Server, seed: int) -> None:
    settled(server)
    for prompt in real_prompts([28 * PAGE] * 3, seed=seed):
        ask(server, prompt, 1)
        settled(server)  # or the next one's pages might find no room, and push nothing out
    flush_device(server)


def test_who_asks_for_exact_kv_gets_it_and_leaves_it_behind(tmp_path: Path) -> None:
    (document,) = real_prompts([DOCUMENT_PAGES * PAGE + 1], seed=21)
    questions = list(real_prompts([90] * 3, seed=22))
    prompts = [document + question for question in questions]
    args = [*hier_args(tmp_path, host_pages=HOST_PAGES), "--max-total-tokens", "4096"]
    args += ["--hier-kv-codec", "cachegen-released"]
    reused = DOCUMENT_PAGES * PAGE
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        ask(server, document, 1)
        exact = tokens_and_logprobs(ask(server, prompts[0]))  # a device hit: what is exact
        leave_on_disk_only(server, 23)

        from_disk = ask(server, prompts[1])
        assert by_tier(from_disk)["disk"] == reused
        assert quality(from_disk) == "lossy"
        lossy = ask(server, prompts[0])
        assert by_tier(lossy)["device"] == reused
        assert quality(lossy) == "lossy"
        assert tokens_and_logprobs(lossy) != exact, "the codec loses nothing: nothing is tested"

        first = ask_exact(server, document, 1)
        assert first["meta_info"]["cached_tokens"] == 0
        second = ask_exact(server, prompts[0])
        assert by_tier(second)["device"] == reused
        assert quality(second) == "exact"
        assert tokens_and_logprobs(second) == exact

        counts = settled(server)["host"]
        assert counts["device_replaced_pages"] >= DOCUMENT_PAGES
        assert counts["replaced_pages"] >= DOCUMENT_PAGES
        anybody = ask(server, prompts[0])
        assert quality(anybody) == ""
        flush_device(server)
        from_dram = ask_exact(server, prompts[0])
        assert by_tier(from_dram)["host"] >= reused
        assert quality(from_dram) == "exact"
        assert from_dram["output_ids"] == exact[0]
