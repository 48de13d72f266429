"""Compiled loops of `index.py`: hash table, row pool and LRU list over plain arrays.

Table. `buckets u32[2^m]`, linear probing; a word of 0 is empty, else its low bits hold `row + 1`
and the bits above (those that no row number needs) a tag of the hash. The tag turns away nearly
every foreign row without touching its key. Deletion shifts later words back, so there are no
tombstones and look-ups stay short for ever.

Rows. A key lives in `keys u64[rows, 4]` and `namespaces u32[rows]`; it never moves while it lives.
Free rows form a stack linked through `next_row`; rows at and above `state[TOP]` were never used,
and their memory was never touched.

LRU. A ring without a sentinel row: `state[LRU_OLD]` is the least recent row, `state[LRU_NEW]` the
most recent. `prev_row` points to older rows, `next_row` to newer ones.

All functions run without the GIL and check no bounds: the caller passes arrays of the right size.
They are compiled from their signatures when this module is first imported, and cached on disk, so
that nothing compiles while serving. All in one file, because that cache sees only changes of the
file in which a function lies, not of those it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

from sglang_ext.tiers.compiled import compiled_for

# Slots of `state i64[NUM_STATE]`.
COUNT = 0  # live rows
TOP = 1  # rows ever used
FREE_HEAD = 2  # top of the stack of freed rows, or NIL
LRU_OLD = 3
LRU_NEW = 4
LRU_COUNT = 5
NUM_STATE = 6

# Marks in `prev_row` and `next_row`; row numbers stay below.
NIL = 0xFFFFFFFF  # no neighbour
UNLINKED = 0xFFFFFFFE  # a live row that is not in the LRU list
FREE = 0xFFFFFFFD  # in `prev_row`: the row is free

NO_SEGMENT = 0xFFFFFFFF
NO_SLOT = -1

_BLOCK = 64  # look-ups in flight together: enough to hide a miss to DRAM, small enough for L1

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _readonly(dtype: types.Type, num_dims: int) -> types.Array:
    """C-contiguous input; accepts writable and aligned arrays too."""
    return types.Array(dtype, num_dims, "C", readonly=True, aligned=False)


_U8S = types.uint8[::1]
_U16S = types.uint16[::1]
_U32S = types.uint32[::1]
_I32S = types.int32[::1]
_I64S = types.int64[::1]
_KEYS = types.uint64[:, ::1]
_IN_KEYS = _readonly(types.uint64, 2)
_IN_ROWS = _readonly(types.int64, 1)
_BOOLS = types.boolean[::1]
_U64 = types.uint64
_I64 = types.int64


def _inlined(function: _Function) -> _Function:
    helper: _Function = numba.njit(inline="always", nogil=True)(function)
    return helper


# ---- keys and probing -------------------------------------------------------------------------


@_inlined
def _hash(keys: Any, i: Any, namespace: Any, seed: Any) -> Any:
    """64 mixed bits of a key. Every word counts and the seed is secret, so no one picks buckets."""
    # Multiply and xor-shift rounds with odd constants (SplitMix64's and the golden ratio's).
    h = (keys[i, 0] ^ seed) * np.uint64(0x9E3779B97F4A7C15)
    h = ((h ^ (h >> np.uint64(32))) + keys[i, 1]) * np.uint64(0xBF58476D1CE4E5B9)
    h = ((h ^ (h >> np.uint64(29))) + keys[i, 2]) * np.uint64(0x94D049BB133111EB)
    h = ((h ^ (h >> np.uint64(32))) + keys[i, 3]) * np.uint64(0x9E3779B97F4A7C15)
    h = ((h ^ (h >> np.uint64(29))) + np.uint64(namespace)) * np.uint64(0xBF58476D1CE4E5B9)
    return h ^ (h >> np.uint64(31))


@_inlined
def _tag(h: Any, row_mask: Any) -> Any:
    """The hash's high half, less the bits that hold the row number."""
    return (h >> np.uint64(32)) & ~row_mask


@_inlined
def _same_key(keys: Any, namespaces: Any, row: Any, wanted: Any, i: int, namespace: Any) -> Any:
    # Differences are gathered without branches: one load miss, not four in a row.
    different = keys[row, 0] ^ wanted[i, 0]
    different |= keys[row, 1] ^ wanted[i, 1]
    different |= keys[row, 2] ^ wanted[i, 2]
    different |= keys[row, 3] ^ wanted[i, 3]
    different |= np.uint64(namespaces[row]) ^ namespace
    return different == np.uint64(0)


