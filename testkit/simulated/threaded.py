"""A simulated device that real threads use: what orders them is the locks and queues they share.

`SimulatedDevice` plays threads; here they are real, so the clock of a thread follows what it takes:
whoever takes a lock goes on behind whoever gave it back, whoever takes something from a queue
behind whoever put it there, a thread behind whoever started it, and whoever waits for its end
behind that (`following_locks`). What none of these orders, and no event, is a conflict still. A
thread of the device's own runs what is queued and calls what follows events, whatever the other
threads do meanwhile.

Ranks share one, as if each had a device of its own: what a rank does is done in `of_rank`, and so
only what ranks tell each other orders them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from testkit.simulated.device import (
    Cell,
    Clock,
    ConflictError,
    DeviceThreadError,
    Event,
    SimulatedDevice,
)

_REAL_LOCK, _REAL_RLOCK, _REAL_QUEUE = threading.Lock, threading.RLock, queue.SimpleQueue
_REAL_START, _REAL_JOIN = threading.Thread.start, threading.Thread.join
_WORKER_PAUSE_S = 0.0005


class ThreadedDevice(SimulatedDevice):
    """A device for real threads; the one that makes it is the scheduler's.

    It has many methods because `SimulatedDevice` has. Nothing is called under its own lock that
    may take another.

    Args:
        seed: decides when what runs.
    """

    def __init__(self, seed: int) -> None:
        self._mutex = _REAL_RLOCK()
        self._local = threading.local()
        self._scheduler = threading.get_ident()
        super().__init__(seed)
        self._num_started = 0
        self._is_over = False
        self._worker = threading.Thread(target=self._work, name="simulated-device", daemon=True)
        self._worker.start()

    @property
    def _thread(self) -> str:
        known: str | None = getattr(self._local, "name", None)
        if known is not None:
            return known
        if threading.get_ident() == self._scheduler:
            return "scheduler"
        return f"thread {threading.get_ident()}"

    @_thread.setter
    def _thread(self, name: str) -> None:
        self._local.name = name

    def started(self, thread: threading.Thread) -> None:
        """The calling thread starts another, which goes on behind it."""
        with self._mutex:
            self._num_started += 1
            name, clock, run = f"{thread.name} {self._num_started}", self.hand_over(), thread.run
        rank = self._rank

        def follow() -> None:
            self._thread, self._local.rank = name, rank
            self.take_over(clock)
            try:
                run()
            finally:
                thread.done = self.hand_over()  # type: ignore[attr-defined]

        thread.run = follow  # type: ignore[method-assign]

    def ended(self, thread: threading.Thread) -> None:
        """The calling thread has waited for the end of another, and goes on behind it."""
        self.take_over(getattr(thread, "done", {}))

    @property
    def _rank(self) -> str:
        rank: str = getattr(self._local, "rank", "")
        return rank

    @contextmanager
    def of_rank(self, number: int) -> Iterator[None]:
        """What is called, and the threads that it starts, are a rank's."""
        before, self._local.rank = self._rank, f" of rank {number}"
        try:
            yield
        finally:
            self._local.rank = before

    def is_scheduler(self) -> None:
        """The calling thread is a scheduler's: it must not wait for the device either."""
        self.may_not_wait.add(self._thread)

    def _landing_thread(self) -> str:
        return f"landed{self._rank}"

    def reach(self, event: Event) -> None:
        """Lets the device get to an event; the calling thread learns nothing by that."""
        with self._mutex:
            while event.at is None:
                self.run(1)

    def deliver(self, *, everything: bool = False) -> None:
        """As `SimulatedDevice`; what is called takes locks, so it runs outside of the device's."""
        while self._calls and (everything or self._calls[0][0].at is not None):
            event, thread, call = self._calls.popleft()  # one thread delivers at a time
            with self.acting(thread):
                self.synchronize(event)
                call()
                del event, call

    def _free(self, stream: str, cell: Cell) -> None:
        # Behind what `deliver` waited for, too, before it gave up what it kept of the tensor: its
        # count of references orders these, and takes no lock.
        with self._mutex:
            self.take_over(self._threads.get(self._landing_thread(), {}))
            super()._free(stream, cell)

    def close(self) -> None:
        """Ends the device's own thread, and then does what was handed to it."""
        self._is_over = True
        self._worker.join()
        super().close()

    def _work(self) -> None:
        pause = threading.Event()
        while not self._is_over:
            try:
                self.run(self._draw())
                self.deliver()
            except ConflictError:
                pass  # noted, and others wait for what follows
            except Exception as error:
                self.conflicts.append(DeviceThreadError(f"what follows an event failed: {error!r}"))
            pause.wait(_WORKER_PAUSE_S)

    def _draw(self) -> int:
        with self._mutex:
            return self.rng.choice((0, 1, 5))


