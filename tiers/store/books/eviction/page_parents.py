"""Which page follows which on a path, so that a flush writes no page before one that leads to it.

Loops run in numba without the GIL.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.store.types import Rows


class PageParents:
    """The page before each page, by row. Not locked: the owner's lock is held around every call.

    Rows are reused, so a link may point to a row that now holds another page. It is followed only
    if the depths fit: it then ends, or leads to a page of the same depth, and never in a circle.

    Memory: 8 bytes a row, committed as rows come into use.

    Args:
        num_rows: rows are 0 to `num_rows` - 1.
    """

    def __init__(self, num_rows: int) -> None:
        _compile_loops()
        self._reserve(num_rows)

    def _reserve(self, num_rows: int) -> None:
        self._parents = np.zeros(num_rows, np.int32)  # row + 1; 0 for none
        self._depths = np.zeros(num_rows, np.int32)

    def link(self, path: Rows) -> None:
        """Notes a path, root first. Only the part behind its last unknown (negative) row counts."""
        path = path[np.flatnonzero(path < 0)[-1] + 1 :] if (path < 0).any() else path
        if len(path):
            _link(self._parents, self._depths, np.ascontiguousarray(path, np.int64))

    def depart(self, head: Rows, tail: Rows) -> None:
        """Makes `head` the only path to `tail`, which is cut at its first unknown row (-1)."""
        known = np.flatnonzero(tail < 0)
        tail = tail[: known[0]] if len(known) else tail
        if len(tail):
            self._parents[tail[0]] = 0
            self.link(np.concatenate([head, tail]))

    def forget(self, rows: Rows) -> None:
        """These rows hold other pages from now on."""
        self._parents[rows] = 0

    def above(self, row: int) -> Rows:
        """The pages before one, the nearest first."""
        rows = np.empty(self._depths[row], np.int64)
        num: int = _above(self._parents, self._depths, row, rows)
        return rows[:num]


@compiled
def _link(parents: Any, depths: Any, path: Any) -> None:
    depth = 0
    if parents[path[0]] != 0:  # known from a longer path
        depth = depths[path[0]]
    else:
        depths[path[0]] = 0
    for i in range(1, path.size):
        parents[path[i]] = path[i - 1] + 1
        depths[path[i]] = depth + i


@compiled
def _above(parents: Any, depths: Any, row: int, rows: Any) -> int:
    num = 0
    while num < rows.size:
        above = parents[row] - 1
        if above < 0 or depths[above] != depths[row] - 1:
            break
        rows[num] = above
        num += 1
        row = above
    return num


@functools.cache
def _compile_loops() -> None:
    """Calls every loop once, so that nothing compiles while serving."""
    lineage = PageParents.__new__(PageParents)
    lineage._reserve(4)
    lineage.link(np.arange(3))
    lineage.above(2)
