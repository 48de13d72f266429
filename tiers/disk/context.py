"""What the parts of one disk tier share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.disk.catalog import Catalog
from sglang_ext.tiers.disk.config import DiskConfig
from sglang_ext.tiers.disk.counters import Counters
from sglang_ext.tiers.disk.fds import FdCache
from sglang_ext.tiers.disk.fileio import (
    IOV_MAX,
    BounceBuffers,
    FileIO,
    is_aligned,
    read_all,
    write_all,
)
from sglang_ext.tiers.disk.workers import Workers
from sglang_ext.tiers.record import ByteArray

MAX_RUN_BYTES = 4 << 20
"""Longest run of neighbours in one call with O_DIRECT."""

MIN_RUN_BYTES = 1 << 20
"""Shortest run that a call is split into; the longest through the page cache.

There the run is still in the core's cache when its checksums are taken (docs/formats.md).
"""


class Owner(Protocol):
    """The callbacks that a tier's owner sets; called by the writing thread, write lock held."""

    on_drop: Callable[[bytes, int], None]
    on_moved: Callable[[bytes, int, RecoveredPages], None]
    is_hot: Callable[[bytes, ByteArray], np.ndarray[tuple[int], np.dtype[np.bool_]]]


@dataclass(slots=True)
class DiskContext:
    """Shared parts, each thread-safe on its own.

    Attributes:
        config: the settings.
        io: system calls.
        direct: whether segments are opened with O_DIRECT.
        workers: helper threads.
        counters: what is counted.
        catalog: which segments exist.
        fds: open files for reading.
        failpoint: a test's hook, called with the name of the step about to happen.
        bounce: buffers for arrays that O_DIRECT refuses.
    """

    config: DiskConfig
    io: FileIO
    direct: bool
    workers: Workers
    counters: Counters
    catalog: Catalog
    fds: FdCache
    failpoint: Callable[[str], None] | None = None
    bounce: BounceBuffers = field(default_factory=BounceBuffers)

    @property
    def direct_flag(self) -> int:
        """The flag to open segments with."""
        return os.O_DIRECT if self.direct else 0

    def reach(self, step: str) -> None:
        """Tells a test's hook, if there is one, that `step` is about to happen."""
        if self.failpoint is not None:
            self.failpoint(step)

    def slots_per_run(self, num_slots: int, slot_bytes: int) -> int:
        """Returns how many of `num_slots` neighbours go into one system call.

        Small enough that every thread has several runs, so that one verifies while another waits
        for the disk; large enough for the disk's full speed.
        """
        threads = self.config.helper_threads + 1
        share = num_slots * slot_bytes // (2 * threads)
        longest = MAX_RUN_BYTES if self.direct else MIN_RUN_BYTES
        run_bytes = min(longest, max(MIN_RUN_BYTES, share))
        return max(1, min(IOV_MAX, run_bytes // slot_bytes))

    def write_slots(self, fd: int, slots: Sequence[ByteArray], offset: int) -> None:
        """Writes neighbouring slots; copies them first if O_DIRECT refuses their memory.

        Raises:
            OSError: the disk failed or filled up.
        """
        if not self._needs_bounce(slots):
            write_all(self.io, fd, slots, offset)
            return
        buffer = self.bounce.get(len(slots) * slots[0].size)
        for row, slot in zip(buffer.reshape(len(slots), -1), slots, strict=True):
            row[:] = slot
        write_all(self.io, fd, [buffer], offset)

    def read_slots(self, fd: int, slots: Sequence[ByteArray], offset: int) -> int:
        """Reads neighbouring slots; returns how many of them arrived whole.

        Raises:
            OSError: the disk failed.
        """
        if not self._needs_bounce(slots):
            return read_all(self.io, fd, slots, offset) // slots[0].size
        buffer = self.bounce.get(len(slots) * slots[0].size)
        arrived = read_all(self.io, fd, [buffer], offset) // slots[0].size
        for row, slot in zip(buffer.reshape(len(slots), -1)[:arrived], slots, strict=False):
            slot[:] = row
        return arrived

    def _needs_bounce(self, slots: Sequence[ByteArray]) -> bool:
        return self.direct and not all(is_aligned(slot) for slot in slots)


def usable_slot(slot: object, slot_bytes: int, *, writable: bool) -> bool:
    """Says whether `slot` is memory that the tier can move: u8 [slot_bytes], contiguous."""
    return (
        isinstance(slot, np.ndarray)
        and slot.dtype == np.uint8
        and slot.shape == (slot_bytes,)
        and slot.flags.c_contiguous
        and (slot.flags.writeable or not writable)
    )
