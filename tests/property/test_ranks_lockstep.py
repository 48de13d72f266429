"""Ranks over stores of their own decide alike, whatever their disks and clocks do.

By default each kind of world runs once; the long form has more of those whose weights change.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.ranks.consensus import RankDivergenceError
from sglang_ext.ranks.promises import PromiseBook
from sglang_ext.ranks.stages import StagedLockstep
from sglang_ext.tiers.store import LivePages, gate
from sglang_ext.tiers.store.gate import Gate
from tests.long_form import count
from tests.property.worlds import ranks_world
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.rank_of_many import run_until_found
from tests.property.worlds.ranks_world import run_ranks

pytestmark = pytest.mark.usefixtures("quiet")

NUM_STEPS = 200
COST_COUNTERS = (
    "cost_load",
    "cost_recompute",
    "cost_limited",
    "cost_gave_up",
    "cost_dram_left_pages",
)
CASES = [
    (2, "timeout", True, False), (3, "timeout", False, False), (2, "wait_complete", False, False),
    (3, "wait_complete", True, False), (2, "best_effort", True, False),
    (2, "timeout", True, True), (3, "wait_complete", True, True), (2, "wait_complete", False, True),
    (2, "cost", True, False), (3, "cost", True, True), (2, "cost", False, False),
]  # fmt: skip


@pytest.mark.sampled(
    "2-best_effort-*",
    "2-timeout-True-True",
    "2-wait_complete-False-True",
    "3-cost-True-True",
)
@pytest.mark.parametrize(("num_ranks", "policy", "lookahead", "remote"), CASES)
def test_ranks_decide_alike(
    num_ranks: int,
    policy: str,
    lookahead: bool,
    remote: bool,
    tmp_path: Path,
) -> None:
    """What is not in DRAM lies on a disk of each rank's own, or in its remote store."""
    shown = ["admitted", "held", "loaded", "last page", "saved", "cleared", "failed"]
    brought = "remote_promoted_pages" if remote else "promoted_pages"
    shown += [
        f"rank {rank}: {counter}"
        for rank in range(num_ranks)
        for counter in (brought, "evicted_pages", "damaged_pages", "loaded_pages")
    ]
    if policy == "timeout":
        shown.append("prefetch_timeouts")
    if policy == "cost":
        shown += COST_COUNTERS
    seen: Counter[str] = Counter()

    def note(ranks: list[ranks_world.Rank]) -> None:
        for number, rank in enumerate(ranks):
            stats = rank.store.stats()
            for name in ("prefetch_timeouts", *COST_COUNTERS):
                seen[name] += stats.get(name, 0)
            seen.update({f"rank {number}: {name}": value for name, value in stats.items()})

    run_worlds(
        tmp_path, seen, shown, note, num_ranks=num_ranks, policy=policy, lookahead=lookahead,
        remote=remote,
    )  # fmt: skip


def run_worlds(
    folder: Path,
    seen: Counter[str],
    shown: Sequence[str],
    note: Callable[[list[ranks_world.Rank]], None] = lambda ranks: None,
    *,
    seed: int = 1,
    num_steps: int = NUM_STEPS,
    **settings: Any,
) -> None:
    """Runs worlds of ranks, which have to decide alike, until all that is to be shown was seen.

    Args:
        folder: for the worlds' own.
        seen: gets the first rank's counts of each world.
        shown: names among them.
        note: looks at the ranks of each world.
        seed: of the first world; each further one has the next.
        num_steps: of a world.
        settings: of `run_ranks`.
    """
    seeds = itertools.count(seed)

    def one_world() -> None:
        seed = next(seeds)
        own = folder / str(seed)
        own.mkdir()
        ranks, wire = run_ranks(own, num_steps=num_steps, seed=seed, **settings)
        check_alike(ranks)
        assert len(set(wire.rounds)) == 1
        seen.update(ranks[0].counts)
        note(ranks)

    run_until_all_seen(one_world, lambda: missing(seen, tuple(shown)), num_rounds=1)
    print(seen)


def check_alike(ranks: list[ranks_world.Rank]) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        pairs = zip(first.trace, rank.trace, strict=False)
        different = [pair for pair in pairs if pair[0] != pair[1]]
        assert not different, different[0]
        assert len(rank.trace) == len(first.trace)


