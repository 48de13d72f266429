"""The remote store's part of the books: what plans fetch, and what is sent before it leaves DRAM.

All state is guarded by `PageTable.lock`; methods take it themselves. Nothing here blocks on I/O.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.tiers.store.books.plan_book import PlanBook
from sglang_ext.tiers.store.types import (
    ON_DISK,
    READY,
    SENT,
    DiskCopies,
    Hashes,
    KeySpace,
    Plan,
    Slots,
)


class RemoteBook(PlanBook):
    """Fetches and uploads.

    A plan takes slots only when pages arrive. Until then it reserves a number of pages, so that
    what all plans pin in the end stays within what they may.
    """

    def reserve(self, plan: Plan, num_pages: int) -> int:
        """Keeps room for pages that a plan is to fetch, behind those that it has.

        Args:
            plan: nobody fetches for it yet.
            num_pages: that the remote store has.

        Returns:
            Number of pages that fit. The plan waits for these; the others make it `short`.
        """
        with self.lock:
            num = 0 if plan.cancelled else min(num_pages, self._room_for(len(plan.slots)))
            plan.num_stored += num_pages
            plan.num_planned += num
            plan.num_reserved = plan.num_remote_left = num
            plan.remaining += num
            self.num_planned_pages += num
        return num

    def adopt(self, plan: Plan, space: KeySpace, hashes: Hashes, max_quality: int) -> int:
        """Pins those of a plan's next pages that are ready; returns how many leading ones are.

        Args:
            plan: waits for them.
            space: where they belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.
        """
        with self.lock:
            rows = self.index.prefix_rows(hashes, space.number, READY)
            rows = self._good_prefix(rows, max_quality)
            num = min(len(rows), plan.num_remote_left)
            if not plan.cancelled:
                slots = self.index.host_slot[rows[:num]].copy()
                self._pin_slots(slots)
                self._count_pins(slots, 1)
                plan.slots = np.concatenate([plan.slots, slots])
                if num:
                    self._plans[plan] = None
                used = min(num, plan.num_reserved)
                plan.num_reserved -= used
                self.num_planned_pages -= used
                self._touch(rows[:num])
            plan.num_remote_left -= num
            plan.remaining -= num
        return num

    def yield_room(self, plan: Plan) -> None:
        """Gives back the room of a plan that is about to be made anew; its pins stay."""
        with self.lock:
            self._end_reservation(plan)

    def end_fetch(self, plan: Plan) -> None:
        """Ends the fetches of a plan: pages that have not come by now will not come.

        If `lacked_room` is set the plan stays `short` and may be made again. Otherwise the pages
        that did not come count as not stored, and `fetch_failed` is set.
        """
        with self.lock:
            left = plan.num_remote_left
            self._end_reservation(plan)
            plan.num_planned -= left
            if left and not plan.lacked_room:
                plan.num_stored = plan.num_planned
                plan.fetch_failed = True
            plan.num_remote_left = 0
            plan.remaining -= left

    # ---- pages that leave DRAM ----

    def take_unsent(self, low_water_pages: int, max_pages: int) -> tuple[int, Hashes, Slots] | None:
        """Takes pages that would leave DRAM next and were not sent, pinned.

        Args:
            low_water_pages: as many pages of DRAM are to be free, or sent.
            max_pages: most that are taken.

        Returns:
            Number of their key space, hashes and slots, for `end_sending`; None when enough is.
        """
        with self.lock:
            num = low_water_pages - self.arena.num_free
            if num <= 0:
                return None
            rows = self._next_to_leave(num)
            rows = rows[(self.index.flags[rows] & SENT) == 0]
            if not len(rows):
                return None
            hashes, numbers = self.index.keys(rows)
            mine = np.flatnonzero(numbers == numbers[0])[:max_pages]
            slots = self.index.host_slot[rows[mine]].copy()
            self._pin_slots(slots)
            return int(numbers[0]), hashes[mine], slots

    def end_sending(self, number: int, hashes: Hashes, slots: Slots) -> None:
        """Gives the pages of `take_unsent` back; they are not sent again as they are."""
        with self.lock:
            rows = self.index.lookup(hashes, number)
            known = rows >= 0
            same = rows[known][self.index.host_slot[rows[known]] == slots[known]]
            self.index.flags[same] |= np.uint8(SENT)
            self._unpin_slots(slots)

    def on_disk(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, DiskCopies]:
        """Those of some pages that lie on disk, and where."""
        with self.lock:
            index = self.index
            rows = index.lookup(hashes, space.number)
            there = rows >= 0
            there[there] = (index.flags[rows[there]] & ON_DISK) != 0
            rows = rows[there]
            return hashes[there], DiskCopies(
                index.segment[rows], index.block[rows], index.num_blocks[rows],
                index.disk_quality[rows],
            )  # fmt: skip
