"""A model whose window layers have a KV pool of their own, on the real server.

What is restored is compared with plain SGLang's own device hits bit for bit, and every answer, with
many requests at once, with what transformers computes for the same tokens.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.hybrids.window_model import PATTERN, WINDOW, write_window_model
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    GIB,
    ask,
    by_tier,
    connected,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.models.hybrid_answers import (
    NUM_TOKENS,
    Computed,
    answers,
    answers_at_once,
    branching_prompts,
    cached,
    check_hits,
    drop_device,
    talk,
    two_chats,
    values,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

PAGE = 64
SLOT_BYTES = 36_864  # a page of two layers of the window model, with its header
FULL_LAYERS = PATTERN.count(0)
WINDOW_GROUPS = -(-PATTERN.count(1) // FULL_LAYERS)
WINDOW_PAGES = -(-(WINDOW - 1) // PAGE)
ANSWER = 10  # tokens, in a chat
LENGTHS = [40, 128, 192, 333, 702, 1280]  # the answer to one fills its page
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "256"]
# How far rounding takes a log-probability in bfloat16; another KV takes it to 1 and more.
TOLERANCE = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_window_model(tmp_path_factory.mktemp("windows") / "model")


@pytest.fixture(scope="module")
def chats() -> list[list[list[int]]]:
    """What is said in each turn of two chats, which begin alike."""
    return two_chats(5 * PAGE + 20, 170)


def server_of(
    model: Path, folder: Path, *more: str, pool: int, host_pages: int = 0, store: str = ""
) -> Server:
    """A server with DRAM for that many pages, and a disk or a store; a plain one for none."""
    args = [*BASE, "--max-total-tokens", str(pool), *more]
    if host_pages:
        args += ["--enable-hier-kv", "--hier-kv-prefetch-policy", "timeout"]
        args += ["--hier-kv-host-size", f"{(host_pages + 0.5) * SLOT_BYTES / GIB:.9f}"]
        if store:
            args += ["--hier-kv-remote-url", store]
        else:
            args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.5"]
            args += ["--hier-kv-disk-segment-size", "0.01"]
        args += ["--hier-kv-prefetch-timeout-ms", "60000"]
    return Server(
        args, model=model, log_path=folder / "server.log", stop="kill", start_timeout_s=300
    )


@pytest.fixture(scope="module")
def by_transformers(model: Path) -> Computed:
    """The same weights without SGLang."""
    from transformers import MellumForCausalLM

    opened = MellumForCausalLM.from_pretrained(model, dtype=torch.float32)
    return Computed(lambda tokens: opened(tokens).logits[0])


@pytest.fixture(scope="module")
def plain(
    model: Path, chats: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Plain SGLang's answers, with a pool that holds everything."""
    prompts = list(real_prompts(LENGTHS, seed=3))
    with server_of(model, tmp_path_factory.mktemp("plain"), pool=32768) as server:
        first, repeat = answers(server, prompts), answers(server, prompts)
        talks = talk(server, chats, lambda: None, ANSWER)
    return {"prompts": prompts, "first": first, "repeat": repeat, "talks": talks}


