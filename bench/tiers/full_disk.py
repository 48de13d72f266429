"""A disk that is full: new pages go where others were given up. For the `tiers` case."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.core.case import CaseFailedError, disk_folder
from bench.core.output import Progress
from bench.core.speed import pages_like_the_arenas
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, RecordMeta, write_meta
from testkit.page_books import PageBooks

LAYOUTS = {"slots": False, "packed": True}
"""Whole pages, and coded ones, half as long to as long."""
_SLOT_BYTES = 266_240
_TIMES_ROUND = 3  # the disk is written so often once it is full
_BATCH = 8  # pages of a call
_HELPER_THREADS = 2
_NAMESPACE = hashlib.sha256(b"bench").digest()
_T = TypeVar("_T")


def measure_full_disk(repeats: int, num_bytes: int, progress: Progress) -> dict[str, Any]:
    """Writes pages until the disk is full, and then its size again several times.

    Pages leave at random, one by one, which is the worst for finding places. What the owner does to
    choose them is not counted.

    Args:
        repeats: rounds, each on a new disk.
        num_bytes: size of the disk.
        progress: where to say how far it is.

    Returns:
        For each of `LAYOUTS` lists, one value a round: `fresh` and `full`, GB/s written; `held`,
        the share of the disk's size that pages take, mean once it is full; `amplification`, bytes
        written for each byte of a record then.

    Raises:
        CaseFailedError: a page found no place.
    """
    found: dict[str, Any] = {}
    for layout, packed in LAYOUTS.items():
        rounds = []
        for index in range(repeats):
            progress.update(f"a full disk, {layout}, round {index + 1} of {repeats}")
            with disk_folder("bench-full-") as folder:
                rounds.append(_round(folder, num_bytes, packed, seed=index))
        found[layout] = {name: [each[name] for each in rounds] for name in rounds[0]}
    return found


def _round(folder: Path, num_bytes: int, packed: bool, seed: int) -> dict[str, float]:
    tier = DiskTier(
        DiskConfig(
            folder / "disk", max_bytes=num_bytes, min_free_bytes=0, helper_threads=_HELPER_THREADS
        )
    )
    try:
        books = _TimedBooks(seed)
        books.connect(tier)
        tier.open_namespace(_NAMESPACE, _SLOT_BYTES, {"model": "bench"}, packed=packed)
        pages = _Pages(packed, seed)
        fresh, _ = _write(tier, books, pages, lambda: not books.num_given_up)
        before, most = tier.stats().bytes_written, pages.num_bytes + _TIMES_ROUND * num_bytes
        begun = pages.num_bytes
        full, held = _write(tier, books, pages, lambda: pages.num_bytes < most)
        written = tier.stats().bytes_written - before
    finally:
        tier.close()
    return {
        "fresh": fresh, "full": full, "held": held / num_bytes,
        "amplification": written / (pages.num_bytes - begun),
    }  # fmt: skip


class _TimedBooks(PageBooks):
    """Attributes: `took_s`: time spent in the owner; `num_given_up`: blocks."""

    took_s = 0.0
    num_given_up = 0

    def give_up(self, num_blocks: int) -> int:
        given_up = self._timed(lambda: super(_TimedBooks, self).give_up(num_blocks))
        self.num_given_up += given_up
        return given_up

    def live_records(self, segment: int) -> Any:
        return self._timed(lambda: super(_TimedBooks, self).live_records(segment))

    def take_thinned(self) -> dict[int, int]:
        return self._timed(super().take_thinned)

    def num_live_blocks(self, segment: int) -> int:
        return self._timed(lambda: super(_TimedBooks, self).num_live_blocks(segment))

    def _timed(self, call: Callable[[], _T]) -> _T:
        start_s = time.perf_counter()
        try:
            return call()
        finally:
            self.took_s += time.perf_counter() - start_s


class _Pages:
    """Pages without end. Attributes: `num_bytes`: of the records so far."""

    def __init__(self, packed: bool, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._packed = packed
        self._slots = pages_like_the_arenas(_BATCH, _SLOT_BYTES)
        for slot in self._slots:
            slot[:] = self._rng.integers(0, 256, _SLOT_BYTES, np.uint8)
        self._number = 0
        self.num_bytes = 0

    def batch(self) -> tuple[list[bytes], list[ByteArray]]:
        hashes, records = [], []
        for slot in self._slots:
            page_hash = hashlib.sha256(self._number.to_bytes(8, "little")).digest()
            self._number += 1
            most = _SLOT_BYTES // BLOCK_BYTES
            num = int(self._rng.integers(most // 2, most + 1)) if self._packed else most
            record = slot[: num * BLOCK_BYTES]
            meta = RecordMeta(page_hash, _NAMESPACE, b"", 0, 64, "pre")
            write_meta(record, meta, record.size - HEADER_BYTES)
            hashes.append(page_hash)
            records.append(record)
            self.num_bytes += record.size
        return hashes, records


def _write(
    tier: DiskTier, books: _TimedBooks, pages: _Pages, goes_on: Callable[[], bool]
) -> tuple[float, float]:
    """Writes while it should; returns GB/s and the bytes of all pages, mean over the calls."""
    held: list[int] = []
    spent_s, begun_bytes = 0.0, pages.num_bytes
    while goes_on():
        hashes, records = pages.batch()
        books.took_s, start_s = 0.0, time.perf_counter()
        places = tier.write(_NAMESPACE, records)
        spent_s += time.perf_counter() - start_s - books.took_s
        if None in places:
            raise CaseFailedError(f"a full disk did not store every page: {tier.stats()}")
        books.add(hashes, places, [record.size // BLOCK_BYTES for record in records])
        held.append(BLOCK_BYTES * sum(num for _, num in books.pages.values()))
    return (pages.num_bytes - begun_bytes) / spent_s / 1e9, float(np.mean(held))
