"""Speeds of this machine, measured in seconds: the disk as the disk tier uses it, and DRAM."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

_PIECE_BYTES = 32 << 20  # what the disk tier reads and writes at a time at least
_MOST_BYTES, _MOST_S = 512 << 20, 2.0  # of writing, and of reading


class DiskSpeed(NamedTuple):
    """Bytes a second, of large pieces one after another."""

    write: float
    read: float
    direct: bool  # past the page cache; otherwise what was read may have lain in memory


def measure_disk(folder: Path, *, direct: bool) -> DiskSpeed:
    """Writes a file of at most 512 MiB in a folder and reads it; it is gone afterwards.

    Blocks for about 4 s.

    Raises:
        OSError: the folder takes no file, or not so much.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    with mmap.mmap(-1, _PIECE_BYTES) as buffer:
        buffer.write(os.urandom(1 << 20) * (_PIECE_BYTES >> 20))
        handle, name = tempfile.mkstemp(prefix="hier-kv-doctor-", dir=folder)
        os.close(handle)
        handle = -1
        try:
            handle = os.open(name, flags)
            written, write_s = _move(lambda at: os.pwrite(handle, buffer, at), _MOST_BYTES)
            began_s = time.perf_counter()
            os.fdatasync(handle)
            write_s += time.perf_counter() - began_s
            read, read_s = _move(lambda at: os.preadv(handle, [buffer], at), written)
        finally:
            if handle >= 0:
                os.close(handle)
            with contextlib.suppress(OSError):
                Path(name).unlink()
    return DiskSpeed(written / write_s, read / read_s, direct)


def measure_dram() -> float:
    """Bytes a second that one core copies from memory to memory. Blocks for less than a second."""
    source = np.ones(_PIECE_BYTES * 4, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # both are in memory now
    began_s = time.perf_counter()
    np.copyto(target, source)
    return source.nbytes / (time.perf_counter() - began_s)


def _move(piece: Callable[[int], int], most: int) -> tuple[int, float]:
    """Moves pieces until there were enough or time is up; bytes and seconds."""
    moved, began_s = 0, time.perf_counter()
    while moved < most:
        num = piece(moved)
        if not num:
            raise OSError("the file ended early")
        moved += num
        if time.perf_counter() - began_s > _MOST_S:
            break
    return moved, max(time.perf_counter() - began_s, 1e-9)