WEIGHT_CASES = [
    (2, "timeout", True, False), (2, "wait_complete", False, True), (1, "timeout", True, False),
]  # fmt: skip
# So many worlds of each kind.
NUM_SEEDS = count(1, 20)


@pytest.mark.parametrize("seed", range(1, NUM_SEEDS + 1))
@pytest.mark.parametrize(("num_ranks", "policy", "lookahead", "remote"), WEIGHT_CASES)
def test_no_page_meets_other_weights_than_those_that_made_it(
    num_ranks: int,
    policy: str,
    lookahead: bool,
    remote: bool,
    seed: int,
    tmp_path: Path,
) -> None:
    """Weights and an adapter change at any point; what reaches the device is checked at once."""

    def note(ranks: list[ranks_world.Rank]) -> None:
        for rank in ranks:
            assert "stale_load_pages" not in rank.store.stats()  # all was dropped before

    run_worlds(
        tmp_path, Counter(), ("loaded",), note, seed=seed, num_steps=2 * NUM_STEPS,
        num_ranks=num_ranks, policy=policy, lookahead=lookahead, remote=remote, changes=True,
    )  # fmt: skip


UPDATES: dict[str, Any] = {
    "num_ranks": 2, "num_steps": 2 * NUM_STEPS, "policy": "wait_complete", "changes": True,
}  # fmt: skip


def test_the_gate_alone_turns_stale_promises_into_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that forgets to drop a promise costs a hit, on all ranks alike; never a token."""

    def forgets(self: Any) -> None:
        self.quiesce()
        self.store.end_epoch()

    monkeypatch.setattr(ranks_world.Rank, "weights_change", forgets)
    run_worlds(tmp_path, Counter(), ("loaded",), **UPDATES)


def test_promises_that_outlive_their_weights_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promises that are neither dropped nor compared bring KV of other weights to the device."""
    num_promised = PromiseBook.num_promised

    def of_any_space(self: Any, handle: Any, space: Any, device_pages: int) -> int:
        promise = self._promises.get(handle)
        space = space if promise is None else promise.prefix.space
        return num_promised(self, handle, space, device_pages)

    monkeypatch.setattr(ranks_world.Rank, "weights_change", lambda self: self.quiesce())
    monkeypatch.setattr(PromiseBook, "num_promised", of_any_space)
    monkeypatch.setattr(Gate, "load", lambda self, ticket, space: LivePages(ticket, gate._KEY))
    monkeypatch.setattr(ranks_world, "WAIT_S", 5.0)
    assert any(brings_other_weights(tmp_path / str(seed), seed) for seed in range(1, 41))


def brings_other_weights(folder: Path, seed: int) -> bool:
    """Whether a world notices it; which promise is stale just then is a matter of threads, too."""
    folder.mkdir()
    try:
        run_ranks(folder, seed=seed, **UPDATES)
    except AssertionError as error:
        return "KV of other weights" in str(error)
    except (RankDivergenceError, threading.BrokenBarrierError):
        pass
    return False


def test_ranks_that_promise_what_they_have_themselves_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reduction the same worlds diverge."""

    def not_reduced(self: Any, rank: int, vector: np.ndarray) -> None:
        kept = vector.copy()
        reduce(self, rank, vector)
        # All but the history, which the ranks do share until they diverge.
        vector[2:] = kept[2:]

    reduce = ranks_world.Wire.min_reduce
    monkeypatch.setattr(ranks_world.Wire, "min_reduce", not_reduced)
    with pytest.raises((RankDivergenceError, AssertionError, IndexError)):
        find_in_worlds(tmp_path, monkeypatch, num_ranks=2, policy="timeout")


def find_in_worlds(folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Runs worlds of ranks with a mistake, which decide differently; see `run_until_found`."""

    def one(folder: Path, seed: int) -> None:
        folder.mkdir()
        check_alike(run_ranks(folder, num_steps=NUM_STEPS, seed=seed, **settings)[0])

    run_until_found(one, folder, patch)


