"""How long the scheduler's thread is held up by I/O: its own, or that of who holds a lock it needs.

Installed in the scheduler's process before the plugin makes its locks. Three waits of that thread
count, where the plugin is among its callers:

- a system call on files or sockets. Time that the thread wanted a core and had none is taken off,
  so a machine that others use makes no stall.
- a lock of the plugin's, as far as another thread did I/O with that lock in its hands meanwhile;
  its time without a core is taken off likewise.
- a condition or another thread's end: whole, without the time that the threads which copy loads ran
  or wanted a core. Where the device is a CPU, its layers are copied while the forward waits.

Waits for the interpreter's own lock are no I/O and do not count, nor does what the plugin waits for
while it is put together, or SGLang while it loads weights, which the plugin is around: a server
that starts serves nobody yet.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

_CALLS = (
    "open", "read", "write", "pread", "preadv", "pwrite", "pwritev", "writev", "fsync",
    "fdatasync", "ftruncate", "posix_fallocate", "unlink", "rename", "replace", "link", "stat",
    "statvfs", "fstatvfs", "scandir", "listdir", "mkdir", "utime",
)  # fmt: skip
_SOCKET_CALLS = ("connect", "send", "sendall", "recv", "recv_into", "sendmsg")
_CONDITION = "Condition.wait"
_OWN = "sglang_ext"
_START = ("sglang_ext.assembly.", "sglang_ext.seam.hooks.loaded_models._around_loading")
_MAX_FRAMES = 1000  # numba compiles some hundred deep
_COPIES = "hier-kv-load"  # begin of the names of threads that copy loads
_NUM_REMEMBERED = 4096  # calls of other threads that held a lock; the youngest matter


@dataclass(frozen=True)
class Stall:
    """One wait of the scheduler's thread.

    Attributes:
        seconds: how long it was held up.
        what: the call, or the place where the lock was made.
        where: the plugin's innermost function on the stack.
    """

    seconds: float
    what: str
    where: str


class StallMeter:
    """Measures one thread; every thread's calls pass through it. Thread-safe.

    Args:
        thread: id of the thread (`threading.get_ident`); its kernel id is the caller's.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._local = threading.local()
        # (start, end, locks, seconds blocked) of calls by threads that held locks; in progress
        # where the end is inf.
        self._calls: deque[list[Any]] = deque(maxlen=_NUM_REMEMBERED)
        self._stalls: list[Stall] = []
        self._is_measuring = False  # on the measured thread: calls of the meter itself

    # ---- results ----

    def report(self) -> dict[str, Any]:
        """The longest wait in ms, how many there were, and the five longest."""
        stalls = sorted(self._stalls, key=lambda stall: -stall.seconds)
        return {
            "max_ms": round(1e3 * stalls[0].seconds, 3) if stalls else 0.0,
            "num": len(stalls),
            "longest": [
                {"ms": round(1e3 * stall.seconds, 3), "what": stall.what, "where": stall.where}
                for stall in stalls[:5]
            ],
        }

    # ---- what is measured ----

    @contextlib.contextmanager
    def io(self, what: str, released: int = 0) -> Iterator[None]:
        """Around anything that may take as long as a device or a network likes.

        Args:
            what: the call.
            released: id of a lock that the call gives back for as long as it takes.
        """
        if threading.get_ident() == self._thread:
            with self._timed(what):
                yield
            return
        locks = set(self._held()) - {released}
        if not locks:
            yield
            return
        cpu_s, start_s = _on_core_or_waiting_s(), time.monotonic()
        call: list[Any] = [start_s, float("inf"), frozenset(locks), float("inf")]
        self._calls.append(call)
        try:
            yield
        finally:
            call[1] = time.monotonic()
            call[3] = max(0.0, call[1] - start_s - (_on_core_or_waiting_s() - cpu_s))

    def waited_for(self, lock: int, what: str, start_s: float, end_s: float) -> None:
        """The measured thread waited for a lock: counts what overlaps with I/O under it."""
        overlap_s = sum(
            min(blocked_s, max(0.0, min(end, end_s) - max(start, start_s)))
            for start, end, locks, blocked_s in list(self._calls)
            if lock in locks
        )
        if overlap_s > 0:
            self._note(overlap_s, f"lock of {what}", serving_frame())

    def is_measured(self) -> bool:
        """Whether the caller is the thread that is measured."""
        return threading.get_ident() == self._thread

    def took(self, lock: int) -> None:
        """The calling thread holds a lock now, once more."""
        self._held().append(lock)

    def gave(self, lock: int) -> None:
        """The calling thread gives a lock back."""
        held = self._held()
        if lock in held:  # else another thread took it, as a lock allows
            held.remove(lock)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        where = "" if self._is_measuring else serving_frame()
        if not where:
            yield
            return
        self._is_measuring = True
        copies = _copying() if what == _CONDITION else {}
        cpu_s, start_s = _on_core_or_waiting_s(), time.monotonic()
        try:
            yield
        finally:
            wall_s = time.monotonic() - start_s
            wanted_core_s = _on_core_or_waiting_s() - cpu_s
            still_there = _copying() if copies else {}
            wanted_core_s += sum(
                still_there[task] - before_s
                for task, before_s in copies.items()
                if task in still_there
            )
            self._is_measuring = False
            self._note(max(0.0, wall_s - wanted_core_s), what, where)

    def _note(self, seconds: float, what: str, where: str) -> None:
        self._stalls.append(Stall(seconds, what, where))

    def _held(self) -> list[int]:
        held: list[int] | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = []
        return held


