"""The threads of coded fetches: two keep the link busy, one decodes and publishes.

Where nothing is worth fetching the first two measure link and decoder now and then (`probe`).

A context is one waiting request's pages. The planner (`sglang_ext.streaming`) says which bytes come
next, at which level, and when the forward should begin; `LinkShare` whose turn it is. A page is
published once, whole, at the level that it has then. What the planner leaves out is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.coded_remote.link import LinkMeter
from sglang_ext.coded_remote.lookup import Finder, runs_of
from sglang_ext.coded_remote.probe import Probe, Prober
from sglang_ext.coded_remote.publish import Publisher
from sglang_ext.coded_remote.run import FetchedSpan, Partial, Speeds
from sglang_ext.coded_remote.stream_context import Context, Decode, Job
from sglang_ext.coded_remote.transfer import Part, read_parts
from sglang_ext.streaming import LinkEstimator, LinkShare
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.remote.coded_remote import Lookup

failures = FailureLog(logging.getLogger(__name__))

_NUM_FETCHERS = 2
_MAX_HELD_BYTES = 256 << 20
_IDLE_S = 0.02  # the longest sleep while a context may be given up or become due
_FIRST_DECODE_BYTES_PER_S = 1e9  # until some was measured


class RemoteStreams:
    """Fetches and publishes the pages of any number of contexts. Thread-safe.

    It has many methods because its threads share the contexts, under one lock.
    """

    def __init__(
        self,
        books: Books,
        remote: RemoteStore,
        finder: Finder,
        publisher: Publisher,
        prefill_s: Callable[[int, int], float | None],
        slo_s: float | None,
    ) -> None:
        """Starts the threads.

        Args:
            books: the store's books.
            remote: the shared store.
            finder: looks up what it has.
            publisher: decodes into DRAM.
            prefill_s: seconds to compute tokens behind others; None while it is not known.
            slo_s: time to the first token that is aimed at; None for as soon as possible.
        """
        self._table, self._book, self._remote = books.table, books.remote, remote
        self._finder, self._publisher = finder, publisher
        self._prober = Prober(publisher, self._table.arena.slot_bytes)
        self._prefill_s, self._slo_s = prefill_s, slo_s
        self._lock = threading.Condition()
        # All guarded by _lock.
        self._new: deque[Context] = deque()  # to be looked up
        self._contexts: list[Context] = []
        self._active: set[tuple[int, bytes]] = set()  # keys of contexts
        self._counted_us: dict[str, int] = {}
        self._parked: list[Context] = []  # wait for a context that brings the same pages
        self._share = LinkShare(_NUM_FETCHERS)
        self._link = LinkMeter()
        self._decoding = LinkEstimator(
            64e6, prior_bytes_per_s=_FIRST_DECODE_BYTES_PER_S, prior_bytes=1e5
        )
        self._closing = False
        loops = [self._fetch_loop] * _NUM_FETCHERS + [self._decode_loop]
        self._threads = [
            threading.Thread(target=loop, name=f"hier-kv-stream-{number}", daemon=True)
            for number, loop in enumerate(loops)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, lookup: Lookup, done: Callable[[], None]) -> None:
        """Begins to bring a request's pages. Does not block."""
        context = Context(lookup, done)
        if self._slo_s is not None:
            context.deadline_s = lookup.asked_s + self._slo_s
        with self._lock:
            if not self._closing:
                self._new.append(context)
                self._lock.notify_all()
                return
        done()

    def close(self) -> None:
        """Ends the threads after what is in their hands; contexts end with what they have."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(timeout=15.0)
        with self._lock:
            left = [*self._contexts, *self._new, *self._parked]
            self._contexts, self._parked = [], []
            self._new.clear()
        for context in left:
            context.done()

    def _safely(self, choose: Callable[[], Any]) -> Any:
        """Makes a decision; an error in one costs the contexts and not the thread."""
        try:
            return choose()
        except Exception:
            self._table.counters.add("remote_failures")
            failures.exception("hier-kv: fetches from the remote store are given up")
            for context in list(self._contexts):
                self._end(context)
            return None

    # ---- the link ----

    def _fetch_loop(self) -> None:
        while True:
            with self._lock:
                work: Context | Job | Probe | None = self._safely(self._next_work)
                while work is None and not self._closing:
                    self._lock.wait(_IDLE_S if self._contexts else None)
                    work = self._safely(self._next_work)
                if work is None or self._closing:
                    return
            if isinstance(work, Job):
                self._fetch(work)
            elif isinstance(work, Probe):
                self._run_probe(work)
            else:
                self._look_up(work)

    def _next_work(self) -> Context | Job | Probe | None:
        """The caller holds the lock."""
        while self._new:
            context = self._new.popleft()
            if self._may_look_up(context):
                return context
        now_s = time.monotonic()
        taken = None if self._is_backed_up() else self._share.next_fetch(now_s)
        self._link.tick(now_s, needed=self._is_needed())
        if taken is None:
            probe = self._prober.take(now_s) if self._link.is_idle else None
            if probe is not None:
                self._link.began()
            return probe
        owner, fetch = taken
        assert isinstance(owner, Context)
        assert owner.run is not None
        self._link.began()
        return Job(owner, owner.run, fetch)

    def _is_backed_up(self) -> bool:
        """Whether so much waits for the decoder that more would only take memory."""
        runs = [context.run for context in self._contexts if context.run is not None]
        # Who decodes at the end waits for bytes first, and they are few.
        held = sum(run.held_bytes for run in runs if not run.stream.decodes_at_end)
        return held > _MAX_HELD_BYTES

    def _is_needed(self) -> bool:
        return any(context.run is not None and not context.begins for context in self._contexts)

    def _may_look_up(self, context: Context) -> bool:
        """Holds a context back while another one brings some of its pages."""
        if self._active & context.keys:
            self._parked.append(context)
            return False
        self._active |= context.keys
        self._contexts.append(context)
        return True

    def _look_up(self, context: Context) -> None:
        lookup, pages, first = context.lookup, [], context.lookup.num_known
        try:
            rest = lookup.hashes[first:]
            there = self._book.adopt(lookup.plan, lookup.space, rest, lookup.max_quality)
            first += there
            lookup.plan.first_remote = lookup.num_known
            lookup.plan.num_remote = there if context.waited else 0
            if first < len(lookup.hashes) and not lookup.plan.cancelled:
                pages = self._finder.find(lookup.space, lookup.hashes, lookup.max_quality, first)
        except Exception:
            self._table.counters.add("remote_failures")
            failures.exception("hier-kv: a remote store could not be asked for pages")

        def go_on() -> None:
            self._brought(context, lookup.num_known, first)
            context.runs.extend(runs_of(pages))
            self._begin_run(context)

        with self._lock:
            self._safely(go_on)
            self._lock.notify_all()

    def _begin_run(self, context: Context) -> None:
        """Begins a context's next stretch, or ends it. The caller holds the lock."""
        if context not in self._contexts:
            return  # given up meanwhile
        if not context.runs or context.lookup.plan.cancelled or self._closing:
            self._end(context)
            return
        pages = context.runs.popleft()
        self._link.size(sum(page.sizes[-1] for page in pages[:24]))
        speeds = Speeds(
            self._table.arena.slot_bytes, self._decoding.bytes_per_s or 1.0, self._prefill_s
        )
        now_s = time.monotonic()
        context.begins = False
        context.run = FetchedSpan(
            pages,
            self._link.estimator,
            speeds,
            now_s=now_s,
            deadline_s=context.deadline_s,
            pages_behind=context.lookup.num_pages - pages[-1].number - 1,
        )
        self._share.add(context, context.run.stream)

    def _fetch(self, job: Job) -> None:
        parts: list[Part] | None = None
        good: list[ByteArray] = []
        try:
            parts = job.run.parts(job.fetch)
            good = read_parts(self._remote, parts, self._count_bytes)
        except Exception:
            self._table.counters.add("remote_failures")
            failures.exception("hier-kv: pages could not be fetched; they are computed again")
        with self._lock:
            self._share.done()
            self._safely(lambda: self._arrived(job, parts, good))
            self._lock.notify_all()

    def _arrived(self, job: Job, parts: Sequence[Part] | None, good: Sequence[ByteArray]) -> None:
        """Notes what a fetch brought: the leading parts. The caller holds the lock.

        Args:
            job: the fetch.
            parts: that were to come; None where that could not be told.
            good: what came.
        """
        run, fetch, now_s = job.run, job.fetch, time.monotonic()
        self._link.tick(now_s, needed=self._is_needed())
        self._link.ended()
        if parts is None:
            self._end(job.context)
            return
        self._table.counters.add("remote_failed_pages", len(parts) - len(good))
        for part, data in zip(parts, good, strict=False):
            run.add(part.page, part.start, data)
        if len(good) == len(parts):
            run.stream.arrived(fetch, now_s)
            return
        if not fetch.start:
            run.partial[fetch.chunk] = Partial(len(good), fetch.level)
        run.stream.failed(fetch, now_s)

    def _run_probe(self, probe: Probe) -> None:
        """Measures link and decoder with bytes that nobody waits for."""
        counters = self._table.counters
        good: list[ByteArray] = []
        decoded = 0, 0.0
        try:
            good = read_parts(self._remote, probe.parts, self._count_bytes)
        except Exception:
            counters.add("remote_failures")
            failures.exception("hier-kv: the link to the remote store could not be measured")
        with self._lock:
            self._safely(self._end_probe_fetch)
        try:
            decoded = self._prober.decode(probe, good)
        except Exception:
            counters.add("remote_failures")
            failures.exception("hier-kv: pages of a measurement could not be decoded")
        with self._lock:
            self._prober.done(time.monotonic())
            self._safely(lambda: self._decoding.observe_probe(*decoded))
            self._lock.notify_all()
        counters.add("remote_probe_fetches")

    def _end_probe_fetch(self) -> None:
        """The caller holds the lock."""
        self._link.tick(time.monotonic(), needed=self._is_needed())
        self._link.ended(probe=True)

    def _count_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._link.arrived(num_bytes)
        self._table.counters.add("remote_bytes_in", num_bytes)

    # ---- decoding ----

    def _decode_loop(self) -> None:
        while True:
            with self._lock:
                job = self._safely(self._next_decode)
                while job is None and not self._closing:
                    self._lock.wait(_IDLE_S if self._contexts else None)
                    job = self._safely(self._next_decode)
                if job is None or self._closing:
                    return
            started_s, ok = time.monotonic(), False
            try:
                ok = self._publisher.publish(job.context.lookup, job.run, job.pages, job.step)
            except Exception:
                self._table.counters.add("remote_failures")
                failures.exception("hier-kv: pages from the remote store could not be published")
            seconds = time.monotonic() - started_s
            with self._lock:
                self._safely(lambda: self._end_decode(job, seconds, ok=ok))  # noqa: B023
                self._lock.notify_all()

    def _next_decode(self) -> Decode | None:
        """The next pages to decode; ends what is over. The caller holds the lock."""
        now_s = time.monotonic()
        self._link.tick(now_s, needed=self._is_needed())
        self._publish_times()
        for context in [each for each in self._parked if each.lookup.plan.cancelled]:
            self._parked.remove(context)
            self._finish(context)
        for context in list(self._contexts):
            run = context.run
            if run is None or context.is_decoding:
                continue
            if context.lookup.plan.cancelled:
                self._end(context)
                continue
            job = self._decode_of(context, run, now_s)
            if job is not None:
                context.is_decoding = True
                return job
        return None

    def _decode_of(self, context: Context, run: FetchedSpan, now_s: float) -> Decode | None:
        stream, at = run.stream, run.next_decode
        if not context.begins and stream.may_begin(now_s):
            context.begins = True
            context.num_loaded = stream.plan.num_loaded
            self._share.remove(context)
        num_loaded = context.num_loaded if context.begins else stream.plan.num_loaded
        if at < num_loaded and stream.levels[at] >= 0:
            if context.begins or not stream.decodes_at_end:
                return Decode(context, run, run.chunks[at], stream.levels[at])
            return None
        if not context.begins:
            return None
        partial = run.partial.get(at)
        if partial is not None and partial.num_pages:
            return Decode(context, run, run.chunks[at][: partial.num_pages], partial.step)
        self._end_run(context, run)
        return None

    def _end_decode(self, job: Decode, seconds: float, *, ok: bool) -> None:
        """The caller holds the lock."""
        context, run = job.context, job.run
        context.is_decoding = False
        raw_bytes = len(job.pages) * self._table.arena.slot_bytes
        self._decoding.observe(raw_bytes, seconds)
        run.forget(job.pages)
        if context not in self._contexts:
            return
        if not ok:
            self._end(context)
            return
        plan = context.lookup.plan
        plan.num_remote = job.pages[-1].number + 1 - plan.first_remote
        self._brought(context, job.pages[0].number, job.pages[-1].number + 1)
        run.next_decode += 1
        if len(job.pages) < len(run.chunks[run.next_decode - 1]):
            self._end(context)  # the rest of that chunk is not to be had

    def _end_run(self, context: Context, run: FetchedSpan) -> None:
        """Goes on with a context's next stretch, or leaves the rest to be computed."""
        at = run.next_decode
        if at == len(run.chunks):
            self._begin_run(context)
            return
        is_text = at not in run.partial
        if is_text:
            num_text = sum(len(chunk) for chunk in run.chunks[at:])
            num_text += sum(len(pages) for pages in context.runs)
            self._table.counters.add("remote_text_pages", num_text)
        self._end(context)
        if is_text and not at:  # no chunk was fetched, so the link was not measured
            self._prober.consider(run, self._link.estimator, self._decoding, time.monotonic())
            self._lock.notify_all()

    def _end(self, context: Context) -> None:
        """Nothing more comes for a context. The caller holds the lock."""
        if context not in self._contexts:
            return
        self._share.remove(context)
        self._contexts.remove(context)
        self._release(context, context.keys)
        self._finish(context)
        self._lock.notify_all()

    def _finish(self, context: Context) -> None:
        """Says that a context is over. The caller holds the lock."""
        try:
            context.done()
        except Exception:
            self._table.counters.add("remote_failures")
            failures.exception("hier-kv: the end of a fetch could not be noted")

    def _brought(self, context: Context, first: int, end: int) -> None:
        """Pages [first, end) of a context are in DRAM: contexts that wait for them may go on."""
        if context in self._contexts:
            self._release(context, context.keys_of(first, end))

    def _release(self, context: Context, keys: frozenset[tuple[int, bytes]]) -> None:
        """The caller holds the lock."""
        context.keys -= keys
        self._active -= keys
        for other in [each for each in self._parked if not self._active & each.keys]:
            self._parked.remove(other)
            other.waited = True
            self._new.append(other)

    def _publish_times(self) -> None:
        """Turns the link's times into counts of microseconds."""
        for name, seconds in (("busy", self._link.busy_s), ("needed", self._link.needed_s)):
            step = int(1e6 * seconds) - self._counted_us.get(name, 0)
            if step > 0:
                self._counted_us[name] = self._counted_us.get(name, 0) + step
                self._table.counters.add(f"remote_link_{name}_us", step)
