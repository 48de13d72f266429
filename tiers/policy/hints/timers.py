"""Loops of a timing wheel: which pages something was said of until a time that is over.

Rows stand in slots by the second in which their time is over: 256 slots of one second, 64 of 256
seconds and 64 of 16,384, which is twelve days. Rows of a wider slot are spread over narrower ones
when its time begins, so each is moved twice at most. (Varghese and Lauck, 1987, scheme 7.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.linked_rows import NONE, append, cut

_FINE_BITS, _WIDE_BITS = 8, 6
_NUM_FINE, _NUM_WIDE = 1 << _FINE_BITS, 1 << _WIDE_BITS
NUM_SLOTS = _NUM_FINE + 2 * _NUM_WIDE
MAX_S = float(1 << (_FINE_BITS + 2 * _WIDE_BITS))
_SECONDS_A_CALL = 1 << 16

NEXT, NUM_ROWS = 0, 1  # slots of `counts`


class Timers(NamedTuple):
    """Columns by row; 19 bytes a row, committed as rows are given times.

    Attributes:
        slot: u16 per row, the slot that it is in, counted from 1; 0 for none.
        prev: i32 per row.
        next: i32 per row.
        due_s: f64 per row, when its time is over.
        owner: u8 per row, who said it.
        ends: i32[2, slots], first and last row of each slot.
        counts: i64[2], the second to be looked at next, rows with a time.
    """

    slot: npt.NDArray[np.uint16]
    prev: npt.NDArray[np.int32]
    next: npt.NDArray[np.int32]
    due_s: npt.NDArray[np.float64]
    owner: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]


def new_timers(num_rows: int) -> Timers:
    """No row has a time."""
    return Timers(
        np.zeros(num_rows, np.uint16),
        np.zeros(num_rows, np.int32),
        np.zeros(num_rows, np.int32),
        np.zeros(num_rows),
        np.zeros(num_rows, np.uint8),
        np.full((2, NUM_SLOTS), NONE, np.int32),
        np.zeros(2, np.int64),
    )


def num_timed(timers: Timers) -> int:
    """Rows with a time."""
    return int(timers.counts[NUM_ROWS])


def has_due(timers: Timers, now_s: float) -> bool:
    """Whether there may be rows whose time is over. O(1)."""
    return bool(timers.counts[NUM_ROWS] > 0 and timers.counts[NEXT] <= now_s)


@compiled
def _link(timers: Any, row: int) -> None:
    """Puts a row behind the others of its second."""
    start = timers.counts[NEXT]
    second = max(np.int64(np.ceil(timers.due_s[row])), start)
    # Where nobody looked for days it lies beyond the wheel: as far as that goes, and then again.
    second = min(second, start + (1 << (_FINE_BITS + 2 * _WIDE_BITS)) - 1)
    left = second - start
    if left < _NUM_FINE:
        slot = second & (_NUM_FINE - 1)
    elif left < _NUM_FINE << _WIDE_BITS:
        slot = _NUM_FINE + ((second >> _FINE_BITS) & (_NUM_WIDE - 1))
    else:
        slot = _NUM_FINE + _NUM_WIDE
        slot += (second >> (_FINE_BITS + _WIDE_BITS)) & (_NUM_WIDE - 1)
    timers.slot[row] = slot + 1
    append(timers.prev, timers.next, timers.ends, slot, row)


@compiled
def _cut(timers: Any, row: int) -> None:
    cut(timers.prev, timers.next, timers.ends, timers.slot[row] - 1, row)
    timers.slot[row] = 0


@compiled
def set_time(timers: Any, row: int, due_s: float, owner: int, now_s: float) -> None:
    """Gives a row a time, in place of the one it has.

    Args:
        timers: The columns.
        row: The row.
        due_s: When it is over, at most `MAX_S` from now.
        owner: Who says it.
        now_s: Time.
    """
    if timers.counts[NUM_ROWS] == 0:
        timers.counts[NEXT] = max(timers.counts[NEXT], np.int64(np.floor(now_s)))
    if timers.slot[row] != 0:
        _cut(timers, row)
        timers.counts[NUM_ROWS] -= 1
    timers.counts[NUM_ROWS] += 1
    timers.due_s[row] = due_s
    timers.owner[row] = owner
    _link(timers, row)


@compiled
def set_times(timers: Any, rows: Any, due_s: float, owner: int, now_s: float) -> None:
    """The same for some rows, all of which exist."""
    for i in range(rows.size):
        set_time(timers, rows[i], due_s, owner, now_s)


@compiled
def clear(timers: Any, rows: Any) -> Any:
    """Takes the times of some rows away, in place; returns how many had one.

    Args:
        timers: The columns.
        rows: i64[N]; rows that do not exist are passed over.
    """
    num = 0
    if timers.counts[NUM_ROWS] == 0:
        return num
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < timers.slot.size and timers.slot[row] != 0:
            _cut(timers, row)
            num += 1
    timers.counts[NUM_ROWS] -= num
    return num


@compiled
def slot_at(timers: Any, place: int) -> Any:
    """The slots by what is in them, which is over sooner in one place than in all that follow.

    Args:
        timers: The columns.
        place: From 0 to `NUM_SLOTS` - 1.
    """
    start = timers.counts[NEXT]
    if place < _NUM_FINE:
        return (start + place) & (_NUM_FINE - 1)
    place -= _NUM_FINE
    # What begins in the second of now stands in narrower slots.
    if place < _NUM_WIDE:
        return _NUM_FINE + (((start >> _FINE_BITS) + place + 1) & (_NUM_WIDE - 1))
    wide = (start >> (_FINE_BITS + _WIDE_BITS)) + place - _NUM_WIDE + 1
    return _NUM_FINE + _NUM_WIDE + (wide & (_NUM_WIDE - 1))


@compiled
def _spread(timers: Any, slot: int, budget: int) -> Any:
    """Moves rows of a wide slot to where they belong now; returns what is left of the budget."""
    while budget > 0 and timers.ends[0, slot] != NONE:
        row = timers.ends[0, slot]
        _cut(timers, row)
        _link(timers, row)
        budget -= 1
    return budget


@compiled
def _given_at_once(timers: Any, row: int, other: int) -> Any:
    """Whether two rows were given their times by one call."""
    same_time = timers.due_s[row] == timers.due_s[other]
    return same_time and timers.owner[row] == timers.owner[other]


@compiled
def take_due(timers: Any, now_s: float, most_groups: int, out: Any) -> Any:
    """Takes rows whose time is over into `out`; returns how many, with those due first in front.

    One call moves as many rows at most as `out` holds; the next one goes on from there.

    Args:
        timers: The columns.
        now_s: Time.
        most_groups: What was given its time at once and by one is a group; no more are taken.
        out: i64, for the rows.
    """
    num, num_groups, budget = 0, 0, out.size
    if timers.counts[NUM_ROWS] == 0:
        return num
    for _ in range(_SECONDS_A_CALL):
        second = timers.counts[NEXT]
        if second > now_s or timers.counts[NUM_ROWS] == 0:
            break
        if second & ((1 << (_FINE_BITS + _WIDE_BITS)) - 1) == 0:
            wide = (second >> (_FINE_BITS + _WIDE_BITS)) & (_NUM_WIDE - 1)
            budget = _spread(timers, _NUM_FINE + _NUM_WIDE + wide, budget)
        if second & (_NUM_FINE - 1) == 0:
            wide = (second >> _FINE_BITS) & (_NUM_WIDE - 1)
            budget = _spread(timers, _NUM_FINE + wide, budget)
        slot = second & (_NUM_FINE - 1)
        while budget > 0 and timers.ends[0, slot] != NONE:
            row = timers.ends[0, slot]
            if num == 0 or not _given_at_once(timers, row, out[num - 1]):
                if num_groups == most_groups:
                    return num  # and again at this second
                num_groups += 1
            _cut(timers, row)
            timers.counts[NUM_ROWS] -= 1
            out[num] = row
            num += 1
            budget -= 1
        if budget == 0:
            break  # and again at this second
        timers.counts[NEXT] = second + 1
    return num
