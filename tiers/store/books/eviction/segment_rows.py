"""Which pages lie in which disk segment, and how full of them each segment is.

Loops run in numba without the GIL.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.store.types import Rows

_NONE = -1
_MIN_SEGMENTS = 64


class SegmentRows:
    """The rows of the pages of each segment. Not locked: the owner's lock is held.

    Every call costs time in proportion to the rows that it is about.

    Memory: 8 bytes a row, committed as rows come into use, and 12 bytes a segment.

    Args:
        num_rows: rows are 0 to `num_rows` - 1.
    """

    def __init__(self, num_rows: int) -> None:
        _compile_loops()
        self._reserve(num_rows)

    def _reserve(self, num_rows: int) -> None:
        self._prev = np.zeros(num_rows, np.int32)
        self._next = np.zeros(num_rows, np.int32)
        self._heads = np.full(_MIN_SEGMENTS, _NONE, np.int32)
        self._live = np.zeros((_MIN_SEGMENTS, 2), np.int64)  # blocks, rows
        # Segment ids grow for as long as the folder lives; each that has a page has a number here.
        self._numbers: dict[int, int] = {}
        self._free = list(range(_MIN_SEGMENTS))
        self._thinned: dict[int, None] = {}

    def add(
        self,
        rows: Rows,
        segments: npt.NDArray[np.uint32],
        num_blocks: npt.NDArray[np.uint16],
    ) -> None:
        """Pages lie in segments now; none of them lay in one."""
        ids, which = _grouped(segments)
        for segment in ids.tolist():
            self._number(segment)
        numbers = np.array([self._numbers[segment] for segment in ids.tolist()], np.int64)
        _add(
            self._prev, self._next, self._heads, self._live, np.ascontiguousarray(rows, np.int64),
            numbers[which], np.ascontiguousarray(num_blocks),
        )  # fmt: skip

    def remove(
        self,
        rows: Rows,
        segments: npt.NDArray[np.uint32],
        num_blocks: npt.NDArray[np.uint16],
    ) -> None:
        """Pages lie in their segments no more."""
        ids, which = _grouped(segments)
        numbers = np.array([self._numbers[segment] for segment in ids.tolist()], np.int64)
        _remove(
            self._prev, self._next, self._heads, self._live, np.ascontiguousarray(rows, np.int64),
            numbers[which], np.ascontiguousarray(num_blocks),
        )  # fmt: skip
        for segment, number in zip(ids.tolist(), numbers.tolist(), strict=True):
            self._thinned[segment] = None
            if not self._live[number, 1]:
                self._free.append(self._numbers.pop(segment))

    def rows(self, segment: int, most: int | None = None) -> Rows:
        """The rows of a segment's pages, in any order, or of so many of them."""
        number = self._numbers.get(segment)
        if number is None:
            return np.empty(0, np.int64)
        num = int(self._live[number, 1])
        found = np.empty(num if most is None else min(num, most), np.int64)
        _walk(self._next, self._heads[number], found)
        return found

    def num_blocks(self, segment: int) -> int:
        """Blocks of the records of a segment's pages."""
        number = self._numbers.get(segment)
        return 0 if number is None else int(self._live[number, 0])

    def note_thin(self, segments: npt.NDArray[np.uint32]) -> None:
        """Segments may hold records that are no page's."""
        self._thinned.update(dict.fromkeys(np.unique(segments).tolist()))

    def take_thinned(self) -> dict[int, int]:
        """Segments that lost pages since the last call, with the blocks that are left."""
        thinned, self._thinned = self._thinned, {}
        return {segment: self.num_blocks(segment) for segment in thinned}

    def _number(self, segment: int) -> int:
        number = self._numbers.get(segment)
        if number is None:
            if not self._free:
                old = len(self._heads)
                self._heads = np.concatenate([self._heads, np.full(old, _NONE, np.int32)])
                self._live = np.concatenate([self._live, np.zeros((old, 2), np.int64)])
                self._free = list(range(old, 2 * old))
            number = self._numbers[segment] = self._free.pop()
        return number


@compiled
def _add(
    prev: Any, next_: Any, heads: Any, live: Any, rows: Any, numbers: Any, num_blocks: Any
) -> None:
    for i in range(rows.size):
        row, number = rows[i], numbers[i]
        head = heads[number]
        prev[row] = _NONE
        next_[row] = head
        if head != _NONE:
            prev[head] = row
        heads[number] = row
        live[number, 0] += num_blocks[i]
        live[number, 1] += 1


@compiled
def _remove(
    prev: Any, next_: Any, heads: Any, live: Any, rows: Any, numbers: Any, num_blocks: Any
) -> None:
    for i in range(rows.size):
        row, number = rows[i], numbers[i]
        before, after = prev[row], next_[row]
        if before == _NONE:
            heads[number] = after
        else:
            next_[before] = after
        if after != _NONE:
            prev[after] = before
        live[number, 0] -= num_blocks[i]
        live[number, 1] -= 1


@compiled
def _walk(next_: Any, row: int, found: Any) -> None:
    for i in range(found.size):
        found[i] = row
        row = next_[row]


@functools.cache
def _compile_loops() -> None:
    """Calls every loop once, so that nothing compiles while serving."""
    rows = SegmentRows.__new__(SegmentRows)
    rows._reserve(4)
    some = np.arange(2), np.zeros(2, np.uint32), np.ones(2, np.uint16)
    rows.add(*some)
    rows.rows(0)
    rows.remove(*some)


def _grouped(
    segments: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]]:
    """Returns the distinct segments, and for each element of `segments` its index among them.

    Equal neighbours are sorted as one.
    """
    if not len(segments) or (segments == segments[0]).all():  # pages are few, or of one batch
        return segments[:1], np.zeros(len(segments), np.intp)
    firsts = np.flatnonzero(np.r_[True, segments[1:] != segments[:-1]][: len(segments)])
    ids, of_run = np.unique(segments[firsts], return_inverse=True)
    return ids, np.repeat(of_run, np.diff(firsts, append=len(segments)))
