"""A shared mount: `file:///folder`. Many writers, no lock: a value is a file, published whole.

Where it lies is up to `value_folders.py`. A mount that hangs costs the calls in its hands their
time and no more: system calls run on threads that are left behind.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from sglang_ext.tiers.access import Access, shown
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    OnFetched,
    OnStored,
    RemoteEngine,
    RemoteError,
    RemoteFullError,
    RemoteUnavailableError,
    Usage,
    Value,
)
from sglang_ext.tiers.remote.deadline_executor import CancellableTask, DeadlineExecutor
from sglang_ext.tiers.remote.engines.file_listing import FileListing
from sglang_ext.tiers.remote.engines.file_marks import FileMarks, make_old, renew
from sglang_ext.tiers.remote.engines.file_reclaim import FolderReclaimer
from sglang_ext.tiers.remote.engines.value_folders import (
    NOTHING_THERE,
    STRANGE_ERRORS,
    TEMP_PREFIX,
    VALUE_FLAGS,
    InTheWayError,
    ValueFolders,
    read_at,
)
from sglang_ext.tiers.remote.keeping.retention import last_use_s, over_age_s
from sglang_ext.tiers.remote.offline.listing import Listing
from sglang_ext.tiers.remote.shares.division import Division
from sglang_ext.tiers.remote.url_options import (
    Options,
    RemoteUrl,
    folder_size,
    one_of,
    prefix_of,
    size,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_THREADS = 16
# A file that is read is made young again if it is older, for the order in which they are removed.
_RENEW_AFTER_S = 600.0
_FREE_CHECK_S = 1.0
_MAX_REMOVALS = 3  # of a folder under a put
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of things in a value's place that are no value: a symbolic link, a folder, a file that this
# user may not read, a socket. They count as a missing value and not as a failure of the folder.
_NO_VALUE_ERRORS = (*STRANGE_ERRORS, errno.ENXIO)
_NO_LINK_ERRORS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def options(scheme: str) -> Options:
    """See `EngineModule` of registry.py."""
    readers = {
        "size": folder_size,
        "free": size,
        "fsync": one_of("none", "always"),
        "group": Access.of_group,
    }
    return Options(readers, path="folder", max_hosts=0)


def open_engine(url: RemoteUrl) -> RemoteEngine:
    """See `EngineModule` of registry.py.

    Raises:
        TierConfigError: the folder is not there or cannot be written to.
    """
    folder = Path(url.path)
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that is too long
        is_folder = False
    if not is_folder:
        raise TierConfigError(
            f"--hier-kv-remote-url: {shown(folder)} must be a folder that is there; mount or make"
            " it"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise TierConfigError(
            f"--hier-kv-remote-url: {shown(folder)} cannot be read and written by this user"
        )
    if "size" not in url.options:
        raise TierConfigError(
            "--hier-kv-remote-url: a file:// URL says how much may lie there; add size=100GB or"
            " another"
        )
    given = url.options
    folders = ValueFolders(folder, prefix_of(url), given.get("group", Access()))
    try:
        folders.check()
    except OSError as error:
        raise TierConfigError(
            f"--hier-kv-remote-url: {shown(folder)} cannot be looked at ({error.strerror}); mount"
            " or make it"
        ) from error
    return FileEngine(
        FileConfig(
            folders=folders,
            max_bytes=given["size"],
            min_free_bytes=given.get("free", FileConfig.min_free_bytes),
            fsync=given.get("fsync", "none") == "always",
            ttl_s=given.get("ttl", 0.0),
        )
    )


def open_listing(url: RemoteUrl) -> Listing:
    """See `EngineModule` of registry.py. How much may lie there need not be said.

    Raises:
        TierConfigError: the folder is not there.
    """
    folder = Path(url.path)
    if not folder.is_dir():
        raise TierConfigError(
            f"--hier-kv-remote-url: {shown(folder)} must be a folder that is there; mount it or"
            " correct the path"
        )
    return FileListing(ValueFolders(folder, prefix_of(url), Access()))


@dataclass(frozen=True)
class FileConfig:
    """How a folder is used.

    Attributes:
        folders: on the mount; the shared folder is there already.
        max_bytes: bound on all values in it, kept by removing the oldest. It is checked from time
            to time, so several writers may go over it by some percent for a while.
        min_free_bytes: nothing is written while the file system has less than this left.
        fsync: whether a value is synced before it is published; else a crash of the machine may
            leave short files, which are misses.
        ttl_s: life of a value after it was stored or read; 0 for no end.
    """

    folders: ValueFolders
    max_bytes: int
    min_free_bytes: int = 1 << 30
    fsync: bool = False
    ttl_s: float = 0.0


class _Got(NamedTuple):
    """What was read for one fetch; no bytes when there is no value."""

    position: int
    data: ByteArray


class _InTheWay:
    """Says what lies in the way of values; once, as there may be any number of such things."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, error: InTheWayError) -> None:
        """Something does."""
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "hier-kv: %s is in the way of values (%s), which are not stored; remove it or give "
                "it to the servers' user, and others like it, of which nothing is said",
                shown(error.filename),
                error.strerror,
            )


