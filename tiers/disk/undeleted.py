"""Segment files that the disk did not let go of, and whether the folder is there at all."""

from __future__ import annotations

import errno
from pathlib import Path

from sglang_ext.tiers.disk.disk_context import DiskContext


class UndeletedFiles:
    """Deletes segment files, and tries again where that failed. Used under the write lock only.

    A disk that is read-only, or whose file system is not mounted, deletes nothing, and may be well
    later. What was cleared must not be found again then.

    Attributes:
        num_cleared: files of records that were cleared, for good; any thread may read it.
    """

    def __init__(self, context: DiskContext) -> None:
        self._context = context
        self._device = context.io.device_of(context.config.path)
        self._left: dict[Path, tuple[int, bool]] = {}  # bytes, and whether they were cleared
        self.num_cleared = 0

    def __contains__(self, path: Path) -> bool:
        return path in self._left

    def mount_error(self) -> OSError | None:
        """None while the folder is on the file system of the start."""
        context = self._context
        try:
            if context.io.device_of(context.config.path) == self._device:
                return None
        except OSError as absent:
            return absent
        return OSError(errno.ESTALE, "its file system is not the one of the start any more")

    def delete(self, path: Path, num_bytes: int, *, cleared: bool) -> bool:
        """Deletes a file whose bytes are not counted any more; they are, as long as that fails.

        Args:
            path: the file.
            num_bytes: its size.
            cleared: whether its records must not be found again, rather than made room.

        Returns:
            Whether it is gone.
        """
        error = self._unlink(path)
        if error is None:
            return True
        self._context.failed("io_unlink", error)
        self._context.catalog.keep_counting(num_bytes)
        self._left[path] = num_bytes, cleared
        self.num_cleared += cleared
        return False

    def try_again(self) -> bool:
        """Deletes what can be deleted now; returns whether nothing is left."""
        if not self._left or self.mount_error() is not None:
            return not self._left
        for path, (num_bytes, cleared) in list(self._left.items()):
            if self._unlink(path) is None:
                self._context.catalog.keep_counting(-num_bytes)
                del self._left[path]
                self.num_cleared -= cleared
        return not self._left

    def _unlink(self, path: Path) -> OSError | None:
        try:
            self._context.io.unlink(path)
        except FileNotFoundError:  # gone with its mount it is there again with it
            return self.mount_error()
        except OSError as error:
            return error
        return None
