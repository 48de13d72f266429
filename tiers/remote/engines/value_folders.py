"""Where the values of a shared folder lie, and nothing else of it.

`FOLDER/PREFIX-1/NAMESPACE/ab/cd/PAGE.LORA.LEVEL.hkv`, and `...+CHECKSUM.1.hkv` for a part; `ab`
and `cd` are the first digits of the page hash. Every step below FOLDER is taken from an open folder
and through no symbolic link, so whoever may write there leads nobody out of it; what is not named
as here is never counted, read or removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_ext.tiers.access import Access, problem_of, shown
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import NAME_VERSION

TEMP_PREFIX = ".hkv-tmp-"
VALUE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NOTHING_THERE = (FileNotFoundError, NotADirectoryError)
# Errors of what is none of ours: a link, a file or a folder of another kind, another user's.
STRANGE_ERRORS = (errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM)
_SUFFIX = ".hkv"
_STEPS = [re.compile(pattern) for pattern in ("[0-9a-f]{64}", "[0-9a-f]{2}", "[0-9a-f]{2}")]
_VALUE = re.compile(
    r"[0-9a-f]{64}\.(?:[0-9a-f]{64}|-)\.[A-Za-z0-9.-]{1,40}(?:\+[0-9a-f]{16}\.[0-9]{1,4})?\.hkv"
)
_TEMP = re.compile(r"\.hkv-tmp-[0-9]{1,10}-[0-9a-f]{8}-[0-9]{1,19}")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class InTheWayError(OSError):
    """Something that is none of ours lies where a folder or a file is to be made."""


class Found(NamedTuple):
    """A file of ours, while its folder is open.

    Attributes:
        folder: descriptor of its folder.
        name: in it.
        status: its own.
        is_temp: whether a writer is at it, or was when it was killed.
        steps: names of the folders from this deployment's own down to it.
    """

    folder: int
    name: str
    status: os.stat_result
    is_temp: bool
    steps: tuple[str, ...]


class ValueFolders:
    """The folders of one deployment's values. Thread-safe; keeps nothing open."""

    def __init__(self, root: Path, prefix: str, access: Access) -> None:
        """Looks at nothing yet.

        Args:
            root: the shared folder.
            prefix: of this deployment's names.
            access: who may read what is made.
        """
        self.root = root
        self._prefix = prefix
        self._top = f"{prefix}-{NAME_VERSION}"
        self._access = access

    def check(self) -> None:
        """Refuses a folder in which others may change things, and tightens what is ours in it.

        Raises:
            TierConfigError: one sentence.
        """
        flag = "--hier-kv-remote-url"
        problem = self._problem_of(os.stat(self.root))
        if problem:
            raise TierConfigError(
                f"{flag}: {shown(self.root)} {problem}, or name a group with group=NAME"
            )
        try:
            top = os.open(self.root / self._top, _FOLDER_FLAGS)
        except FileNotFoundError:
            return
        except OSError as error:
            raise TierConfigError(
                f"{flag}: {shown(self.root / self._top)} must be a folder ({error.strerror});"
                " remove it or choose another prefix="
            ) from error
        try:
            status = os.fstat(top)
            problem = self._problem_of(status)
            if problem:
                raise TierConfigError(
                    f"{flag}: {shown(self.root / self._top)} {problem}, or choose another prefix="
                )
            mode = self._access.folder_mode
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
                with contextlib.suppress(OSError):  # a mount without permissions has none to take
                    os.fchmod(top, mode)
                    self._access.apply(top)
        finally:
            os.close(top)

    def _problem_of(self, status: os.stat_result) -> str:
        # With a group the folder is of whoever made it; everybody's it must not be all the same.
        uid = os.geteuid() if self._access.group < 0 else status.st_uid
        return problem_of(status, uid)

    @contextlib.contextmanager
    def folder_of(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open folder in which a value lies, and the name of its file there.

        Args:
            name: of the value, or of a part.
            make: whether to make the folders that are absent.

        Raises:
            OSError: FileNotFoundError or NotADirectoryError where there is none.
            InTheWayError: one cannot be made.
        """
        steps, file = _place_of(name)
        folder = self._open_steps(steps, make=make)
        try:
            yield folder, file
        finally:
            os.close(folder)

    def path_of(self, name: str) -> Path:
        """Where the file of a value, or of a part, lies: to be shown, not to be opened."""
        steps, file = _place_of(name)
        return self.root.joinpath(*steps, file)

    @contextlib.contextmanager
    def top(self) -> Iterator[int]:
        """The open folder of this deployment's values.

        Raises:
            OSError: FileNotFoundError where nothing was stored yet.
        """
        folder = self._open_steps((self._top,))
        try:
            yield folder
        finally:
            os.close(folder)

    def files(self, on_error: Callable[[OSError], None] | None = None) -> Iterator[Found]:
        """Every file of this deployment, in no order.

        Args:
            on_error: told why something below cannot be looked at, which is passed over then; None:
                the error is raised.

        Raises:
            OSError: the folder of the values, or without `on_error` what is in it, cannot be read.
        """
        with contextlib.suppress(*NOTHING_THERE), self.top() as top:
            yield from _files(top, (), on_error)

    def remove_empty(self, before_s: float, is_over: Callable[[], bool]) -> None:
        """Removes folders without a file that nothing happened in since a time; until it is over.

        A writer that has opened one finds that it is gone, and makes it once more.
        """
        with contextlib.suppress(*NOTHING_THERE), self.top() as top:
            _remove_empty(top, 0, before_s, is_over)

    def name_of(self, found: Found) -> str:
        """The name of the value in a file; "" where it is none, or not where that value lies."""
        value, _, part = found.name.removesuffix(_SUFFIX).partition("+")
        page, *rest = value.split(".", 2)
        namespace, *digits = found.steps
        if found.is_temp or digits != [page[:2], page[2:4]]:
            return ""
        name = ":".join((self._prefix, str(NAME_VERSION), namespace, page, *rest))
        return f"{name}/{part}" if part else name

    def make_file(self, folder: int, name: str) -> int:
        """Makes a file and opens it for writing.

        Raises:
            OSError: it cannot be made, or is there.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, self._access.file_mode, dir_fd=folder)
        try:
            self._access.apply(fd)
        except OSError:
            os.close(fd)
            os.unlink(name, dir_fd=folder)
            raise
        return fd

    def _open_steps(self, steps: tuple[str, ...], *, make: bool = False) -> int:
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for depth, step in enumerate(steps):
            try:
                below = self._open_step(folder, step, make=make)
            except OSError as error:
                # Without the first there is nothing at all, and the shared folder fails.
                if not (make and depth and error.errno in STRANGE_ERRORS):
                    raise
                path = self.root.joinpath(*steps[: depth + 1])
                raise InTheWayError(error.errno, error.strerror, str(path)) from error
            finally:
                os.close(folder)
            folder = below
        return folder

    def _open_step(self, folder: int, step: str, *, make: bool) -> int:
        try:
            return os.open(step, _FOLDER_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        is_new = True
        try:
            os.mkdir(step, self._access.folder_mode & 0o777, dir_fd=folder)
        except FileExistsError:  # another server was quicker
            is_new = False
        below = os.open(step, _FOLDER_FLAGS, dir_fd=folder)
        try:
            if is_new:
                self._access.apply(below)
        except OSError:
            os.close(below)
            raise
        return below


def _place_of(name: str) -> tuple[tuple[str, ...], str]:
    """The folders in which a value lies, or a part, and the name of its file there."""
    value, _, part = name.partition("/")
    prefix, version, namespace, page, lora, level = value.split(":")
    steps = (f"{prefix}-{version}", namespace, page[:2], page[2:4])
    return steps, f"{page}.{lora}.{level}{'+' if part else ''}{part}{_SUFFIX}"


def _remove_empty(folder: int, depth: int, before_s: float, is_over: Callable[[], bool]) -> None:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _STEPS[depth].fullmatch(entry.name)]
    for name in names:
        if is_over():
            return
        try:
            below = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
        except OSError:  # removed meanwhile, or no folder
            continue
        try:
            if depth + 1 < len(_STEPS):
                _remove_empty(below, depth + 1, before_s, is_over)
            is_old = os.fstat(below).st_mtime < before_s
        finally:
            os.close(below)
        if is_old:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(name, dir_fd=folder)


