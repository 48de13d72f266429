"""Keeps a shared folder of values within its size, and clean of what killed writers left."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

TEMP_PREFIX = ".hkv-tmp-"
LOCK_NAME = "reclaim.lock"
_TEMP_AGE_S = 3600.0
_LOCK_AGE_S = 900.0
_SCAN_EVERY_S = 3600.0
_SCAN_AFTER_SHARE = 1 / 64  # of the size, in bytes that this server wrote
_KEEP_SHARE = 0.9
_OVERFULL_SHARE = 1.1
_BUCKET_S = 60


class Reclaimer:
    """A thread that looks through the folder and removes the oldest files when there are too many.

    Servers that share a folder each have one. A file that says who is at work spares them doing it
    all at once; nothing depends on it, for a removed file is only a miss.
    """

    def __init__(self, folder: Path, max_bytes: int, ttl_s: float = 0.0) -> None:
        """Starts the thread, which looks through the folder at once.

        Args:
            folder: whose files, at any depth.
            max_bytes: bound on their sizes.
            ttl_s: age at which a file goes in any case; 0 for none.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._changed = threading.Condition()
        self._used_bytes = 0  # by the last scan; guarded by _changed
        self._new_bytes = 0  # written by this server since; guarded by _changed
        self._closed = False  # guarded by _changed
        self._is_due = True  # guarded by _changed
        self._is_scanning = False  # guarded by _changed
        self.num_removed = 0
        self.num_scans = 0  # guarded by _changed
        self._thread = threading.Thread(
            target=self._run, name="hier-kv-remote-reclaim", daemon=True
        )
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

    def wait_scanned(self, timeout_s: float) -> bool:
        """Waits until a scan that began after this call has ended; for tests."""
        with self._changed:
            target = self.num_scans + 1 + self._is_scanning  # that one began before
            self._is_due = True
            self._changed.notify_all()
            while self.num_scans < target:
                self._is_due = True
                self._changed.notify_all()
                if not self._changed.wait(timeout_s):
                    return False
            return True

    def close(self) -> None:
        """Ends the thread; one that hangs in the operating system is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
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
                logger.warning("hier-kv: %s could not be looked through: %s", self._folder, error)
            with self._changed:
                if used is not None:
                    self._used_bytes = used
                    self._new_bytes -= before
                self.num_scans += 1
                self._is_scanning = False
                self._changed.notify_all()

    def _scan(self) -> int | None:
        """Removes what must go; returns the bytes left, None when another server is at work."""
        if not self._take_lock():
            return None
        try:
            now_s = time.time()
            ages, total = self._count(now_s)
            if total <= self._max_bytes:
                return total
            return total - self._remove_oldest(ages, total - int(self._max_bytes * _KEEP_SHARE))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._folder / LOCK_NAME)

    def _count(self, now_s: float) -> tuple[Counter[int], int]:
        """Bytes by age in buckets, and in all; removes what is too old and leftovers of writers."""
        ages: Counter[int] = Counter()
        total = 0
        for path, status in self._files():
            age_s = now_s - status.st_mtime
            if path.name.startswith(TEMP_PREFIX):
                if age_s > _TEMP_AGE_S:
                    self._remove(path)
                continue
            if self._ttl_s and age_s > self._ttl_s:
                self._remove(path)
                continue
            ages[int(status.st_mtime) // _BUCKET_S] += status.st_size
            total += status.st_size
        return ages, total

    def _remove_oldest(self, ages: Counter[int], excess: int) -> int:
        """Removes at least `excess` bytes of files, the oldest first; returns how many."""
        last, rest = 0, excess
        for last in sorted(ages):
            rest -= ages[last]
            if rest <= 0:
                break
        removed = 0
        for path, status in self._files():
            bucket = int(status.st_mtime) // _BUCKET_S
            if path.name.startswith(TEMP_PREFIX) or bucket > last:
                continue
            if bucket == last and removed >= excess:
                continue
            self._remove(path)
            removed += status.st_size
        return removed

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        folders = [str(self._folder)]
        while folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with self._changed:
                        if self._closed:
                            return
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.name.endswith(".hkv") or entry.name.startswith(TEMP_PREFIX):
                        with contextlib.suppress(FileNotFoundError):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
            self.num_removed += 1

    def _take_lock(self) -> bool:
        path = self._folder / LOCK_NAME
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LOCK_AGE_S:
                os.unlink(path)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        return True
