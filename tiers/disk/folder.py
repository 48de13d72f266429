"""The tier's folder: who owns it, which segment ids are spent, which namespaces lie in it.

::

    LOCK                          flock; JSON of the owner's pid and host, for the error message.
                                  Of a folder whose subfolders belong to the ranks of one server:
                                  held by all of them, with the server's name in the JSON
    folder.msgpack                {"version": 1, "next_segment": n}; every id below n is spent
    <16 hex of digest>/ns.msgpack {"version": 1, "digest", "slot_bytes", "label"}
    <16 hex of digest>/seg-%08d.hkv

A name that ends in ".tmp" and starts as one of ours is a leftover of a killed process and is
removed. Other files are not ours: never read, never removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from sglang_ext.tiers.access import is_trusted_folder, make_folder, problem_of, tighten
from sglang_ext.tiers.base import NO_SEGMENT
from sglang_ext.tiers.disk.segments.fileio import FileIO, read_small, write_file
from sglang_ext.tiers.errors import TierConfigError

FOLDER_VERSION = 1  # stored on disk; a change of files or names needs a new number
_ID_STEP = 64
# No folder lives long enough to give out more; who says so is damaged, and none would be left.
_MOST_IDS = NO_SEGMENT // 2
# A file whose number is so much higher than those that the folder gave out is not of its making.
_FAR_IDS = 1 << 24
_MAX_STATE_BYTES = 1 << 20
_SHARE_PATIENCE_S, _SHARE_POLL_S = 10.0, 0.02
_LOOK_PATIENCE_S = 0.2  # far longer than `holder_of` has the lock
_NAMESPACE_NAME = re.compile(r"[0-9a-f]{16}")
# Of a server with several; `RankPlace.name`.
_RANK_NAME = re.compile(r"dp\d+-tp\d+-of-\d+(-pp\d+-of-\d+)?")
_SEGMENT_NAME = re.compile(r"seg-(\d{8,10})\.hkv")
_TEMP_NAME = re.compile(r"(seg-\d{8,10}\.hkv|ns\.msgpack|folder\.msgpack|direct-io-probe)\.tmp")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamespaceFile:
    """What `ns.msgpack` says."""

    digest: bytes
    slot_bytes: int
    label: dict[str, Any]


class FolderLock:
    """Owns a folder until `release()` or the end of the process, however it ends."""

    def __init__(self, io: FileIO, folder: Path) -> None:
        """Takes the lock, making the folder if it is absent.

        Raises:
            TierConfigError: the folder cannot be used, or another process owns it.
        """
        self._io = io
        self._fd = _open_lock(io, folder)
        deadline_s = time.monotonic() + _LOOK_PATIENCE_S
        while not _lock(self._fd, fcntl.LOCK_EX):
            if time.monotonic() >= deadline_s:
                error = _in_use(folder, self._fd)
                io.close(self._fd)
                raise error
            time.sleep(_SHARE_POLL_S)
        try:
            _write_owner(io, self._fd, {})
        except OSError as error:
            # On a full disk the lock holds without a name, so that `hier-kv prune` can make room.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                io.close(self._fd)
                raise TierConfigError(_cannot_use(folder, error)) from error

    def release(self) -> None:
        """Gives the folder back. The file stays: removing it could let two owners in."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._io.close(self._fd)


class SharedFolderLock:
    """Holds a folder in which each rank of one server has a subfolder of its own.

    All ranks of the server hold it together; no other server gets it, whatever its ranks, nor one
    that wants the folder for its only rank (`FolderLock`). Until the end of the process.
    """

    def __init__(
        self, io: FileIO, folder: Path, server: str, *, patience_s: float = _SHARE_PATIENCE_S
    ) -> None:
        """Takes the lock, making the folder if it is absent.

        Args:
            io: system calls.
            folder: of all ranks.
            server: names the server; the same on its ranks, and on no other server.
            patience_s: how long another rank may take to enter the name.

        Raises:
            TierConfigError: the folder cannot be used, or another server has it.
        """
        fd = _open_lock(io, folder)
        deadline_s = time.monotonic() + patience_s
        try:
            while not self._join(io, fd, server):
                if time.monotonic() >= deadline_s:
                    raise _in_use(folder, fd)
                time.sleep(_SHARE_POLL_S)
            # To share a lock that was exclusive, the system may give it up for a moment.
            if _owner_of(fd).get("server") != server:
                raise _in_use(folder, fd)
        except OSError as error:
            io.close(fd)
            raise TierConfigError(_cannot_use(folder, error)) from error
        except TierConfigError:
            io.close(fd)
            raise

    @staticmethod
    def _join(io: FileIO, fd: int, server: str) -> bool:
        """Whether the lock is shared now, with whoever holds it; the first enters its name."""
        if _lock(fd, fcntl.LOCK_EX):
            _write_owner(io, fd, {"server": server})
        return _lock(fd, fcntl.LOCK_SH)


