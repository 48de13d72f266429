"""Bytes of a segment file: header, footer and trailer.

A segment is an append-only file of equal slots, all integers little-endian::

    0                       header, one block of 4096 bytes
    4096 + i * slot_bytes   record i (sglang_ext.tiers.record)
    4096 + n * slot_bytes   footer: a table of the n records; only once sealed
    end - 128               trailer; only once sealed

    header                          trailer, the last 128 bytes
    0   4  magic "HKVS"             0   4  magic "HKVT"
    4   2  format version, 1        4   2  format version, 1
    6   2  header length, 4096      6   2  trailer length, 128
    8   4  segment id               8   4  segment id
    12  4  slots                    12  4  records n
    16  8  slot_bytes               16  8  slot_bytes
    24  8  file size preallocated   24  8  footer offset
    32  32 namespace digest         32  8  footer length, up to the file's end
    64  8  xxh3_64 of [0, 64)       40  32 namespace digest
    72  .. zeros                    72  8  xxh3_64 of the footer without its last 128 bytes
                                    80  .. zeros
    footer                          120 8  xxh3_64 of [0, 120)
    0   4  magic "HKVF"
    4   2  format version, 1
    6   2  entry length, 40
    8   4  records n
    12  4  adapters a
    16  .. a digests of 32 bytes, then n entries, then zeros up to the trailer

    entry: 0 32 page hash | 32 4 adapter, 0 = none, else 1 + row | 36 1 quality |
           37 1 flags (1: the slot holds a record) | 38 2 zeros

docs/formats.md has a worked example and the reasoning about crashes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_ext.tiers.base import BLOCK_BYTES, RecoveredPages

SEGMENT_VERSION = 1  # stored on disk; a change of encoded bytes needs a new number
HEADER_MAGIC = b"HKVS"  # stored on disk; never change
FOOTER_MAGIC = b"HKVF"  # stored on disk; never change
TRAILER_MAGIC = b"HKVT"  # stored on disk; never change
TRAILER_BYTES = 128
ENTRY_BYTES = 40
FLAG_PRESENT = 1  # stored on disk; never renumber
MAX_SLOTS = 1 << 20

_HEADER = struct.Struct("<4sHHIIQQ32s")
_FOOTER = struct.Struct("<4sHHII")
_TRAILER = struct.Struct("<4sHHIIQQQ32sQ")
_U64 = struct.Struct("<Q")
_ENTRY = np.dtype(
    [
        ("hash", np.uint8, (32,)),
        ("lora", "<u4"),
        ("quality", np.uint8),
        ("flags", np.uint8),
        ("reserved", "<u2"),
    ]
)


class FutureVersionError(Exception):
    """The bytes were written by a later release, in a format that this one cannot read."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first block of a segment says."""

    segment_id: int
    num_slots: int
    slot_bytes: int
    file_bytes: int
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the last 128 bytes of a sealed segment say."""

    segment_id: int
    num_records: int
    slot_bytes: int
    footer_offset: int
    footer_bytes: int
    namespace: bytes
    footer_checksum: int


@dataclass(slots=True)
class SegmentTable:
    """The records of one segment, slot by slot; what a footer stores. Not thread-safe.

    Attributes:
        hashes: page hash per slot; 32 zero bytes where the slot holds no record.
        lora: adapter digest per slot, empty for none.
        quality: quality per slot, 0 = exact.
        present: whether the slot holds a record.
    """

    hashes: list[bytes] = field(default_factory=list)
    lora: list[bytes] = field(default_factory=list)
    quality: list[int] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, page_hash: bytes, lora: bytes, quality: int) -> None:
        """Appends a slot that holds a record."""
        self.hashes.append(page_hash)
        self.lora.append(lora)
        self.quality.append(quality)
        self.present.append(True)

    def add_hole(self) -> None:
        """Appends a slot whose bytes are no record."""
        self.add(bytes(32), b"", 0)
        self.present[-1] = False

    def strip_holes(self) -> None:
        """Removes the slots after the last record."""
        while self.present and not self.present[-1]:
            for column in (self.hashes, self.lora, self.quality, self.present):
                column.pop()


def record_offset(index: int, slot_bytes: int) -> int:
    """Returns the byte offset of record `index`."""
    return BLOCK_BYTES + index * slot_bytes


def footer_bytes_bound(num_slots: int) -> int:
    """Returns the most bytes a footer of `num_slots` records takes, trailer included."""
    return _round_up(_FOOTER.size + num_slots * (ENTRY_BYTES + 32) + TRAILER_BYTES)


def segment_file_bytes(num_slots: int, slot_bytes: int) -> int:
    """Returns the size at which a segment of `num_slots` records is preallocated."""
    return record_offset(num_slots, slot_bytes) + footer_bytes_bound(num_slots)


def encode_header(header: SegmentHeader) -> bytes:
    """Returns the first block of a segment."""
    fixed = _HEADER.pack(
        HEADER_MAGIC,
        SEGMENT_VERSION,
        BLOCK_BYTES,
        header.segment_id,
        header.num_slots,
        header.slot_bytes,
        header.file_bytes,
        header.namespace,
    )
    return (fixed + _U64.pack(xxhash.xxh3_64_intdigest(fixed))).ljust(BLOCK_BYTES, b"\0")


def decode_header(block: bytes) -> SegmentHeader | None:
    """Parses the first block of a segment; None when it is not one.

    Raises:
        FutureVersionError: an intact header of a later format.
    """
    if len(block) < BLOCK_BYTES or block[:4] != HEADER_MAGIC:
        return None
    fixed = block[: _HEADER.size]
    if _U64.pack(xxhash.xxh3_64_intdigest(fixed)) != block[_HEADER.size : _HEADER.size + 8]:
        return None
    _, version, length, segment_id, num_slots, slot_bytes, file_bytes, namespace = _HEADER.unpack(
        fixed
    )
    if version > SEGMENT_VERSION:
        raise FutureVersionError
    if version != SEGMENT_VERSION or length != BLOCK_BYTES:
        return None
    if slot_bytes == 0 or slot_bytes % BLOCK_BYTES or num_slots > MAX_SLOTS:
        return None
    return SegmentHeader(segment_id, num_slots, slot_bytes, file_bytes, namespace)


def encode_footer(table: SegmentTable, segment_id: int, slot_bytes: int, namespace: bytes) -> bytes:
    """Returns footer and trailer of a sealed segment, a multiple of 4096 bytes."""
    adapters = sorted({lora for lora in table.lora if lora})
    rows = {lora: row + 1 for row, lora in enumerate(adapters)} | {b"": 0}
    entries = np.zeros(len(table), _ENTRY)
    if len(table):
        entries["hash"] = np.frombuffer(b"".join(table.hashes), np.uint8).reshape(-1, 32)
        entries["lora"] = [rows[lora] for lora in table.lora]
        entries["quality"] = table.quality
        entries["flags"] = np.asarray(table.present, np.uint8) * FLAG_PRESENT
    fixed = _FOOTER.pack(FOOTER_MAGIC, SEGMENT_VERSION, ENTRY_BYTES, len(table), len(adapters))
    body = fixed + b"".join(adapters) + entries.tobytes()
    total = _round_up(len(body) + TRAILER_BYTES)
    body = body.ljust(total - TRAILER_BYTES, b"\0")
    trailer = _TRAILER.pack(
        TRAILER_MAGIC,
        SEGMENT_VERSION,
        TRAILER_BYTES,
        segment_id,
        len(table),
        slot_bytes,
        record_offset(len(table), slot_bytes),
        total,
        namespace,
        xxhash.xxh3_64_intdigest(body),
    ).ljust(TRAILER_BYTES - 8, b"\0")
    return body + trailer + _U64.pack(xxhash.xxh3_64_intdigest(trailer))


def decode_trailer(tail: bytes, file_bytes: int) -> Trailer | None:
    """Parses the last 128 bytes of `tail`, the end of a file of `file_bytes`; None if invalid.

    Raises:
        FutureVersionError: an intact trailer of a later format.
    """
    raw = tail[-TRAILER_BYTES:]
    if len(raw) < TRAILER_BYTES or raw[:4] != TRAILER_MAGIC:
        return None
    if _U64.pack(xxhash.xxh3_64_intdigest(raw[:-8])) != raw[-8:]:
        return None
    (_, version, length, segment_id, num_records, slot_bytes, offset, footer_bytes, namespace,
     checksum) = _TRAILER.unpack_from(raw)  # fmt: skip
    if version > SEGMENT_VERSION:
        raise FutureVersionError
    if version != SEGMENT_VERSION or length != TRAILER_BYTES:
        return None
    if slot_bytes == 0 or slot_bytes % BLOCK_BYTES or num_records > MAX_SLOTS:
        return None
    if offset != record_offset(num_records, slot_bytes) or offset + footer_bytes != file_bytes:
        return None
    return Trailer(segment_id, num_records, slot_bytes, offset, footer_bytes, namespace, checksum)


def decode_footer(footer: bytes, trailer: Trailer) -> RecoveredPages | None:
    """Parses a footer, trailer included, that `trailer` describes; None if damaged."""
    body = footer[:-TRAILER_BYTES]
    if len(footer) != trailer.footer_bytes or len(body) < _FOOTER.size:
        return None
    if xxhash.xxh3_64_intdigest(body) != trailer.footer_checksum:
        return None
    magic, version, entry_bytes, num_records, num_adapters = _FOOTER.unpack_from(body)
    if (magic, version, entry_bytes) != (FOOTER_MAGIC, SEGMENT_VERSION, ENTRY_BYTES):
        return None
    entries_at = _FOOTER.size + 32 * num_adapters
    if num_records != trailer.num_records or entries_at + num_records * ENTRY_BYTES > len(body):
        return None
    adapters = np.frombuffer(body, np.uint8, 32 * num_adapters, _FOOTER.size).reshape(-1, 32)
    entries = np.frombuffer(body, _ENTRY, num_records, entries_at)
    if num_records and int(entries["lora"].max()) > num_adapters:
        return None
    return _pages(entries, adapters, trailer.segment_id, trailer.slot_bytes)


def table_pages(table: SegmentTable, segment_id: int, slot_bytes: int) -> RecoveredPages:
    """Returns the records of `table` with their locations."""
    footer = encode_footer(table, segment_id, slot_bytes, bytes(32))
    trailer = decode_trailer(footer, record_offset(len(table), slot_bytes) + len(footer))
    pages = decode_footer(footer, trailer) if trailer is not None else None
    if pages is None:
        raise AssertionError("a footer just encoded must decode")
    return pages


def _pages(
    entries: npt.NDArray[np.void],
    adapters: npt.NDArray[np.uint8],
    segment_id: int,
    slot_bytes: int,
) -> RecoveredPages:
    rows = np.flatnonzero(entries["flags"] & FLAG_PRESENT)
    lora = np.concatenate([np.zeros((1, 32), np.uint8), adapters])[entries["lora"][rows]]
    blocks = 1 + rows.astype(np.uint64) * (slot_bytes // BLOCK_BYTES)
    return RecoveredPages(
        hashes=np.ascontiguousarray(entries["hash"][rows]),
        lora=np.ascontiguousarray(lora),
        segment=np.full(len(rows), segment_id, np.uint32),
        block=blocks.astype(np.uint32),
        quality=np.ascontiguousarray(entries["quality"][rows]),
    )


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
