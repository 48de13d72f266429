"""The page store: what leaves DRAM when, what is written, and what plans hold."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sglang_ext.tiers import index_kernels as kernels
from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.store import Epoch, KeySpace
from sglang_ext.tiers.store.movers import namespaces
from sglang_ext.tiers.store.types import READY, WRITE_DROPPED, DiskCopies
from tests.unit.store.store_rig import (
    DIGEST,
    NONE,
    OTHER,
    Make,
    Rig,
    check_content,
    fill,
    on_disk_only,
    pages,
    rigs,
)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


# ---- saves and policies --------------------------------------------------------------------------


def test_a_duplicate_costs_nothing(make: Make) -> None:
    rig = make()
    a = pages("a", 4)
    assert rig.save(a) == 4
    assert rig.save(a) == 0
    assert rig.save(np.concatenate([a, pages("b", 1)])) == 1
    assert rig.count("duplicate_pages") == 8
    rig.settle()
    assert rig.disk is not None
    assert rig.count("written_pages") == 5


def test_a_failed_save_leaves_nothing(make: Make) -> None:
    rig = make()
    rig.save(pages("a", 3), ok=False)
    assert rig.ready(pages("a", 3)) == 0
    assert rig.count("save_failed_pages") == 3
    rig.settle()
    assert rig.arena.num_free == 8
    assert rig.save(pages("a", 3)) == 3


def test_what_is_computed_although_the_disk_has_it_comes_back_to_dram(make: Make) -> None:
    rig = make()
    a = pages("a", 3)
    on_disk_only(rig, a)
    assert rig.save(a) == 0  # nothing says how slow the disk is
    asked: list[tuple[int, int]] = []

    def is_read_slower(num_before: int, num_bytes: npt.NDArray[np.int64]) -> bool:
        asked.append((num_before, len(num_bytes)))
        return len(asked) > 1

    rig.store.set_return_rule(is_read_slower)
    assert rig.save(a) == 0
    assert asked == [(0, 3)]
    assert rig.save(a, ok=False) == 3
    assert rig.ready(a) == 0  # as before: nothing of it is lost
    assert rig.on_disk(a) == 3
    written, saved = rig.count("written_pages"), rig.count("saved_pages")
    assert rig.save(a) == 3
    rig.settle()
    check_content(rig, a)
    assert rig.on_disk(a) == 3
    assert rig.count("returned_pages") == 3
    assert (rig.count("written_pages"), rig.count("saved_pages")) == (written, saved)
    assert rig.save(a) == 0


def test_what_finds_no_room_to_come_back_is_not_lost(make: Make) -> None:
    rig = make()  # 8 slots
    a = pages("a", 3)
    on_disk_only(rig, a)
    rig.store.set_return_rule(lambda *_: True)
    held = rig.store.begin_save(rig.space, pages("b", 6), NONE)
    ticket = rig.store.begin_save(rig.space, a, pages("none", 0))
    assert ticket.pages.tolist() == [0, 1]
    assert ticket.dropped == rig.count("save_dropped_pages") == 0
    for each in (ticket, held):
        rig.store.finish_save(each, ok=False)
    assert rig.on_disk(a) == 3


def test_what_comes_back_takes_no_room_of_what_is_new(make: Make) -> None:
    rig = make()  # 8 slots
    a = pages("a", 8)
    on_disk_only(rig, a[:4])
    rig.store.set_return_rule(lambda *_: True)
    saved = rig.count("saved_pages")
    held = rig.store.begin_save(rig.space, pages("b", 3), NONE)
    ticket = rig.store.begin_save(rig.space, a, pages("none", 0))
    assert ticket.pages.tolist() == [0, 4, 5, 6, 7]
    assert len(set(ticket.slots.tolist())) == 5
    assert ticket.dropped == 0
    for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
        fill(rig.arena.slots[slot], a[page].tobytes(), rig.space)
    rig.store.finish_save(ticket, ok=True)
    rig.store.finish_save(held, ok=False)
    assert (rig.count("saved_pages") - saved, rig.count("returned_pages")) == (4, 1)
    rig.settle()
    check_content(rig, a[:1])
    check_content(rig, a[4:])


def test_what_was_read_while_it_was_computed_lies_in_dram_once(make: Make) -> None:
    rig = make(slots=16)
    a = pages("a", 3)
    on_disk_only(rig, a)
    rig.store.set_return_rule(lambda *_: True)
    ticket = rig.store.begin_save(rig.space, a, pages("none", 0))
    plan = rig.store.plan(rig.space, a)
    assert plan is not None
    rig.wait(plan)
    rig.store.finish_save(ticket, ok=True)
    rig.store.cancel_plan(plan)
    rig.settle()
    check_content(rig, a)
    assert rig.count("returned_pages") == 0


def test_a_page_is_not_ready_while_it_is_being_written(make: Make) -> None:
    rig = make()
    ticket = rig.store.begin_save(rig.space, pages("a", 2), NONE)
    assert rig.ready(pages("a", 2)) == 0
    assert rig.store.pin_ready(rig.space, pages("a", 2)) is None
    assert rig.store.locate_prefix(rig.space, pages("a", 2)).pending == 2
    rig.store.finish_save(ticket, ok=True)
    assert rig.ready(pages("a", 2)) == 2


def test_write_through_writes_everything(make: Make) -> None:
    rig = make()
    rig.save(pages("a", 4))
    rig.settle()
    assert rig.on_disk(pages("a", 4)) == 4
    written = {row.tobytes().hex() for row in pages("a", 4)}
    rig.until(lambda: rig.events("written") == written)  # logged when the lock was given back


def test_selective_writes_what_was_used_again(make: Make) -> None:
    rig = make(policy="selective")
    rig.save(pages("a", 2))
    rig.save(pages("b", 2))
    ticket = rig.store.pin_ready(rig.space, pages("a", 2))
    assert ticket is not None
    rig.store.release(ticket.slots)
    rig.until(lambda: rig.count("written_pages") == 2)
    rig.settle()
    assert (rig.on_disk(pages("a", 2)), rig.on_disk(pages("b", 2))) == (2, 0)
    rig.save(pages("c", 8))  # what was never used again may be lost
    assert rig.count("lost_pages") == 2
    assert rig.store.locate_prefix(rig.space, pages("a", 2)).disk == 2


def test_write_back_cleans_the_coldest_below_its_low_water_mark(make: Make) -> None:
    rig = make(policy="write_back", slots=16)  # low water: 2 pages free or clean
    for end in range(1, 14):  # one new page at a time: more is kept clean where saves are larger
        rig.save(pages("a", end))
    assert rig.store._spiller is not None
    assert rig.store._spiller.take() is None
    assert rig.count("written_pages") == 0
    rig.save(pages("b", 2))
    rig.until(lambda: rig.count("written_pages") > 0)
    rig.settle()
    # The last pages of the oldest path are the coldest: children go before their parents.
    assert rig.on_disk(pages("a", 13)[-1:]) == 1
    rig.save(pages("c", 2))
    assert rig.count("lost_pages") == 0
    assert rig.ready(pages("a", 13)) >= 11


def test_nothing_leaves_dram_before_it_is_on_disk(make: Make) -> None:
    rig = make(slots=4)
    rig.io.open_gate.clear()
    rig.save(pages("a", 4))
    assert rig.save(pages("b", 2)) == 0
    assert rig.count("save_dropped_pages") == 2
    assert rig.ready(pages("a", 4)) == 4
    rig.io.open_gate.set()
    rig.settle()
    assert rig.save(pages("b", 2)) == 2
    assert rig.count("lost_pages") == 0


def test_what_the_disk_refused_may_leave_dram_all_the_same(make: Make) -> None:
    rig = make(slots=4)
    rig.io.fail_writes = True
    rig.save(pages("a", 4))
    rig.until(lambda: rig.count("write_dropped_pages") == 4)
    rig.settle()
    flags = rig.books.table.index.flags[rig.books.table.index.lookup(pages("a", 4), 0)]
    assert (flags == READY | WRITE_DROPPED).all()
    assert rig.save(pages("b", 2)) == 2
    assert rig.count("lost_pages") == 2
    assert rig.ready(pages("a", 4)) == 2


# ---- eviction ----------------------------------------------------------------------------------


def test_children_leave_before_their_parents(make: Make) -> None:
    rig = make(disk=False)
    a = pages("a", 6)
    rig.save(a[:3])
    rig.save(a[3:], a[:3])
    rig.save(pages("b", 4))  # room for 2, so 2 of `a` leave
    assert rig.ready(a) == 4
    rig.save(pages("c", 1))
    assert rig.ready(a) == 3


def test_saving_children_keeps_the_path_to_them(make: Make) -> None:
    """The oldest pages are the very parents of what is saved: others must leave."""
    rig = make(disk=False)
    a = pages("a", 6)
    rig.save(a[:3])
    rig.save(pages("b", 5))
    assert rig.save(a[3:], a[:3]) == 3
    assert rig.ready(a) == 6
    assert rig.ready(pages("b", 5)) == 2


@pytest.mark.parametrize("disk", [False, True])
def test_no_page_gives_way_to_what_comes_behind_it(make: Make, *, disk: bool) -> None:
    """A prompt larger than DRAM is saved chunk by chunk: what is behind a gap is of no use."""
    rig = make(disk=disk)
    rig.io.fail_writes = True  # what the disk does not take may leave DRAM
    rig.save(pages("a", 2))
    rig.settle()
    long = pages("long", 12)
    for start in (0, 4):
        rig.save(long[start : start + 4], long[:start])
        rig.settle()
    assert rig.ready(pages("a", 2)) == 0
    assert rig.ready(long) == 8
    assert rig.save(long[8:], long[:8]) == 0
    assert rig.ready(long) == 8
    assert rig.count("lost_pages") == 2
    assert rig.save(pages("b", 2)) == 2  # they leave for others as ever
    assert rig.ready(long) == 6


def test_a_use_keeps_a_page_young(make: Make) -> None:
    rig = make(disk=False)
    rig.save(pages("a", 4))
    rig.save(pages("b", 4))
    check_content(rig, pages("a", 4))
    rig.save(pages("c", 4))
    assert (rig.ready(pages("a", 4)), rig.ready(pages("b", 4))) == (4, 0)


def test_pinned_pages_stay(make: Make) -> None:
    rig = make(disk=False)
    rig.save(pages("a", 4))
    ticket = rig.store.pin_ready(rig.space, pages("a", 4))
    assert ticket is not None
    rig.save(pages("b", 4))
    assert rig.save(pages("c", 6)) == 4
    assert rig.ready(pages("a", 4)) == 4
    check_content(rig, pages("a", 4))
    rig.store.release(ticket.slots)
    rig.save(pages("d", 8))
    assert rig.ready(pages("a", 4)) == 0
    rig.settle()


def test_an_index_without_room_drops_saves(make: Make) -> None:
    rig = make(index=6, disk=False)
    assert rig.save(pages("a", 8)) == 6
    assert rig.count("save_dropped_pages") == 2
    assert rig.ready(pages("a", 8)) == 6
    rig.settle()
    check_content(rig, pages("a", 6))


@pytest.mark.parametrize("policy", ["write_through", "write_back", "auto"])
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_full_index_gives_up_what_is_needed_least(
    policy: str, lookahead: bool, make: Make
) -> None:
    """Coded pages may be so short that the disk has room for more of them than the index."""
    rig = make(slots=4, index=16, policy=policy, lookahead=lookahead)
    used = pages("used", 2)
    saved = []
    for number in range(24):
        saved.append(rig.save(pages(f"n{number}", 2)))
        rig.settle()
        rig.save(used)
        rig.settle()
    found = [sum(rig.store.locate_prefix(rig.space, pages(f"n{n}", 2))) for n in range(24)]
    # Of what is written late a few find no room in DRAM at once.
    assert sum(saved[-10:]) >= 10, saved
    assert not any(found[:6]), found
    assert sum(found[-10:]) >= 8, found
    assert sum(rig.store.locate_prefix(rig.space, used)) == 2
    for number in np.flatnonzero(found).tolist():
        wanted = pages(f"n{number}", found[number])
        plan = rig.store.plan(rig.space, wanted)
        if plan is not None:
            rig.wait(plan)
        check_content(rig, wanted[: rig.ready(wanted)])
        if plan is not None:
            rig.store.cancel_plan(plan)
    rig.settle()


def test_what_leads_to_a_page_stays_where_the_index_is_full(make: Make) -> None:
    rig = make(slots=4, index=16)
    path = pages("path", 16)
    for end in range(2, 17, 2):
        assert rig.save(path[end - 2 : end], path[: end - 2]) == 2
        rig.settle()
    assert rig.save(pages("other", 2)) == 2
    rig.settle()
    # The end of the path left, with pages of it that DRAM had, and not what leads to it.
    assert sum(rig.store.locate_prefix(rig.space, path)) >= 12


# ---- key spaces ----------------------------------------------------------------------------------


def test_the_same_hashes_in_other_namespaces_and_adapters_are_other_pages(make: Make) -> None:
    rig = make(slots=12)
    rig.store.open_namespace(OTHER, {})
    lora = hashlib.sha256(b"lora").digest()
    spaces = [rig.space, rig.store.space(OTHER), rig.store.space(DIGEST, lora)]
    a = pages("a", 4)
    for space in spaces:
        assert rig.ready(a, space) == 0
        assert rig.save(a, space=space) == 4
    rig.settle()
    for space in spaces:
        check_content(rig, a, space)
    # The same from disk.
    rig.save(pages("z", 12))
    rig.settle()
    for space in spaces:
        plan = rig.store.plan(space, a)
        assert plan is not None
        rig.wait(plan)
        check_content(rig, a, space)
        rig.store.cancel_plan(plan)


def test_a_restart_finds_the_pages_of_each_adapter(make: Make) -> None:
    rig = make()
    lora = hashlib.sha256(b"lora").digest()
    rig.save(pages("a", 3))
    rig.save(pages("a", 2), space=rig.store.space(DIGEST, lora))
    rig.settle()
    rig.store.close()
    again = make()
    assert again.found == 5
    with_lora = again.store.space(DIGEST, lora)
    assert again.store.locate_prefix(again.space, pages("a", 3)).disk == 3
    assert again.store.locate_prefix(with_lora, pages("a", 3)).disk == 2


def test_a_restart_looks_at_each_page_once_however_many_adapters_there_are(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(slots=40)
    for number in range(1, 21):
        rig.save(pages("a", 2), space=rig.store.space(DIGEST, bytes([number]) * 32))
        rig.settle()
    rig.store.close()
    take, num_rows = RecoveredPages.take, 0

    def counted(self: RecoveredPages, rows: Any) -> RecoveredPages:
        nonlocal num_rows
        num_rows += len(rows)
        return take(self, rows)

    monkeypatch.setattr(RecoveredPages, "take", counted)
    again = make()
    assert again.found == 40
    assert num_rows <= 3 * 40
    for number in range(1, 21):
        space = again.store.space(DIGEST, bytes([number]) * 32)
        assert again.store.locate_prefix(space, pages("a", 2)).disk == 2


def test_a_restart_takes_pages_of_so_many_adapters_and_no_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to the folder names as many as he likes."""
    rig = make(slots=40)
    for number in range(1, 9):
        count = 3 if number in (2, 7) else 1
        rig.save(pages("a", count), space=rig.store.space(DIGEST, bytes([number]) * 32))
    rig.save(pages("a", 5))
    rig.settle()
    rig.store.close()
    monkeypatch.setattr(namespaces, "_MAX_ADAPTERS", 3)
    again = make()
    assert again.found == 11
    assert len(again.store.open_spaces()) == 3
    assert again.store.locate_prefix(again.space, pages("a", 5)).disk == 5
    for number in range(1, 9):
        space = again.store.space(DIGEST, bytes([number]) * 32)
        wanted = 3 if number in (2, 7) else 0
        assert again.store.locate_prefix(space, pages("a", 3)).disk == wanted
    again.settle()