class FileEngine(RemoteEngine):
    """Keeps values in a shared folder. Once begun, one thread removes what is old or too much.

    It has many methods because the interface of an engine does, and each call is made of steps.
    """

    max_value_bytes = 64 << 20
    keeps_ttl = True
    takes_ends = True

    def __init__(self, config: FileConfig) -> None:
        """Starts nothing yet.

        Args:
            config: the settings.
        """
        self._config = config
        self._folders = config.folders
        self._root = config.folders.root
        self._patience = DeadlineExecutor(_MAX_THREADS, "hier-kv-remote-file")
        self._writer_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._device = os.stat(self._root).st_dev
        self._in_the_way = _InTheWay()
        self._free_lock = threading.Lock()
        self._free_checked_s = 0.0  # guarded by _free_lock
        self._is_low = False  # guarded by _free_lock
        self._marks = FileMarks()
        self.reclaimer = FolderReclaimer(config.folders, config.max_bytes, config.ttl_s)

    def divide(self, division: Division) -> bool:
        """See `RemoteEngine.divide`. Files are marked, and those above their shares go first."""
        self._marks = FileMarks(division)
        self.reclaimer.divide(division, self._marks)
        return True

    def used_by_tenant(self) -> list[int]:
        """See `RemoteEngine.used_by_tenant`. As of the last time the folder was looked through."""
        return self.reclaimer.used_by_tenant()

    def begin(self) -> None:
        """See `RemoteEngine.begin`. Starts the thread that reclaims."""
        self.reclaimer.start()

    def ping(self, deadline: Deadline) -> None:
        """See `RemoteEngine.ping`. Lists the folder."""

        def work(errand: CancellableTask[_Got]) -> None:
            self._check_mount()
            with os.scandir(self._root) as entries:
                next(entries, None)

        self._run(work, lambda _: None, deadline)

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`."""
        asked = [(fetch.name, fetch.offset, fetch.out.size) for fetch in fetches]

        def work(errand: CancellableTask[_Got]) -> None:
            for index, (name, offset, num_bytes) in enumerate(asked):
                errand.emit(_Got(index, self._read(name, offset, num_bytes)))

        def take(got: _Got) -> None:
            fetches[got.position].out[: got.data.size] = got.data
            on_fetched(got.position, got.data.size)

        self._run(work, take, deadline)

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`. What cannot be stored for what lies there is not reported."""

        def work(errand: CancellableTask[tuple[int, bool]]) -> None:
            self._check_mount()
            self._check_room()
            unwritten = set[str]()  # one part of a record is no use without the others
            for index, value in enumerate(values):
                whole = value.name.partition("/")[0]
                if whole in unwritten:
                    continue
                try:
                    written = self._write(value, errand)
                except InTheWayError as error:
                    unwritten.add(whole)
                    self._in_the_way.tell(error)
                    continue
                if written:
                    self.reclaimer.note_written(value.num_bytes, value.tenant)
                errand.emit((index, written))

        self._run(work, lambda item: on_stored(*item), deadline)

    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.touch`."""
        self._each(names, renew, deadline)

    def let_go(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.let_go`. Files that are not our user's stay as they are."""
        age_s = over_age_s(self._config.ttl_s)
        self._each(names, partial(make_old, age_s=age_s), deadline)

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """See `RemoteEngine.delete`."""
        removed: list[None] = []

        def work(errand: CancellableTask[None]) -> None:
            for name in names:
                errand.check()
                with _absence_suppressed(), self._folders.folder_of(name) as (folder, file):
                    os.unlink(file, dir_fd=folder)
                    errand.emit(None)

        self._run(work, removed.append, deadline)
        return len(removed)

    def usage(self, deadline: Deadline) -> Usage:
        """See `RemoteEngine.usage`. As of the last time that the folder was looked through."""
        return Usage(self.reclaimer.used_bytes, self._config.max_bytes)

    def close(self) -> None:
        """See `RemoteEngine.close`."""
        self.reclaimer.close()

    def _each(
        self,
        names: Sequence[str],
        change: Callable[[str, os.stat_result, int], None],
        deadline: Deadline,
    ) -> None:
        """Changes the times of those files that are there."""

        def work(errand: CancellableTask[None]) -> None:
            for name in names:
                errand.check()
                with _absence_suppressed(), self._folders.folder_of(name) as (folder, file):
                    change(file, os.stat(file, dir_fd=folder, follow_symlinks=False), folder)

        self._run(work, lambda _: None, deadline)

    def _run(
        self,
        work: Callable[[CancellableTask[T]], None],
        take: Callable[[T], None],
        deadline: Deadline,
    ) -> None:
        try:
            self._patience.run(work, take, deadline)
        except RemoteError:
            raise
        except OSError as error:
            if error.errno in _FULL_ERRORS:
                raise RemoteFullError(f"{error.strerror}") from error
            raise RemoteUnavailableError(f"the folder fails: {error.strerror}") from error

    def _read(self, name: str, offset: int, num_bytes: int) -> ByteArray:
        """Reads a range; empty when there is no file or its time is over."""
        nothing = np.empty(0, np.uint8)
        try:
            with self._folders.folder_of(name) as (folder, file):
                fd = os.open(file, VALUE_FLAGS, dir_fd=folder)
        except NOTHING_THERE:
            return nothing
        except OSError as error:
            if error.errno in _NO_VALUE_ERRORS:
                return nothing
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or self._is_expired(status):
                return nothing
            data = np.empty(max(0, min(num_bytes, status.st_size - offset)), np.uint8)
            done = read_at(fd, data, offset)
            now_s = time.time()
            if now_s - last_use_s(status.st_mtime, now_s) > _RENEW_AFTER_S:
                with contextlib.suppress(OSError):
                    renew(fd, status)
            return data[:done]
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed by another server while it was read
                return nothing
            raise
        finally:
            os.close(fd)

    def _write(self, value: Value, errand: CancellableTask[tuple[int, bool]]) -> bool:
        """Writes a value under a name of its own and publishes it; whether it was published."""
        for _ in range(_MAX_REMOVALS):
            with contextlib.suppress(FileNotFoundError):  # another server removed the empty folder
                return self._write_once(value, errand)
        return self._write_once(value, errand)

    def _write_once(self, value: Value, errand: CancellableTask[tuple[int, bool]]) -> bool:
        with (
            self._folders.folder_of(value.name, make=True) as (folder, file),
            _strangers_told(self._folders, value.name),
        ):
            status = None if value.replaces else _status(folder, file)
            if status is not None and not self._is_expired(status):
                if not stat.S_ISREG(status.st_mode):  # nobody can read it as a value
                    raise InTheWayError(
                        errno.EEXIST, "it is no file", str(self._folders.path_of(value.name))
                    )
                return False
            temp = f"{TEMP_PREFIX}{self._writer_id}-{next(self._numbers)}"
            fd = self._folders.make_file(folder, temp)
            try:
                try:
                    _write_all(fd, value.pieces)
                    self._marks.write(fd, value.tenant)
                    if self._config.fsync:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                errand.check()  # later the bytes may be others'
                return self._publish(folder, temp, file, replaces=value.replaces)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp, dir_fd=folder)

    def _publish(self, folder: int, temp: str, file: str, *, replaces: bool) -> bool:
        if not replaces and (status := _status(folder, file)) and self._is_expired(status):
            replaces = True
        if not replaces:
            try:
                os.link(temp, file, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINK_ERRORS:
                    raise
                replaces = True  # a mount without hard links: the last of two writers wins
        if replaces:
            os.replace(temp, file, src_dir_fd=folder, dst_dir_fd=folder)
        if self._config.fsync:
            os.fsync(folder)
        return True

    def _check_mount(self) -> None:
        """Raises RemoteUnavailableError where another file system lies there than at the start."""
        if os.stat(self._root).st_dev != self._device:
            raise RemoteUnavailableError("the folder's file system is no longer mounted there")

    def _check_room(self) -> None:
        """Raises RemoteFullError when nothing may be written now."""
        if self.reclaimer.is_overfull:
            raise RemoteFullError("the folder is over its size")
        with self._free_lock:
            is_due = time.monotonic() - self._free_checked_s > _FREE_CHECK_S
            if is_due:
                self._free_checked_s = time.monotonic()
        if is_due:
            status = os.statvfs(self._root)
            is_low = status.f_bavail * status.f_frsize < self._config.min_free_bytes
            with self._free_lock:
                self._is_low = is_low
        with self._free_lock:
            if self._is_low:
                raise RemoteFullError("the file system has no more free space than is to be left")

    def _is_expired(self, status: os.stat_result) -> bool:
        ttl_s = self._config.ttl_s
        return bool(ttl_s) and time.time() - status.st_mtime > ttl_s


@contextlib.contextmanager
def _absence_suppressed() -> Iterator[None]:
    """Passes over what is not there, and over what is there and is no value."""
    try:
        yield
    except NOTHING_THERE:
        pass
    except OSError as error:
        if error.errno not in _NO_VALUE_ERRORS:
            raise


@contextlib.contextmanager
def _strangers_told(folders: ValueFolders, name: str) -> Iterator[None]:
    """Where a file cannot be written for what lies there; the folder itself may be all right.

    Raises:
        InTheWayError: in place of what the system says.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in STRANGE_ERRORS:
            raise
        path = str(folders.path_of(name))
        raise InTheWayError(error.errno, error.strerror, path) from error


def _status(folder: int, file: str) -> os.stat_result | None:
    """Of a file in an open folder; None where there is none. Of a link, the link's own."""
    try:
        return os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _write_all(fd: int, pieces: Sequence[ByteArray]) -> None:
    views = [piece.data for piece in pieces if piece.size]
    while views:
        done = os.writev(fd, views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views and done:
            views[0] = views[0][done:]
