"""A shared mount: `file:///folder`. Many writers, no lock: a value is a file, published whole.

`FOLDER/PREFIX-1/NAMESPACE/ab/cd/PAGE.LORA.LEVEL.hkv`, and `...+CHECKSUM.1.hkv` for a part; `ab`
and `cd` are the first digits of the page hash. A mount that hangs costs the calls in its hands
their time and no more: system calls run on threads that are left behind.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.record import ByteArray
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
from sglang_ext.tiers.remote.file_reclaim import TEMP_PREFIX, Reclaimer
from sglang_ext.tiers.remote.patience import Errand, Patience
from sglang_ext.tiers.remote.url import Options, RemoteUrl, folder_size, one_of, size

T = TypeVar("T")

_SUFFIX = ".hkv"
_MAX_THREADS = 16
# A file that is read is made young again if it is older, for the order in which they are removed.
_RENEW_AFTER_S = 600.0
_FREE_CHECK_S = 1.0
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINK_ERRORS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def options(scheme: str) -> Options:
    """See `register_engine`."""
    readers = {"size": folder_size, "free": size, "fsync": one_of("none", "always")}
    return Options(readers, path="folder", max_hosts=0)


def open_engine(url: RemoteUrl) -> RemoteEngine:
    """See `register_engine`.

    Raises:
        TierConfigError: the folder is not there or cannot be written to.
    """
    folder = Path(url.path)
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that is too long
        is_folder = False
    if not is_folder:
        shown = url.path if len(url.path) <= 100 else url.path[:100] + "..."
        raise TierConfigError(
            f"--hier-kv-remote-url: {shown} must be a folder that is there; mount or make it"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise TierConfigError(
            f"--hier-kv-remote-url: {folder} cannot be read and written by this user"
        )
    if "size" not in url.options:
        raise TierConfigError(
            "--hier-kv-remote-url: a file:// URL says how much may lie there; add size=100GB or"
            " another"
        )
    given = url.options
    return FileEngine(
        FileConfig(
            folder=folder,
            max_bytes=given["size"],
            min_free_bytes=given.get("free", FileConfig.min_free_bytes),
            fsync=given.get("fsync", "none") == "always",
            ttl_s=given.get("ttl", 0.0),
        )
    )


@dataclass(frozen=True)
class FileConfig:
    """How a folder is used.

    Attributes:
        folder: on the mount; there already.
        max_bytes: bound on all values in it, kept by removing the oldest. It is checked from time
            to time, so several writers may go over it by some percent for a while.
        min_free_bytes: nothing is written while the file system has less than this left.
        fsync: whether a value is synced before it is published; else a crash of the machine may
            leave short files, which are misses.
        ttl_s: life of a value after it was stored or read; 0 for no end.
    """

    folder: Path
    max_bytes: int
    min_free_bytes: int = 1 << 30
    fsync: bool = False
    ttl_s: float = 0.0


class _Got(NamedTuple):
    """What was read for one fetch; no bytes when there is no value."""

    position: int
    data: ByteArray


class FileEngine(RemoteEngine):
    """Keeps values in a shared folder. One thread removes what is old or too much."""

    max_value_bytes = 64 << 20
    keeps_ttl = True

    def __init__(self, config: FileConfig) -> None:
        """Starts the thread that reclaims.

        Args:
            config: the settings.
        """
        self._config = config
        self._patience = Patience(_MAX_THREADS, "hier-kv-remote-file")
        self._writer_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._device = os.stat(config.folder).st_dev
        self._free_lock = threading.Lock()
        self._free_checked_s = 0.0  # guarded by _free_lock
        self._is_low = False  # guarded by _free_lock
        self.reclaimer = Reclaimer(config.folder, config.max_bytes, config.ttl_s)

    def ping(self, deadline: Deadline) -> None:
        """See `RemoteEngine.ping`. Lists the folder."""

        def work(errand: Errand[_Got]) -> None:
            self._check_mount()
            with os.scandir(self._config.folder) as entries:
                next(entries, None)

        self._run(work, lambda _: None, deadline)

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`."""
        asked = [(fetch.name, fetch.offset, fetch.out.size) for fetch in fetches]

        def work(errand: Errand[_Got]) -> None:
            for index, (name, offset, num_bytes) in enumerate(asked):
                errand.emit(_Got(index, self._read(self._path(name), offset, num_bytes)))

        def take(got: _Got) -> None:
            fetches[got.position].out[: got.data.size] = got.data
            on_fetched(got.position, got.data.size)

        self._run(work, take, deadline)

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`."""

        def work(errand: Errand[tuple[int, bool]]) -> None:
            self._check_mount()
            self._check_room()
            for index, value in enumerate(values):
                written = self._write(value, errand)
                if written:
                    self.reclaimer.note_written(value.num_bytes)
                errand.emit((index, written))

        self._run(work, lambda item: on_stored(*item), deadline)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        """See `RemoteEngine.exists`."""
        found: list[bool] = []

        def work(errand: Errand[bool]) -> None:
            for name in names:
                status = _status(self._path(name))
                errand.emit(status is not None and not self._is_expired(status))

        self._run(work, found.append, deadline)
        return found

    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.touch`."""

        def work(errand: Errand[None]) -> None:
            for name in names:
                errand.check()
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    os.utime(self._path(name))

        self._run(work, lambda _: None, deadline)

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """See `RemoteEngine.delete`."""
        removed: list[None] = []

        def work(errand: Errand[None]) -> None:
            for name in names:
                errand.check()
                try:
                    os.unlink(self._path(name))
                except FileNotFoundError:
                    continue
                errand.emit(None)

        self._run(work, removed.append, deadline)
        return len(removed)

    def usage(self, deadline: Deadline) -> Usage:
        """See `RemoteEngine.usage`. As of the last time that the folder was looked through."""
        return Usage(self.reclaimer.used_bytes, self._config.max_bytes)

    def close(self) -> None:
        """See `RemoteEngine.close`."""
        self.reclaimer.close()

    def _run(
        self,
        work: Callable[[Errand[T]], None],
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

    def _path(self, name: str) -> Path:
        value, _, part = name.partition("/")
        prefix, version, namespace, page, lora, level = value.split(":")
        folder = self._config.folder / f"{prefix}-{version}" / namespace / page[:2] / page[2:4]
        return folder / f"{page}.{lora}.{level}{'+' if part else ''}{part}{_SUFFIX}"

    def _read(self, path: Path, offset: int, num_bytes: int) -> ByteArray:
        """Reads a range; empty when there is no file or its time is over."""
        nothing = np.empty(0, np.uint8)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return nothing
        try:
            status = os.fstat(fd)
            if self._is_expired(status):
                return nothing
            data = np.empty(max(0, min(num_bytes, status.st_size - offset)), np.uint8)
            done = 0
            while done < data.size:
                got = os.preadv(fd, [data[done:].data], offset + done)
                if got == 0:
                    break
                done += got
            if time.time() - status.st_mtime > _RENEW_AFTER_S:
                with contextlib.suppress(OSError):
                    os.utime(fd)
            return data[:done]
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed by another server while it was read
                return nothing
            raise
        finally:
            os.close(fd)

    def _write(self, value: Value, errand: Errand[tuple[int, bool]]) -> bool:
        """Writes a value under a name of its own and publishes it; whether it was published."""
        path = self._path(value.name)
        if not value.replaces and (status := _status(path)) and not self._is_expired(status):
            return False
        temp = path.with_name(f"{TEMP_PREFIX}{self._writer_id}-{next(self._numbers)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(temp, flags, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temp, flags, 0o644)
        try:
            try:
                _write_all(fd, value.pieces)
                if self._config.fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            errand.check()  # later the bytes may be others'
            return self._publish(temp, path, replaces=value.replaces)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)

    def _publish(self, temp: Path, path: Path, *, replaces: bool) -> bool:
        if not replaces and (status := _status(path)) and self._is_expired(status):
            replaces = True
        if not replaces:
            try:
                os.link(temp, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINK_ERRORS:
                    raise
                replaces = True  # a mount without hard links: the last of two writers wins
        if replaces:
            os.replace(temp, path)
        if self._config.fsync:
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return True

    def _check_mount(self) -> None:
        """Raises RemoteUnavailableError where another file system lies there than at the start."""
        if os.stat(self._config.folder).st_dev != self._device:
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
            status = os.statvfs(self._config.folder)
            is_low = status.f_bavail * status.f_frsize < self._config.min_free_bytes
            with self._free_lock:
                self._is_low = is_low
        with self._free_lock:
            if self._is_low:
                raise RemoteFullError("the file system has no more free space than is to be left")

    def _is_expired(self, status: os.stat_result) -> bool:
        ttl_s = self._config.ttl_s
        return bool(ttl_s) and time.time() - status.st_mtime > ttl_s


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write_all(fd: int, pieces: Sequence[ByteArray]) -> None:
    views = [piece.data for piece in pieces if piece.size]
    while views:
        done = os.writev(fd, views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views and done:
            views[0] = views[0][done:]
