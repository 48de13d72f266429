"""Anonymous memory: mapping it, faulting it in, and how much of it the machine can still give.

Linux only, as the tiers are (`O_DIRECT`, `fallocate`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.errors import TierConfigError

PAGE_BYTES = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's `mmap` module before 3.13
_HUGE_PAGE_MIN_BYTES = 32 << 20
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63

# A CDLL call gives up the GIL; `mmap.madvise` keeps it, which for populating takes milliseconds.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def map_anonymous(num_bytes: int, *, hugepages: bool) -> mmap.mmap:
    """Map private zeroed memory that the kernel commits page by page as it is written.

    Args:
        num_bytes: Length, in bytes, above 0.
        hugepages: Ask for transparent huge pages (best effort). When false they are ruled out, so
            that a sparsely written mapping costs 4 KiB, not 2 MiB, per touched place.

    Raises:
        TierConfigError: The kernel refuses the address space.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise TierConfigError(
            f"{num_bytes:,} bytes of memory were asked for and the kernel refused ({error}); "
            f"ask for less or raise the limit on address space."
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: only speed differs
        mapping.madvise(mmap.MADV_HUGEPAGE if hugepages else mmap.MADV_NOHUGEPAGE)
    return mapping


def lazy_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Array of zeros, page aligned, whose memory is committed only where it is written.

    Large arrays use huge pages, since look-ups at random places are bound by TLB misses; small ones
    do not, so that a partly filled table stays small.
    """
    count = int(np.prod(shape, dtype=np.int64))
    num_bytes = max(round_up(count * np.dtype(dtype).itemsize, PAGE_BYTES), PAGE_BYTES)
    mapping = map_anonymous(num_bytes, hugepages=num_bytes >= _HUGE_PAGE_MIN_BYTES)
    return np.frombuffer(mapping, dtype=dtype, count=count).reshape(shape)


def populate(address: int, num_bytes: int) -> bool:
    """Fault in `[address, address + num_bytes)` for writing, without changing what it holds.

    Safe beside other threads' reads and writes of the same bytes, and runs without the GIL.

    Returns:
        False where the kernel is too old (before 5.14) to do so, and nothing was done.

    Raises:
        OSError: Any other failure, such as ENOMEM.
    """
    if _libc.madvise(address, num_bytes, MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    raise OSError(code, os.strerror(code))


def keep_from_children(address: int, num_bytes: int) -> None:
    """Leaves `[address, address + num_bytes)` out of the memory of processes forked from now on.

    For page-locked memory that is this process' alone: a fork shares its pages until one side
    writes to them, and gives that side another page then. A device would go on with the first one,
    past whoever has the other. A kernel that copies such pages instead does so at each fork, of all
    there are.

    Raises:
        OSError: The kernel refuses, as of an address where nothing is mapped.
    """
    if _libc.madvise(address, num_bytes, mmap.MADV_DONTFORK):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory, in bytes, that can still be committed: the least of the machine's and the cgroups'.

    `MemAvailable` knows nothing of a container's limit, so each cgroup on the way to the root is
    asked too; page cache that a cgroup can drop (`inactive_file`) counts as available.
    """
    found = [_meminfo_available(proc / "meminfo")]
    found += [_cgroup_available(folder) for folder in _cgroup_folders(proc / "self/cgroup", cgroup)]
    known = [value for value in found if value is not None]
    return max(min(known), 0) if known else _UNLIMITED_BYTES


def _meminfo_available(path: Path) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup_folders(membership: Path, root: Path) -> list[Path]:
    """Folders of this process' memory cgroup and its ancestors, in versions 1 and 2."""
    folders = []
    for line in _read(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top = root
        elif "memory" in controllers.split(","):
            top = root / "memory"
        else:
            continue
        # Inside a container the named folder may be absent, its files then lie in the root.
        folder = Path(os.path.normpath(top / name.lstrip("/")))
        while folder.is_relative_to(top):
            folders.append(folder)
            if folder == top:
                break
            folder = folder.parent
    return folders


def _cgroup_available(folder: Path) -> int | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(folder / limit_name).strip()
        used = _read(folder / used_name).strip()
        if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED_BYTES:
            stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
            return int(limit) - int(used) + int(stat.get(cache_name, 0))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
