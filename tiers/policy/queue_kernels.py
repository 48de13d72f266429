"""Loops of the waiting queue: for each page, which waiting requests need it.

A request has a slot; its place in the queue is a number that only compares. Each page has a doubly
linked list of entries, one for each request that needs it, in the order of the queue, so that its
head tells how soon the page is needed and which request counts it. A request's own entries hang on
a chain, deepest page first. Every operation costs a constant for each page of the request it is
about, but for entries that move within the queue, which walk their page's list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled

NONE = -1
UNLINKED = -2  # as `prev` of an entry, while the queue is put in order
DIRTY = np.uint8(0xFF)

I32s = npt.NDArray[np.int32]
I64s = npt.NDArray[np.int64]


class Needs(NamedTuple):
    """The columns, all owned by `WaitingQueue`.

    Attributes:
        head: i32 per row, first entry of the page's list, -1 for none.
        tail: i32 per row.
        row: i32 per entry, -1 when the page was forgotten.
        slot: i32 per entry.
        prev: i32 per entry, in the page's list.
        next: i32 per entry, in the page's list.
        chain: i32 per entry, the request's next entry; in free entries the next free one.
        first: i32 per slot, head of the chain.
        place: i64 per slot, where the request stands.
        distinct: i64 per slot, pages that it is the first to need.
        dirty: u8 per slot, one bit a tier: pages that it is the first to need may lie there.
        lost_pages: u8 per slot, 1 where a page that it needs was forgotten since its path
            was given.
        free: i64[2], head of the free entries and their number.
    """

    head: I32s
    tail: I32s
    row: I32s
    slot: I32s
    prev: I32s
    next: I32s
    chain: I32s
    first: I32s
    place: I64s
    distinct: I64s
    dirty: npt.NDArray[np.uint8]
    lost_pages: npt.NDArray[np.uint8]
    free: I64s


@compiled
def _count_first(needs: Any, entry: int, change: int) -> None:
    slot = needs.slot[entry]
    needs.distinct[slot] += change
    if change > 0:
        needs.dirty[slot] = DIRTY


@compiled
def _link(needs: Any, entry: int) -> bool:
    """Puts an entry into its page's list by place; False where the request is there already."""
    row = needs.row[entry]
    slot = needs.slot[entry]
    place = needs.place[slot]
    before = needs.tail[row]
    while before != NONE and needs.place[needs.slot[before]] > place:
        before = needs.prev[before]
    if before != NONE and needs.slot[before] == slot:
        return False
    after = needs.head[row] if before == NONE else needs.next[before]
    needs.prev[entry] = before
    needs.next[entry] = after
    if after == NONE:
        needs.tail[row] = entry
    else:
        needs.prev[after] = entry
    if before == NONE:
        needs.head[row] = entry
        if after != NONE:
            _count_first(needs, after, -1)
        _count_first(needs, entry, 1)
    else:
        needs.next[before] = entry
    return True


@compiled
def _unlink(needs: Any, entry: int) -> None:
    row = needs.row[entry]
    before, after = needs.prev[entry], needs.next[entry]
    if before == NONE:
        needs.head[row] = after
        _count_first(needs, entry, -1)
        if after != NONE:
            _count_first(needs, after, 1)
    else:
        needs.next[before] = after
    if after == NONE:
        needs.tail[row] = before
    else:
        needs.prev[after] = before


@compiled
def add(needs: Any, slot: int, path: Any) -> None:
    """Links the pages of a request, root first; rows that do not exist are passed over."""
    needs.lost_pages[slot] = 0
    for i in range(path.size):
        row = path[i]
        if row < 0 or row >= needs.head.size:
            continue
        entry = needs.free[0]
        needs.row[entry] = row
        needs.slot[entry] = slot
        if _link(needs, entry):
            needs.free[0] = needs.chain[entry]
            needs.free[1] -= 1
            needs.chain[entry] = needs.first[slot]
            needs.first[slot] = entry


