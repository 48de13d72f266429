"""Keeps a shared folder of values within its size, and clean of what killed writers left."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator

from sglang_ext.tiers.remote.engines.value_folders import Found, ValueFolders

logger = logging.getLogger(__name__)

LOCK_NAME = "reclaim.lock"
_TEMP_AGE_S = 3600.0
_LOCK_AGE_S = 900.0
_EMPTY_AGE_S = 60.0  # an empty folder may be one that a writer has just made
_SCAN_EVERY_S = 3600.0
_SCAN_AFTER_SHARE = 1 / 64  # of the size, in bytes that this server wrote
_KEEP_SHARE = 0.9
_OVERFULL_SHARE = 1.1
_BUCKET_S = 60
_PROBE_BYTES = 4096  # more than any file system keeps beside a file's name
_STAT_BLOCK_BYTES = 512  # of `st_blocks`, on every file system


class FolderReclaimer:
    """A thread that looks through a deployment's values and removes the oldest of too many.

    Servers that share a folder each have one. A file that says who is at work spares them doing it
    all at once; nothing depends on it, for a removed file is only a miss.
    """

    def __init__(self, folders: ValueFolders, max_bytes: int, ttl_s: float = 0.0) -> None:
        """Starts nothing yet.

        Args:
            folders: of the values.
            max_bytes: bound on their sizes.
            ttl_s: age at which a file goes in any case; 0 for none.
        """
        self._folders = folders
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._changed = threading.Condition()
        self._used_bytes = 0  # by the last scan; guarded by _changed
        self._new_bytes = 0  # written by this server since; guarded by _changed
        self._closed = False  # guarded by _changed
        self._is_due = True  # guarded by _changed
        self._is_scanning = False  # guarded by _changed
        self._counts_blocks = False  # whether the file system says what files take
        self.num_removed = 0
        self.num_scans = 0  # guarded by _changed
        self._thread = threading.Thread(
            target=self._run, name="hier-kv-remote-reclaim", daemon=True
        )

    def start(self) -> None:
        """Starts the thread, which looks through the folders at once."""
        self._thread.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of all values: what the last scan saw and what this server wrote since."""
        with self._changed:
            return self._used_bytes + self._new_bytes

    @property
    def is_overfull(self) -> bool:
        """Whether writing should pause until something was removed."""
        return self.used_bytes > self._max_bytes * _OVERFULL_SHARE

    def note_written(self, num_bytes: int) -> None:
        """Counts bytes that were written."""
        with self._changed:
            self._new_bytes += num_bytes
            if self._new_bytes > self._max_bytes * _SCAN_AFTER_SHARE:
                self._is_due = True
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread; one that hangs in the operating system is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        every_s = min(_SCAN_EVERY_S, self._ttl_s / 4) if self._ttl_s else _SCAN_EVERY_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._closed, every_s)
                if self._closed:
                    return
                self._is_due, self._is_scanning = False, True
                before = self._new_bytes
            used = None
            try:
                used = self._scan()
            except OSError as error:
                logger.warning(
                    "hier-kv: %s could not be looked through: %s", self._folders.root, error
                )
            with self._changed:
                if used is not None:
                    self._used_bytes = used
                    self._new_bytes -= before
                self.num_scans += 1
                self._is_scanning = False
                self._changed.notify_all()

    def _scan(self) -> int | None:
        """Removes what must go; returns the bytes left, None when another server is at work."""
        try:
            with self._folders.top() as top:
                return self._scan_in(top)
        except FileNotFoundError:
            return 0

    def _scan_in(self, top: int) -> int | None:
        if not self._take_lock(top):
            return None
        try:
            now_s = time.time()
            ages, total = self._count(now_s)
            if total > self._max_bytes:
                total -= self._remove_oldest(ages, total - int(self._max_bytes * _KEEP_SHARE))
            self._folders.remove_empty(now_s - _EMPTY_AGE_S, lambda: self._closed)
            return total
        finally:
            with contextlib.suppress(OSError):
                os.unlink(LOCK_NAME, dir_fd=top)

    def _count(self, now_s: float) -> tuple[Counter[int], int]:
        """Bytes by age in buckets, and in all; removes what is too old and leftovers of writers."""
        ages: Counter[int] = Counter()
        total = 0
        for found in self._files():
            status = found.status
            age_s = now_s - status.st_mtime
            if found.is_temp:
                if age_s > _TEMP_AGE_S:
                    self._remove(found)
                continue
            if self._ttl_s and age_s > self._ttl_s:
                self._remove(found)
                continue
            num_bytes = self._bytes_of(status)
            ages[int(status.st_mtime) // _BUCKET_S] += num_bytes
            total += num_bytes
        return ages, total

    def _remove_oldest(self, ages: Counter[int], excess: int) -> int:
        """Removes at least `excess` bytes of files, the oldest first; returns how many."""
        last, rest = 0, excess
        for last in sorted(ages):
            rest -= ages[last]
            if rest <= 0:
                break
        removed = 0
        for found in self._files():
            bucket = int(found.status.st_mtime) // _BUCKET_S
            if found.is_temp or bucket > last:
                continue
            if bucket == last and removed >= excess:
                continue
            self._remove(found)
            removed += self._bytes_of(found.status)
        return removed

    def _files(self) -> Iterator[Found]:
        for found in self._folders.files():
            with self._changed:
                if self._closed:
                    return
            yield found

    def _remove(self, found: Found) -> None:
        with contextlib.suppress(OSError):
            os.unlink(found.name, dir_fd=found.folder)
            self.num_removed += 1

    def _take_lock(self, top: int) -> bool:
        with contextlib.suppress(OSError):
            status = os.stat(LOCK_NAME, dir_fd=top, follow_symlinks=False)
            # One of the future says nothing of its age: a clock was set, or somebody set the time.
            if abs(time.time() - status.st_mtime) > _LOCK_AGE_S:
                os.unlink(LOCK_NAME, dir_fd=top)
        try:
            fd = self._folders.make_file(top, LOCK_NAME)
        except FileExistsError:
            return False
        with contextlib.suppress(OSError):  # on a full file system, too, something must go
            os.write(fd, os.urandom(_PROBE_BYTES))
        self._counts_blocks = os.fstat(fd).st_blocks > 0
        os.close(fd)
        return True

    def _bytes_of(self, status: os.stat_result) -> int:
        """Bytes that a file takes; its holes take none."""
        if not self._counts_blocks:
            return status.st_size
        return min(status.st_size, status.st_blocks * _STAT_BLOCK_BYTES)