# ---- plans -----------------------------------------------------------------------------------


def test_a_plan_brings_pages_back_and_keeps_them(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 4))
    plan = rig.store.plan(rig.space, pages("a", 4))
    assert plan is not None
    rig.wait(plan)
    assert not plan.failed
    rig.save(pages("b", 8))
    assert rig.ready(pages("a", 4)) == 4
    check_content(rig, pages("a", 4))
    rig.store.cancel_plan(plan)
    rig.settle()
    rig.save(pages("c", 8))
    assert rig.ready(pages("a", 4)) == 0
    rig.settle()


def test_two_requests_share_one_read(make: Make) -> None:
    rig = make(slots=16)
    on_disk_only(rig, pages("a", 4))
    rig.io.open_gate.clear()
    first = rig.store.plan(rig.space, pages("a", 2))
    second = rig.store.plan(rig.space, pages("a", 4))
    assert first is not None
    assert second is not None
    assert (first.remaining, second.remaining) == (2, 4)
    assert not first.done
    rig.io.open_gate.set()
    rig.wait(first)
    rig.wait(second)
    assert rig.store.wait_idle(300)  # counted after the plans were done
    assert rig.count("promoted_pages") == 4
    rig.store.cancel_plan(first)
    rig.save(pages("b", 16))
    assert rig.ready(pages("a", 4)) == 4  # the second still holds them
    rig.store.cancel_plan(second)
    rig.settle()


