"""Saves: pages that enter DRAM, from the device or from a remote store."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.records.quality import Qualities, Quality
from sglang_ext.tiers.store.books.disk_pages import DiskPages
from sglang_ext.tiers.store.books.dram_room import DramRoom
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_states import REPLACE, RETURN, Step
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.plan_pins import PlanPins
from sglang_ext.tiers.store.books.spill_queue import SpillQueue
from sglang_ext.tiers.store.books.write_policy import WritePolicy
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    READY,
    WRITE_DROPPED,
    Hashes,
    IsReadSlower,
    KeySpace,
    Rows,
    SaveTicket,
    Slots,
)

# How often one save has plans yield: what they held may be on its way to disk, and of no use yet.
_MAX_YIELDS = 4


class Saves:
    """What a save does to the books. Methods take the table's lock.

    Args:
        table: the pages.
        room: gives slots.
        pins: what plans may give up for a save.
        spills: gets what was saved.
        writing: when pages are written.
        disk: gives up pages where the index is full.
        disk_floor: the best that the disk tier keeps: what its codec makes of an exact page.

    Attributes:
        on_published: told of pages that became known, or known better, with the lock held: the
            number of their key space, their hashes, and the rows of the whole path, ancestors
            first and then the pages themselves; -1 for those of which nothing is known.
        is_read_slower: asked, with the lock held, of pages that the device computed although the
            disk has them; None: they stay there.
    """

    def __init__(
        self, table: PageTable, room: DramRoom, pins: PlanPins, spills: SpillQueue,
        writing: WritePolicy, disk: DiskPages, disk_floor: int,
    ) -> None:  # fmt: skip
        self._table, self._index = table, table.index
        self._room, self._pins, self._spills = room, pins, spills
        self._writing, self._disk, self._disk_floor = writing, disk, disk_floor
        self.on_published: Callable[[int, Hashes, Rows], None] | None = None
        self.is_read_slower: IsReadSlower | None = None

    def begin(
        self,
        space: KeySpace,
        hashes: Hashes,
        ancestors: Hashes,
        quality: Qualities | None = None,
        *,
        before_plans: bool = False,
    ) -> SaveTicket:
        """Takes slots for those of the offered pages that are not stored as well yet.

        A page that is stored worse stays as it is until the new one is published in its place. One
        that the device computed although the disk has it comes back to DRAM if reading it would
        have taken longer: it would be computed at every use from then on.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`, in path order.
            ancestors: u8 `[M, 32]`, the pages before them on the path; kept young with them.
            quality: u8 `[N]`; None when all are exact.
            before_plans: whether plans of waiting requests may give up their room for it.
        """
        quality = np.zeros(len(hashes), np.uint8) if quality is None else quality
        table = self._table
        with table.lock:
            self._make_rows(space, hashes, ancestors)
            rows, created = self._index.insert(hashes, space.number)
            path = np.concatenate([self._index.lookup(ancestors, space.number), rows])
            wanted = created | self._worse(rows, quality) if table.has_inexact else created
            pages = np.flatnonzero(wanted)
            back = pages[:0]
            if before_plans:
                returning = self._returning(rows, quality, len(ancestors))
                back = np.flatnonzero(returning & ~wanted)
            table.assign(path, space.tenant_number)
            table.link(path)
            table.touch(path)  # before room is made: the path must not be pushed out by its child
            self._room.note_save(len(pages) + len(back))
            pages, slots, refused = self._take_slots(
                path, pages, back, space.tenant_number, before_plans=before_plans
            )
            why = Absence.NOT_SAVED if before_plans else None  # a fetch: nothing is lost
            table.remove(rows[refused][created[refused]], why)
            dropped = int((rows < 0).sum()) + len(refused)
            ticket = SaveTicket(
                space, pages, rows[pages], slots, dropped, path, quality[pages], ~created[pages],
                hashes[pages],
            )  # fmt: skip
            self._fill(ticket)
            table.touch(path)
            table.in_flight.begin()
        table.counters.add("duplicate_pages", len(hashes) - len(slots) - dropped)
        table.counters.add("save_dropped_pages", dropped)
        return ticket

    def _take_slots(
        self, path: Rows, pages: Rows, back: Rows, tenant: int, *, before_plans: bool
    ) -> tuple[Rows, Slots, Rows]:
        """Takes slots for pages and, once all of these have one, for those of `back`.

        Returns:
            The pages that got one, in path order, their slots, and those of `pages` that got none.
        """
        kept = np.empty(0, np.int32)
        if len(pages) or len(back):
            kept = self._only_in_dram(path)
        self._table.pin(kept)  # what comes behind a gap would be of no use
        slots = self._room.alloc_for_save(len(pages), tenant)
        if before_plans:
            slots = self._alloc_of_plans(slots, len(pages), tenant)
        refused = pages[len(slots) :]
        if not len(refused):  # what the disk has gets what the others leave
            pages, slots = self._with_back(pages, slots, back, tenant)
        self._table.unpin(kept)
        return pages[: len(slots)], slots, refused

    def _with_back(self, pages: Rows, slots: Slots, back: Rows, tenant: int) -> tuple[Rows, Slots]:
        """Pages and their slots, in path order, with those of `back` that there is room for."""
        more = self._room.alloc_for_save(len(back), tenant)
        pages = np.concatenate([pages, back[: len(more)]])
        order = np.argsort(pages)
        return pages[order], np.concatenate([slots, more])[order]

    def _make_rows(self, space: KeySpace, hashes: Hashes, ancestors: Hashes) -> None:
        """Makes room in the index for pages; numbers of rows that were known before may be others'.

        The caller holds the lock.
        """
        free = self._index.capacity - len(self._index)
        if free >= len(hashes):
            return
        rows = self._index.lookup(hashes, space.number)
        # What leads to these pages leaves last, and those of them that are there.
        known = np.concatenate([self._index.lookup(ancestors, space.number), rows[rows >= 0]])
        self._table.touch(known)
        self._disk.free_rows(int((rows < 0).sum()) - free)

    def finish(self, ticket: SaveTicket, *, ok: bool, why: Absence | None = None) -> None:
        """Publishes the pages of a save, or forgets them when it failed.

        Args:
            ticket: the save's.
            ok: whether the slots were filled.
            why: what is remembered of pages that are forgotten; None: nothing, as of a fetch.
        """
        new = ~ticket.replaces
        table = self._table
        with table.lock:
            rows = ticket.rows[new]
            rows = rows[table.still_filling(rows, ticket.slots[new])]
            num_saved, inexact = len(rows), 0
            replaced, returned = self._replace(ticket, ok=ok)
            table.unpin(ticket.slots)
            if ok:
                table.publish(rows)
                if self.on_published is not None:
                    self.on_published(ticket.space.number, ticket.hashes, ticket.path)
                rows = np.concatenate([rows, replaced])
                num_saved = len(rows)
                inexact = int((self._index.quality[rows] > Quality.EXACT).sum())
                rows = np.concatenate([rows, returned])
                table.touch(ticket.path)
                if self._writing.through:
                    self._spills.queue(ticket.space, rows)
                elif self._room.should_look:
                    self._spills.ready.notify()
            else:
                table.forget(rows, why)
            table.settle(ticket.rows[new], ticket.slots[new], failed=not ok)
            table.in_flight.end()
            hashes = table.moved(rows) if ok else None
        table.counters.add("saved_pages" if ok else "save_failed_pages", num_saved)
        table.counters.add("returned_pages", len(returned))
        table.counters.add("saved_lossy_pages", inexact)
        table.counters.add("replaced_pages", len(replaced))
        if hashes is not None:
            table.events.pages("saved", hashes)

    def _only_in_dram(self, path: Rows) -> Slots:
        """Slots of those pages of a path that DRAM alone has, and would lose for others."""
        rows = path[path >= 0]
        flags = self._index.flags[rows]
        alone = (flags & (READY | ON_DISK)) == READY
        if self._writing.back:  # others are written before they leave
            alone &= (flags & WRITE_DROPPED) != 0
        slots: Slots = self._index.host_slot[rows[alone]]
        return slots

    def _alloc_of_plans(self, slots: Slots, count: int, tenant: int) -> Slots:
        """Adds to some slots, up to a count, what plans of waiting requests give up for a save."""
        for _ in range(_MAX_YIELDS):
            short = count - len(slots)
            if not short or not self._pins.yield_some(short):
                break
            slots = np.concatenate([slots, self._room.alloc_for_save(short, tenant)])
        return slots

    def _worse(self, rows: Rows, quality: Qualities) -> npt.NDArray[np.bool_]:
        """Which of the known pages are stored worse than this."""
        worse: npt.NDArray[np.bool_] = (rows >= 0) & (self._index.quality[rows] > quality)
        return worse

    def _fill(self, ticket: SaveTicket) -> None:
        new = ~ticket.replaces
        self._table.fill(ticket.rows[new], ticket.slots[new])
        self._index.quality[ticket.rows[new]] = ticket.quality[new]
        self._table.pin(ticket.slots[ticket.replaces])
        self._table.has_inexact |= bool(ticket.quality.any())

    def _returning(self, rows: Rows, quality: Qualities, num_before: int) -> npt.NDArray[np.bool_]:
        """Which pages come back to DRAM: those that the disk alone has, or none."""
        none = np.zeros(len(rows), np.bool_)
        if self.is_read_slower is None:
            return none
        alone = self._only_on_disk(rows, quality)
        if not alone.any():
            return none
        num_before += int(alone.argmax())
        num_bytes = self._index.num_blocks[rows[alone]].astype(np.int64) * BLOCK_BYTES
        return alone if self.is_read_slower(num_before, num_bytes) else none

    def _only_on_disk(self, rows: Rows, quality: Qualities) -> npt.NDArray[np.bool_]:
        """Which pages the disk alone has, none of them better than what is offered."""
        alone = rows >= 0
        held = rows[alone]
        alone[alone] = (self._index.flags[held] & (READY | FILLING | ON_DISK)) == ON_DISK
        only: npt.NDArray[np.bool_] = alone & (self._index.quality[rows] >= quality)
        return only

    def _replace(self, ticket: SaveTicket, *, ok: bool) -> tuple[Rows, Rows]:
        """Puts better copies in the place of what is stored, and in DRAM what the disk alone has.

        Looked up again: the page may have left, or come back, since the save began. The old copy
        may be on its way in or out: whoever moves it finds another slot here.

        Returns:
            The rows that got a better copy, and the others that are in DRAM again.
        """
        which = ticket.replaces
        slots, quality = ticket.slots[which], ticket.quality[which]
        rows = self._index.lookup(ticket.hashes[which], ticket.space.number)
        better = self._worse(rows, quality) & ok
        alone = self._only_on_disk(rows, quality) & ~better & ok
        self._table.arena.free(slots[~(better | alone)])
        self._put(rows[alone], slots[alone], quality[alone], RETURN)
        self._disk.note_read(rows[alone])
        returned, rows, slots, quality = rows[alone], rows[better], slots[better], quality[better]
        old = self._index.host_slot[rows]
        self._table.arena.free(old[old != NO_SLOT])
        # A record on disk that this page would improve is forgotten, so that this one is written.
        stale = self._index.disk_quality[rows] > np.maximum(quality, self._disk_floor)
        self._table.take_off_disk(rows[stale])
        self._put(rows, slots, quality, REPLACE)
        return rows, returned

    def _put(self, rows: Rows, slots: Slots, quality: Qualities, step: Step) -> None:
        self._index.host_slot[rows] = slots
        self._index.quality[rows] = quality
        self._table.publish(rows, step)
