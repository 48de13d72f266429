"""Lists the values of a shared folder. Starts no thread, and removes nothing that is not named."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence

from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.engines.value_folders import (
    NOTHING_THERE,
    VALUE_FLAGS,
    ValueFolders,
    read_at,
)
from sglang_ext.tiers.remote.offline.listing import Listing, StoredValue


class FileListing(Listing):
    """See `Listing`."""

    def __init__(self, folders: ValueFolders) -> None:
        """Looks at nothing yet."""
        self._folders = folders

    def values(self) -> Iterator[StoredValue]:
        """See `Listing.values`."""
        now_s = time.time()
        for found in self._folders.files():
            name = self._folders.name_of(found)
            if name:
                status = found.status
                yield StoredValue(name, status.st_size, max(0.0, now_s - status.st_mtime))

    def read(self, name: str, out: ByteArray) -> int:
        """See `Listing.read`."""
        try:
            with self._folders.folder_of(name) as (folder, file):
                fd = os.open(file, VALUE_FLAGS, dir_fd=folder)
        except NOTHING_THERE:
            return 0
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return 0
            return read_at(fd, out, 0)
        finally:
            os.close(fd)

    def remove(self, names: Sequence[str]) -> None:
        """See `Listing.remove`."""
        for name in names:
            with (
                contextlib.suppress(*NOTHING_THERE),
                self._folders.folder_of(name) as (folder, file),
            ):
                os.unlink(file, dir_fd=folder)

    def close(self) -> None:
        """See `Listing.close`."""
