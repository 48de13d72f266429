"""The simulated tiers: what is stored, where it lies, and the two links between the tiers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from bench.policies_engine_tiers import BeladyLists, Future, Lists
from bench.policies_types import Ids, Request, System
from sglang_ext.tiers.policy import PlacementPolicy


class Store:
    """Pages on the device, in DRAM and on disk.

    DRAM and disk together hold at most their two capacities; a page of DRAM that leaves it stays on
    disk if there is room. New pages are written to disk in the background, so leaving DRAM costs
    nothing unless the writes are behind by more than the free buffer.

    Attributes:
        all: lists of what is stored at all.
        host: lists of what lies in DRAM; the same object when there is no disk.
        device: lists of finished requests' pages on the device, or `None`.
        counters: what happened.
    """

    def __init__(self, system: System, policy: PlacementPolicy, future: Future | None) -> None:
        self._system = system
        self._policy = policy
        self._dram_pages = system.pages(system.dram_bytes)
        self._all_pages = self._dram_pages + system.pages(system.disk_bytes)
        self._free_pages = int(self._dram_pages * system.dram_low_water)
        self.has_disk = system.disk_bytes > 0
        self._device_pages = system.pages(system.hbm_bytes)
        self._running_pages = 0
        self._write_free_s = 0.0
        self.seen = np.zeros(policy.num_rows, np.bool_)
        self.counters: Counter[str] = Counter()

        def lists(capacity: int) -> Lists:
            if future is not None:
                return BeladyLists(future, policy.num_rows)
            made: Any = policy.add_tier(capacity)  # registered as `Lists`
            tier: Lists = made
            return tier

        self.all: Lists = lists(self._all_pages)
        self.host: Lists = lists(self._dram_pages) if self.has_disk else self.all
        self.device: Lists | None = lists(self._device_pages) if system.hbm_bytes else None

    # ---- questions ----

    @property
    def window_pages(self) -> int:
        """Pages of DRAM that may be fetched ahead."""
        return self._dram_pages - self._free_pages

    def stored_prefix(self, path: Ids) -> int:
        """Leading pages that are stored anywhere."""
        return _leading(self.on_device(path) | self.all.has(path))

    def on_device(self, path: Ids) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which pages lie on the device."""
        return self.device.has(path) if self.device else np.zeros(len(path), np.bool_)

    def on_disk(self, path: Ids) -> Ids:
        """Pages of a path that lie on disk only."""
        return path[self.all.has(path) & ~self.host.has(path) & ~self.on_device(path)]

    def seen_prefix(self, path: Ids) -> int:
        """Leading pages that were ever stored."""
        return _leading(self.seen[path])

    def writes_behind_s(self, now_s: float) -> float:
        """How long a promotion waits for writes: what they are behind by, less the buffer."""
        buffer_s = self._free_pages * self._system.page_bytes / (self._system.disk_write_gb_s * 1e9)
        return max(self._write_free_s - now_s - buffer_s, 0.0)

    # ---- the device ----

    def device_has_room(self, num_pages: int) -> bool:
        """Whether a request of this size can run beside the others; a lone one always can."""
        if self.device is None or self._running_pages == 0:
            return True
        return self._running_pages + num_pages <= self._device_pages

    def run(self, num_pages: int, now_s: float) -> None:
        """A request takes device room; cached pages make way."""
        self._running_pages += num_pages
        self._shrink_device(now_s)

    def stop(self, num_pages: int) -> None:
        """A request gives its device room back."""
        self._running_pages -= num_pages

    # ---- changes ----

    def hold(self, path: Ids) -> None:
        """Pages are being read: they stay where they are."""
        for lists in self._tiers():
            lists.hold(path)

    def release(self, path: Ids) -> None:
        """Undoes `hold`."""
        for lists in self._tiers():
            lists.release(path)

    def promote(self, pages: Ids, now_s: float, *, spare: int | None) -> bool:
        """Makes room in DRAM for pages that are coming from disk; False where there is none."""
        need = len(self.host) + len(pages) - self.window_pages
        if need > 0:
            self.counters["demoted_pages"] += len(self.host.evict(need, now_s, spare=spare))
        return len(self.host) + len(pages) <= self._dram_pages

    def promoted(self, pages: Ids) -> None:
        """Pages came from disk, those that are still stored."""
        pages = pages[self.all.has(pages)]
        self.host.enter(pages)
        self.counters["promoted_pages"] += len(pages)

    def save(self, request: Request, now_s: float) -> Ids:
        """A request's pages are complete: they are stored; returns those that were not before.

        `make_room` follows, once it is known who waits for the new ones.
        """
        path = request.stored_ids
        self._policy.used(path, now_s, names=path.astype(np.uint64), arrived_s=request.arrival_s)
        self.seen[path] = True
        new = path[~self.all.has(path)]
        if self._all_pages:
            self.all.enter(new)
            if self.has_disk:
                self.host.enter(new)
                self._write(len(new), now_s)
        if self.device is not None:
            self.device.enter(path)
        return new

    def make_room(self, now_s: float) -> None:
        """What is too much leaves; what nobody waits for goes before what somebody does."""
        if self._all_pages:
            if self.has_disk:
                over = len(self.host) - self.window_pages
                self.counters["demoted_pages"] += len(self.host.evict(over, now_s))
            self._lose(self.all.evict(len(self.all) - self._all_pages, now_s))
        self._shrink_device(now_s)

    # ---- private ----

    def _tiers(self) -> list[Lists]:
        both = [self.all, self.host] if self.has_disk else [self.all]
        return both if self.device is None else [*both, self.device]

    def _write(self, num_pages: int, now_s: float) -> None:
        seconds = num_pages * self._system.page_bytes / (self._system.disk_write_gb_s * 1e9)
        self._write_free_s = max(self._write_free_s, now_s) + seconds
        self.counters["written_pages"] += num_pages

    def _lose(self, pages: Ids) -> None:
        """Pages left DRAM and disk."""
        self.counters["evicted_pages"] += len(pages)
        if self.has_disk:
            self.host.exit(pages)
        self._policy.forget(pages[~self.on_device(pages)])

    def _shrink_device(self, now_s: float) -> None:
        if self.device is None:
            return
        over = len(self.device) + self._running_pages - self._device_pages
        if over > 0:
            gone = self.device.evict(over, now_s)
            self._policy.forget(gone[~self.all.has(gone)])


def _leading(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """How many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))
