"""The store's own log: one JSON object a line, for tests and audits.

Who logs never waits for the file: a thread writes the lines, each with one unbuffered `write`, in
the order in which they were logged, and so after the facts they state. A line that is in the file
is true even when the process was killed right after it. That pages left the disk is in the file
before their bytes are overwritten (`settle`), as long as the file's disk does not hang.

A line is left out and counted when it cannot be written, as on a full file system, or when too many
wait to be written; the log has a bound, and its older half goes.

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
from collections import deque
from pathlib import Path
from typing import Any

from sglang_ext.tiers.access import FILE_MODE
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.store.types import Hashes

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 512 << 20
"""At this length the file becomes `FILE.1`, in the place of an older one, and a new one begins."""

MAX_QUEUED_BYTES = 16 << 20
"""Lines that wait to be written; more are left out."""

_SETTLE_S = 1.0  # how long the disk's writing thread waits for a log whose disk hangs, once
_CLOSE_S = 5.0


class EventLog:
    """Appends events to a file, or does nothing when it has none. Thread-safe; never raises."""

    def __init__(
        self,
        path: str,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """Opens the file, made for this user alone if it is absent, and starts the thread.

        Args:
            path: of the file; empty for no log.
            max_file_bytes: longest file; there are at most two.
            max_queued_bytes: bound on the lines that wait to be written.

        Raises:
            TierConfigError: it cannot be opened, or is no regular file.
        """
        self._path = Path(path)
        self._max_file_bytes = max_file_bytes
        self._max_queued_bytes = max_queued_bytes
        self._fd = -1  # used by the thread only, as is the next
        self._size_bytes = 0
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()  # guarded by _changed, as are all that follow
        self._queued_bytes = 0  # with the line in the thread's hands
        self._num_queued = 0  # so far
        self._num_done = 0  # of these, written or left out
        self._num_dropped = 0
        self._hangs = False  # a wait was given up, and nothing was written since
        self._on = False
        if path:
            try:
                self._open()
            except OSError as error:
                raise TierConfigError(
                    f"the event log {path} must be a file that can be written to, and no link"
                    f" ({error.strerror}); choose another path"
                ) from error
            self._on = True
            threading.Thread(target=self._run, name="hier-kv-event-log", daemon=True).start()

    @property
    def on(self) -> bool:
        """Whether events are kept; callers skip the cost of naming pages when not."""
        return self._on

    @property
    def num_dropped(self) -> int:
        """Lines that could not be written."""
        with self._changed:
            return self._num_dropped

    @property
    def num_waiting(self) -> int:
        """Lines that were logged and are neither in the file nor left out yet."""
        with self._changed:
            return self._num_queued - self._num_done

    def pages(self, event: str, hashes: Hashes, **fields: Any) -> None:
        """Logs an event of some pages."""
        if self._on and len(hashes):
            self.note(event, pages=[row.tobytes().hex() for row in hashes], **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Logs an event."""
        if not self._on:
            return
        line = json.dumps({"t": round(time.time(), 6), "e": event, **fields}).encode() + b"\n"
        with self._changed:
            if not self._on:
                return
            # A single line may be longer than that: a clear names all its pages.
            if self._queued_bytes and self._queued_bytes + len(line) > self._max_queued_bytes:
                self._drop("too many lines wait to be written")
                return
            self._queue.append(line)
            self._queued_bytes += len(line)
            self._num_queued += 1
            self._changed.notify_all()

    def settle(self, timeout_s: float = _SETTLE_S) -> bool:
        """Waits until what was logged before is in the file, or left out.

        Once that took too long it is not waited for again until the file takes another line.

        Returns:
            Whether it is.
        """
        with self._changed:
            wanted = self._num_queued
            if self._hangs and self._num_done < wanted:
                return False
            done = self._changed.wait_for(lambda: self._num_done >= wanted, timeout_s)
            self._hangs = not done
            return done

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Writes what was logged, as far as the time allows; later events are ignored."""
        with self._changed:
            self._on = False
            self._changed.notify_all()
        self.settle(timeout_s)

    def _run(self) -> None:
        """The thread: writes lines until the log is closed, then closes the file."""
        while (line := self._next()) is not None:
            failure = ""
            try:
                self._append(line)
            except OSError as error:
                failure = error.strerror or str(error)
            except Exception as error:  # whatever it is, later lines are written
                failure = repr(error)
            with self._changed:
                self._num_done += 1
                self._queued_bytes -= len(line)
                self._hangs = False
                if failure:
                    self._drop(failure)
                self._changed.notify_all()
        os.close(self._fd)

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._on)
            return self._queue.popleft() if self._queue else None

    def _drop(self, reason: str) -> None:
        """Counts a line that is left out; `_changed` is held."""
        if not self._num_dropped:
            logger.warning("hier-kv: %s takes no more: %s", self._path, reason)
        self._num_dropped += 1

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