def test_ranks_that_load_what_is_worth_it_to_themselves_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank would use is not what all of them were promised."""

    def num_promised(self: Any, handle: Any, space: Any, device_pages: int) -> int:
        most: int = self._room.most_pages(handle, device_pages) - device_pages
        num: int = promised(self, handle, space, device_pages)
        return max(0, min(num, most))

    promised = PromiseBook.num_promised
    monkeypatch.setattr(PromiseBook, "num_promised", num_promised)
    with pytest.raises((RankDivergenceError, AssertionError)):
        find_in_worlds(tmp_path, monkeypatch, num_ranks=2, policy="cost")


@pytest.mark.sampled("2")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_requests_do_not_wait_for_each_others_room(
    num_stages: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where plans may pin little, requests wait for room, here for this one's, there for that's."""
    monkeypatch.setattr(ranks_world, "NUM_SLOTS", 10)
    seen: Counter[str] = Counter()

    def note(ranks: list[ranks_world.Rank]) -> None:
        for rank in ranks:
            seen["plans_short"] += rank.store.stats().get("plans_short", 0)

    run_worlds(
        tmp_path, seen, ("plans_short",), note, seed=6, num_ranks=2, policy="wait_complete",
        failure=0.02, num_stages=num_stages,
    )  # fmt: skip


STAGE_CASES = [
    (2, 2, "timeout", True, False), (3, 3, "wait_complete", True, False),
    (4, 2, "timeout", False, False), (5, 5, "best_effort", True, False),
    (2, 2, "wait_complete", False, True), (4, 4, "timeout", False, True),
]  # fmt: skip


@pytest.mark.sampled(
    "3-3-wait_complete-True-False",
    "4-2-timeout-False-False",
    "2-2-wait_complete-False-True",
)
@pytest.mark.parametrize(("num_ranks", "num_stages", "policy", "changes", "remote"), STAGE_CASES)
def test_stages_decide_alike_in_steps_that_lie_apart(
    num_ranks: int,
    num_stages: int,
    policy: str,
    changes: bool,
    remote: bool,
    tmp_path: Path,
) -> None:
    """None waits for a later one in the same step, and pages are what the weights of now make.

    What is not in DRAM lies on a disk of each rank's own, or in its remote store.
    """
    brought = "remote_promoted_pages" if remote else "promoted_pages"
    shown = ["admitted", "held", "loaded", "last page", "saved", "cleared"]
    shown += [f"rank {rank}: {brought}" for rank in range(num_ranks)]
    seen: Counter[str] = Counter()

    def note(ranks: list[ranks_world.Rank]) -> None:
        for number, rank in enumerate(ranks):
            seen[f"rank {number}: {brought}"] += rank.store.stats().get(brought, 0)

    run_worlds(
        tmp_path, seen, shown, note, num_ranks=num_ranks, policy=policy, changes=changes,
        remote=remote, num_stages=num_stages,
    )  # fmt: skip


@pytest.mark.sampled("3")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_that_take_a_round_a_step_sooner_wait_for_each_other(
    num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = StagedLockstep.step

    def sooner(self: StagedLockstep) -> Any:
        self._steps_a_round = num_stages - 2
        if self._steps_a_round:
            return begins(self)
        self._take(self._begin())
        return []

    monkeypatch.setattr(StagedLockstep, "step", sooner)
    monkeypatch.setattr(ranks_world, "WAIT_S", 1.0)
    with pytest.raises(threading.BrokenBarrierError, match="wait for each other"):
        run_ranks(
            tmp_path, num_ranks=num_stages, num_steps=20, seed=1, policy="timeout",
            num_stages=num_stages,
        )  # fmt: skip


def test_stages_keep_what_they_told_of_until_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pins are given back in between, a promise is of pages that are gone: it ends there."""

    def forgets(self: StagedLockstep) -> Any:
        for promise in self.promises._open.values():
            self.promises._keep(promise, promise.first_page, promise.first_page)
        return steps(self)

    steps = StagedLockstep.step
    monkeypatch.setattr(StagedLockstep, "step", forgets)

    with pytest.raises(RankDivergenceError, match="does not hold"):
        find_in_worlds(tmp_path, monkeypatch, num_ranks=2, policy="timeout", num_stages=2)
