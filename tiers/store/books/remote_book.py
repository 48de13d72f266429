"""The remote store's part of the books: what plans fetch, and what is sent before it leaves."""

from __future__ import annotations

import numpy as np

from sglang_ext.tiers.store.books.dram_room import DramRoom
from sglang_ext.tiers.store.books.lookups import Lookups
from sglang_ext.tiers.store.books.page_states import SEND
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.plan_pins import PlanPins
from sglang_ext.tiers.store.types import READY, SENT, Hashes, KeySpace, Plan, Slots


class RemoteBook:
    """Fetches and uploads. Methods take the table's lock.

    A plan takes slots only when pages arrive. Until then it reserves a number of pages, so that
    what all plans pin in the end stays within what they may.
    """

    def __init__(self, table: PageTable, lookups: Lookups, room: DramRoom, pins: PlanPins) -> None:
        self._table, self._index = table, table.index
        self._lookups, self._room, self._pins = lookups, room, pins

    def reserve(self, plan: Plan, num_pages: int) -> int:
        """Keeps room for pages that a plan is to fetch, behind those that it has.

        Args:
            plan: nobody fetches for it yet.
            num_pages: that the remote store has.

        Returns:
            Number of pages that fit. The plan waits for these; the others make it `short`.
        """
        with self._table.lock:
            num = self._pins.reserve(plan, num_pages)
            plan.num_stored += num_pages
            plan.num_planned += num
            plan.num_remote_left = num
            plan.remaining += num
        return num

    def adopt(self, plan: Plan, space: KeySpace, hashes: Hashes, max_quality: int) -> int:
        """Pins those of a plan's next pages that are ready; returns how many leading ones are.

        Args:
            plan: waits for them.
            space: where they belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.
        """
        with self._table.lock:
            rows = self._lookups.ready_rows(space, hashes, max_quality)
            num = min(len(rows), plan.num_remote_left)
            if not plan.cancelled:
                slots = self._index.host_slot[rows[:num]].copy()
                self._table.pin(slots)
                self._pins.add(plan, slots)
                self._pins.use_reserved(plan, num)
                self._table.touch(rows[:num])
            plan.num_remote_left -= num
            plan.remaining -= num
        return num

    def yield_room(self, plan: Plan) -> None:
        """Gives back the room of a plan that is about to be made anew; its pins stay."""
        with self._table.lock:
            self._pins.end_reservation(plan)

    def end_fetch(self, plan: Plan) -> None:
        """Ends the fetches of a plan: pages that have not come by now will not come.

        If `lacked_room` is set the plan stays `short` and may be made again. Otherwise the pages
        that did not come count as not stored, and `fetch_failed` is set.
        """
        with self._table.lock:
            left = plan.num_remote_left
            self._pins.end_reservation(plan)
            plan.num_planned -= left
            if left and not plan.lacked_room:
                plan.num_stored = plan.num_planned
                plan.fetch_failed = True
            plan.num_remote_left = 0
            plan.remaining -= left

    # ---- pages that leave DRAM ----

    def take_unsent(self, low_water_pages: int, max_pages: int) -> tuple[int, Hashes, Slots] | None:
        """Takes pages that would leave DRAM next and were not sent, pinned.

        Those that are over are not sent: they are as ready to leave as they are.

        Args:
            low_water_pages: as many pages of DRAM are to be free, or sent.
            max_pages: most that are taken.

        Returns:
            Number of their key space, hashes and slots, for `end_sending`; None when enough is.
        """
        with self._table.lock:
            num = low_water_pages - self._table.arena.num_free
            if num <= 0:
                return None
            rows = self._room.next_to_leave(num)
            rows = rows[(self._index.flags[rows] & SENT) == 0]
            rows = rows[~self._index.are_disowned(rows)]
            rows = rows[~self._table.order.are_over(rows)]
            if not len(rows):
                return None
            hashes, numbers = self._index.keys(rows)
            mine = np.flatnonzero(numbers == numbers[0])[:max_pages]
            slots = self._index.host_slot[rows[mine]].copy()
            self._table.pin(slots)
            return int(numbers[0]), hashes[mine], slots

    def end_sending(self, number: int, hashes: Hashes, slots: Slots) -> None:
        """Gives the pages of `take_unsent` back; they are not sent again as they are."""
        with self._table.lock:
            ready, rows = self._lookups.having(number, hashes, READY)
            self._table.take(SEND, rows[self._index.host_slot[rows] == slots[ready]])
            self._table.unpin(slots)
