"""Hits by order alone: LRU and Belady's optimum over one pool of pages, without any clock.

Nothing here is shared with the simulator or with the policy. Time, tiers, bandwidth and batches are
left out, so these replays say what a capacity allows for a fixed order of requests. The case holds
the simulator against them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from bench.policies_trace import BLOCK_TOKENS, Line

_NEVER = 1 << 60


def lru_tokens(lines: Sequence[Line], num_blocks: int) -> int:
    """Prompt tokens that LRU over `num_blocks` blocks has; of a path the leaf leaves first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for line in lines:
        ids = line.hash_ids.tolist()
        hits += _hit_tokens(line, ids, kept)
        for each in reversed(ids):
            kept[each] = None
            kept.move_to_end(each)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return hits


def belady_tokens(lines: Sequence[Line], num_blocks: int) -> int:
    """Prompt tokens that the optimum has: what is needed last leaves first, new blocks included.

    A parent is needed no later than its child, so no chain loses its middle.
    """
    uses: dict[int, list[int]] = {}
    for at in range(len(lines) - 1, -1, -1):
        for each in lines[at].hash_ids.tolist():
            uses.setdefault(each, []).append(at)
    kept: dict[int, int] = {}  # block -> number of the request that needs it next
    queue: list[tuple[int, int, int]] = []
    hits = 0
    for line in lines:
        ids = line.hash_ids.tolist()
        hits += _hit_tokens(line, ids, kept)
        for depth, each in enumerate(ids):
            uses[each].pop()
            needed = uses[each][-1] if uses[each] else _NEVER
            kept[each] = needed
            heapq.heappush(queue, (-needed, -depth, each))
        while len(kept) > num_blocks:
            needed, _, each = heapq.heappop(queue)
            if kept.get(each) == -needed:
                del kept[each]
    return hits


def _hit_tokens(
    line: Line, ids: Sequence[int], kept: OrderedDict[int, None] | dict[int, int]
) -> int:
    for number, each in enumerate(ids):
        if each not in kept:
            return number * BLOCK_TOKENS
    return line.input_tokens
