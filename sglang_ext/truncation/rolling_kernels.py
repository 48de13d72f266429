"""Compiled loops of `rolling.py`: hash of windows, table of pages, search for the longest run.

Hash. A window's tokens are the digits of two polynomials modulo the prime 2^31 - 1, at two secret
bases; both values, mixed with the group's secret hash, are its key. A different window has the same
key with a probability of about (window / 2^31)^2, whatever an adversary who does not know the bases
chooses; and a key never decides alone.

Table. Open addressing with linear probing, one byte a bucket (0: empty, else some bits of the key)
beside the row, so that a position that matches nothing mostly costs one byte read. Deletion shifts
later entries back. Rows with one key hang on the one in the table (`next_same`), at most
`max_same` of them: repeats cannot make a look-up longer.

Rows. Pages form trees: `links[row]` holds parent, first child, and neighbours among the siblings.

All functions run without the GIL and check no bounds. Compiled from their signatures on import and
kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

from sglang_ext.tiers.compiled import compiled_for

# Slots of `state i64[NUM_STATE]`.
COUNT, TOP, FREE_HEAD, NUM_STATE = 0, 1, 2, 3
# Columns of `links i32[rows, NUM_LINKS]`; -1 for none. A free row has its successor in PARENT.
PARENT, FIRST_CHILD, NEXT_SIBLING, PREV_SIBLING, NEXT_SAME, NUM_LINKS = 0, 1, 2, 3, 4, 5
# What a live row is, in `kinds u8[rows]`; 0 is free.
FREE, UNLISTED, LISTED = 0, 1, 2
# Slots of the result of `longest_run i64[NUM_RESULT]`.
START, LENGTH, LAST_ROW, NUM_ROWS, OFFSET, NUM_RESULT = 0, 1, 2, 3, 4, 5

MAX_SAME = 8
_MAX_SIBLINGS = 64  # children tried for what follows a run, less than a page
_MAX_RUNS = 64  # runs of nearly the same length whose both ends are looked at
_MAX_ROUNDS = 16  # searches anew after a page that only began like the prompt
_BLOCK = 64  # look-ups in flight together
_PRIME = (1 << 31) - 1

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _inlined(function: _Function) -> _Function:
    helper: _Function = numba.njit(inline="always", nogil=True)(function)
    return helper


_U8S, _I32S, _I64S, _U64S = types.uint8[::1], types.int32[::1], types.int64[::1], types.uint64[::1]
_PAGES = types.int32[:, ::1]
_IN_TOKENS = types.Array(types.int32, 1, "C", readonly=True, aligned=False)
_U64, _I64 = types.uint64, types.int64


# ---- keys -------------------------------------------------------------------------------------


@_inlined
def _reduce(value: Any) -> Any:
    """A value below 2^62 modulo 2^31 - 1."""
    prime = np.uint64(_PRIME)
    value = (value & prime) + (value >> np.uint64(31))
    value = (value & prime) + (value >> np.uint64(31))
    return value - prime if value >= prime else value


@_inlined
def _mix(value: Any) -> Any:
    """SplitMix64's finisher."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@_inlined
def _digit(token: Any) -> Any:
    return np.uint64(np.uint32(token)) % np.uint64(_PRIME) + np.uint64(1)


@compiled_for(types.void(_IN_TOKENS, _I64, _U64S, _U64, _U64S))
def window_keys(tokens: Any, window: int, bases: Any, group_hash: Any, keys: Any) -> None:
    """Keys of the windows at each place of `tokens` [n]; `keys` is [n - window + 1]."""
    first, second = bases[0], bases[1]
    top_first, top_second = np.uint64(1), np.uint64(1)  # of the digit that leaves
    for _ in range(window):
        top_first = _reduce(top_first * first)
        top_second = _reduce(top_second * second)
    prime = np.uint64(_PRIME)
    a = np.uint64(0)
    b = np.uint64(0)
    for at in range(tokens.size):
        digit = _digit(tokens[at])
        a = _reduce(a * first + digit)
        b = _reduce(b * second + digit)
        if at >= window:
            gone = _digit(tokens[at - window])
            a = _reduce(a + prime - _reduce(top_first * gone))
            b = _reduce(b + prime - _reduce(top_second * gone))
        if at >= window - 1:
            keys[at - window + 1] = _mix((a | (b << np.uint64(31))) ^ group_hash)


# ---- the table --------------------------------------------------------------------------------


@_inlined
def _tag(key: Any) -> Any:
    tag = np.uint8(key >> np.uint64(56))
    return tag if tag != np.uint8(0) else np.uint8(1)


@_inlined
def _bucket(tags: Any, table: Any, keys: Any, key: Any) -> Any:
    """(bucket of the key or of the empty one where it would be, whether it is there)."""
    mask = np.uint64(tags.size - 1)
    at = key & mask
    tag = _tag(key)
    found = False
    while tags[at] != np.uint8(0):
        if tags[at] == tag and keys[table[at]] == key:
            found = True
            break
        at = (at + np.uint64(1)) & mask
    return at, found


