"""Pages that leave last for a time: whose they are, until when, and how many there may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.policy.hints import timers as kernels
from sglang_ext.tiers.policy.hints.hint_kernels import NUM_OWNERS
from sglang_ext.tiers.policy.hints.timers import NUM_ROWS, clear, set_time
from sglang_ext.tiers.policy.page_kernels import Pages

Rows = npt.NDArray[np.int64]
_PAGES_A_CALL = 4096


class Pins:
    """Pinned pages and their owners. Not locked.

    An owner may have as many as are left for others: one alone gets half of what there may be, two
    a third each, and whoever comes later finds room. (Dynamic thresholds: Choudhury and Hahne,
    1998.) Every call costs time in proportion to the rows that it is about. Memory: 19 bytes a row,
    committed as rows are pinned.

    Args:
        num_rows: rows are 0 to `num_rows` - 1.
    """

    def __init__(self, num_rows: int) -> None:
        self._timers = kernels.new_timers(num_rows)
        self._held = np.zeros(NUM_OWNERS, np.int64)  # by owner

    def __len__(self) -> int:
        """Pinned pages."""
        return kernels.num_timed(self._timers)

    def held(self, owner: int) -> int:
        """Pinned pages of an owner."""
        return int(self._held[owner])

    def has_due(self, now_s: float) -> bool:
        """Whether there may be pins whose time is over. O(1)."""
        return kernels.has_due(self._timers, now_s)

    def pin(
        self, pages: Pages, path: Rows, seconds: float, owner: int, most: int, now_s: float
    ) -> tuple[Rows, int]:
        """Pins the pages of a conversation, from the root on, as far as there is room for them.

        A page that is pinned already stays so for the longer of the two times, and is the owner's
        whose time that is.

        Args:
            pages: what is known of pages.
            path: root first; rows that do not exist are passed over.
            seconds: from now.
            owner: who pins.
            most: pages that may be pinned.
            now_s: time.

        Returns:
            The pages that were not pinned before, and how many found no room.
        """
        new = np.empty(len(path), np.int64)
        num, refused = _pin(
            pages, self._timers, self._held, path, now_s + seconds, owner, most, now_s, new
        )
        return new[:num], int(refused)

    def unpin(self, pages: Pages, rows: Rows) -> Rows:
        """Takes pins away; returns the pages that had one."""
        had = np.empty(len(rows), np.int64)
        return had[: _unpin(pages, self._timers, self._held, rows, had)]

    def take_due(self, pages: Pages, now_s: float) -> Rows:
        """Takes away pins whose time is over, a bounded number; returns their pages."""
        if not self.has_due(now_s):
            return np.empty(0, np.int64)
        rows = np.empty(_PAGES_A_CALL, np.int64)
        rows = rows[: kernels.take_due(self._timers, now_s, rows)]
        pages.pinned[rows] = 0
        np.subtract.at(self._held, self._timers.owner[rows], 1)
        return rows


@compiled
def _pin(
    pages: Any, timers: Any, held: Any, path: Any, due_s: float, owner: int, most: int,
    now_s: float, new: Any,
) -> Any:  # fmt: skip
    num, refused = 0, 0
    for i in range(path.size):
        row = path[i]
        if row < 0 or row >= pages.known.size or not pages.known[row]:
            continue
        pinned = pages.pinned[row] != 0
        before = np.int64(timers.owner[row])
        if pinned and timers.due_s[row] >= due_s:
            continue
        if not (pinned and before == owner):
            # Behind a page that finds no room none is pinned: nobody would reach it.
            if refused or held[owner] >= most - timers.counts[NUM_ROWS]:
                refused += not pinned
                continue
            if pinned:
                held[before] -= 1
            else:
                new[num] = row
                num += 1
            held[owner] += 1
        pages.pinned[row] = 1
        set_time(timers, row, due_s, owner, now_s)
    return num, refused


@compiled
def _unpin(pages: Any, timers: Any, held: Any, rows: Any, had: Any) -> Any:
    num = 0
    if timers.counts[NUM_ROWS] == 0:
        return num
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= pages.known.size or not pages.pinned[row]:
            continue
        pages.pinned[row] = 0
        held[np.int64(timers.owner[row])] -= 1
        had[num] = row
        num += 1
    clear(timers, had[:num])
    return num