_real_open, _real_read, _real_close = os.open, os.read, os.close


def _on_core_or_waiting_s(task: str = "thread-self") -> float:
    """Seconds so far that a thread ran, or was ready to; by its folder in /proc."""
    fd = _real_open(f"/proc/{task}/schedstat", os.O_RDONLY)
    try:
        ran, waited, _ = _real_read(fd, 100).split()
    finally:
        _real_close(fd)
    return (int(ran) + int(waited)) / 1e9


def _copying() -> dict[int, float]:
    """Seconds on a core or waiting for one, of each thread that copies loads, by its kernel id.

    A thread that has not begun has no id yet, and one may end while it is looked at.
    """
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith(_COPIES) and thread.native_id is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[thread.native_id] = _on_core_or_waiting_s(f"self/task/{thread.native_id}")
    return found


class MeteredLock:
    """`threading.Lock` or `RLock` that tells a meter who holds it and how long others wait."""

    def __init__(self, meter: StallMeter, lock: Any, made_in: str) -> None:
        self._meter = meter
        self._lock = lock
        self._made_in = made_in

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of the lock."""
        taken: bool = self._lock.acquire(False)
        if not taken and blocking:
            start_s = time.monotonic()
            taken = self._lock.acquire(True, timeout)
            if self._meter.is_measured():
                self._meter.waited_for(id(self), self._made_in, start_s, time.monotonic())
        if taken:
            self._meter.took(id(self))
        return taken

    def release(self) -> None:
        """As of the lock."""
        self._meter.gave(id(self))
        self._lock.release()

    def locked(self) -> bool:
        """As of the lock."""
        found: bool = self._lock.locked()
        return found

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MeteredRLock(MeteredLock):
    """The same with what `threading.Condition` asks of a reentrant lock."""

    def _release_save(self) -> tuple[Any, int]:
        depth = self._meter._held().count(id(self))
        for _ in range(depth):
            self._meter.gave(id(self))
        return self._lock._release_save(), depth

    def _acquire_restore(self, state: tuple[Any, int]) -> None:
        self._lock._acquire_restore(state[0])
        for _ in range(state[1]):
            self._meter.took(id(self))

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned


def install(meter: StallMeter) -> None:
    """Puts the meter under the system calls and under the locks that the plugin will make."""
    for name in _CALLS:
        setattr(os, name, _metered(meter, getattr(os, name), f"os.{name}"))
    for name in _SOCKET_CALLS:
        setattr(socket.socket, name, _metered(meter, getattr(socket.socket, name), name))
    condition: Any = threading.Condition
    condition.wait = metered_wait(meter, condition.wait)
    threading.Thread.join = _metered(meter, threading.Thread.join, "join")  # type: ignore[method-assign]
    module: Any = threading
    module.Lock = _factory(meter, threading.Lock, MeteredLock)
    module.RLock = _factory(meter, threading.RLock, MeteredRLock)


def _metered(meter: StallMeter, call: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def metered(*args: Any, **kwargs: Any) -> Any:
        with meter.io(what):
            return call(*args, **kwargs)

    return metered


def metered_wait(meter: StallMeter, wait: Callable[..., Any]) -> Callable[..., Any]:
    """`threading.Condition.wait` under a meter; it gives the condition's lock back meanwhile."""

    @functools.wraps(wait)
    def metered(condition: Any, timeout: float | None = None) -> Any:
        with meter.io(_CONDITION, id(condition._lock)):
            return wait(condition, timeout)

    return metered


def _factory(
    meter: StallMeter, make: Callable[[], Any], metered: type[MeteredLock]
) -> Callable[[], Any]:
    def build() -> Any:
        made_in = own_frame()
        return metered(meter, make(), made_in) if made_in else make()

    return build


def own_frame() -> str:
    """Module and function of the plugin's innermost frame on the stack; "" when there is none."""
    return next(_own_frames(), "")


def serving_frame() -> str:
    """The same; "" while the plugin is put together: nobody waits for a server that starts."""
    frames = list(_own_frames())
    return "" if not frames or any(name.startswith(_START) for name in frames) else frames[0]


def _own_frames() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OWN):
            yield f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back
