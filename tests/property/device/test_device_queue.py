"""The worlds of a long queue, of pairs and of late results, with real threads, on a device.

As `test_queue_lookahead.py`, `test_pairs_interleavings.py` and `test_late_results.py`, on the
simulated device, of which copies fail; no two accesses to a row, a buffer or a slot race. The long
form has more rounds in more worlds, and all mistakes in the order that these worlds can meet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.long_form import count
from tests.property.device import mistakes
from tests.property.device.cache_on_device import (
    BranchesOnDevice,
    CacheOnDevice,
    LateOnDevice,
    PairsOnDevice,
    QueueOnDevice,
    require_found,
)
from tests.property.device.mistakes import Mutation
from tests.property.worlds.coverage import missing, run_until_all_seen

ROUNDS = count(1, 10)  # of 250 steps, and on until all is seen
Make = Callable[[Path, pytest.MonkeyPatch, int], CacheOnDevice]
QUEUES: dict[str, dict[str, Any]] = {
    "write_through": {},
    "write_back": {"policy": "write_back"},
    "cost": {"prefetch_policy": "cost", "policy": "auto", "disk_bytes": 256 << 10},
    "no-disk": {"with_disk": False},
}
FOUND_IN_ALL = (
    mistakes.forwards_not_awaited,
    mistakes.forward_stream_not_awaited,
    mistakes.copies_not_awaited,
    mistakes.restored_page_not_awaited,
    mistakes.pins_of_a_restored_page_given_back,
    mistakes.saves_not_awaited,
    mistakes.saved_before_it_was_written,
    mistakes.forward_not_awaited_by_saves,
    mistakes.sent_before_it_was_laid_out,
    mistakes.sent_before_it_was_restored,
    mistakes.scheduler_waits,
)


def queue(name: str) -> Make:
    """Makes queues of a kind."""
    return lambda folder, patch, seed: QueueOnDevice(folder, patch, seed, **QUEUES[name])


def pairs(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> CacheOnDevice:
    """Requests with a draft; every other server has a disk."""
    return PairsOnDevice(folder, patch, seed, lossy=False, with_disk=not seed % 2, of_pairs=True)


def late(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> CacheOnDevice:
    """Requests with a draft, of which each result is processed behind the next launch."""
    return LateOnDevice(folder, patch, seed, with_disk=not seed % 2, of_pairs=True)


def branches(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> CacheOnDevice:
    """The same with guesses that branch, of which the accepted ones are moved."""
    return BranchesOnDevice(folder, patch, seed, with_disk=not seed % 2, of_pairs=True)


MAKES: dict[str, Make] = {"queue": queue("write_through"), "pairs": pairs, "late": late}


def run(world: CacheOnDevice, *shown: str) -> None:
    """Rounds, each to the end of all that it began."""

    def one_round() -> None:
        for _ in range(250):
            world.step()
        world.drain()

    def unseen() -> list[str]:
        seen = {**world.store.stats(), **world.counts}
        return missing(seen, (*shown, "load_failures", "save_failures"))

    try:
        run_until_all_seen(one_round, unseen, num_rounds=ROUNDS)
        print(world.counts, world.device.counts, world.store.stats())
    finally:
        world.close()


@pytest.mark.sampled("write_through", "cost")
@pytest.mark.parametrize("name", QUEUES)
def test_nothing_is_read_or_written_out_of_order_in_a_queue(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = () if name == "no-disk" else ("promoted_pages",)
    run(queue(name)(tmp_path, monkeypatch, 2), "loaded_pages", "saved_pages", "abort", *brought)


@pytest.mark.sampled("2")
@pytest.mark.parametrize("seed", [2, 3])
def test_nothing_is_read_or_written_out_of_order_with_pairs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pairs(tmp_path, monkeypatch, seed), "loaded_pages", "saved_pages", "restored_pages")


@pytest.mark.sampled("2-late")
@pytest.mark.parametrize("make", [late, branches], ids=["late", "branches"])
@pytest.mark.parametrize("seed", [2, 3])
def test_nothing_is_read_or_written_out_of_order_behind_late_results(
    seed: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ("loaded_pages", "saved_pages", "restored_pages")
    happened = ("ends with wrong guesses in flight", "retracts in flight")
    run(make(tmp_path, monkeypatch, seed), *shown, *happened)


@mistakes.may_end_a_thread
@pytest.mark.sampled("sent_before_it_was_restored-*", "forwards_not_awaited-*")
@pytest.mark.parametrize(
    "make", [queue("write_through"), pairs, late], ids=["queue", "pairs", "late"]
)
@pytest.mark.parametrize("mutate", FOUND_IN_ALL)
def test_a_mistake_in_the_order_is_found(
    mutate: Mutation, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch)
    require_found(lambda seed: make(tmp_path / str(seed), monkeypatch, seed))