def holder_of(io: FileIO, folder: Path) -> str:
    """Who has a folder now, such as "process 7 on host a"; "" for nobody. Makes nothing.

    Takes the lock for the moment that it needs to see that nobody has it.

    Raises:
        OSError: the lock cannot be looked at.
    """
    try:
        fd = io.open(folder / "LOCK", os.O_RDWR)
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        fd = io.open(folder / "LOCK", os.O_RDONLY)  # a snapshot, say
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_owner(fd)
    finally:
        io.close(fd)
    return ""


class SegmentIds:
    """Hands out segment ids, none of them twice in the folder's life. Guarded by the write lock.

    Ids are spent in steps ahead of use, so that a file is written once in 64 segments.
    """

    def __init__(self, io: FileIO, folder: Path, seen: Collection[int], *, sync: bool) -> None:
        """Continues behind what `folder.msgpack` and the files in the folder have spent.

        A file with a number far ahead, whoever made it, spends that number and none before it.

        Args:
            io: system calls.
            folder: the tier's.
            seen: ids in the names of the files there.
            sync: whether what is spent is on the device before it is used.

        Raises:
            TierConfigError: the folder is of a later release, or cannot be written.
        """
        self._io = io
        self._path = folder / "folder.msgpack"
        self._sync = sync
        state = _folder_state(io, folder)
        spent = state.get("next_segment", 1)
        spent = spent if isinstance(spent, int) and 0 < spent <= _MOST_IDS else 1
        self._passed = {each for each in seen if each >= spent + _FAR_IDS}
        if self._passed:
            logger.warning(
                "hier-kv: the disk folder %s has segments with numbers that it never gave out, "
                "such as seg-%08d.hkv; its own go on from %d",
                folder, min(self._passed), spent,
            )  # fmt: skip
        self._next = max((spent, *(each + 1 for each in seen if each not in self._passed)))
        self._limit = self._next
        try:
            self._reserve()
        except OSError as error:
            raise TierConfigError(_cannot_use(folder, error)) from error

    def take(self) -> int:
        """Returns a fresh id.

        Raises:
            OSError: the folder cannot be written, or 2^32 - 1 ids are spent.
        """
        while self._next in self._passed:
            self._next += 1
        if self._next >= self._limit:
            self._reserve()
        self._next += 1
        return self._next - 1

    def _reserve(self) -> None:
        limit = self._next + _ID_STEP
        if limit >= NO_SEGMENT:
            raise OSError(errno.EOVERFLOW, "every segment id of this folder is spent")
        data = msgpack.packb({"version": FOLDER_VERSION, "next_segment": limit})
        write_file(self._io, self._path, data, sync=self._sync)
        self._limit = limit


def refuse_later_release(io: FileIO, folder: Path) -> None:
    """Refuses a tier's folder that a later release wrote.

    Raises:
        TierConfigError: it did.
    """
    _folder_state(io, folder)


def _folder_state(io: FileIO, folder: Path) -> dict[str, Any]:
    state = _read_state(io, folder / "folder.msgpack")
    version = state.get("version", FOLDER_VERSION)
    if isinstance(version, int) and version > FOLDER_VERSION:
        raise TierConfigError(
            f"the disk folder {folder} has format version {version}, this release reads up to"
            f" {FOLDER_VERSION}; use the newer release or another folder"
        )
    return state


def rank_folders(root: Path) -> list[Path]:
    """Returns the folders of a server's ranks in its own, where it has several; sorted."""
    return sorted(
        path
        for path in root.iterdir()
        if _RANK_NAME.fullmatch(path.name) and is_trusted_folder(path)
    )


def namespace_folders(folder: Path, is_own: Callable[[Path], bool] = tighten) -> list[Path]:
    """Returns the subfolders that are named as namespaces are, sorted; links and others' not.

    Args:
        folder: the tier's.
        is_own: says of a subfolder that it is none of these. By default it also takes from other
            users what an earlier release made readable for them.
    """
    return sorted(
        path for path in folder.iterdir() if _NAMESPACE_NAME.fullmatch(path.name) and is_own(path)
    )


def segment_files(folder: Path) -> list[tuple[int, Path]]:
    """Returns (segment id, path) of the files named as segments are, sorted by id."""
    found = []
    for path in folder.iterdir():
        match = _SEGMENT_NAME.fullmatch(path.name)
        if match is None or int(match[1]) >= NO_SEGMENT:
            continue
        if _is_own_file(path) and segment_path(folder, int(match[1])) == path:
            found.append((int(match[1]), path))
    return sorted(found)


