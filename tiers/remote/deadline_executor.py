"""Runs work that may hang, such as a system call on a dead mount, and waits only so long."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from sglang_ext.tiers.remote.base import Deadline, RemoteTimeoutError, RemoteUnavailableError

T = TypeVar("T")

_QUEUE_ITEMS = 4
_POLL_S = 0.05


class Cancelled(Exception):  # noqa: N818
    """Nobody waits for the work any more."""


class _End:
    """Comes behind the last item; items may be anything, None as well."""


class CancellableTask(Generic[T]):
    """Work on a thread of its own, seen from that thread."""

    def __init__(self) -> None:
        self._items: queue.Queue[T | BaseException | _End] = queue.Queue(_QUEUE_ITEMS)
        self._is_given_up = threading.Event()

    def check(self) -> None:
        """Raises `Cancelled` when nobody waits any more."""
        if self._is_given_up.is_set():
            raise Cancelled

    def emit(self, item: T) -> None:
        """Hands an item to who waits; blocks while several lie there.

        Raises:
            Cancelled: nobody waits any more.
        """
        self._put(item)

    def _put(self, item: T | BaseException | _End) -> None:
        while True:
            self.check()
            try:
                self._items.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return


class DeadlineExecutor:
    """Threads that may hang, of which there are never more than a bound. Thread-safe."""

    def __init__(self, max_threads: int, name: str, *, waits: bool = False) -> None:
        """Starts nothing yet.

        Args:
            max_threads: the bound.
            name: of the threads.
            waits: whether a call waits for a thread while all are taken, up to its deadline.
        """
        self._free = threading.BoundedSemaphore(max_threads)
        self._name = name
        self._waits = waits

    def run(
        self,
        work: Callable[[CancellableTask[T]], None],
        take: Callable[[T], None],
        deadline: Deadline,
    ) -> None:
        """Does work on another thread and takes its items on this one, until the deadline.

        Args:
            work: emits items; must own all memory that it writes to, and call `check` before any
                step that should not happen late.
            take: called on this thread with each item.
            deadline: when this returns at the latest, whatever the work does.

        Raises:
            RemoteTimeoutError: the deadline passed; the work is cancelled, and ends when it can.
            RemoteUnavailableError: too many threads hang already, or none can be started.
            Exception: what the work raised.
        """
        if not self._free.acquire(timeout=deadline.left_s() if self._waits else 0.0):
            if self._waits:
                raise RemoteTimeoutError("earlier calls took all of the call's time")
            raise RemoteUnavailableError("earlier calls hang in the operating system")
        errand: CancellableTask[T] = CancellableTask()
        try:
            threading.Thread(
                target=self._work, args=(errand, work), name=self._name, daemon=True
            ).start()
        except RuntimeError as error:  # the process or the machine has too many
            self._free.release()
            raise RemoteUnavailableError("the system starts no more threads") from error
        try:
            while True:
                try:
                    item = errand._items.get(timeout=deadline.left_s())
                except queue.Empty:
                    raise RemoteTimeoutError("the call's time is over") from None
                if isinstance(item, _End):
                    return
                if isinstance(item, BaseException):
                    raise item
                take(item)
        finally:
            errand._is_given_up.set()

    def _work(self, errand: CancellableTask[T], work: Callable[[CancellableTask[T]], None]) -> None:
        end: BaseException | _End = _End()
        try:
            work(errand)
        except BaseException as error:  # handed to who waits
            end = error
        finally:
            self._free.release()
        with contextlib.suppress(Cancelled):
            errand._put(end)
