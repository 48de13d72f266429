"""Loops of one tier's eviction lists: per class a list in the base order, read from its old end.

Each tenant with a share of its own has such lists, and all others together: list `t` * NUM_CLASSES
+ `c` has the pages of tenant t in class c. A page's list is its `home`; its class is its `kind`.

Lists of pages with a hint have the page that comes back last at their young end, and those whose
time is long over at the old one: they are read from both.

A page that may not leave is taken out of its list when it is met there ("parked") and put back at
the old end when what held it is gone, so that no decision walks over the same page twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.linked_rows import NONE, append, cut, insert
from sglang_ext.tiers.policy.hints import hint_kernels
from sglang_ext.tiers.policy.page_kernels import (
    DEMOTED,
    ENDED,
    HINTED,
    LEFT_BEHIND,
    NUM_CLASSES,
    PINNED,
    list_of,
    stamp,
)

ABSENT, LISTED, PARKED = 0, 1, 2
COUNT, PINS = 0, 1
_UNSEEN, _STALE, _KNOWN = 0, 1, 2  # what is known of the page that a list would give up next
_STEPS_A_PAGE = 64  # along a list, to find a page's place by its age; all that enter share them
_PARKED_A_CALL = 256  # pages of each class, in one call


class Lists(NamedTuple):
    """Columns by row, all owned by `TierLists`; 17 bytes a row.

    Attributes:
        state: u8, absent, listed or parked.
        home: u16, the list that the page is in, or was in until it was parked.
        prev: i32, towards the old end.
        next: i32.
        children: i32, pages of the tier whose parent it is.
        held: bool, the owner holds it.
        spare: bool, whoever waits for it gets it from elsewhere.
        ends: i32[2, lists], the old and the young end of each list.
        mark: i32[lists], where the last page that came among younger ones looked for its place.
        counts: i64[2], pages in the tier, pinned pages in the tier.
        sizes: i64[T], pages in the tier of each tenant.
    """

    state: npt.NDArray[np.uint8]
    home: npt.NDArray[np.uint16]
    prev: npt.NDArray[np.int32]
    next: npt.NDArray[np.int32]
    children: npt.NDArray[np.int32]
    held: npt.NDArray[np.bool_]
    spare: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int32]
    mark: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


def new_lists(num_rows: int, num_tenants: int = 1) -> Lists:
    """Lists of an empty tier."""
    i32 = np.int32
    types = (np.uint8, np.uint16, i32, i32, i32, np.bool_, np.bool_)
    columns: Any = (np.zeros(num_rows, dtype) for dtype in types)
    make: Any = Lists
    ends = np.full((2, num_tenants * NUM_CLASSES), NONE, i32)
    sizes = np.zeros(num_tenants, np.int64)
    lists: Lists = make(*columns, ends, ends[0].copy(), np.zeros(2, np.int64), sizes)
    return lists


@compiled
def _cut(lists: Any, row: int) -> None:
    cut(lists.prev, lists.next, lists.ends, lists.home[row], row)


@compiled
def _count(lists: Any, home: int, change: int) -> None:
    """Counts a page of a list in or out."""
    lists.sizes[home // NUM_CLASSES] += change
    if home % NUM_CLASSES == PINNED:
        lists.counts[PINS] += change


@compiled
def _set_home(lists: Any, row: int, home: int) -> None:
    if lists.state[row] != ABSENT:
        _count(lists, lists.home[row], -1)
    _count(lists, home, 1)
    lists.home[row] = home


@compiled
def _link_young(lists: Any, row: int, home: int) -> None:
    _set_home(lists, row, home)
    lists.state[row] = LISTED
    append(lists.prev, lists.next, lists.ends, home, row)


@compiled
def _unpark(lists: Any, row: int, young: bool) -> None:
    """Back to the end from which pages leave."""
    home = lists.home[row]
    young = young or home % NUM_CLASSES >= HINTED
    near, far = (1, 0) if young else (0, 1)
    neighbour = lists.ends[near, home]
    lists.state[row] = LISTED
    if young:
        lists.prev[row], lists.next[row] = neighbour, NONE
    else:
        lists.prev[row], lists.next[row] = NONE, neighbour
    if neighbour == NONE:
        lists.ends[far, home] = row
    elif young:
        lists.next[neighbour] = row
    else:
        lists.prev[neighbour] = row
    lists.ends[near, home] = row


@compiled
def _place_by_age(lists: Any, pages: Any, row: int, home: int, steps: Any) -> Any:
    """Looks for the last of a list's pages that was used before a page.

    Pages do not come from another tier in the order of their uses where something else decided
    there which of them leaves. What comes after the first of them mostly belongs beside it, so the
    place is looked for from the list's mark on. Lists of pages with a hint have another order.

    Returns:
        That page, or `NONE` if there is none, and the steps that are left. Without steps the page
        comes to lie among younger ones, never among older ones, which leave before it.
    """
    stamps, mark, young_end = pages.stamp, lists.mark[home], lists.ends[1, home]
    if young_end == NONE or home % NUM_CLASSES >= HINTED:
        return young_end, steps
    among_younger: Any = stamps[young_end] > stamps[row]
    before = young_end
    if mark != NONE and lists.state[mark] == LISTED and lists.home[mark] == home:
        # The young end itself may be one that is too old for its place.
        behind_mark = lists.next[mark]
        among_younger |= stamps[mark] > stamps[row]
        among_younger |= behind_mark != NONE and stamps[behind_mark] > stamps[row]
        before = mark
    if not among_younger:
        return young_end, steps
    while before != NONE and stamps[before] > stamps[row]:
        if steps <= 0:
            lists.mark[home] = before  # the next page goes on from here
            return before, steps
        before = lists.prev[before]
        steps -= 1
    while True:
        after = lists.ends[0, home] if before == NONE else lists.next[before]
        if after == NONE or stamps[after] > stamps[row]:
            lists.mark[home] = row
            return before, steps
        if steps <= 0:
            return young_end, steps
        before = after
        steps -= 1


@compiled
def enter(lists: Any, pages: Any, rows: Any) -> None:
    """Adds pages that are not there yet, by age; the deepest becomes their oldest."""
    steps: Any = _STEPS_A_PAGE * rows.size
    for i in range(rows.size - 1, -1, -1):
        row = rows[i]
        if row < 0 or row >= lists.state.size or lists.state[row] != ABSENT:
            continue
        if pages.stamp[row] == 0:  # no use is known
            stamp(pages, row)
        home = list_of(pages, row)
        before, steps = _place_by_age(lists, pages, row, home, steps)
        _set_home(lists, row, home)
        lists.state[row] = LISTED
        insert(lists.prev, lists.next, lists.ends, home, row, before)
        lists.counts[COUNT] += 1
        if pages.known[row] and pages.parent[row] != NONE:
            lists.children[pages.parent[row]] += 1


@compiled
def _settle(lists: Any, row: int, young: bool) -> None:
    if lists.state[row] == PARKED and lists.children[row] == 0 and not lists.held[row]:
        _unpark(lists, row, young)


@compiled
def _exit_one(lists: Any, pages: Any, row: int, young: bool) -> None:
    if lists.state[row] == LISTED:
        _cut(lists, row)
    lists.state[row] = ABSENT
    lists.counts[COUNT] -= 1
    _count(lists, lists.home[row], -1)
    if pages.known[row] and pages.parent[row] != NONE:
        parent = pages.parent[row]
        lists.children[parent] -= 1
        _settle(lists, parent, young)


@compiled
def leave(lists: Any, pages: Any, rows: Any, young: bool) -> None:
    """Takes pages out, whatever holds them."""
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < lists.state.size and lists.state[row] != ABSENT:
            _exit_one(lists, pages, row, young)


@compiled
def hold_where(lists: Any, rows: Any, stay: Any, young: bool) -> None:
    """Sets whether pages are held."""
    for i in range(rows.size):
        row = rows[i]
        lists.held[row] = stay[i]
        _settle(lists, row, young)


@compiled
def spare_where(lists: Any, rows: Any, spare: Any, young: bool) -> None:
    """Sets whether who waits for pages gets them from elsewhere."""
    for i in range(rows.size):
        row = rows[i]
        lists.spare[row] = spare[i]
        if spare[i]:
            _settle(lists, row, young)


@compiled
def put_back(lists: Any, pages: Any, rows: Any, young: bool) -> None:
    """Undoes the taking out of pages, given in the order in which they were taken out."""
    for i in range(rows.size - 1, -1, -1):
        row = rows[i]
        lists.counts[COUNT] += 1
        _count(lists, lists.home[row], 1)
        if pages.known[row] and pages.parent[row] != NONE:
            lists.children[pages.parent[row]] += 1
        _unpark(lists, row, young)


@compiled
def touch(lists: Any, pages: Any, rows: Any) -> None:
    """Moves pages that lie here to the young ends of their classes; the first becomes youngest."""
    for i in range(rows.size - 1, -1, -1):
        row = rows[i]
        if row < 0 or row >= lists.state.size or lists.state[row] == ABSENT:
            continue
        if lists.state[row] == LISTED:
            _cut(lists, row)
        _link_young(lists, row, list_of(pages, row))


@compiled
def settle(lists: Any, rows: Any, young: bool) -> None:
    """Puts parked pages back that nobody waits for any more."""
    for i in range(rows.size):
        _settle(lists, rows[i], young)


@compiled
def _move(lists: Any, row: int, home: int) -> None:
    """Moves a page that lies here to the young end of another class."""
    if lists.state[row] == LISTED:
        _cut(lists, row)
        _link_young(lists, row, home)
    else:
        _set_home(lists, row, home)


@compiled
def move(lists: Any, pages: Any, rows: Any) -> None:
    """Moves those of some pages that lie here to the lists of the classes that they have now."""
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < lists.state.size and lists.state[row] != ABSENT:
            _move(lists, row, list_of(pages, row))


@compiled
def demote(lists: Any, rows: Any) -> Any:
    """Moves those of some pages that lie here to the list of those that may leave this tier.

    Args:
        lists: The columns.
        rows: i64[N], in the order in which they come to lie in it.

    Returns:
        How many were not in it.
    """
    num = 0
    for i in range(rows.size):
        row = rows[i]
        if lists.state[row] != ABSENT and lists.home[row] % NUM_CLASSES != DEMOTED:
            _move(lists, row, lists.home[row] // NUM_CLASSES * NUM_CLASSES + DEMOTED)
            num += 1
    return num


@compiled
def used(lists: Any, pages: Any, path: Any, old_parents: Any, restamps: bool, young: bool) -> None:
    """Moves the pages of a path that lie here; adopts the parents that the use gave them."""
    for i in range(path.size):
        row = path[i]
        if row < 0 or row >= lists.state.size or lists.state[row] == ABSENT:
            continue
        old, new = max(old_parents[i], NONE), pages.parent[row]
        if old != new:
            if old != NONE:
                lists.children[old] -= 1
                _settle(lists, old, young)
            if new != NONE:
                lists.children[new] += 1
    for i in range(path.size - 1, -1, -1):
        row = path[i]
        if row < 0 or row >= lists.state.size or lists.state[row] == ABSENT:
            continue
        if not restamps:
            if lists.home[row] % NUM_CLASSES >= LEFT_BEHIND:
                _move(lists, row, list_of(pages, row))
            continue
        if lists.state[row] == LISTED:
            _cut(lists, row)
        _link_young(lists, row, list_of(pages, row))


@compiled
def _next_of_list(
    lists: Any, head: Any, lookahead: bool, home: int, end: int, budget: Any
) -> Any:  # fmt: skip
    """Returns the next page of a list that may leave; parks those met before it that may not.

    `budget`, i64[lists], is how many may still be parked; NONE when it is used up.
    """
    row = lists.ends[end, home]
    while row != NONE:
        wanted = lookahead and head[row] != NONE and not lists.spare[row]
        if lists.children[row] == 0 and not lists.held[row] and not wanted:
            return row
        if budget[home] == 0:
            return NONE
        budget[home] -= 1
        _cut(lists, row)
        lists.state[row] = PARKED
        row = lists.ends[end, home]
    return NONE


@compiled
def _look_anew(stale: Any, ends: Any, num_ends: int, home: int) -> Any:
    """Marks the ends of a list as changed; returns the number of ends that are looked at.

    What may leave next is the leaving end of each list, and behind these the old ends of those with
    hints.
    """
    num_lists = stale.size // 2
    last = home + num_lists if home % NUM_CLASSES >= HINTED else home
    for end in range(home, last + 1, num_lists):
        if stale[end] == _UNSEEN:
            ends[num_ends] = end
            num_ends += 1
        stale[end] = _STALE
    return num_ends


@compiled
def _value(
    pages: Any, hints: Any, scores: Any, row: int, kind: int, may_stay: bool, by_hint: bool,
    left_first: bool, by_score: bool, now_s: float,
) -> float:  # fmt: skip
    """How much a list's next page is worth: the least leaves. 0.0: it goes by the base order."""
    if may_stay:
        return float(np.inf)
    if kind == DEMOTED:
        return -1.0
    if by_hint and kind >= HINTED:
        return float(hint_kernels.value(hints, pages.last_s, row, now_s))
    if by_hint or (left_first and kind == LEFT_BEHIND):
        return -1.0
    if by_score:
        return float(hint_kernels.score(hints, scores, pages, row, now_s))
    return 0.0


