"""Pages that leave last for a time: whose they are, until when, and how many there may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.linked_rows import NONE
from sglang_ext.tiers.policy.hints import timers as kernels
from sglang_ext.tiers.policy.hints.hint_kernels import NUM_OWNERS
from sglang_ext.tiers.policy.hints.timers import NUM_ROWS, NUM_SLOTS, clear, set_time, slot_at
from sglang_ext.tiers.policy.page_kernels import Pages

Rows = npt.NDArray[np.int64]
_PAGES_A_CALL = 4096
# What is looked at to find pins that give way, a call.
_LOOKED_AT = 4096
# Of `Pages.pinned`: by an operator, and by a request, which gives way to later ones of its owner.
STAYS, GIVES_WAY = 1, 2


class Pins:
    """Pinned pages and their owners. Not locked.

    An owner may have as many as are left for others: one alone gets half of what there may be, two
    a third each, and whoever comes later finds room. (Dynamic thresholds: Choudhury and Hahne,
    1998.) Where an owner's requests pin more than that, those of their pins give way that end
    first: of who pins everything the latest are pinned, which would be there without pins, too.
    Every call costs time in proportion to the rows that it is about. Memory: 19 bytes a row,
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
        self, pages: Pages, path: Rows, seconds: float, owner: int, most: int, now_s: float,
        *, gives_way: bool = False,
    ) -> tuple[Rows, Rows, int]:  # fmt: skip
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
            gives_way: these pins take the room of such ones of the owner that end sooner, and lose
                theirs to such ones that end later.

        Returns:
            The pages that were not pinned before, those that are pinned no more, some of which may
            be again, and how many found no room.
        """
        new, lost = np.empty(len(path), np.int64), np.empty(2 * len(path), np.int64)
        num, num_lost, refused = _pin(
            pages, self._timers, self._held, path, now_s + seconds, owner, most, now_s, gives_way,
            new, lost,
        )  # fmt: skip
        return new[:num], lost[:num_lost], int(refused)

    def unpin(self, pages: Pages, rows: Rows) -> Rows:
        """Takes pins away; returns the pages that had one."""
        had = np.empty(len(rows), np.int64)
        return had[: _unpin(pages, self._timers, self._held, rows, had)]

    def take_due(self, pages: Pages, now_s: float) -> Rows:
        """Takes away pins whose time is over, a bounded number; returns their pages."""
        if not self.has_due(now_s):
            return np.empty(0, np.int64)
        rows = np.empty(_PAGES_A_CALL, np.int64)
        rows = rows[: kernels.take_due(self._timers, now_s, _PAGES_A_CALL, rows)]
        pages.pinned[rows] = 0
        np.subtract.at(self._held, self._timers.owner[rows], 1)
        return rows


@compiled
def _may_give(pages: Any, timers: Any, row: Any, owner: int, due_s: float) -> Any:
    """Whether a pin of an owner may give way to one that ends at a time."""
    mine = pages.pinned[row] == GIVES_WAY and timers.owner[row] == owner
    return mine and timers.due_s[row] < due_s


@compiled
def _at_once(timers: Any, row: Any, other: Any) -> Any:
    """Whether another page, or none, was pinned with one."""
    return other != NONE and timers.due_s[other] == timers.due_s[row]


@compiled
def _next_to_give(pages: Any, timers: Any, owner: int, due_s: float, cursor: Any) -> Any:
    """The last page of the next ones of an owner that were pinned at once; `NONE`: none was found.

    Args:
        pages: What is known of pages.
        timers: Of the pins.
        owner: Whose.
        due_s: When the pin ends for which there is no room; only those that end before give way.
        cursor: i64[4], where the last call of the same kind ended: a place of `slot_at`, a row of
            its slot or `NONE` for the first, what may still be looked at, and another's.
    """
    while cursor[0] < NUM_SLOTS and cursor[2] > 0:
        slot, row = slot_at(timers, cursor[0]), cursor[1]
        if row == NONE or timers.slot[row] != slot + 1:  # it was pinned anew meanwhile
            row = np.int64(timers.ends[0, slot])
        while row != NONE and cursor[2] > 0:
            after = np.int64(timers.next[row])
            cursor[1], cursor[2] = after, cursor[2] - 1
            if _may_give(pages, timers, row, owner, due_s) and not _at_once(timers, row, after):
                return row
            row = after
        cursor[0], cursor[1], cursor[2] = cursor[0] + 1, NONE, cursor[2] - 1
    return NONE


@compiled
def _first_to_give(pages: Any, timers: Any, owner: int, due_s: float, cursor: Any) -> Any:
    """The page whose pin gives way next, or `NONE`: of those that were pinned at once, the last.

    A page keeps those before it, so these stay pinned as long. Arguments as above; the fourth of
    the cursor is the page before the one that was found, or `NONE`.
    """
    row = cursor[3]
    if row == NONE or not _may_give(pages, timers, row, owner, due_s):
        row = _next_to_give(pages, timers, owner, due_s, cursor)
    if row != NONE:
        before = np.int64(timers.prev[row])
        cursor[3] = before if _at_once(timers, row, before) else NONE
    return row


@compiled
def _pin(
    pages: Any, timers: Any, held: Any, path: Any, due_s: float, owner: int, most: int,
    now_s: float, gives_way: bool, new: Any, lost: Any,
) -> Any:  # fmt: skip
    num, num_lost, refused = 0, 0, 0
    cursor = np.array([0, NONE, _LOOKED_AT, NONE], np.int64)
    for i in range(path.size):
        row = path[i]
        if row < 0 or row >= pages.known.size or not pages.known[row]:
            continue
        pinned = pages.pinned[row] != 0
        before = np.int64(timers.owner[row])
        if pinned and timers.due_s[row] >= due_s:
            continue
        if not (pinned and before == owner):
            while gives_way and not refused and num_lost < lost.size:
                if held[owner] < most - timers.counts[NUM_ROWS]:
                    break
                other = _first_to_give(pages, timers, owner, due_s, cursor)
                if other == NONE:
                    break
                pages.pinned[other] = 0
                held[owner] -= 1
                lost[num_lost] = other
                num_lost += 1
                clear(timers, lost[num_lost - 1 : num_lost])
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
        stays = not gives_way or pages.pinned[row] == STAYS
        pages.pinned[row] = STAYS if stays else GIVES_WAY
        set_time(timers, row, due_s, owner, now_s)
    return num, num_lost, refused


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