@_inlined
def _close_gap(tags: Any, table: Any, keys: Any, gap: Any) -> None:
    """Empties a bucket, and moves back what was pushed behind it."""
    mask = np.uint64(tags.size - 1)
    at = (gap + np.uint64(1)) & mask
    while tags[at] != np.uint8(0):
        home = keys[table[at]] & mask
        if ((at - home) & mask) >= ((at - gap) & mask):
            tags[gap] = tags[at]
            table[gap] = table[at]
            gap = at
        at = (at + np.uint64(1)) & mask
    tags[gap] = np.uint8(0)


@compiled_for(types.void(_I64, _U64, _I64, _I64, _U8S, _I32S, _U64S, _I64S, _U8S, _PAGES))
def link(
    row: int,
    key: Any,
    group: Any,
    parent: int,
    tags: Any,
    table: Any,
    keys: Any,
    groups: Any,
    kinds: Any,
    links: Any,
) -> None:
    """Makes a row live: in its parent's list, and in the table unless its key is full."""
    keys[row] = key
    groups[row] = group
    kinds[row] = LISTED
    links[row, PARENT] = parent
    links[row, FIRST_CHILD] = -1
    links[row, PREV_SIBLING] = -1
    links[row, NEXT_SIBLING] = -1
    links[row, NEXT_SAME] = -1
    if parent >= 0:
        sibling = links[parent, FIRST_CHILD]
        links[row, NEXT_SIBLING] = sibling
        if sibling >= 0:
            links[sibling, PREV_SIBLING] = row
        links[parent, FIRST_CHILD] = row
    at, found = _bucket(tags, table, keys, key)
    if not found:
        tags[at] = _tag(key)
        table[at] = row
        return
    num_same = 1
    last = np.int64(table[at])
    while links[last, NEXT_SAME] >= 0:
        last = np.int64(links[last, NEXT_SAME])
        num_same += 1
    if num_same < MAX_SAME:
        links[last, NEXT_SAME] = row
    else:
        kinds[row] = UNLISTED


@compiled_for(types.void(_I64, _U8S, _I32S, _U64S, _U8S, _PAGES))
def unlink(row: int, tags: Any, table: Any, keys: Any, kinds: Any, links: Any) -> None:
    """Takes a row out of the table and of its tree; its children lose their parent."""
    if kinds[row] == LISTED:
        at, _ = _bucket(tags, table, keys, keys[row])
        following = links[row, NEXT_SAME]
        if table[at] != row:
            before = np.int64(table[at])
            while links[before, NEXT_SAME] != row:
                before = np.int64(links[before, NEXT_SAME])
            links[before, NEXT_SAME] = following
        elif following >= 0:
            table[at] = following
        else:
            _close_gap(tags, table, keys, at)
    child = np.int64(links[row, FIRST_CHILD])
    while child >= 0:
        following = links[child, NEXT_SIBLING]
        links[child, PARENT] = -1
        links[child, PREV_SIBLING] = -1
        links[child, NEXT_SIBLING] = -1
        child = np.int64(following)
    before, after = links[row, PREV_SIBLING], links[row, NEXT_SIBLING]
    if before >= 0:
        links[before, NEXT_SIBLING] = after
    elif links[row, PARENT] >= 0:
        links[links[row, PARENT], FIRST_CHILD] = after
    if after >= 0:
        links[after, PREV_SIBLING] = before
    kinds[row] = FREE


# ---- the search -------------------------------------------------------------------------------


@compiled_for(_I64(_U64S, _I64, _U8S, _I32S, _U64S, _I64S, _PAGES, _I32S, _I32S))
def hits(
    wanted: Any,
    group: Any,
    tags: Any,
    table: Any,
    keys: Any,
    groups: Any,
    links: Any,
    first: Any,
    rows: Any,
) -> Any:
    """Rows whose window has the key of a place, and whose group is the one asked for.

    Those of place i are `rows[first[i]: first[i + 1]]`; `rows` has room for `MAX_SAME` a place.
    """
    mask = np.uint64(tags.size - 1)
    seen = np.empty(_BLOCK, np.uint8)
    num = 0
    for begin in range(0, wanted.size, _BLOCK):
        end = min(begin + _BLOCK, wanted.size)
        for i in range(begin, end):
            seen[i - begin] = tags[wanted[i] & mask]
        for i in range(begin, end):
            first[i] = num
            if seen[i - begin] == np.uint8(0):
                continue
            at, found = _bucket(tags, table, keys, wanted[i])
            if found:
                row = np.int64(table[at])
                while row >= 0:
                    if groups[row] == group:
                        rows[num] = row
                        num += 1
                    row = np.int64(links[row, NEXT_SAME])
    first[wanted.size] = num
    return num