def test_a_plan_waits_for_a_save_under_way(make: Make) -> None:
    rig = make()
    ticket = rig.store.begin_save(rig.space, pages("a", 2), NONE)
    plan = rig.store.plan(rig.space, pages("a", 2))
    assert plan is not None
    assert plan.remaining == 2
    rig.store.finish_save(ticket, ok=False)
    assert plan.done
    assert plan.failed
    rig.store.cancel_plan(plan)
    rig.settle()


def test_cancelling_during_the_read_leaks_nothing(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 4))
    rig.io.open_gate.clear()
    plan = rig.store.plan(rig.space, pages("a", 4))
    assert plan is not None
    promoter = rig.store._promoter
    assert promoter is not None
    rig.until(lambda: not promoter._reads)  # in a thread's hands
    rig.store.cancel_plan(plan)
    rig.store.cancel_plan(plan)
    rig.io.open_gate.set()
    rig.settle()
    assert rig.ready(pages("a", 4)) == 4  # useful to whoever comes next
    assert rig.books.pins.num_pages == 0


def test_a_failed_read_is_a_miss(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 4))
    rig.io.fail_reads = True
    plan = rig.store.plan(rig.space, pages("a", 4))
    assert plan is not None
    rig.wait(plan)
    assert plan.failed
    rig.store.cancel_plan(plan)
    rig.settle()
    assert rig.ready(pages("a", 4)) == 0
    rig.io.fail_reads = False
    assert rig.save(pages("a", 4)) == 4  # recomputed, and stored again
    check_content(rig, pages("a", 4))


