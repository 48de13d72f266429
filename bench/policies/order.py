"""Hits by order alone: what LRU, FIFO and optima have of a sequence of requests, without a clock.

Nothing here is shared with the store or with its policy: offline oracles to compare with. They are
given the requests of a run in the order in which it admitted them, and have each request's pages
from when that run saved them, so none of them has another order to its advantage. A request hits
the leading pages of its prompt that are kept; what it leaves is kept as far as it is worth that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_ext.simulator.types import Ids, Recorded, System

ORDERS = ("lru", "fifo", "waiting", "belady")
"""`waiting`: Belady's rule over what the waiting requests need, and LRU for the rest."""

_NEVER = 1 << 60


@dataclass(frozen=True)
class RequestOrder:
    """Requests in their order.

    Attributes:
        prompts: pages that each may hit, root first.
        stored: pages that each leaves, root first.
        num_waiting: requests that wait at each turn, the one whose turn it is included.
        saved: by turn, the requests whose pages were saved since the turn before it; None where
            each request's are saved before the next turn.
    """

    prompts: Sequence[Ids]
    stored: Sequence[Ids]
    num_waiting: Sequence[int]
    saved: Sequence[Sequence[int]] | None = None


def replay_order(requests: RequestOrder, capacity: int, order: str) -> list[int]:
    """Leading pages that each request hits.

    What leaves first has the smallest key: (False, last use, -depth) where nobody who is known to
    come needs it, (True, -next use, -depth) otherwise. A parent is needed no later than its child,
    and was used no earlier, so no path loses its middle.

    Args:
        requests: the requests.
        capacity: pages.
        order: one of `ORDERS`.
    """
    prompts = [path.tolist() for path in requests.prompts]
    num = len(prompts)
    known = {"belady": [num] * num, "waiting": list(requests.num_waiting)}.get(order, [0] * num)
    uses = _uses(prompts)
    kept: dict[int, tuple[bool, int, int]] = {}
    queue: list[tuple[bool, int, int, int]] = []
    depth_of: dict[int, int] = {}
    hits: list[int] = []
    seen_to = 0  # requests whose needs are noted

    def put(page: int, key: tuple[bool, int, int]) -> None:
        kept[page] = key
        heapq.heappush(queue, (*key, page))

    def use(page: int, turn: int) -> None:
        following = uses[page][-1] if uses.get(page) else _NEVER
        if following < seen_to:
            put(page, (True, -following, -depth_of[page]))
        elif order != "fifo" or page not in kept or kept[page][0]:
            put(page, (False, turn, -depth_of[page]))

    def save(number: int, turn: int) -> None:
        for depth, page in enumerate(requests.stored[number].tolist()):
            depth_of[page] = depth
            use(page, turn)

    def shrink() -> None:
        while len(kept) > capacity:
            *key, page = heapq.heappop(queue)
            if kept.get(page) == tuple(key):
                del kept[page]

    for turn, path in enumerate(prompts):
        for number in requests.saved[turn] if requests.saved is not None else ():
            save(number, turn)
        end = min(turn + known[turn], num)
        for number in range(max(seen_to, turn), end):
            for page in prompts[number]:
                if page in kept and not kept[page][0]:
                    put(page, (True, -number, -depth_of[page]))
        seen_to = max(seen_to, end)
        shrink()
        hits.append(next((at for at, page in enumerate(path) if page not in kept), len(path)))
        for page in path:
            uses[page].pop()
            if page in kept:
                use(page, turn)
        if requests.saved is None:
            save(turn, turn)
            shrink()
    return hits


def order_figures(
    recorded: Recorded, system: System, order: str, warmup: int, measured: int | None
) -> dict[str, Any]:
    """Figures of an order over the room of DRAM and disk together, as of a run.

    Args:
        recorded: the run whose order it is.
        system: its machine.
        order: one of `ORDERS`.
        warmup: requests that are not measured.
        measured: requests that are, None for all others.
    """
    requests = recorded.requests
    paths = RequestOrder(
        [each.prompt_ids for each in requests], [each.stored_ids for each in requests],
        recorded.num_waiting, recorded.saved,
    )  # fmt: skip
    hits = replay_order(paths, system.host_pages + system.disk_pages, order)
    seen = np.zeros(recorded.num_pages, np.bool_)
    reused: list[int] = []
    possible: list[int] = []
    prompts: list[int] = []
    stop = len(requests) if measured is None else warmup + measured
    for number, (request, pages) in enumerate(zip(requests, hits, strict=True)):
        for saved in recorded.saved[number]:
            seen[requests[saved].stored_ids] = True
        known = seen[request.prompt_ids]
        most = len(known) if known.all() else int(np.argmin(known))
        if warmup <= number < stop:
            most = max(most, request.history_pages)
            for pages_of, total in ((pages, reused), (most, possible)):
                total.append(min(pages_of * system.page_tokens, request.prompt_tokens - 1))
            prompts.append(request.prompt_tokens)
    shares = [part / whole if whole else 0.0 for part, whole in zip(reused, possible, strict=True)]
    return {
        "num_turns": len(prompts),
        "hit_rate": sum(reused) / max(sum(possible), 1),
        "turn_hit_rate": float(np.mean(shares)),
        "turn_hit_cap": sum(whole > 0 for whole in possible) / max(len(possible), 1),
        "reused_tokens": sum(reused),
        "reusable_tokens": sum(possible),
        "prompt_tokens": sum(prompts),
        "computed_tokens": sum(prompts) - sum(reused),
    }


def _uses(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """By page the requests that use it, the last first."""
    uses: dict[int, list[int]] = {}
    for at in range(len(prompts) - 1, -1, -1):
        for page in prompts[at]:
            uses.setdefault(page, []).append(at)
    return uses
