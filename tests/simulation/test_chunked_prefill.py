"""The simulator computes and saves prompts chunk by chunk, when a server does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.__main__ import _parser
from bench.policies.replay import Replay
from sglang_ext.simulator.engine import System, TraceRequest, run
from sglang_ext.simulator.prefill import ChunkedPrefill, chunks_of
from sglang_ext.simulator.types import CHUNK_TOKENS
from sglang_ext.simulator.virtual_store import (
    ServerStore,
    StoreSizes,
    page_hashes,
    virtual_store,
)
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.store.types import Hashes, SaveTicket

SIZES = StoreSizes(1 << 20, host_pages=64, disk_pages=192, page_tokens=100)
MACHINE = System(
    page_tokens=100, kv_bytes_per_token=1e5, dram_bytes=120 * 1e7, disk_bytes=3000 * 1e7,
    prefill_tokens_per_s=1e4, decode_tokens_per_s=100.0, batch=4, context_window=1 << 20,
)  # fmt: skip


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of each save's path, in their order."""
    numbers: list[int] = []
    begin = ServerStore.begin_save

    def note(self: ServerStore, hashes: Hashes, num_offered: int) -> SaveTicket:
        numbers.append(len(hashes))
        return begin(self, hashes, num_offered)

    monkeypatch.setattr(ServerStore, "begin_save", note)
    return numbers


@pytest.mark.parametrize(
    ("prompt", "reused", "chunk", "ends"),
    [
        (250, 0, 1000, [250]),
        (1000, 0, 1000, [1000]),
        (1001, 0, 1000, [1000, 1001]),
        (2550, 0, 1050, [1000, 2000, 2550]),  # all but the last end with a page
        (2550, 400, 1000, [1400, 2400, 2550]),
        (500, 500, 1000, [500]),  # the last token is computed always
        (500, 0, 30, [100, 200, 300, 400, 500]),  # of pages that are longer
        (90, 0, 30, [90]),
    ],
)
def test_a_prompt_is_computed_in_chunks(
    prompt: int, reused: int, chunk: int, ends: list[int]
) -> None:
    chunks = chunks_of(prompt, reused, chunk, 100)
    assert [each.end for each in chunks] == ends
    starts = [min(reused, prompt - 1), *ends[:-1]]
    assert [each.start for each in chunks] == starts


def test_each_chunk_takes_room_as_it_is_begun_and_is_found_when_it_is_computed() -> None:
    hashes = page_hashes(np.arange(25))
    with virtual_store(SIZES, PolicyConfig()) as server:

        def seen() -> tuple[int, int]:
            return server.store.ready_prefix(server.space, hashes), server.store.arena.num_used

        server.save(hashes[:4], 0)
        loads = server.store.pin_leading(server.space, hashes[:4])
        chunks = chunks_of(2500, 400, 1000, 100)
        steps = ChunkedPrefill(server, hashes, loads, chunks).run(0.5, [1.0, 2.0, 3.0])
        assert next(steps) == 0.5  # what is loaded is pinned
        assert server.store.arena.pinned(loads.slots).all()
        took = [(seen(), seconds) for seconds in steps]
        assert not server.store.arena.pinned(loads.slots).any()
        assert took == [
            ((4, 14), 0.5), ((14, 14), 0.0), ((14, 24), 2.0), ((24, 24), 0.0), ((24, 24), 3.0),
        ]  # fmt: skip
        assert seen() == (25, 25)


@pytest.mark.parametrize(("chunk_tokens", "expected"), [(1000, [10, 20, 25]), (4000, [25])])
def test_the_engine_saves_each_chunk(
    saves: list[int], chunk_tokens: int, expected: list[int]
) -> None:
    trace = [TraceRequest(0.0, np.arange(25), 2500, 10)]
    done = run(trace, replace(MACHINE, chunk_tokens=chunk_tokens), "lookahead")
    assert saves == expected
    assert done.prefill_gpu_s == pytest.approx(0.25)
    assert done.ttft_mean_s == pytest.approx(0.25)


def test_loads_hide_behind_the_first_chunk_only() -> None:
    pages = np.arange(45)
    trace: list[Any] = [TraceRequest(0.0, pages[:20], 2000, 10)]
    trace.append(TraceRequest(100.0, pages, 4500, 10))
    system = replace(MACHINE, dram_gb_s=1.0, chunk_tokens=1000)  # 0.2 s of loads, 0.1 s a chunk
    done = run(trace, system, "lookahead")
    assert done.reused_tokens == 2000
    assert done.ttft_s[1] == pytest.approx(0.2 + 0.15)


def test_a_replay_saves_each_chunk(saves: list[int]) -> None:
    paths = [np.arange(25), np.arange(30)]
    with virtual_store(SIZES, PolicyConfig()) as server:
        done = Replay(paths, 1, [1.0, 1.0], chunk_tokens=1000).run(server)
    assert saves == [10, 20, 25, 30]
    assert (done.hits, done.new) == (25, 30)


def test_what_servers_do_that_were_told_nothing_is_the_default() -> None:
    assert _parser().parse_args(["policies"]).chunked_prefill_size == CHUNK_TOKENS == 8192
    assert MACHINE.chunk_tokens == CHUNK_TOKENS
    with pytest.raises(SystemExit):
        _parser().parse_args(["policies", "--chunked-prefill-size", "0"])
