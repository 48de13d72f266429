"""Contexts on one link and one GPU in virtual time: the planner, and what it is compared with."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from bench.stream.links import Link
from sglang_ext.streaming import (
    ChunkFetch,
    ChunkOffer,
    ContextStream,
    LinkEstimator,
    LinkShare,
    QualityScale,
    StreamCosts,
)

QUESTION_TOKENS = 32
REQUEST_S = 0.001


@dataclass(frozen=True)
class Served:
    """What one context got.

    Attributes:
        ttft_s: from the request to its first token.
        kl: expected damage, the mean over the context's tokens.
        text_tokens: of its context, computed instead of fetched.
        link_busy: share of the time from the first byte asked for to the last one used in which
            the link carried something; None where nothing was fetched.
    """

    ttft_s: float
    kl: float
    text_tokens: int
    link_busy: float | None


@dataclass
class _Wire:
    """The link's queue: first come, first served."""

    link: Link
    free_s: float = 0.0
    busy_s: float = 0.0

    def send(self, fetch: ChunkFetch, now_s: float) -> tuple[float, float]:
        """(start, end) of a transfer that is asked for now."""
        start_s = max(now_s + REQUEST_S, self.free_s)
        self.free_s = self.link.finish_s(start_s, fetch.chunk, fetch.num_bytes)
        self.busy_s += self.free_s - start_s
        return start_s, self.free_s


@dataclass
class _Context:
    """A context under way."""

    stream: ContextStream
    num_tokens: int
    decoded_s: float = 0.0
    served: Served | None = None


@dataclass
class _World:
    """The event loop. Events are (time, number, kind, payload)."""

    offers: Sequence[ChunkOffer]
    costs: StreamCosts
    quality: QualityScale
    wire: _Wire
    share: LinkShare
    gpu_free_s: float = 0.0
    last_s: float = 0.0
    events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)

    def at(self, time_s: float, kind: str, payload: Any) -> None:
        """Adds an event."""
        heapq.heappush(self.events, (time_s, next(self._numbers), kind, payload))


