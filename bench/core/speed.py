"""The machine's own limits, against which the tiers are measured: memcpy and raw disk I/O."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_ext.tiers.anonymous_memory import map_anonymous
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.disk_context import MAX_RUN_BYTES
from sglang_ext.tiers.disk.segments.fileio import FileIO, aligned_array, read_all, write_all
from sglang_ext.tiers.records.record import ByteArray

MEMCPY_BYTES = 1 << 30  # each side; over three times the 300 MiB of the largest shared caches


class Memcpy:
    """One core copying between two buffers that no cache holds.

    Bytes are counted once: a copy of 1 GiB reads 1 GiB and writes 1 GiB and counts as 1 GiB.
    """

    def __init__(self, num_bytes: int = MEMCPY_BYTES) -> None:
        self.num_bytes = num_bytes
        self._source = aligned_array(num_bytes)
        self._target = aligned_array(num_bytes)
        self._source[:] = 1
        self._target[:] = 2

    def run(self) -> float:
        """Copies once; returns GB/s (1e9 bytes)."""
        start_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return self.num_bytes / (time.perf_counter() - start_s) / 1e9


class RawFile:
    """One preallocated file read and written as the disk tier does, without what the tier adds.

    Same mode (O_DIRECT or not), same bytes per system call, same number of threads; no checksum,
    header, index or bookkeeping.

    Args:
        path: the file; removed by `close`.
        slots: u8 arrays of a multiple of 4096 bytes, written from.
        outs: as many of the same sizes, read to; `slots` when None.
        direct: whether to use O_DIRECT.
        num_threads: threads that share the work.
    """

    def __init__(
        self,
        path: Path,
        slots: Sequence[ByteArray],
        outs: Sequence[ByteArray] | None = None,
        *,
        direct: bool,
        num_threads: int,
    ) -> None:
        self._path = path
        self._slots, self._outs = slots, outs or slots
        self._num_threads = num_threads
        self._io = FileIO()
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._direct = direct
        self.num_bytes = sum(slot.size for slot in slots)
        self._fd = self._io.open(path, flags)

    def write(self) -> float:
        """Allocates and writes the whole file; returns GB/s."""
        self._io.truncate(self._fd, 0)
        start_s = time.perf_counter()
        self._io.allocate(self._fd, self.num_bytes + BLOCK_BYTES)
        self._share(write_all, self._slots)
        return self.num_bytes / (time.perf_counter() - start_s) / 1e9

    def read(self) -> float:
        """Reads the whole file, from the disk; returns GB/s."""
        if not self._direct:
            drop_page_cache([self._path])
        start_s = time.perf_counter()
        self._share(read_all, self._outs)
        return self.num_bytes / (time.perf_counter() - start_s) / 1e9

    def close(self) -> None:
        """Removes the file."""
        self._io.close(self._fd)
        self._path.unlink()

    def _share(self, transfer: object, slots: Sequence[ByteArray]) -> None:
        assert callable(transfer)
        slot_bytes = slots[0].size
        per_run = max(1, MAX_RUN_BYTES // slot_bytes)
        starts = list(range(0, len(slots), per_run))

        def work(first: int) -> None:
            for start in starts[first :: self._num_threads]:
                run = slots[start : start + per_run]
                transfer(self._io, self._fd, run, BLOCK_BYTES + start * slot_bytes)

        helpers = [
            threading.Thread(target=work, args=(first,)) for first in range(1, self._num_threads)
        ]
        for helper in helpers:
            helper.start()
        work(0)
        for helper in helpers:
            helper.join()


def pages_like_the_arenas(num: int, slot_bytes: int) -> list[ByteArray]:
    """`num` zeroed slots in memory of the kind that the host tier has: in huge pages, if it can be.

    A disk writes into memory in huge pages faster than into scattered small ones.
    """
    flat = np.frombuffer(map_anonymous(num * slot_bytes, hugepages=True), np.uint8)
    return list(flat.reshape(num, slot_bytes))


def leave_page_cache(path: Path) -> None:
    """Writes a file to the disk and advises that it leaves the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Sees to it that the next reads of the files come from the disk."""
    for path in paths:
        leave_page_cache(path)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return  # not root: the advice above has to do
