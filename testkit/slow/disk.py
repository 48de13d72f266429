"""A slow disk, for tests and measurements: reads are held to a speed that a file states.

The file holds one number, MB (10^6 bytes) a second; it may be changed, emptied or removed at any
time, the last two meaning "no limit". The disk that results serves one read after another, as a
busy one does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError

# How often a waiting read looks at the file: the longest a change of speed goes unnoticed.
_SLICE_S = 0.01


class SpeedFile:
    """Bytes a second that a file states; read again when its stamp changes.

    One thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            TierConfigError: it holds something that is no speed.
        """
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._bytes_per_s: float | None = None
        if path.exists() and path.read_text().strip() and self.bytes_per_s() is None:
            raise TierConfigError(
                f"{path} must hold a number of MB/s above 0, got {path.read_text()[:40]!r}"
            )

    def bytes_per_s(self) -> float | None:
        """The speed now; None for no limit, also when the file is being rewritten."""
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                speed = float(self._path.read_text())
                self._bytes_per_s = 1e6 * speed if speed > 0 else None
                self._stamp = stamp
        except (OSError, ValueError):
            self._stamp = self._bytes_per_s = None
        return self._bytes_per_s


class ThrottledIO(FileIO):
    """`FileIO` with slow reads. Thread-safe: reads wait for each other in the order they came."""

    def __init__(self, speed_file: Path) -> None:
        """Raises `TierConfigError` as `SpeedFile` does."""
        self._speed = SpeedFile(speed_file)  # guarded by _disk
        self._disk = threading.Lock()  # held by the read that the disk serves

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads, and returns no earlier than a disk of the stated speed would have."""
        with self._disk:
            served_s = time.monotonic()
            got = super().preadv(fd, buffers, offset)
            left: float = got
            while left > 0:
                speed = self._speed.bytes_per_s()
                if speed is None:
                    break
                time.sleep(min(left / speed, _SLICE_S))
                now_s = time.monotonic()
                left -= (now_s - served_s) * speed
                served_s = now_s
        return got