def test_the_engine_computes_windows_as_transformers_does(
    plain: dict[str, Any], by_transformers: Computed
) -> None:
    assert cached(plain["repeat"]) == [(n - 1) // PAGE * PAGE for n in LENGTHS]
    for kind in ("first", "repeat"):
        assert by_transformers.furthest(plain["prompts"], plain[kind]) < TOLERANCE


def test_a_hit_is_what_the_device_would_have_given_from_every_tier(
    model: Path, chats: list[list[list[int]]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """From DRAM, from disk, and in a server started on the disk that another one left."""
    prompts, codec = plain["prompts"], ["--hier-kv-codec", "lossless"]
    with server_of(model, tmp_path, *codec, pool=8192, host_pages=400) as server:
        assert values(answers(server, prompts)) == values(plain["first"])
        settled(server)
        flush_device(server)
        check_hits(answers(server, prompts), plain["repeat"], "host")
        found = settled(server)["host"]
        needed = sum(length // PAGE for length in LENGTHS)
        # The window before the last token's page, and that before the end where it is whole.
        windows = sum(min(WINDOW_PAGES + (n % PAGE == 0), n // PAGE) for n in LENGTHS)
        # An answer that fills a page ends at a window of its own.
        ended = sum((n + NUM_TOKENS - 1) // PAGE > n // PAGE for n in LENGTHS)
        most = needed + ended + WINDOW_GROUPS * (windows + ended * WINDOW_PAGES)
        assert found["saved_pages"] <= most, (found, most)
        # Those of window layers, too.
        assert state(server)["disk"]["codec"]["pages_coded"] > needed
    # Another one, after a kill -9, with a tenth of the room.
    with server_of(model, tmp_path, *codec, pool=8192, host_pages=60) as server:
        check_hits(answers(server, prompts), plain["repeat"], "disk")
        talks = talk(server, chats, lambda: drop_device(server), ANSWER)
        # What earlier turns needed of window layers is the first to leave this little room.
        assert settled(server)["host"]["superseded_pages"] > 0
    ours, theirs = sum(cached(talks)), sum(cached(plain["talks"]))
    print(f"chats: {ours} of {theirs} tokens that the device would have reused")
    assert ours >= 0.95 * theirs
    same = [a == b for a, b in zip(cached(talks), cached(plain["talks"]), strict=True)]
    for a, b, is_same in zip(talks, plain["talks"], same, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert not is_same or tokens_and_logprobs(a) == tokens_and_logprobs(b)


def test_what_one_server_computed_another_one_gets_from_their_store(
    model: Path, plain: dict[str, Any], tmp_path: Path
) -> None:
    prompts = plain["prompts"]
    (tmp_path / "shared").mkdir()
    store = f"file://{tmp_path / 'shared'}?size=1GB"
    codec = ["--hier-kv-codec", "remote=lossless"]
    with server_of(model, tmp_path, *codec, pool=8192, host_pages=400, store=store) as server:
        connected(server)
        assert values(answers(server, prompts)) == values(plain["first"])
        saved = settled(server)["host"]["saved_pages"]
        deadline_s = time.monotonic() + 300
        while state(server)["host"].get("remote_written_pages", 0) < saved:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    sizes = [path.stat().st_size for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    assert sum(size < 0.8 * SLOT_BYTES for size in sizes) > sum(n // PAGE for n in LENGTHS)
    with server_of(model, tmp_path, *codec, pool=8192, host_pages=400, store=store) as server:
        connected(server)
        check_hits(answers(server, prompts), plain["repeat"], "remote")
        # Of what they have in common nobody went on behind; behind its own end each still can.
        branch = [*prompts[-1][: 10 * PAGE], *prompts[0]]
        assert cached([ask(server, branch)]) == [0]
        further = [*prompts[-2], *prompts[0]]
        (answer,) = answers(server, [further])
        assert cached([answer]) == [len(prompts[-2]) // PAGE * PAGE]


def test_with_many_at_once_and_too_little_room_every_answer_is_right(
    model: Path, by_transformers: Computed, tmp_path: Path
) -> None:
    """Branches anywhere, evictions of both pools and all tiers, and what is restored in between."""
    rng = random.Random(9)
    prompts = branching_prompts(rng, 6, 40)
    codec = ["--hier-kv-codec", "host=lossless,disk=lossless", "--hier-kv-host-coded-share", "0.5"]
    with server_of(model, tmp_path, *codec, pool=3072, host_pages=240) as server:
        found = answers_at_once(server, prompts, rng, 70)
        counted, coded = state(server)["host"], state(server)["disk"]["coded_host"]
    assert by_transformers.furthest(prompts, found) < TOLERANCE
    from_tiers = sum(by_tier(a).get("host", 0) + by_tier(a).get("disk", 0) for a in found)
    assert from_tiers > 20 * PAGE, (from_tiers, counted)
    assert counted.get("load_failures", 0) == counted.get("save_failures", 0) == 0
    assert coded["hits"] > 0, coded