@_inlined
def _join(first: Any, rows: Any, good: Any, links: Any, page: int, pages: Any, before: Any) -> Any:
    """Pages of the run that ends with each hit, and the hit before it; the longest's pages."""
    best = np.int64(0)
    for place in range(first.size - 1):
        for hit in range(first[place], first[place + 1]):
            pages[hit] = 1 if good[hit] else 0
            before[hit] = -1
            parent = links[rows[hit], PARENT]
            if place >= page and good[hit] and parent >= 0:
                for other in range(first[place - page], first[place - page + 1]):
                    if rows[other] == parent and good[other]:
                        pages[hit] = pages[other] + 1
                        before[hit] = other
                        break
            best = max(best, np.int64(pages[hit]))
    return best


@_inlined
def _same_left(tokens: Any, place: Any, store: Any, links: Any, row: Any) -> Any:
    """Tokens before `place` that equal what comes before `row` in its chain."""
    page = store.shape[1]
    length = np.int64(0)
    parent = np.int64(links[row, PARENT])
    while parent >= 0:
        at = np.int64(0)
        while at < page and place - length > 0:
            if store[parent, page - 1 - at] != tokens[place - length - 1]:
                break
            at += 1
            length += 1
        if at < page:
            break
        parent = np.int64(links[parent, PARENT])
    return length


@_inlined
def _same_right(tokens: Any, place: Any, store: Any, links: Any, row: Any) -> Any:
    """(tokens from `place` on that equal what comes after `row`, the last row with any)."""
    page = store.shape[1]
    length = np.int64(0)
    last = np.int64(row)
    while True:
        best = np.int64(0)
        best_row = np.int64(-1)
        child = np.int64(links[last, FIRST_CHILD])
        tried = 0
        while child >= 0 and tried < _MAX_SIBLINGS:
            at = np.int64(0)
            while at < page and place + length + at < tokens.size:
                if store[child, at] != tokens[place + length + at]:
                    break
                at += 1
            if at > best:
                best = at
                best_row = child
            child = np.int64(links[child, NEXT_SIBLING])
            tried += 1
        if best_row < 0:
            break
        length += best
        last = best_row
        if best < page:
            break
    return length, last


@_inlined
def _first_wrong(tokens: Any, place: Any, hit: Any, rows: Any, before: Any, store: Any) -> Any:
    """Follows a run back from its last hit, at `place`: (a hit that differs or -1, first hit)."""
    page = store.shape[1]
    wrong = np.int64(-1)
    first = np.int64(hit)
    while wrong < 0:
        for at in range(page):
            if store[rows[first], at] != tokens[place + at]:
                wrong = first
                break
        if wrong >= 0 or before[first] < 0:
            break
        first = np.int64(before[first])
        place -= page
    return wrong, first


@compiled_for(types.void(_IN_TOKENS, _I32S, _I32S, _PAGES, _PAGES, _I64S))
def longest_run(tokens: Any, first: Any, rows: Any, store: Any, links: Any, result: Any) -> None:
    """The longest run of `tokens` [n] that is in one chain, from the hits at each place.

    Every token of it was compared. `result` is as the slots above say; its LENGTH is 0 for none.
    """
    page = store.shape[1]
    num = first[first.size - 1]
    pages = np.empty(num, np.int32)
    before = np.empty(num, np.int32)
    good = np.ones(num, np.bool_)
    continued = np.empty(num, np.bool_)
    result[LENGTH] = 0
    for _ in range(_MAX_ROUNDS):
        best = _join(first, rows, good, links, page, pages, before)
        if best == 0:
            return
        continued[:] = False
        for hit in range(num):
            if before[hit] >= 0:
                continued[before[hit]] = True
        num_wrong = 0
        num_tried = 0
        # Both ends may grow by less than a page each, so one page less may still be longer.
        for place in range(first.size - 1):
            for hit in range(first[place], first[place + 1]):
                if continued[hit] or pages[hit] < max(best - 1, 1) or num_tried >= _MAX_RUNS:
                    continue
                num_tried += 1
                wrong, begin = _first_wrong(tokens, np.int64(place), hit, rows, before, store)
                if wrong >= 0:
                    good[wrong] = False
                    num_wrong += 1
                    continue
                whole = np.int64(pages[hit]) * page
                end = np.int64(place) + page
                left = _same_left(tokens, end - whole, store, links, rows[begin])
                right, last = _same_right(tokens, end, store, links, rows[hit])
                length = left + whole + right
                if length > result[LENGTH]:
                    result[START] = end - whole - left
                    result[LENGTH] = length
                    result[LAST_ROW] = last
                    num_left = (left + page - 1) // page
                    num_right = (right + page - 1) // page
                    result[NUM_ROWS] = num_left + np.int64(pages[hit]) + num_right
                    result[OFFSET] = num_left * page - left
        if num_wrong == 0:
            return
