"""Rows of the index, slots of the arena, and how a page goes from one state to the next.

`index.quality` is that of the best copy, the one in DRAM where there is one; a copy on disk is
never better than that in DRAM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import NO_SEGMENT, NO_SLOT, PageIndex
from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.store.books.eviction.copy_order import CopyOrder
from sglang_ext.tiers.store.books.eviction.disk_order import DiskOrder
from sglang_ext.tiers.store.books.eviction.dram_order import DramOrder
from sglang_ext.tiers.store.books.eviction.page_parents import PageParents
from sglang_ext.tiers.store.books.lost_pages import Absence, LostPages
from sglang_ext.tiers.store.books.page_states import (
    FILL,
    LEAVE_DRAM,
    LEGAL,
    PLACE,
    PUBLISH,
    TAKE_OFF,
    Step,
    owes,
)
from sglang_ext.tiers.store.books.waits import InFlight, PageWaits
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    READY,
    DiskCopies,
    Hashes,
    OnMoved,
    Rows,
    Slots,
    StoreCounters,
)


class PageTable:
    """The state of every page, under the store's one lock. Nothing here blocks on I/O.

    The caller holds `lock` around every call but `check`, and so do the parts of `Books` around
    theirs where they do not say that they take it. All that has to hear of a change of state hears
    of it here: the orders in which pages leave, the policy, the plans that wait.

    Attributes:
        lock: guards everything in the store's books.
        arena: the slots.
        index: the rows; its flags change here only.
        policy: what the queue needs, if any of it is known, and what was used when.
        order: what leaves DRAM next.
        disk_order: what leaves the disk next; None without one.
        copies: what leaves the records that lie in DRAM as well next; None where there are none.
        lineage: which page follows which.
        lost: which pages left the last tier that had them.
        waits: the plans that wait for rows.
        in_flight: saves and promotions that own `FILLING` rows.
        counters, events: the store's.
        now_s: time in seconds, monotonic.
        num_moved: pages that entered DRAM or left it so far.
        num_owed: pages of DRAM that gave their place on disk up and are to be written again.
        has_inexact: whether any page was ever stored that is not exact; never falls.
        on_moved: told the hashes of pages that come to a tier or leave one, and the numbers of
            their key spaces, with the lock held that they move under; None: nobody is.
    """

    def __init__(
        self,
        arena: HostArena,
        index: PageIndex,
        policy: PlacementPolicy,
        *,
        order: DramOrder,
        disk_order: DiskOrder | None,
        copies: CopyOrder | None = None,
        counters: StoreCounters,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.arena, self.index = arena, index
        self.policy, self.order, self.disk_order = policy, order, disk_order
        self.copies = copies
        self.parents = PageParents(index.capacity)
        self.lost = LostPages(index.capacity)
        self.waits = PageWaits()
        self.in_flight = InFlight(self.lock)
        self.counters, self.events = counters, events
        self.now_s = clock
        self.num_moved = self.num_owed = 0
        self.has_inexact = False
        self.on_moved: OnMoved | None = None

    def check(self) -> None:
        """Verifies index, arena and orders against each other (linear; for tests). Takes the lock.

        Raises:
            TierInvariantError, AssertionError: they disagree.
        """
        with self.lock:
            self.index.check()
            self.arena.check()
            rows = self.index.rows()
            flags, slots = self.index.flags[rows], self.index.host_slot[rows]
            assert LEGAL[flags].all(), np.unique(flags[~LEGAL[flags]])
            held = slots[slots != NO_SLOT]
            assert len(np.unique(held)) == len(held), "two pages share a slot"
            assert len(held) == self.arena.num_used, (len(held), self.arena.num_used)
            in_dram = (flags & (READY | FILLING)) != 0
            assert bool((in_dram == (slots != NO_SLOT)).all()), "flags and slots disagree"
            quality, disk_quality = self.index.quality[rows], self.index.disk_quality[rows]
            on_disk = (flags & ON_DISK) != 0
            assert self.num_owed == int(owes(flags).sum()), (self.num_owed, owes(flags).sum())
            assert not (on_disk & (disk_quality < quality)).any(), "the disk has the better copy"
            alone = on_disk & ~in_dram
            assert (quality[alone] == disk_quality[alone]).all(), "quality is not the copy's"
            assert self.has_inexact or not quality.any()
            ready = (flags & READY) != 0
            assert (self.order.has(rows) == ready).all(), "DRAM and its order disagree"
            self.order.check()
            if self.disk_order is not None:
                self.disk_order.check(rows[on_disk])
            if self.copies is not None:
                self.copies.check()

    def take(self, step: Step, rows: Rows) -> None:
        """Takes a step with some pages."""
        if not len(rows):
            return
        flags = self.index.flags
        owed = _num_owed(flags, rows) if step.owes else 0
        flags[rows] = (flags[rows] & step.keeps) | step.sets
        if step.owes:
            self.num_owed += _num_owed(flags, rows) - owed
        if step.tells:
            self.order.changed(rows)
        if step.tells and self.disk_order is not None:
            self.disk_order.changed(rows)
        if step.tells and self.copies is not None:
            self.copies.changed(rows)

    # ---- DRAM ----

    def pin(self, slots: Slots) -> None:
        """Keeps what lies in these slots there."""
        if not len(slots):
            return
        self.arena.pin(slots)
        self.order.changed_slots(slots)

    def unpin(self, slots: Slots) -> None:
        """Gives pins back."""
        if not len(slots):
            return
        self.arena.unpin(slots)
        self.order.changed_slots(slots)

    def fill(self, rows: Rows, slots: Slots) -> None:
        """Somebody begins to write pages into slots, and pins these."""
        self.index.host_slot[rows] = slots
        self.take(FILL, rows)
        self.pin(slots)

    def still_filling(self, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which rows are still the pages that began to fill these slots (not cleared since)."""
        same = self.index.is_live(rows) & (self.index.host_slot[rows] == slots)
        filling: npt.NDArray[np.bool_] = same & ((self.index.flags[rows] & FILLING) != 0)
        return filling

    def publish(self, rows: Rows, step: Step = PUBLISH) -> None:
        """Pages are ready in DRAM; root first."""
        self.take(step, rows)
        self.num_moved += len(rows)
        self.index.lru_add(rows[::-1])
        self.order.enter(rows)

    def settle(self, rows: Rows, slots: Slots, *, failed: bool) -> None:
        """Ends the waits of plans for pages that were to be read into these slots.

        A row may have been cleared meanwhile and may be filling another slot now. Plans that wait
        for it then wait for the new fill, and are left waiting.
        """
        if not len(self.waits) or not len(rows):
            return
        filling = self.index.is_live(rows) & ((self.index.flags[rows] & FILLING) != 0)
        others = filling & (self.index.host_slot[rows] != slots)
        self.waits.end(rows[~others], failed=failed)

    def leave_dram(self, rows: Rows) -> None:
        """Pages that the disk has leave DRAM; their slots were freed."""
        if not len(rows):
            return
        self.index.lru_remove(rows)
        self.index.host_slot[rows] = NO_SLOT
        self.index.quality[rows] = self.index.disk_quality[rows]
        self.take(LEAVE_DRAM, rows)
        if self.copies is not None:
            self.copies.changed(rows)

    # ---- disk ----

    def place(self, rows: Rows, copies: DiskCopies | RecoveredPages) -> None:
        """Notes where pages lie on disk now; of a row that is named twice the last place counts."""
        if not len(rows):
            return
        self.take_off_disk(rows)
        self._set_place(rows, copies)
        self.take(PLACE, rows)
        if self.disk_order is not None:
            self.disk_order.enter(_once(rows))

    def move_on_disk(self, rows: Rows, copies: DiskCopies | RecoveredPages) -> None:
        """Pages that are on disk lie elsewhere there now."""
        if self.copies is not None:
            self.copies.leave(rows)
        if self.disk_order is not None:
            self.disk_order.lift(rows)
        self._set_place(rows, copies)
        if self.disk_order is not None:
            self.disk_order.lie(rows)

    def _set_place(self, rows: Rows, copies: DiskCopies | RecoveredPages) -> None:
        self.index.segment[rows] = copies.segment
        self.index.block[rows] = copies.block
        self.index.num_blocks[rows] = copies.num_blocks
        self.index.disk_quality[rows] = copies.quality

    def take_off_disk(self, rows: Rows) -> None:
        """Forgets the copies on disk of those of some rows that have one."""
        rows = rows[(self.index.flags[rows] & ON_DISK) != 0]
        if not len(rows):
            return
        if self.disk_order is not None:
            self.disk_order.leave(_distinct(rows))
        if self.copies is not None:
            self.copies.leave(rows)
        self.take(TAKE_OFF, rows)
        self.index.segment[rows] = NO_SEGMENT

    # ---- both ----

    def remove(self, rows: Rows, why: Absence | None) -> int:
        """Forgets pages, also in the policy, because their row numbers are reused.

        Args:
            rows: i64 `[N]`; those that are not live are passed over.
            why: what is remembered of it; None: nothing.
        """
        live = rows[self.index.is_live(rows)] if len(rows) else rows
        if not len(live):
            return 0
        if why is not None:
            self.lost.note(*self.index.keys(live), why)
        self.take_off_disk(live)
        if self.copies is not None:  # also those that are being written
            self.copies.leave(live)
        self.parents.forget(live)
        self.policy.forget(live)
        self.num_owed -= _num_owed(self.index.flags, live)
        self.waits.end(live, failed=True)  # the next page of these rows is another's
        return self.index.remove(rows)

    def forget(self, rows: Rows, why: Absence | None) -> None:
        """Removes pages in DRAM, and frees their slots. See `remove`."""
        if not len(rows):
            return
        self.arena.free(self.index.host_slot[rows])
        self.remove(rows, why)

    def touch(self, rows: Rows) -> None:
        """Makes a run of a path the most recent, and its predecessors more recent than the run."""
        self.index.lru_touch(rows[::-1])
        if len(rows) and rows[0] >= 0:
            self.index.lru_touch(self.parents.above(int(rows[0])))
        self.policy.touched(rows, self.now_s())

    def link(self, path: Rows) -> None:
        """Notes which page follows which."""
        self.parents.link(path)
        self.policy.link(path, self.now_s())

    def assign(self, rows: Rows, tenant: int) -> None:
        """Notes whose share pages count towards."""
        self.policy.assign(rows, tenant)

    def moved(self, rows: Rows) -> Hashes | None:
        """Tells `on_moved` of pages that come to a tier or leave one; their hashes, for the log."""
        if self.on_moved is None and not self.events.on:
            return None
        hashes, numbers = self.index.keys(rows)
        if self.on_moved is not None:
            self.on_moved(hashes, numbers)
        return hashes if self.events.on else None


def _once(rows: Rows) -> Rows:
    """Each row once, in the order in which they come first; ascending ones are not sorted."""
    if (rows[1:] > rows[:-1]).all():
        return rows
    _, first = np.unique(rows, return_index=True)
    return rows[np.sort(first)]


def _distinct(rows: Rows) -> Rows:
    """Each row once, ascending; rows that are so already, as of all pages, are not sorted again."""
    return rows if (rows[1:] > rows[:-1]).all() else np.unique(rows)


def _num_owed(flags: npt.NDArray[np.uint8], rows: Rows) -> int:
    """How many of some rows, each counted once, are to be written a second time."""
    return len(_distinct(rows[owes(flags[rows])]))
