"""Which page leaves DRAM next: the tier's lists, and what keeps a page from leaving.

A page stays while somebody reads or writes its slot, and while the disk is still to have it. Not
locked: the owner's lock is held around every call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    QUEUED,
    SPILLING,
    WRITE_DROPPED,
    Rows,
    Slots,
)

_MOVING = FILLING | SPILLING | QUEUED


class DramOrder:
    """The pages of DRAM in the order in which they leave.

    First pages that no waiting request needs, by learned return times or in base order; then those
    needed by the last requests of the queue; a child before its parent. O(pages taken out).

    Args:
        arena: the slots.
        index: where pages lie.
        policy: what the queue needs.
        disk_first: a page may leave only when the disk has it, or did not take it.

    Attributes:
        disk_first: as given; the owner sets it to false while every page that is not on disk is
            queued for it or being written: those are held anyway.
    """

    def __init__(
        self, arena: HostArena, index: PageIndex, policy: PlacementPolicy, *, disk_first: bool
    ) -> None:
        self._arena = arena
        self._index = index
        self.disk_first = disk_first
        self._lists = policy.add_tier(arena.num_slots)
        self._rows: Rows = np.full(arena.num_slots, -1, np.int64)  # by slot

    def enter(self, rows: Rows) -> None:
        """Pages are ready in DRAM; root first."""
        self._rows[self._index.host_slot[rows]] = rows
        self._lists.enter(rows)
        self.changed(rows)

    def changed(self, rows: Rows) -> None:
        """What keeps pages from leaving may have come or gone."""
        self._lists.hold_where(rows, self._stay(rows))

    def changed_slots(self, slots: Slots) -> None:
        """Pins of slots have come or gone."""
        rows = self._rows[slots]
        known = self._index.is_live(rows)
        known &= self._index.host_slot[rows] == slots
        self.changed(rows[known])

    def take(self, count: int, now_s: float, tenant: int | None = None) -> Rows:
        """Takes out up to `count` pages, in the order in which they leave.

        Args:
            count: how many.
            now_s: time.
            tenant: for whose pages; None where that is not known.
        """
        return self._lists.evict(count, now_s, tenant)

    def put_back(self, rows: Rows) -> None:
        """Undoes the last `take`, or the end of it, given in its order."""
        self._lists.put_back(rows)

    def demote(self, rows: Rows) -> int:
        """These pages may leave DRAM first; see `TierLists.demote`."""
        return self._lists.demote(rows)

    def demotable(self, rows: Rows) -> Rows:
        """Those that `demote` would move; see `TierLists.demotable`."""
        return self._lists.demotable(rows)

    @property
    def num_by_tenant(self) -> list[int]:
        """Pages of tenants with shares; see `TierLists`."""
        return self._lists.num_by_tenant

    def next_to_leave(self, count: int, now_s: float) -> Rows:
        """The pages that `take` would take out."""
        return self._lists.next_to_leave(count, now_s)

    def are_over(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages nobody is to want again, wherever they lie; see `TierLists.are_over`."""
        return self._lists.are_over(rows)

    @property
    def left_never_return(self) -> bool:
        """Whether pages that conversations left behind leave before all others; see `TierLists`."""
        return self._lists.return_times.left_never_return

    def check(self) -> None:
        """Verifies the lists against index and arena (linear; for tests).

        Raises:
            AssertionError: they disagree.
        """
        rows = self._index.rows()
        held = self._lists.held(rows)
        assert (held[self._lists.has(rows)] == self._stay(rows)[self._lists.has(rows)]).all()

    def has(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages are in the lists."""
        return self._lists.has(rows)

    def _stay(self, rows: Rows) -> npt.NDArray[np.bool_]:
        flags = self._index.flags[rows]
        stay = (flags & _MOVING) != 0
        if self.disk_first:
            stay |= (flags & (ON_DISK | WRITE_DROPPED)) == 0
        slots = self._index.host_slot[rows]
        there = slots >= 0
        stay[there] |= self._arena.pinned(slots[there])
        result: npt.NDArray[np.bool_] = stay
        return result
