"""Memory that several processes of one machine map, and of which nothing is left behind them.

It has no name in any file system (`memfd_create`): the kernel takes it back when the last process
that maps it has ended, however that ended. It does not count towards the size of `/dev/shm`.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from sglang_ext.tiers.errors import TierConfigError


def create_shared(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Maps new zeroed memory, which the kernel commits page by page as it is written.

    Args:
        num_bytes: length, above 0.

    Returns:
        The mapping, and a file of this process through which others can map the same memory
        (`path_of`) until it is closed, which the caller does.

    Raises:
        TierConfigError: the kernel refuses it.
    """
    try:
        file = os.memfd_create("hier-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            return _map(file, num_bytes), file
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise TierConfigError(
            f"{num_bytes:,} bytes of shared memory were asked for and refused ({error})"
        ) from error


def path_of(file: int) -> str:
    """Where other processes of this user find a file of this one while it is open."""
    return f"/proc/{os.getpid()}/fd/{file}"


def open_shared(path: str, num_bytes: int) -> mmap.mmap:
    """Maps memory of another process.

    Args:
        path: as `path_of` gave it there.
        num_bytes: the length that it must have.

    Raises:
        TierConfigError: it cannot be mapped, or has another length.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(file).st_size
            if found != num_bytes:
                raise TierConfigError(
                    f"{num_bytes:,} bytes of shared memory were expected and {path} has {found:,}"
                )
            return _map(file, num_bytes)
        finally:
            os.close(file)
    except OSError as error:
        raise TierConfigError(f"shared memory {path} cannot be mapped ({error})") from error


def _map(file: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED)
    with contextlib.suppress(OSError):  # a kernel that gives shared memory no huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
