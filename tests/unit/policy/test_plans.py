"""Plans: what they pin, whose reads go first, what becomes of reads that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.base import ReadRequest
from sglang_ext.tiers.records.record import VerifyResult
from sglang_ext.tiers.store import Plan
from sglang_ext.tiers.store.movers.piece_size import PieceSize
from sglang_ext.tiers.store.types import FILLING, ON_DISK
from tests.unit.store.store_rig import Make, Rig, check_content, on_disk_only, pages, rigs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


class Reads:
    """Notes which reads begin, in order, a page at a time, and holds them until `go`."""

    def __init__(self, rig: Rig) -> None:
        self.order: list[int] = []  # rows
        self.gate = threading.Event()
        promoter, disk = rig.store._promoter, rig.disk
        assert promoter is not None
        assert disk is not None
        choose, read = promoter._next, disk.read

        def noted() -> Any:  # called under the promoter's lock
            chosen = choose()
            self.order += chosen.rows.tolist() if chosen is not None else []
            return chosen

        def held(digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
            self.gate.wait(300)
            return read(digest, requests)

        promoter._next = noted  # type: ignore[method-assign]
        disk.read = held  # type: ignore[method-assign]
        promoter._piece = PieceSize(1.0, 1, 1)  # a page
        self._rig, self._promoter = rig, promoter

    def until_begun(self, num_left: int) -> None:
        """Both threads hold a read, and so many wait."""
        left = self._promoter._reads
        self._rig.until(lambda: sum(len(reads) for reads in list(left.values())) == num_left)

    def go(self) -> None:
        self.gate.set()


def plan(rig: Rig, hashes: np.ndarray, priority: int = 0) -> Plan:
    made = rig.store.plan(rig.space, hashes, priority=priority)
    assert made is not None
    return made


def test_a_page_that_plans_share_counts_once(make: Make) -> None:
    rig = make(slots=16)
    chain = pages("a", 8)
    on_disk_only(rig, chain)
    first = plan(rig, chain[:6])
    second = plan(rig, chain)
    assert rig.books.pins.num_pages == 8
    assert not second.short
    rig.wait(second)
    rig.store.cancel_plan(first)
    assert rig.books.pins.num_pages == 8
    rig.store.cancel_plan(second)
    assert rig.books.pins.num_pages == 0
    rig.settle()


def test_a_short_plan_pins_nothing_behind_its_end(make: Make) -> None:
    rig = make(slots=8)
    chain = pages("a", 4)
    on_disk_only(rig, chain)
    end = plan(rig, chain[2:])
    rig.wait(end)
    rig.store.cancel_plan(end)
    rig.settle()
    fillers = [rig.store.pin_ready(rig.space, pages("filler", 8)[n : n + 1]) for n in range(8)]
    short = plan(rig, chain)  # the first two find no slot
    assert short.starved
    rows = rig.books.table.index.lookup(chain[2:], 0)
    assert not rig.arena.pinned(rig.books.table.index.host_slot[rows]).any()
    rig.store.cancel_plan(short)
    for ticket in fillers:
        if ticket is not None:
            rig.store.release(ticket.slots)
    rig.settle()


def test_reads_of_the_head_of_the_queue_overtake_those_behind(make: Make) -> None:
    rig = make(slots=32)
    tail, head = pages("tail", 6), pages("head", 4)
    on_disk_only(rig, np.concatenate([tail, head]))
    reads = Reads(rig)
    behind = plan(rig, tail, priority=5)
    reads.until_begun(4)
    before = plan(rig, head, priority=1)
    reads.go()
    rig.wait(before)
    rig.wait(behind)
    rows = rig.books.table.index.lookup(head, 0)
    assert reads.order[2:6] == rows.tolist()
    rig.store.cancel_plan(before)
    rig.store.cancel_plan(behind)
    rig.settle()
    check_content(rig, head)


def test_a_changed_place_in_the_queue_counts_for_reads_that_wait(make: Make) -> None:
    rig = make(slots=32)
    one, two = pages("one", 5), pages("two", 3)
    on_disk_only(rig, np.concatenate([one, two]))
    reads = Reads(rig)
    first, second = plan(rig, one, priority=0), plan(rig, two, priority=1)
    reads.until_begun(6)
    first.priority, second.priority = 1, 0
    reads.go()
    rig.wait(first)
    rig.wait(second)
    assert reads.order[2:5] == rig.books.table.index.lookup(two, 0).tolist()
    rig.store.cancel_plan(first)
    rig.store.cancel_plan(second)
    rig.settle()


def test_reads_that_nobody_waits_for_are_given_up(make: Make) -> None:
    rig = make(slots=16)
    chain = pages("a", 6)
    on_disk_only(rig, chain)
    reads = Reads(rig)
    given_up = plan(rig, chain)
    reads.until_begun(4)
    rig.store.cancel_plan(given_up)
    assert rig.count("withdrawn_pages") == 4
    rows = rig.books.table.index.lookup(chain, 0)
    flags = rig.books.table.index.flags[rows]
    assert ((flags & FILLING) != 0).tolist() == [True, True, False, False, False, False]
    assert ((flags & ON_DISK) != 0).all()
    reads.go()
    rig.settle()
    assert len(reads.order) == 2
    again = plan(rig, chain)
    rig.wait(again)
    check_content(rig, chain)
    rig.store.cancel_plan(again)
    rig.settle()


def test_reads_that_another_waits_for_become_its_own(make: Make) -> None:
    rig = make(slots=16)
    chain = pages("a", 6)
    on_disk_only(rig, chain)
    reads = Reads(rig)
    first = plan(rig, chain)
    reads.until_begun(4)
    second = plan(rig, chain[:4], priority=7)
    rig.store.cancel_plan(first)
    assert rig.count("withdrawn_pages") == 2
    reads.go()
    rig.wait(second)
    assert not second.failed
    assert rig.ready(chain) == 4
    check_content(rig, chain[:4])
    rig.store.cancel_plan(second)
    rig.settle()


def test_a_read_given_up_after_its_segment_went_leaves_nothing(make: Make) -> None:
    rig = make(slots=16)
    chain = pages("a", 4)
    on_disk_only(rig, chain)
    reads = Reads(rig)
    found = plan(rig, chain)
    reads.until_begun(2)
    segment = int(rig.books.table.index.segment[rig.books.table.index.lookup(chain, 0)[0]])
    rig.books.disk.drop_segment(segment)
    rig.store.cancel_plan(found)
    reads.go()
    rig.settle()
    assert rig.store.locate_prefix(rig.space, chain[2:]).total == 0


def test_clearing_under_reads_that_are_given_up(make: Make) -> None:
    rig = make(slots=16)
    chain = pages("a", 6)
    on_disk_only(rig, chain)
    reads = Reads(rig)
    found = plan(rig, chain)
    reads.until_begun(4)
    rig.store.clear()
    rig.save(pages("b", 6))  # may take the same rows
    rig.store.cancel_plan(found)
    reads.go()
    rig.settle()
    assert rig.ready(pages("b", 6)) == 6
    check_content(rig, pages("b", 6))


def test_what_waits_leaves_dram_last_and_the_end_of_the_queue_first(make: Make) -> None:
    rig = make(slots=12, lookahead=True)
    assert rig.store.lookahead is not None
    for name in "abc":
        rig.save(pages(name, 4))
    rig.settle()
    for name in "ab":
        found = rig.store.lookahead.expect(name, rig.space, pages(name, 4), 0)
        assert found.host == 4
    rig.store.lookahead.set_order(["a", "b"])
    rig.save(pages("d", 4))
    assert [rig.ready(pages(name, 4)) for name in "abcd"] == [4, 4, 0, 4]
    rig.settle()
    rig.save(pages("e", 4))
    assert [rig.ready(pages(name, 4)) for name in "abcde"] == [4, 4, 0, 0, 4]
    rig.settle()
    rig.save(pages("f", 8))
    assert rig.count("evicted_wanted_pages") == 4
    assert [rig.ready(pages(name, 4)) for name in "abe"] == [4, 0, 0]
    rig.store.lookahead.leave("a")
    rig.store.lookahead.leave("b")
    rig.settle()


@pytest.mark.parametrize("disk", [True, False])
def test_wanted_pages_are_lost_when_they_leave_dram_for_no_other_tier(
    make: Make, disk: bool
) -> None:
    rig = make(slots=12, lookahead=True, disk=disk)
    assert rig.store.lookahead is not None
    rig.save(pages("a", 4))
    rig.settle()
    rig.store.lookahead.expect("a", rig.space, pages("a", 4), 0)
    rig.store.lookahead.set_order(["a"])
    rig.save(pages("filler", 12))
    num_left = 4 - rig.ready(pages("a", 4))
    assert rig.count("evicted_wanted_pages") == num_left > 0
    assert rig.count("lost_wanted_pages") == (0 if disk else num_left)
    rig.store.lookahead.leave("a")
    rig.settle()


def test_rows_of_pages_that_left_are_wanted_no_more(make: Make) -> None:
    """Their numbers go to other pages, which nobody waits for."""
    rig = make(slots=16, disk=False, lookahead=True, index=16)
    assert rig.store.lookahead is not None
    rig.save(pages("a", 4))
    rig.store.lookahead.expect("a", rig.space, pages("a", 4), 0)
    rig.store.lookahead.set_order(["a"])
    old = rig.books.table.index.lookup(pages("a", 4), 0)
    assert rig.books.table.policy is not None
    assert rig.books.table.policy.wanted(old).all()
    rig.store.clear()
    rig.save(pages("b", 16))
    new = rig.books.table.index.lookup(pages("b", 16), 0)
    assert set(old.tolist()) <= set(new.tolist())
    assert not rig.books.table.policy.wanted(new).any()
    rig.settle()


def test_saves_leave_slots_free_for_promotions(make: Make) -> None:
    rig = make(slots=64, lookahead=True)
    on_disk_only(rig, pages("a", 2))
    rig.io.open_gate.clear()  # nothing more gets to disk, so nothing more may leave DRAM
    saved = rig.save(pages("b", 100))
    assert saved < 100
    assert rig.arena.num_free == 2
    rig.io.open_gate.set()
    found = plan(rig, pages("a", 2))
    rig.wait(found)
    assert not found.short
    rig.store.cancel_plan(found)
    rig.settle()


def test_the_window_holds_what_fits_and_its_shared_pages_once(make: Make) -> None:
    rig = make(slots=16, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    rig.save(pages("shared", 4))
    names = "abcd"
    for name in names:
        rig.save(pages(name, 2), pages("shared", 4))
        rig.settle()
    for name in names:
        chain = np.concatenate([pages("shared", 4), pages(name, 2)])
        lookahead.expect(name, rig.space, chain, 0)
    lookahead.set_order(list(names))
    assert lookahead.window() == ["a", "b"]  # 4 + 2 + 2 of the 8 that plans may pin
    lookahead.set_order(list("dcba"))
    assert lookahead.window() == ["d", "c"]
    for name in names:
        lookahead.leave(name)
    assert lookahead.window() == []
    rig.settle()


def test_pages_above_the_device_end_are_wanted_too(make: Make) -> None:
    """The device may evict them before the request is admitted."""
    rig = make(slots=16, lookahead=True)
    assert rig.store.lookahead is not None
    chain = pages("a", 6)
    rig.save(chain)
    found = rig.store.lookahead.expect("a", rig.space, chain, 4)
    assert found.total == 2
    assert rig.books.table.policy is not None
    rows = rig.books.table.index.lookup(chain, 0)
    assert rig.books.table.policy.wanted(rows).all()
    rig.settle()


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_save_that_lacks_room_takes_that_of_the_last_plan(make: Make, *, lookahead: bool) -> None:
    rig = make(slots=16, lookahead=lookahead)
    for name in "abc":
        rig.save(pages(name, 2))
    rig.settle()
    plans = [plan(rig, pages(name, 2), place) for place, name in enumerate("abc")]
    for each in plans:
        rig.wait(each)
    saved = rig.save(pages("d", 12))
    if lookahead:  # what is planned is needed soon, and more than what is saved
        assert saved < 12
        assert not any(each.cancelled for each in plans)
    else:
        assert saved == 12
        assert [each.cancelled for each in plans] == [False, False, True]
        assert rig.ready(pages("a", 2)) == rig.ready(pages("b", 2)) == 2
        rig.until(lambda: rig.on_disk(pages("d", 12)) == 12)
        assert rig.save(pages("e", 16)) == 14  # the first one's stays
    for each in plans:
        rig.store.cancel_plan(each)
    rig.settle()
    assert rig.books.pins.num_pages == 0


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_only_plan_may_be_larger_than_half_of_dram(make: Make, *, lookahead: bool) -> None:
    rig = make(slots=16, index=1024, lookahead=lookahead)
    long, short = pages("long", 12), pages("short", 2)
    on_disk_only(rig, long)
    rig.save(short)
    rig.settle()
    beside = plan(rig, short)
    first = plan(rig, long)
    assert first.num_planned + beside.num_planned == rig.store.max_planned_pages == 8
    assert first.short
    rig.wait(first)
    rig.store.cancel_plan(first)
    rig.store.cancel_plan(beside)
    alone = plan(rig, long)
    assert not alone.short
    rig.wait(alone)
    check_content(rig, long)
    late = plan(rig, short)
    assert late.starved
    shared = plan(rig, long[:6])
    assert shared.num_planned == 6  # costs nothing
    for each in (alone, late, shared):
        rig.store.cancel_plan(each)
    rig.settle()
    assert rig.books.pins.num_pages == 0
