"""A page store with a transcoder over a disk, coded DRAM or both; pages tell their key."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from sglang_ext.tiers.coded_host import CachedDiskTier, MemoryTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    parse_header,
    read_meta,
    write_meta,
)
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from sglang_ext.tiers.transcoder import PageTranscoder, coded_record, raw_header

SLOT = 65536
PAYLOAD = SLOT - HEADER_BYTES - 1000
DIGEST = hashlib.sha256(b"namespace").digest()
PROFILE = hashlib.sha256(b"profile").digest()
NONE = np.empty((0, 32), np.uint8)


class Zstd(PageTranscoder):
    """zstandard over the payload; with `quality` 1 it drops the low bits of every byte first."""

    def __init__(self, *, quality: int = 0, encodes: bool = True) -> None:
        self.quality = quality
        self.encodes = encodes
        self.num_decoded = 0

    def encode(self, slot: ByteArray) -> ByteArray | None:
        meta, num_bytes = parse_header(slot)
        payload = slot[HEADER_BYTES : HEADER_BYTES + num_bytes]
        frame = zstandard.ZstdCompressor(3).compress(
            (lossy(payload) if self.quality else payload).tobytes()
        )
        return coded_record(
            meta,
            np.frombuffer(frame, np.uint8),
            codec="zstd",
            level=3,
            profile=PROFILE,
            quality=self.quality,
        )

    def decode(self, record: ByteArray, out_slot: ByteArray) -> bool:
        self.num_decoded += 1
        meta = read_meta(record)
        frame = record[HEADER_BYTES:].tobytes()
        try:
            size = zstandard.get_frame_parameters(frame).content_size
            if meta.codec != "zstd" or size > out_slot.size - HEADER_BYTES:
                return False
            data = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError:
            return False
        write_meta(out_slot, raw_header(meta), len(data))
        out_slot[HEADER_BYTES : HEADER_BYTES + len(data)] = np.frombuffer(data, np.uint8)
        return True


def lossy(payload: ByteArray) -> ByteArray:
    return payload & np.uint8(0xF0)


def content(page_hash: bytes) -> ByteArray:
    """A payload of bytes 0 to 15, so that coding halves it at least; "raw" pages are noise."""
    noise = np.frombuffer(hashlib.shake_128(page_hash).digest(PAYLOAD), np.uint8)
    return noise if page_hash[:1] >= b"\xf0" else noise % 16


def pages(name: str, count: int, *, noise: bool = False) -> np.ndarray:
    rows: list[bytes] = []
    number = 0
    while len(rows) < count:
        row = hashlib.sha256(f"{name}{number}".encode()).digest()
        number += 1
        if (row[:1] >= b"\xf0") == noise:
            rows.append(row)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)


class Rig:
    """A coded store over a small arena and a disk, coded DRAM or both: "disk", "host", "both"."""

    def __init__(
        self, folder: Path, transcoder: PageTranscoder | None = None, *, slots: int = 8,
        policy: str = "write_through", max_bytes: int = 64 << 20, direct_io: Any = "auto",
        below: str = "disk", memory_bytes: int = 64 << 20, lookahead: bool = False,
    ) -> None:  # fmt: skip
        self.folder = folder / "disk"
        self.policy = policy
        self.arena = HostArena(slots, SLOT)
        config = DiskConfig(self.folder, max_bytes, 0, segment_bytes=1 << 20, direct_io=direct_io)
        self.disk: Any
        if below == "host":
            self.disk = MemoryTier(memory_bytes)
        elif below == "both":
            self.disk = CachedDiskTier(DiskTier(config), memory_bytes)
        else:
            self.disk = DiskTier(config)
        placement = PolicyConfig() if lookahead else None
        store_config = PageStoreConfig(policy, placement=placement)
        self.store = PageStore(self.arena, PageIndex(4096), self.disk, store_config, transcoder)
        self.store.connect(self.disk)
        self.found = self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)

    @property
    def index(self) -> PageIndex:
        return self.store._books.table.index

    def rows(self, hashes: np.ndarray) -> np.ndarray:
        return self.index.lookup(hashes, self.space.number)

    def save(self, hashes: np.ndarray, quality: int = 0) -> int:
        qualities = np.full(len(hashes), quality, np.uint8)
        ticket = self.store.begin_save(self.space, hashes, NONE, qualities)
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            page_hash = hashes[page].tobytes()
            data = self.arena.slots[slot]
            meta = RecordMeta(page_hash, DIGEST, b"", 64 * page, 64, "pre", quality=quality)
            write_meta(data, meta, PAYLOAD)
            data[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = content(page_hash)
        self.store.finish_save(ticket, ok=True)
        return len(ticket.pages)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline_s, self.store.stats()
            time.sleep(0.002)

    def settle(self) -> None:
        assert self.store.wait_idle(300)
        self.until(self._is_settled)
        self.store.check()

    def _is_settled(self) -> bool:
        books = self.store._books
        with books.table.lock:  # without it a batch is seen neither in the queue nor pinned
            return not books.spills.entries and not self.arena._pins.any()

    def clean(self) -> None:
        """Has everything written, also by a policy that would wait with it."""
        if self.policy != "write_through":
            assert self.store.flush(10) == 0

    def push_out(self, name: str = "push") -> None:
        """Fills DRAM with other pages; what was there is on disk only then."""
        self.settle()
        self.clean()
        self.save(pages(name, self.arena.num_slots))
        self.clean()
        self.settle()

    def bring_back(self, hashes: np.ndarray) -> int:
        """Promotes pages; returns how many of them are ready."""
        plan = self.store.plan(self.space, hashes)
        if plan is not None:
            self.until(lambda: plan.done)
            self.store.cancel_plan(plan)
        assert self.store.wait_idle(300)
        self.store.check()
        return self.store.ready_prefix(self.space, hashes)

    def payloads(self, hashes: np.ndarray) -> list[ByteArray]:
        ticket = self.store.pin_ready(self.space, hashes)
        assert ticket is not None
        found = []
        for slot, row in zip(ticket.slots.tolist(), hashes, strict=True):
            meta, num_bytes = parse_header(self.arena.slots[slot])
            assert (meta.page_hash, meta.codec, meta.profile) == (row.tobytes(), "raw", b"")
            assert (meta.position % 64, meta.num_tokens, num_bytes) == (0, 64, PAYLOAD)
            found.append(self.arena.slots[slot][HEADER_BYTES:][:PAYLOAD].copy())
        self.store.release(ticket.slots)
        return found

    def is_exact(self, hashes: np.ndarray) -> bool:
        """Whether DRAM has just what was saved."""
        pairs = zip(self.payloads(hashes), hashes, strict=True)
        return all(bool((data == content(row.tobytes())).all()) for data, row in pairs)

    def count(self, name: str) -> int:
        return self.store.counters.snapshot().get(name, 0)

    def record(self, page: np.ndarray) -> tuple[Path, int, int]:
        """File, offset and length of a page's record."""
        (row,) = self.rows(page[None])
        path = self.folder / DIGEST.hex()[:16] / f"seg-{self.index.segment[row]:08d}.hkv"
        return path, int(self.index.block[row]) * 4096, int(self.index.num_blocks[row]) * 4096
