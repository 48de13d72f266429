"""Lossy KV in the running server: reported, handed on, and kept from requests for exact KV."""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.e2e.openai_client import WAYS, connect, seen, through

pytestmark = pytest.mark.e2e

HOST_PAGES, DOCUMENT_PAGES = 50, 12
NUM_CHAT_TOKENS = 220
EXACT = {"hier_kv_exact": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lossy")
    args = [*hier_args(folder, host_pages=HOST_PAGES), "--max-total-tokens", "4096"]
    args += ["--hier-kv-codec", "cachegen-released"]
    with Server(args, log_path=folder / "server.log", stop="kill") as running:
        yield running


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


def test_who_asks_for_exact_kv_gets_it_and_leaves_it_behind(server: Server) -> None:
    (document,) = real_prompts([DOCUMENT_PAGES * PAGE + 1], seed=21)
    questions = list(real_prompts([90] * 3, seed=22))
    prompts = [document + question for question in questions]
    reused = DOCUMENT_PAGES * PAGE
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


def test_an_openai_client_sees_that_what_was_reused_is_lossy(server: Server) -> None:
    seeds = {way: 30 + number for number, way in enumerate(WAYS)}
    with connect(server) as client:
        for way, seed in seeds.items():
            through(client, way, NUM_CHAT_TOKENS, seed)
        leave_on_disk_only(server, 24)
        for way, seed in seeds.items():
            usage, header = through(client, way, NUM_CHAT_TOKENS, seed)
            cached, report = seen(usage)
            assert report == header
            assert cached == report["disk"] == (usage.prompt_tokens - 1) // PAGE * PAGE > 0, way
            assert report["quality"] == "lossy", way
            # Who asks for exact KV is told so, of what is computed and of what is reused.
            for expected in (0, cached):
                usage, header = through(client, way, NUM_CHAT_TOKENS, seed, hier_kv_exact=True)
                reused, report = seen(usage)
                assert report == header
                assert reused == expected, way
                assert report["quality"] == "exact", way
                assert report.get("missed", {}) == ({} if reused else {"not_exact": cached})
