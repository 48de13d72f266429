"""Who does the store's work beside the scheduler: threads in a server, a clock in a simulation."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


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
    """Each work has threads of its own, which wait for its jobs."""

    def __init__(self) -> None:
        self._threads: dict[int, list[threading.Thread]] = {}  # by id of the work

    def start(self, name: str, work: Work, num_at_once: int) -> None:
        """See `Executor.start`."""
        name = f"hier-kv-{name}"
        names = [name] if num_at_once == 1 else [f"{name}-{i}" for i in range(num_at_once)]
        threads = [
            threading.Thread(target=_run_jobs, args=(work,), name=each, daemon=True)
            for each in names
        ]
        self._threads[id(work)] = threads
        for thread in threads:
            thread.start()

    def join(self, work: Work) -> None:
        """See `Executor.join`."""
        for thread in self._threads.pop(id(work), []):
            thread.join()


def _run_jobs(work: Work) -> None:
    while work.wait():
        try:
            job = work.take()
            if job is not None:
                job.run()
        except Exception:
            # Kept alive: without its thread DRAM would fill with pages that can never leave.
            logger.exception("hier-kv: work between DRAM and disk failed")
