"""Load or recompute, for the waiting requests of one server: the cost model at work.

`enter` decides, when a request enters the queue, how many of its pages are worth having; `learn`
does again when the remote store said what it has;
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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.policy.cost_model import Choice, CostModel, DiskQueue, Prefix, Verdict
from sglang_ext.tiers.store import KeySpace, PageStore, Plan
from sglang_ext.tiers.store.shared.pages import num_leading
from sglang_ext.tiers.store.types import Hashes

# A verdict, and a decision to go on waiting, are good for so long.
_JUDGE_AGAIN_S = _ASK_AGAIN_S = 0.001
_AFTER_ALL_OTHERS = 1 << 30  # priority of a probe's reads
# A request waits for the remote store's answer for this share of what all of its pages would save.
_ANSWER_SHARE = 0.25


@dataclass(frozen=True)
class Candidate:
    """What a waiting request could reuse.

    Attributes:
        space: namespace and adapter.
        hashes: u8 `[N, 32]`, its pages behind those on the device.
        max_quality: the worst that it may be given.
        device_tokens: leading tokens on the device.
        prompt_tokens: tokens of the whole prompt.
        remote_sizes: i64 `[N]`, bytes of those pages that the remote store has; None: none.
    """

    space: KeySpace
    hashes: Hashes
    max_quality: int
    device_tokens: int
    prompt_tokens: int
    remote_sizes: npt.NDArray[np.int64] | None = None


class _Moves(NamedTuple):
    """What would be moved for a request, on average."""

    page_bytes: float  # to be read, and to be decoded, for a page on disk
    decoded_bytes: float
    num_remote: int
    remote_page_bytes: float


@dataclass
class _Case:
    """A waiting request."""

    candidate: Candidate
    verdict: Verdict
    turn_at_s: float  # when the requests before it should be through
    compute_s: float  # what its own prefill should take
    moves: _Moves
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
        """A request enters the queue; returns what it should do about its pages elsewhere."""
        self.leave(handle)
        now_s = self._clock()
        verdict, moves = self._judge(candidate, self._ahead_s)
        reused = candidate.device_tokens + verdict.pages * self.page_tokens
        reused = min(reused, candidate.prompt_tokens - 1)
        compute_s = self.cost.prefill_s(candidate.prompt_tokens - reused, reused) or 0.0
        self._cases[handle] = _Case(
            candidate, verdict, now_s + self._ahead_s, compute_s, moves, now_s
        )
        self._ahead_s += compute_s
        if verdict.choice is not Choice.NONE:
            self._store.counters.add(f"cost_{verdict.choice.value}")
        self._note(handle, verdict)
        return verdict

    def learn(self, handle: Hashable, candidate: Candidate) -> None:
        """A waiting request's pages are known better, and are judged anew in its place."""
        case = self._cases.get(handle)
        if case is None:
            return
        was = case.verdict.choice
        self._judge_again(case, candidate)
        if was is Choice.NONE and case.verdict.choice is not Choice.NONE:
            self._store.counters.add(f"cost_{case.verdict.choice.value}")
        self._note(handle, case.verdict)

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
        case.candidate = candidate
        age_s = self._clock() - case.judged_at_s
        if case.verdict.choice is not Choice.NONE and age_s > _JUDGE_AGAIN_S:
            self._judge_again(case, candidate)
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
            ready, left, remote = 0, case.verdict.pages, case.moves.num_remote
        else:
            ready, left = max(0, plan.num_planned - plan.remaining), plan.remaining
            remote = plan.num_remote_left
        saving_s = self._saving_s(case.candidate, ready, left)
        if case.held_since_s is None:
            case.held_since_s, case.budget_s = now_s, saving_s
        if self.cost.is_worth_waiting(
            waited_s=now_s - case.held_since_s,
            budget_s=case.budget_s,
            saving_s=saving_s,
            read_s=self._moving_s(case, max(0, left - remote), remote),
            decoding=self._is_decoding(),
        ):
            case.asked_at_s = now_s
            return True
        self._store.counters.add("cost_gave_up")
        return False

    def answer_wait_s(self, candidate: Candidate, num_here: int) -> float:
        """How long a request, whose turn it is, should wait to hear what the remote store has.

        Args:
            candidate: the request.
            num_here: leading pages that are here anyway.
        """
        saving_s = self._saving_s(candidate, num_here, len(candidate.hashes) - num_here)
        if saving_s is None:
            return self.cost.unmeasured_wait_s
        return _ANSWER_SHARE * saving_s

    # ---- private ----

    def _judge_again(self, case: _Case, candidate: Candidate) -> None:
        now_s, case.candidate = self._clock(), candidate
        case.verdict, case.moves = self._judge(candidate, max(0.0, case.turn_at_s - now_s))
        case.judged_at_s = now_s

    def _judge(self, candidate: Candidate, turn_in_s: float) -> tuple[Verdict, _Moves]:
        """The verdict, and what it would move."""
        survey = self._store.survey(candidate.space, candidate.hashes, candidate.max_quality)
        num_here = len(survey.ready)
        fetched = np.empty(0, np.int64)
        if candidate.remote_sizes is not None:
            behind = candidate.remote_sizes[num_here:]
            fetched = behind[: num_leading(behind)]

        def padded(column: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
            return np.concatenate([column, np.zeros(len(fetched), np.bool_)])

        on_disk = padded(~survey.ready & ~survey.coming)
        length = np.zeros(len(on_disk), np.int64)
        length[:num_here] = survey.num_blocks.astype(np.int64) * BLOCK_BYTES
        length[~on_disk] = 0
        # A record that is smaller than its KV is coded; a raw one is as large, or larger.
        coded = on_disk & (length < self._kv_bytes)
        remote_bytes = np.concatenate([np.zeros(num_here, np.int64), fetched])
        prefix = Prefix(
            prompt_tokens=candidate.prompt_tokens,
            device_tokens=candidate.device_tokens,
            page_tokens=self.page_tokens,
            read_bytes=length,
            decode_bytes=np.where(coded, self._kv_bytes, 0),
            is_coming=padded(survey.coming),
            load_bytes_per_page=self._kv_bytes,
            remote_bytes=remote_bytes,
        )
        store = self._store
        verdict = self.cost.judge(prefix, store.disk_queue(), turn_in_s, store.fetch_queue())
        num, num_remote = max(1, int(on_disk.sum())), len(fetched)
        return verdict, _Moves(
            float(length.sum()) / num,
            float(prefix.decode_bytes.sum()) / num,
            num_remote,
            float(fetched.sum()) / max(1, num_remote),
        )

    def _saving_s(self, candidate: Candidate, ready: int, left: int) -> float | None:
        size = self.page_tokens
        there = min(candidate.device_tokens + ready * size, candidate.prompt_tokens - 1)
        more = min(left * size, candidate.prompt_tokens - 1 - there)
        return self.cost.saving_s(candidate.prompt_tokens, there, more)

    def _moving_s(self, case: _Case, on_disk: int, remote: int) -> float | None:
        """Seconds until the rest of a plan is there: both links work at once."""
        moves, store = case.moves, self._store
        read_s = self.cost.read_s(
            _until(store.disk_queue(), on_disk * moves.page_bytes, on_disk * moves.decoded_bytes)
        )
        fetch_s = self.cost.fetch_s(_until(store.fetch_queue(), remote * moves.remote_page_bytes))
        known = [seconds for seconds in (read_s, fetch_s) if seconds is not None]
        return max(known) if known else None

    def _begin_probe(self, case: _Case) -> None:
        """Reads a little of what is not worth loading, so that a faster disk is noticed."""
        self._end_probe()
        verdict, candidate = case.verdict, case.candidate
        if not verdict.probe_pages or self._probe is not None:
            return
        end, sizes = verdict.pages + verdict.probe_pages, candidate.remote_sizes
        self._probe = self._store.plan(
            candidate.space,
            candidate.hashes[verdict.pages : end],
            candidate.max_quality,
            _AFTER_ALL_OTHERS,
            remote_sizes=None if sizes is None else sizes[verdict.pages : end],
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


def _until(queue: DiskQueue, own_bytes: float, decoded_bytes: float = 0.0) -> DiskQueue:
    """What a link has to do until a plan is done: what is in flight, and the plan's own rest."""
    ahead = queue.stalled_bytes + int(own_bytes)
    return DiskQueue(
        min(queue.bytes_ahead, ahead), int(decoded_bytes), queue.stalled_bytes, queue.stalled_s
    )
