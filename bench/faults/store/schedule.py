"""Random faults of a disk, drawn from a seed: one call in so many fails, lags or lies."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.tiers.disk.segments.fileio import FileIO

HONEST = (
    "open_error", "read_error", "read_short", "read_late", "write_error", "write_full",
    "write_read_only", "write_short", "write_late", "write_repeated", "allocate_full",
    "sync_error", "truncate_error", "rename_error", "unlink_error",
)  # fmt: skip
"""Faults that the disk owns up to, or that change nothing: what was acknowledged stays there."""

LYING_READS = ("read_corrupted", "read_stale")
LYING_WRITES = ("write_corrupted", "write_torn", "write_lost")
"""Faults that nobody is told of; what the checksums find out is a miss."""

KINDS = (*HONEST, *LYING_READS, *LYING_WRITES)
LATE_S = 0.005
_BLOCK_BYTES = 4096
_ERRNO = {
    "write_full": errno.ENOSPC,
    "allocate_full": errno.ENOSPC,
    "write_read_only": errno.EROFS,
}


def error_of(kind: str) -> OSError:
    """What a call that meets a fault raises."""
    return OSError(_ERRNO.get(kind, errno.EIO), f"injected: {kind}")


@dataclass
class Schedule:
    """Which calls meet which fault. Thread-safe.

    Attributes:
        seed: of every choice.
        share: share of calls that meet a fault.
        kinds: those to choose among.
        is_on: whether there are faults now.
        injected: faults so far, by kind.
    """

    seed: int
    share: float
    kinds: tuple[str, ...] = KINDS
    is_on: bool = True
    injected: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def draw(self, operation: str) -> str:
        """The fault that a call of an operation meets; "" for none."""
        with self._lock:
            if not self.is_on or self._random.random() >= self.share:
                return ""
            kinds = [kind for kind in self.kinds if kind.startswith(operation + "_")]
            return self._random.choice(kinds) if kinds else ""

    def met(self, kind: str) -> None:
        """A call met a fault."""
        with self._lock:
            self.injected[kind] += 1

    def below(self, bound: int) -> int:
        """A random number from 0 to below a bound."""
        with self._lock:
            return self._random.randrange(bound)


class ScheduledDisk(FileIO):
    """System calls that fail as a schedule says."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def open(self, path: Path, flags: int) -> int:
        self._fail("open")
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        kind = self.schedule.draw("read")
        if kind == "read_short":
            buffers = _first_blocks(buffers, self.schedule)
        elif kind == "read_late":
            time.sleep(LATE_S)
        elif kind == "read_stale":
            offset = max(0, offset - _BLOCK_BYTES)  # what lies before is read instead
        elif kind == "read_error":
            self._raise(kind)
        done = super().preadv(fd, buffers, offset)
        if kind == "read_corrupted" and done:
            self._flip(buffers, done)
        if kind:
            self.schedule.met(kind)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        kind = self.schedule.draw("write")
        if kind in ("write_error", "write_full", "write_read_only"):
            self._raise(kind)
        if kind:
            self.schedule.met(kind)
        if kind in LYING_WRITES:
            return self._lie(kind, fd, buffers, offset)
        if kind == "write_late":
            time.sleep(LATE_S)
        elif kind == "write_short":
            buffers = _first_blocks(buffers, self.schedule)
        elif kind == "write_repeated":
            super().pwritev(fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._fail("allocate")
        super().allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._fail("truncate")
        super().truncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._fail("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._fail("unlink")
        super().unlink(path)

    def _fail(self, operation: str) -> None:
        kind = self.schedule.draw(operation)
        if kind:
            self._raise(kind)

    def _raise(self, kind: str) -> None:
        self.schedule.met(kind)
        raise error_of(kind)

    def _lie(self, kind: str, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes something else, and says that all is written."""
        whole = b"".join(buffers)
        if kind == "write_torn":
            half = len(whole) // 2 // _BLOCK_BYTES * _BLOCK_BYTES
            super().pwritev(fd, _first(buffers, half), offset)
        elif kind == "write_corrupted":
            damaged = bytearray(whole)
            damaged[self.schedule.below(len(whole))] ^= 1 << self.schedule.below(8)
            super().pwritev(fd, [memoryview(damaged)], offset)
        return len(whole)

    def _flip(self, buffers: Sequence[memoryview], done: int) -> None:
        at = self.schedule.below(done)
        for view in buffers:
            if at < len(view):
                view.cast("B")[at] ^= 1 << self.schedule.below(8)
                return
            at -= len(view)


def _first_blocks(buffers: Sequence[memoryview], schedule: Schedule) -> list[memoryview]:
    """At least one block of some buffers, and not all where there are more."""
    num_blocks = sum(len(view) for view in buffers) // _BLOCK_BYTES
    return _first(buffers, _BLOCK_BYTES * (1 + schedule.below(max(1, num_blocks - 1))))


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    found: list[memoryview] = []
    for view in buffers:
        if num_bytes <= 0:
            break
        found.append(view[:num_bytes])
        num_bytes -= len(view)
    return found
