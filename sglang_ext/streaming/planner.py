"""The plan of one context: which bytes to ask for next, and when to begin the forward.

CacheGen (section 5.3, appendix C.1) sends chunk after chunk and picks each one's level from the
speed of the one before. Streams with refinement layers allow better: first the coarsest allowed
level of every chunk, then refinements where they help most, until the deadline. A level that was
chosen too boldly then costs a refinement that comes too late, not the deadline. Text, which is
recomputation and exact, may take the place of the last chunks, as attention is causal.

Where decoding is slow there is no time to decode a chunk twice or everything at the end: each chunk
is then asked for once, at a level that fits, and decoded beside the transfer of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sglang_ext.streaming.costs import ChunkOffer, QualityScale, StreamCosts
from sglang_ext.streaming.throughput import LinkEstimator

MAX_IN_FLIGHT = 2
# A forward is begun so much of the time that was given before it has to be, for what is not known.
_MARGIN_SHARE = 0.02
# Refining is for decoders that need no more than this share of the time that is left.
_REFINE_DECODE_SHARE = 0.1


@dataclass(frozen=True)
class ChunkFetch:
    """Bytes [start, end) of a chunk's stream, which lift it from one level to another.

    Attributes:
        chunk: index in the context.
        level: what the chunk decodes at when they are there.
        start: first byte.
        end: behind the last byte.
    """

    chunk: int
    level: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class StreamPlan:
    """How a context will be had.

    Attributes:
        num_loaded: leading chunks whose KV is fetched; those behind are text.
        begin_s: the latest time to begin the forward, infinite without a deadline.
        feasible: whether the deadline will be met as far as is known.
        damage: expected, a token of context.
        finish_s: expected time of the first token.
    """

    num_loaded: int
    begin_s: float
    feasible: bool
    damage: float
    finish_s: float


class ContextStream:
    """State of one context that is being fetched. Its owner's thread only; O(chunks) a decision.

    Args:
        offers: the context's chunks, in order.
        costs: speeds.
        quality: what levels are worth.
        link: estimator of the link, which other contexts may share.
        now_s: time at which the request came.
        deadline_s: when the first token is due; None for as soon as possible at the default level.
        question_tokens: tokens behind the context, computed in any case.
    """

    def __init__(
        self,
        offers: Sequence[ChunkOffer],
        costs: StreamCosts,
        quality: QualityScale,
        link: LinkEstimator,
        *,
        now_s: float,
        deadline_s: float | None = None,
        question_tokens: int = 1,
    ) -> None:
        if not offers:
            raise ValueError("a context that is streamed has at least one chunk")
        self._offers = list(offers)
        self._costs = costs
        self._quality = quality
        self._link = link
        self._deadline_s = deadline_s
        self._question_tokens = question_tokens
        self._margin_s = 0.0 if deadline_s is None else _MARGIN_SHARE * (deadline_s - now_s)
        self._steps = quality.steps(offers[0].prefix_bytes)
        self._num_offered = len(offers)  # chunks behind it cannot be had
        self._have = [-1] * len(offers)
        self._refines_chunk = [True] * len(offers)  # until a refinement of it could not be had
        self._asked = [-1] * len(offers)
        self._in_flight: list[ChunkFetch] = []
        # Levels that arrived before what they refine, by chunk and first byte.
        self._early: dict[tuple[int, int], int] = {}
        # Of as many leading chunks.
        self._num_tokens = [0, *accumulate(offer.num_tokens for offer in offers)]
        self._refines = deadline_s is not None and costs.decode_s(self._num_tokens[-1]) <= (
            _REFINE_DECODE_SHARE * (deadline_s - now_s)
        )
        self._plan = self._decide(now_s)

    # ---- what a driver asks ----

    @property
    def levels(self) -> tuple[int, ...]:
        """Level that is there of each chunk, -1 for none."""
        return tuple(self._have)

    @property
    def plan(self) -> StreamPlan:
        """The present plan."""
        return self._plan

    @property
    def decodes_at_end(self) -> bool:
        """Whether chunks are decoded once the forward begins; else each as soon as it is there."""
        return self._refines

    @property
    def urgency(self) -> tuple[int, int]:
        """What it would fetch next, to be compared between contexts: (step of refinement, chunk).

        Lower goes first: every context's coarsest levels before anybody's refinements.
        """
        target = self._next_target()
        if target is None:
            return len(self._steps), 0
        chunk, step = target
        return (0 if self._deadline_s is None else step), chunk

    def next_fetch(self, now_s: float) -> ChunkFetch | None:
        """The next bytes to ask for; None when enough is asked for, for now or for good."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        self._plan = self._decide(now_s)
        fetch = self._candidate(now_s)
        if fetch is not None:
            self._asked[fetch.chunk] = fetch.level
            self._in_flight.append(fetch)
        return fetch

    def arrived(self, fetch: ChunkFetch, now_s: float) -> None:
        """Bytes that were asked for are there, verified. Fetches may overtake each other."""
        self._in_flight.remove(fetch)
        chunk = fetch.chunk
        self._early[chunk, fetch.start] = fetch.level
        while (end := (chunk, self._bytes_at(chunk, self._have[chunk]))) in self._early:
            self._have[chunk] = self._early.pop(end)
        self._plan = self._decide(now_s)

    def failed(self, fetch: ChunkFetch, now_s: float) -> None:
        """Bytes could not be had: what the chunk has stays; without any, text begins at it."""
        self._in_flight.remove(fetch)
        chunk = fetch.chunk
        self._asked[chunk] = self._have[chunk]
        if self._have[chunk] < 0:
            self._num_offered = min(self._num_offered, chunk)
        else:
            self._refines_chunk[chunk] = False
        self._plan = self._decide(now_s)

    def may_begin(self, now_s: float) -> bool:
        """Whether to begin the forward now, with what is there; what is in flight is given up."""
        plan = self._plan
        if any(level < self._quality.floor_level for level in self._have[: plan.num_loaded]):
            return False
        if now_s >= plan.begin_s:
            return True
        waits = any(fetch.chunk < plan.num_loaded for fetch in self._in_flight)
        return not waits and self._candidate(now_s) is None

    # ---- decision ----

    def _candidate(self, now_s: float) -> ChunkFetch | None:
        """The bytes to ask for next; None when none are wanted or they would come too late."""
        target = self._next_target()
        if target is None:
            return None
        chunk, step = target
        level, asked = self._level_for(chunk, step, now_s), self._asked[chunk]
        fetch = ChunkFetch(chunk, level, self._bytes_at(chunk, asked), self._bytes_at(chunk, level))
        if asked >= 0 and self._arrival_s(fetch, now_s) > self._plan.begin_s:
            return None
        return fetch

    def _bytes_at(self, chunk: int, level: int) -> int:
        return self._offers[chunk].prefix_bytes[level] if level >= 0 else 0

    def _next_target(self) -> tuple[int, int] | None:
        """(chunk, step): the lowest step that some wanted chunk was not asked for."""
        if self._deadline_s is None:
            steps = range(self._default_step, self._default_step + 1)
        else:
            steps = range(len(self._steps) if self._refines else 1)
        for step in steps:
            for chunk in range(self._plan.num_loaded):
                asked = self._asked[chunk]
                if asked < self._steps[step] and (asked < 0 or self._refines_chunk[chunk]):
                    return chunk, step
        return None

    @property
    def _default_step(self) -> int:
        """The first step that is no worse than the default level."""
        good = [at for at, level in enumerate(self._steps) if level >= self._quality.default_level]
        return good[0] if good else len(self._steps) - 1

    def _level_for(self, chunk: int, step: int, now_s: float) -> int:
        """Level to ask for: the step's, or the best that fits where there is no refining."""
        if self._refines or self._deadline_s is None:
            return self._steps[step]
        speed = self._link.bytes_per_s
        rest = range(chunk, self._plan.num_loaded)
        fits = self._steps[0]
        for level in self._steps[:] if speed else self._steps[: self._default_step + 1]:
            num_bytes = sum(self._offers[each].prefix_bytes[level] for each in rest)
            num_bytes += sum(fetch.num_bytes for fetch in self._in_flight)
            needed_s = num_bytes / speed if speed else 0.0
            tokens = sum(self._offers[each].num_tokens for each in rest)
            needed_s = max(needed_s, self._costs.decode_s(tokens))
            if now_s + self._costs.request_s + needed_s <= self._plan.begin_s:
                fits = level
        return fits

    def _arrival_s(self, fetch: ChunkFetch, now_s: float) -> float:
        speed = self._link.bytes_per_s
        if speed is None:
            return now_s
        ahead = sum(each.num_bytes for each in self._in_flight)
        return now_s + self._costs.request_s + (ahead + fetch.num_bytes) / speed

    def _decide(self, now_s: float) -> StreamPlan:
        """Chooses how many leading chunks to load; with a deadline the least damage that fits."""
        missing = self._missing()
        best = self._with(self._num_offered, now_s, missing)
        for num_loaded in range(self._num_offered - 1, -1, -1):
            plan = self._with(num_loaded, now_s, missing)
            if _is_better(plan, best, self._deadline_s):
                best = plan
        return best

    def _with(self, num_loaded: int, now_s: float, missing: dict[int, list[int]]) -> StreamPlan:
        """The plan with a number of leading chunks loaded; see `_missing`."""
        costs, before, total = self._costs, self._num_tokens[num_loaded], self._num_tokens[-1]
        after_s = costs.prefill_s(total - before + self._question_tokens, before)
        if num_loaded:
            last = self._offers[num_loaded - 1].num_tokens
            after_s += costs.decode_s(before if self._refines else last)
        step = self._default_step if self._deadline_s is None else 0
        num_bytes = missing[step][num_loaded]
        latency_s = costs.request_s if num_bytes else 0.0
        loaded_s = now_s + latency_s + self._seconds(num_bytes)
        if self._deadline_s is None:
            damage = self._quality.damage[self._steps[step]] * before / total
            return StreamPlan(num_loaded, float("inf"), True, damage, loaded_s + after_s)
        begin_s = self._deadline_s - after_s - self._margin_s
        if loaded_s > begin_s:
            damage = self._quality.damage[self._steps[0]] * before / total
            return StreamPlan(num_loaded, begin_s, False, damage, loaded_s + after_s)
        level, share = self._reachable(num_loaded, begin_s - now_s - latency_s, missing)
        damage = self._quality.damage[self._steps[level]]
        if level + 1 < len(self._steps):
            damage -= share * (damage - self._quality.damage[self._steps[level + 1]])
        finish_s = loaded_s if level + 1 == len(self._steps) else begin_s
        return StreamPlan(num_loaded, begin_s, True, damage * before / total, finish_s + after_s)

    def _reachable(
        self, num_loaded: int, left_s: float, missing: dict[int, list[int]]
    ) -> tuple[int, float]:
        """Step that all loaded chunks can reach in time, and the share of the next one."""
        before = 0.0
        for step in range(len(self._steps)):
            needed_s = self._seconds(missing[step][num_loaded])
            if needed_s > left_s and step:
                return step - 1, max(0.0, (left_s - before) / max(needed_s - before, 1e-12))
            before = needed_s
        return len(self._steps) - 1, 0.0

    def _missing(self) -> dict[int, list[int]]:
        """Bytes still to come, those in flight included: by step, and by number of leading chunks.

        Of all numbers at once: a decision looks at each, of thousands in a long prompt.
        """
        is_timed = self._deadline_s is not None
        steps = range(len(self._steps)) if is_timed else [self._default_step]
        pairs = list(zip(self._offers, self._have, strict=True))
        missing: dict[int, list[int]] = {}
        for step in steps:
            level = self._steps[step]
            missing[step] = [
                0,
                *accumulate(offer.bytes_between(have, level) for offer, have in pairs),
            ]
        return missing

    def _seconds(self, num_bytes: int) -> float:
        speed = self._link.bytes_per_s
        return num_bytes / speed if speed else 0.0


def _is_better(plan: StreamPlan, than: StreamPlan, deadline_s: float | None) -> bool:
    if deadline_s is None:
        return plan.finish_s < than.finish_s
    if plan.feasible != than.feasible:
        return plan.feasible
    if not plan.feasible:
        return plan.finish_s < than.finish_s
    return (plan.damage, plan.finish_s) < (than.damage, than.finish_s)
