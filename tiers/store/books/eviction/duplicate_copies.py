"""Pages that are in DRAM and on disk, so that freeing the disk copy loses nothing at present.

Not locked: the owner's lock is held around every call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store.types import FILLING, ON_DISK, READY, Rows, Slots

_STEP = 64  # slots that the first step looks at; each next one twice as many


class DuplicateCopies:
    """A stack of DRAM slots whose pages were read from disk; the last one to come is on top.

    The last page read is the last to leave DRAM again, so a page taken here is not written a
    second time soon. A slot keeps its place when another page is read into it: where few are taken
    the order is a rough one. Only pages that are exact in DRAM and on disk qualify: coding a page
    that a lossy codec changed would give another record. A slot is on the stack at most once;
    whether its page still qualifies is checked when the slot is reached.

    Memory: 5 bytes a slot.

    Args:
        index: where pages lie.
        num_slots: of DRAM.
    """

    def __init__(self, index: PageIndex, num_slots: int) -> None:
        self._index = index
        self._rows: Rows = np.full(num_slots, -1, np.int64)  # by slot
        self._stack: Slots = np.empty(num_slots, np.int32)
        self._is_in = np.zeros(num_slots, np.bool_)
        self._num = 0

    def push(self, rows: Rows) -> None:
        """Pages came from disk; they are ready in DRAM."""
        slots = self._index.host_slot[rows]
        self._rows[slots] = rows
        slots = slots[~self._is_in[slots]]
        self._stack[self._num : self._num + len(slots)] = slots
        self._is_in[slots] = True
        self._num += len(slots)

    def take(self, num_blocks: int, most: int) -> Rows:
        """Takes pages whose records have `num_blocks` blocks together, or all there are.

        Args:
            num_blocks: that are asked for.
            most: pages that are taken at most.
        """
        taken: list[Rows] = []
        step = _STEP
        while num_blocks > 0 and most > 0 and self._num:
            start, step = max(0, self._num - step), 2 * step
            slots = self._stack[start : self._num][::-1]
            rows = self._rows[slots]
            is_double = self._are_doubles(rows, slots)
            blocks = np.cumsum(np.where(is_double, self._index.num_blocks[rows], 0))
            num = min(int(np.searchsorted(blocks, num_blocks)) + 1, len(slots))
            num = min(num, int(np.searchsorted(np.cumsum(is_double), most)) + 1)
            self._is_in[slots[:num]] = False
            self._num -= num
            taken.append(rows[:num][is_double[:num]])
            num_blocks -= int(blocks[num - 1])
            most -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def count(self, most: int) -> int:
        """How many of the pages that `take` would take first there are, up to a number."""
        start, num, step = self._num, 0, _STEP
        while start and num < most:
            end, start, step = start, max(0, start - step), 2 * step
            slots = self._stack[start:end]
            num += int(self._are_doubles(self._rows[slots], slots).sum())
        return min(num, most)

    def _are_doubles(self, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        index = self._index
        both = (index.flags[rows] & (READY | ON_DISK | FILLING)) == (READY | ON_DISK)
        both &= index.is_live(rows) & (index.host_slot[rows] == slots)
        both &= index.quality[rows] == Quality.EXACT
        result: npt.NDArray[np.bool_] = both & (index.disk_quality[rows] == Quality.EXACT)
        return result
