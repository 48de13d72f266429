"""Rows of the index, slots of the arena, and how a page goes from one state to the next.

All state is guarded by `PageTable.lock`. Nothing here blocks on I/O.

A page in DRAM may be evicted only if it is ready, unpinned and not being written to disk. It must
also be on disk already or not meant for it; under write-back, eviction queues an unwritten page
that it meets. With a policy `DramOrder` chooses the page. Without one the LRU list does: a child is
touched before its parent, so that in DRAM no page outlives the pages before it on its path.

`index.quality` is that of the best copy, the one in DRAM where there is one; a copy on disk is
never better than that in DRAM.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import NO_SEGMENT, NO_SLOT, PageIndex
from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.records.quality import Qualities, Quality
from sglang_ext.tiers.store.books.disk_order import DiskOrder
from sglang_ext.tiers.store.books.dram_order import DramOrder
from sglang_ext.tiers.store.books.page_parents import PageParents
from sglang_ext.tiers.store.duplicate_copies import DuplicateCopies
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import (
    FILLING,
    GIVEN_UP,
    ON_DISK,
    QUEUED,
    READY,
    SENT,
    SPILLING,
    WRITE_DROPPED,
    DiskCopies,
    Hashes,
    KeySpace,
    Plan,
    Rows,
    Slots,
    SpillEntry,
    StoreCounters,
)

# Rows of the LRU tail that one look at it is about, so that it stays short when none can leave.
_MIN_EVICTION_SCAN, _MAX_EVICTION_SCAN = 64, 4096
# Candidates for each page to evict by age alone, where some cannot leave.
_SCAN_BY_AGE = 4
# How often room is asked for again because pages were met that stay.
_MAX_TAKES = 16
# Share of DRAM that may be pinned for waiting requests; the rest stays free to move.
_PLAN_SHARE = 0.5
# Share that the only plan there is may pin, for a prompt that is larger than that.
_LONE_PLAN_SHARE = 0.875
# Share of DRAM that saves leave free for promotions, where a policy looks ahead.
_RESERVE_SHARE = 1 / 32


class PageTable:
    """Index, arena and spill queue under one lock."""

    def __init__(
        self,
        arena: HostArena,
        index: PageIndex,
        *,
        has_disk: bool,
        write_policy: str,
        counters: StoreCounters,
        events: EventLog,
        policy: PlacementPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now_s = clock  # time, in seconds; monotonic
        self.lock = threading.Lock()
        self.spill_ready = threading.Condition(self.lock)
        self.arena = arena
        self.index = index
        self.has_disk = has_disk
        self.lineage = PageParents(index.capacity)  # guarded by lock
        # What leaves DRAM; None for the least recent page. Guarded by lock.
        self.policy = policy
        self.write_policy = write_policy
        disk_first = has_disk and write_policy in ("write_through", "auto")
        self.order: DramOrder | None = None  # guarded by lock
        if policy is not None:
            self.order = DramOrder(arena, index, policy, disk_first=disk_first)
        # What leaves the disk, page by page; None where whole segments do. Guarded by lock.
        self.disk_order: DiskOrder | None = None
        if policy is not None and has_disk:
            self.disk_order = DiskOrder(index, policy)
        self.disk_is_full = False  # it had to give up pages, and was not cleared; guarded by lock
        self.closing = False  # what is only in DRAM is about to be gone; guarded by lock
        looks_ahead = has_disk and policy is not None
        # Slots that saves leave free, so that a promotion never waits for room.
        self.num_reserved = int(arena.num_slots * _RESERVE_SHARE) if looks_ahead else 0
        # Those pages of DRAM and disk whose copy on disk goes first. Guarded by lock.
        self.duplicates = (
            DuplicateCopies(index, arena.num_slots) if self.disk_order is not None else None
        )
        self.burst_pages = 0.0  # slots that one save asked for, of late; guarded by lock
        self.num_moved = 0  # pages that entered DRAM or left it so far; guarded by lock
        # Finds a key space by its number; what owns the spaces sets it.
        self.space_of: Callable[[int], KeySpace] = _no_space
        self.counters = counters
        self.events = events
        self.spill_queue: deque[SpillEntry] = deque()  # guarded by lock
        # Namespaces of which the disk is to lose what it has, before it gets more. Guarded by lock.
        self.to_clear: set[bytes] = set()
        self.num_spilling = 0  # pages taken from it and not finished; one writer at a time
        self.num_in_flight = 0  # saves and promotions that own FILLING rows; guarded by lock
        self.idle = threading.Condition(self.lock)
        # Whether any page was ever stored that is not exact; guarded by lock, never falls.
        self.has_inexact = False
        # The best that the disk tier keeps: what its codec makes of an exact page.
        self.disk_floor = int(Quality.EXACT)
        self.max_planned_pages = max(1, int(arena.num_slots * _PLAN_SHARE))
        self.max_lone_plan_pages = max(1, int(arena.num_slots * _LONE_PLAN_SHARE))
        self.num_planned_pages = 0  # slots that plans pin; guarded by lock
        self._plan_pins = np.zeros(arena.num_slots, np.int32)  # plans by slot; guarded by lock
        self.num_wanted_evicted = 0  # pages that left DRAM although wanted; guarded by lock
        # Told of pages that leave DRAM and were not sent to the remote store: hashes, namespace
        # numbers, whether they are on disk. Called with the lock held; None: nobody is.
        self.on_unsent: (
            Callable[[Hashes, npt.NDArray[np.uint32], npt.NDArray[np.bool_]], None] | None
        ) = None
        # Told of pages that became known, or known better: number of their key space, hashes.
        # Called with the lock held.
        self.on_published: Callable[[int, Hashes], None] | None = None
        # Told the hashes of pages that come to a tier or leave one. Called with the lock held that
        # they move under; None: nobody is.
        self.on_moved: Callable[[Hashes], None] | None = None
        self._waiters: dict[int, list[Plan]] = {}  # row -> plans that wait for it
        self._plans: dict[Plan, None] = {}  # with pins, oldest first; guarded by lock
        self._clock = 0

    @property
    def writes_through(self) -> bool:
        """Whether pages are written as they are saved, to have them on disk beside DRAM."""
        if self.write_policy == "auto":
            return self.disk_order is None or not self.disk_is_full
        return self.write_policy == "write_through"

    @property
    def writes_back(self) -> bool:
        """Whether pages are written when they are about to leave DRAM, if they are worth it."""
        if self.write_policy == "auto":
            return not self.writes_through
        return self.write_policy == "write_back"

    def check(self) -> None:
        """Verifies index and arena against each other (linear; for tests).

        Raises:
            TierInvariantError, AssertionError: they disagree.
        """
        with self.lock:
            self.index.check()
            self.arena.check()
            rows = self.index.rows()
            slots = self.index.host_slot[rows]
            held = slots[slots != NO_SLOT]
            assert len(np.unique(held)) == len(held), "two pages share a slot"
            assert len(held) == self.arena.num_used, (len(held), self.arena.num_used)
            in_dram = (self.index.flags[rows] & (READY | FILLING)) != 0
            assert bool((in_dram == (slots != NO_SLOT)).all()), "flags and slots disagree"
            quality, disk_quality = self.index.quality[rows], self.index.disk_quality[rows]
            on_disk = (self.index.flags[rows] & ON_DISK) != 0
            assert not (on_disk & (disk_quality < quality)).any(), "the disk has the better copy"
            alone = on_disk & ~in_dram
            assert (quality[alone] == disk_quality[alone]).all(), "quality is not the copy's"
            assert self.has_inexact or not quality.any()
            if self.order is not None:
                ready = (self.index.flags[rows] & READY) != 0
                assert (self.order.has(rows) == ready).all(), "DRAM and its order disagree"
                self.order.check()
            if self.disk_order is not None:
                self.disk_order.check(rows[on_disk])

    # ---- private; the caller holds the lock ----

    def _place(self, rows: Rows, copies: DiskCopies | RecoveredPages) -> None:
        """Notes where pages lie on disk now; of a row that is named twice the last place counts."""
        self._take_off_disk(rows)
        self._set_place(rows, copies)
        self.index.flags[rows] |= ON_DISK
        self.index.flags[rows] &= np.uint8(0xFF ^ GIVEN_UP)
        if self.disk_order is not None:
            _, first = np.unique(rows, return_index=True)
            self.disk_order.enter(rows[np.sort(first)])

    def _set_place(self, rows: Rows, copies: DiskCopies | RecoveredPages) -> None:
        self.index.segment[rows] = copies.segment
        self.index.block[rows] = copies.block
        self.index.num_blocks[rows] = copies.num_blocks
        self.index.disk_quality[rows] = copies.quality

    def _take_off_disk(self, rows: Rows) -> None:
        """Forgets the copies on disk of those of some rows that have one."""
        rows = rows[(self.index.flags[rows] & ON_DISK) != 0]
        if self.disk_order is not None and len(rows):
            self.disk_order.leave(_distinct(rows))
        self.index.flags[rows] &= np.uint8(0xFF ^ ON_DISK)
        self.index.segment[rows] = NO_SEGMENT

    def _alloc(self, count: int, keep: int = 0) -> Slots:
        """Takes up to `count` slots, and makes room for them, so that `keep` others stay free."""
        short = count + keep - self.arena.num_free
        if short > 0:
            self._evict(short)
        return self.arena.alloc(min(count, max(0, self.arena.num_free - keep)))

    def _evict(self, count: int) -> None:
        rows = self._victims(count)
        on_disk = (self.index.flags[rows] & ON_DISK) != 0
        evicted = self._moved(rows)
        if self.on_unsent is not None:
            unsent = (self.index.flags[rows] & SENT) == 0
            if unsent.any():
                self.on_unsent(*self.index.keys(rows[unsent]), on_disk[unsent])
        self.arena.free(self.index.host_slot[rows])
        kept = rows[on_disk]
        self.index.lru_remove(kept)
        self.index.host_slot[kept] = NO_SLOT
        self.index.quality[kept] = self.index.disk_quality[kept]
        self.index.flags[kept] &= np.uint8(0xFF ^ READY)
        if self.policy is not None:  # asked before it forgets them
            num_lost_wanted = int(self.policy.wanted(rows[~on_disk]).sum())
            self.counters.add("lost_wanted_pages", num_lost_wanted)
        self._remove(rows[~on_disk])
        self.num_moved += len(rows)
        self.counters.add("evicted_pages", len(rows))
        self.counters.add("lost_pages", int((~on_disk).sum()))
        if evicted is not None:
            self.events.pages("evicted", evicted)
            self.events.pages("lost", evicted[~on_disk])

    def _victims(self, count: int) -> Rows:
        """Up to `count` pages to evict, in the order in which they leave."""
        if self.policy is None or self.order is None:
            return self.lineage.children_first(self._evictable(count), count)
        victims = self._take_clean(self.order, count)
        num_wanted = int(self.policy.wanted(victims).sum())
        self.num_wanted_evicted += num_wanted
        self.counters.add("evicted_wanted_pages", num_wanted)
        return victims

    def _take_clean(self, order: DramOrder, count: int) -> Rows:
        """Takes up to `count` pages out of DRAM's order; those that the disk is to have stay.

        They are queued for it, and leave when it has them, or does not want them.
        """
        if not (self.has_disk and self.writes_back):
            return order.take(count, self.now_s())
        taken: list[Rows] = []
        for attempt in range(_MAX_TAKES):
            rows = order.take(count, self.now_s())
            unwritten = self._unwritten(rows)
            if unwritten.any():
                # What leads to a page that stays must stay, so the order is asked again.
                last = attempt == _MAX_TAKES - 1
                clean = int(np.argmax(unwritten)) if last else 0
                order.put_back(rows[clean:])
                self._queue_unwritten(rows[unwritten])
                rows = rows[:clean]
                if not last:
                    continue
            taken.append(rows)
            break
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _unwritten(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages of DRAM the disk neither has nor refused."""
        unwritten: npt.NDArray[np.bool_] = (self.index.flags[rows] & (ON_DISK | WRITE_DROPPED)) == 0
        return unwritten

    def _queue_unwritten(self, rows: Rows) -> None:
        """Queues pages, given in the order in which they leave, to be written root first."""
        self._queue_by_space(rows[::-1])

    def _queue_by_space(self, rows: Rows) -> None:
        """Queues pages of any key spaces, in their order within each."""
        numbers = self.index.keys(rows)[1]
        for number in np.unique(numbers).tolist():
            self._queue_spill(self.space_of(number), rows[numbers == number])

    def _next_to_leave(self, count: int) -> Rows:
        """Up to `count` pages of DRAM that would leave next."""
        if self.order is None:
            return self.index.lru_tail(count, FILLING)
        return self.order.next_to_leave(count, self.now_s())

    def _evictable(self, count: int) -> Rows:
        """Those of the least recent pages that may leave DRAM now, coldest first.

        Looks at some more than `count`. Pinned pages that are met are in use, so they and what
        leads to them are made recent, and it looks again; unwritten ones are queued where pages
        are written back.
        """
        scan = min(max(_SCAN_BY_AGE * count, _MIN_EVICTION_SCAN), _MAX_EVICTION_SCAN)
        for _ in range(_MAX_TAKES):
            rows = self.index.lru_tail(scan, FILLING | SPILLING | QUEUED)
            pinned = self.arena.pinned(self.index.host_slot[rows])
            stay = pinned.copy()
            if self.has_disk and self.write_policy != "selective":
                unwritten = self._unwritten(rows) & ~pinned
                if self.writes_back:
                    self._queue_unwritten(rows[unwritten][:count])
                stay |= unwritten
            if not pinned.any():
                break
            self.index.lru_touch(rows[pinned])
            for row in self.lineage.tops(rows[pinned]).tolist():
                self.index.lru_touch(self.lineage.above(row))
        return rows[~stay]

    def _remove(self, rows: Rows) -> int:
        """Forgets pages, also in the policy, because their row numbers are reused."""
        live = rows[self.index.is_live(rows)]
        self._take_off_disk(live)
        self.lineage.forget(live)
        if self.policy is not None:
            self.policy.forget(live)
        if self._waiters:
            self._end_waits(live, failed=True)  # the next page of these rows is another's
        return self.index.remove(rows)

    def _worse(self, rows: Rows, quality: Qualities) -> npt.NDArray[np.bool_]:
        """Which of the known pages are stored worse than this."""
        worse: npt.NDArray[np.bool_] = (rows >= 0) & (self.index.quality[rows] > quality)
        return worse

    def _begin_filling(self, rows: Rows, slots: Slots) -> None:
        self.index.host_slot[rows] = slots
        self.index.flags[rows] |= FILLING
        self._may_leave_changed(rows)
        self._pin_slots(slots)

    def _still_filling(self, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which rows are still the pages that began to fill these slots (not cleared since)."""
        same = self.index.is_live(rows) & (self.index.host_slot[rows] == slots)
        filling: npt.NDArray[np.bool_] = same & ((self.index.flags[rows] & FILLING) != 0)
        return filling

    def _publish(self, rows: Rows) -> None:
        self.index.flags[rows] &= np.uint8(0xFF ^ FILLING)
        self.index.flags[rows] |= READY
        self._may_leave_changed(rows)
        self.num_moved += len(rows)
        self.index.lru_add(rows[::-1])
        if self.order is not None:
            self.order.enter(rows)

    def _forget(self, rows: Rows) -> None:
        """Removes pages whose slot never became ready; a copy on disk proved unreadable."""
        self.arena.free(self.index.host_slot[rows])
        self._remove(rows)

    def _settle(self, rows: Rows, slots: Slots, *, failed: bool) -> None:
        """Ends the waits of plans for pages that were to be read into these slots.

        A row may have been cleared meanwhile and may be filling another slot now. Plans that wait
        for it then wait for the new fill, and are left waiting.
        """
        filling = self.index.is_live(rows) & ((self.index.flags[rows] & FILLING) != 0)
        others = filling & (self.index.host_slot[rows] != slots)
        self._end_waits(rows[~others], failed=failed)

    def _end_waits(self, rows: Rows, *, failed: bool) -> None:
        for row in rows.tolist():
            for plan in self._waiters.pop(row, ()):
                plan.remaining -= 1
                plan.failed |= failed

    def _touch(self, rows: Rows) -> None:
        """Makes a run of a path the most recent, and its predecessors more recent than the run."""
        self.index.lru_touch(rows[::-1])
        if len(rows) and rows[0] >= 0:
            self.index.lru_touch(self.lineage.above(int(rows[0])))
        if self.policy is not None:
            self.policy.touched(rows, self.now_s())

    def _link(self, path: Rows) -> None:
        """Notes which page follows which."""
        self.lineage.link(path)
        if self.policy is not None:
            self.policy.link(path, self.now_s())

    def _pin_slots(self, slots: Slots) -> None:
        self.arena.pin(slots)
        if self.order is not None:
            self.order.changed_slots(slots)

    def _unpin_slots(self, slots: Slots) -> None:
        self.arena.unpin(slots)
        if self.order is not None:
            self.order.changed_slots(slots)

    def _may_leave_changed(self, rows: Rows) -> None:
        """Flags changed that say whether pages may leave DRAM or the disk."""
        if self.order is not None:
            self.order.changed(rows)
        if self.disk_order is not None:
            self.disk_order.changed(rows)

    def _queue_spill(self, space: KeySpace, rows: Rows) -> None:
        flags = self.index.flags[rows]
        rows = rows[(flags & (ON_DISK | QUEUED | SPILLING)) == 0]
        if len(rows):
            self.index.flags[rows] |= QUEUED
            self._may_leave_changed(rows)
            slots = self.index.host_slot[rows].copy()
            generations = self.arena.generation[slots].copy()
            self.spill_queue.append(SpillEntry(space, rows, slots, generations))
            self.spill_ready.notify()

    def _end_in_flight(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.idle.notify_all()

    def _moved(self, rows: Rows) -> Hashes | None:
        """Tells `on_moved` of pages that come to a tier or leave one; their hashes, for the log.

        To be called while the lock is held that the pages move under.
        """
        if self.on_moved is None and not self.events.on:
            return None
        hashes = self.index.keys(rows)[0]
        if self.on_moved is not None:
            self.on_moved(hashes)
        return hashes if self.events.on else None


def _distinct(rows: Rows) -> Rows:
    """Each row once, ascending; rows that are so already, as of all pages, are not sorted again."""
    return rows if (rows[1:] > rows[:-1]).all() else np.unique(rows)


def _no_space(number: int) -> KeySpace:
    raise LookupError(f"nobody said which key space has the number {number}")
