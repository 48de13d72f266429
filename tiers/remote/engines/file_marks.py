"""Whose a file is: a mark in the time at which it was changed, so that a look sees it for nothing.

Of that time everybody reads the seconds alone. The fraction of a marked file is a number made of
its tenant's label, in whole microseconds, as some file systems keep no more. Who knows no marks may
lose one, which makes the file one of those without.
"""

from __future__ import annotations

import contextlib
import os
import time

from sglang_ext.tiers.remote.shares.division import Division

_SECOND_NS, _STEP_NS = 10**9, 10**3
_NUM_MARKS = _SECOND_NS // _STEP_NS - 1


class FileMarks:
    """The marks of a division's tenants."""

    def __init__(self, division: Division | None = None) -> None:
        """Knows no tenants without a division."""
        labels = () if division is None else division.labels
        self._written = [0, *(_mark_of(each[0]) for each in labels)]
        self._tenants = {
            _mark_of(label): number
            for number, each in enumerate(labels, 1)
            for label in reversed(each)
        }

    def tenant_of(self, status: os.stat_result) -> int:
        """The number of a file's tenant; 0 for all that have no share."""
        return self._tenants.get(status.st_mtime_ns % _SECOND_NS, 0)

    def write(self, fd: int, tenant: int) -> None:
        """Marks a file that was just written, where the file system lets its owner say a time."""
        if tenant:
            with contextlib.suppress(OSError):
                _set(fd, self._written[tenant])

    def are_kept(self, fd: int) -> bool:
        """Whether a file system keeps marks, tried with a file in it."""
        with contextlib.suppress(OSError):
            _set(fd, _NUM_MARKS * _STEP_NS)
        return os.fstat(fd).st_mtime_ns % _SECOND_NS == _NUM_MARKS * _STEP_NS


def renew(file: int | str, status: os.stat_result, folder: int | None = None) -> None:
    """Makes a file young again, and leaves its mark, whoever understands it.

    Args:
        file: open, or a name in `folder`.
        status: its own.
        folder: open.

    Raises:
        OSError: it cannot be.
    """
    mark = status.st_mtime_ns % _SECOND_NS
    if mark and mark % _STEP_NS == 0:
        with contextlib.suppress(OSError):  # only who owns a file says which time it is, or nobody
            _set(file, mark, folder)
            return
    os.utime(file, dir_fd=folder, follow_symlinks=isinstance(file, int))


def make_old(file: str, status: os.stat_result, folder: int, age_s: float) -> None:
    """Makes a file as old as if it had not been used for a time, and leaves its mark.

    One that is older already stays as it is, and so does one of another user: only a file's owner
    says which time it is.

    Args:
        file: a name in `folder`.
        status: its own.
        folder: open.
        age_s: the time.
    """
    if time.time() - status.st_mtime >= age_s:
        return
    mark = status.st_mtime_ns % _SECOND_NS
    with contextlib.suppress(PermissionError):
        _set(file, mark if mark % _STEP_NS == 0 else 0, folder, age_s)


def _mark_of(label: bytes) -> int:
    return _STEP_NS * (1 + int.from_bytes(label[:8], "big") % _NUM_MARKS)


def _set(file: int | str, mark: int, folder: int | None = None, age_s: float = 0.0) -> None:
    at_ns = int(time.time() - age_s) * _SECOND_NS + mark
    os.utime(file, ns=(at_ns, at_ns), dir_fd=folder, follow_symlinks=isinstance(file, int))
