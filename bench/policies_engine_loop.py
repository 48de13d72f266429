"""The simulator's loop: arrivals, admission, prefill, decoding, reads from disk, in virtual time.

First come, first served. One prefill runs at a time and holds up decoding, as continuous batching
does (AttentionStore 4.2). The head of the queue is admitted when a place in the batch is free and
no prefill runs; what it can reuse is settled then, and if part of that lies on disk the head waits
for it while the others go on decoding.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any

import numpy as np

from bench.policies_engine_source import Source
from bench.policies_engine_store import Store
from bench.policies_engine_tally import Tally
from bench.policies_engine_tiers import Future
from bench.policies_types import Ids, Request, System
from sglang_ext.tiers.policy import PlacementPolicy

_ARRIVE, _READ = 0, 1
_NEVER_S = math.inf


class Simulator:
    """One run.

    Args:
        source: the requests.
        system: the machine.
        policy: decides; its rows are page ids.
        future: for Belady's optimum.
        lookahead: pages are fetched within the prefetch window, not at arrival.
        tally: takes the figures.
    """

    def __init__(
        self, source: Source, system: System, policy: PlacementPolicy, future: Future | None,
        *, lookahead: bool, tally: Tally,
    ) -> None:  # fmt: skip
        self._source = source
        self._system = system
        self._policy = policy
        self._future = future
        self._lookahead = lookahead
        self._tally = tally
        self.store = Store(system, policy, future)
        self.requests: list[Request] = []
        self.now_s = 0.0
        self._decoded_s = 0.0  # time in which decoding went on: no prefill ran
        self._sequence = 0
        self._events: list[tuple[float, int, int, int]] = []
        self._queue: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []  # by `_decoded_s` of the end
        self._unfetched: deque[Request] = deque()
        # By the first page that is not stored, and by number.
        self._missing: dict[int, dict[int, Request]] = {}
        self._waiting: set[int] = set()
        self._reading: Ids | None = None
        self._loading: tuple[Request, Ids, Ids] | None = None  # head, prefix, what it waits for
        self._loading_since_s = 0.0
        self._prefill: tuple[float, Request, Ids] | None = None

    def run(self) -> None:
        """Runs until everything is answered."""
        for time_s, key in self._source.starts():
            self._schedule(time_s, _ARRIVE, key)
        while True:
            event_s = self._events[0][0] if self._events else _NEVER_S
            prefill_s = self._prefill[0] if self._prefill else _NEVER_S
            answer_s = _NEVER_S
            if self._running and not self._prefill:
                answer_s = self.now_s + max(self._running[0][0] - self._decoded_s, 0.0)
            next_s = min(event_s, prefill_s, answer_s)
            if next_s == _NEVER_S:
                break
            self._advance(next_s)
            if prefill_s == next_s:
                self._end_prefill()
            elif answer_s == next_s:
                self._end_answer()
            else:
                _, kind, _, key = heapq.heappop(self._events)
                if kind == _ARRIVE:
                    self._arrive(key)
                else:
                    self._end_read()
            self._admit()
            self._fetch_ahead()
        if self._queue or self._loading:
            raise RuntimeError("The simulation ended with requests that were never admitted.")

    # ---- time ----

    def _schedule(self, time_s: float, kind: int, key: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_s, kind, self._sequence, key))

    def _advance(self, to_s: float) -> None:
        spent_s = to_s - self.now_s
        if self._prefill:
            self._tally.gpu_s += spent_s
        else:
            self._decoded_s += spent_s
            if self._running:
                self._tally.gpu_s += spent_s
        self.now_s = to_s

    # ---- events ----

    def _arrive(self, key: int) -> None:
        request = self._source.arrive(key, len(self.requests), self.now_s)
        self.requests.append(request)
        self._queue.append(request)
        self._unfetched.append(request)
        self._waiting.add(request.number)
        if self._future is not None:
            self._future.arrived(request.number, self.now_s)
        self._policy.leave_behind(request.left_ids, self.now_s)
        self._need(request)

    def _need(self, request: Request) -> None:
        """Tells the policy which stored pages a waiting request needs, and waits for the next."""
        path = request.prompt_ids
        num = self.store.stored_prefix(path)
        self._policy.enqueue(request.number, path[:num], self.now_s)
        if num < len(path):
            self._missing.setdefault(int(path[num]), {})[request.number] = request

    def _stored(self, pages: Ids) -> None:
        """New pages: who waited for one of them needs more of its path now."""
        if not self._missing:
            return
        for page in pages.tolist():
            for request in self._missing.pop(page, {}).values():
                if request.number in self._waiting:
                    self._need(request)

    def _lost(self) -> None:
        """Pages that waiting requests need were lost: these wait for them to be stored again."""
        numbers: list[Any] = self._policy.queue.take_bereft()
        for number in numbers:
            self._need(self.requests[number])

    def _save(self, request: Request) -> None:
        self._stored(self.store.save(request, self.now_s))
        self.store.make_room(self.now_s)
        self._lost()

    def _end_prefill(self) -> None:
        assert self._prefill is not None
        _, request, prefix = self._prefill
        self._prefill = None
        self.store.release(prefix)
        self._tally.first_token(request, self.now_s)
        if not self._source.stores_answers:
            self._save(request)
        end_s = self._decoded_s + request.output_tokens / self._system.decode_tokens_per_s
        heapq.heappush(self._running, (end_s, request.number, request))

    def _end_answer(self) -> None:
        _, _, request = heapq.heappop(self._running)
        self.store.stop(self._context_pages(request))
        if self._source.stores_answers:
            self._save(request)
        self._tally.answered(request, self.now_s)
        following = self._source.done(request, self.now_s)
        if following is not None:
            self._schedule(following[0], _ARRIVE, following[1])

    def _end_read(self) -> None:
        assert self._reading is not None
        pages, self._reading = self._reading, None
        self.store.promoted(pages)
        if self._loading is None:
            return
        request, prefix, missing = self._loading
        missing = missing[~np.isin(missing, pages)]
        if len(missing):
            self._loading = (request, prefix, missing)
            self._read(missing)
        else:
            self._loading = None
            self._tally.waited_for_load(request, self.now_s - self._loading_since_s)
            self._start_prefill(request, prefix)

    # ---- admission ----

    def _context_pages(self, request: Request) -> int:
        return -(-(request.prompt_tokens + request.output_tokens) // self._system.page_tokens)

    def _admit(self) -> None:
        if self._prefill or self._loading or not self._queue:
            return
        request = self._queue[0]
        size = self._context_pages(request)
        if len(self._running) >= self._system.batch or not self.store.device_has_room(size):
            return
        queue_length = len(self._queue)
        self._queue.popleft()
        self._waiting.discard(request.number)
        path = request.prompt_ids
        prefix = path[: self.store.stored_prefix(path)]
        self.store.hold(prefix)
        self._policy.leave(request.number)
        if self._future is not None:
            self._future.admitted(request.number, self.now_s)
        on_device = self.store.on_device(prefix)
        on_disk = self.store.on_disk(prefix)
        reusable = max(request.history_pages, self.store.seen_prefix(path))
        self._tally.admitted(
            request, len(prefix), reusable, int(on_device.sum()), len(on_disk), queue_length
        )
        self.store.run(size, self.now_s)
        if not len(on_disk):
            self._start_prefill(request, prefix)
            return
        self._loading = (request, prefix, on_disk)
        self._loading_since_s = self.now_s
        if self._reading is None:
            self._read(on_disk)

    def _start_prefill(self, request: Request, prefix: Ids) -> None:
        system = self._system
        reused = self._tally.reused_tokens_of(request, len(prefix))
        compute_s = (request.prompt_tokens - reused) / system.prefill_tokens_per_s
        from_host = len(prefix) - int(self.store.on_device(prefix).sum())
        load_s = from_host * system.page_bytes / (system.dram_gb_s * 1e9)
        took_s = max(compute_s, load_s) if system.overlap_load else compute_s + load_s
        self._tally.prefilled(request, took_s)
        self._prefill = (self.now_s + took_s, request, prefix)

    # ---- reads from disk ----

    def _read(self, pages: Ids) -> None:
        """Starts the one read from disk that is under way at a time."""
        self.store.promote(pages, self.now_s, spare=0)
        self._start_read(pages)

    def _start_read(self, pages: Ids) -> None:
        self._reading = pages
        read_s = len(pages) * self._system.page_bytes / (self._system.disk_gb_s * 1e9)
        wait_s = self.store.writes_behind_s(self.now_s)
        self._schedule(self.now_s + wait_s + read_s, _READ, 0)

    def _fetch_ahead(self) -> None:
        """Starts the read for the first request that has not been fetched and may be."""
        if not self.store.has_disk:
            return
        while self._reading is None and self._unfetched:
            request = self._unfetched[0]
            if request.number not in self._waiting:
                self._unfetched.popleft()
                continue
            spare: int | None = None
            if self._lookahead:
                window = self._policy.window(self.store.window_pages)
                if request.number > window[-1]:  # type: ignore[operator]
                    return
                # It must not push out what is needed before it.
                spare = request.number - self._queue[0].number + 1
            self._unfetched.popleft()
            path = request.prompt_ids
            pages = self.store.on_disk(path[: self.store.stored_prefix(path)])
            if len(pages) and self.store.promote(pages, self.now_s, spare=spare):
                self._start_read(pages)
