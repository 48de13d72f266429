"""What the parts of one disk tier share."""

from __future__ import annotations

import bisect
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.config import DiskConfig
from sglang_ext.tiers.disk.counters import Counters
from sglang_ext.tiers.disk.segments.catalog import Catalog
from sglang_ext.tiers.disk.segments.fds import FdCache
from sglang_ext.tiers.disk.segments.fileio import (
    IOV_MAX,
    BounceBuffers,
    FileIO,
    is_aligned,
    read_all,
    write_all,
)
from sglang_ext.tiers.disk.workers import IoRun, Workers
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.records.checksums import is_plain
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals

_FAILED = {
    "io_read": "gives pages no more, which are computed again",
    "io_write": "takes no pages, which are lost when they leave DRAM",
    "io_seal": "does not take the table of a segment, whose pages the next start reads one by one",
    "io_unlink": "does not let go of a segment, whose room stays taken",
}
failures = FailureLog(logging.getLogger(__name__))


def tell_of_other_names(folder: Path, path: Path) -> None:
    """Logs, once a minute, that a segment is read only as it has other names."""
    what = f"hier-kv: the disk folder {folder} has segments with hard links to them"
    told = "through which another server may write; they are read, and not written to"
    failures.tell(f"{what}, {told}", path.name)


MAX_RUN_BYTES = 4 << 20
"""Longest run of neighbours in one call with O_DIRECT."""

MIN_RUN_BYTES = 1 << 20
"""Shortest run that a call is split into; the longest through the page cache.

There the run is still in the core's cache when its checksums are taken (docs/disk-tier.md).
"""


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
        seals: what proves that records are whole, or whose they are.
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
    seals: RecordSeals = CHECKSUMS
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

    def failed(self, kind: str, error: Exception) -> None:
        """Counts an error of the file system, and logs the first of a minute with its reason.

        Args:
            kind: `io_read`, `io_write`, `io_seal` or `io_unlink`.
            error: what it was.
        """
        self.counters.error(kind)
        what = f"hier-kv: the disk folder {self.config.path} {_FAILED[kind]}"
        failures.tell(f"{what} (disk_errors_{kind})", error)

    def run_bytes(self, num_bytes: int, record_bytes: int) -> int:
        """Returns how much of `num_bytes` of neighbours goes into one system call, at most.

        Small enough that every thread has several runs, so that one verifies while another waits
        for the disk, and as many as the others; large enough for the disk's full speed.

        Args:
            num_bytes: of all neighbours together.
            record_bytes: of the largest of them.
        """
        threads = self.config.helper_threads + 1
        longest = MAX_RUN_BYTES if self.direct else MIN_RUN_BYTES
        num_rounds = max(2, -(-num_bytes // (longest * threads)))
        even = -(-num_bytes // (num_rounds * threads)) + record_bytes - 1
        return min(longest, max(MIN_RUN_BYTES, even))

    def split_runs(self, sizes: Sequence[int], places: Sequence[int]) -> list[range]:
        """Splits records into runs of neighbours, by index, one system call each.

        Args:
            sizes: bytes of each.
            places: first block of each.
        """
        longest = self.run_bytes(sum(sizes), max(sizes, default=0))
        runs: list[range] = []
        first = run_bytes = 0
        for index, size in enumerate(sizes):
            apart = index > 0 and (
                places[index] != places[index - 1] + sizes[index - 1] // BLOCK_BYTES
            )
            full = run_bytes + size > longest or index - first == IOV_MAX
            if index > first and (apart or full):
                runs.append(range(first, index))
                first, run_bytes = index, 0
            run_bytes += size
        return [*runs, range(first, len(sizes))] if sizes else []

    def write_records(self, fd: int, records: Sequence[ByteArray], offset: int) -> None:
        """Writes neighbouring records; copies them first if O_DIRECT refuses their memory.

        Raises:
            OSError: the disk failed or filled up.
        """
        if self._needs_bounce(records):
            buffer = self.bounce.get(sum(record.size for record in records))
            np.concatenate(records, out=buffer)
            records = [buffer]
        write_all(self.io, fd, records, offset)

    def read_records(self, fd: int, outs: Sequence[ByteArray], offset: int) -> int:
        """Reads neighbouring records; returns how many of them arrived whole.

        Raises:
            OSError: the disk failed.
        """
        ends = list(itertools.accumulate(out.size for out in outs))
        buffer = self.bounce.get(ends[-1]) if self._needs_bounce(outs) else None
        num_bytes = read_all(self.io, fd, outs if buffer is None else [buffer], offset)
        arrived = bisect.bisect_right(ends, num_bytes)
        if buffer is None:
            return arrived
        for end, out in zip(ends[:arrived], outs, strict=False):
            out[:] = buffer[end - out.size : end]
        return arrived

    def work(self, runs: Sequence[IoRun]) -> None:
        """Takes runs through their steps; see `Workers.run`.

        With buffered I/O the bytes of a run are in the core's cache after the move, so one thread
        does all its steps. So it does when there are no helper threads.
        """
        shared = self.direct and self.config.num_helpers > 0
        self.workers.run(runs if shared else [run.whole() for run in runs])

    def _needs_bounce(self, arrays: Sequence[ByteArray]) -> bool:
        return self.direct and not all(is_aligned(array) for array in arrays)


def usable_slot(slot: object, slot_bytes: int, *, packed: bool = False) -> bool:
    """Says whether `slot` is memory that the tier can move.

    That is u8 [slot_bytes], contiguous and writable; with `packed` also fewer whole blocks.
    """
    return (
        is_plain(slot)
        and (slot.size == slot_bytes or (packed and _is_part(slot.size, slot_bytes)))
        and slot.flags.writeable
    )


def _is_part(num_bytes: int, slot_bytes: int) -> bool:
    return 0 < num_bytes < slot_bytes and num_bytes % BLOCK_BYTES == 0
