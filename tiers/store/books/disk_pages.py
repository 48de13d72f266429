"""What lies on disk, what the disk gives up, and what it takes instead.

Given up are first disk copies of pages that DRAM has, where they can be written again
(`eviction/duplicate_copies.py`), then pages in the order of `eviction/disk_order.py`. Where that
makes no room, `tiers/disk/reclaim.py` drops whole segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.store.books.eviction.disk_order import DiskOrder
from sglang_ext.tiers.store.books.eviction.duplicate_copies import DuplicateCopies
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_states import GIVE_UP_COPY, LOSE_COPY
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.write_policy import WritePolicy
from sglang_ext.tiers.store.types import FILLING, READY, Hashes, KeySpace, Rows

# Recovered pages that are entered under one hold of the lock: a few milliseconds.
_ENTERED_AT_ONCE = 2048
# Pages whose copies on disk are forgotten under one: the same.
_LOST_AT_ONCE = 2048
# Between two holds. Who waits for a lock that is taken again at once does not get it.
_BETWEEN_S = 0.0005


class DiskPages:
    """The disk tier's keeper (see `disk/disk_context.py`), and what its segments are to the table.

    Methods take the table's lock, but those behind the line. It has many methods because a keeper
    is asked many things, and each answer is made whole under the lock.

    Args:
        table: the pages.
        writing: when pages are written.
    """

    def __init__(self, table: PageTable, writing: WritePolicy) -> None:
        self._table, self._index = table, table.index
        self._writing = writing
        # Those pages of DRAM and disk whose copy on disk goes first.
        self._duplicates: DuplicateCopies | None = None
        if table.disk_order is not None:
            self._duplicates = DuplicateCopies(table.index, table.arena.num_slots)

    def add_recovered(
        self, space: KeySpace, pages: RecoveredPages, is_void: Callable[[], bool] = lambda: False
    ) -> int:
        """Enters pages that a former run left on disk; returns how many found room.

        Of a page that is there twice the best copy counts, of equal ones the last. One that was
        stored since this server started stays as it is. The lock is given back again and again:
        there may be millions, and a server that is given former weights goes on meanwhile.

        Args:
            space: where they belong.
            pages: on disk.
            is_void: whether the disk is to lose them; asked with the lock held.
        """
        if pages.quality.any():
            self._table.has_inexact = True
            pages = pages.take(np.argsort(~pages.quality, kind="stable"))
        counting = _last_of_each(pages.hashes)
        if len(counting) < len(pages):  # copies that do not count: holes
            self.leave_out(pages)
        total = 0
        for first in range(0, len(counting), _ENTERED_AT_ONCE):
            if first:
                time.sleep(_BETWEEN_S)
            part = pages.take(counting[first : first + _ENTERED_AT_ONCE])
            with self._table.lock:
                if is_void():
                    break
                total += self._enter(space, part)
        return total

    def _enter(self, space: KeySpace, pages: RecoveredPages) -> int:
        """The same of pages none of which is there twice; the caller holds the lock."""
        is_new = self._index.lookup(pages.hashes, space.number) < 0
        rows, _ = self._index.insert(pages.hashes, space.number)
        known = is_new & (rows >= 0)
        rows = rows[known]
        self._table.place(rows, pages.take(known))
        self._index.quality[rows] = self._index.disk_quality[rows]
        if self._table.disk_order is not None:  # copies that do not count, holes
            self._table.disk_order.note_thin(pages.segment)
        return int(known.sum())

    def leave_out(self, pages: RecoveredPages) -> None:
        """Notes that records which a former run left are no pages; their places are used again."""
        if self._table.disk_order is not None:
            with self._table.lock:
                self._table.disk_order.note_thin(pages.segment)

    def move(self, numbers: Rows, old_segment: int, pages: RecoveredPages) -> None:
        """Notes that reclaiming a segment copied some of its pages elsewhere.

        Args:
            numbers: i64 `[N]`, the key space of each; below 0: nobody knows it.
            old_segment: where they lay.
            pages: `[N]`, where they lie now.
        """
        with self._table.lock:
            rows = self._index.lookup_each(pages.hashes, numbers)
            held = np.maximum(rows, 0)
            moved = (rows >= 0) & (self._index.segment[held] == old_segment)
            # The segment may also hold the worse copy that this one replaced.
            moved &= self._index.disk_quality[held] == pages.quality
            # The segment may also hold a page twice: of two copies the last counts.
            which = np.flatnonzero(moved)[::-1]
            _, first = np.unique(rows[which], return_index=True)
            which = which[np.sort(first)][::-1]
            self._table.move_on_disk(rows[which], pages.take(which))

    def drop_segment(self, segment: int) -> None:
        """Forgets the disk copies in a segment that is about to be deleted."""
        while True:  # no page comes to it any more
            with self._table.lock:
                rows = self._rows_of(segment, _LOST_AT_ONCE)
                self._lose(rows)
            if len(rows) < _LOST_AT_ONCE:
                break
            time.sleep(_BETWEEN_S)
        self._table.events.settle()

    def give_up(self, num_blocks: int) -> int:
        """Forgets the disk copies needed least until `num_blocks` blocks are free or none is left.

        Returns:
            The blocks given up; 0 where there is nothing left.
        """
        order, given_up = self._table.disk_order, 0
        if order is None:
            return 0
        while given_up < num_blocks:
            if given_up:
                time.sleep(_BETWEEN_S)
            with self._table.lock:
                freed = self._give_up_some(order, num_blocks - given_up)
            if not freed:
                break
            given_up += freed
        self._table.events.settle()
        return given_up

    def begin_closing(self) -> None:
        """Shutdown begins: DRAM will be lost, so a DRAM copy no longer makes a disk copy spare."""
        with self._table.lock:
            self._writing.closing = True

    def live_records(
        self, segment: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]] | None:
        """First blocks, ascending, and lengths of those records of a segment that are pages.

        None without a disk.
        """
        order = self._table.disk_order
        if order is None:
            return None
        with self._table.lock:
            return order.live(segment)

    def num_live_blocks(self, segment: int) -> int:
        """Blocks of these records."""
        order = self._table.disk_order
        if order is None:
            return 0
        with self._table.lock:
            return order.num_live(segment)

    def take_thinned(self) -> dict[int, int]:
        """Segments that lost pages since the last call, and the blocks of those left."""
        order = self._table.disk_order
        if order is None:
            return {}
        with self._table.lock:
            return order.take_thinned()

    def heat(self, numbers: Rows, hashes: Hashes, clock: int) -> npt.NDArray[np.uint8]:
        """What pages are worth: 2 where a waiting request needs one, 1 where one was loaded.

        Args:
            numbers: i64 `[N]`, the key space of each; below 0: nobody knows it.
            hashes: u8 `[N, 32]`.
            clock: loads before this point of the logical clock do not count.
        """
        with self._table.lock:
            rows = self._index.lookup_each(hashes, numbers)
            heat = np.zeros(len(rows), np.uint8)
            known = np.flatnonzero(rows >= 0)
            rows = rows[known]
            heat[known] = self._index.stamp[rows] > max(clock, 0)
            heat[known[self._table.policy.wanted(rows)]] = 2
            return heat

    def num_needed(self, segment: int) -> int:
        """Pages in a disk segment that waiting requests need and DRAM does not have (linear)."""
        with self._table.lock:
            rows = self._rows_of(segment)
            rows = rows[(self._index.flags[rows] & READY) == 0]
            return int(self._table.policy.wanted(rows).sum())

    # ---- the caller holds the lock ----

    def free_rows(self, num: int) -> None:
        """Forgets disk copies needed least until `num` rows of the index are free or none is left.

        Coded pages may be shorter than they were expected to be, so that the index is full where
        the disk is not. Their records are nobody's then, and give their place up as such.
        """
        order = self._table.disk_order
        if order is None or num <= 0:
            return
        self._writing.note_full()  # from here on each page takes another one's place
        while num > 0 and len(rows := order.take_pages(num, self._table.now_s())):
            num -= int(((self._index.flags[rows] & (READY | FILLING)) == 0).sum())
            self._lose(rows)

    def note_read(self, rows: Rows) -> None:
        """Pages were read from disk and are ready in DRAM: their copies are spare for now."""
        if self._duplicates is not None:
            self._duplicates.push(rows)

    def admits(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which of some pages the disk is to take; None for all.

        A page that nobody waits for does not take the place of one that somebody waits for, nor one
        that is needed later that of one that is needed sooner.
        """
        order = self._table.disk_order
        if order is None or not self._writing.disk_is_full:
            return None
        return self._outweigh(order, rows)

    def _outweigh(self, order: DiskOrder, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these pages are worth more than the disk pages that they would replace.

        And those that lead to these or to pages on disk, whatever they are worth among pages that
        are needed no sooner: without them DRAM would lose what leads there, and the others would
        take room for nothing. Of a path that finds room in part, the start.
        """
        num, spare, now_s = len(rows), 0, self._table.now_s()
        if self._duplicates is not None and self._has_spare:
            spare = self._duplicates.count(min(num, self._writing.num_to_give_up))
        displaced = order.next_to_leave(num - spare, now_s)
        by_worth = order.by_worth(rows, now_s)
        admitted = np.ones(num, np.bool_)
        rivals = by_worth[spare : spare + len(displaced)]
        # What is written as it is saved is the youngest; what leaves DRAM may be worth less than
        # what is on disk already.
        admitted[rivals] = order.outweigh(
            rows[rivals], displaced, now_s, by_score=self._writing.back
        )
        if admitted.all():
            return admitted
        chosen = order.with_what_leads(rows, admitted)
        rivals = by_worth[chosen[by_worth]][spare : spare + len(displaced)]
        displaced = displaced[: len(rivals)]
        chosen[rivals] = ~order.are_needed_less(rows[rivals], displaced)
        return admitted | chosen

    def _give_up_some(self, order: DiskOrder, num_blocks: int) -> int:
        """`give_up` as far as it goes under one hold of the lock; the blocks, 0 for none left."""
        given_up = self._give_up_duplicates(num_blocks)
        if not given_up:
            rows = order.take(num_blocks, self._table.now_s(), _LOST_AT_ONCE)
            given_up = int(self._index.num_blocks[rows].sum())
            self._lose(rows)
        if given_up:  # if nothing was freed, it is not pages that take the room
            self._writing.note_full()
        return given_up

    @property
    def _has_spare(self) -> bool:
        return self._writing.back and not self._writing.closing

    def _give_up_duplicates(self, num_blocks: int) -> int:
        """Forgets disk copies of pages that DRAM has, and may write again when they leave it."""
        if self._duplicates is None or not self._has_spare:
            return 0
        most = min(self._writing.num_to_give_up, _LOST_AT_ONCE)
        rows = self._duplicates.take(num_blocks, most)
        given_up = int(self._index.num_blocks[rows].sum())
        self._table.take_off_disk(rows)
        self._table.take(GIVE_UP_COPY, rows)
        self._table.counters.add("given_up_pages", len(rows))
        self._table.counters.add("disk_reclaimed_pages", len(rows))
        hashes = self._table.moved(rows)
        if hashes is not None:
            self._table.events.pages("reclaimed", hashes)
        return given_up

    def _rows_of(self, segment: int, most: int | None = None) -> Rows:
        order = self._table.disk_order
        return np.empty(0, np.int64) if order is None else order.rows_of(segment, most)

    def _lose(self, rows: Rows) -> None:
        """Forgets disk copies; what DRAM does not have either is gone."""
        table = self._table
        in_dram = (self._index.flags[rows] & (READY | FILLING)) != 0
        wanted = table.policy.wanted(rows)
        table.counters.add("disk_evicted_wanted_pages", int(wanted.sum()))
        table.counters.add("lost_wanted_pages", int(wanted[~in_dram].sum()))
        table.take_off_disk(rows)
        # They are not written again (that could repeat for ever), so DRAM may evict them, unless
        # they are used.
        table.take(LOSE_COPY, rows[in_dram])
        table.counters.add("disk_reclaimed_pages", len(rows))
        dropped = table.moved(rows)
        table.remove(rows[~in_dram], Absence.EVICTED_DISK)
        if dropped is not None:
            table.events.pages("lost", dropped[~in_dram])
            table.events.pages("reclaimed", dropped[in_dram])


def _last_of_each(hashes: Hashes) -> Rows:
    """Rows of the last of equal hashes, ascending."""
    words = np.ascontiguousarray(hashes).view(np.uint64)
    firsts = np.sort(words[:, 0])
    if not (firsts[1:] == firsts[:-1]).any():  # as nearly always, and far less to sort
        return np.arange(len(words))
    order = np.lexsort(words.T)  # of equal ones the last stays the last
    words = words[order]
    is_last = np.append((words[1:] != words[:-1]).any(axis=1), True)
    return np.sort(order[is_last])
