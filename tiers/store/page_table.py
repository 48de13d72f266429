"""Rows of the index, slots of the arena, and how a page goes from one state to the next.

All state is guarded by `PageTable.lock`. Nothing here blocks on I/O.

A page in DRAM is evicted only when it is ready, unpinned, not being written to disk, and either on
disk already or not meant for it. The LRU list is touched child before parent, so a page never
outlives, in DRAM, the pages that lead to it.

`index.quality` is that of the best copy, the one in DRAM where there is one; a copy on disk is
never better than that in DRAM.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import NO_SLOT, PageIndex
from sglang_ext.tiers.quality import Qualities, Quality
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    QUEUED,
    READY,
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

# Rows of the LRU tail that one eviction looks at, so that it stays short when none can leave.
_MAX_EVICTION_SCAN = 4096
# Share of DRAM that may be pinned for waiting requests; the rest stays free to move.
_PLAN_SHARE = 0.5


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
    ) -> None:
        self.lock = threading.Lock()
        self.spill_ready = threading.Condition(self.lock)
        self.arena = arena
        self.index = index
        self.has_disk = has_disk
        self.write_policy = write_policy
        self.counters = counters
        self.events = events
        self.spill_queue: deque[SpillEntry] = deque()  # guarded by lock
        self.num_in_flight = 0  # saves and promotions that own FILLING rows; guarded by lock
        self.idle = threading.Condition(self.lock)
        # Whether any page was ever stored that is not exact; guarded by lock, never falls.
        self.has_inexact = False
        # The best that the disk tier keeps: what its codec makes of an exact page.
        self.disk_floor = int(Quality.EXACT)
        self.max_planned_pages = max(1, int(arena.num_slots * _PLAN_SHARE))
        self.num_planned_pages = 0  # pins of all plans; guarded by lock
        self._waiters: dict[int, list[Plan]] = {}  # row -> plans that wait for it
        self._clock = 0

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

    # ---- private; the caller holds the lock ----

    def _place(self, rows: Rows, copies: DiskCopies | RecoveredPages) -> None:
        self.index.segment[rows] = copies.segment
        self.index.block[rows] = copies.block
        self.index.num_blocks[rows] = copies.num_blocks
        self.index.disk_quality[rows] = copies.quality

    def _alloc(self, count: int) -> Slots:
        slots = self.arena.alloc(count)
        if len(slots) < count:
            self._evict(count - len(slots))
            slots = np.concatenate([slots, self.arena.alloc(count - len(slots))])
        return slots

    def _evict(self, count: int) -> None:
        scan = min(max(4 * count, 64), _MAX_EVICTION_SCAN)
        rows = self.index.lru_tail(scan, FILLING | SPILLING | QUEUED)
        if self.has_disk and self.write_policy != "selective":
            rows = rows[(self.index.flags[rows] & (ON_DISK | WRITE_DROPPED)) != 0]
        rows = rows[~self.arena.pinned(self.index.host_slot[rows])][:count]
        on_disk = (self.index.flags[rows] & ON_DISK) != 0
        evicted, lost = self._log_keys(rows), self._log_keys(rows[~on_disk])
        self.arena.free(self.index.host_slot[rows])
        kept = rows[on_disk]
        self.index.lru_remove(kept)
        self.index.host_slot[kept] = NO_SLOT
        self.index.quality[kept] = self.index.disk_quality[kept]
        self.index.flags[kept] &= np.uint8(0xFF ^ READY)
        self.index.remove(rows[~on_disk])
        self.counters.add("evicted_pages", len(rows))
        self.counters.add("lost_pages", int((~on_disk).sum()))
        if evicted is not None and lost is not None:
            self.events.pages("evicted", evicted)
            self.events.pages("lost", lost)

    def _worse(self, rows: Rows, quality: Qualities) -> npt.NDArray[np.bool_]:
        """Which of the known pages are stored worse than this."""
        worse: npt.NDArray[np.bool_] = (rows >= 0) & (self.index.quality[rows] > quality)
        return worse

    def _begin_filling(self, rows: Rows, slots: Slots) -> None:
        self.index.host_slot[rows] = slots
        self.index.flags[rows] |= FILLING
        self.arena.pin(slots)

    def _still_filling(self, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which rows are still the pages that began to fill these slots (not cleared since)."""
        same = self.index.is_live(rows) & (self.index.host_slot[rows] == slots)
        filling: npt.NDArray[np.bool_] = same & ((self.index.flags[rows] & FILLING) != 0)
        return filling

    def _publish(self, rows: Rows) -> None:
        self.index.flags[rows] &= np.uint8(0xFF ^ FILLING)
        self.index.flags[rows] |= READY
        self.index.lru_add(rows[::-1])

    def _forget(self, rows: Rows) -> None:
        """Removes pages whose slot never became ready; a copy on disk proved unreadable."""
        self.arena.free(self.index.host_slot[rows])
        self.index.remove(rows)

    def _settle(self, rows: Rows, *, failed: bool) -> None:
        for row in rows.tolist():
            for plan in self._waiters.pop(row, ()):
                plan.remaining -= 1
                plan.failed |= failed

    def _touch(self, rows: Rows) -> None:
        self.index.lru_touch(rows[::-1])

    def _queue_spill(self, space: KeySpace, rows: Rows) -> None:
        flags = self.index.flags[rows]
        rows = rows[(flags & (ON_DISK | QUEUED | SPILLING)) == 0]
        if len(rows):
            self.index.flags[rows] |= QUEUED
            slots = self.index.host_slot[rows].copy()
            generations = self.arena.generation[slots].copy()
            self.spill_queue.append(SpillEntry(space, rows, slots, generations))
            self.spill_ready.notify()

    def _end_in_flight(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.idle.notify_all()

    def _log_keys(self, rows: Rows) -> Hashes | None:
        return self.index.keys(rows)[0] if self.events.on else None
