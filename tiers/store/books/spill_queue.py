"""What is to be written to disk, and the namespaces that the disk is to lose before that."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.store.books.disk_pages import DiskPages
from sglang_ext.tiers.store.books.page_states import (
    DROP_WRITE,
    END_SPILL,
    OFFER,
    QUEUE,
    REFUSE,
    SPARE,
    SPILL,
    UNQUEUE,
)
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.write_policy import WritePolicy
from sglang_ext.tiers.store.openings import Opening, Openings
from sglang_ext.tiers.store.types import (
    FILLING,
    GIVEN_UP,
    ON_DISK,
    QUEUED,
    READY,
    SPILLING,
    WRITE_DROPPED,
    DiskCopies,
    Epoch,
    KeySpace,
    Rows,
    SpillEntry,
)


class SpillQueue:
    """Pages between DRAM and disk. Methods take the table's lock, but those behind the line.

    It has many methods because a page's way to disk is one: each is a step of it, or a look at it.

    Args:
        table: the pages.
        writing: when pages are written.
        disk: what the disk takes.
        space_of: finds a key space by its number; None where it was retired.

    Attributes:
        ready: notified when there may be something to write; of the table's lock.
        entries: what is queued; guarded by the lock.
        num_spilling: pages taken from it and not finished; one writer at a time.
        openings: namespaces that the disk is to open before it gets more; guarded by the lock.
        num_clearings: clears whose pages are still in the books; guarded by the lock.
    """

    def __init__(
        self,
        table: PageTable,
        writing: WritePolicy,
        disk: DiskPages,
        space_of: Callable[[int], KeySpace | None],
    ) -> None:
        self._table, self._index = table, table.index
        self._writing, self._disk = writing, disk
        self._space_of = space_of
        self.ready = threading.Condition(table.lock)
        self.entries: deque[SpillEntry] = deque()
        self._num_in_entries = 0  # pages; guarded by the lock
        self.num_spilling = 0
        self._num_ever_queued = 0  # pages since the start; guarded by the lock
        # By slot, its generation when the page in it was spared a write; -1: it was not.
        self._spared = np.full(table.arena.num_slots, -1, np.int64)
        self._to_clear: set[bytes] = set()
        self.num_clearings = 0
        self.openings = Openings()

    def pending_clears(self) -> list[bytes]:
        """The namespaces that the disk is to clear, until `end_clears`."""
        with self._table.lock:
            return sorted(self._to_clear)

    def open(self, opening: Opening) -> None:
        """The disk is to open a namespace before it gets more."""
        with self._table.lock:
            self.openings.add(opening)
            self.ready.notify_all()

    def open_again(self, digest: bytes, epoch: Epoch) -> None:
        """The weights of a namespace that was to be opened before are live again."""
        with self._table.lock:
            self.openings.ask_again(digest, self._table.now_s(), epoch)
            self.ready.notify_all()

    def take_opening(self) -> Opening | None:
        """Takes a namespace that the disk is to open now; None where there is none."""
        with self._table.lock:
            return self.openings.take(self._table.now_s())

    def num_openings(self) -> int:
        """Namespaces that the disk has still to open."""
        with self._table.lock:
            return len(self.openings)

    def end_opening(self, opening: Opening, *, ok: bool) -> None:
        """It was tried; where that failed it is tried again later."""
        with self._table.lock:
            self.openings.end()
            if not ok:
                self.openings.add_failed(opening, self._table.now_s())

    def end_clears(self, digests: list[bytes]) -> None:
        """The disk was told to clear these: it may get pages again.

        Unless there was another clear meanwhile, whose pages could still be given to it.
        """
        with self._table.lock:
            if self.num_clearings:
                return
            self._to_clear.difference_update(digests)
            if not self._to_clear:
                self._writing.note_cleared()

    def take(self, max_pages: int) -> SpillEntry | None:
        """Takes queued pages of one key space for the spiller, pinned; None when there are none.

        None, too, while the disk has namespaces to clear: what it got now would go with them; and
        while there are some to open: it would not take what it got of them.
        """
        with self._table.lock:
            if self._to_clear or self.openings.is_due(self._table.now_s()):
                return None
            while (queued := self._next(max_pages)) is not None:
                entry = self._admitted(queued)
                if not len(entry.rows):
                    continue
                self._table.take(SPILL, entry.rows)
                self._table.pin(entry.slots)
                self.num_spilling = len(entry.rows)
                return entry
            return None

    def finish(self, entry: SpillEntry, stored: npt.NDArray[np.bool_], copies: DiskCopies) -> None:
        """Enters the disk locations of written pages; only now are they acknowledged.

        What lies in DRAM keeps its quality, however lossy the copy on disk is.
        """
        try:
            self._enter_written(entry, stored, copies)
        finally:
            # Last: whoever reads 0 also sees the updated counters and log. Always: who waits for
            # these writes would wait for ever.
            self.num_spilling = 0

    def _enter_written(
        self, entry: SpillEntry, stored: npt.NDArray[np.bool_], copies: DiskCopies
    ) -> None:
        table = self._table
        with table.lock:
            rows = entry.rows
            same = self._index.is_live(rows) & (self._index.host_slot[rows] == entry.slots)
            same &= (self._index.flags[rows] & SPILLING) != 0
            stored = stored & same
            done = rows[stored]
            table.has_inexact |= bool(copies.quality[stored].any())
            copies = copies.take(stored)
            num_again = int(((self._index.flags[done] & GIVEN_UP) != 0).sum())
            self._writing.note_written(len(done) - num_again, num_again)
            # A page that is lossy in DRAM is no better on disk, however it is coded there.
            quality = np.maximum(copies.quality, self._index.quality[done])
            table.place(done, copies._replace(quality=quality))
            if table.copies is not None:  # nobody will look for these where they were written
                table.copies.leave(rows[~stored])
            table.take(DROP_WRITE, rows[same & ~stored])
            table.take(END_SPILL, rows[same])
            table.unpin(entry.slots)
            hashes = table.moved(done)
        table.counters.add("written_pages", int(stored.sum()))
        table.counters.add("written_again_pages", num_again)
        table.counters.add("write_dropped_pages", int((~stored).sum()))
        if hashes is not None:
            table.events.pages("written", hashes)

    def queue_all(self) -> int:
        """Queues all pages that are not on disk (linear); for a flush, which may run out of time.

        The most recent pages come first, and a parent before its children, so that every page
        that a flush wrote before it ran out of time can be used. What was queued takes its place
        among them: pages that were to make room were to be written before what leads to them.
        """
        with self._table.lock:
            for entry in self.entries:
                self._table.take(UNQUEUE, self._still_valid(entry).rows)
            self._num_ever_queued -= self._num_in_entries
            self.entries.clear()
            self._num_in_entries = 0
            rows = self._coldest(ON_DISK | QUEUED | SPILLING | FILLING | WRITE_DROPPED)
            self.queue_leaving(rows, from_end=False)
            return len(rows)

    def num_unwritten(self) -> int:
        """Pages in DRAM that the disk neither has nor refused (linear)."""
        with self._table.lock:
            return len(self._coldest(ON_DISK | WRITE_DROPPED))

    def num_only_in_dram(self) -> int:
        """Pages in DRAM that the disk does not have, those that it refused among them (linear).

        Without those that are superseded, and were spared the write.
        """
        with self._table.lock:
            rows = self._coldest(ON_DISK)
            slots = self._index.host_slot[rows]
            spared = self._spared[slots] == self._table.arena.generation[slots]
            spared &= (self._index.flags[rows] & WRITE_DROPPED) != 0
            return int((~spared).sum())

    def num_pages(self) -> int:
        """Pages on their way to disk, those that are being written among them."""
        with self._table.lock:
            return self.num_queued

    def mark_of_room(self, num_pages: int) -> int:
        """How far the writing has to come for so many pages to leave DRAM; see `num_until`.

        Pages written from the end leave one by one. Those written from the root leave when all of
        them are on disk, as what leads to a page that is on its way stays.

        Returns:
            A number of pages since the start; 0 where nothing is on its way.
        """
        with self._table.lock:
            front = self.entries[0] if self.entries else None
            ahead = self.num_spilling
            if ahead and front is not None and not front.from_end:
                ahead += len(front.rows)  # what is being written may be of these
            for entry in islice(self.entries, int(ahead > self.num_spilling), None):
                if ahead >= num_pages:
                    break
                num = len(entry.rows)
                ahead += min(num, num_pages - ahead) if entry.from_end else num
            return self._num_ended + ahead if ahead else 0

    def num_until(self, mark: int) -> int:
        """Pages that are still to be written until a mark; 0 when it is passed."""
        with self._table.lock:
            return max(0, mark - self._num_ended)

    # ---- the caller holds the lock ----

    @property
    def _num_ended(self) -> int:
        """Pages that are on their way no more, on disk or not."""
        return self._num_ever_queued - self.num_queued

    @property
    def num_queued(self) -> int:
        """The same."""
        return self.num_spilling + self._num_in_entries

    @property
    def has_work(self) -> bool:
        """Whether there is something to write, to clear or to open."""
        if self.entries or self._to_clear:
            return True
        return self.openings.is_due(self._table.now_s())

    def is_clearing(self, digest: bytes) -> bool:
        """Whether the disk is to lose what it has of a namespace."""
        return digest in self._to_clear

    def queue(self, space: KeySpace, rows: Rows, *, from_end: bool = False) -> None:
        """Queues those of some pages that are whole in DRAM, neither on disk nor on their way.

        What is being fetched, or saved, is passed over: a record of half a page would be intact.
        So is what was cleared.

        Args:
            space: where they belong.
            rows: i64 `[n]`, a parent before its children.
            from_end: see `SpillEntry`; counts as False once the server ends.
        """
        rows = rows[QUEUE.fits(self._index.flags[rows])]
        rows = rows[~self._index.are_disowned(rows)]
        if len(rows):
            self._table.take(QUEUE, rows)
            slots = self._index.host_slot[rows].copy()
            generations = self._table.arena.generation[slots].copy()
            from_end = from_end and not self._writing.closing
            self.entries.append(SpillEntry(space, rows, slots, generations, from_end))
            self._num_in_entries += len(rows)
            self._num_ever_queued += len(rows)
            self.ready.notify()

    def queue_leaving(self, rows: Rows, *, from_end: bool = True) -> None:
        """Queues pages of any key spaces, given in the order in which they leave.

        Written from the end they leave with every batch; from the root, all would stay in DRAM
        until the last of them is on disk. After a crash those without what leads to them are of no
        use; it is in DRAM, and gone, whichever end is written first.

        Args:
            rows: i64 `[n]`.
            from_end: see `SpillEntry`; False where they are to be of use to who starts next.
        """
        rows = rows[::-1]
        numbers = self._index.keys(rows)[1].astype(np.int64)
        # Sorted once: there may be thousands of adapters.
        order = np.argsort(numbers, kind="stable")
        rows, numbers = rows[order], numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for mine, number in zip(np.split(rows, starts[1:]), numbers[starts].tolist(), strict=False):
            space = self._space_of(number)
            if space is not None:
                self.queue(space, mine, from_end=from_end)
            else:  # what was under way as it was retired: nobody finds it, here or on disk
                self._table.take(SPARE, mine[SPARE.fits(self._index.flags[mine])])

    def used(self, space: KeySpace, rows: Rows) -> None:
        """Pages were used."""
        self.worth_more(rows)
        if self._writing.on_use:
            self.queue(space, rows)

    def worth_more(self, rows: Rows) -> None:
        """What the disk refused, or was not to get, is offered as it leaves DRAM."""
        if self._table.disk_order is not None and self._writing.back:
            self.offer(rows)

    def wanted(self, space: KeySpace, rows: Rows) -> None:
        """Somebody waits for these pages: what the disk did not take is offered to it again."""
        if self._table.disk_order is None or self._writing.on_use:
            return
        flags = self._index.flags[rows]
        rows = rows[(flags & (WRITE_DROPPED | READY | ON_DISK)) == (WRITE_DROPPED | READY)]
        if len(rows):
            self.offer(rows)
            if self._writing.through:
                self.queue(space, rows)

    def offer(self, rows: Rows) -> None:
        """The disk may be offered these pages once more; the caller sees to it that it is."""
        self._table.take(OFFER, rows)
        slots = self._index.host_slot[rows]
        self._spared[slots[slots != NO_SLOT]] = -1

    def spare(self, rows: Rows) -> None:
        """Pages may leave DRAM as they are: on a full disk others would leave for them.

        Where the disk has room, or pages are written as they are saved, they are like any other.
        """
        if self._writing.back and self._writing.disk_is_full:
            rows = rows[SPARE.fits(self._index.flags[rows])]
            self._table.take(SPARE, rows)
            slots = self._index.host_slot[rows]
            self._spared[slots] = self._table.arena.generation[slots]

    def clear(self, digests: Iterable[bytes]) -> None:
        """Forgets what is queued; the disk is to lose namespaces before it gets more.

        What is still there of it, of key spaces that were retired, may leave DRAM as it is.
        """
        if self.entries:
            self._table.take(REFUSE, self._still_valid(_joined(self.entries)).rows)
        self.entries.clear()
        self._num_in_entries = 0
        self._to_clear.update(digests)
        self.ready.notify_all()

    def _coldest(self, skip_flags: int) -> Rows:
        rows = self._index.lru_tail(self._table.arena.num_slots, skip_flags)
        coldest: Rows = rows[~self._index.are_disowned(rows)]
        return coldest

    def _next(self, max_pages: int) -> SpillEntry | None:
        """Takes pages of one key space out of the queue, those that are still to be written."""
        taken: list[SpillEntry] = []
        num = 0
        while self.entries and num < max_pages:
            entry = self.entries[0]
            if taken and entry.space != taken[0].space:
                break
            self.entries.popleft()
            self._num_in_entries -= min(len(entry.rows), max_pages - num)
            if len(entry.rows) > max_pages - num:
                at = max_pages - num
                first, rest = slice(at), slice(at, None)
                if entry.from_end:
                    first, rest = slice(-at, None), slice(-at)
                self.entries.appendleft(_part(entry, rest))
                entry = _part(entry, first)
            entry = self._still_valid(entry)
            if len(entry.rows):
                taken.append(entry)
                num += len(entry.rows)
        if not num:
            return None
        return _joined(taken)

    def _admitted(self, entry: SpillEntry) -> SpillEntry:
        """Those of some pages that the disk is to take; the others may leave DRAM all the same."""
        admitted = self._disk.admits(entry.rows)
        if admitted is None:
            return entry
        refused = entry.rows[~admitted]
        self._table.take(REFUSE, refused)
        self._table.counters.add("not_admitted_pages", len(refused))
        return _part(entry, admitted)

    def _still_valid(self, entry: SpillEntry) -> SpillEntry:
        same = (
            self._index.is_live(entry.rows)
            & (self._index.host_slot[entry.rows] == entry.slots)
            & (self._table.arena.generation[entry.slots] == entry.generations)
            & SPILL.fits(self._index.flags[entry.rows])
        )
        return _part(entry, same)


def _part(entry: SpillEntry, which: slice | npt.NDArray[np.bool_]) -> SpillEntry:
    return entry._replace(
        rows=entry.rows[which], slots=entry.slots[which], generations=entry.generations[which]
    )


def _joined(entries: Collection[SpillEntry]) -> SpillEntry:
    """The pages of some entries, with the key space of the first."""
    return SpillEntry(
        next(iter(entries)).space,
        np.concatenate([entry.rows for entry in entries]),
        np.concatenate([entry.slots for entry in entries]),
        np.concatenate([entry.generations for entry in entries]),
    )
