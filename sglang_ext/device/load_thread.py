"""The thread that copies pages from DRAM to the device pool, layer by layer."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from sglang_ext.device.copier import LoadPages, PageCopier, PageRun
from sglang_ext.device.copy_streams import CopyStreams
from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.transfers import LoadJob
from sglang_ext.tiers.store import PageStore

logger = logging.getLogger(__name__)

# Batches of loads whose duration is remembered; at most three are in flight.
_LOADS_REMEMBERED = 8


class LoadThread:
    """A queue of batches of loads, one a forward, and the thread that does them.

    Attributes:
        on_load: called on the thread with the pages of a batch and the seconds it took.
    """

    on_load: Callable[[int, float], None] | None = None

    def __init__(
        self, store: PageStore, copier: PageCopier, streams: CopyStreams, counter: LoadCounter
    ) -> None:
        self._store = store
        self._copier = copier
        self._streams = streams
        self._counter = counter
        self._batches: queue.SimpleQueue[tuple[int, list[LoadJob]] | None] = queue.SimpleQueue()
        self._seconds: dict[int, float] = {}  # by batch; replaced, never changed, by the thread
        self._thread = threading.Thread(target=self._run, name="hier-kv-load", daemon=True)
        self._thread.start()

    def start(self, index: int, jobs: list[LoadJob]) -> None:
        """Queues a batch under its number at the counter, which is told of every layer."""
        self._batches.put((index, jobs))

    def seconds(self, index: int) -> float:
        """Seconds that a finished batch took; inf where that is not known (yet)."""
        return self._seconds.get(index, math.inf)

    def close(self) -> None:
        """Ends the thread after the batches that were started."""
        self._batches.put(None)
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            batch = self._batches.get()
            if batch is None:
                return
            index, jobs = batch
            try:
                with self._streams.loading():
                    self._load(index, jobs)
            except BaseException as error:
                self._store.counters.add("load_failures")
                logger.exception("hier-kv: a load failed; its requests are aborted")
                try:
                    # What was queued still writes to rows that are given back once this is known.
                    self._streams.synchronize()
                except Exception:
                    logger.exception("hier-kv: the device failed")
                self._counter.fail(index, error)  # without it the scheduler waits on
            finally:
                for job in jobs:
                    self._store.release(job.ticket.slots)

    def _load(self, index: int, jobs: list[LoadJob]) -> None:
        started_s = time.monotonic()
        prepared = [pages for job in jobs for pages in self._prepare(job)]
        for layer in range(self._counter.num_layers):
            for pages in prepared:
                self._copier.load_layer(pages, layer)
            self._counter.complete(index, self._streams.record())
        self._streams.synchronize()
        seconds = time.monotonic() - started_s
        self._store.counters.add("load_us", int(1e6 * seconds))
        recent = list(self._seconds.items())[1 - _LOADS_REMEMBERED :]
        self._seconds = {**dict(recent), index: seconds}
        if self.on_load is not None:
            self.on_load(sum(len(job.ticket.slots) for job in jobs), seconds)

    def _prepare(self, job: LoadJob) -> list[LoadPages]:
        slots, rows = job.ticket.slots.astype(np.int64), job.token_slots.cpu().numpy()
        if job.composition is None:
            return [self._copier.prepare_load(slots, rows, job.position)]
        runs = [
            PageRun(slots[run.pages], run.first_row, run.num_tokens) for run in job.composition.runs
        ]
        return self._copier.prepare_runs(runs, rows, job.position)
