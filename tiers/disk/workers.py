"""Threads that share the tasks of a call with the thread that made it.

A record's checksum takes CPU while a neighbour's bytes are on their way, so a few threads that each
read and then verify keep the disk busy. The caller works too: with no helper free it does all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Task = Callable[[], None]


class _Batch:
    """The tasks of one call. `deque.popleft` hands each to one thread."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = deque(tasks)
        self._left = len(tasks)  # guarded by _lock
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None  # guarded by _lock

    def work(self) -> None:
        """Runs tasks until none is left to start."""
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            error: BaseException | None = None
            try:
                task()
            except BaseException as caught:  # handed to the caller by wait()
                error = caught
            with self._lock:
                self._left -= 1
                self._error = self._error or error
                if self._left == 0:
                    self._done.set()

    def wait(self) -> None:
        """Waits for tasks that other threads started; raises the first error of any task."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Workers:
    """A few helper threads. Thread-safe; several calls may share them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs every task, on this thread and the helpers, and returns when all have ended.

        Raises:
            BaseException: the first error that a task raised, after all have ended.
        """
        if not tasks:
            return
        batch = _Batch(tasks)
        for _ in range(min(len(self._threads), len(tasks) - 1)):
            self._queue.put(batch)
        batch.work()
        batch.wait()

    def stop(self) -> None:
        """Ends the helper threads and waits for them."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            batch.work()
