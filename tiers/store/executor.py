"""Who does the store's work beside the scheduler: threads in a server, a clock in a simulation."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.store.types import StoreCounters
from sglang_ext.tiers.store.worker_failures import note_failure

failures = FailureLog(logging.getLogger(__name__))

# Before a thread goes on that met errors, one after the other.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A piece of work that was taken, and must be run.

    Attributes:
        num_bytes: what it moves between DRAM and disk, before any coding.
        run: does it, and enters what came of it in the books.
    """

    num_bytes: int
    run: Callable[[], None]


class Work(abc.ABC):
    """Work of one kind. Any number of threads may take jobs and run them."""

    @abc.abstractmethod
    def wait(self) -> bool:
        """Waits until there may be a job; False when there will be none any more."""

    @abc.abstractmethod
    def take(self) -> Job | None:
        """Takes the job that should be done next; None when there is none. Does not wait."""


class Executor(abc.ABC):
    """Runs the jobs of works."""

    @abc.abstractmethod
    def start(self, name: str, work: Work, num_at_once: int) -> None:
        """Begins to run a work's jobs, so many at a time."""

    @abc.abstractmethod
    def join(self, work: Work) -> None:
        """Returns when no job of a work runs; its `wait` says False already."""


class Threads(Executor):
    """Each work has threads of its own, which wait for its jobs.

    Args:
        counters: where errors are counted that a job did not take care of.
    """

    def __init__(self, counters: StoreCounters | None = None) -> None:
        self._counters = counters or StoreCounters()
        # By id of the work: its threads, and what ends them.
        self._threads: dict[int, tuple[list[threading.Thread], threading.Event]] = {}

    def start(self, name: str, work: Work, num_at_once: int) -> None:
        """See `Executor.start`."""
        name = f"hier-kv-{name}"
        names = [name] if num_at_once == 1 else [f"{name}-{i}" for i in range(num_at_once)]
        ended = threading.Event()
        threads = [
            threading.Thread(target=self._run_jobs, args=(work, ended), name=each, daemon=True)
            for each in names
        ]
        self._threads[id(work)] = threads, ended
        for thread in threads:
            thread.start()

    def join(self, work: Work) -> None:
        """See `Executor.join`."""
        threads, ended = self._threads.pop(id(work), ([], threading.Event()))
        ended.set()
        for thread in threads:
            thread.join()

    def _run_jobs(self, work: Work, ended: threading.Event) -> None:
        pause_s = 0.0
        while not ended.wait(pause_s):
            try:
                if not work.wait():
                    return
                job = work.take()
                if job is not None:
                    job.run()
                pause_s = 0.0
            except Exception:
                # Kept alive: without its thread DRAM would fill with pages that can never leave.
                note_failure(self._counters, failures, "work between DRAM and disk failed")
                pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
