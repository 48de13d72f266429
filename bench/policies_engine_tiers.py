"""Eviction lists of the simulator: those of the product's policy, and Belady's optimum."""

from __future__ import annotations

import abc
import heapq

import numpy as np
import numpy.typing as npt

from bench.policies_types import Ids, Recorded
from sglang_ext.tiers.policy import TierLists

NEVER = np.iinfo(np.int64).max


class Lists(abc.ABC):
    """Pages of a tier, in the order in which they leave; `TierLists` has the same calls."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def has(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Which pages lie here."""

    @abc.abstractmethod
    def enter(self, rows: Ids) -> None:
        """Pages come in, root first."""

    @abc.abstractmethod
    def exit(self, rows: Ids) -> None:
        """Pages leave by the owner's will."""

    @abc.abstractmethod
    def hold(self, rows: Ids) -> None:
        """Pages must not leave."""

    @abc.abstractmethod
    def release(self, rows: Ids) -> None:
        """Undoes one `hold`."""

    @abc.abstractmethod
    def evict(self, count: int, now_s: float, *, spare: int | None = 0) -> Ids:
        """Takes out up to `count` pages."""


Lists.register(TierLists)


class Future:
    """When each page is used next, in a recorded order of requests.

    A request that is admitted uses its pages; what they are used for next is then known. First
    come, first served: the order of admission is that of arrival, so the future is exact.
    """

    def __init__(self, recorded: Recorded) -> None:
        paths = [request.stored_ids for request in recorded.requests]
        self._prompts = [request.prompt_ids for request in recorded.requests]
        nexts = np.full(recorded.num_pages, NEVER, np.int64)
        self._after: list[Ids] = [nexts] * len(paths)
        for number in range(len(paths) - 1, -1, -1):
            self._after[number] = nexts[paths[number]]
            # Only the prompt is a use; pages of the answer are stored and used later.
            nexts[recorded.requests[number].prompt_ids] = number
        self._paths = paths
        self.next_use = np.full(recorded.num_pages, NEVER, np.int64)
        self.depth = np.zeros(recorded.num_pages, np.int64)
        self.lists: list[BeladyLists] = []

    def arrived(self, number: int, now_s: float) -> None:
        """The request of this number waits now; for futures that do not know it before."""

    def admitted(self, number: int, now_s: float) -> None:
        """The request of this number uses its pages now."""
        path = self._paths[number]
        self.next_use[path] = self._after[number]
        self.depth[path] = np.arange(len(path))
        self._tell(path)

    def _tell(self, rows: Ids) -> None:
        for each in self.lists:
            each.changed(rows)


class BeladyLists(Lists):
    """MIN: the page whose next use is furthest leaves first, of equal ones the deepest.

    A use of a page uses all pages before it, so a parent's next use is never later than its
    child's: children leave before parents by themselves.
    """

    def __init__(self, future: Future, num_pages: int) -> None:
        self._future = future
        self._present = np.zeros(num_pages, np.bool_)
        self._holds = np.zeros(num_pages, np.int32)
        self._heap: list[tuple[int, int, int]] = []  # (-next use, -depth, page), lazily cleaned
        self._count = 0
        future.lists.append(self)

    def __len__(self) -> int:
        return self._count

    def has(self, rows: Ids) -> npt.NDArray[np.bool_]:
        present: npt.NDArray[np.bool_] = self._present[rows]
        return present

    def enter(self, rows: Ids) -> None:
        rows = rows[~self._present[rows]]
        self._present[rows] = True
        self._count += len(rows)
        self._push(rows)

    def exit(self, rows: Ids) -> None:
        self._count -= int(self._present[rows].sum())
        self._present[rows] = False

    def hold(self, rows: Ids) -> None:
        self._holds[rows] += 1

    def release(self, rows: Ids) -> None:
        self._holds[rows] -= 1
        self._push(rows[self._present[rows]])

    def changed(self, rows: Ids) -> None:
        """These pages have another next use."""
        self._push(rows[self._present[rows]])

    def evict(self, count: int, now_s: float, *, spare: int | None = 0) -> Ids:
        """See `Lists`; whom the queue needs follows from the future, so `spare` says nothing."""
        next_use, heap = self._future.next_use, self._heap
        out: list[int] = []
        while heap and len(out) < count:
            negative, _, page = heapq.heappop(heap)
            # A held page comes back to the heap when it is released.
            if self._present[page] and next_use[page] == -negative and not self._holds[page]:
                self._present[page] = False
                out.append(page)
        self._count -= len(out)
        return np.array(out, np.int64)

    def _push(self, rows: Ids) -> None:
        next_use = self._future.next_use[rows].tolist()
        depth = self._future.depth[rows].tolist()
        for use, deep, page in zip(next_use, depth, rows.tolist(), strict=True):
            heapq.heappush(self._heap, (-use, -deep, page))
