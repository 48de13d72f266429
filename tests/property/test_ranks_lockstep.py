"""Ranks over stores of their own decide alike, whatever their disks and clocks do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.consensus import RankDivergenceError
from tests.property import ranks_world
from tests.property.ranks_world import run_ranks

NUM_STEPS = 200
CASES = [
    (2, "timeout", True, False), (3, "timeout", False, False), (2, "wait_complete", False, False),
    (3, "wait_complete", True, False), (2, "best_effort", True, False),
    (2, "timeout", True, True), (3, "wait_complete", True, True), (2, "wait_complete", False, True),
]  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "policy", "lookahead", "remote"), CASES)
def test_ranks_decide_alike(
    num_ranks: int,
    policy: str,
    lookahead: bool,
    remote: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is not in DRAM lies on a disk of each rank's own, or in its remote store."""
    caplog.set_level(logging.CRITICAL)  # many injected failures
    ranks, wire = run_ranks(
        tmp_path, num_ranks=num_ranks, num_steps=NUM_STEPS, seed=1, policy=policy,
        lookahead=lookahead, remote=remote,
    )  # fmt: skip
    first = ranks[0]
    for rank in ranks[1:]:
        different = [
            pair for pair in zip(first.trace, rank.trace, strict=False) if pair[0] != pair[1]
        ]
        assert not different, different[0]
        assert len(rank.trace) == len(first.trace)
    print(first.counts, [rank.store.stats() for rank in ranks])
    assert len(set(wire.rounds)) == 1
    for kind in ("admitted", "held", "loaded", "last page", "saved", "cleared", "failed"):
        assert first.counts.get(kind, 0) > 0, f"{kind} never happened"
    if policy == "timeout":
        assert sum(rank.store.stats().get("prefetch_timeouts", 0) for rank in ranks) > 0
    for rank in ranks:
        stats = rank.store.stats()
        brought = "remote_promoted_pages" if remote else "promoted_pages"
        for counter in (brought, "evicted_pages", "damaged_pages", "loaded_pages"):
            assert stats.get(counter, 0) > 0, (counter, stats)


def test_ranks_that_promise_what_they_have_themselves_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the reduction the same world diverges."""
    caplog.set_level(logging.CRITICAL)

    def not_reduced(self: Any, rank: int, vector: np.ndarray) -> None:
        kept = vector.copy()
        reduce(self, rank, vector)
        # All but the history, which the ranks do share until they diverge.
        vector[2:] = kept[2:]

    reduce = ranks_world.Wire.min_reduce
    monkeypatch.setattr(ranks_world.Wire, "min_reduce", not_reduced)
    monkeypatch.setattr(ranks_world, "WAIT_S", 5.0)
    with pytest.raises((RankDivergenceError, AssertionError, IndexError)):
        run_ranks(tmp_path, num_ranks=2, num_steps=NUM_STEPS, seed=1, policy="timeout")


def test_two_requests_do_not_wait_for_each_others_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where plans may pin little, requests wait for room, here for this one's, there for that's."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(ranks_world, "NUM_SLOTS", 10)
    ranks, _ = run_ranks(
        tmp_path, num_ranks=2, num_steps=NUM_STEPS, seed=6, policy="wait_complete", failure=0.02
    )
    assert ranks[0].trace == ranks[1].trace
    assert sum(rank.store.stats().get("plans_short", 0) for rank in ranks) > 0
