"""What plans of waiting requests pin in DRAM, and how much they may."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import Plan, Rows, Slots

# Share of DRAM that may be pinned for waiting requests; the rest stays free to move.
_PLAN_SHARE = 0.5
# Share that the only plan there is may pin, for a prompt that is larger than that.
_LONE_PLAN_SHARE = 0.875
_MAX_YIELDING: Final = 256
"""So many plans at most give up their room at a time; plans that share pages give little each."""


class PlanPins:
    """The pins and the reservations of all plans. The caller holds the table's lock.

    All plans together pin at most `max_planned_pages`, so that saves and loads can go on, and a
    single one up to `max_lone_plan_pages`; a page that several plans share counts once.

    Args:
        table: the pages.
        yields_to_saves: whether a save that lacks room may take that of plans: without look-ahead.

    Attributes:
        num_pages: slots that plans pin or will pin, as what they fetch arrives.
    """

    def __init__(self, table: PageTable, *, yields_to_saves: bool) -> None:
        self._table = table
        self._yields_to_saves = yields_to_saves
        num_slots = table.arena.num_slots
        self.max_planned_pages = max(1, int(num_slots * _PLAN_SHARE))
        self.max_lone_plan_pages = max(1, int(num_slots * _LONE_PLAN_SHARE))
        self.num_pages = 0
        self._by_slot = np.zeros(num_slots, np.int32)  # plans
        self._plans: dict[Plan, None] = {}  # with pins, oldest first

    def num_affordable(self, rows: Rows) -> int:
        """How many leading pages a plan may pin; those that other plans pin cost nothing."""
        slots = self._table.index.host_slot[rows]
        costs = (slots == NO_SLOT) | (self._by_slot[slots] == 0)
        room = self._room_for(int(np.count_nonzero(~costs)))
        return int(np.searchsorted(np.cumsum(costs), room, side="right"))

    def add(self, plan: Plan, slots: Slots) -> None:
        """A plan has more slots, which the caller pinned; they differ from those that it has."""
        plan.slots = np.concatenate([plan.slots, slots])
        self._count(slots, 1)
        if len(slots):
            self._plans[plan] = None

    def cancel(self, plan: Plan) -> None:
        """Takes from a plan all that it pins and may pin."""
        plan.cancelled = True
        self._plans.pop(plan, None)
        self.end_reservation(plan)
        self._count(plan.slots, -1)
        self._table.unpin(plan.slots)

    def reserve(self, plan: Plan, num_pages: int) -> int:
        """Keeps room for pages that come later; returns for how many of them there is."""
        num = 0 if plan.cancelled else min(num_pages, self._room_for(len(plan.slots)))
        plan.num_reserved = num
        self.num_pages += num
        return num

    def use_reserved(self, plan: Plan, num_pages: int) -> None:
        """Pages came for which room was kept, as far as it was."""
        used = min(num_pages, plan.num_reserved)
        plan.num_reserved -= used
        self.num_pages -= used

    def end_reservation(self, plan: Plan) -> None:
        """Nothing more comes for this plan."""
        self.use_reserved(plan, plan.num_reserved)

    def yield_some(self, num_slots: int) -> bool:
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
        if not self._yields_to_saves or len(self._plans) < 2:
            return False
        first, *others = sorted(self._plans, key=lambda plan: plan.priority)
        stays = np.zeros(self._table.arena.num_slots, np.bool_)
        stays[first.slots] = True
        yielding = (  # what is fetched would be in vain
            plan
            for plan in reversed(others)
            if not plan.num_remote_left and not stays[plan.slots].all()
        )
        given = 0
        for plan in itertools.islice(yielding, _MAX_YIELDING):
            given += int(np.count_nonzero(self._by_slot[plan.slots] == 1))
            self.cancel(plan)
            if given >= num_slots:
                break
        return given > 0

    def check(self) -> None:
        """Verifies the counts against the plans (linear; for tests).

        Raises:
            AssertionError: they disagree.
        """
        by_slot = np.zeros_like(self._by_slot)
        for plan in self._plans:
            np.add.at(by_slot, plan.slots, 1)
        assert (by_slot == self._by_slot).all(), "plans and their pins disagree"
        assert int((by_slot > 0).sum()) <= self.num_pages, (by_slot, self.num_pages)

    def _room_for(self, num_pinned: int) -> int:
        """How many more pages a plan may pin, of which plans pin so many already.

        Where they pin nothing else it may be larger than all plans together otherwise: a prompt of
        more than half of DRAM would be computed anew, however long it waited.
        """
        is_alone = self.num_pages == num_pinned
        most = self.max_lone_plan_pages if is_alone else self.max_planned_pages
        return max(0, most - self.num_pages)

    def _count(self, slots: Slots, step: int) -> None:
        before = self._by_slot[slots]
        self._by_slot[slots] = before + step
        fresh = before == 0 if step > 0 else before == 1
        self.num_pages += step * int(np.count_nonzero(fresh))