@_inlined
def _find(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    wanted: Any,
    i: int,
    namespace: Any,
    h: Any,
    start: Any,
) -> Any:
    """Probe from bucket `start` on: (row or -1, bucket where the search ended)."""
    mask = np.uint64(buckets.size - 1)
    tag = _tag(h, row_mask)
    found = np.int64(-1)
    at = start
    while True:
        word = np.uint64(buckets[at])
        if word == np.uint64(0):
            break
        if (word & ~row_mask) == tag:
            row = np.int64(word & row_mask) - np.int64(1)
            if _same_key(keys, namespaces, row, wanted, i, namespace):
                found = row
                break
        at = (at + np.uint64(1)) & mask
    return found, at


@_inlined
def _find_block(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    seed: Any,
    wanted: Any,
    namespace: Any,
    first: int,
    stop: int,
    hashes: Any,
    words: Any,
    ends: Any,
    rows: Any,
) -> None:
    """Rows of `wanted[first:stop]` into `rows[first:stop]`, three passes of independent loads.

    Each pass waits for memory only once for the whole block: bucket words, then (in the buckets'
    cache lines, by now present) the first word with the right tag, then that row's key.
    """
    mask = np.uint64(buckets.size - 1)
    for i in range(first, stop):
        h = _hash(wanted, i, namespace, seed)
        hashes[i - first] = h
        words[i - first] = buckets[h & mask]
    for i in range(first, stop):
        h = hashes[i - first]
        tag = _tag(h, row_mask)
        word = np.uint64(words[i - first])
        at = h & mask
        while word != np.uint64(0) and (word & ~row_mask) != tag:
            at = (at + np.uint64(1)) & mask
            word = np.uint64(buckets[at])
        ends[i - first] = at
        rows[i] = np.int64(word & row_mask) - np.int64(1)
    for i in range(first, stop):
        row = rows[i]
        if row >= 0 and not _same_key(keys, namespaces, row, wanted, i, namespace):
            after = (ends[i - first] + np.uint64(1)) & mask
            rows[i], _ = _find(
                keys, namespaces, buckets, row_mask, wanted, i, namespace, hashes[i - first], after
            )


@compiled_for(types.void(_KEYS, _U32S, _U32S, _U64, _U64, _IN_KEYS, _U64, _I64S))
def lookup(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    seed: Any,
    wanted: Any,
    namespace: Any,
    rows: Any,
) -> None:
    """Write the row of each wanted key into `rows`, -1 where it is absent."""
    num = wanted.shape[0]
    hashes = np.empty(_BLOCK, np.uint64)
    words = np.empty(_BLOCK, np.uint32)
    ends = np.empty(_BLOCK, np.uint64)
    for first in range(0, num, _BLOCK):
        stop = min(first + _BLOCK, num)
        _find_block(
            keys, namespaces, buckets, row_mask, seed, wanted, namespace, first, stop,
            hashes, words, ends, rows,
        )  # fmt: skip


@compiled_for(types.void(_KEYS, _U32S, _U32S, _U64, _U64, _IN_KEYS, _IN_ROWS, _I64S))
def lookup_each(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    seed: Any,
    wanted: Any,
    numbers: Any,
    rows: Any,
) -> None:
    """As `lookup`, each key in a namespace of its own; below 0: in none."""
    mask = np.uint64(buckets.size - 1)
    for i in range(wanted.shape[0]):
        rows[i] = -1
        if numbers[i] >= 0:
            namespace = np.uint64(numbers[i])
            h = _hash(wanted, i, namespace, seed)
            rows[i], _ = _find(
                keys, namespaces, buckets, row_mask, wanted, i, namespace, h, h & mask
            )


@compiled_for(_I64(_KEYS, _U32S, _U32S, _U64, _U64, _IN_KEYS, _U64, _I64S, _U8S, types.uint8))
def prefix(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    seed: Any,
    wanted: Any,
    namespace: Any,
    rows: Any,
    flags: Any,
    required: Any,
) -> Any:
    """Rows of the leading keys that are present with all `required` flags; returns how many."""
    num = wanted.shape[0]
    hashes = np.empty(_BLOCK, np.uint64)
    words = np.empty(_BLOCK, np.uint32)
    ends = np.empty(_BLOCK, np.uint64)
    for first in range(0, num, _BLOCK):
        stop = min(first + _BLOCK, num)
        _find_block(
            keys, namespaces, buckets, row_mask, seed, wanted, namespace, first, stop,
            hashes, words, ends, rows,
        )  # fmt: skip
        for i in range(first, stop):
            if rows[i] < 0 or (flags[rows[i]] & required) != required:
                return i
    return num


