"""The disk tier against raw I/O in the same mode, for the `tiers` case."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError, disk_folder
from bench.core.output import Progress
from bench.core.speed import RawFile, drop_page_cache, pages_like_the_arenas
from sglang_ext.tiers.base import Location, ReadRequest
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.protection import KeyedSeals, Mode, Protection
from sglang_ext.tiers.records.record import (
    CHECKED_FROM,
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    VerifyResult,
    write_meta,
)
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals
from sglang_ext.tiers.store.movers import promoter, spiller
from sglang_ext.tiers.store.movers.piece_size import PieceSize

# A page of 64 tokens: the bundled model's, and one of Llama-3.2-1B's shape.
SLOT_SIZES = {"260 KiB": 266_240, "2 MiB": 2_101_248}
BUSY = "260 KiB, Python busy"
"""Beside a thread that never gives the GIL up by itself, as a busy scheduler's."""
PROTECTED = {
    f"{name}, {way}": (way, slot_bytes)
    for name, slot_bytes in SLOT_SIZES.items()
    for way in ("tag", "encrypt")
}
"""Pages protected with a key."""
HELPER_THREADS = 2  # the plugin's default, so three threads with the caller
_NAMESPACE = hashlib.sha256(b"bench").digest()


def measure_disk(repeats: int, num_bytes: int, progress: Progress) -> dict[str, Any]:
    """Measures writes and reads of `num_bytes`, raw and through the tier, in turns.

    Args:
        repeats: rounds; in every second round the tier comes before the raw file.
        num_bytes: bytes written and read in each.
        progress: where to say how far it is.

    Returns:
        `mode`, and `by_slot`: for each size of `SLOT_SIZES`, for each of `PROTECTED` and for
        `BUSY`, alone and with each way of protection, lists `raw_write`, `raw_read`, `write` and
        `read` in GB/s, one value a round.

    Raises:
        CaseFailedError: a page was not stored, or came back other than it was.
    """
    with disk_folder("bench-disk-") as folder:
        by_slot, mode = {}, ""
        small = SLOT_SIZES["260 KiB"]
        cases = {name: ("", slot_bytes) for name, slot_bytes in SLOT_SIZES.items()}
        cases |= PROTECTED | {BUSY: ("", small)}
        cases |= {f"{BUSY}, {way}": (way, small) for way in ("tag", "encrypt")}
        for name, (way, slot_bytes) in cases.items():
            is_busy = name.startswith(BUSY)
            bench = _DiskBench(folder, slot_bytes, num_bytes // 4 if is_busy else num_bytes, way)
            mode = bench.mode
            try:
                with _busy_python() if is_busy else nullcontext():
                    by_slot[name] = _rounds(bench, repeats, progress.update, name)
            finally:
                bench.close()
        return {"mode": mode, "by_slot": by_slot}


@contextmanager
def _busy_python() -> Iterator[None]:
    """Keeps a thread computing in Python."""
    is_over = threading.Event()

    def compute() -> None:
        number = 0
        while not is_over.is_set():
            number += 1

    thread = threading.Thread(target=compute, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _rounds(bench: _DiskBench, repeats: int, say: Any, name: str) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"raw_write": [], "raw_read": [], "write": [], "read": []}
    for index in range(repeats + 1):
        say(f"pages of {name}, round {index} of {repeats}")
        raw_first = index % 2 == 0
        raw = bench.raw() if raw_first else None
        tier = bench.tier()
        measured = (*(raw or bench.raw()), *tier)
        if index:  # the first round warms up
            for key, rate in zip(rates, measured, strict=True):
                rates[key].append(rate)
    return rates


def _seals(way: str) -> RecordSeals:
    """What proves the records: checksums, or with a key tags or encryption."""
    if not way:
        return CHECKSUMS
    return KeyedSeals(Protection([secrets.token_bytes(32)], Mode[way.upper()]))


class _DiskBench:
    """Pages in aligned memory, and where they go.

    Through the tier they go as the store moves them: written in batches by one thread, read in
    pieces by as many as bring pages to DRAM, of the sizes that it would choose.
    """

    def __init__(self, folder: Path, slot_bytes: int, num_bytes: int, way: str) -> None:
        num = num_bytes // slot_bytes
        rng = np.random.default_rng(5)
        self._num_bytes = num * slot_bytes
        self._slots = pages_like_the_arenas(num, slot_bytes)
        self._back = pages_like_the_arenas(num, slot_bytes)
        self._batch = PieceSize(spiller.BATCH_S, spiller.MIN_BATCH_BYTES, spiller.MAX_BATCH_BYTES)
        self._piece = PieceSize(
            promoter.PIECE_S, promoter.MIN_PIECE_BYTES, promoter.MAX_PIECE_BYTES
        )
        self._hashes = [
            hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(num)
        ]
        for slot, page_hash in zip(self._slots, self._hashes, strict=True):
            slot[:] = rng.integers(0, 256, slot_bytes, np.uint8)
            meta = RecordMeta(page_hash, _NAMESPACE, b"", 0, 64, "pre")
            write_meta(slot, meta, slot_bytes - HEADER_BYTES)
        self._disk = DiskTier(
            DiskConfig(
                folder / f"tier-{slot_bytes}{way}",
                max_bytes=8 * num_bytes + (4 << 30),
                min_free_bytes=0,
                helper_threads=HELPER_THREADS,
            ),
            seals=_seals(way),
        )
        self._disk.open_namespace(_NAMESPACE, slot_bytes, {"model": "bench"})
        self.mode = self._disk.stats().mode
        self._raw = RawFile(
            folder / f"raw-{slot_bytes}{way}",
            self._slots,
            self._back,
            direct=self.mode == "direct",
            num_threads=HELPER_THREADS + 1,
        )

    def raw(self) -> tuple[float, float]:
        """Raw write and read, GB/s."""
        write = self._raw.write()
        return write, self._raw.read()

    def tier(self) -> tuple[float, float]:
        """Write and read through the tier, GB/s; every byte is compared."""
        locations: list[Location | None] = []
        start_s = time.perf_counter()
        while len(locations) < len(self._slots):
            per_batch = max(1, self._batch.num_bytes // self._slots[0].size)
            batch = self._slots[len(locations) :][:per_batch]
            begun_s = time.perf_counter()
            locations += self._disk.write(_NAMESPACE, batch)
            self._batch.note(len(batch) * batch[0].size, time.perf_counter() - begun_s)
        write = self._rate(start_s)
        if None in locations:
            raise CaseFailedError(f"the disk tier did not store every page: {self._disk.stats()}")
        for slot in self._back:
            slot[:] = 0
        if self.mode != "direct":
            drop_page_cache([])
        read = self._read([location for location in locations if location is not None])
        self._disk.clear(None)
        return write, read

    def _read(self, locations: list[Location]) -> float:
        requests = [
            ReadRequest(location, page_hash, b"", out)
            for location, page_hash, out in zip(locations, self._hashes, self._back, strict=True)
        ]
        per_piece = -(-self._piece.num_bytes // self._slots[0].size)
        pieces = [requests[at : at + per_piece] for at in range(0, len(requests), per_piece)]

        lock = threading.Lock()

        def read(piece: list[ReadRequest]) -> list[VerifyResult]:
            begun_s = time.perf_counter()
            results = self._disk.read(_NAMESPACE, piece)
            took_s = time.perf_counter() - begun_s
            with lock:
                self._piece.note(len(piece) * piece[0].out.size, took_s)
            return results

        with ThreadPoolExecutor(promoter.NUM_THREADS) as pool:
            start_s = time.perf_counter()
            results = list(itertools.chain.from_iterable(pool.map(read, pieces)))
        rate = self._rate(start_s)
        if any(result is not VerifyResult.OK for result in results) or not self._same():
            raise CaseFailedError("a page came back from disk other than it was written")
        return rate

    def _same(self) -> bool:
        def equal(a: ByteArray, b: ByteArray) -> bool:
            # The header's checksum, which only what is not protected has, may differ.
            return bool((a[CHECKED_FROM:] == b[CHECKED_FROM:]).all())

        return all(equal(a, b) for a, b in zip(self._slots, self._back, strict=True))

    def _rate(self, start_s: float) -> float:
        return self._num_bytes / (time.perf_counter() - start_s) / 1e9

    def close(self) -> None:
        self._disk.close()
        self._raw.close()
