"""Loads of pages that one rank keeps for all: their pins last until the slowest rank has read them.

Every rank begins the same readings in the same order, as loads are decided alike. Each tells in
every step how many of the oldest ones are over on it; the least of all ranks is over for all, and
only then the rank that keeps the pages gives back their pins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from sglang_ext.tiers.errors import TierUsageError
from sglang_ext.tiers.store.types import Slots


class SharedReading:
    """Slots that all ranks read; see `Reading`."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._is_over = False  # on this rank
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether this rank is done with the slots; whoever is told so goes on behind that."""
        with self._lock:
            return self._is_over

    def end(self) -> None:
        """This rank is done with the slots.

        Raises:
            TierUsageError: it was before.
        """
        with self._lock:
            if self._is_over:
                raise TierUsageError("A load of shared pages was ended twice.")
            self._is_over = True


class SharedReadings:
    """The readings that are not over on all ranks, oldest first.

    Scheduler's thread only, but for the ends of single readings.

    Args:
        release: gives pins back; does nothing on a rank that has none.
    """

    def __init__(self, release: Callable[[Slots], None]) -> None:
        self._release = release
        self._open: deque[SharedReading] = deque()

    def __len__(self) -> int:
        """Number of them."""
        return len(self._open)

    def begin(self, slots: Slots) -> SharedReading:
        """All ranks begin to read pages; what pins them is given up to this.

        Args:
            slots: i32 `[n]`, pinned on the rank that keeps them.
        """
        reading = SharedReading(slots)
        self._open.append(reading)
        return reading

    @property
    def num_ended(self) -> int:
        """How many of the oldest are over on this rank."""
        number = 0
        for reading in self._open:
            if not reading.is_over:
                break
            number += 1
        return number

    def settle(self, num_ended: int) -> None:
        """So many of the oldest are over on all ranks."""
        for _ in range(num_ended):
            self._release(self._open.popleft().slots)
