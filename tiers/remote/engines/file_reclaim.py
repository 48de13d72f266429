"""Keeps a shared folder of values within its size, and clean of what killed writers left."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator

from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.remote.engines.file_marks import FileMarks
from sglang_ext.tiers.remote.engines.value_folders import Found, ValueFolders
from sglang_ext.tiers.remote.keeping.retention import last_use_s
from sglang_ext.tiers.remote.shares.division import Division

logger = logging.getLogger(__name__)
failures = FailureLog(logger)

LOCK_NAME = "reclaim.lock"
_TEMP_AGE_S = 3600.0
_LOCK_AGE_S = 900.0
_EMPTY_AGE_S = 60.0  # an empty folder may be one that a writer has just made
_SCAN_EVERY_S = 3600.0
_SCAN_AGAIN_S = 60.0  # where another server was at work: what lies there is not known here yet
_SCAN_AFTER_SHARE = 1 / 64  # of the size, in bytes that this server wrote
_KEEP_SHARE = 0.9
_OVERFULL_SHARE = 1.1
_BUCKET_S = 60
_PROBE_BYTES = 4096  # more than any file system keeps beside a file's name
_STAT_BLOCK_BYTES = 512  # of `st_blocks`, on every file system


class FolderReclaimer:
    """A thread that looks through a deployment's values and removes the oldest of too many.

    Servers that share a folder each have one. A file that says who is at work spares them doing it
    all at once; nothing depends on it, for a removed file is only a miss. Where tenants have
    shares, the oldest of those above theirs go; without shares all are one.
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
        self._marks = FileMarks()
        self._rights: tuple[float, ...] = (1.0,)
        self._changed = threading.Condition()
        # By tenant, of which there is one without shares.
        self._used_bytes = [0]  # by the last scan; guarded by _changed
        self._new_bytes = [0]  # written by this server since; guarded by _changed
        self._closed = False  # guarded by _changed
        self._is_due = True  # guarded by _changed
        self._is_scanning = False  # guarded by _changed
        self._has_warned = self._has_warned_of_errors = False
        self._now_s = 0.0  # when the look began; the thread's own
        self._counts_blocks = False  # whether the file system says what files take
        self.num_removed = 0
        self.num_scans = 0  # guarded by _changed
        self.num_passed_over = 0  # of them, as another server was at work; guarded by _changed
        self._thread = threading.Thread(
            target=self._run, name="hier-kv-remote-reclaim", daemon=True
        )

    def divide(self, division: Division, marks: FileMarks) -> None:
        """Has what is above its tenant's share go before all else; called before `start`.

        Args:
            division: who has which share.
            marks: say whose a file is.
        """
        self._rights, self._marks = division.rights, marks
        self._used_bytes = [0] * len(self._rights)
        self._new_bytes = [0] * len(self._rights)

    def start(self) -> None:
        """Starts the thread, which looks through the folders at once."""
        self._thread.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of all values: what the last scan saw and what this server wrote since."""
        with self._changed:
            return sum(self._used_bytes) + sum(self._new_bytes)

    def used_by_tenant(self) -> list[int]:
        """The same of each tenant; empty without shares."""
        with self._changed:
            if len(self._rights) == 1:
                return []
            return [used + new for used, new in zip(self._used_bytes, self._new_bytes, strict=True)]

    @property
    def is_overfull(self) -> bool:
        """Whether writing should pause until something was removed."""
        return self.used_bytes > self._max_bytes * _OVERFULL_SHARE

    def note_written(self, num_bytes: int, tenant: int = 0) -> None:
        """Counts bytes that were written for a tenant."""
        with self._changed:
            self._new_bytes[tenant] += num_bytes
            if sum(self._new_bytes) > self._max_bytes * _SCAN_AFTER_SHARE:
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
        wait_s = every_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._closed, wait_s)
                if self._closed:
                    return
                self._is_due, self._is_scanning = False, True
                before = list(self._new_bytes)
            used, passes_over = None, False
            try:
                used = self._scan()
                passes_over = used is None
            except OSError as error:
                self._warn(error)
            except Exception:  # without this thread the folder would be full for good
                failures.exception("hier-kv: a shared folder could not be looked through")
            with self._changed:
                if used is not None:
                    self._used_bytes = used
                    for tenant, num_bytes in enumerate(before):
                        self._new_bytes[tenant] -= num_bytes
                self.num_scans += 1
                self.num_passed_over += passes_over
                wait_s = min(every_s, _SCAN_AGAIN_S) if used is None else every_s
                self._is_scanning = False
                self._changed.notify_all()

    def _warn(self, error: OSError) -> None:
        """Says that something could not be looked at; once, as there is a look at every put."""
        if not self._has_warned_of_errors:
            self._has_warned_of_errors = True
            logger.warning(
                "hier-kv: not all of %s can be looked through, and what cannot is not removed: %s",
                self._folders.root,
                error,
            )

    def _scan(self) -> list[int] | None:
        """Removes what must go.

        Returns:
            The bytes left, by tenant; None when another server is at work.
        """
        try:
            with self._folders.top() as top:
                return self._scan_in(top)
        except FileNotFoundError:
            return [0] * len(self._rights)

    def _scan_in(self, top: int) -> list[int] | None:
        if not self._take_lock(top):
            return None
        try:
            now_s = self._now_s = time.time()
            ages = self._count()
            used = [each.total() for each in ages]
            if sum(used) > self._max_bytes:
                self._remove_oldest(ages, used)
            self._folders.remove_empty(now_s - _EMPTY_AGE_S, lambda: self._closed)
            return used
        finally:
            with contextlib.suppress(OSError):
                os.unlink(LOCK_NAME, dir_fd=top)

    def _count(self) -> list[Counter[int]]:
        """Bytes of each tenant by age, in buckets; removes what is too old, and leftovers."""
        ages: list[Counter[int]] = [Counter() for _ in self._rights]
        for found in self._files():
            status = found.status
            if found.is_temp:
                if self._now_s - status.st_mtime > _TEMP_AGE_S:
                    self._remove(found)
                continue
            # By what is written: a server whose clock is behind would else remove all that it sees.
            age_s = self._now_s - status.st_mtime
            if self._ttl_s and age_s > self._ttl_s and self._remove(found):
                continue
            ages[self._marks.tenant_of(status)][self._bucket_of(status)] += self._bytes_of(status)
        return ages

    def _remove_oldest(self, ages: list[Counter[int]], used: list[int]) -> None:
        """Removes the oldest files of those above their share until what lies there is in bounds.

        What cannot be removed stays and counts, and younger files go in its place.

        Args:
            ages: see `_count`; what is removed or cannot be is taken off.
            used: bytes of each tenant; what is removed is taken off.
        """
        kept_bytes = int(self._max_bytes * _KEEP_SHARE)
        has_failed = True
        while has_failed and sum(used) > kept_bytes and sum(each.total() for each in ages) > 0:
            above = [
                max(0, mine - int(right * kept_bytes))
                for mine, right in zip(used, self._rights, strict=True)
            ]
            last, left = _oldest(ages, above, sum(used) - kept_bytes)
            has_failed = self._remove_up_to(last, left, ages, used)

    def _remove_up_to(
        self, last: list[float], left: list[int], ages: list[Counter[int]], used: list[int]
    ) -> bool:
        """Removes files as `_oldest` chose them; returns whether one could not be."""
        has_failed, rest = False, [each.total() for each in ages]
        for found in self._files():
            tenant = self._marks.tenant_of(found.status)
            bucket = self._bucket_of(found.status)
            if found.is_temp or bucket > last[tenant]:
                continue
            if bucket == last[tenant] and rest[tenant] <= left[tenant]:
                continue
            num_bytes = min(self._bytes_of(found.status), ages[tenant][bucket])
            ages[tenant][bucket] -= num_bytes
            rest[tenant] -= num_bytes
            if self._remove(found):
                used[tenant] -= num_bytes
            else:
                has_failed |= num_bytes > 0
        return has_failed

    def _files(self) -> Iterator[Found]:
        for found in self._folders.files(self._warn):
            with self._changed:
                if self._closed:
                    return
            yield found

    def _remove(self, found: Found) -> bool:
        """Removes a file; whether it is gone."""
        try:
            os.unlink(found.name, dir_fd=found.folder)
        except FileNotFoundError:  # somebody else did
            return True
        except OSError:
            return False
        self.num_removed += 1
        return True

    def _take_lock(self, top: int) -> bool:
        with contextlib.suppress(OSError):
            status = os.stat(LOCK_NAME, dir_fd=top, follow_symlinks=False)
            # One of the future says nothing of its age: a clock was set, or somebody set the time.
            if abs(time.time() - status.st_mtime) > _LOCK_AGE_S:
                os.unlink(LOCK_NAME, dir_fd=top)
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.stat(LOCK_NAME, dir_fd=top, follow_symlinks=False).st_mode):
                # None of ours, and it would hold everybody off for good.
                away = f"no-{LOCK_NAME}-{secrets.token_hex(4)}"
                os.rename(LOCK_NAME, away, src_dir_fd=top, dst_dir_fd=top)
        try:
            fd = self._folders.make_file(top, LOCK_NAME)
        except FileExistsError:
            return False
        try:
            with contextlib.suppress(OSError):  # on a full file system, too, something must go
                os.write(fd, os.urandom(_PROBE_BYTES))
            self._counts_blocks = os.fstat(fd).st_blocks > 0
            if len(self._rights) > 1 and not self._has_warned and not self._marks.are_kept(fd):
                self._has_warned = True
                logger.warning(
                    "hier-kv: the file system of %s keeps no fractions of seconds of a file's "
                    "time, so it is not known there whose a value is, and shares do not hold",
                    self._folders.root,
                )
        finally:
            os.close(fd)
        return True

    def _bucket_of(self, status: os.stat_result) -> int:
        return int(last_use_s(status.st_mtime, self._now_s)) // _BUCKET_S

    def _bytes_of(self, status: os.stat_result) -> int:
        """Bytes that a file takes; its holes take none."""
        if not self._counts_blocks:
            return status.st_size
        return min(status.st_size, status.st_blocks * _STAT_BLOCK_BYTES)


def _oldest(
    ages: list[Counter[int]], above: list[int], excess: int
) -> tuple[list[float], list[int]]:
    """Which files make up an excess, the oldest first.

    Args:
        ages: bytes of each tenant by age.
        above: bytes that each may have to give; not less than the excess together.
        excess: bytes in all.

    Returns:
        For each tenant the last age of which something goes, if any, and the bytes that stay.
    """
    last, goes = [-math.inf] * len(ages), [0] * len(ages)
    for bucket in sorted({bucket for each in ages for bucket in each}):
        for tenant, each in enumerate(ages):
            num_bytes = min(each[bucket], above[tenant] - goes[tenant], excess)
            if num_bytes > 0:
                last[tenant] = bucket
                goes[tenant] += num_bytes
                excess -= num_bytes
    return last, [each.total() - gone for each, gone in zip(ages, goes, strict=True)]
