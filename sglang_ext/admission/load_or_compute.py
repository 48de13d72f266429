"""Decides of each waiting request which of its pages to load and which to compute anew.

Only with `--hier-kv-prefetch-policy cost`; `waiting.py` has the other policies. The formula is in
`tiers/policy/cost_model.py`. Requests of hybrid models are not judged: they wait for their pages up
to `--hier-kv-prefetch-timeout-ms`, as under `timeout`. `streaming/planner.py` decides how coded
pages come from a remote store.

Each of several ranks judges by speeds that it measured itself. In each of the scheduler's steps
they agree on the least number of pages that any of them would use (`WaitingRoom.limit`). A rank
whose limit changed judges the request again within it.

`enter` decides, when a request enters the queue, how many of its pages are worth having; `learn`
decides again when the remote store has answered;
`num_pages` gives that number when a plan is made, judged anew if old; `should_hold` decides at its
turn whether to go on waiting. What the decisions rest on comes from the page store (where pages
lie), its read meter (what is queued), and `CostModel` (how fast everything is).

`DramChoice` decides when a request is to run, of the pages that are in DRAM by then, and also where
there is neither a disk nor a remote store.

Scheduler's thread only. A call of `enter` or `learn` looks up the request's pages once, and so does
`num_pages` where it judges anew. `should_hold` is O(1), except where it first holds a request and
where it is about to give one up: there it looks the pages up, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.waiting_request import (
    DramShare,
    Estimate,
    Moves,
    ReusablePrefix,
    WaitingRequest,
)
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.policy.cost_model import (
    CostModel,
    LoadChoice,
    LoadDecision,
    Prefix,
    TransferBacklog,
)
from sglang_ext.tiers.policy.speed_estimators import QueuePace
from sglang_ext.tiers.store import PageStore, Plan
from sglang_ext.tiers.store.remote.remote_pages import num_leading
from sglang_ext.tiers.store.types import StoreCounters

# A verdict, and a decision to go on waiting, are reused for so many seconds.
_JUDGE_AGAIN_S = _ASK_AGAIN_S = 0.001
_AFTER_ALL_OTHERS = 1 << 30  # priority of a probe's reads
# The wait for the remote store's answer is at most this share of the time its pages would save.
_ANSWER_SHARE = 0.25


class DramChoice:
    """How many of the pages that a request has in DRAM are worth copying to the device.

    Args:
        cost: the model.
        counters: of the page store.
        page_tokens: P.
        kv_bytes_per_page: raw bytes of a page's KV.
    """

    def __init__(
        self, cost: CostModel, counters: StoreCounters, *, page_tokens: int, kv_bytes_per_page: int
    ) -> None:
        self._cost = cost
        self._counters = counters
        self._page_tokens = page_tokens
        self._kv_bytes = kv_bytes_per_page

    def num_worth(self, request: WaitingRequest, device_tokens: int, num_pages: int) -> int:
        """How many leading pages of DRAM to load; decided once for each such state of a request.

        So attempts to admit it do not differ by what was measured between them.

        Args:
            request: it is about to run.
            device_tokens: leading tokens that are on the device.
            num_pages: pages behind those that are in DRAM.
        """
        share = request.in_dram
        if share is None or (share.device_tokens, share.num_pages) != (device_tokens, num_pages):
            decision = self._cost.judge_dram(
                prompt_tokens=max(
                    request.prefix.prompt_tokens, device_tokens + num_pages * self._page_tokens
                ),
                device_tokens=device_tokens,
                num_pages=num_pages,
                page_tokens=self._page_tokens,
                page_bytes=self._kv_bytes,
            )
            share = request.in_dram = DramShare(device_tokens, num_pages, decision)
        return share.decision.pages

    def as_agreed(self, share: DramShare, device_tokens: int, num_pages: int) -> DramShare:
        """This rank's share, brought up to date with what all ranks agreed to load at a match.

        Args:
            share: the rank's own.
            device_tokens: leading tokens that are on the device by now.
            num_pages: how many pages behind those all ranks load.
        """
        num_came = (device_tokens - share.device_tokens) // self._page_tokens
        # Where the device has less than it had, what was agreed on is of no use at all.
        num_needless = share.num_pages if num_came < 0 else num_came
        return share._replace(num_needless=num_needless, loads=num_pages > 0)

    def admitted(self, request: WaitingRequest) -> None:
        """A request runs: counts what it computes though it is in DRAM."""
        share = request.in_dram
        if share is None or not share.num_left:
            return
        self._counters.add("cost_dram_left_requests")
        self._counters.add("cost_dram_left_pages", share.num_left)
        if share.is_probe:
            self._counters.add("cost_dram_probes")
        elif share.decision.is_probe or not share.decision.pages:
            self._cost.note_passed_over()


class LoadOrCompute:
    """Decisions about waiting requests; what it thinks of each is the request's `estimate`.

    Args:
        store: DRAM and disk.
        cost: the model.
        page_tokens: P.
        kv_bytes_per_page: raw bytes of a page's KV.
        is_decoding: whether other requests decode now.
        clock: seconds, monotonic.

    Attributes:
        num_waiting: requests that entered and did not leave.

    It has many methods because a request's way through the queue is one: each is a decision on it.
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
        self.num_waiting = 0
        self._ahead_s = 0.0  # sum of their `compute_s`
        self._num_left = 0  # since the start
        self._pace = QueuePace()
        self._probe: Plan | None = None
        store.set_return_rule(self._is_read_slower)

    # ---- coming and going ----

    def enter(self, request: WaitingRequest) -> LoadDecision:
        """A request enters the queue; returns what it should do about its pages elsewhere."""
        now_s, prefix = self._clock(), request.prefix
        turn_in_s = max(self._ahead_s, self._pace.turn_in_s(self.num_waiting, now_s))
        verdict, moves = self._judge(request, turn_in_s, self._has_others(0))
        reused = self._tokens_there(prefix, verdict.pages)
        compute_s = self.cost.prefill_s(prefix.prompt_tokens - reused, reused) or 0.0
        request.estimate = Estimate(
            verdict, moves, now_s + self._ahead_s, self._num_left + self.num_waiting, compute_s,
            now_s, request.num_usable,
        )  # fmt: skip
        self._ahead_s += compute_s
        self.num_waiting += 1
        if verdict.choice is not LoadChoice.NONE:
            self._store.counters.add(f"cost_{verdict.choice.value}")
        self._note(request, verdict)
        return verdict

    def learn(self, request: WaitingRequest) -> None:
        """The remote store has answered for a request: judges it again; its place stays."""
        estimate = request.estimate
        if estimate is None:
            return
        was = estimate.verdict.choice
        self._judge_again(request, estimate)
        if was is LoadChoice.NONE and estimate.verdict.choice is not LoadChoice.NONE:
            self._store.counters.add(f"cost_{estimate.verdict.choice.value}")
        self._note(request, estimate.verdict)

    def leave(self, request: WaitingRequest, *, admitted: bool = False) -> None:
        """A request leaves the queue, to run or not."""
        estimate, request.estimate = request.estimate, None
        if estimate is None:
            return
        self.num_waiting -= 1
        self._num_left += 1
        if admitted:
            now_s = self._clock()
            self._pace.admitted(now_s, self._held_s(request, estimate, now_s))
            if estimate.verdict.left_out_pages:
                self.cost.note_left_out()
                self._store.counters.add("cost_compute_probes")
        if not self.num_waiting:
            self._pace.rest()
        ahead_s = max(0.0, self._ahead_s - estimate.compute_s)
        self._ahead_s = ahead_s if self.num_waiting else 0.0

    def step(self) -> None:
        """Once a scheduler step: ends a probe that is done when no request waits. O(1).

        Its pages stay pinned until it is ended. While it still reads it goes on although nobody
        waits: the request that it was made for may have run at once.
        """
        if self._probe is not None and not self.num_waiting and self._probe.done:
            self._end_probe()

    def end_probe(self) -> None:
        """The queue is emptied: no probe stays."""
        self._end_probe()

    # ---- decisions ----

    def num_pages(self, request: WaitingRequest) -> int:
        """How many of a request's leading pages a plan that is made now should ask for.

        A probe is a plan, too, and the store lets a plan pin less of DRAM while there is another.
        So the probe is ended before the request's plan is made. A read that the probe has begun
        goes on to its end, and is measured.
        """
        num = self._num_worth(request)
        if self._probe is not None and (num or self._probe.done):
            self._end_probe()
        return num

    def planned(self, request: WaitingRequest) -> None:
        """A request's plan is made: a probe may read a little of what it leaves out."""
        if request.estimate is not None and (request.plan is None or not request.plan.short):
            self._begin_probe(request, request.estimate.verdict)

    def should_hold(self, request: WaitingRequest) -> bool:
        """Whether a request, whose turn it is, should wait for its pages.

        A request at the head of the queue whose plan may become longer (`awaits_room`) also waits
        for DRAM to have room for more of its pages. Where it has no plan, DRAM had no room for one.
        """
        plan, estimate = request.plan, request.estimate
        if estimate is None or estimate.verdict.choice is LoadChoice.RECOMPUTE:
            return False
        lacking = self._num_lacking(request, estimate)
        if plan is not None and plan.done and not plan.starved and not lacking:
            return False
        now_s = self._clock()
        if now_s - estimate.asked_at_s < _ASK_AGAIN_S:
            return True
        if plan is None or plan.starved:
            end = moving = estimate.verdict.pages
            ready, remote = 0, estimate.moves.num_remote
        else:
            end, moving = plan.num_planned + lacking, plan.remaining + lacking
            ready, remote = max(0, plan.num_planned - plan.remaining), plan.num_remote_left
        read_s = self._room_s(request)
        read_s += self._moving_s(estimate.moves, max(0, moving - remote), remote) or 0.0
        prefix = request.prefix
        saving_s = self._saving_s(prefix, ready, end - ready)
        is_first = estimate.held_since_s is None
        if is_first or not self._is_worth(estimate, saving_s, read_s, now_s):
            # Some of those that are there may be behind one that is not.
            pages = prefix.off_device[:ready]
            ready = self._store.ready_prefix(prefix.space, pages, prefix.max_quality)
            saving_s = self._saving_s(prefix, ready, end - ready)
        if is_first:
            estimate.held_since_s, estimate.budget_s = now_s, saving_s
        if self._is_worth(estimate, saving_s, read_s, now_s):
            estimate.asked_at_s = now_s
            return True
        self._store.counters.add("cost_gave_up")
        return False

    def answer_wait_s(self, request: WaitingRequest) -> float:
        """How long a request, whose turn it is, should wait to hear what the remote store has."""
        prefix, num_here = request.prefix, request.found.here
        saving_s = self._saving_s(prefix, num_here, len(prefix.off_device) - num_here)
        if saving_s is None:
            return self.cost.unmeasured_wait_s
        return _ANSWER_SHARE * saving_s

    # ---- private ----

    def _num_worth(self, request: WaitingRequest) -> int:
        num, estimate = request.num_usable, request.estimate
        if estimate is None:
            return num
        has_to_move = estimate.verdict.choice is not LoadChoice.NONE
        is_old = has_to_move and self._clock() - estimate.judged_at_s > _JUDGE_AGAIN_S
        if is_old or estimate.judged_pages != num:
            self._judge_again(request, estimate)
        verdict = estimate.verdict
        # If nothing has to be read, the plan asks for all pages, also those stored only later.
        return num if verdict.choice is LoadChoice.NONE else min(num, verdict.pages)

    def _is_worth(
        self, estimate: Estimate, saving_s: float | None, read_s: float, now_s: float
    ) -> bool:
        held_since_s = now_s if estimate.held_since_s is None else estimate.held_since_s
        return self.cost.is_worth_waiting(
            waited_s=now_s - held_since_s,
            budget_s=estimate.budget_s,
            saving_s=saving_s,
            read_s=read_s,
            decoding=self._is_decoding(),
            has_others=self._has_others(1),
        )

    def _has_others(self, num_own: int) -> bool:
        """Whether others decode or wait; `num_own` of the waiting ones are no others."""
        return self._is_decoding() or self.num_waiting > num_own

    def _held_s(self, request: WaitingRequest, estimate: Estimate, now_s: float) -> float:
        """For how long an admitted request was held for its pages.

        The time for which it waited for a place in a batch is not part of it. The scheduler asks
        again only when it has a place, so what is returned is at most the longest for which the
        request would have been held.
        """
        if estimate.held_since_s is None:
            return 0.0
        until_s = now_s if request.let_go_s is None else request.let_go_s
        # Without others nobody's pace is measured.
        limit_s = self.cost.longest_wait_s(estimate.budget_s, has_others=True)
        return min(max(0.0, until_s - estimate.held_since_s), limit_s)

    def _num_lacking(self, request: WaitingRequest, estimate: Estimate) -> int:
        """Pages that are worth their time and behind a plan that may become longer."""
        plan = request.plan
        if plan is None or not request.awaits_room:
            return 0
        wanted = min(plan.num_stored, self._store.max_lone_plan_pages)
        if estimate.verdict.choice is not LoadChoice.NONE:
            wanted = min(wanted, estimate.verdict.pages)
        return max(0, wanted - plan.num_planned)

    def _room_s(self, request: WaitingRequest) -> float:
        """Seconds until what makes room for a request is written; 0 where that is not known."""
        if not request.awaits_room:
            return 0.0
        return self.cost.write_s(self._store.bytes_until(request.room_mark or 0)) or 0.0

    def _judge_again(self, request: WaitingRequest, estimate: Estimate) -> None:
        now_s = self._clock()
        # As if those that came first left first; where they do not, it is off by a few places.
        num_ahead = max(0, estimate.num_left_at_turn - self._num_left)
        turn_in_s = max(estimate.turn_at_s - now_s, self._pace.turn_in_s(num_ahead, now_s))
        estimate.verdict, estimate.moves = self._judge(request, turn_in_s, self._has_others(1))
        estimate.judged_at_s, estimate.judged_pages = now_s, request.num_usable

    def _judge(
        self, request: WaitingRequest, turn_in_s: float, has_others: bool
    ) -> tuple[LoadDecision, Moves]:
        """The verdict, and what it would move."""
        wanted, sizes = request.prefix, request.remote_sizes()
        pages = wanted.off_device[: request.num_usable]
        survey = self._store.survey(wanted.space, pages, wanted.max_quality)
        num_here = len(survey.ready)
        fetched = np.empty(0, np.int64)
        if sizes is not None:
            behind = sizes[num_here : len(pages)]
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
            prompt_tokens=wanted.prompt_tokens,
            device_tokens=self._tokens_there(wanted, 0),
            page_tokens=self.page_tokens,
            read_bytes=length,
            decode_bytes=np.where(coded, self._kv_bytes, 0),
            is_coming=padded(survey.coming),
            load_bytes_per_page=self._kv_bytes,
            remote_bytes=remote_bytes,
        )
        store = self._store
        verdict = self.cost.judge(
            prefix, store.disk_queue(), turn_in_s, store.fetch_queue(), has_others=has_others
        )
        num, num_remote = max(1, int(on_disk.sum())), len(fetched)
        return verdict, Moves(
            float(length.sum()) / num,
            float(prefix.decode_bytes.sum()) / num,
            num_remote,
            float(fetched.sum()) / max(1, num_remote),
        )

    def _saving_s(self, prefix: ReusablePrefix, ready: int, left: int) -> float | None:
        there = self._tokens_there(prefix, ready)
        more = self._tokens_there(prefix, ready + left) - there
        return self.cost.saving_s(prefix.prompt_tokens, there, more)

    def _tokens_there(self, prefix: ReusablePrefix, num_pages: int) -> int:
        """Tokens that need not be computed with so many pages behind those on the device."""
        pages = (prefix.num_on_device + num_pages) * self.page_tokens
        return min(prefix.tokens_before + pages, prefix.prompt_tokens - 1)

    def _moving_s(self, moves: Moves, on_disk: int, remote: int) -> float | None:
        """Seconds until the rest of a plan is there: both links work at once."""
        store = self._store
        read_s = self.cost.read_s(
            _until(store.disk_queue(), on_disk * moves.page_bytes, on_disk * moves.decoded_bytes)
        )
        fetch_s = self.cost.fetch_s(_until(store.fetch_queue(), remote * moves.remote_page_bytes))
        known = [seconds for seconds in (read_s, fetch_s) if seconds is not None]
        return max(known) if known else None

    def _is_read_slower(self, num_before: int, num_bytes: npt.NDArray[np.int64]) -> bool:
        """Whether pages behind others are read in more time than they are computed in."""
        num_coded = int((num_bytes < self._kv_bytes).sum())
        return self.cost.computes_sooner(
            len(num_bytes) * self.page_tokens,
            num_before * self.page_tokens,
            int(num_bytes.sum()),
            num_coded * self._kv_bytes,
        )

    def _begin_probe(self, request: WaitingRequest, verdict: LoadDecision) -> None:
        """Reads a little of what is not worth loading, so that a faster disk is noticed."""
        if not verdict.probe_pages or self._probe is not None:
            return
        prefix, sizes = request.prefix, request.remote_sizes()
        end = verdict.pages + verdict.probe_pages
        self._probe = self._store.plan(
            prefix.space,
            prefix.off_device[verdict.pages : end],
            prefix.max_quality,
            _AFTER_ALL_OTHERS,
            remote_sizes=None if sizes is None else sizes[verdict.pages : end],
        )
        self._store.counters.add("cost_probes")

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._store.cancel_plan(self._probe)
            self._probe = None

    def _note(self, request: WaitingRequest, verdict: LoadDecision) -> None:
        if self._store.events.on and verdict.choice is not LoadChoice.NONE:
            self._store.events.note(
                "judged",
                rid=getattr(request.handle, "rid", str(request.handle)),
                choice=verdict.choice.value,
                num_pages=verdict.pages,
                expected_s=verdict.expected_s,
                recompute_s=verdict.recompute_s,
                read_s=verdict.read_s,
            )


def _until(queue: TransferBacklog, own_bytes: float, decoded_bytes: float = 0.0) -> TransferBacklog:
    """What a link has to do until a plan is done: what is in flight, and the plan's own rest."""
    ahead = queue.stalled_bytes + int(own_bytes)
    return TransferBacklog(
        min(queue.bytes_ahead, ahead), int(decoded_bytes), queue.stalled_bytes, queue.stalled_s
    )