def test_plans_leave_room_for_others(make: Make) -> None:
    rig = make(slots=8)
    on_disk_only(rig, pages("a", 8))
    plan = rig.store.plan(rig.space, pages("a", 8))
    assert plan is not None
    rig.wait(plan)
    assert rig.ready(pages("a", 8)) == 7  # seven eighths of DRAM, as there is no other plan
    assert plan.short
    starved = rig.store.plan(rig.space, pages("a", 8)[7:])
    assert starved is not None
    assert starved.starved
    assert rig.save(pages("b", 1)) == 1
    rig.store.cancel_plan(starved)
    rig.store.cancel_plan(plan)
    assert rig.books.pins.num_pages == 0
    rig.settle()


def test_nothing_stored_is_no_plan(make: Make) -> None:
    assert make().store.plan(make_space(), pages("a", 4)) is None


def make_space() -> KeySpace:
    return KeySpace(0, DIGEST, b"", Epoch())


# ---- clear, segments, shutdown -------------------------------------------------------------------


def test_clear_during_a_save(make: Make) -> None:
    rig = make()
    ticket = rig.store.begin_save(rig.space, pages("a", 3), NONE)
    assert rig.store.clear() == 3
    assert rig.save(pages("a", 3)) == 3  # again, into other slots
    for slot in ticket.slots:
        rig.arena.slots[slot] = 0xFF  # the first save is still copying
    rig.store.finish_save(ticket, ok=True)
    check_content(rig, pages("a", 3))
    rig.settle()


