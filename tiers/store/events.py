"""The store's own log: one JSON object a line, for tests and audits.

A line is written with one unbuffered `write`, after the fact it states, so a line that is in the
file is true even when the process was killed right after it. A line that cannot be written, as on a
full file system, is left out and counted; the log has a bound, and its older half goes.

    {"t": seconds, "e": "saved", "pages": [hex, ...]}       in DRAM, ready
    {"t": ..., "e": "written", "pages": [...]}   acknowledged: on disk and in the index
    {"t": ..., "e": "promoted", ...}             disk to DRAM
    {"t": ..., "e": "loaded", ...}               pinned for a load to the device
    {"t": ..., "e": "evicted", ...}              left DRAM
    {"t": ..., "e": "reclaimed", ...}            left the disk with their segment, stay in DRAM
    {"t": ..., "e": "lost", ...}                             left the last tier that held them
    {"t": ..., "e": "rejected", "kind": "bad_checksum", ...} read from disk and refused
    {"t": ..., "e": "enqueued", "rid": r, "device": n, "pages": [...], "on_disk": [i, ...]}
        A request entered the queue: n of its pages were on the device, the next ones (`pages`) in
        DRAM or on their way there, but for those of some indices, which were on disk.
    {"t": ..., "e": "admitted", "rid": r, "position": p, "pages": [...]}
        Its pages from token p on are loaded from DRAM.
    {"t": ..., "e": "restored", "pages": [...]}
        The last page of a prompt, computed again, was overwritten with what DRAM has of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from sglang_ext.tiers.access import FILE_MODE
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.store.types import Hashes

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 512 << 20
"""At this length the file becomes `FILE.1`, in the place of an older one, and a new one begins."""


class EventLog:
    """Appends events to a file, or does nothing when it has none. Thread-safe; never raises."""

    def __init__(self, path: str, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Opens the file, made for this user alone if it is absent.

        Args:
            path: of the file; empty for no log.
            max_file_bytes: longest file; there are at most two.

        Raises:
            TierConfigError: it cannot be opened, or is no regular file.
        """
        self._path = Path(path)
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._fd = -1  # changed under _lock
        self._size_bytes = 0  # guarded by _lock
        self._num_dropped = 0  # guarded by _lock
        if path:
            try:
                self._open()
            except OSError as error:
                raise TierConfigError(
                    f"the event log {path} must be a file that can be written to, and no link"
                    f" ({error.strerror}); choose another path"
                ) from error

    @property
    def on(self) -> bool:
        """Whether events are kept; callers skip the cost of naming pages when not."""
        return self._fd >= 0

    @property
    def num_dropped(self) -> int:
        """Lines that could not be written."""
        with self._lock:
            return self._num_dropped

    def pages(self, event: str, hashes: Hashes, **fields: Any) -> None:
        """Logs an event of some pages."""
        if self._fd >= 0 and len(hashes):
            self.note(event, pages=[row.tobytes().hex() for row in hashes], **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Logs an event."""
        if self._fd < 0:
            return
        line = json.dumps({"t": round(time.time(), 6), "e": event, **fields}).encode() + b"\n"
        with self._lock:
            if self._fd < 0:
                return
            try:
                self._append(line)
            except OSError as error:
                if not self._num_dropped:
                    logger.warning("hier-kv: %s takes no more: %s", self._path, error.strerror)
                self._num_dropped += 1

    def close(self) -> None:
        """Closes the file; later events are ignored."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _append(self, line: bytes) -> None:
        """Writes a line, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        if self._size_bytes and self._size_bytes + len(line) > self._max_file_bytes:
            with contextlib.suppress(FileNotFoundError):  # somebody moved it away
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
            before = self._fd
            self._open()
            os.close(before)
        num_written = os.write(self._fd, line)
        if num_written < len(line):
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size_bytes)
            raise OSError(0, "a part of a line fits only")
        self._size_bytes += num_written

    def _open(self) -> None:
        # A pipe without a reader is an error, and nothing to wait for.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self._path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it is something else")
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
                os.fchmod(fd, FILE_MODE)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._size_bytes = fd, status.st_size