def _locked(name: str) -> Callable[..., Any]:
    def call(self: ThreadedDevice, *args: Any, **kwargs: Any) -> Any:
        with self._mutex:
            return getattr(SimulatedDevice, name)(self, *args, **kwargs)

    return call


# `when_done` and `seconds_between` need no lock of their own, and others may be called in them.
for _name in (
    *("hand_over", "take_over", "new_stream", "current_stream", "record", "wait", "synchronize"),
    *("is_done", "empty", "bring", "send", "upload", "raw", "tensor", "rows", "any_below"),
    *("launch", "touch", "add_memory", "cells_of", "count", "run", "run_all"),
):
    setattr(ThreadedDevice, _name, _locked(_name))


class _FollowedLock:
    """A lock, with what whoever gave it back had done."""

    def __init__(self, device: ThreadedDevice, real: Any) -> None:
        self._device, self._real = device, real
        self._clock: Clock = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got: bool = self._real.acquire(blocking, timeout)
        if got:
            self._device.take_over(self._clock)
        return got

    def release(self) -> None:
        self._clock = self._device.hand_over()
        self._real.release()

    def locked(self) -> bool:
        found: bool = self._real.locked()
        return found

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What a condition asks of its lock.

    def _release_save(self) -> Any:
        self._clock = self._device.hand_over()
        if hasattr(self._real, "_release_save"):
            return self._real._release_save()
        return self._real.release()

    def _acquire_restore(self, state: Any) -> None:
        if hasattr(self._real, "_acquire_restore"):
            self._real._acquire_restore(state)
        else:
            self._real.acquire()
        self._device.take_over(self._clock)

    def _is_owned(self) -> bool:
        if hasattr(self._real, "_is_owned"):
            owned: bool = self._real._is_owned()
            return owned
        if self._real.acquire(False):
            self._real.release()
            return False
        return True


class _FollowedQueue:
    """A queue, each entry with what whoever put it there had done."""

    def __init__(self, device: ThreadedDevice) -> None:
        self._device = device
        self._entries: Any = _REAL_QUEUE()

    def put(self, entry: Any) -> None:
        self._entries.put((self._device.hand_over(), entry))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        clock, entry = self._entries.get(block, timeout)
        self._device.take_over(clock)
        return entry

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        found: int = self._entries.qsize()
        return found


class FollowedDeque:
    """A deque between two threads, each entry with what whoever put it there had done."""

    def __init__(self, device: ThreadedDevice) -> None:
        self._device = device
        self._entries: deque[tuple[Clock, Any]] = deque()

    def append(self, entry: Any) -> None:
        """Puts it at the end."""
        self._entries.append((self._device.hand_over(), entry))

    def popleft(self) -> Any:
        """Takes the first."""
        clock, entry = self._entries.popleft()
        self._device.take_over(clock)
        return entry

    def clear(self) -> None:
        """Drops all."""
        self._entries.clear()

    def __getitem__(self, at: int) -> Any:
        clock, entry = self._entries[at]
        self._device.take_over(clock)
        return entry

    def __len__(self) -> int:
        return len(self._entries)


@contextmanager
def following_locks(device: ThreadedDevice) -> Iterator[None]:
    """Context in which what is made or started orders threads on a device's clocks.

    That is locks, the queues of `queue.SimpleQueue`, and threads. In one such context there may be
    another of the same device.
    """

    def start(thread: threading.Thread) -> None:
        device.started(thread)
        _REAL_START(thread)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        _REAL_JOIN(thread, timeout)
        if not thread.is_alive():
            device.ended(thread)

    made: Any = threading
    queues: Any = queue
    before = made.Lock, made.RLock, queues.SimpleQueue, made.Thread.start, made.Thread.join
    made.Lock = lambda: _FollowedLock(device, _REAL_LOCK())
    made.RLock = lambda: _FollowedLock(device, _REAL_RLOCK())
    queues.SimpleQueue = lambda: _FollowedQueue(device)
    made.Thread.start, made.Thread.join = start, join
    try:
        yield
    finally:
        made.Lock, made.RLock, queues.SimpleQueue, made.Thread.start, made.Thread.join = before