def test_a_save_that_was_cleared_ends_no_wait_for_what_came_after(make: Make) -> None:
    """The next page has the row of the one that was cleared, and a plan that waits for it."""
    rig = make()
    cleared = rig.store.begin_save(rig.space, pages("a", 1), NONE)
    early = rig.store.plan(rig.space, pages("a", 1))
    assert early is not None
    rig.store.clear()
    assert early.done  # nothing comes any more
    again = rig.store.begin_save(rig.space, pages("b", 1), NONE)
    assert again.rows.tolist() == cleared.rows.tolist()
    plan = rig.store.plan(rig.space, pages("b", 1))
    assert plan is not None
    rig.store.finish_save(cleared, ok=False)
    assert not plan.done
    rig.store.finish_save(again, ok=True)
    assert plan.done
    assert not plan.failed
    for each in (early, plan):
        rig.store.cancel_plan(each)


def test_clear_looks_through_the_index_once_however_many_adapters_there_are(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(slots=40)
    spaces = [rig.space, *(rig.store.space(DIGEST, bytes([n]) * 32) for n in range(1, 20))]
    for number, space in enumerate(spaces[::2]):
        rig.save(pages(f"of{number}-", 3), space=space)
    rig.settle()
    scan, num_scans = kernels.rows_where, 0

    def counted(*columns: Any) -> Any:
        nonlocal num_scans
        num_scans += 1
        return scan(*columns)

    monkeypatch.setattr(kernels, "rows_where", counted)
    assert rig.store.clear() == 30
    assert num_scans == 1
    rig.settle()
    assert not len(rig.books.table.index)
    assert rig.arena.num_free == 40


def test_clear_during_a_promotion(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 4))
    rig.io.open_gate.clear()
    plan = rig.store.plan(rig.space, pages("a", 4))
    assert plan is not None
    rig.store.clear()
    rig.io.open_gate.set()
    rig.wait(plan)
    rig.store.cancel_plan(plan)
    rig.settle()
    assert rig.store.locate_prefix(rig.space, pages("a", 4)).total == 0
    assert rig.arena.num_free == 8


