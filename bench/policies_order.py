"""Hits by order alone: what LRU and optima have of a sequence of requests, without any clock.

Nothing here is shared with the store or with its policy: offline oracles to compare with. A path is
the pages of a request, root first; a request uses all of its pages, and hits the leading ones that
are kept. Pages that a request computes are kept, too, as far as they are worth it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from bench.policies_types import Ids

_NEVER = 1 << 60


def reusable(paths: Sequence[Ids]) -> int:
    """Leading pages that an unbounded store would have."""
    seen: set[int] = set()
    total = 0
    for path in paths:
        ids = path.tolist()
        total += _num_leading(ids, seen)
        seen.update(ids)
    return total


def lru(paths: Sequence[Ids], capacity: int) -> float:
    """Share of the reusable pages that the least recent use gives; a path's leaf goes first."""
    return _share(paths, capacity, 0)


def known_then_lru(paths: Sequence[Ids], capacity: int, num_known: int) -> float:
    """The same for Belady's rule over what so many waiting requests need; of the rest LRU.

    Args:
        paths: the requests in order.
        capacity: pages.
        num_known: requests that wait, the one whose turn it is included.
    """
    return _share(paths, capacity, num_known)


def belady(paths: Sequence[Ids], capacity: int) -> float:
    """The same for the optimum: what is needed last leaves first."""
    return _share(paths, capacity, len(paths) + 1)


def _share(paths: Sequence[Ids], capacity: int, num_known: int) -> float:
    possible = reusable(paths)
    return _hits(paths, capacity, num_known) / possible if possible else 0.0


def _hits(paths: Sequence[Ids], capacity: int, num_known: int) -> int:
    """Leading pages kept, summed over the requests.

    What leaves first has the smallest key: (False, last use, -depth) where nobody who waits needs
    it, (True, -next use, -depth) otherwise. A parent is needed no later than its child, and was
    used no earlier, so no path loses its middle.
    """
    uses = _uses(paths)
    kept: dict[int, tuple[bool, int, int]] = {}
    queue: list[tuple[bool, int, int, int]] = []
    depth_of: dict[int, int] = {}

    def put(page: int, key: tuple[bool, int, int]) -> None:
        kept[page] = key
        heapq.heappush(queue, (*key, page))

    hits = entered = 0
    for turn, path in enumerate(paths):
        arriving = range(max(entered, turn), min(turn + num_known, len(paths)))
        for number in arriving:
            for page in paths[number].tolist():
                if page in kept and not kept[page][0]:
                    put(page, (True, -number, -depth_of[page]))
        entered = max(entered, arriving.stop)
        ids = path.tolist()
        hits += _num_leading(ids, kept)
        for depth, page in enumerate(ids):
            uses[page].pop()
            depth_of[page] = depth
            following = uses[page][-1] if uses[page] else _NEVER
            is_known = following < turn + num_known
            put(page, (is_known, -following if is_known else turn, -depth))
        while len(kept) > capacity:
            *key, page = heapq.heappop(queue)
            if kept.get(page) == tuple(key):
                del kept[page]
    return hits


def _uses(paths: Sequence[Ids]) -> dict[int, list[int]]:
    """By page the requests that use it, the last first."""
    uses: dict[int, list[int]] = {}
    for at in range(len(paths) - 1, -1, -1):
        for page in paths[at].tolist():
            uses.setdefault(page, []).append(at)
    return uses


def _num_leading(ids: Sequence[int], kept: set[int] | dict[int, tuple[bool, int, int]]) -> int:
    return next((number for number, page in enumerate(ids) if page not in kept), len(ids))
