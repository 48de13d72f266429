"""Why a page cannot be had: what the page store remembers of those that it lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.store import Absence
from sglang_ext.tiers.store.books.lost_pages import LostPages
from tests.unit.store.store_rig import OTHER, Make, fill, on_disk_only, pages, rigs

NUMBER = np.zeros(1, np.uint32)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def why(rig: object, hashes: np.ndarray, **more: object) -> list[Absence]:
    found = rig.store.absences(rig.space, hashes, **more)  # type: ignore[attr-defined]
    return [Absence(each) for each in found.tolist()]


def test_what_is_stored_and_what_never_was(make: Make) -> None:
    rig = make()
    a, b = pages("a", 2), pages("b", 1)
    rig.save(a)
    assert why(rig, np.concatenate([a, b])) == [0, 0, Absence.NEVER_STORED]
    on_disk_only(rig, pages("c", 1))
    assert why(rig, pages("c", 1)) == [Absence.STORED]


def test_the_tier_that_lost_a_page_is_named(make: Make) -> None:
    rig = make(disk=False)
    a = pages("a", 4)
    rig.save(a)
    rig.save(pages("b", 8))
    assert why(rig, a) == [Absence.EVICTED_HOST] * 4
    rig.save(a)  # it is stored again
    assert why(rig, a) == [Absence.STORED] * 4


def test_the_disk_is_named_where_it_had_the_last_copy(make: Make) -> None:
    rig = make()
    a = pages("a", 3)
    on_disk_only(rig, a)
    rig.books.disk.drop_segment(int(segment_of(rig, a[0])))
    assert why(rig, a[:1]) == [Absence.EVICTED_DISK]


def segment_of(rig: object, page: np.ndarray) -> int:
    index = rig.books.table.index  # type: ignore[attr-defined]
    row = index.lookup(page[None], rig.space.number)[0]  # type: ignore[attr-defined]
    return int(index.segment[row])


def test_cleared_damaged_and_failed_pages_are_told_apart(make: Make) -> None:
    rig = make()
    a, b, c = pages("a", 2), pages("b", 2), pages("c", 2)
    rig.save(a)
    rig.settle()
    rig.store.clear()
    rig.save(b, ok=False)
    rig.save(c)
    ticket = rig.store.pin_ready(rig.space, c)
    assert ticket is not None
    rig.store.drop_damaged(ticket, np.array([0]))
    rig.store.release(ticket.slots)
    assert why(rig, a) == [Absence.CLEARED] * 2
    assert why(rig, b) == [Absence.NOT_SAVED] * 2
    assert why(rig, c) == [Absence.UNREADABLE, Absence.STORED]


def test_a_save_without_room_is_remembered(make: Make) -> None:
    rig = make(disk=False)
    ticket = rig.store.begin_save(rig.space, pages("a", 8), pages("none", 0))  # pins all of DRAM
    assert rig.save(pages("b", 2)) == 0
    for row, slot in zip(ticket.hashes, ticket.slots.tolist(), strict=True):
        fill(rig.arena.slots[slot], row.tobytes(), rig.space)
    rig.store.finish_save(ticket, ok=True)
    assert why(rig, pages("b", 2)) == [Absence.NOT_SAVED] * 2


def test_other_weights_pages_are_seen_as_far_as_they_go(make: Make) -> None:
    rig = make()
    rig.store.open_namespace(OTHER, {})
    other = rig.store.space(OTHER)
    a = pages("a", 4)
    rig.save(a[:3], space=other)
    assert why(rig, a) == [Absence.OTHER_NAMESPACE] * 3 + [Absence.NEVER_STORED]


def test_a_page_that_is_not_good_enough_is_named(make: Make) -> None:
    rig = make()
    a = pages("a", 2)
    ticket = rig.store.begin_save(rig.space, a, a[:0], np.array([0, 1], np.uint8))
    for row, slot in zip(ticket.hashes, ticket.slots.tolist(), strict=True):
        fill(rig.arena.slots[slot], row.tobytes(), rig.space)
    rig.store.finish_save(ticket, ok=True)
    assert why(rig, a) == [Absence.STORED] * 2
    assert why(rig, a, max_quality=0) == [Absence.STORED, Absence.NOT_EXACT]


def test_memory_is_bounded_and_most_of_one_turnover_is_remembered() -> None:
    num = 1 << 14
    lost = LostPages(num)
    size, rng = lost.nbytes, np.random.default_rng(3)
    first = rng.integers(0, 256, (num, 32), np.uint8)
    lost.note(first, np.repeat(NUMBER, num), Absence.EVICTED_HOST)
    later = rng.integers(0, 256, (num, 32), np.uint8)
    lost.note(later, np.repeat(NUMBER, num), Absence.EVICTED_DISK)
    assert (lost.why(first, 0) == Absence.EVICTED_HOST).mean() > 0.65
    assert (lost.why(later, 0) == Absence.EVICTED_DISK).mean() > 0.8
    # Of other key spaces, and of pages that were never lost, nothing is claimed.
    assert (lost.why(first, 1) == Absence.NEVER_STORED).all()
    assert (lost.why(rng.integers(0, 256, (num, 32), np.uint8), 0) == Absence.NEVER_STORED).all()
    assert lost.nbytes == size == 8 * 4 * num
    assert LostPages(1 << 29).nbytes == 32 << 20


def test_reasons_survive_in_any_order_of_a_row() -> None:
    lost, names = LostPages(8), pages("a", 6)
    for number, reason in enumerate(list(Absence)[2:7]):
        lost.note(names[number : number + 1], NUMBER, reason)
    assert lost.why(names, 0).tolist() == [2, 3, 4, 5, 6, Absence.NEVER_STORED]
