"""Plans of waiting requests: what they keep in DRAM, and what they bring there from disk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store.books.disk_pages import DiskPages
from sglang_ext.tiers.store.books.dram_room import DramRoom
from sglang_ext.tiers.store.books.lookups import Lookups
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_states import WITHDRAW
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.plan_pins import PlanPins
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    READY,
    Hashes,
    KeySpace,
    Plan,
    Rows,
    Slots,
)


class Plans:
    """Plans and promotions. Methods take the table's lock."""

    def __init__(
        self, table: PageTable, lookups: Lookups, room: DramRoom, pins: PlanPins, disk: DiskPages
    ) -> None:
        self._table, self._index = table, table.index
        self._lookups, self._room, self._pins, self._disk = lookups, room, pins, disk

    def begin(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY, priority: int = 0
    ) -> tuple[Plan | None, Rows, Slots]:
        """Pins the leading stored pages for a waiting request and takes slots for those on disk.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.
            priority: see `Plan`.

        Returns:
            The plan (None when no page is stored), and the rows and slots to read from disk. The
            plan is `starved` when there was no room to begin.
        """
        table = self._table
        with table.lock:
            known = self._lookups.known_prefix(space, hashes, max_quality)
            table.link(known)
            rows = known[: self._pins.num_affordable(known)]
            # Pins first: making room for what comes must not push out what is there.
            in_dram = (self._index.flags[rows] & (READY | FILLING)) != 0
            held, missing = np.flatnonzero(in_dram), np.flatnonzero(~in_dram)
            held_slots = self._index.host_slot[rows[held]].copy()
            table.pin(held_slots)
            slots = self._room.alloc(len(missing))
            if len(slots) < len(missing):
                end = missing[len(slots)]
                table.unpin(held_slots[held >= end])
                held_slots = held_slots[held < end]
                rows, missing = rows[:end], missing[: len(slots)]
            to_read = rows[missing]
            table.fill(to_read, slots)
            table.pin(slots)  # the plan's own pin beside the reader's
            pending = rows[(self._index.flags[rows] & READY) == 0]
            plan = Plan(rows, remaining=len(pending), num_stored=len(known))
            plan.priority = priority
            plan.reads_disk = bool((self._index.flags[pending] & ON_DISK).any())
            self._pins.add(plan, np.concatenate([held_slots, slots]))
            table.waits.add(pending, plan)
            if len(to_read):
                table.in_flight.begin()
            table.touch(rows)
        table.counters.add("plans_short", int(len(rows) < len(known)))
        return (plan if len(known) else None), to_read, slots

    def finish_promotion(
        self,
        plan: Plan,
        rows: Rows,
        slots: Slots,
        ok: npt.NDArray[np.bool_],
        quality: npt.NDArray[np.uint8],
    ) -> None:
        """Publishes pages that were read and verified; forgets the others.

        Args:
            plan: the plan for which they were read.
            rows: i64 `[n]`.
            slots: i32 `[n]`, as `begin` gave them.
            ok: bool `[n]`, which of them were read and are right.
            quality: u8 `[n]`, what the records said of those.
        """
        table = self._table
        with table.lock:
            filling = table.still_filling(rows, slots)
            table.unpin(slots)
            good, bad = rows[ok & filling], rows[~ok & filling]
            self._index.quality[good] = self._index.disk_quality[good] = quality[ok & filling]
            table.has_inexact |= bool(quality[ok].any())
            table.publish(good)
            self._disk.note_read(good)
            table.touch(plan.rows)
            hashes, lost = table.moved(good), table.moved(bad)
            table.forget(bad, Absence.UNREADABLE)
            table.settle(rows[ok], slots[ok], failed=False)
            table.settle(rows[~ok], slots[~ok], failed=True)
        table.counters.add("promoted_pages", len(good))
        if hashes is not None:
            table.events.pages("promoted", hashes)
        if lost is not None:
            table.events.pages("lost", lost)

    def end_promotion(self) -> None:
        """Says that the last batch of a plan's reads is finished."""
        with self._table.lock:
            self._table.in_flight.end()

    def cancel(self, plan: Plan) -> None:
        """Gives a plan's pins back; reads under way go on and their pages stay useful."""
        with self._table.lock:
            if not plan.cancelled:
                self._pins.cancel(plan)

    def withdraw(self, rows: Rows, slots: Slots) -> Plan | None:
        """Hands a cancelled plan's unstarted read to another waiting plan, or drops the read.

        Args:
            rows: i64 `[n]`.
            slots: i32 `[n]`, as `begin` gave them.

        Returns:
            The waiting plan that is first in the queue; the read is its own now. None when no
            plan waits: the slots are free again and the pages are on disk only, as before.
        """
        table = self._table
        with table.lock:
            heirs = [plan for plan in table.waits.plans(rows) if not plan.cancelled]
            if heirs:
                return min(heirs, key=lambda plan: plan.priority)
            table.unpin(slots)
            kept = rows[table.still_filling(rows, slots)]
            on_disk = (self._index.flags[kept] & ON_DISK) != 0
            # Its segment was deleted meanwhile.
            table.forget(kept[~on_disk], Absence.EVICTED_DISK)
            kept = kept[on_disk]
            table.arena.free(self._index.host_slot[kept])
            self._index.host_slot[kept] = NO_SLOT
            table.take(WITHDRAW, kept)
            table.settle(rows, slots, failed=True)
        table.counters.add("withdrawn_pages", len(rows))
        return None
