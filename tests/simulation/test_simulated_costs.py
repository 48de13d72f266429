"""The simulator decides between loading and computing as a server does, by its own machine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.settings.config import PREFETCH_POLICIES, HierKVConfig
from sglang_ext.simulator import loop
from sglang_ext.simulator.engine import Conversation, Outcome, System, TraceRequest, Turn, run
from sglang_ext.simulator.forwards import Forwards
from sglang_ext.simulator.virtual_store import (
    DEFAULT_PREFETCH_POLICY,
    StoreSizes,
    VirtualClock,
    cost_feeds,
    page_hashes,
    virtual_store,
)
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.quality import ANY

SIZES = StoreSizes(1 << 20, 64, 512, page_tokens=100)
# A page is 10 MB and takes 10 ms to compute; DRAM holds the pages of two chats.
MACHINE = System(
    page_tokens=100, kv_bytes_per_token=1e5, dram_bytes=120 * 1e7, disk_bytes=3000 * 1e7,
    prefill_tokens_per_s=1e4, decode_tokens_per_s=100.0, batch=4, context_window=1 << 20,
)  # fmt: skip


def chats() -> list[Conversation]:
    """They come back at long intervals, one after another."""
    turns = (Turn(1500, 10, 200.0),) * 3
    return [Conversation(6.0 * number, turns) for number in range(30)]


def run_with(disk_gb_s: float, prefetch_policy: str) -> Outcome:
    system = replace(
        MACHINE, disk_gb_s=disk_gb_s, disk_write_gb_s=5.0, prefetch_policy=prefetch_policy
    )
    return run(chats(), system, "lookahead")


def test_it_does_what_a_server_does_that_was_told_nothing() -> None:
    assert MACHINE.prefetch_policy == DEFAULT_PREFETCH_POLICY == HierKVConfig().prefetch_policy
    assert DEFAULT_PREFETCH_POLICY in PREFETCH_POLICIES


def test_what_is_slower_to_read_than_to_compute_is_computed() -> None:
    waits, decides = run_with(0.1, "wait_complete"), run_with(0.1, "cost")  # 100 ms a page
    assert waits.hit_rate > 0.9
    assert decides.hit_rate < 0.5
    assert decides.ttft_mean_s < 0.5 * waits.ttft_mean_s
    assert decides.counters["cost_recompute"] > 0


def test_what_is_quicker_to_read_is_loaded() -> None:
    waits, decides = run_with(10.0, "wait_complete"), run_with(10.0, "cost")  # 1 ms a page
    assert decides.hit_rate == pytest.approx(waits.hit_rate, abs=0.01)
    assert decides.ttft_mean_s == pytest.approx(waits.ttft_mean_s, rel=0.02)


def test_a_disk_that_takes_long_is_no_request_that_is_never_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_MAX_POLLS", 30)  # 0.6 s; a prompt takes the disk 1.5 s
    waits = run_with(0.1, "wait_complete")
    assert waits.ttft_mean_s > 1.0
    assert waits.hit_rate > 0.9


@pytest.mark.parametrize("policy", ["lookahead", "off"])
def test_a_request_that_is_held_for_its_pages_holds_up_nobody(policy: str) -> None:
    num, pages = 20, np.arange(15)
    trace = [TraceRequest(5.0 * at, pages + 15 * at, 1501, 10) for at in range(num)]
    trace.append(TraceRequest(200.0, pages, 1501, 10))  # left DRAM; takes the disk 1.5 s
    trace.append(TraceRequest(200.1, pages + 15 * num, 1501, 10))  # nobody has seen these
    trace.append(TraceRequest(200.2, pages + 15 * (num + 1), 1501, 10))
    system = replace(MACHINE, disk_gb_s=0.1, disk_write_gb_s=5.0, prefetch_policy="wait_complete")

    done = run(trace, system, policy)

    assert done.recorded.admitted == [*range(num), num + 1, num + 2, num]
    assert done.recorded.num_waiting[-3:] == [2, 2, 1]
    assert done.reused_tokens == 1500
    assert done.ttft_s[-3:].tolist() == pytest.approx([0.15, 0.2, 1.5], abs=0.05)
    # The device had nothing to run but while the held one was alone.
    assert done.wait_load_s == pytest.approx(1.2, abs=0.05)
    assert done.disk_tokens == 1500


def test_without_a_disk_there_is_nothing_to_decide() -> None:
    done = run(chats(), replace(MACHINE, disk_bytes=0), "lookahead")
    assert not [name for name in done.counters if name.startswith("cost_load")]


def test_the_model_learns_the_machines_speeds() -> None:
    clock, feeds = VirtualClock(), cost_feeds(SIZES)
    forwards = Forwards(feeds, clock)
    assert not forwards.is_decoding
    for number in range(8):
        forwards.begin_prefill(1000 * (number % 3 + 1), 0)
        clock.now_s += 0.1 * (number % 3 + 1)
        forwards.end_prefill()
    assert feeds.cost.prefill_s(5000, 0) == pytest.approx(0.5, rel=0.02)
    forwards.begin_prefill(1000, 4000, num_loaded=40, load_s=0.02)
    clock.now_s += 0.1
    forwards.end_prefill()
    assert feeds.cost.state()["device_load_mb_s"] == pytest.approx(40 * 1.048576 / 0.02, rel=0.01)
    assert not forwards.is_decoding
    for _ in range(10):
        clock.now_s += 0.004  # the loop may stop within a step
        forwards.decoded(0.01)
    assert forwards.is_decoding
    assert feeds.cost.state()["decode_step_ms"] == pytest.approx(10.0)
    clock.now_s += 1.0
    assert not forwards.is_decoding


def test_the_model_learns_the_disks_speed_in_virtual_time() -> None:
    sizes = replace(SIZES, host_pages=16, read_bytes_per_s=1 << 30, write_bytes_per_s=1 << 30)
    with virtual_store(sizes, PolicyConfig()) as server:
        paths = [page_hashes(np.arange(12) + 100 * number) for number in range(8)]
        for path in paths:
            server.save(path, 0)
            while (due_s := server.executor.next_s()) < math.inf:
                server.clock.now_s = due_s
                server.executor.run_due()
        for number, path in enumerate(paths[:4]):
            server.room.enter(
                number, ReusablePrefix(server.space, path, 0, ANY, prompt_tokens=10_000)
            )
            server.room.step([number])
            while not server.room.may_admit(number):
                server.clock.now_s = min(server.executor.next_s(), server.clock.now_s + 0.001)
                server.executor.run_due()
                server.room.step([number])
            server.room.leave(number, admitted=True)
        state = server.forwards._feeds.cost.state()
        assert state["disk_samples"] > 0
        assert state["disk_read_mb_s"] == pytest.approx((1 << 30) / 1e6, rel=0.02)