@compiled
def evict_unwanted(
    lists: Any, pages: Any, hints: Any, head: Any, scores: Any, by_score: bool, lookahead: bool,
    young: bool, left_first: bool, most_pinned: int, now_s: float, may_give: Any, out: Any,
) -> Any:  # fmt: skip
    """Takes out pages that nobody waits for, coldest first, into `out`; returns how many.

    Each tenant gives up as many as `may_give`, i64[T], has for it, which is counted down.

    With `left_first` those that were left behind come before all others, and so do those of
    conversations that are said to be over. Then the worst page with a hint is compared with the
    worst without one, and that one leaves which is less likely to be used again for the room it
    takes, even where pages without a hint otherwise leave by their last use. Pinned pages leave
    last while there are at most `most_pinned` of them; of more, they count as any other page.

    A class whose old end is full of pages that may not leave is passed over until they are parked,
    which takes several calls, unless no other class has a page.

    In one piece for its speed: with a function of its own that asks a list, or with the columns in
    a tuple, it took 1.7 times as long.
    """
    end = 1 if young else 0
    sign = -1 if young else 1
    # The page that each list would give up next, found anew only where that may have changed.
    num_lists = lists.ends.shape[1]
    rows = np.full(2 * num_lists, NONE, np.int64)
    stamps = np.zeros(2 * num_lists, np.int64)
    values = np.zeros(2 * num_lists)
    by_hint = np.zeros(2 * num_lists, np.bool_)
    stale = np.zeros(2 * num_lists, np.uint8)
    ends = np.zeros(2 * num_lists, np.int64)  # of lists that have pages
    num_ends = 0
    for home in range(num_lists):
        if lists.ends[0, home] != NONE and may_give[home // NUM_CLASSES] > 0:
            num_ends = _look_anew(stale, ends, num_ends, home)
    budget = np.full(num_lists, _PARKED_A_CALL + out.size, np.int64)
    num = 0
    while num < out.size:
        best, best_hinted = NONE, NONE
        for i in ends[:num_ends]:
            home = i if i < num_lists else i - num_lists
            if may_give[home // NUM_CLASSES] <= 0:
                continue
            kind = home % NUM_CLASSES
            if stale[i] == _STALE:
                stale[i] = _KNOWN
                from_end = end if kind < HINTED else 1 if i < num_lists else 0
                row = _next_of_list(lists, head, lookahead, home, from_end, budget)
                rows[i] = row
                if row != NONE:
                    stamps[i] = sign * pages.stamp[row]
                    by_hint[i] = kind >= ENDED and kind != PINNED and kind != DEMOTED
                    by_hint[i] = by_hint[i] and hint_kernels.is_followed(hints, kind, row)
                    may_stay = kind == PINNED and lists.counts[PINS] <= most_pinned
                    values[i] = _value(
                        pages, hints, scores, row, kind, may_stay, by_hint[i], left_first,
                        by_score, now_s,
                    )  # fmt: skip
            if rows[i] == NONE:
                continue
            if by_hint[i] and kind >= HINTED:
                if best_hinted == NONE or values[i] < values[best_hinted]:
                    best_hinted = i
                continue
            lower = best == NONE or values[i] < values[best]
            if lower or (values[i] == values[best] and stamps[i] < stamps[best]):
                best = i
        if best_hinted != NONE and best != NONE:
            other = values[best]
            if other == 0.0:  # in base order
                other = hint_kernels.score(hints, scores, pages, rows[best], now_s)
            if values[best_hinted] < other:
                best = best_hinted
        elif best == NONE:
            best = best_hinted
        if best == NONE:
            if budget.min() > 0:
                break
            budget[:] = _PARKED_A_CALL
            stale[ends[:num_ends]] = _STALE
            continue
        row = rows[best]
        out[num] = row
        num += 1
        may_give[lists.home[row] // NUM_CLASSES] -= 1
        num_ends = _look_anew(stale, ends, num_ends, lists.home[row])
        _exit_one(lists, pages, row, young)
        if pages.known[row] and pages.parent[row] != NONE:
            # It may be back in its list.
            num_ends = _look_anew(stale, ends, num_ends, lists.home[pages.parent[row]])
    return num


@compiled
def evict_wanted(
    lists: Any, pages: Any, needs: Any, slots: Any, bit: int, young: bool, may_give: Any, out: Any
) -> Any:
    """Takes out pages that no request before these needs; those of the last request first.

    Args:
        lists: The tier's columns.
        pages: What is known of pages.
        needs: The queue's columns.
        slots: i64[N], requests in order of the queue whose pages may leave.
        bit: The tier's bit in `needs.dirty`.
        young: The base order's leaving end is the young one.
        may_give: i64[T], how many each tenant may give up; counted down.
        out: i64, out.
    """
    num = 0
    for i in range(slots.size - 1, -1, -1):
        slot = slots[i]
        if not needs.dirty[slot] & bit:
            continue
        left = 0
        entry = needs.first[slot]
        first = needs.row[entry] if entry != NONE else NONE
        if first != NONE and may_give[pages.tenant[first]] <= 0:
            continue  # a request's pages are one tenant's
        while entry != NONE and num < out.size:
            row = needs.row[entry]
            if row != NONE and needs.head[row] == entry and lists.state[row] != ABSENT:
                may = may_give[pages.tenant[row]] > 0
                if lists.children[row] == 0 and not lists.held[row] and may:
                    may_give[pages.tenant[row]] -= 1
                    out[num] = row
                    num += 1
                    _exit_one(lists, pages, row, young)
                else:
                    left += 1
            entry = needs.chain[entry]
        if num == out.size:
            return num
        if left == 0:
            needs.dirty[slot] &= ~bit
    return num


@compiled
def mark_dirty(needs: Any, rows: Any, bit: int) -> None:
    """Notes that pages lie in a tier, for those who need them first."""
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < needs.head.size and needs.head[row] != NONE:
            needs.dirty[needs.slot[needs.head[row]]] |= bit