def stream(
    offers: Sequence[ChunkOffer],
    costs: StreamCosts,
    quality: QualityScale,
    link: Link,
    *,
    slo_s: float | None = None,
    concurrency: int = 1,
    known_bytes_per_s: float | None = None,
) -> list[Served]:
    """Serves equal contexts that arrive at once, by the product's planner.

    Args:
        offers: the context's chunks.
        costs: speeds.
        quality: damage by level.
        link: what it goes over.
        slo_s: the deadline; None for none.
        concurrency: number of contexts.
        known_bytes_per_s: what is known of the link beforehand.
    """
    estimator = LinkEstimator(prior_bytes_per_s=known_bytes_per_s)
    world = _World(offers, costs, quality, _Wire(link), LinkShare(2 * max(1, concurrency // 4)))
    contexts = []
    for number in range(concurrency):
        planned = ContextStream(
            offers,
            costs,
            quality,
            estimator,
            now_s=0.0,
            deadline_s=slo_s,
            question_tokens=QUESTION_TOKENS,
        )
        contexts.append(_Context(planned, sum(offer.num_tokens for offer in offers)))
        world.share.add(number, planned)
    last_end_s = 0.0
    _go_on(world, contexts, 0.0)
    while world.events:
        now_s, _, kind, payload = heapq.heappop(world.events)
        if kind == "arrived":
            number, fetch, start_s = payload
            world.share.done()
            estimator.observe(fetch.num_bytes, now_s - max(start_s, last_end_s))
            last_end_s = now_s
            context = contexts[number]
            if context.served is None:
                context.stream.arrived(fetch, now_s)
                world.last_s = now_s
                tokens = offers[fetch.chunk].num_tokens
                context.decoded_s = max(context.decoded_s, now_s) + costs.decode_s(tokens)
        _go_on(world, contexts, now_s)
    return [context.served for context in contexts if context.served is not None]


def _go_on(world: _World, contexts: list[_Context], now_s: float) -> None:
    """Begins what may begin, and asks for bytes while the link takes them."""
    while True:
        for number, context in enumerate(contexts):
            if context.served is None and context.stream.may_begin(now_s):
                _begin(world, context, now_s)
                world.share.remove(number)
        found = world.share.next_fetch(now_s)
        if found is None:
            break
        owner, fetch = found
        start_s, end_s = world.wire.send(fetch, now_s)
        world.at(end_s, "arrived", (owner, fetch, start_s))
    for context in contexts:
        begin_s = context.stream.plan.begin_s
        if context.served is None and now_s < begin_s < float("inf"):
            world.at(begin_s, "look", None)


def _begin(world: _World, context: _Context, now_s: float) -> None:
    """The forward: what is there is decoded, the rest is computed."""
    planned = context.stream
    loaded = planned.plan.num_loaded
    levels = planned.levels[:loaded]
    offers = world.offers
    before = sum(offer.num_tokens for offer in offers[:loaded])
    text = context.num_tokens - before
    if planned.decodes_at_end:
        ready_s = now_s + world.costs.decode_s(before)
    else:
        ready_s = max(now_s, context.decoded_s)
    start_s = max(ready_s, world.gpu_free_s)
    end_s = start_s + world.costs.prefill_s(text + QUESTION_TOKENS, before)
    world.gpu_free_s = end_s
    kl = sum(
        world.quality.damage[level] * offer.num_tokens
        for level, offer in zip(levels, offers, strict=False)
    )
    busy = None
    if world.last_s > REQUEST_S:
        busy = min(1.0, world.wire.busy_s / max(world.wire.free_s - REQUEST_S, 1e-9))
    context.served = Served(end_s, kl / context.num_tokens, text, busy)


def fixed(
    offers: Sequence[ChunkOffer],
    level: int,
    costs: StreamCosts,
    kl: float,
    link: Link,
    concurrency: int = 1,
) -> list[Served]:
    """Chunk after chunk at one level, decoded beside the next; contexts share by chunk index."""
    wire, end_s = _Wire(link), np.zeros(concurrency)
    decoded_s = np.zeros(concurrency)
    for number, offer in enumerate(offers):
        for each in range(concurrency):
            fetch = ChunkFetch(number, level, 0, offer.prefix_bytes[level])
            _, end_s[each] = wire.send(fetch, 0.0)
            decoded_s[each] = max(decoded_s[each], end_s[each]) + costs.decode_s(offer.num_tokens)
    return _answer(offers, costs, decoded_s, kl)


def quantised(
    offers: Sequence[ChunkOffer],
    num_bytes: int,
    costs: StreamCosts,
    kl: float,
    link: Link,
    concurrency: int = 1,
) -> list[Served]:
    """Uniform quantisation: bytes in proportion to tokens, and nothing to decode that counts."""
    wire, ready_s = _Wire(link), np.zeros(concurrency)
    total = sum(offer.num_tokens for offer in offers)
    for number, offer in enumerate(offers):
        for each in range(concurrency):
            size = round(num_bytes * offer.num_tokens / total)
            _, ready_s[each] = wire.send(ChunkFetch(number, 0, 0, size), 0.0)
    return _answer(offers, costs, ready_s, kl)


def text(offers: Sequence[ChunkOffer], costs: StreamCosts, concurrency: int = 1) -> list[Served]:
    """Everything computed, one context after another."""
    total = sum(offer.num_tokens for offer in offers)
    each_s = costs.prefill_s(total + QUESTION_TOKENS, 0)
    return [Served((number + 1) * each_s, 0.0, total, None) for number in range(concurrency)]


def _answer(
    offers: Sequence[ChunkOffer], costs: StreamCosts, ready_s: Any, kl: float
) -> list[Served]:
    total = sum(offer.num_tokens for offer in offers)
    free_s, out = 0.0, []
    for each in np.sort(ready_s):
        free_s = max(free_s, float(each)) + costs.prefill_s(QUESTION_TOKENS, total)
        out.append(Served(free_s, kl, 0, None))
    return out


def oracle(
    offers: Sequence[ChunkOffer],
    costs: StreamCosts,
    quality: QualityScale,
    link: Link,
    slo_s: float,
) -> Served:
    """Knows the link: the least damage that meets the deadline, else the earliest first token.

    Tries every level of every chunk and every number of last chunks as text; up to 8 chunks.
    """
    best: Served | None = None
    for loaded in range(len(offers), -1, -1):
        found = _best_levels(offers, loaded, costs, quality, link, slo_s)
        if best is None or _oracle_key(found, slo_s) < _oracle_key(best, slo_s):
            best = found
    assert best is not None
    return best


def _oracle_key(served: Served, slo_s: float) -> tuple[float, float, float]:
    late = served.ttft_s > slo_s
    return (1.0, served.ttft_s, 0.0) if late else (0.0, served.kl, served.ttft_s)


def _best_levels(
    offers: Sequence[ChunkOffer],
    loaded: int,
    costs: StreamCosts,
    quality: QualityScale,
    link: Link,
    slo_s: float,
) -> Served:
    total = sum(offer.num_tokens for offer in offers)
    before = sum(offer.num_tokens for offer in offers[:loaded])
    after_s = costs.prefill_s(total - before + QUESTION_TOKENS, before)
    if not loaded:
        return Served(after_s, 0.0, total, None)
    after_s += costs.decode_s(offers[loaded - 1].num_tokens)
    budget_s = slo_s - after_s - REQUEST_S
    price = link.seconds_per_byte(loaded, max(budget_s, 1e-6))
    seconds, damage = np.zeros(1), np.zeros(1)
    for offer, each in zip(offers[:loaded], price, strict=True):
        cost = np.array(offer.prefix_bytes, np.float64) * each
        harm = np.array(quality.damage) * offer.num_tokens / total
        allowed = slice(quality.floor_level, None)
        seconds = (seconds[:, None] + cost[None, allowed]).reshape(-1)
        damage = (damage[:, None] + harm[None, allowed]).reshape(-1)
    fits = seconds <= budget_s
    if fits.any():
        at = np.flatnonzero(fits)[np.argmin(damage[fits])]
    else:
        at = np.argmin(seconds)
    return Served(REQUEST_S + float(seconds[at]) + after_s, float(damage[at]), total - before, None)
