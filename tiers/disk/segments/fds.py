"""Open segment files, bounded in number."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.tiers.disk.segments.fileio import FileIO

MAX_OPEN_FDS = 128
_SHARE = 4  # one in so many of a process's descriptors at most: SGLang needs the others


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0  # guarded by FdCache._lock
    forgotten: bool = False  # guarded by FdCache._lock


class FdCache:
    """Read descriptors of segments, the least recently used closed first.

    A file stays open while a read uses it, even when its segment was unlinked meanwhile or the
    bound is passed; it is closed when the last such read ends. Thread-safe: one lock, under which
    no file is opened or closed: a disk may take its time, and who counts must not wait for it.
    """

    def __init__(self, io: FileIO, flags: int) -> None:
        self._io = io
        self._flags = flags
        self._most_open = _most_open()
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()  # guarded by _lock
        self._num_forgotten = 0  # calls of `forget` and `close`; guarded by _lock

    @property
    def num_open(self) -> int:
        """Files in the cache."""
        with self._lock:
            return len(self._files)

    @contextlib.contextmanager
    def reading(self, segment_id: int, path: Path) -> Iterator[int]:
        """Yields a descriptor of the segment that stays valid inside the block.

        Raises:
            OSError: the file cannot be opened, for instance because it was unlinked.
        """
        file = self._acquire(segment_id, path)
        try:
            yield file.fd
        finally:
            self._release(file)

    def forget(self, segment_id: int) -> None:
        """Closes the segment's file as soon as no read uses it. Call after unlinking it."""
        with self._lock:
            self._num_forgotten += 1
            file = self._files.pop(segment_id, None)
            idle = [] if file is None else _retire([file])
        self._close(idle)

    def close(self) -> None:
        """Closes every file."""
        with self._lock:
            self._num_forgotten += 1
            idle = _retire(list(self._files.values()))
            self._files.clear()
        self._close(idle)

    def _acquire(self, segment_id: int, path: Path) -> _OpenFile:
        with self._lock:
            file = self._use(segment_id)
            num_forgotten = self._num_forgotten
        if file is not None:
            return file
        opened = _OpenFile(self._io.open(path, self._flags), users=1)
        with self._lock:
            file = self._use(segment_id)  # another read may have opened it meanwhile
            if file is None and num_forgotten == self._num_forgotten:
                self._files[segment_id] = opened
            else:  # or the segment may be gone, and its file with the read that opened it
                opened.forgotten = True
            surplus = []
            while len(self._files) > self._most_open:
                surplus.append(self._files.popitem(last=False)[1])
            idle = _retire(surplus)
        self._close(idle)
        if file is None:
            return opened
        self._release(opened)
        return file

    def _use(self, segment_id: int) -> _OpenFile | None:
        """Takes an open file for one more read. The caller holds the lock."""
        file = self._files.get(segment_id)
        if file is not None:
            file.users += 1
            self._files.move_to_end(segment_id)
        return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            is_last = file.forgotten and file.users == 0
        if is_last:
            self._io.close(file.fd)

    def _close(self, files: Sequence[_OpenFile]) -> None:
        for file in files:
            self._io.close(file.fd)


def _most_open() -> int:
    """How many files a cache may have open, by this process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FDS
    return min(MAX_OPEN_FDS, soft // _SHARE)


def _retire(files: Sequence[_OpenFile]) -> list[_OpenFile]:
    """Marks files that are out of the cache; returns those that no read uses, to be closed.

    The caller holds the lock.
    """
    for file in files:
        file.forgotten = True
    return [file for file in files if file.users == 0]
