"""What waits to be fetched from a remote store; the first waiting request goes first."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from sglang_ext.tiers.store.types import Plan


class _HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


T = TypeVar("T", bound=_HasPlan)


class FetchQueue(Generic[T]):
    """Jobs of plans. Thread-safe; bounded.

    Args:
        max_jobs: most that wait; one more is refused.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._changed = threading.Condition()
        self._jobs: list[T] = []  # oldest first; guarded by _changed
        self._closed = False  # guarded by _changed

    def offer(self, job: T) -> bool:
        """Adds a job; False when there are too many, or it is closed. Does not block."""
        with self._changed:
            if self._closed or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs.append(job)
            self._changed.notify()
            return True

    def take(self) -> T | None:
        """Waits for a job and takes the one whose plan comes first; None when it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._jobs))
            if self._closed:
                return None
            first = min(range(len(self._jobs)), key=lambda at: self._jobs[at].plan.priority)
            return self._jobs.pop(first)

    def close(self) -> list[T]:
        """Takes no more jobs; returns those that nobody took."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left, self._jobs = self._jobs, []
            return left

    def __len__(self) -> int:
        return len(self._jobs)
