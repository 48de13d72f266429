"""The thread that queues copies of pages from DRAM to the device pool, layer by layer.

On a CPU it does them. Nothing here waits for a device: what follows a load (its time, the pins of
its pages) is done when the device is done.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.composition import Composition
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.load_pages import LoadPages, PageRun
from sglang_ext.device.load_path import Fence, Landing, LoadParts, Prepare
from sglang_ext.device.ports import DevicePort
from sglang_ext.device.transfers import LoadJob, WindowRows
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.store import PageStore
from sglang_ext.tiers.store.worker_failures import note_failure

failures = FailureLog(logging.getLogger(__name__))

# Batches of loads whose duration is remembered; at most three are in flight.
_LOADS_REMEMBERED = 8


class LoadTimes(NamedTuple):
    """When a batch of loads was under way.

    Attributes:
        began_ns: since 1970, when it was queued on the device.
        ended_ns: since 1970, when the device was done.
        busy_s: seconds of that in which the device or the link to it worked for it.
    """

    began_ns: int
    ended_ns: int
    busy_s: float


class LoadThread:
    """A queue of batches of loads, one a forward, and the thread that does them.

    `on_load` is called with the pages of a batch and the seconds that it kept the device or the
    link to it, without what it waited for forwards; on one thread.
    """

    def __init__(
        self,
        store: PageStore,
        copiers: Sequence[PageCopier],
        path: LoadParts,
        port: DevicePort,
        counter: LoadCounter,
        on_load: Callable[[int, float], None] | None = None,
        has_states: bool = False,
    ) -> None:
        self._store = store
        self._copiers = copiers  # of the full layers, then of each group of window layers
        self._has_states = has_states  # whose path is the last
        self._path = path
        self._port = port
        self._counter = counter
        self._on_load = on_load
        self._batches: queue.SimpleQueue[tuple[int, list[LoadJob], Fence] | None] = (
            queue.SimpleQueue()
        )
        self._times: dict[int, LoadTimes] = {}  # by batch; replaced, never changed
        self._thread = threading.Thread(target=self._run, name="hier-kv-load", daemon=True)
        self._thread.start()

    def start(self, index: int, jobs: list[LoadJob], fence: Fence) -> None:
        """Queues a batch under its number at the counter, which is told of every layer."""
        self._batches.put((index, jobs, fence))

    def seconds(self, index: int) -> float:
        """Seconds that a finished batch took; inf where that is not known (yet)."""
        times = self._times.get(index)
        return math.inf if times is None else times.busy_s

    def times(self, index: int) -> LoadTimes | None:
        """When a batch was under way; None where that is not known (yet)."""
        return self._times.get(index)

    def close(self) -> None:
        """Ends the thread after the batches that were started."""
        self._batches.put(None)
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        has_entered = self._try(self._port.enter_thread)
        while True:
            batch = self._batches.get()
            if batch is None:
                return
            try:
                if not has_entered:
                    self._port.enter_thread()
                    has_entered = True
            except BaseException as error:
                self._fail(*batch[:2], error)
            else:
                self.load(*batch)

    def load(self, index: int, jobs: list[LoadJob], fence: Fence) -> None:
        """Queues a batch on the device; one thread at a time."""
        began_ns = time.time_ns()
        try:
            parts: list[list[tuple[torch.Tensor, Any]]] = [
                self._loads(part, jobs) for part in range(len(self._copiers))
            ]
            if self._has_states:
                parts.append(
                    [
                        (job.state.slot, partial(_state_slots, job))
                        for job in jobs
                        if job.state is not None
                    ]
                )
            landing = self._path.queue(
                parts,
                fence,
                partial(self._counter.complete, index),
            )
        except BaseException as error:
            self._fail(index, jobs, error)
            return
        # Nothing of it raises: the batch is over, and its pins are given back once.
        landed = partial(self._landed, index, jobs, landing, began_ns)
        self._port.when_done(landing.last, landed)

    def _fail(self, index: int, jobs: list[LoadJob], error: BaseException) -> None:
        """Ends a batch; what was queued before still reads its pages and writes its rows.

        Called while the error is handled.
        """
        event = None
        try:
            event = self._path.behind_queued()
        except BaseException:
            failures.exception("hier-kv: the device failed")
        self._counter.fail(index, error, event)  # without it the scheduler waits on
        self._store.counters.add("load_failures")
        failures.exception("hier-kv: a load failed; its requests are aborted")
        if event is None:
            self._release(jobs)
        else:
            self._port.when_done(event, partial(self._release, jobs))

    def _landed(self, index: int, jobs: list[LoadJob], landing: Landing, began_ns: int) -> None:
        """The device is done with a batch. Raises nothing."""
        ended_ns = time.time_ns()
        self._release(jobs)
        self._try(partial(self._note, index, jobs, landing, began_ns, ended_ns))

    def _note(
        self, index: int, jobs: list[LoadJob], landing: Landing, began_ns: int, ended_ns: int
    ) -> None:
        """Tells of a batch that landed."""
        seconds = sum(self._port.seconds_between(first, last) for first, last in landing.busy)
        self._store.counters.time("load", seconds)
        recent = list(self._times.items())[1 - _LOADS_REMEMBERED :]
        self._times = {**dict(recent), index: LoadTimes(began_ns, ended_ns, seconds)}
        if self._on_load is not None:
            self._on_load(sum(len(job.ticket.slots) for job in jobs), seconds)

    def _release(self, jobs: list[LoadJob]) -> None:
        """Gives the pins of each job back, once. Raises nothing."""
        for job in jobs:
            self._try(partial(self._store.end_load, job.ticket))

    def _try(self, call: Callable[[], None]) -> bool:
        """Calls something that no load depends on; whether it ended well."""
        try:
            call()
        except BaseException:
            note_failure(self._store.counters, failures, "what should go with a load failed")
            return False
        return True

    def _loads(self, part: int, jobs: list[LoadJob]) -> list[tuple[torch.Tensor, Prepare]]:
        if part == 0:
            return [(job.token_slots, partial(self._prepare, job)) for job in jobs]
        return [
            (job.windows.token_slots, partial(self._prepare_windows, job, job.windows, part))
            for job in jobs
            if job.windows is not None
        ]

    def _prepare(self, job: LoadJob, rows: Any) -> list[LoadPages]:
        slots = job.slots_of(0, len(self._copiers) - 1)
        return _prepared(self._copiers[0], slots, job.composition, rows, job.position)

    def _prepare_windows(
        self, job: LoadJob, windows: WindowRows, part: int, rows: Any
    ) -> list[LoadPages]:
        slots = job.slots_of(part, len(self._copiers) - 1)
        return _prepared(self._copiers[part], slots, windows.composition, rows, windows.position)


def _prepared(
    copier: PageCopier,
    slots: npt.NDArray[np.int64],
    composition: Composition | None,
    rows: Any,
    position: int,
) -> list[LoadPages]:
    """Pages as the copier loads them: those in `slots`, or made of them."""
    if composition is None:
        return [copier.prepare_load(slots, rows, position)]
    runs = [PageRun(slots[run.pages], run.first_row, run.num_tokens) for run in composition.runs]
    return copier.prepare_runs(runs, rows, position)


def _state_slots(job: LoadJob, state_slot: Any) -> Any:
    """Slots of the parts of a job's state."""
    return job.state_slots
