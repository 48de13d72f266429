"""What is known of each page from its uses: its parent, how often and in which lineage it was used.

The class of a page is what its return time is learned by; docs/lookahead.md tells why these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled

NONE = -1
_CAP = 255

# Classes of pages, in this order:
NUM_INNER = 64  # turn, length of the path and uses, four steps each
# Then four: the last page of a path, by turn.
LEFT_BEHIND = NUM_INNER + 4  # a conversation that was cut has gone on without the page
IN_USE = LEFT_BEHIND + 1  # a request that has not ended computed it or came to reuse it
NUM_LEARNED = IN_USE + 1  # return times are learned of all up to here; those behind are of hints
ENDED = NUM_LEARNED  # the conversation is over
PINNED = ENDED + 1  # somebody pinned it
DEMOTED = PINNED + 1  # it may leave one tier, and has this class there instead of its own
HINTED = DEMOTED + 1  # the first of those that come back in a time of this length
NUM_HINTED = 27  # bins of ages: see `return_kernels.age_bin`
NUM_CLASSES = HINTED + NUM_HINTED


class Pages(NamedTuple):
    """Columns by row, all owned by `PlacementPolicy`; 32 bytes a row.

    Attributes:
        known: u8, 1 while the page is one that was linked or used, and not forgotten.
        parent: i32, the page before it in its path, -1 for a root.
        depth: i32, its place in the path.
        uses: u8, how often it was used, saturating; 0 while it was only linked.
        turn: u8, turns of its lineage when it was used last, saturating.
        tail: u8, pages behind it in that path, saturating.
        shared: u8, 1 once a path departed from another one behind it.
        kind: u8, class, but `PINNED` and `DEMOTED`.
        pinned: u8, not 0 while the page is pinned; see `hints/pins.py`.
        tenant: u8, whose share it counts towards, 0 for all that have none.
        last_s: f64, time of its last use, or from which its age counts in its class.
        stamp: i64, its place in the order of uses, in all tiers the same: the oldest has the least;
            0 while it has none. Of a path the deepest page has the least.
        clock: i64[1], the last stamp that was given.
    """

    known: npt.NDArray[np.uint8]
    parent: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    uses: npt.NDArray[np.uint8]
    turn: npt.NDArray[np.uint8]
    tail: npt.NDArray[np.uint8]
    shared: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]
    pinned: npt.NDArray[np.uint8]
    tenant: npt.NDArray[np.uint8]
    last_s: npt.NDArray[np.float64]
    stamp: npt.NDArray[np.int64]
    clock: npt.NDArray[np.int64]


def new_pages(num_rows: int) -> Pages:
    """Columns in which no page is known; memory is committed as rows are used."""
    u8, i32 = np.uint8, np.int32
    types = (u8, i32, i32, u8, u8, u8, u8, u8, u8, u8, np.float64, np.int64)
    columns: Any = [np.zeros(num_rows, dtype) for dtype in types]
    columns.append(np.zeros(1, np.int64))  # the clock
    return Pages(*columns)


@compiled
def stamp(pages: Any, row: int) -> None:
    """Makes a page the youngest of all."""
    pages.clock[0] += 1
    pages.stamp[row] = pages.clock[0]


@compiled
def list_of(pages: Any, row: int) -> Any:
    """The list that a page stands in: each tenant has one for each class."""
    kind = np.int64(PINNED if pages.pinned[row] else pages.kind[row])
    return pages.tenant[row] * NUM_CLASSES + kind


@compiled
def assign(pages: Any, rows: Any, tenant: int) -> Any:
    """Notes whose pages are; returns those that were another's before.

    Args:
        pages: The columns.
        rows: i64[N]; rows that do not exist are passed over.
        tenant: See `Pages`.
    """
    changed = np.empty(rows.size, np.int64)
    num = 0
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < pages.tenant.size and pages.tenant[row] != tenant:
            pages.tenant[row] = tenant
            changed[num] = row
            num += 1
    return changed[:num]


@compiled
def _step(value: int) -> int:
    """1, 2, 3 to 4, more: as 0 to 3."""
    return min(value - 1, 2) if value <= 3 else (2 if value == 4 else 3)


@compiled
def _length_step(num_pages: int) -> int:
    """Up to 3, 15, 63 pages, more: as 0 to 3."""
    return 0 if num_pages < 4 else 1 if num_pages < 16 else 2 if num_pages < 64 else 3


@compiled
def _learned_kind(pages: Any, row: int, num_pages: int) -> Any:
    """Class of a page by its last use, in a path of so many pages."""
    turn = _step(pages.turn[row])
    if pages.tail[row] == 0:
        return NUM_INNER + turn
    return (turn * 4 + _length_step(num_pages)) * 4 + _step(pages.uses[row])


@compiled
def use(pages: Any, path: Any, restamps: bool, now_s: float, old_parents: Any) -> None:
    """Notes that a request computed or reused `path`, root first.

    Args:
        pages: The columns.
        path: i64[N], all rows valid.
        restamps: See `BaseOrder`.
        now_s: Time.
        old_parents: i32[N], out: each page's parent before; -2 where it was not known.
    """
    known = 0
    while known < path.size and pages.known[path[known]] and pages.uses[path[known]]:
        known += 1
    # The path continues a conversation if its known part ends where an earlier path ended (or one
    # page before: the last may have been partial). A shared prefix ends inside of earlier paths.
    # It does so at another page each time: where a second path parts, with one page behind it or
    # many, the part before is shared.
    turn, departs = 1, known > 0
    if known and pages.tail[path[known - 1]] <= 1:
        departs = pages.tail[path[known - 1]] == 1 and pages.uses[path[known - 1]] > 1
        departs = departs and known < path.size
        turn = min(pages.turn[path[known - 1]] + 1, _CAP)
    parent = NONE
    for i in range(path.size):
        row = path[i]
        tail = path.size - 1 - i
        if pages.known[row]:
            old_parents[i] = pages.parent[row]
            pages.uses[row] = min(pages.uses[row] + 1, _CAP)
            pages.shared[row] |= departs and i < known
        else:
            old_parents[i] = -2
            pages.known[row] = 1
            pages.uses[row] = 1
            pages.shared[row] = 0
        pages.parent[row] = parent
        pages.depth[row] = i
        pages.turn[row] = turn
        pages.tail[row] = min(tail, _CAP)
        pages.last_s[row] = now_s
        pages.kind[row] = _learned_kind(pages, row, path.size)
        parent = row
    for i in range(path.size - 1, -1, -1):
        if restamps or pages.stamp[path[i]] == 0:
            stamp(pages, path[i])


@compiled
def link(pages: Any, path: Any, now_s: float, old_parents: Any) -> bool:
    """Notes a path of stored pages, root first, without a use; returns whether that was new.

    A path may begin in the middle: what is known of the page before its first one stays.

    Args:
        pages: The columns.
        path: i64[N], all rows valid.
        now_s: Time.
        old_parents: i32[N], out: each page's parent before; -2 where it was not known.
    """
    changed = False
    for i in range(path.size):
        row = path[i]
        parent = path[i - 1] if i else NONE
        if not pages.known[row]:
            old_parents[i] = -2
            pages.known[row] = 1
            pages.uses[row] = 0
            pages.shared[row] = 0
            pages.kind[row] = IN_USE
            pages.last_s[row] = now_s
        else:
            old_parents[i] = pages.parent[row]
            if i == 0 or pages.parent[row] == parent:
                continue
        changed = True
        pages.parent[row] = parent
        pages.depth[row] = pages.depth[parent] + 1 if i else 0
    return changed


@compiled
def touch(pages: Any, rows: Any, restamps: bool, now_s: float) -> None:
    """Moves pages that are known to the class IN_USE; the first becomes the youngest."""
    for i in range(rows.size - 1, -1, -1):
        row = rows[i]
        if row < 0 or row >= pages.known.size:
            continue
        if restamps:
            stamp(pages, row)
        if pages.known[row]:
            pages.kind[row] = IN_USE
            pages.last_s[row] = now_s


@compiled
def rest(pages: Any, rows: Any) -> Any:
    """Moves pages from the class IN_USE back to those of their last use.

    Args:
        pages: The columns.
        rows: i64[N]; rows that do not exist are passed over.

    Returns:
        i64[M], those that moved. What nobody used yet stays.
    """
    num = 0
    moved = np.empty(rows.size, np.int64)
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= pages.known.size or not pages.known[row]:
            continue
        if pages.uses[row] and pages.kind[row] == IN_USE:
            num_pages = pages.depth[row] + 1 + np.int64(pages.tail[row])
            pages.kind[row] = _learned_kind(pages, row, num_pages)
            moved[num] = row
            num += 1
    return moved[:num]


@compiled
def adopt(pages: Any, path: Any, old_parents: Any) -> bool:
    """A request will reach these pages by `path`, root first; returns whether a parent changed.

    Args:
        pages: The columns.
        path: i64[N].
        old_parents: i32[N], out: each page's parent before.
    """
    changed = False
    parent = NONE
    for i in range(path.size):
        row = path[i]
        old_parents[i] = NONE
        if row < 0 or row >= pages.known.size:
            continue
        if pages.known[row]:
            old_parents[i] = pages.parent[row]
            if pages.parent[row] != parent:
                pages.parent[row] = parent
                pages.depth[row] = i
                changed = True
        parent = row
    return changed


@compiled
def leave_behind(pages: Any, rows: Any, now_s: float) -> Any:
    """Moves pages that a cut conversation does without to the class LEFT_BEHIND.

    Shared ones stay what they are.

    Args:
        pages: The columns.
        rows: i64[N], root first; rows that do not exist are passed over.
        now_s: Time, from which their age counts.

    Returns:
        i64[M], those that have the class since this call, deepest first.
    """
    num = 0
    left = np.empty(rows.size, np.int64)
    for i in range(rows.size - 1, -1, -1):
        row = rows[i]
        if row < 0 or row >= pages.known.size or not pages.known[row]:
            continue
        if pages.shared[row] or pages.kind[row] == LEFT_BEHIND:
            continue
        pages.kind[row] = LEFT_BEHIND
        pages.last_s[row] = now_s
        left[num] = row
        num += 1
    return left[:num]


@compiled
def forget(pages: Any, rows: Any) -> None:
    """These pages are gone."""
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < pages.known.size:
            pages.known[row] = 0
            pages.kind[row] = 0
            pages.tenant[row] = 0
            pages.parent[row] = NONE
            pages.stamp[row] = 0
