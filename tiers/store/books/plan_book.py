"""Plans of waiting requests: what they pin, what they bring from disk, and what they give up.

All state is guarded by `PageTable.lock`; methods take it themselves unless their name starts with
an underscore. Nothing here blocks on I/O.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store.books.disk_book import DiskBook
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    READY,
    WRITE_DROPPED,
    DiskCopies,
    Hashes,
    KeySpace,
    Plan,
    Rows,
    Slots,
    TierCounts,
)

_MAX_YIELDING: Final = 256
"""So many plans at most give up their room at a time; plans that share pages give little each."""


class PlanBook(DiskBook):
    """Plans and promotions."""

    def begin_plan(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY, priority: int = 0
    ) -> tuple[Plan | None, Rows, Slots]:
        """Pins the leading stored pages for a waiting request and takes slots for those on disk.

        All plans together pin at most `max_planned_pages`, so that saves and loads can go on, and
        a single one up to `max_lone_plan_pages`; a page that several plans share counts once.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.
            priority: see `Plan`.

        Returns:
            The plan (None when no page is stored), and the rows and slots to read from disk. The
            plan is `starved` when there was no room to begin.
        """
        with self.lock:
            known = self._known_prefix(space, hashes, max_quality)
            self._link(known)
            rows = known[: self._num_affordable(known)]
            flags = self.index.flags[rows]
            # Pins first: making room for what comes must not push out what is there.
            in_dram = (flags & (READY | FILLING)) != 0
            held, missing = np.flatnonzero(in_dram), np.flatnonzero(~in_dram)
            held_slots = self.index.host_slot[rows[held]].copy()
            self._pin_slots(held_slots)
            slots = self._alloc(len(missing))
            if len(slots) < len(missing):
                end = missing[len(slots)]
                self._unpin_slots(held_slots[held >= end])
                held_slots = held_slots[held < end]
                rows, missing = rows[:end], missing[: len(slots)]
            to_read = rows[missing]
            self._begin_filling(to_read, slots)
            self._pin_slots(slots)  # the plan's own pin beside the reader's
            pending = rows[(self.index.flags[rows] & READY) == 0]
            plan = Plan(rows, remaining=len(pending), num_stored=len(known))
            plan.priority = priority
            plan.slots = np.concatenate([held_slots, slots])
            self._count_pins(plan.slots, 1)
            if len(plan.slots):
                self._plans[plan] = None
            for row in pending.tolist():
                self._waiters.setdefault(row, []).append(plan)
            if len(to_read):
                self.num_in_flight += 1
            self._touch(rows)
        self.counters.add("plans_short", int(len(rows) < len(known)))
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
            slots: i32 `[n]`, as `begin_plan` gave them.
            ok: bool `[n]`, which of them were read and are right.
            quality: u8 `[n]`, what the records said of those.
        """
        with self.lock:
            filling = self._still_filling(rows, slots)
            self._unpin_slots(slots)
            good, bad = rows[ok & filling], rows[~ok & filling]
            self.index.quality[good] = self.index.disk_quality[good] = quality[ok & filling]
            self.has_inexact |= bool(quality[ok].any())
            self._publish(good)
            if self.duplicates is not None:
                self.duplicates.push(good)
            self._touch(plan.rows)
            hashes, lost = self._moved(good), self._moved(bad)
            self._forget(bad)
            self._settle(rows[ok], slots[ok], failed=False)
            self._settle(rows[~ok], slots[~ok], failed=True)
        self.counters.add("promoted_pages", len(good))
        if hashes is not None:
            self.events.pages("promoted", hashes)
        if lost is not None:
            self.events.pages("lost", lost)

    def end_promotion(self) -> None:
        """Says that the last batch of a plan's reads is finished."""
        with self.lock:
            self._end_in_flight()

    def cancel_plan(self, plan: Plan) -> None:
        """Gives a plan's pins back; reads under way go on and their pages stay useful."""
        with self.lock:
            if not plan.cancelled:
                self._cancel(plan)

    def withdraw(self, rows: Rows, slots: Slots) -> Plan | None:
        """Hands a cancelled plan's unstarted read to another waiting plan, or drops the read.

        Args:
            rows: i64 `[n]`.
            slots: i32 `[n]`, as `begin_plan` gave them.

        Returns:
            The waiting plan that is first in the queue; the read is its own now. None when no
            plan waits: the slots are free again and the pages are on disk only, as before.
        """
        with self.lock:
            waiting = [plan for row in rows.tolist() for plan in self._waiters.get(row, ())]
            heirs = [plan for plan in waiting if not plan.cancelled]
            if heirs:
                return min(heirs, key=lambda plan: plan.priority)
            self._unpin_slots(slots)
            kept = rows[self._still_filling(rows, slots)]
            on_disk = (self.index.flags[kept] & ON_DISK) != 0
            self._forget(kept[~on_disk])  # its segment was deleted meanwhile
            kept = kept[on_disk]
            self.arena.free(self.index.host_slot[kept])
            self.index.host_slot[kept] = NO_SLOT
            self.index.flags[kept] &= np.uint8(0xFF ^ (FILLING | WRITE_DROPPED))
            self._may_leave_changed(kept)
            self._settle(rows, slots, failed=True)
        self.counters.add("withdrawn_pages", len(rows))
        return None

    def locations(self, rows: Rows) -> tuple[Hashes, DiskCopies]:
        """Page hashes of rows that are being promoted, and where their records lie."""
        with self.lock:
            index = self.index
            hashes, _ = index.keys(rows)
            return hashes, DiskCopies(
                index.segment[rows],
                index.block[rows],
                index.num_blocks[rows],
                index.disk_quality[rows],
            )

    # ---- private; the caller holds the lock ----

    def _cancel(self, plan: Plan) -> None:
        plan.cancelled = True
        self._plans.pop(plan, None)
        self._end_reservation(plan)
        self._count_pins(plan.slots, -1)
        self._unpin_slots(plan.slots)

    def _yield_plans(self, num_slots: int) -> bool:
        """Cancels plans for a save that lacks room, those of the last requests in the queue first.

        Never with look-ahead: then the planned pages are needed soonest and are worth more than
        a save that does not fit. The first request's plan always stays, so that the queue moves on
        however much is saved, and so do plans that have no more than that one. Reads under way go
        on; those that have not begun are given up when the plan's owner cancels it, too.

        Args:
            num_slots: no more plans go once so many slots lost their last pin.

        Returns:
            Whether there was one.
        """
        if self.policy is not None or len(self._plans) < 2:
            return False
        first, *others = sorted(self._plans, key=lambda plan: plan.priority)
        stays = np.zeros(self.arena.num_slots, np.bool_)
        stays[first.slots] = True
        yielding = (  # what is fetched would be in vain
            plan
            for plan in reversed(others)
            if not plan.num_remote_left and not stays[plan.slots].all()
        )
        given = 0
        for plan in itertools.islice(yielding, _MAX_YIELDING):
            given += int(np.count_nonzero(self._plan_pins[plan.slots] == 1))
            self._cancel(plan)
            if given >= num_slots:
                break
        return given > 0

    def _known_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int) -> Rows:
        rows = self.index.prefix_rows(hashes, space.number)
        usable = (self.index.flags[rows] & (READY | ON_DISK | FILLING)) != 0
        return self._good_prefix(leading(rows, usable), max_quality)

    def _path(
        self, space: KeySpace, hashes: Hashes, num_above: int, max_quality: int
    ) -> tuple[Rows, Rows]:
        """Rows of the first `num_above` pages, as far as known, and of those stored behind them."""
        above = self.index.lookup(hashes[:num_above], space.number)
        below = self._known_prefix(space, hashes[num_above:], max_quality)
        self._link(np.concatenate([above, below]))
        return above[above >= 0], below

    def _count_tiers(self, rows: Rows) -> TierCounts:
        flags = self.index.flags[rows]
        ready = (flags & READY) != 0
        pending = ~ready & ((flags & FILLING) != 0)
        return TierCounts(
            host=int(ready.sum()),
            disk=int((~ready & ~pending).sum()),
            pending=int(pending.sum()),
        )

    def _good_prefix(self, rows: Rows, max_quality: int) -> Rows:
        if max_quality == ANY or not self.has_inexact:
            return rows
        return leading(rows, self.index.quality[rows] <= max_quality)

    def _num_affordable(self, rows: Rows) -> int:
        """How many leading pages a plan may pin; those that other plans pin cost nothing."""
        slots = self.index.host_slot[rows]
        costs = (slots == NO_SLOT) | (self._plan_pins[slots] == 0)
        room = self._room_for(int(np.count_nonzero(~costs)))
        return int(np.searchsorted(np.cumsum(costs), room, side="right"))

    def _room_for(self, num_pinned: int) -> int:
        """How many more pages a plan may pin, of which plans pin so many already.

        Where they pin nothing else it may be larger than all plans together otherwise: a prompt of
        more than half of DRAM would be computed anew, however long it waited.
        """
        is_alone = self.num_planned_pages == num_pinned
        most = self.max_lone_plan_pages if is_alone else self.max_planned_pages
        return max(0, most - self.num_planned_pages)

    def _end_reservation(self, plan: Plan) -> None:
        self.num_planned_pages -= plan.num_reserved
        plan.num_reserved = 0

    def _count_pins(self, slots: Slots, step: int) -> None:
        """Adds a plan's pins to the books or takes them out; its slots differ."""
        before = self._plan_pins[slots]
        self._plan_pins[slots] = before + step
        fresh = before == 0 if step > 0 else before == 1
        self.num_planned_pages += step * int(np.count_nonzero(fresh))


def leading(rows: Rows, usable: npt.NDArray[np.bool_]) -> Rows:
    """The rows before the first that is not usable."""
    return rows if usable.all() else rows[: int(np.argmin(usable))]
