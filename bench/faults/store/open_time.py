"""How long opening the disk tier takes with 10 GB of segments in its folder, and without."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.core.speed import leave_page_cache
from bench.faults.tally import check
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO, aligned_array
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, PageStoreConfig

_SLOT_BYTES = 266240
_NAMESPACE = hashlib.sha256(b"bench.faults.store.open_time").digest()
_BATCH = 64
_FREE_BYTES_NEEDED = 31 << 30
_SEGMENT_BYTES = 256 << 20


class SparseDisk(FileIO):
    """Writes headers and footers and leaves holes where records would be.

    Opening reads no record of a sealed segment, so it cannot tell.
    """

    def __init__(self) -> None:
        self.is_sparse = True

    def allocate(self, fd: int, num_bytes: int) -> None:
        if self.is_sparse:
            os.ftruncate(fd, num_bytes)
        else:
            super().allocate(fd, num_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_sparse and bytes(buffers[0][:4]) == b"HKVR":
            return sum(len(view) for view in buffers)
        return super().pwritev(fd, buffers, offset)


class CountingDisk(FileIO):
    """Counts the bytes that are read. Thread-safe."""

    def __init__(self) -> None:
        self._read_bytes: list[int] = []

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return sum(self._read_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes = super().preadv(fd, buffers, offset)
        self._read_bytes.append(num_bytes)
        return num_bytes


def measure_open(folder: Path, num_gb: float, repeats: int) -> dict[str, Any]:
    """Fills a folder through the tier's own code and opens it again and again.

    The last segment is real and was never sealed, as after kill -9: it is read as a whole.

    Returns:
        Seconds from nothing to a store that can serve, with and without the segments, and bytes
        that are read for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    check(free > _FREE_BYTES_NEEDED, f"{_FREE_BYTES_NEEDED >> 30} GB must be free, not {free}")
    full, empty = folder / "full", folder / "empty"
    try:
        num_pages = _fill(full, int(num_gb * (1 << 30)))
        after_kill, disk = CountingDisk(), CountingDisk()
        # The one open that finds the unsealed segment.
        kill_s = _open_s(full, num_pages, after_kill)
        with_s = [_open_s(full, num_pages, disk) for _ in range(repeats)]
        without_s = [_open_s(empty, 0, CountingDisk()) for _ in range(repeats)]
        file_bytes = sum(path.stat().st_size for path in full.rglob("*.hkv"))
    finally:
        shutil.rmtree(folder)
    return {
        "gb": round(file_bytes / (1 << 30), 2),
        "pages": num_pages,
        "added_s": sorted(with_s)[repeats // 2] - sorted(without_s)[repeats // 2],
        "added_after_kill_s": kill_s - sorted(without_s)[repeats // 2],
        "read_bytes": disk.read_bytes // repeats,
        "read_bytes_after_kill": after_kill.read_bytes,
        "samples": {"open_full_s": with_s, "open_empty_s": without_s},
    }


def _config(folder: Path, direct_io: Literal["auto", "off"] = "auto") -> DiskConfig:
    return DiskConfig(
        folder,
        max_bytes=32 << 30,
        min_free_bytes=0,
        segment_bytes=_SEGMENT_BYTES,
        direct_io=direct_io,
    )


def _fill(folder: Path, num_bytes: int) -> int:
    """Writes segments of `num_bytes` in all, and one more that is left unsealed."""
    disk = SparseDisk()
    tier = DiskTier(_config(folder, "off"), io=disk)
    tier.open_namespace(_NAMESPACE, _SLOT_BYTES, {})
    slots = list(aligned_array(_BATCH * _SLOT_BYTES).reshape(_BATCH, _SLOT_BYTES))
    written = 0
    while tier.stats().used_bytes < num_bytes:
        written = _write(tier, slots, written)
    disk.is_sparse = False
    rng = np.random.default_rng(0)
    for slot in slots:
        slot[:] = np.frombuffer(rng.bytes(_SLOT_BYTES), np.uint8)
    while tier.stats().used_bytes < num_bytes + _SEGMENT_BYTES:
        written = _write(tier, slots, written)
    for _ in range(_SEGMENT_BYTES // _SLOT_BYTES // _BATCH - 1):
        written = _write(tier, slots, written)
    _abandon(tier, folder)
    return written


def _write(tier: DiskTier, slots: list[Any], first: int) -> int:
    for number, slot in enumerate(slots, first):
        page = hashlib.sha256(b"%d" % number).digest()
        meta = RecordMeta(page, _NAMESPACE, b"", 64 * number, 64, "pre")
        write_meta(slot, meta, _SLOT_BYTES - HEADER_BYTES - 1000)
    stored = tier.write(_NAMESPACE, slots)
    check(None not in stored, "the disk tier took not all pages")
    return first + len(slots)


def _abandon(tier: DiskTier, folder: Path) -> None:
    """Closes the tier, and puts its youngest segment back to where a killed process leaves it."""
    youngest = max(folder.rglob("*.hkv"))
    content = youngest.read_bytes()
    tier.close()
    youngest.write_bytes(content)


def _open_s(folder: Path, num_pages: int, io: FileIO) -> float:
    for path in folder.rglob("*.hkv"):
        leave_page_cache(path)
    arena = HostArena(16, _SLOT_BYTES)
    started = time.monotonic()
    disk = DiskTier(_config(folder), io=io)
    store = PageStore(arena, PageIndex(65536), disk, PageStoreConfig())
    store.connect(disk)
    found = store.open_namespace(_NAMESPACE, {})
    seconds = time.monotonic() - started
    store.close()
    check(found == num_pages, f"opened {found} of {num_pages} pages")
    return seconds
