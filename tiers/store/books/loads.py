"""Loads: pages of DRAM that are pinned while somebody reads their slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.records.quality import ANY, Quality
from sglang_ext.tiers.store.books.lookups import Lookups
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.spill_queue import SpillQueue
from sglang_ext.tiers.store.types import READY, Hashes, KeySpace, LoadTicket, Rows, Slots


class Loads:
    """Pins for whoever reads. Methods take the table's lock.

    Attributes:
        clock: logical time: number of loads so far.
    """

    def __init__(self, table: PageTable, lookups: Lookups, spills: SpillQueue) -> None:
        self._table, self._index = table, table.index
        self._lookups, self._spills = lookups, spills
        self.clock = 0

    def pin_ready(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY
    ) -> LoadTicket | None:
        """Pins pages for a load; None unless all are ready in DRAM and no worse than a quality."""
        with self._table.lock:
            rows = self._lookups.ready_rows(space, hashes, max_quality)
            if len(rows) < len(hashes):
                return None
            ticket = self._pin(space, rows)
            self._use(space, rows)
        self.count(ticket, hashes)
        return ticket

    def pin_leading(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> LoadTicket:
        """Pins the leading pages that are ready in DRAM and good enough, as many as there are.

        They are kept for a load that may come (`begin`); nothing is counted as loaded yet.
        """
        with self._table.lock:
            return self._pin(space, self._lookups.ready_rows(space, hashes, max_quality))

    def begin(self, space: KeySpace, ticket: LoadTicket, hashes: Hashes) -> None:
        """Counts pages of `pin_leading` as loaded, by whoever takes their pins over. Cannot fail.

        Args:
            space: where the pages belong.
            ticket: the pages. One that was forgotten or replaced since is loaded from its pinned
                slot all the same.
            hashes: u8 `[n, 32]`, for the log.
        """
        with self._table.lock:
            same = self._index.is_live(ticket.rows)
            same &= self._index.host_slot[ticket.rows] == ticket.slots
            self._use(space, ticket.rows[same])
        self.count(ticket, hashes)

    def pin_present(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, Slots]:
        """Pins those of some pages that are ready in DRAM; for who sends them away.

        No use of theirs: their age does not change. `release` gives the pins back.
        """
        with self._table.lock:
            ready, rows = self._lookups.having(space.number, hashes, READY)
            slots = self._index.host_slot[rows].copy()
            self._table.pin(slots)
        return hashes[ready], slots

    def release(self, slots: Slots) -> None:
        """Gives pins back."""
        with self._table.lock:
            self._table.unpin(slots)

    def drop_damaged(self, rows: Rows, slots: Slots) -> tuple[Hashes, npt.NDArray[np.uint32]]:
        """Forgets pages whose bytes in DRAM went bad, and their copies on disk, made of the same.

        Args:
            rows: i64 `[n]`, pinned.
            slots: i32 `[n]`, where the bad bytes lie; a page that lies elsewhere by now stays.

        Returns:
            Hashes and numbers of the key spaces of those that were forgotten.
        """
        table = self._table
        with table.lock:
            same = self._index.is_live(rows) & (self._index.host_slot[rows] == slots)
            rows = rows[same & ((self._index.flags[rows] & READY) != 0)]
            keys = self._index.keys(rows)
            hashes = table.moved(rows)
            table.forget(rows, Absence.UNREADABLE)
        table.counters.add("damaged_pages", len(rows))
        if hashes is not None:
            table.events.pages("lost", hashes)
        return keys

    def _pin(self, space: KeySpace, rows: Rows) -> LoadTicket:
        quality = self._index.quality[rows]
        slots = self._index.host_slot[rows].copy()
        self._table.pin(slots)
        return LoadTicket(space, rows, slots, quality)

    def _use(self, space: KeySpace, rows: Rows) -> None:
        self._table.touch(rows)
        self.clock += 1
        self._index.note_use(rows, self.clock)
        self._spills.used(space, rows)

    def count(self, ticket: LoadTicket, hashes: Hashes) -> None:
        """Counts pages as loaded, and tells of them; nothing is noted of their use."""
        self._table.counters.add("loaded_pages", len(ticket.rows))
        lossy = int((ticket.quality > Quality.EXACT).sum())
        self._table.counters.add("loaded_lossy_pages", lossy)
        self._table.events.pages("loaded", hashes)
