"""Late threads: what the plugin's threads do is done some time after it was asked for.

A test that looks at what a thread is going to do passes as long as the thread is quick. Here every
thread of the plugin is late at random: after it was woken and before it takes the lock of what
woke it, and behind a lock that it gave back, which is between taking a job and doing it, and
between doing it and saying so. It is never late while it holds a lock of the plugin, as that would
hold up the scheduler. The scheduler may be late as well, right behind an answer.

Nothing here is in use unless a variable asks for it; then locks, conditions and queues that the
plugin makes from then on, and pools of threads, are such as know of late threads.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENV_LATE_THREADS = "HIER_KV_TEST_LATE_THREADS"
ENV_LATE_SCHEDULER = "HIER_KV_TEST_LATE_SCHEDULER"

_THREADS = "hier-kv-"
# A load waits for the first at every layer: its lateness would be the load's, eight times. The last
# are a call of a shared folder, which has a deadline: late at every page, it would be a folder that
# hangs.
_ON_TIME = ("hier-kv-load-v", "hier-kv-prefault", "hier-kv-remote-file")
_MADE_BY = ("sglang_ext.", "queue")  # whose locks are looked at

_AFTER_WAKING, _AFTER_ANSWERING = (
    (0.5, 0.08),
    (0.4, 0.04),
)  # how often some time, and how often long
_BEHIND_A_LOCK, _NUM_BEHIND = (0.15, 0.02), 4  # the first of them after it was woken
_BEHIND_ANOTHER = (0.005, 0.0)


@dataclass(frozen=True)
class Lateness:
    """How late threads are: `seed:max_ms` in a variable.

    Attributes:
        seed: of the delays; each thread of each process has its own.
        max_s: the longest delay. Short ones take 1 to 15 % of it, long ones half of it or more.
    """

    seed: int
    max_s: float

    @classmethod
    def of(cls, text: str) -> Lateness:
        """What a variable says.

        Raises:
            ValueError: it is not a number, a colon and a number above 0.
        """
        seed, _, max_ms = text.partition(":")
        if not (seed.isdigit() and max_ms.isdigit() and int(max_ms)):
            raise ValueError(f"late threads take a seed and milliseconds, as 1:2000; got {text!r}")
        return cls(int(seed), int(max_ms) / 1e3)


class Delays:
    """The delays of a process. Thread-safe.

    Args:
        lateness: how long they are.
        sleep: waits for so many seconds.
    """

    def __init__(self, lateness: Lateness, sleep: Callable[[float], None] = time.sleep) -> None:
        self._lateness = lateness
        self._sleep = sleep
        self._of_thread = _OfThread()

    def woken(self) -> None:
        """A thread was woken, or looks whether it was."""
        if (rng := self._rng()) is not None:
            self._of_thread.num_behind = 0
            self._wait(rng, _AFTER_WAKING)

    def took(self) -> None:
        """A thread took a lock."""
        self._of_thread.num_held += 1

    def gave_back(self) -> None:
        """A thread gave a lock back."""
        mine = self._of_thread
        mine.num_held = max(mine.num_held - 1, 0)  # a lock may be given back by another thread
        if mine.num_held == 0 and (rng := self._rng()) is not None:
            mine.num_behind += 1
            few = mine.num_behind <= _NUM_BEHIND
            self._wait(rng, _BEHIND_A_LOCK if few else _BEHIND_ANOTHER)

    def answered(self) -> None:
        """The scheduler answered."""
        self._wait(self._own_rng(), _AFTER_ANSWERING)

    def _rng(self) -> random.Random | None:
        """The generator of this thread; None for one that is on time, or holds a lock."""
        name = threading.current_thread().name
        is_late = name.startswith(_THREADS) and not name.startswith(_ON_TIME)
        return self._own_rng() if is_late and self._of_thread.num_held == 0 else None

    def _own_rng(self) -> random.Random:
        mine = self._of_thread
        if mine.rng is None:
            process = multiprocessing.current_process().name  # a rank's differs from another's
            name = threading.current_thread().name
            mine.rng = random.Random(f"{self._lateness.seed} {process} {name}")
        return mine.rng

    def _wait(self, rng: random.Random, shares: tuple[float, float]) -> None:
        short, long = shares
        drawn = rng.random()
        if drawn < long:
            self._sleep(rng.uniform(0.5, 1.0) * self._lateness.max_s)
        elif drawn < long + short:
            self._sleep(rng.uniform(0.01, 0.15) * self._lateness.max_s)


class _OfThread(threading.local):
    """What is known of each thread: its generator, locks that it holds and those it gave back."""

    def __init__(self) -> None:
        self.rng: random.Random | None = None
        self.num_held = 0
        self.num_behind = 0


class LateLock:
    """A lock, plain or reentrant, behind which threads are late; also a condition's."""

    def __init__(self, delays: Delays, lock: Any) -> None:
        self._delays = delays
        self._lock = lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock` does."""
        got = bool(self._lock.acquire(blocking, timeout))
        if got:
            self._delays.took()
        return got

    def release(self) -> None:
        """As `threading.Lock` does."""
        self._lock.release()
        self._delays.gave_back()

    def locked(self) -> bool:
        """As `threading.Lock` does."""
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    # ---- what `threading.Condition` asks of a lock ----

    def _release_save(self) -> Any:
        own = getattr(self._lock, "_release_save", None)
        if own is None:
            self.release()
            return None
        state = own()
        self._delays.gave_back()
        return state

    def _acquire_restore(self, state: Any) -> None:
        self._delays.woken()
        if state is None:
            self._lock.acquire()
        else:
            self._lock._acquire_restore(state)
        self._delays.took()

    def _is_owned(self) -> bool:
        own = getattr(self._lock, "_is_owned", None)
        if own is not None:
            return bool(own())
        if self._lock.acquire(False):
            self._lock.release()
            return False
        return True


def make_threads_late(lateness: Lateness) -> None:
    """Threads of the plugin are late from now on, by locks and queues that it makes from now on."""
    delays = Delays(lateness)
    lock, reentrant, condition = threading.Lock, threading.RLock, threading.Condition.__init__

    def late_lock() -> Any:
        return LateLock(delays, lock()) if _is_looked_at() else lock()

    def late_reentrant() -> Any:
        return LateLock(delays, reentrant()) if _is_looked_at() else reentrant()

    def late_condition(self: threading.Condition, given: Any = None) -> None:
        if given is None and _is_looked_at():
            given = LateLock(delays, reentrant())
        condition(self, given)

    class LateQueue(queue.SimpleQueue):  # type: ignore[type-arg]
        """A queue of which threads take late; pools of threads have one, too."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get(block, timeout)
            delays.woken()
            return item

    threading.Lock = late_lock  # type: ignore[assignment]
    threading.RLock = late_reentrant  # type: ignore[assignment]
    threading.Condition.__init__ = late_condition  # type: ignore[method-assign,assignment]
    queue.SimpleQueue = LateQueue  # type: ignore[misc]


def _is_looked_at() -> bool:
    """Whether the module that called the caller is the plugin's."""
    made_by = str(sys._getframe(2).f_globals.get("__name__", ""))
    return made_by.startswith(_MADE_BY)


def make_scheduler_late(lateness: Lateness) -> None:
    """SGLang's scheduler is late behind whatever it answers: others know before it goes on."""
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

    delays, original = Delays(lateness), SenderWrapper.send_output

    def send(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.socket is not None:
            delays.answered()

    SenderWrapper.send_output = send


def are_threads_late() -> bool:
    """Whether a variable asks for late threads, or a late scheduler."""
    return any(os.environ.get(name) for name in (ENV_LATE_THREADS, ENV_LATE_SCHEDULER))


def late_threads_if_asked() -> None:
    """Does what `ENV_LATE_THREADS` says, once a process: for one that is no server."""
    if os.environ.get(ENV_LATE_THREADS) and not _is_late:
        _is_late.append(True)
        print("late threads:", os.environ[ENV_LATE_THREADS], file=sys.stderr)  # in a server's log
        make_threads_late(Lateness.of(os.environ[ENV_LATE_THREADS]))


_is_late: list[bool] = []
