"""What lies on disk, and what is to be written there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.store.books.disk_order import DiskOrder
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import (
    FILLING,
    GIVEN_UP,
    ON_DISK,
    QUEUED,
    READY,
    SPILLING,
    WRITE_DROPPED,
    DiskCopies,
    Hashes,
    KeySpace,
    Rows,
    SpillEntry,
)

# Pages that write-back keeps free or written ahead of saves, unless one save was larger.
_MAX_CLEAN_PAGES = 1024
# It looks again when this part of the target number of pages moved, or after so many seconds.
_LOOKS = 8
_LOOK_S = 0.1


class DiskBook(PageTable):
    """The disk's part of the directory; methods take the lock unless they begin with `_`."""

    _look_at, _look_s = 0, 0.0  # number of moves and time of the next look; guarded by lock

    def add_recovered(self, space: KeySpace, pages: RecoveredPages) -> int:
        """Enters pages that a former run left on disk; returns how many found room.

        Of a page that is there twice the best copy counts, of equal ones the last.
        """
        if pages.quality.any():
            self.has_inexact = True
            pages = pages.take(np.argsort(~pages.quality, kind="stable"))
        with self.lock:
            rows, _ = self.index.insert(pages.hashes, space.number)
            known = rows >= 0
            rows = rows[known]
            self._place(rows, pages.take(known))
            self.index.quality[rows] = self.index.disk_quality[rows]
            if self.disk_order is not None:  # copies that do not count, holes
                self.disk_order.note_thin(pages.segment)
            return int(known.sum())

    def move_on_disk(self, space: KeySpace, old_segment: int, pages: RecoveredPages) -> None:
        """Notes that reclaiming a segment copied some of its pages elsewhere."""
        with self.lock:
            rows = self.index.lookup(pages.hashes, space.number)
            held = np.maximum(rows, 0)
            moved = (rows >= 0) & (self.index.segment[held] == old_segment)
            # The segment may also hold the worse copy that this one replaced.
            moved &= self.index.disk_quality[held] == pages.quality
            # The segment may also hold a page twice: of two copies the last counts.
            which = np.flatnonzero(moved)[::-1]
            _, first = np.unique(rows[which], return_index=True)
            which = which[np.sort(first)][::-1]
            rows, pages = rows[which], pages.take(which)
            if self.disk_order is not None:
                self.disk_order.lift(rows)
            self._set_place(rows, pages)
            if self.disk_order is not None:
                self.disk_order.lie(rows)

    def drop_segment(self, segment: int) -> None:
        """Forgets the disk copies in a segment that is about to be deleted."""
        with self.lock:
            self._drop_from_disk(self._rows_of_segment(segment))
        self.events.settle()

    def give_up(self, num_blocks: int) -> int:
        """Forgets the disk copies needed least until `num_blocks` blocks are free or none is left.

        Returns:
            The blocks given up; 0 where there is nothing left, or segments go as a whole.
        """
        if self.disk_order is None:
            return 0
        with self.lock:
            duplicates = self._take_doubles(num_blocks)
            given_up = int(self.index.num_blocks[duplicates].sum())
            self._drop_duplicates(duplicates)
            rows = self.disk_order.take(num_blocks - given_up, self.now_s())
            given_up += int(self.index.num_blocks[rows].sum())
            self._drop_from_disk(rows)
            if given_up:  # if nothing was freed, it is not pages that take the room
                self._note_full()
        self.events.settle()
        return given_up

    def begin_closing(self) -> None:
        """Shutdown begins: DRAM will be lost, so a DRAM copy no longer makes a disk copy spare."""
        with self.lock:
            self.closing = True

    def _note_full(self) -> None:
        self.disk_is_full = True
        if self.order is not None and self.writes_back:
            # From now on an unwritten page is held in DRAM only while it is queued for the disk.
            self.order.disk_first = False

    def _take_doubles(self, num_blocks: int) -> Rows:
        if self.duplicates is None or not self.writes_back or self.closing:
            return np.empty(0, np.int64)
        return self.duplicates.take(num_blocks)

    def _drop_duplicates(self, rows: Rows) -> None:
        """Forgets disk copies of pages that DRAM has, and may write again when they leave it."""
        self._take_off_disk(rows)
        self.index.flags[rows] |= GIVEN_UP
        self._may_leave_changed(rows)
        self.counters.add("given_up_pages", len(rows))
        self.counters.add("disk_reclaimed_pages", len(rows))
        hashes = self._moved(rows)
        if hashes is not None:
            self.events.pages("reclaimed", hashes)

    def live_records(
        self, segment: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]] | None:
        """First blocks, ascending, and lengths of those records of a segment that are pages.

        None where that is not known page by page.
        """
        if self.disk_order is None:
            return None
        with self.lock:
            return self.disk_order.live(segment)

    def num_live_blocks(self, segment: int) -> int:
        """Blocks of these records; 0 where that is not known."""
        if self.disk_order is None:
            return 0
        with self.lock:
            return self.disk_order.num_live(segment)

    def take_thinned(self) -> dict[int, int]:
        """Segments that lost pages since the last call, and the blocks of those left."""
        if self.disk_order is None:
            return {}
        with self.lock:
            return self.disk_order.take_thinned()

    def heat(self, space: KeySpace, hashes: Hashes, clock: int) -> npt.NDArray[np.uint8]:
        """What pages are worth: 2 where a waiting request needs one, 1 where one was loaded.

        Args:
            space: where they belong.
            hashes: u8 `[N, 32]`.
            clock: loads before this point of the logical clock do not count.
        """
        with self.lock:
            rows = self.index.lookup(hashes, space.number)
            heat = np.zeros(len(rows), np.uint8)
            known = np.flatnonzero(rows >= 0)
            rows = rows[known]
            heat[known] = self.index.stamp[rows] > max(clock, 0)
            if self.policy is not None:
                heat[known[self.policy.wanted(rows)]] = 2
            return heat

    def _rows_of_segment(self, segment: int) -> Rows:
        if self.disk_order is None:
            return self.index.rows_of_segment(segment)
        return self.disk_order.rows_of(segment)

    def _drop_from_disk(self, rows: Rows) -> None:
        """Forgets disk copies; what DRAM does not have either is gone."""
        in_dram = (self.index.flags[rows] & (READY | FILLING)) != 0
        if self.policy is not None:
            wanted = self.policy.wanted(rows)
            self.counters.add("disk_evicted_wanted_pages", int(wanted.sum()))
            self.counters.add("lost_wanted_pages", int(wanted[~in_dram].sum()))
        self._take_off_disk(rows)
        # They are not written again (that could repeat for ever), so DRAM may evict them.
        self.index.flags[rows[in_dram]] |= WRITE_DROPPED
        self._may_leave_changed(rows[in_dram])
        self.counters.add("disk_reclaimed_pages", len(rows))
        dropped = self._moved(rows)
        self._remove(rows[~in_dram])
        if dropped is not None:
            self.events.pages("lost", dropped[~in_dram])
            self.events.pages("reclaimed", dropped[in_dram])

    def num_needed(self, segment: int) -> int:
        """Pages in a disk segment that waiting requests need and DRAM does not have (linear)."""
        if self.policy is None:
            return 0
        with self.lock:
            rows = self._rows_of_segment(segment)
            rows = rows[(self.index.flags[rows] & READY) == 0]
            return int(self.policy.wanted(rows).sum())

    @property
    def clock(self) -> int:
        """Logical time: number of loads so far."""
        return self._clock

    def take_clears(self) -> list[bytes]:
        """Takes the namespaces that the disk is to clear; ends with `end_clears`."""
        with self.lock:
            return sorted(self.to_clear)

    def end_clears(self, digests: list[bytes]) -> None:
        """The disk was told to clear these: it may get pages again."""
        with self.lock:
            self.to_clear.difference_update(digests)
            # The disk may have room for every page again, so it need not refuse any. Except under
            # `auto`: it never returns from write-back to write-through.
            if not self.to_clear and self.write_policy != "auto":
                self.disk_is_full = False

    def take_spills(self, max_pages: int) -> SpillEntry | None:
        """Takes queued pages of one key space for the spiller, pinned; None when there are none.

        None, too, while the disk has namespaces to clear: what it got now would go with them.
        """
        with self.lock:
            if self.to_clear:
                return None
            while (queued := self._next_queued(max_pages)) is not None:
                entry = self._admitted(queued)
                if not len(entry.rows):
                    continue
                self.index.flags[entry.rows] |= SPILLING
                self._may_leave_changed(entry.rows)
                self._pin_slots(entry.slots)
                self.num_spilling = len(entry.rows)
                return entry
            return None

    def finish_spill(
        self,
        entry: SpillEntry,
        stored: npt.NDArray[np.bool_],
        copies: DiskCopies,
    ) -> None:
        """Enters the disk locations of written pages; only now are they acknowledged.

        What lies in DRAM keeps its quality, however lossy the copy on disk is.
        """
        with self.lock:
            rows = entry.rows
            same = self.index.is_live(rows) & (self.index.host_slot[rows] == entry.slots)
            same &= (self.index.flags[rows] & SPILLING) != 0
            self.index.flags[rows[same]] &= np.uint8(0xFF ^ (QUEUED | SPILLING))
            stored = stored & same
            done = rows[stored]
            self.has_inexact |= bool(copies.quality[stored].any())
            copies = copies.take(stored)
            num_again = int(((self.index.flags[done] & GIVEN_UP) != 0).sum())
            # A page that is lossy in DRAM is no better on disk, however it is coded there.
            quality = np.maximum(copies.quality, self.index.quality[done])
            self._place(done, copies._replace(quality=quality))
            self.index.flags[rows[same & ~stored]] |= WRITE_DROPPED
            self._may_leave_changed(rows[same])
            self._unpin_slots(entry.slots)
            hashes = self._moved(done)
        self.counters.add("written_pages", int(stored.sum()))
        self.counters.add("written_again_pages", num_again)
        self.counters.add("write_dropped_pages", int((~stored).sum()))
        if hashes is not None:
            self.events.pages("written", hashes)
        self.num_spilling = 0  # last: whoever reads 0 also sees the updated counters and log

    @property
    def num_queued(self) -> int:
        """Pages on their way to disk, those that are being written among them."""
        with self.lock:
            return self._num_queued

    @property
    def _num_queued(self) -> int:
        return self.num_spilling + sum(len(entry.rows) for entry in self.spill_queue)

    @property
    def should_look(self) -> bool:
        """Whether enough moved for `queue_leaving` to look again; the lock is held."""
        return self.writes_back and self.num_moved >= self._look_at

    def queue_leaving(self, num_pages: int) -> None:
        """Queues for writing those pages that leave DRAM next and still have to go to disk.

        Looks only where enough has changed since the last look, or some time has passed.

        Args:
            num_pages: pages that should be free, able to leave, or on their way to disk (more if
                saves were larger).
        """
        with self.lock:
            num_pages = max(min(num_pages, _MAX_CLEAN_PAGES), int(self.burst_pages))
            now_s = self.now_s()
            if self.num_moved < self._look_at and now_s < self._look_s:
                return
            self._look_at = self.num_moved + max(1, num_pages // _LOOKS)
            self._look_s = now_s + _LOOK_S
            # What is on its way to disk stands in no order of leaving, but will be able to leave.
            num_queued = self._num_queued if self.order is not None else 0
            rows = self._next_to_leave(max(0, num_pages - self.arena.num_free - num_queued))
            self._queue_unwritten(rows[self._unwritten(rows)])

    def queue_all(self) -> int:
        """Queues all pages that are not on disk (linear); for a flush, which may run out of time.

        The most recent pages come first, and a parent before its children, so that every page
        that a flush wrote before it ran out of time can be used.
        """
        with self.lock:
            rows = self.index.lru_tail(
                self.arena.num_slots, ON_DISK | QUEUED | SPILLING | FILLING | WRITE_DROPPED
            )
            self._queue_by_space(rows[::-1])
            return len(rows)

    def num_unwritten(self) -> int:
        """Pages in DRAM that the disk neither has nor refused (linear)."""
        with self.lock:
            return len(self.index.lru_tail(self.arena.num_slots, ON_DISK | WRITE_DROPPED))

    def num_only_in_dram(self) -> int:
        """Pages in DRAM that the disk does not have, those that it refused among them (linear)."""
        with self.lock:
            return len(self.index.lru_tail(self.arena.num_slots, ON_DISK))

    def _next_queued(self, max_pages: int) -> SpillEntry | None:
        """Takes pages of one key space out of the queue, those that are still to be written."""
        taken: list[SpillEntry] = []
        num = 0
        while self.spill_queue and num < max_pages:
            entry = self.spill_queue[0]
            if taken and entry.space != taken[0].space:
                break
            self.spill_queue.popleft()
            if len(entry.rows) > max_pages - num:
                entry, rest = _split(entry, max_pages - num)
                self.spill_queue.appendleft(rest)
            entry = self._still_valid(entry)
            if len(entry.rows):
                taken.append(entry)
                num += len(entry.rows)
        if not num:
            return None
        return SpillEntry(
            taken[0].space,
            np.concatenate([entry.rows for entry in taken]),
            np.concatenate([entry.slots for entry in taken]),
            np.concatenate([entry.generations for entry in taken]),
        )

    def _admitted(self, entry: SpillEntry) -> SpillEntry:
        """Those of some pages that the disk is to take; the others may leave DRAM all the same.

        A page that nobody waits for does not take the place of one that somebody waits for, nor one
        that is needed later that of one that is needed sooner.
        """
        if self.disk_order is None or not self.disk_is_full:
            return entry
        return self._refuse(entry, self._outweigh(self.disk_order, entry.rows))

    def _outweigh(self, order: DiskOrder, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these pages are worth more than the disk pages that they would replace."""
        num, spare = len(rows), 0
        if self.writes_back and self.duplicates is not None and not self.closing:
            spare = self.duplicates.count(num)
        displaced = order.next_to_leave(num - spare, self.now_s())
        by_worth = order.by_worth(rows, self.now_s())
        admitted = np.ones(num, np.bool_)
        rivals = by_worth[spare : spare + len(displaced)]
        # What is written as it is saved is the youngest; what leaves DRAM may be worth less than
        # what is on disk already.
        admitted[rivals] = order.outweigh(
            rows[rivals], displaced, self.now_s(), by_score=self.writes_back
        )
        return admitted

    def _refuse(self, entry: SpillEntry, admitted: npt.NDArray[np.bool_]) -> SpillEntry:
        refused = entry.rows[~admitted]
        self.index.flags[refused] &= np.uint8(0xFF ^ QUEUED)
        self.index.flags[refused] |= WRITE_DROPPED
        self._may_leave_changed(refused)
        self.counters.add("not_admitted_pages", len(refused))
        return _take(entry, admitted)

    def _reconsider(self, space: KeySpace, rows: Rows) -> None:
        """Somebody waits for these pages: what the disk did not take is offered to it again."""
        if self.disk_order is None or self.write_policy == "selective":
            return
        flags = self.index.flags[rows]
        rows = rows[(flags & (WRITE_DROPPED | READY | ON_DISK)) == (WRITE_DROPPED | READY)]
        if len(rows):
            self.index.flags[rows] &= np.uint8(0xFF ^ WRITE_DROPPED)
            if self.writes_through:
                self._queue_spill(space, rows)

    def _offer_again(self, rows: Rows) -> None:
        """Pages were used: what the disk refused is worth more now, and offered as it leaves."""
        if self.disk_order is not None and self.writes_back:
            self.index.flags[rows] &= np.uint8(0xFF ^ WRITE_DROPPED)

    def _still_valid(self, entry: SpillEntry) -> SpillEntry:
        same = (
            self.index.is_live(entry.rows)
            & (self.index.host_slot[entry.rows] == entry.slots)
            & (self.arena.generation[entry.slots] == entry.generations)
            & ((self.index.flags[entry.rows] & QUEUED) != 0)
        )
        return _take(entry, same)


def _take(entry: SpillEntry, mask: npt.NDArray[np.bool_]) -> SpillEntry:
    return SpillEntry(entry.space, entry.rows[mask], entry.slots[mask], entry.generations[mask])


def _split(entry: SpillEntry, at: int) -> tuple[SpillEntry, SpillEntry]:
    head = SpillEntry(entry.space, entry.rows[:at], entry.slots[:at], entry.generations[:at])
    tail = SpillEntry(entry.space, entry.rows[at:], entry.slots[at:], entry.generations[at:])
    return head, tail