def test_clear_during_a_write(make: Make) -> None:
    rig = make()
    rig.io.open_gate.clear()
    rig.save(pages("a", 4))
    rig.until(lambda: bool(rig.arena.pinned(np.arange(8)).any()))
    rig.store.clear()
    rig.io.open_gate.set()
    rig.settle()
    assert rig.ready(pages("a", 4)) == 0
    rig.store.close()
    assert make().found == 0


def test_a_clear_waits_for_no_disk_and_takes_only_what_was_there(make: Make) -> None:
    """What is saved while the disk still has to delete outlives that, and a restart."""
    rig = make(slots=16)
    rig.save(pages("a", 4))
    rig.settle()
    assert rig.on_disk(pages("a", 4)) == 4
    rig.io.open_gate.clear()  # the disk hangs
    rig.save(pages("b", 4))
    rig.until(lambda: bool(rig.arena.pinned(np.arange(16)).any()))
    assert rig.store.clear() == 8  # returns all the same
    assert rig.store.locate_prefix(rig.space, pages("a", 4)).total == 0
    assert rig.store.locate_prefix(rig.space, pages("b", 4)).total == 0
    assert rig.store.stats()["clears_pending"] == 1
    rig.save(pages("c", 4))
    assert rig.ready(pages("c", 4)) == 4
    rig.io.open_gate.set()
    rig.until(lambda: rig.on_disk(pages("c", 4)) == 4)
    assert rig.store.stats()["clears_pending"] == 0
    rig.settle()
    rig.store.close()
    again = make(slots=16)
    assert again.found == 4
    assert again.on_disk(pages("c", 4)) == 4


def test_what_was_cleared_is_deleted_before_the_end(make: Make) -> None:
    rig = make()
    rig.save(pages("a", 4))
    rig.settle()
    assert rig.store._spiller is not None
    with rig.store._spiller._writing:  # the thread cannot begin
        rig.store.clear()
        closing = threading.Thread(target=rig.store.close, kwargs={"timeout_s": 0.0})
        closing.start()
        rig.until(lambda: rig.store._spiller is not None and rig.store._spiller._stop)
    closing.join(300)
    assert not closing.is_alive()
    assert make().found == 0


def test_a_dropped_segment_takes_its_pages_along_unless_dram_has_them(make: Make) -> None:
    rig = make(slots=4, max_bytes=256 << 10, segment_bytes=64 << 10)
    for number in range(20):
        rig.save(pages(f"n{number}", 4))
        rig.settle()
    assert rig.count("disk_reclaimed_pages") > 0
    located = [rig.store.locate_prefix(rig.space, pages(f"n{n}", 4)) for n in range(20)]
    assert located[0].total == 0
    assert located[19].host == 4
    for number in range(20):
        plan = rig.store.plan(rig.space, pages(f"n{number}", 4))
        if plan is not None:
            rig.wait(plan)
            ready = rig.ready(pages(f"n{number}", 4))
            check_content(rig, pages(f"n{number}", 4)[:ready])
            rig.store.cancel_plan(plan)
    rig.settle()


def test_pages_in_use_are_carried_over_when_their_segment_is_reclaimed(make: Make) -> None:
    rig = make(slots=4, max_bytes=256 << 10, segment_bytes=64 << 10)
    hot = pages("hot", 1)
    rig.save(hot)
    rig.settle()
    for number in range(24):
        rig.save(pages(f"n{number}", 3))
        rig.settle()
        plan = rig.store.plan(rig.space, hot)
        if plan is None:
            continue
        rig.wait(plan)
        check_content(rig, hot)
        rig.store.cancel_plan(plan)
    assert rig.count("disk_reclaimed_pages") > 8
    assert sum(rig.store.locate_prefix(rig.space, hot)) == 1
    plan = rig.store.plan(rig.space, hot)
    assert plan is not None
    rig.wait(plan)
    check_content(rig, hot)
    rig.store.cancel_plan(plan)