def _is_own_file(path: Path) -> bool:
    return not path.is_symlink() and path.is_file()


def segment_path(folder: Path, segment_id: int) -> Path:
    """Returns where the segment lies."""
    return folder / f"seg-{segment_id:08d}.hkv"


def remove_temp_files(io: FileIO, folder: Path) -> None:
    """Removes what a killed process left half made in `folder`."""
    for path in folder.iterdir():
        if _TEMP_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                io.unlink(path)


def refuse_foreign(folder: Path) -> None:
    """Refuses what lies in a namespace folder's place and is another user's, or a link.

    Raises:
        TierConfigError: it is.
    """
    if os.path.lexists(folder) and not tighten(folder):
        raise TierConfigError(
            f"the namespace folder {folder} must be this user's and no symbolic link; remove it"
        )


def read_namespace_file(io: FileIO, folder: Path) -> NamespaceFile | None:
    """Returns what `ns.msgpack` in `folder` says; None when it is absent or damaged.

    Raises:
        TierConfigError: it was written by a later release.
    """
    state = _read_state(io, folder / "ns.msgpack")
    version = state.get("version")
    if isinstance(version, int) and version > FOLDER_VERSION:
        raise TierConfigError(
            f"the namespace folder {folder} has format version {version}, this release reads up"
            f" to {FOLDER_VERSION}; use the newer release or another folder"
        )
    digest, slot_bytes, label = (state.get(key) for key in ("digest", "slot_bytes", "label"))
    if version != FOLDER_VERSION or not isinstance(digest, bytes) or len(digest) != 32:
        return None
    if digest.hex()[:16] != folder.name or not isinstance(slot_bytes, int):
        return None
    return NamespaceFile(digest, slot_bytes, label if isinstance(label, dict) else {})


def write_namespace_file(io: FileIO, folder: Path, entry: NamespaceFile, *, sync: bool) -> None:
    """Makes the namespace's folder, if absent, and replaces its `ns.msgpack`.

    Raises:
        TierConfigError: the folder cannot be written.
    """
    data = msgpack.packb(
        {
            "version": FOLDER_VERSION,
            "digest": entry.digest,
            "slot_bytes": entry.slot_bytes,
            "label": entry.label,
        }
    )
    try:
        make_folder(folder)
        write_file(io, folder / "ns.msgpack", data, sync=sync)
    except OSError as error:
        raise TierConfigError(_cannot_use(folder, error)) from error


def remove_empty_folder(io: FileIO, folder: Path) -> bool:
    """Removes a namespace's folder in which nothing lies but what `write_namespace_file` wrote.

    Returns:
        Whether it is gone.
    """
    try:
        names = [path.name for path in folder.iterdir()]
        if names not in ([], ["ns.msgpack"]):
            return False
        if names and read_namespace_file(io, folder) is None:
            return False  # not ours, or damaged: it is left to be looked at
        if names:
            io.unlink(folder / "ns.msgpack")
        folder.rmdir()
    except (OSError, TierConfigError):
        return False
    return True


def _read_state(io: FileIO, path: Path) -> dict[str, Any]:
    try:
        state = msgpack.unpackb(read_small(io, path, 0, _MAX_STATE_BYTES))
    except Exception:  # absent or damaged: both mean starting over
        return {}
    return state if isinstance(state, dict) else {}


def _open_lock(io: FileIO, folder: Path) -> int:
    try:
        make_folder(folder)
        problem = problem_of(os.stat(folder), os.geteuid())
        if problem:
            raise TierConfigError(f"the disk folder {folder} {problem}")
        return io.open(folder / "LOCK", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise TierConfigError(_cannot_use(folder, error)) from error


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _in_use(folder: Path, fd: int) -> TierConfigError:
    return TierConfigError(
        f"the disk folder {folder} is in use by {_read_owner(fd)}; give each server a folder of its"
        " own"
    )


def _write_owner(io: FileIO, fd: int, more: dict[str, str]) -> None:
    os.ftruncate(fd, 0)
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **more})
    io.pwritev(fd, [memoryview(text.encode())], 0)


def _owner_of(fd: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _read_owner(fd: int) -> str:
    try:
        owner = _owner_of(fd)
        return f"process {int(owner['pid'])} on host {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _cannot_use(folder: Path, error: OSError) -> str:
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"the disk folder {folder} must be a folder, but it or a parent is a file"
    if error.errno == errno.ELOOP:
        return f"the disk folder {folder} must have no symbolic links in it; remove its LOCK"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"the disk folder {folder} must be writable for this user: {error.strerror}"
    return f"the disk folder {folder} cannot be used: {error.strerror or error}"