def read_at(fd: int, out: ByteArray, offset: int) -> int:
    """Reads into `out` from there on; its bytes, fewer where the file ends before.

    Raises:
        OSError: it cannot be read.
    """
    done = 0
    while done < out.size and (got := os.preadv(fd, [out[done:].data], offset + done)):
        done += got
    return done


def _files(
    folder: int, steps: tuple[str, ...], on_error: Callable[[OSError], None] | None
) -> Iterator[Found]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if len(steps) < len(_STEPS):
                    yield from _files_below(folder, (*steps, entry.name), on_error)
                elif (found := _found(folder, steps, entry)) is not None:
                    yield found
            except OSError as error:
                if on_error is None:
                    raise
                on_error(error)


def _files_below(
    folder: int, steps: tuple[str, ...], on_error: Callable[[OSError], None] | None
) -> Iterator[Found]:
    """The files in a folder's subfolder, the last of `steps`; none where it is not one of ours."""
    if not _STEPS[len(steps) - 1].fullmatch(steps[-1]):
        return
    try:
        below = os.open(steps[-1], _FOLDER_FLAGS, dir_fd=folder)
    except NOTHING_THERE:  # removed meanwhile, or no folder
        return
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link, which is followed nowhere
            return
        raise
    try:
        yield from _files(below, steps, on_error)
    finally:
        os.close(below)


def _found(folder: int, steps: tuple[str, ...], entry: os.DirEntry[str]) -> Found | None:
    """A file of ours; None where it is something else, or was removed meanwhile."""
    is_temp = _TEMP.fullmatch(entry.name) is not None
    if is_temp or _VALUE.fullmatch(entry.name):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                return Found(folder, entry.name, status, is_temp, steps)
    return None