def test_shutdown_writes_what_is_only_in_dram(make: Make) -> None:
    rig = make(policy="write_back", slots=16)
    rig.save(pages("a", 6))
    assert rig.count("written_pages") == 0
    rig.store.close()
    assert rig.count("shutdown_lost_pages") == 0
    again = make(slots=16)
    assert again.found == 6
    plan = again.store.plan(again.space, pages("a", 6))
    assert plan is not None
    again.wait(plan)
    check_content(again, pages("a", 6))
    again.store.cancel_plan(plan)


def test_shutdown_gives_up_in_time_and_counts_what_is_lost(make: Make) -> None:
    rig = make(policy="write_back", slots=16)
    rig.save(pages("a", 6))
    rig.store.close(timeout_s=0.0)
    assert rig.count("written_pages") == 0
    assert rig.count("shutdown_lost_pages") == 6


def test_shutdown_writes_what_was_used_last_and_roots_first(make: Make) -> None:
    rig = make(policy="write_back", slots=64)
    rig.save(pages("old", 6))
    rig.save(pages("new", 6))
    assert rig.store._spiller is not None
    with rig.store._spiller._writing:  # its thread must not take them first
        assert rig.books.spills.queue_all() == 12
        entry = rig.books.spills.take(4)
    assert entry is not None
    hashes, _ = rig.books.table.index.keys(entry.rows)
    assert hashes.tolist() == pages("new", 4).tolist()
    nowhere = np.zeros(4, np.uint32)
    copies = DiskCopies(nowhere, nowhere, np.zeros(4, np.uint16), np.zeros(4, np.uint8))
    rig.books.spills.finish(entry, np.zeros(4, np.bool_), copies)


def test_pages_that_a_disk_refused_are_counted_as_lost_at_shutdown(make: Make) -> None:
    rig = make(policy="write_back", slots=16)
    rig.save(pages("a", 6))
    rig.io.fail_writes = True
    rig.store.close()
    assert rig.count("write_dropped_pages") == 6
    assert rig.count("shutdown_lost_pages") == 6


def test_shutdown_does_not_wait_for_reads_that_have_not_begun(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 3))
    rig.io.open_gate.clear()
    plans = [rig.store.plan(rig.space, pages("a", 3)[[page]]) for page in range(3)]
    promoter = rig.store._promoter
    assert promoter is not None
    rig.until(lambda: len(promoter._reads) == 1)  # the two threads hold one each
    closing = threading.Thread(target=rig.store.close)
    closing.start()
    rig.until(lambda: promoter._closing)
    rig.io.open_gate.set()
    closing.join(300)
    assert not closing.is_alive()
    assert [plan is not None and plan.failed for plan in plans] == [False, False, True]


def test_reads_of_pages_that_were_cleared_are_not_begun(make: Make) -> None:
    rig = make(slots=16)
    on_disk_only(rig, pages("a", 6))
    rig.io.open_gate.clear()
    plans = [rig.store.plan(rig.space, pages("a", 6)[[page]]) for page in range(6)]
    promoter = rig.store._promoter
    assert promoter is not None
    rig.until(lambda: len(promoter._reads) == 4)  # the two threads hold one each
    rig.store.clear()
    rig.save(pages("b", 1))  # in the row of one of them
    rig.io.open_gate.set()
    for plan in plans:
        assert plan is not None
        rig.wait(plan)
        rig.store.cancel_plan(plan)
    rig.settle()
    assert rig.count("promotion_failures") == rig.count("promoted_pages") == 0
    assert not [name for name in rig.store.stats() if name.startswith("rejected_")]
    check_content(rig, pages("b", 1))


def test_stale_entries_of_one_key_space_do_not_end_a_flush(make: Make) -> None:
    """Pages that were queued and forgotten, then a live page of another key space."""
    rig = make(policy="write_back", slots=16)
    rig.store.open_namespace(OTHER, {})
    other = rig.store.space(OTHER)
    assert rig.store._spiller is not None
    with rig.store._spiller._writing:
        rig.save(pages("a", 3))
        rig.books.spills.queue_all()
        rows = rig.books.table.index.lookup(pages("a", 3), 0)
        queued = list(rig.books.spills.entries)
        with rig.books.table.lock:
            rig.arena.free(rig.books.table.index.host_slot[rows])
            rig.books.table.index.remove(rows)
        rig.save(pages("b", 2), space=other)
        with rig.books.table.lock:
            rows = rig.books.table.index.lookup(pages("b", 2), other.number)
            rig.books.spills.queue(other, rows)
        assert len(queued) == 1
        entry = rig.books.spills.take(16)
    assert entry is not None
    assert entry.space == other
    assert len(entry.rows) == 2
    nowhere = np.zeros(2, np.uint32)
    copies = DiskCopies(nowhere, nowhere, np.zeros(2, np.uint16), np.zeros(2, np.uint8))
    rig.books.spills.finish(entry, np.zeros(2, np.bool_), copies)
    rig.settle()


