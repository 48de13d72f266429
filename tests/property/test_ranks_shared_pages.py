"""One rank keeps the pages of all: ranks decide alike, and no slot changes before all have read it.

Each rank ends its readings some steps later than its scheduler has done with them, by its own
chance, while DRAM is too small and pages come and go in it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.ranks.consensus import RankDivergenceError
from sglang_ext.ranks.lockstep import Lockstep
from sglang_ext.ranks.shared_promises import SharedBook
from sglang_ext.ranks.shared_readings import SharedReading, SharedReadings
from tests.property.test_ranks_lockstep import NUM_STEPS, run_worlds
from tests.property.worlds import rank_of_many, ranks_world
from tests.property.worlds.ranks_world import run_ranks
from tests.property.worlds.truncation_ranks import OneCopyRank

pytestmark = pytest.mark.usefixtures("quiet")

NUM_WORLDS = 40  # with a mistake, at most: the first mostly shows it
CASES = [
    (2, "timeout", True, False, False), (3, "wait_complete", True, False, False),
    (2, "best_effort", True, False, True), (2, "wait_complete", False, True, False),
    (3, "timeout", True, True, True),
]  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "policy", "lookahead", "remote", "changes"), CASES)
def test_ranks_load_what_one_of_them_keeps(
    num_ranks: int, policy: str, lookahead: bool, remote: bool, changes: bool, tmp_path: Path
) -> None:
    """Disks fail, pages are damaged, weights change; readers are late, each by its own chance."""
    brought = "remote_promoted_pages" if remote else "promoted_pages"
    shown = ["admitted", "held", "loaded", "last page", "saved", "cleared", "failed"]
    shown += [f"rank 0: {name}" for name in (brought, "evicted_pages", "damaged_pages")]
    shown += [f"rank {rank}: loaded_pages" for rank in range(num_ranks)]
    seen: Counter[str] = Counter()

    def note(ranks: list[ranks_world.Rank]) -> None:
        kept, *others = (rank.store.stats() for rank in ranks)
        seen.update({f"rank 0: {name}": value for name, value in kept.items()})
        for number, stats in enumerate(others, 1):
            seen[f"rank {number}: loaded_pages"] += stats.get("loaded_pages", 0)
            assert stats["host_pages"] == stats["host_capacity_pages"] == 0
            assert not {"saved_pages", "promoted_pages", "evicted_pages"} & set(stats)
        # What one loads all load, in as many pages.
        assert len({rank.store.stats().get("loaded_pages", 0) for rank in ranks}) == 1

    run_worlds(
        tmp_path, seen, shown, note, num_ranks=num_ranks, policy=policy, lookahead=lookahead,
        remote=remote, changes=changes, shared=True,
    )  # fmt: skip


def find_in_worlds(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """See `run_until_found`."""

    def one(folder: Path, seed: int) -> None:
        folder.mkdir()
        run_ranks(
            folder, num_ranks=2, num_steps=NUM_STEPS, seed=seed, policy="wait_complete", shared=True
        )

    rank_of_many.run_until_found(one, folder, patch, num_worlds=NUM_WORLDS)


def test_pins_that_end_with_the_keepers_own_reading_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower rank would read another page than the one that it was promised."""
    ends = SharedReading.end

    def end_alone(self: SharedReading) -> None:
        ends(self)
        released = getattr(self, "release", None)
        if released is not None:
            released(self.slots)

    begins = SharedReadings.begin

    def begin(self: SharedReadings, slots: Any) -> SharedReading:
        reading = begins(self, slots)
        reading.release = self._release  # type: ignore[attr-defined]
        return reading

    def settle(self: SharedReadings, num_ended: int) -> None:
        for _ in range(num_ended):
            self._open.popleft()

    monkeypatch.setattr(SharedReading, "end", end_alone)
    monkeypatch.setattr(SharedReadings, "begin", begin)
    monkeypatch.setattr(SharedReadings, "settle", settle)
    with pytest.raises(AssertionError, match="a page changed while it was loaded"):
        find_in_worlds(tmp_path, monkeypatch)


