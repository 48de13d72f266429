"""Open segment files, bounded in number."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.tiers.disk.fileio import FileIO

MAX_OPEN_FDS = 128


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0  # guarded by FdCache._lock
    forgotten: bool = False  # guarded by FdCache._lock


class FdCache:
    """Read descriptors of segments, the least recently used closed first.

    A file stays open while a read uses it, even when its segment was unlinked meanwhile or the
    bound is passed; it is closed when the last such read ends. Thread-safe: one lock.
    """

    def __init__(self, io: FileIO, flags: int, capacity: int = MAX_OPEN_FDS) -> None:
        self._io = io
        self._flags = flags
        self._capacity = capacity
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()  # guarded by _lock

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
            file = self._files.pop(segment_id, None)
            if file is not None:
                self._retire(file)

    def close(self) -> None:
        """Closes every file."""
        with self._lock:
            while self._files:
                self._retire(self._files.popitem()[1])

    def _acquire(self, segment_id: int, path: Path) -> _OpenFile:
        with self._lock:
            file = self._files.get(segment_id)
            if file is None:
                file = _OpenFile(self._io.open(path, self._flags))
                self._files[segment_id] = file
            file.users += 1
            self._files.move_to_end(segment_id)
            while len(self._files) > self._capacity:
                self._retire(self._files.popitem(last=False)[1])
            return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.forgotten and file.users == 0:
                self._io.close(file.fd)

    def _retire(self, file: _OpenFile) -> None:
        file.forgotten = True
        if file.users == 0:
            self._io.close(file.fd)