@compiled
def drop(needs: Any, slot: int, unneeded: Any) -> int:
    """Unlinks a request's pages; writes rows that are no longer needed, returns their number."""
    num = 0
    entry = needs.first[slot]
    while entry != NONE:
        chain = needs.chain[entry]
        row = needs.row[entry]
        if row != NONE:
            _unlink(needs, entry)
            if needs.head[row] == NONE:
                unneeded[num] = row
                num += 1
        needs.chain[entry] = needs.free[0]
        needs.free[0] = entry
        needs.free[1] += 1
        entry = chain
    needs.first[slot] = NONE
    return num


@compiled
def forget(needs: Any, rows: Any) -> bool:
    """Unlinks forgotten pages from all requests; returns whether a request needed one."""
    was_needed = False
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= needs.head.size or needs.head[row] == NONE:
            continue
        entry = needs.head[row]
        _count_first(needs, entry, -1)
        while entry != NONE:
            needs.row[entry] = NONE
            needs.lost_pages[needs.slot[entry]] = 1
            entry = needs.next[entry]
        needs.head[row] = NONE
        needs.tail[row] = NONE
        was_needed = True
    return was_needed


@compiled
def relink(needs: Any, slots: Any, moved: Any) -> None:
    """Gives every request of `slots` its place in that order; only those that moved are relinked.

    Args:
        needs: The columns.
        slots: i64[N], every waiting request in the new order.
        moved: bool[N], those that have to leave their lists so that the others are in order.
    """
    num_moved = 0
    for i in range(slots.size):
        num_moved += moved[i]
    # If most requests move, all are relinked: each entry then goes to its list's end, with no walk.
    every = 2 * num_moved > slots.size
    for i in range(slots.size):
        if every or moved[i]:
            entry = needs.first[slots[i]]
            while entry != NONE:
                # Alone in its list it stands right wherever its request goes.
                shared = needs.prev[entry] != NONE or needs.next[entry] != NONE
                if shared and needs.row[entry] != NONE:
                    _unlink(needs, entry)
                    needs.prev[entry] = UNLINKED
                entry = needs.chain[entry]
    for i in range(slots.size):
        needs.place[slots[i]] = i
    for i in range(slots.size):
        if every or moved[i]:
            entry = needs.first[slots[i]]
            while entry != NONE:
                if needs.prev[entry] == UNLINKED and needs.row[entry] != NONE:
                    _link(needs, entry)
                entry = needs.chain[entry]


@compiled
def outside_longest_run(places: Any, moved: Any) -> None:
    """Marks the fewest requests whose removal leaves `places` (distinct) increasing.

    The rest is a longest increasing subsequence, found by patience sorting.
    """
    num = places.size
    tops = np.empty(num, np.int64)  # position of the last card of each pile
    below = np.empty(num, np.int64)
    piles = 0
    for i in range(num):
        low, high = 0, piles
        while low < high:
            middle = (low + high) >> 1
            if places[tops[middle]] < places[i]:
                low = middle + 1
            else:
                high = middle
        below[i] = tops[low - 1] if low else NONE
        tops[low] = i
        piles = max(piles, low + 1)
    moved[:] = True
    at = tops[piles - 1] if piles else NONE
    while at != NONE:
        moved[at] = False
        at = below[at]


@compiled
def leading(line: Any, distinct: Any, budget: int, slots: Any) -> int:
    """Writes the leading requests whose distinct pages fit; returns how many, at least the first.

    Args:
        line: i64[N], slots by place, -1 in holes.
        distinct: As in `Needs`.
        budget: Pages.
        slots: i64, out; room for every request.
    """
    num, total = 0, 0
    for i in range(line.size):
        if line[i] < 0:
            continue
        total += distinct[line[i]]
        if num and total > budget:
            break
        slots[num] = line[i]
        num += 1
    return num


@compiled
def needed_at(needs: Any, rows: Any, places: Any) -> None:
    """Place of the first request that needs each page; -1 where nobody does."""
    for i in range(rows.size):
        row = rows[i]
        places[i] = NONE
        if 0 <= row < needs.head.size and needs.head[row] != NONE:
            places[i] = needs.place[needs.slot[needs.head[row]]]
