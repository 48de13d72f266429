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


@dataclass(frozen=True)
class RequestOrder:
    """Requests in the order of their turns, by which they are numbered here.

    Attributes:
        prompts: pages that each may hit, root first.
        stored: pages that each leaves, root first.
        known_from: the turn from which each is known to come: the first at which it waits.
        saved: by turn, the requests whose pages were saved since the turn before it; None where
            each request's are saved before the next turn.
    """

    prompts: Sequence[Ids]
    stored: Sequence[Ids]
    known_from: Sequence[int]
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
    comes = _by_turn({"belady": [0] * num, "waiting": requests.known_from}.get(order, ()), num)
    known_uses: dict[int, list[int]] = {}  # by page, a heap of the turns that are known
    kept: dict[int, tuple[bool, int, int]] = {}
    queue: list[tuple[bool, int, int, int]] = []
    depth_of: dict[int, int] = {}
    hits: list[int] = []

    def put(page: int, key: tuple[bool, int, int]) -> None:
        kept[page] = key
        heapq.heappush(queue, (*key, page))

    def use(page: int, turn: int) -> None:
        if known_uses.get(page):
            put(page, (True, -known_uses[page][0], -depth_of[page]))
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
        for number in comes[turn]:
            for page in prompts[number]:
                heapq.heappush(known_uses.setdefault(page, []), number)
                if page in kept and known_uses[page][0] == number:
                    put(page, (True, -number, -depth_of[page]))
        shrink()
        hits.append(next((at for at, page in enumerate(path) if page not in kept), len(path)))
        for page in path:
            if known_uses.get(page) and known_uses[page][0] == turn:
                heapq.heappop(known_uses[page])
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
    requests = [recorded.requests[number] for number in recorded.admitted]
    paths = _as_admitted(recorded)
    hits = replay_order(paths, system.host_pages + system.disk_pages, order)
    seen = np.zeros(recorded.num_pages, np.bool_)
    reused: list[int] = []
    possible: list[int] = []
    prompts: list[int] = []
    stop = len(requests) if measured is None else warmup + measured
    for number, (request, pages) in enumerate(zip(requests, hits, strict=True)):
        for saved in paths.saved[number] if paths.saved is not None else ():
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


def known_ahead(num: int, num_waiting: int) -> list[int]:
    """`RequestOrder.known_from` where so many wait at each turn, the one whose turn it is included.

    Args:
        num: requests in all.
        num_waiting: 0: nobody is known to come.
    """
    return [max(turn - num_waiting + 1, 0) if num_waiting else num for turn in range(num)]


def _as_admitted(recorded: Recorded) -> RequestOrder:
    """The order of a run. Who waits at a turn has come and was not admitted before."""
    requests = [recorded.requests[number] for number in recorded.admitted]
    turn_of = np.argsort(recorded.admitted)
    num_come = np.add(recorded.num_waiting, np.arange(len(requests)))  # by each turn
    return RequestOrder(
        [each.prompt_ids for each in requests],
        [each.stored_ids for each in requests],
        np.searchsorted(num_come, recorded.admitted, side="right").tolist(),
        [turn_of[numbers].tolist() for numbers in recorded.saved],
    )


def _by_turn(known_from: Sequence[int], num: int) -> list[list[int]]:
    """The requests that become known at each of so many turns."""
    comes: list[list[int]] = [[] for _ in range(num)]
    for number, turn in enumerate(known_from):
        if turn < num:
            comes[turn].append(number)
    return comes
