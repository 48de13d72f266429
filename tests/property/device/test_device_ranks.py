"""Ranks on a simulated device, with their real threads, stores and disks: nothing races.

As `test_truncation_ranks.py`, `test_ranks_lockstep.py` and `test_ranks_shared_pages.py`. Where one
rank keeps the pages of all, a slot may change only behind what the slowest rank's device has read,
and what ranks told each other is all that orders that. The long form has more worlds, and more
mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.ranks.shared_readings import SharedReadings
from testkit.simulated.device import ConflictError
from tests.long_form import count
from tests.property.device import mistakes
from tests.property.device.ranks_on_device import (
    OneCopyOnDevice,
    RankOnDevice,
    StoreRankOnDevice,
    device_of_ranks,
)
from tests.property.test_ranks_lockstep import NUM_STEPS, check_alike
from tests.property.worlds import rank_of_many, ranks_world

SEEDS = count(1, 10)
LOADS = count(2, 30)  # with moved tokens, of ranks whose conversations overflow
# Threads decide how many loads a world comes to: the same one had 28 and 59 in 20 rounds.
ROUNDS = count(20, 60)
MAX_WORLDS = 20  # with a mistake, at most
SHORT_WAIT_S = 10.0  # for what a mistake keeps from coming
Run = Callable[[Path, pytest.MonkeyPatch, int], list[Any]]


def run_cut(
    folder: Path,
    patch: pytest.MonkeyPatch,
    seed: int,
    *,
    kind: type[RankOnDevice],
    own: list[dict[str, Any]],
    **options: Any,
) -> list[Any]:
    """Ranks over SGLang's own tree, whose conversations overflow."""
    with device_of_ranks(seed) as device:
        mine = [{**options, **more, "number": at, "device": device} for at, more in enumerate(own)]
        return rank_of_many.run_worlds(
            kind, folder, patch, seed=seed, num_loads=LOADS, max_rounds=ROUNDS, own=mine
        )


def run_own(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> list[Any]:
    """Each has pages of its own."""
    own = [{"host_pages": 300}, {"host_pages": 90}]
    return run_cut(folder, patch, seed, kind=RankOnDevice, own=own, device_pages=100, lossy=False)


def run_one_copy(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> list[Any]:
    """The first keeps the pages of both."""
    own: list[dict[str, Any]] = [{"keeps": True}, {"keeps": False}]
    sizes = {"host_pages": 60, "device_pages": 100}
    return run_cut(folder, patch, seed, kind=OneCopyOnDevice, own=own, shared={}, **sizes)


def run_stores(folder: Path, patch: pytest.MonkeyPatch, seed: int, *, shared: bool) -> list[Any]:
    """Ranks of stores alone."""
    folder.mkdir(exist_ok=True)
    with device_of_ranks(seed) as device:
        ranks, _ = ranks_world.run_ranks(
            folder, num_ranks=2, num_steps=NUM_STEPS, seed=seed, policy="timeout", shared=shared,
            kind=partial(StoreRankOnDevice, device=device),
        )  # fmt: skip
    return ranks


RUNS: dict[str, Run] = {
    "own": run_own,
    "one copy": run_one_copy,
    "stores": partial(run_stores, shared=False),
    "one store": partial(run_stores, shared=True),
}


@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_read_or_written_out_of_order(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = RUNS[name](tmp_path, monkeypatch, seed)
    check_alike(ranks)
    print(name, seed, ranks[0].counts, [rank.store.stats() for rank in ranks])
    assert all(rank.store.stats()["loaded_pages"] for rank in ranks)


def readings_end_when_they_begin(patch: pytest.MonkeyPatch) -> None:
    """Each rank tells of readings as over when its device may still read."""
    patch.setattr(SharedReadings, "num_ended", property(len))


def keeper_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """What the keeper itself has begun to read it takes for read by all."""

    def begin(self: SharedReadings, slots: Any) -> Any:
        reading = begins(self, slots)
        self._release(slots)
        return reading

    def settle(self: SharedReadings, num_ended: int) -> None:
        for _ in range(num_ended):
            self._open.popleft()

    begins = SharedReadings.begin
    patch.setattr(SharedReadings, "begin", begin)
    patch.setattr(SharedReadings, "settle", settle)


SHARED = [readings_end_when_they_begin, keeper_does_not_wait]
FOUND = [
    *(("own", each) for each in (
        mistakes.saved_before_it_was_written, mistakes.forwards_not_awaited,
        mistakes.copies_not_awaited, mistakes.saves_not_awaited,
    )),
    ("stores", mistakes.pins_given_back_when_queued),
    *(("one copy", each) for each in SHARED),
    *(("one store", each) for each in SHARED),
]  # fmt: skip


@mistakes.may_end_a_thread
# With one copy the keeper's mistake shows in some worlds only, each of up to half a minute; with
# one store, as the readings' mistake with one copy, it does in the first.
@pytest.mark.sampled("own-saved_before*", "stores-*", "one copy-readings*", "one store-keeper*")
@pytest.mark.parametrize(
    ("name", "mutate"), FOUND, ids=[f"{name}-{each.__name__}" for name, each in FOUND]
)
def test_a_mistake_in_the_order_is_found(
    name: str, mutate: mistakes.Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    monkeypatch.setattr(ranks_world, "WAIT_S", SHORT_WAIT_S)
    for seed in range(1, 1 + MAX_WORLDS):
        try:
            RUNS[name](tmp_path / str(seed), monkeypatch, seed)
        except ConflictError:
            return
        except Exception:  # something else that the mistake breaks
            continue
    raise AssertionError("the mistake is not found")
