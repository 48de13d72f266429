"""What waits: the requests in the order the scheduler will take them, and the pages they need."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import queue_kernels as kernels

Rows = npt.NDArray[np.int64]
_MIN_SLOTS = 64
_MIN_ENTRIES = 1024


class WaitingQueue:
    """The queue and, for each page, who needs it first. Not locked: the owner's lock guards it.

    Memory: 8 bytes a row, 20 bytes for each page of each waiting request.

    Args:
        num_rows: rows of pages are below this.
    """

    def __init__(self, num_rows: int) -> None:
        rows: list[Any] = [np.full(num_rows, kernels.NONE, np.int32) for _ in range(2)]
        entries: list[Any] = [np.zeros(0, np.int32) for _ in range(5)]
        slots: list[Any] = [
            np.zeros(0, dtype) for dtype in (np.int32, np.int64, np.int64, np.uint8, np.uint8)
        ]
        free = np.array([kernels.NONE, 0], np.int64)
        make: Any = kernels.Needs
        self.needs: kernels.Needs = make(*rows, *entries, *slots, free)
        self._slots: dict[Hashable, int] = {}
        self._requests: list[Hashable] = []  # by slot
        self._num_pages: list[int] = []  # by slot: length of the path
        self._free_slots: list[int] = []
        self.has_lost_pages = False  # whether `take_lost_pages` may have something
        # Slots by place; -1 where a request left. Places only compare, so holes do no harm.
        self._line: npt.NDArray[np.int64] = np.full(2 * _MIN_SLOTS, -1, np.int64)
        self._begin = 0  # no request stands before it
        self._end = 0
        self._order: list[Hashable] = []  # the waiting requests
        self._grow_slots()
        self._grow_entries(_MIN_ENTRIES)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._slots

    def enqueue(self, request: Hashable, path: Rows) -> Rows:
        """Adds a request at the end, or gives a waiting one another path in its place.

        Returns:
            Pages of its former path that nobody needs now.
        """
        unneeded = np.zeros(0, np.int64)
        slot = self._slots.get(request)
        if slot is None:
            slot = self._take_slot(request)
        else:
            unneeded = self._drop(slot)
        self._grow_entries(len(path))
        kernels.add(self.needs, slot, path)
        self._num_pages[slot] = len(path)
        return unneeded

    def leave(self, request: Hashable) -> Rows:
        """Removes a request, if it waits; returns its pages that nobody needs now."""
        slot = self._slots.pop(request, None)
        if slot is None:
            return np.zeros(0, np.int64)
        unneeded = self._drop(slot)
        self._line[self.needs.place[slot]] = -1
        while self._begin < self._end and self._line[self._begin] < 0:
            self._begin += 1
        self._requests[slot] = None
        self._order.remove(request)
        self._free_slots.append(slot)
        return unneeded

    def forget(self, rows: Rows) -> None:
        """These pages are gone: no request needs them."""
        self.has_lost_pages |= bool(kernels.forget(self.needs, rows))

    def take_lost_pages(self) -> list[Hashable]:
        """Waiting requests of whose pages some were forgotten, in order; each is named once.

        A page that comes back is another one: whoever needs it says so by `enqueue`.
        """
        if not self.has_lost_pages:
            return []
        self.has_lost_pages = False
        slots = self.slots()
        slots = slots[self.needs.lost_pages[slots] > 0]
        self.needs.lost_pages[slots] = 0
        return [self._requests[slot] for slot in slots.tolist()]

    def set_order(self, requests: Sequence[Hashable]) -> None:
        """Takes the scheduler's order; waiting requests that it does not name stay behind it.

        Costs a comparison when nothing changed, else one step a request and the relinking of the
        pages of the fewest requests whose moving explains the change.
        """
        given = [request for request in requests if request in self._slots]
        if given == self._order:
            return
        named = dict.fromkeys(given)
        old = self.slots()
        new = np.fromiter((self._slots[request] for request in named), np.int64, len(named))
        if len(new) < len(old):
            rest = np.ones(len(self._requests), np.bool_)
            rest[new] = False
            new = np.concatenate([new, old[rest[old]]])
        if np.array_equal(old, new):
            return
        self._order = [self._requests[slot] for slot in new.tolist()]
        moved = np.empty(len(new), np.bool_)
        kernels.outside_longest_run(self.needs.place[new], moved)
        kernels.relink(self.needs, new, moved)
        self._line[: len(new)] = new
        self._line[len(new) : self._end] = -1
        self._begin, self._end = 0, len(new)

    def slots(self) -> Rows:
        """Slots of the waiting requests, in order."""
        line = self._line[self._begin : self._end]
        return line[line >= 0]

    def window(self, budget_pages: int) -> list[Hashable]:
        """The leading requests whose distinct pages fit; at least the first one."""
        slots = np.empty(len(self._slots), np.int64)
        line = self._line[self._begin : self._end]
        num = kernels.leading(line, self.needs.distinct, budget_pages, slots)
        return [self._requests[slot] for slot in slots[:num].tolist()]

    def needed_at(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Place of the first request that needs each page, smaller is sooner; -1 for nobody."""
        places = np.empty(len(rows), np.int64)
        kernels.needed_at(self.needs, rows, places)
        return places

    # ---- private ----

    def _drop(self, slot: int) -> Rows:
        unneeded = np.empty(self._num_pages[slot], np.int64)
        num = kernels.drop(self.needs, slot, unneeded)
        return unneeded[:num]

    def _take_slot(self, request: Hashable) -> int:
        if not self._free_slots:
            self._grow_slots()
        slot = self._free_slots.pop()
        if self._end == len(self._line):
            self._close_holes()
        self._slots[request] = slot
        self._requests[slot] = request
        self._order.append(request)
        self._line[self._end] = slot
        self.needs.place[slot] = self._end
        self.needs.distinct[slot] = 0
        self._end += 1
        return slot

    def _close_holes(self) -> None:
        """Numbers the places anew. The line is twice as long as there are slots: seldom."""
        slots = self.slots()
        self._line[:] = -1
        self._line[: len(slots)] = slots
        self.needs.place[slots] = np.arange(len(slots))
        self._begin, self._end = 0, len(slots)

    def _grow_slots(self) -> None:
        old = len(self._requests)
        more = max(old, _MIN_SLOTS)
        needs = self.needs
        self.needs = needs._replace(
            first=_longer(needs.first, more, kernels.NONE),
            place=_longer(needs.place, more, 0),
            distinct=_longer(needs.distinct, more, 0),
            dirty=_longer(needs.dirty, more, 0),
            lost_pages=_longer(needs.lost_pages, more, 0),
        )
        self._requests += [None] * more
        self._num_pages += [0] * more
        self._free_slots += range(old + more - 1, old - 1, -1)
        self._line = _longer(self._line, 2 * (old + more) - len(self._line), -1)

    def _grow_entries(self, count: int) -> None:
        """Makes room for `count` entries more."""
        needs = self.needs
        if needs.free[1] >= count:
            return
        old = len(needs.row)
        more = max(old, count)
        entries = {
            name: _longer(getattr(needs, name), more, kernels.NONE)
            for name in ("row", "slot", "prev", "next", "chain")
        }
        entries["chain"][old:] = np.arange(old + 1, old + more + 1)
        entries["chain"][-1] = needs.free[0]
        self.needs = needs._replace(**entries)
        self.needs.free[:] = old, needs.free[1] + more


def _longer(array: npt.NDArray[Any], more: int, value: int) -> Any:
    return np.concatenate([array, np.full(max(more, 0), value, array.dtype)])
