"""Forgetting all pages of some key spaces, however many there are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.spill_queue import SpillQueue
from sglang_ext.tiers.store.types import FILLING, QUEUED, READY, SPILLING, Rows

# Pages that are taken out of the books under one hold of the lock: a few milliseconds.
AT_ONCE = 2048
_BETWEEN_S = 0.0005  # who waits for a lock that is taken again at once does not get it
_IN_FLIGHT = FILLING | QUEUED | SPILLING


class Cleared(NamedTuple):
    """What a clear forgets.

    Attributes:
        numbers: of the key spaces.
        fresh: as many numbers that no key space has or will have.
        digests: of the namespaces of which the disk is to lose everything that it has now; nothing
            is given to it to write before that. Without any `finish` will not come, and all pages
            are taken out at once.
    """

    numbers: Sequence[int]
    fresh: Sequence[int]
    digests: Collection[bytes]


class Clearing:
    """Begun by the scheduler's thread, which must go on, and finished by the one that writes.

    From `begin` on no page of before is found, nor written, by whichever key space. What is under
    way ends in nothing at once. Other pages, where they are many, stay in the books for a while:
    they may leave DRAM or the disk as ever, and are taken out bit by bit, before the disk deletes
    its records and gets others. Methods take the table's lock.

    Args:
        table: the pages.
        spills: what is on its way to disk.
    """

    def __init__(self, table: PageTable, spills: SpillQueue) -> None:
        self._table, self._index, self._spills = table, table.index, spills
        self._left: deque[Rows] = deque()  # guarded by the lock

    def begin(self, asked_for: Callable[[], Cleared]) -> int:
        """Forgets all pages of some key spaces; returns how many.

        Args:
            asked_for: which; asked with the lock held, under which pages are entered: a namespace
                that is being opened gets other key spaces meanwhile.
        """
        with self._table.lock:
            numbers, fresh, digests = asked_for()
            rows = self._index.rows_of_namespaces(numbers)
            if not digests or len(rows) <= AT_ONCE:
                self._forget(rows)
            else:
                self._forget_later(rows, numbers, fresh)
            self._spills.clear(digests)
            return len(rows)

    def finish(self) -> None:
        """Takes out what `begin` left. One thread, which holds nothing that others wait for."""
        while True:
            with self._table.lock:
                if not self._left:
                    return
                rows = self._left.popleft()
            try:
                for first in range(0, len(rows), AT_ONCE):
                    with self._table.lock:
                        part = rows[first : first + AT_ONCE]
                        # A row may have been another page's since.
                        self._forget(part[self._index.are_disowned(part)])
                    time.sleep(_BETWEEN_S)
            finally:
                with self._table.lock:
                    self._spills.num_clearings -= 1

    def _forget_later(self, rows: Rows, numbers: Sequence[int], fresh: Sequence[int]) -> None:
        flags = self._index.flags[rows]
        in_flight = (flags & _IN_FLIGHT) != 0
        self._forget(rows[in_flight])
        self._index.disown(numbers, fresh)
        not_ready = (flags[~in_flight] & READY) == 0
        self._left.append(rows[~in_flight][np.argsort(not_ready, kind="stable")])  # DRAM first
        self._spills.num_clearings += 1

    def _forget(self, rows: Rows) -> None:
        slots = self._index.host_slot[rows]
        self._table.arena.free(slots[slots != NO_SLOT])
        self._table.remove(rows, Absence.CLEARED)
