"""Load or recompute, for the waiting requests of one server: the cost model at work.

`enter` decides, when a request enters the queue, how many of its pages are worth having;
`num_pages` says so whenever a plan is made, from how things are then; `should_hold` decides at its
turn whether to go on waiting. What the decisions rest on comes from the page store (where pages
lie), its read meter (what is queued), and `CostModel` (how fast everything is).

Scheduler's thread only. `should_hold` is O(1); the others look up the request's pages once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.policy.cost_model import Choice, CostModel, DiskQueue, Prefix, Verdict
from sglang_ext.tiers.store import KeySpace, PageStore, Plan
from sglang_ext.tiers.store.types import Hashes

# A verdict, and a decision to go on waiting, are good for so long.
_JUDGE_AGAIN_S = _ASK_AGAIN_S = 0.001
_AFTER_ALL_OTHERS = 1 << 30  # priority of a probe's reads


@dataclass(frozen=True)
class Candidate:
    """What a waiting request could reuse.

    Attributes:
        space: namespace and adapter.
        hashes: u8 `[N, 32]`, its pages behind those on the device.
        max_quality: the worst that it may be given.
        device_tokens: leading tokens on the device.
        prompt_tokens: tokens of the whole prompt.
    """

    space: KeySpace
    hashes: Hashes
    max_quality: int
    device_tokens: int
    prompt_tokens: int


@dataclass
class _Case:
    """A waiting request."""

    candidate: Candidate
    verdict: Verdict
    turn_at_s: float  # when the requests before it should be through
    compute_s: float  # what its own prefill should take
    page_bytes: float  # mean bytes to be read, and to be decoded, for a page on disk
    decoded_bytes: float
    judged_at_s: float
    held_since_s: float | None = None
    budget_s: float | None = None
    asked_at_s: float = -math.inf  # when it was last found worth waiting


class LoadOrCompute:
    """Decisions about waiting requests, by the requests' handles.

    Args:
        store: DRAM and disk.
        cost: the model.
        page_tokens: P.
        kv_bytes_per_page: raw bytes of a page's KV.
        is_decoding: whether other requests decode now.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: PageStore,
        cost: CostModel,
        *,
        page_tokens: int,
        kv_bytes_per_page: int,
        is_decoding: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = cost
        self._store = store
        self.page_tokens = page_tokens
        self._kv_bytes = kv_bytes_per_page
        self._is_decoding = is_decoding
        self._clock = clock
        self._cases: dict[Hashable, _Case] = {}
        self._ahead_s = 0.0  # sum of their `compute_s`
        self._probe: Plan | None = None

    # ---- coming and going ----

    def enter(self, handle: Hashable, candidate: Candidate) -> Verdict:
        """A request enters the queue; returns what it should do about its pages on disk."""
        self.leave(handle)
        now_s = self._clock()
        verdict, page_bytes, decoded_bytes = self._judge(candidate, self._ahead_s)
        reused = candidate.device_tokens + verdict.pages * self.page_tokens
        reused = min(reused, candidate.prompt_tokens - 1)
        compute_s = self.cost.prefill_s(candidate.prompt_tokens - reused, reused) or 0.0
        self._cases[handle] = _Case(
            candidate, verdict, now_s + self._ahead_s, compute_s, page_bytes, decoded_bytes, now_s
        )
        self._ahead_s += compute_s
        if verdict.choice is not Choice.NONE:
            self._store.counters.add(f"cost_{verdict.choice.value}")
        self._note(handle, verdict)
        return verdict

    def leave(self, handle: Hashable) -> None:
        """A request leaves the queue; unknown ones are ignored."""
        case = self._cases.pop(handle, None)
        if case is not None:
            self._ahead_s = max(0.0, self._ahead_s - case.compute_s) if self._cases else 0.0

    def leave_all(self) -> None:
        """Every request leaves, and no probe stays."""
        self._cases.clear()
        self._ahead_s = 0.0
        self._end_probe(always=True)

    # ---- decisions ----

    def num_pages(self, handle: Hashable, candidate: Candidate) -> int:
        """How many of a request's leading pages a plan that is made now should ask for."""
        num = len(candidate.hashes)
        case = self._cases.get(handle)
        if case is None:
            return num
        now_s, case.candidate = self._clock(), candidate
        if case.verdict.choice is not Choice.NONE and now_s - case.judged_at_s > _JUDGE_AGAIN_S:
            turn_in_s = max(0.0, case.turn_at_s - now_s)
            case.verdict, case.page_bytes, case.decoded_bytes = self._judge(
                case.candidate, turn_in_s
            )
            case.judged_at_s = now_s
        self._begin_probe(case)
        # Where nothing has to be read all is asked for, pages that come to be stored among them.
        return num if case.verdict.choice is Choice.NONE else min(num, case.verdict.pages)

    def should_hold(self, handle: Hashable, plan: Plan | None) -> bool:
        """Whether a request, whose turn it is, should wait for its pages.

        Args:
            handle: the request.
            plan: brings them; None while there is no room in DRAM for one.
        """
        case = self._cases.get(handle)
        if case is None or case.verdict.choice is Choice.RECOMPUTE:
            return False
        if plan is not None and plan.done and not plan.starved:
            return False
        now_s = self._clock()
        if now_s - case.asked_at_s < _ASK_AGAIN_S:
            return True
        if plan is None or plan.starved:
            ready, left = 0, case.verdict.pages
        else:
            ready, left = max(0, len(plan.rows) - plan.remaining), plan.remaining
        saving_s = self._saving_s(case.candidate, ready, left)
        if case.held_since_s is None:
            case.held_since_s, case.budget_s = now_s, saving_s
        if self.cost.is_worth_waiting(
            waited_s=now_s - case.held_since_s,
            budget_s=case.budget_s,
            saving_s=saving_s,
            read_s=self.cost.read_s(self._queue_until(case, left)),
            decoding=self._is_decoding(),
        ):
            case.asked_at_s = now_s
            return True
        self._store.counters.add("cost_gave_up")
        return False

    # ---- private ----

    def _judge(self, candidate: Candidate, turn_in_s: float) -> tuple[Verdict, float, float]:
        """The verdict, and mean bytes to read and to decode of a page on disk."""
        survey = self._store.survey(candidate.space, candidate.hashes, candidate.max_quality)
        on_disk = ~survey.ready & ~survey.coming
        length = np.where(on_disk, survey.num_blocks, 0).astype(np.int64) * BLOCK_BYTES
        # A record that is smaller than its KV is coded; a raw one is as large, or larger.
        coded = on_disk & (length < self._kv_bytes)
        prefix = Prefix(
            prompt_tokens=candidate.prompt_tokens,
            device_tokens=candidate.device_tokens,
            page_tokens=self.page_tokens,
            read_bytes=length,
            decode_bytes=np.where(coded, self._kv_bytes, 0),
            is_coming=survey.coming,
            load_bytes_per_page=self._kv_bytes,
        )
        verdict = self.cost.judge(prefix, self._store.disk_queue(), turn_in_s)
        num = max(1, int(on_disk.sum()))
        return verdict, float(length.sum()) / num, float(prefix.decode_bytes.sum()) / num

    def _saving_s(self, candidate: Candidate, ready: int, left: int) -> float | None:
        size = self.page_tokens
        there = min(candidate.device_tokens + ready * size, candidate.prompt_tokens - 1)
        more = min(left * size, candidate.prompt_tokens - 1 - there)
        return self.cost.saving_s(candidate.prompt_tokens, there, more)

    def _queue_until(self, case: _Case, left: int) -> DiskQueue:
        """What the disk has to do until a plan is done: what is in flight, and its own rest."""
        queue = self._store.disk_queue()
        ahead = queue.stalled_bytes + int(left * case.page_bytes)
        return DiskQueue(
            min(queue.bytes_ahead, ahead),
            int(left * case.decoded_bytes),
            queue.stalled_bytes,
            queue.stalled_s,
        )

    def _begin_probe(self, case: _Case) -> None:
        """Reads a little of what is not worth loading, so that a faster disk is noticed."""
        self._end_probe()
        verdict, candidate = case.verdict, case.candidate
        if not verdict.probe_pages or self._probe is not None:
            return
        end = verdict.pages + verdict.probe_pages
        self._probe = self._store.plan(
            candidate.space,
            candidate.hashes[verdict.pages : end],
            candidate.max_quality,
            _AFTER_ALL_OTHERS,
        )
        self._store.counters.add("cost_probes")

    def _end_probe(self, *, always: bool = False) -> None:
        if self._probe is not None and (self._probe.done or always):
            self._store.cancel_plan(self._probe)
            self._probe = None

    def _note(self, handle: Hashable, verdict: Verdict) -> None:
        if self._store.events.on and verdict.choice is not Choice.NONE:
            self._store.events.note(
                "judged",
                rid=getattr(handle, "rid", str(handle)),
                choice=verdict.choice.value,
                num_pages=verdict.pages,
                expected_s=verdict.expected_s,
                recompute_s=verdict.recompute_s,
                read_s=verdict.read_s,
            )