# ---- inserting and removing -------------------------------------------------------------------


@_inlined
def _take_row(state: Any, next_row: Any, capacity: int) -> Any:
    """A free row, or -1: freed rows first, so that memory does not grow while there are any."""
    row = state[FREE_HEAD]
    if row != NIL:
        state[FREE_HEAD] = next_row[row]
        return row
    if state[TOP] < capacity:
        row = state[TOP]
        state[TOP] = row + 1
        return row
    return np.int64(-1)


@compiled_for(
    _I64(
        _KEYS, _U32S, _U32S, _U64, _U64, _IN_KEYS, _U64, _I64S, _BOOLS,
        _I64S, _U32S, _U32S, _I32S, _U32S, _U32S, _U16S, _U8S, _U8S, _U8S, _U32S,
    )
)  # fmt: skip
def insert(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    seed: Any,
    wanted: Any,
    namespace: Any,
    rows: Any,
    created: Any,
    state: Any,
    prev_row: Any,
    next_row: Any,
    host_slot: Any,
    segment: Any,
    block: Any,
    num_blocks: Any,
    disk_quality: Any,
    flags: Any,
    quality: Any,
    stamp: Any,
) -> Any:
    """Find or add each wanted key; a new row's columns get their initial values.

    Returns how many keys found no room; their rows are -1.
    """
    mask = np.uint64(buckets.size - 1)
    num_refused = np.int64(0)
    for i in range(wanted.shape[0]):
        h = _hash(wanted, i, namespace, seed)
        row, at = _find(keys, namespaces, buckets, row_mask, wanted, i, namespace, h, h & mask)
        created[i] = False
        if row < 0:
            row = _take_row(state, next_row, keys.shape[0])
            if row < 0:
                num_refused += 1
            else:
                created[i] = True
                state[COUNT] += 1
                buckets[at] = np.uint32(_tag(h, row_mask) | np.uint64(row + 1))
                for word in range(4):
                    keys[row, word] = wanted[i, word]
                namespaces[row] = np.uint32(namespace)
                prev_row[row] = UNLINKED
                next_row[row] = UNLINKED
                host_slot[row] = NO_SLOT
                segment[row] = NO_SEGMENT
                block[row] = 0
                num_blocks[row] = 0
                disk_quality[row] = 0
                flags[row] = 0
                quality[row] = 0
                stamp[row] = 0
        rows[i] = row
    return num_refused


@_inlined
def _close_gap(
    keys: Any, namespaces: Any, buckets: Any, row_mask: Any, seed: Any, gap: Any
) -> None:
    """Empty bucket `gap`, moving back each later word of its run that may lie there."""
    mask = np.uint64(buckets.size - 1)
    at = gap
    while True:
        at = (at + np.uint64(1)) & mask
        word = np.uint64(buckets[at])
        if word == np.uint64(0):
            break
        row = np.int64(word & row_mask) - np.int64(1)
        home = _hash(keys, row, np.uint64(namespaces[row]), seed) & mask
        # Distances are counted round the table's end.
        if ((at - home) & mask) >= ((at - gap) & mask):
            buckets[gap] = np.uint32(word)
            gap = at
    buckets[gap] = 0


@_inlined
def _unlink(row: Any, state: Any, prev_row: Any, next_row: Any) -> None:
    older = np.int64(prev_row[row])
    newer = np.int64(next_row[row])
    if older == NIL:
        state[LRU_OLD] = newer
    else:
        next_row[older] = newer
    if newer == NIL:
        state[LRU_NEW] = older
    else:
        prev_row[newer] = older
    state[LRU_COUNT] -= 1
    prev_row[row] = UNLINKED
    next_row[row] = UNLINKED


@_inlined
def _push(row: Any, end: Any, far_end: Any, state: Any, inward: Any, outward: Any) -> None:
    """Links a row at one end of the list; `inward` leads away from that end, `outward` to it."""
    neighbour = state[end]
    inward[row] = neighbour
    outward[row] = NIL
    if neighbour == NIL:
        state[far_end] = row
    else:
        outward[neighbour] = row
    state[end] = row
    state[LRU_COUNT] += 1


@_inlined
def _is_live(row: Any, state: Any, prev_row: Any) -> Any:
    return row >= 0 and row < state[TOP] and prev_row[row] != FREE


