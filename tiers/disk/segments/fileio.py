"""System calls of the disk tier, and reads and writes that end whole.

`FileIO` is the one place that touches the operating system, so a test can put a failing disk in
its stead. Buffers for O_DIRECT start at multiples of 4096 bytes; others go through a bounce buffer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_ext.tiers.access import FILE_MODE
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.records.record import ByteArray

IOV_MAX = 1024
"""Most buffers in one vectored call (Linux's UIO_MAXIOV)."""


class FileIO:
    """The system calls that the tier makes, one method each. Thread-safe; holds no state."""

    def open(self, path: Path, flags: int) -> int:
        """Opens `path` and returns a file descriptor. A symbolic link to a file is refused.

        A pipe in a file's place is opened at once, and fails when it is read or written at an
        offset.
        """
        # The tier's own folder may be reached through a link; nothing in it is one.
        link = 0 if flags & os.O_DIRECTORY else os.O_NOFOLLOW
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | link, FILE_MODE)

    def close(self, fd: int) -> None:
        """Closes `fd`."""
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes `buffers` at `offset`; returns the bytes written, maybe fewer than asked."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads into `buffers` from `offset`; returns the bytes read, maybe fewer than asked."""
        return os.preadv(fd, buffers, offset)

    def next_data(self, fd: int, offset: int) -> int | None:
        """Returns where the file's next bytes lie: `offset` itself where it has some there.

        None where nothing but a hole follows, or the file's end. Moves the file's own offset.
        """
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that does not tell
                return offset
            raise

    def next_hole(self, fd: int, offset: int) -> int | None:
        """Returns where the file's bytes from `offset` on end, in a hole or at the file's end.

        None where that is not told. Moves the file's own offset.
        """
        try:
            return os.lseek(fd, offset, os.SEEK_HOLE)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Gives the file disk space for [0, num_bytes)."""
        os.posix_fallocate(fd, 0, num_bytes)

    def num_names(self, fd: int) -> int:
        """Returns how many names the file has: more than one where there are hard links to it."""
        return os.fstat(fd).st_nlink

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Sets the file's size."""
        os.ftruncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """Waits until the file's data, or the folder's entries, are on the device."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Moves a file over another in one step."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Removes a file."""
        os.unlink(path)

    def device_of(self, path: Path) -> int:
        """Returns the number of the file system that a path is on."""
        return os.stat(path).st_dev

    def free_bytes(self, path: Path) -> int:
        """Returns the bytes of the file system that this user may still fill."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def aligned_array(num_bytes: int) -> ByteArray:
    """Returns zeroed memory that O_DIRECT accepts, u8 [num_bytes]."""
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), np.uint8)[:num_bytes]


def is_aligned(array: ByteArray) -> bool:
    """Says whether O_DIRECT accepts the memory of `array`."""
    address: int = array.__array_interface__["data"][0]
    return address % BLOCK_BYTES == 0


def write_all(io: FileIO, fd: int, arrays: Sequence[ByteArray], offset: int) -> None:
    """Writes all of `arrays` one after another from `offset`; each a multiple of 4096 bytes.

    Raises:
        OSError: the disk failed or filled up; what lies at the offsets is then undefined.
    """
    for first in range(0, len(arrays), IOV_MAX):
        views = [array.data for array in arrays[first : first + IOV_MAX]]
        while views:
            done = _whole_blocks(io.pwritev(fd, views, offset))
            if done == 0:
                raise OSError(errno.EIO, "the write made no progress")
            views, offset = _after(views, done), offset + done


def read_all(io: FileIO, fd: int, arrays: Sequence[ByteArray], offset: int) -> int:
    """Fills `arrays` one after another from `offset`; each a multiple of 4096 bytes.

    Returns:
        The bytes read; fewer than asked only where the file ends.

    Raises:
        OSError: the disk failed.
    """
    start = offset
    for first in range(0, len(arrays), IOV_MAX):
        views = [array.data for array in arrays[first : first + IOV_MAX]]
        while views:
            got = io.preadv(fd, views, offset)
            done = _whole_blocks(got)
            if done == 0:
                return offset + got - start
            views, offset = _after(views, done), offset + done
    return offset - start


def read_small(io: FileIO, path: Path, offset: int, num_bytes: int) -> bytes:
    """Reads a piece of a file through the page cache; shorter where the file ends.

    Raises:
        OSError: the file cannot be opened or read.
    """
    buffer = np.zeros(num_bytes, np.uint8)
    fd = io.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < num_bytes:
            got = io.preadv(fd, [buffer[done:].data], offset + done)
            if got == 0:
                break
            done += got
    finally:
        io.close(fd)
    return buffer[:done].tobytes()


def write_file(io: FileIO, path: Path, data: bytes, *, sync: bool) -> None:
    """Replaces the file at `path` in one step, through a temp file beside it.

    Raises:
        OSError: the disk failed; the old file, if any, is still there.
    """
    temp = path.with_name(path.name + ".tmp")
    fd = io.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        done = 0
        while done < len(data):
            done += io.pwritev(fd, [memoryview(data)[done:]], done)
        if sync:
            io.sync(fd)
    finally:
        io.close(fd)
    io.rename(temp, path)
    if sync:
        sync_folder(io, path.parent)


def sync_folder(io: FileIO, folder: Path) -> None:
    """Makes the folder's entries durable.

    Raises:
        OSError: the disk failed.
    """
    fd = io.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.sync(fd)
    finally:
        io.close(fd)


def direct_io_works(io: FileIO, folder: Path) -> bool:
    """Tries one aligned block with O_DIRECT in `folder`: written, read back and compared."""
    temp = folder / "direct-io-probe.tmp"
    block = aligned_array(BLOCK_BYTES)
    block[:] = np.arange(BLOCK_BYTES) % 251
    back = aligned_array(BLOCK_BYTES)
    try:
        fd = io.open(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        try:
            write_all(io, fd, [block], 0)
            return read_all(io, fd, [back], 0) == BLOCK_BYTES and bool((block == back).all())
        finally:
            io.close(fd)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            io.unlink(temp)


class BounceBuffers:
    """One aligned buffer per thread, grown as needed, for arrays that O_DIRECT refuses."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, num_bytes: int) -> ByteArray:
        """Returns u8 [num_bytes] that is this thread's own until its next call."""
        buffer: ByteArray | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < num_bytes:
            buffer = aligned_array(num_bytes)
            self._local.buffer = buffer
        return buffer[:num_bytes]


def _whole_blocks(num_bytes: int) -> int:
    return num_bytes - num_bytes % BLOCK_BYTES


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Returns what of `views` lies behind the first `done` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []
