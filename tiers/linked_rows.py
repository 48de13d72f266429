"""Doubly linked lists of rows, kept in columns: several lists over the same rows, one for each row.

`prev` and `next` have a row's neighbours, `ends[0]` and `ends[1]` the first and the last row of
each list. What else a list's owner keeps of a row is its own business.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.tiers.compiled import compiled

NONE = -1


@compiled
def cut(prev: Any, next_: Any, ends: Any, which: int, row: int) -> None:
    """Takes a row out of the list that it is in.

    Args:
        prev: i32 per row, towards the first; `NONE` for none.
        next_: i32 per row.
        ends: i32[2, lists].
        which: The list.
        row: The row; its own neighbours stay as they were.
    """
    before, after = prev[row], next_[row]
    if before == NONE:
        ends[0, which] = after
    else:
        next_[before] = after
    if after == NONE:
        ends[1, which] = before
    else:
        prev[after] = before


@compiled
def insert(prev: Any, next_: Any, ends: Any, which: int, row: int, before: Any) -> None:
    """Puts a row, which is in no list, behind `before`, or first where that is `NONE`."""
    after = ends[0, which] if before == NONE else next_[before]
    prev[row] = before
    next_[row] = after
    if before == NONE:
        ends[0, which] = row
    else:
        next_[before] = row
    if after == NONE:
        ends[1, which] = row
    else:
        prev[after] = row


@compiled
def append(prev: Any, next_: Any, ends: Any, which: int, row: int) -> None:
    """Puts a row, which is in no list, at the end of one. Arguments as for `cut`."""
    insert(prev, next_, ends, which, row, ends[1, which])