@compiled_for(_I64(_KEYS, _U32S, _U32S, _U64, _U64, _IN_ROWS, _I64S, _U32S, _U32S, _I32S, _U32S))
def remove(
    keys: Any,
    namespaces: Any,
    buckets: Any,
    row_mask: Any,
    seed: Any,
    rows: Any,
    state: Any,
    prev_row: Any,
    next_row: Any,
    host_slot: Any,
    segment: Any,
) -> Any:
    """Drop live rows from table, LRU list and row pool; other row numbers are passed over.

    Returns how many rows were dropped.
    """
    mask = np.uint64(buckets.size - 1)
    num_removed = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        if not _is_live(row, state, prev_row):
            continue
        h = _hash(keys, row, np.uint64(namespaces[row]), seed)
        own = _tag(h, row_mask) | np.uint64(row + 1)
        at = h & mask
        while np.uint64(buckets[at]) != own:
            at = (at + np.uint64(1)) & mask
        _close_gap(keys, namespaces, buckets, row_mask, seed, at)
        if prev_row[row] != UNLINKED:
            _unlink(row, state, prev_row, next_row)
        prev_row[row] = FREE
        next_row[row] = state[FREE_HEAD]
        state[FREE_HEAD] = row
        host_slot[row] = NO_SLOT
        segment[row] = NO_SEGMENT
        state[COUNT] -= 1
        num_removed += 1
    return num_removed


# ---- LRU list ---------------------------------------------------------------------------------


@compiled_for(types.void(_IN_ROWS, types.boolean, _I64S, _U32S, _U32S))
def lru_touch(rows: Any, add: Any, state: Any, prev_row: Any, next_row: Any) -> None:
    """Make each row the most recent, in order; rows not listed are added only if `add`."""
    for i in range(rows.size):
        row = rows[i]
        if not _is_live(row, state, prev_row):
            continue
        if prev_row[row] != UNLINKED:
            if row == state[LRU_NEW]:
                continue
            _unlink(row, state, prev_row, next_row)
        elif not add:
            continue
        _push(row, LRU_NEW, LRU_OLD, state, prev_row, next_row)


@compiled_for(types.void(_IN_ROWS, _I64S, _U32S, _U32S))
def lru_sink(rows: Any, state: Any, prev_row: Any, next_row: Any) -> None:
    """Make each row the least recent, in order; rows not listed are passed over."""
    for i in range(rows.size):
        row = rows[i]
        if not _is_live(row, state, prev_row) or prev_row[row] == UNLINKED:
            continue
        if row != state[LRU_OLD]:
            _unlink(row, state, prev_row, next_row)
            _push(row, LRU_OLD, LRU_NEW, state, next_row, prev_row)


@compiled_for(types.void(_IN_ROWS, _I64S, _U32S, _U32S))
def lru_remove(rows: Any, state: Any, prev_row: Any, next_row: Any) -> None:
    """Take each row out of the list; rows not listed are passed over."""
    for i in range(rows.size):
        row = rows[i]
        if _is_live(row, state, prev_row) and prev_row[row] != UNLINKED:
            _unlink(row, state, prev_row, next_row)


@compiled_for(_I64(_I64S, _I64S, _U32S, _U8S, types.uint8))
def lru_tail(rows: Any, state: Any, next_row: Any, flags: Any, skip: Any) -> Any:
    """Fill `rows` with the least recent rows that have no flag of `skip`; returns how many."""
    num = np.int64(0)
    row = state[LRU_OLD]
    while row != NIL and num < rows.size:
        if (flags[row] & skip) == 0:
            rows[num] = row
            num += 1
        row = np.int64(next_row[row])
    return num


# ---- columns ----------------------------------------------------------------------------------


@compiled_for(types.void(_IN_ROWS, types.uint32, _U32S))
def note_use(rows: Any, clock: Any, stamp: Any) -> None:
    """Stamp the clock on each row; negative rows are passed over."""
    for i in range(rows.size):
        row = rows[i]
        if row >= 0:
            stamp[row] = clock


@compiled_for(_I64(_I64S, _U32S, _BOOLS, _I64S, _U32S))
def rows_where(rows: Any, column: Any, is_one: Any, state: Any, prev_row: Any) -> Any:
    """Fill `rows` with the live rows, ascending, for whose `column` `is_one`; returns how many."""
    num = np.int64(0)
    for row in range(state[TOP]):
        if column[row] < is_one.size and is_one[column[row]] and prev_row[row] != FREE:
            rows[num] = row
            num += 1
    return num
