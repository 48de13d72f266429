"""Slots of DRAM, and what leaves it to make room.

A page in DRAM may be evicted only if it is ready, unpinned and not being written to disk. It must
also be on disk already or not meant for it; under write-back, eviction queues an unwritten page
that it meets. `DramOrder` chooses the page.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.store.books.eviction.dram_order import DramOrder
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.spill_queue import SpillQueue
from sglang_ext.tiers.store.books.write_policy import WritePolicy
from sglang_ext.tiers.store.types import (
    ON_DISK,
    SENT,
    WRITE_DROPPED,
    Hashes,
    Rows,
    Slots,
)

# How often room is asked for again because pages were met that stay.
_MAX_TAKES = 16
# Share of DRAM that saves leave free for promotions.
_RESERVE_SHARE = 1 / 32
_BURST_FADES = 0.99  # what the largest save counts for, at each save after it
# Pages that write-back keeps free or written ahead of saves, unless one save was larger.
_MAX_CLEAN_PAGES = 1024
# It looks again when this part of the target number of pages moved, or after so many seconds.
_LOOKS = 8
_LOOK_S = 0.1


class DramRoom:
    """Gives out slots. The caller holds the table's lock, but around `queue_leaving`.

    Args:
        table: the pages.
        spills: what is on its way to disk.
        writing: when pages are written.

    Attributes:
        num_wanted_evicted: pages that left DRAM although wanted.
        on_unsent: told of pages that leave DRAM and were not sent to the remote store: hashes,
            namespace numbers, whether they are on disk. None: nobody is.
    """

    _look_at, _look_s = 0, 0.0  # number of moves and time of the next look

    def __init__(self, table: PageTable, spills: SpillQueue, writing: WritePolicy) -> None:
        self._table, self._index, self._arena = table, table.index, table.arena
        self._spills, self._writing = spills, writing
        # Slots that saves leave free, so that a promotion never waits for room.
        self._num_reserved = 0
        if table.disk_order is not None:
            self._num_reserved = int(table.arena.num_slots * _RESERVE_SHARE)
        self._burst_pages = 0.0  # slots that one save asked for, of late
        self.num_wanted_evicted = 0
        self.on_unsent: (
            Callable[[Hashes, npt.NDArray[np.uint32], npt.NDArray[np.bool_]], None] | None
        ) = None

    def alloc(self, count: int, keep: int = 0, tenant: int | None = None) -> Slots:
        """Takes up to `count` slots, and makes room for them, so that `keep` others stay free."""
        short = count + keep - self._arena.num_free
        if short > 0:
            self.evict(short, tenant)
        return self._arena.alloc(min(count, max(0, self._arena.num_free - keep)))

    def alloc_for_save(self, count: int, tenant: int) -> Slots:
        """The same for a save of a tenant's, which leaves some slots for promotions."""
        return self.alloc(count, keep=self._num_reserved, tenant=tenant)

    def note_save(self, count: int) -> None:
        """A save asks for so many slots."""
        self._burst_pages = max(count + self._num_reserved, self._burst_pages * _BURST_FADES)

    def evict(self, count: int, tenant: int | None = None) -> None:
        """Up to `count` pages leave DRAM, for pages of a tenant where that is known."""
        table = self._table
        rows = self.victims(count, tenant)
        on_disk = (self._index.flags[rows] & ON_DISK) != 0
        evicted = table.moved(rows)
        if self.on_unsent is not None:
            unsent = (self._index.flags[rows] & SENT) == 0
            unsent &= ~self._index.are_disowned(rows)  # what was cleared goes nowhere
            over = unsent & table.order.are_over(rows)  # nor does what nobody is to want again
            table.counters.add("remote_spared_pages", int(over.sum()))
            unsent &= ~over
            if unsent.any():
                self.on_unsent(*self._index.keys(rows[unsent]), on_disk[unsent])
        self._arena.free(self._index.host_slot[rows])
        table.leave_dram(rows[on_disk])
        # Asked before the policy forgets them.
        num_lost_wanted = int(table.policy.wanted(rows[~on_disk]).sum())
        table.counters.add("lost_wanted_pages", num_lost_wanted)
        table.remove(rows[~on_disk], Absence.EVICTED_HOST)
        table.num_moved += len(rows)
        table.counters.add("evicted_pages", len(rows))
        table.counters.add("lost_pages", int((~on_disk).sum()))
        if evicted is not None:
            table.events.pages("evicted", evicted)
            table.events.pages("lost", evicted[~on_disk])

    def victims(self, count: int, tenant: int | None = None) -> Rows:
        """Up to `count` pages to evict, in the order in which they leave."""
        table = self._table
        victims = self._take_clean(table.order, count, tenant)
        num_wanted = int(table.policy.wanted(victims).sum())
        self.num_wanted_evicted += num_wanted
        table.counters.add("evicted_wanted_pages", num_wanted)
        return victims

    def next_to_leave(self, count: int) -> Rows:
        """Up to `count` pages of DRAM that would leave next."""
        return self._table.order.next_to_leave(count, self._table.now_s())

    @property
    def should_look(self) -> bool:
        """Whether enough moved for `queue_leaving` to look again."""
        return self._writing.back and self._table.num_moved >= self._look_at

    def queue_leaving(self, num_pages: int) -> None:
        """Queues for writing those pages that leave DRAM next and still have to go to disk.

        Looks only where enough has changed since the last look, or some time has passed. Takes the
        lock.

        Args:
            num_pages: pages that should be free, able to leave, or on their way to disk (more if
                saves were larger).
        """
        table = self._table
        with table.lock:
            num_pages = max(min(num_pages, _MAX_CLEAN_PAGES), int(self._burst_pages))
            now_s = table.now_s()
            if table.num_moved < self._look_at and now_s < self._look_s:
                return
            self._look_at = table.num_moved + max(1, num_pages // _LOOKS)
            self._look_s = now_s + _LOOK_S
            # What is on its way to disk stands in no order of leaving, but will be able to leave.
            num_queued = self._spills.num_queued
            rows = self.next_to_leave(max(0, num_pages - self._arena.num_free - num_queued))
            self._spills.queue_leaving(rows[self._unwritten(rows)])

    def _take_clean(self, order: DramOrder, count: int, tenant: int | None) -> Rows:
        """Takes up to `count` pages out of DRAM's order; those that the disk is to have stay.

        They are queued for it, and leave when it has them, or does not want them.
        """
        now_s = self._table.now_s
        if not self._writing.back:
            return order.take(count, now_s(), tenant)
        for attempt in range(_MAX_TAKES):
            rows = order.take(count, now_s(), tenant)
            unwritten = self._unwritten(rows)
            if not unwritten.any():
                break
            # What leads to a page that stays must stay, so the order is asked again.
            last = attempt == _MAX_TAKES - 1
            clean = int(np.argmax(unwritten)) if last else 0
            order.put_back(rows[clean:])
            self._spills.queue_leaving(rows[unwritten])
            rows = rows[:clean]
        return rows

    def _unwritten(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages of DRAM the disk neither has nor refused, without those that were cleared."""
        unwritten: npt.NDArray[np.bool_] = (
            self._index.flags[rows] & (ON_DISK | WRITE_DROPPED)
        ) == 0
        unwritten &= ~self._index.are_disowned(rows)
        return unwritten
