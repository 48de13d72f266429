"""The simulator's loop: arrivals, admission, prefill, decoding and the disk, in virtual time.

First come, first served, but that a request that is held for its pages holds up nobody: when a
place in the batch is free and no prefill runs, the waiting requests are asked for in their order,
in each step of the scheduler, and the first that the waiting room lets go is admitted, as SGLang's
scheduler does. How long one can be passed over is the waiting room's to say, as in a server. One
prefill runs at a time and holds up decoding, as continuous batching does (AttentionStore 4.2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from sglang_ext.simulator.prefill import chunks_of
from sglang_ext.simulator.requests import Store
from sglang_ext.simulator.source import Source
from sglang_ext.simulator.tally import Tally
from sglang_ext.simulator.types import Request, System
from sglang_ext.tiers.policy import PolicyConfig

_POLL_S = 0.02  # how often the scheduler looks at the queue while it holds all of it back
# In a row, but while something is on its way between DRAM and disk: of a machine that is
# scaled down with its traffic, one prompt may take the disk an hour.
_MAX_POLLS = 100_000


class Simulator:
    """One run.

    Args:
        source: the requests.
        system: the machine.
        placement: settings of the store's policy; None for none.
        tally: takes the figures.
        on_admitted: is told after each admission how many there were.
    """

    def __init__(
        self, source: Source, system: System, placement: PolicyConfig | None, tally: Tally,
        on_admitted: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._source = source
        self._system = system
        self._tally = tally
        self._on_admitted = on_admitted
        self.store = Store(system, placement, max(source.num_pages, 1))
        self.requests: list[Request] = []
        self.admitted: list[int] = []  # numbers, in order
        self.num_waiting: list[int] = []  # at each admission, in order
        self.saved: list[list[int]] = []  # at each admission: who was saved since the last
        self._saved: list[int] = []  # since the last admission
        self.now_s = 0.0
        self._decoded_s = 0.0  # time in which decoding went on: no prefill ran
        self._arrivals: list[tuple[float, int, int]] = []  # with a number that breaks ties
        self._num_scheduled = 0
        self._order: list[int] = []  # numbers of what waits
        self._changed = False  # the queue, or what is stored, since the scheduler's last step
        self._running: list[tuple[float, int, Request]] = []  # by `_decoded_s` of the end
        self._prefill: Request | None = None
        self._prefill_steps: Iterator[float] = iter(())
        self._prefill_step_s = math.inf  # when the next of them is due
        self._head: tuple[int, int] | None = None  # number, and pages in DRAM at its turn
        self._idle_from_s: float | None = None  # since then all that wait are held
        self._num_polls = 0  # since then

    def run(self) -> None:
        """Runs until everything is answered."""
        for time_s, key in self._source.starts():
            self._schedule(time_s, key)
        try:
            while (next_s := self._next_s()) < math.inf:
                self._advance(next_s)
                self._do_due()
                if self._changed or self._may_prefill:
                    self.store.step(self._order)
                    self._changed = False
                if self._may_prefill:
                    self._admit_one()
        finally:
            self._counters = self.store.counters()
            self.store.close()
        if self._order:
            raise RuntimeError("The simulation ended with requests that were never admitted.")

    def counters(self) -> dict[str, float]:
        """What the store counted; after `run`."""
        return self._counters

    # ---- time ----

    def _schedule(self, time_s: float, key: int) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._arrivals, (time_s, self._num_scheduled, key))

    def _answer_s(self) -> float:
        if not self._running or self._prefill:
            return math.inf
        return self.now_s + max(self._running[0][0] - self._decoded_s, 0.0)

    def _next_s(self) -> float:
        """When something happens next."""
        arrival_s = self._arrivals[0][0] if self._arrivals else math.inf
        poll_s = self.now_s + _POLL_S if self._idle_from_s is not None else math.inf
        times_s = (arrival_s, self._prefill_step_s, self._answer_s(), self.store.next_s(), poll_s)
        return min(times_s)

    def _advance(self, to_s: float) -> None:
        spent_s = to_s - self.now_s
        if self._prefill:
            self._tally.gpu_s += spent_s
        else:
            self._decoded_s += spent_s
            if self._running:
                self._tally.gpu_s += spent_s
        self.now_s = to_s
        self.store.set_time(to_s)
        if self._running and not self._prefill:
            self.store.decoded()

    # ---- events ----

    def _do_due(self) -> None:
        """One thing that is due now, and whatever the disk has done."""
        self.store.run_due()
        if self._prefill and self._prefill_step_s <= self.now_s:
            self._go_on_with_prefill(self._prefill)
        elif self._answer_s() <= self.now_s:
            self._end_answer(heapq.heappop(self._running)[2])
        elif self._arrivals and self._arrivals[0][0] <= self.now_s:
            self._arrive(heapq.heappop(self._arrivals)[2])

    def _arrive(self, key: int) -> None:
        request = self._source.arrive(key, len(self.requests), self.now_s)
        self.requests.append(request)
        self._order.append(request.number)
        self.store.arrive(request)
        self._changed = True

    def _go_on_with_prefill(self, request: Request) -> None:
        """A step of it: a chunk of the prompt ends, or begins."""
        took_s = next(self._prefill_steps, None)
        if took_s is None:
            self._prefill_step_s = math.inf
            self._end_prefill(request)
        else:
            self._prefill_step_s = self.now_s + took_s
            self._changed = True

    def _end_prefill(self, request: Request) -> None:
        self._prefill = None
        self.store.prefilled(request)
        self._tally.first_token(request, self.now_s)
        self._saved.append(request.number)
        end_s = self._decoded_s + request.output_tokens / self._system.decode_tokens_per_s
        heapq.heappush(self._running, (end_s, request.number, request))
        self._changed = True

    def _end_answer(self, request: Request) -> None:
        self.store.save_answer(request)
        self._tally.answered(request, self.now_s)
        following = self._source.done(request, self.now_s)
        if following is not None:
            self._schedule(*following)
        self._changed = True

    # ---- admission ----

    @property
    def _may_prefill(self) -> bool:
        """Whether somebody waits and the device could run it."""
        if self._prefill or not self._order:
            return False
        return len(self._running) < self._system.batch

    def _admit_one(self) -> None:
        """Asks for the waiting requests in their order, and admits the first that is let go."""
        head = self._order[0]
        if self._head is None or self._head[0] != head:
            self._head = (head, self.store.num_in_dram(self.requests[head]))
        for number in self._order:
            if self.store.may_admit(self.requests[number]):
                self._admit(self.requests[number])
                return
        if self._idle_from_s is None:
            self._idle_from_s = self.now_s
        if self._num_polls >= _MAX_POLLS and math.isinf(self.store.next_s()):
            raise RuntimeError(f"Of {len(self._order)} waiting requests none was ever let go.")
        self._num_polls += 1

    def _admit(self, request: Request) -> None:
        """A request runs; one that goes ahead of the head had all that it loads in DRAM."""
        self.admitted.append(request.number)
        self.num_waiting.append(len(self._order))
        self.saved.append(self._saved)
        self._saved = []
        self._order.remove(request.number)
        self._changed = True
        hits = self.store.admit(request)
        reusable = max(request.history_pages, self.store.seen_prefix(request.prompt_ids))
        assert self._head is not None
        early = self._head[1] if request.number == self._head[0] else hits
        self._tally.admitted(request, hits, reusable, max(hits - early, 0), self.num_waiting[-1])
        idle_from_s = self.now_s if self._idle_from_s is None else self._idle_from_s
        self._tally.waited_for_load(request, self.now_s - idle_from_s)
        self._idle_from_s, self._num_polls = None, 0
        self._start_prefill(request, hits)
        if self._on_admitted is not None:
            self._on_admitted(len(self.num_waiting))

    def _start_prefill(self, request: Request, hits: int) -> None:
        system = self._system
        reused = self._tally.reused_tokens_of(request, hits)
        chunks = chunks_of(request.prompt_tokens, reused, system.chunk_tokens, system.page_tokens)
        load_s = hits * system.page_bytes / (system.dram_gb_s * 1e9)
        first_s, *others_s = (each.num_tokens / system.prefill_tokens_per_s for each in chunks)
        first_s = max(first_s, load_s) if system.overlap_load else first_s + load_s
        self._tally.prefilled(request, first_s + sum(others_s))
        self._prefill = request
        self._prefill_steps = self.store.prefill(request, chunks, load_s, [first_s, *others_s])
        self._go_on_with_prefill(request)