def test_ranks_that_count_only_their_own_readings_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reduction of that count each takes its own for that of all."""

    def own_count(self: Any, rank: int, vector: np.ndarray) -> None:
        kept = vector[4] if len(vector) > 1000 else None
        reduce(self, rank, vector)
        if kept is not None:
            vector[4] = kept

    reduce = ranks_world.Wire.min_reduce
    monkeypatch.setattr(ranks_world.Wire, "min_reduce", own_count)
    with pytest.raises((RankDivergenceError, AssertionError)):
        find_in_worlds(tmp_path, monkeypatch)


def test_a_reader_that_is_not_told_where_pages_lie_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = SharedBook.tell_slots

    def tell(self: SharedBook, min_reduce: Any) -> None:
        tells(self, lambda vector: min_reduce(vector if self._keeps else vector.copy()))

    monkeypatch.setattr(SharedBook, "tell_slots", tell)
    with pytest.raises(RankDivergenceError, match="do not know where shared pages lie"):
        find_in_worlds(tmp_path, monkeypatch)


def test_ranks_that_load_differently_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings are counted by their order: one more on one rank must not go unnoticed."""
    takes_last = SharedBook.take_last

    def take_last(self: SharedBook, handle: Any, page_hash: bytes) -> Any:
        return takes_last(self, handle, page_hash) if self._keeps else None

    monkeypatch.setattr(SharedBook, "take_last", take_last)
    with pytest.raises(RankDivergenceError, match="do not hold the same waiting requests"):
        find_in_worlds(tmp_path, monkeypatch)


def run_cut(
    folder: Path, patch: pytest.MonkeyPatch, seed: int = 1, num_loads: int = 6
) -> list[OneCopyRank]:
    """Two ranks over SGLang's own tree, whose conversations overflow."""
    options = {"host_pages": 60, "device_pages": 100, "shared": {}}
    own = [{**options, "keeps": keeps} for keeps in (True, False)]
    return rank_of_many.run_worlds(
        OneCopyRank, folder, patch, seed=seed, num_loads=num_loads, own=own
    )


def run_mistaken(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """See `run_until_found`."""

    def one(folder: Path, seed: int) -> None:
        run_cut(folder, patch, seed, num_loads=1000)

    rank_of_many.run_until_found(one, folder, patch)


def test_prompts_that_are_cut_load_their_own_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank keeps is moved on all, and what is stored as their own is loaded."""
    ranks = run_cut(tmp_path, monkeypatch)
    pairs = zip(ranks[0].trace, ranks[1].trace, strict=True)
    assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
    keeper, reader = (rank.store.stats() for rank in ranks)
    assert reader["loaded_pages"] == keeper["loaded_pages"] - ranks[0].num_lost > 0
    assert keeper["moved_tokens"] == reader["moved_tokens"] > 0
    assert keeper["evicted_pages"] > 0 < ranks[0].counts["cleared"]
    assert all(rank.num_late for rank in ranks)


def test_a_reader_that_makes_a_prompt_of_what_it_was_not_told_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of no page, so what it says is that all are there."""

    def not_told(self: Lockstep, flags: Any) -> Any:
        agreed = everywhere(self, flags)
        return agreed if self._store.keeps_pages else flags

    everywhere = Lockstep.everywhere
    monkeypatch.setattr(Lockstep, "everywhere", not_told)
    with pytest.raises(RankDivergenceError, match="do not hold the same waiting requests"):
        run_mistaken(tmp_path, monkeypatch)


def test_pins_of_cut_prompts_that_end_too_early_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank tells of readings as ended when it has only begun them."""
    monkeypatch.setattr(SharedReadings, "num_ended", property(len))
    with pytest.raises(AssertionError, match="a page changed while it was read"):
        run_mistaken(tmp_path, monkeypatch)