def test_a_page_that_is_copied_twice_from_one_segment_is_on_disk_once(make: Make) -> None:
    """Reclaiming may find a page twice in a segment, and copies both records."""
    rig = make(slots=16, lookahead=True)
    rig.save(pages("a", 2))
    rig.settle()
    books = rig.books
    rows = books.table.index.lookup(pages("a", 2), 0)
    segment = int(books.table.index.segment[rows[0]])
    moved = RecoveredPages(
        hashes=np.concatenate([pages("a", 2), pages("a", 1)]),
        lora=np.zeros((3, 32), np.uint8),
        segment=np.full(3, segment + 100, np.uint32),
        block=np.array([1, 2, 3], np.uint32),
        num_blocks=np.ones(3, np.uint16),
        quality=books.table.index.disk_quality[rows[[0, 1, 0]]],
    )
    books.disk.move(np.full(3, rig.space.number), segment, moved)
    assert books.table.index.block[rows].tolist() == [3, 2]
    books.check()


def test_pages_that_the_disk_did_not_take_need_no_cleaning(make: Make) -> None:
    """They may leave DRAM at once; else the spiller would look for pages to write for ever."""
    rig = make(policy="write_back", slots=16)
    assert rig.store._spiller is not None
    with rig.store._spiller._writing:
        rig.save(pages("a", 16))
        with rig.books.table.lock:
            rows = rig.books.table.index.lookup(pages("a", 16), 0)
            rig.books.table.index.flags[rows] = READY | WRITE_DROPPED
            rig.books.spills.entries.clear()  # the spiller may have looked already
            rig.books.room._look_at = 0
        rig.books.room.queue_leaving(16)
        assert not rig.books.spills.entries


def test_clearing_sorts_no_pages(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million pages that took 3 s, with everybody who needs the lock waiting."""
    rig = make(slots=16, lookahead=True)
    for name in "abc":
        rig.save(pages(name, 5))
    rig.settle()

    sorted_: list[int] = []
    unique: Any = np.unique

    def note(values: np.ndarray, **options: bool) -> object:
        sorted_.append(len(values))
        return unique(values, **options)

    monkeypatch.setattr(np, "unique", note)
    assert rig.store.clear() == 15
    assert max(sorted_, default=0) <= 1, "more than the segment was sorted"
    monkeypatch.undo()
    rig.settle()


def test_what_a_namespace_had_is_known_before_room_is_made_for_others(tmp_path: Path) -> None:
    """Else it would be promised, and be gone: segments without a known page are the first to go."""
    old, new = pages("old", 28), pages("new", 256)

    def restart() -> Rig:
        return Rig(tmp_path, slots=64, max_bytes=1 << 20, index=1024)

    rig = restart()
    rig.store.open_namespace(OTHER, {})
    for first in range(0, len(old), 4):
        rig.save(old[first : first + 4], space=rig.store.space(OTHER))
        rig.settle()
    rig.store.close()
    rig = restart()
    assert rig.disk is not None
    disk, open_disk = rig.disk, rig.disk.open_namespace
    step = iter(range(0, len(new), 4))

    def save_until(is_so: Callable[[], bool]) -> None:
        while not is_so() and (first := next(step, None)) is not None:
            rig.save(new[first : first + 4])
            rig.settle()

    def open_slowly(*args: Any, **named: Any) -> RecoveredPages:
        found = open_disk(*args, **named)
        before = disk.stats()
        save_until(
            lambda: (
                disk.stats().segments_dropped + disk.stats().segments_reused
                > before.segments_dropped + before.segments_reused
            )
        )
        return found

    save_until(lambda: disk.stats().used_bytes > (1 << 20) - (256 << 10))  # hardly any is left
    disk.open_namespace = open_slowly  # type: ignore[method-assign]
    assert rig.store.open_namespace(OTHER, {})
    index = rig.books.table.index
    rows = index.lookup(old, rig.store.space(OTHER).number)
    segments = set(index.segment[rows[rows >= 0]].tolist())
    assert segments <= {each.segment_id for each in disk._catalog.segments()}
    assert disk.stats().segments_dropped + disk.stats().segments_reused
    rig.store.close()
