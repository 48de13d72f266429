"""Bytes of a segment file: header, footer and trailer.

A segment is an append-only file of records, all integers little-endian::

    0           header, one block of 4096 bytes
    4096        records (sglang_ext.tiers.records.record), one behind the other
                    versions 1, 3: each in a slot of slot_bytes
                    versions 2, 4: each in as many blocks of 4096 bytes as it fills ("packed")
    behind them footer: a table of the n records; only once sealed
    end - 128   trailer; only once sealed

    header                          trailer, the last 128 bytes
    0   4  magic "HKVS"             0   4  magic "HKVT"
    4   2  format version, 1 to 4   4   2  format version
    6   2  header length, 4096      6   2  trailer length, 128
    8   4  segment id               8   4  segment id
    12  4  whole slots it has room  12  4  records n
    16  8  slot_bytes               16  8  slot_bytes
    24  8  file size preallocated   24  8  footer offset
    32  32 namespace digest         32  8  footer length, up to the file's end
    64  8  xxh3_64 of [0, 64)       40  32 namespace digest
    72  .. zeros                    72  8  xxh3_64 of the footer without its last 128 bytes
                                    80  .. zeros
    footer                          120 8  xxh3_64 of [0, 120)
    0   4  magic "HKVF"
    4   2  format version
    6   2  entry length, 40
    8   4  records n
    12  4  adapters a
    16  .. a digests of 32 bytes, then n entries, then zeros up to the trailer;
           versions 3 and 4: origin and tag (56 bytes) in front of the digests, and digests and
           entries encrypted or not (sglang_ext.tiers.protection)

    entry: 0 32 page hash | 32 4 adapter, 0 = none, else 1 + row | 36 1 quality |
           37 1 flags (1: a record lies here) |
           38 2 versions 1, 3: zeros; 2, 4: blocks, of the record or of the hole

docs/formats.md has a worked example and the reasoning about crashes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_ext.tiers.base import BLOCK_BYTES, MAX_RECORD_BLOCKS, RecoveredPages
from sglang_ext.tiers.records.seals import FooterSeal

SLOTTED_VERSION = 1  # stored on disk; never renumber
PACKED_VERSION = 2  # stored on disk; never renumber
PROTECTED_SLOTTED_VERSION = 3  # stored on disk; never renumber
PROTECTED_PACKED_VERSION = 4  # stored on disk; never renumber
LATEST_VERSION = PROTECTED_PACKED_VERSION  # a change of encoded bytes needs a new number
HEADER_MAGIC = b"HKVS"  # stored on disk; never change
FOOTER_MAGIC = b"HKVF"  # stored on disk; never change
TRAILER_MAGIC = b"HKVT"  # stored on disk; never change
TRAILER_BYTES = 128
CHECKSUM_BYTES = 8
"""Of the trailer, at its end."""
ENTRY_BYTES = 40
SEAL_BYTES = 56
"""What protecting a footer adds to it."""
FLAG_PRESENT = 1  # stored on disk; never renumber
MAX_SLOTS = 1 << 20
"""Most records in a segment."""
MAX_FILE_BYTES = BLOCK_BYTES << 32
"""Longest segment: blocks have numbers of 32 bits."""

_HEADER = struct.Struct("<4sHHIIQQ32s")
_FOOTER = struct.Struct("<4sHHII")
_TRAILER = struct.Struct("<4sHHIIQQQ32sQ")
_PLACE = struct.Struct("<IQQ")  # what a protected footer's tag covers besides
_U64 = struct.Struct("<Q")
_ENTRY = np.dtype(
    [
        ("hash", np.uint8, (32,)),
        ("lora", "<u4"),
        ("quality", np.uint8),
        ("flags", np.uint8),
        ("num_blocks", "<u2"),
    ]
)


class LockedFooterError(Exception):
    """A footer is intact and was not written with any key that is here."""


class FutureVersionError(Exception):
    """The bytes were written by a later release, in a format that this one cannot read."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first block of a segment says.

    `protected`: whether records and footer can only be written by who has a key.
    """

    segment_id: int
    num_slots: int
    slot_bytes: int
    file_bytes: int
    namespace: bytes
    packed: bool = False
    protected: bool = False


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
    packed: bool
    protected: bool

    @property
    def end_block(self) -> int:
        """Records lie in blocks [1, end_block)."""
        return self.footer_offset // BLOCK_BYTES


@dataclass(slots=True)
class SegmentTable:
    """The records of one segment, one after another; what a footer stores. Not thread-safe.

    Attributes:
        slot_blocks: blocks of a slot.
        packed: whether a record takes as many blocks as it fills, and not a slot.
        hashes: page hash per entry; 32 zero bytes where it is a hole and holds no record.
        lora: adapter digest per entry, empty for none.
        quality: quality per entry, 0 = exact.
        present: whether the entry is a record.
        num_blocks: length per entry.
        end_block: the entries fill blocks [1, end_block).
    """

    slot_blocks: int
    packed: bool = False
    hashes: list[bytes] = field(default_factory=list)
    lora: list[bytes] = field(default_factory=list)
    quality: list[int] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    end_block: int = 1

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, page_hash: bytes, lora: bytes, quality: int, num_blocks: int = 0) -> None:
        """Appends a record; `num_blocks` counts where records are packed."""
        self._append(page_hash, lora, quality, num_blocks, True)

    def add_hole(self) -> None:
        """Appends a slot, or where records are packed a block, whose bytes are no record."""
        if (
            self.packed
            and self.present
            and not self.present[-1]
            and self.num_blocks[-1] < MAX_RECORD_BLOCKS
        ):
            self.num_blocks[-1] += 1
            self.end_block += 1
        else:
            self._append(bytes(32), b"", 0, 1, False)

    def add_holes(self, num_blocks: int) -> None:
        """Appends places without a record, in the whole so many blocks long."""
        step = MAX_RECORD_BLOCKS if self.packed else self.slot_blocks
        while num_blocks > 0:
            self._append(bytes(32), b"", 0, min(step, num_blocks), False)
            num_blocks -= step

    def strip_holes(self) -> None:
        """Removes the holes after the last record."""
        while self.present and not self.present[-1]:
            self.end_block -= self.num_blocks[-1]
            for column in (self.hashes, self.lora, self.quality, self.present, self.num_blocks):
                column.pop()

    def _append(
        self, page_hash: bytes, lora: bytes, quality: int, num_blocks: int, present: bool
    ) -> None:
        num_blocks = num_blocks if self.packed else self.slot_blocks
        self.hashes.append(page_hash)
        self.lora.append(lora)
        self.quality.append(quality)
        self.present.append(present)
        self.num_blocks.append(num_blocks)
        self.end_block += num_blocks


def record_offset(index: int, slot_bytes: int) -> int:
    """Returns the byte offset of record `index` of a segment of slots."""
    return BLOCK_BYTES + index * slot_bytes


def footer_bytes_bound(num_slots: int) -> int:
    """Returns the most bytes a footer of `num_slots` records takes, trailer included."""
    return _round_up(_FOOTER.size + SEAL_BYTES + num_slots * (ENTRY_BYTES + 32) + TRAILER_BYTES)


def segment_file_bytes(num_slots: int, slot_bytes: int) -> int:
    """Returns the size at which a segment with room for `num_slots` slots is preallocated."""
    return record_offset(num_slots, slot_bytes) + footer_bytes_bound(num_slots)


def reopened_file_bytes(header: SegmentHeader) -> int:
    """Returns the length of a segment's file while its free places are filled.

    It is longer than a segment in any other state.
    """
    return header.file_bytes + BLOCK_BYTES


def encode_header(header: SegmentHeader) -> bytes:
    """Returns the first block of a segment."""
    fixed = _HEADER.pack(
        HEADER_MAGIC,
        _version(header.packed, header.protected),
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
    if version > LATEST_VERSION:
        raise FutureVersionError
    if version < SLOTTED_VERSION or length != BLOCK_BYTES:
        return None
    if slot_bytes == 0 or slot_bytes % BLOCK_BYTES or num_slots > MAX_SLOTS:
        return None
    if file_bytes > MAX_FILE_BYTES:  # a file is made so long before its places are filled again
        return None
    packed, protected = _kind(version)
    return SegmentHeader(
        segment_id, num_slots, slot_bytes, file_bytes, namespace, packed, protected
    )


def encode_footer(
    table: SegmentTable, segment_id: int, namespace: bytes, seal: FooterSeal | None = None
) -> bytes:
    """Returns footer and trailer of a sealed segment, a multiple of 4096 bytes.

    Args:
        table: its records.
        segment_id: its id.
        namespace: its namespace.
        seal: what protects the table, if the segment is protected.
    """
    adapters = sorted({lora for lora in table.lora if lora})
    rows = {lora: row + 1 for row, lora in enumerate(adapters)} | {b"": 0}
    entries = np.zeros(len(table), _ENTRY)
    if len(table):
        entries["hash"] = np.frombuffer(b"".join(table.hashes), np.uint8).reshape(-1, 32)
        entries["lora"] = [rows[lora] for lora in table.lora]
        entries["quality"] = table.quality
        entries["flags"] = np.asarray(table.present, np.uint8) * FLAG_PRESENT
        entries["num_blocks"] = table.num_blocks if table.packed else 0
    version = _version(table.packed, seal is not None)
    fixed = _FOOTER.pack(FOOTER_MAGIC, version, ENTRY_BYTES, len(table), len(adapters))
    body = b"".join(adapters) + entries.tobytes()
    slot_bytes, end_bytes = table.slot_blocks * BLOCK_BYTES, table.end_block * BLOCK_BYTES
    if seal is not None:
        body = seal.seal(namespace, fixed + _PLACE.pack(segment_id, slot_bytes, end_bytes), body)
    body = fixed + body
    total = _round_up(len(body) + TRAILER_BYTES)
    body = body.ljust(total - TRAILER_BYTES, b"\0")
    trailer = _TRAILER.pack(
        TRAILER_MAGIC,
        version,
        TRAILER_BYTES,
        segment_id,
        len(table),
        slot_bytes,
        end_bytes,
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
    if version > LATEST_VERSION:
        raise FutureVersionError
    if version < SLOTTED_VERSION or length != TRAILER_BYTES:
        return None
    if slot_bytes == 0 or slot_bytes % BLOCK_BYTES or num_records > MAX_SLOTS:
        return None
    packed, protected = _kind(version)
    if not packed and offset != record_offset(num_records, slot_bytes):
        return None
    if offset < BLOCK_BYTES or offset % BLOCK_BYTES or offset + footer_bytes != file_bytes:
        return None
    if footer_bytes > footer_bytes_bound(num_records):  # it is read into memory at once
        return None
    return Trailer(
        segment_id,
        num_records,
        slot_bytes,
        offset,
        footer_bytes,
        namespace,
        checksum,
        packed,
        protected,
    )


def decode_footer(
    footer: bytes, trailer: Trailer, seal: FooterSeal | None = None
) -> RecoveredPages | None:
    """Parses a footer, trailer included, that `trailer` describes; None if damaged, or forged.

    Args:
        footer: the bytes.
        trailer: from `decode_trailer`.
        seal: what protects it; None where segments are not protected.

    Raises:
        LockedFooterError: it is not what `seal` made.
    """
    body = footer[:-TRAILER_BYTES]
    if len(footer) != trailer.footer_bytes or len(body) < _FOOTER.size:
        return None
    if xxhash.xxh3_64_intdigest(body) != trailer.footer_checksum:
        return None
    magic, version, entry_bytes, num_records, num_adapters = _FOOTER.unpack_from(body)
    wanted = (FOOTER_MAGIC, _version(trailer.packed, seal is not None), ENTRY_BYTES)
    if (magic, version, entry_bytes) != wanted or num_records != trailer.num_records:
        return None
    entries_at, fixed, body = 32 * num_adapters, body[: _FOOTER.size], body[_FOOTER.size :]
    table_bytes = entries_at + num_records * ENTRY_BYTES
    if seal is not None:
        place = _PLACE.pack(trailer.segment_id, trailer.slot_bytes, trailer.footer_offset)
        sealed = body[: SEAL_BYTES + table_bytes]
        opened = seal.open(trailer.namespace, fixed + place, sealed)
        if opened is None:
            raise LockedFooterError
        body = opened
    if table_bytes > len(body):
        return None
    adapters = np.frombuffer(body, np.uint8, 32 * num_adapters).reshape(-1, 32)
    entries = np.frombuffer(body, _ENTRY, num_records, entries_at)
    if num_records and int(entries["lora"].max()) > num_adapters:
        return None
    slot_blocks = trailer.slot_bytes // BLOCK_BYTES
    lengths = np.full(num_records, slot_blocks, np.int64)
    if trailer.packed:
        lengths[:] = entries["num_blocks"]
        # The footer's checksum is right, so this is no damage; but no length is believed unseen.
        present = (entries["flags"] & FLAG_PRESENT) != 0
        right = (lengths[present] > 0) & (lengths[present] <= slot_blocks)
        if 1 + int(lengths.sum()) != trailer.end_block or not right.all():
            return None
    return _pages(entries, adapters, trailer.segment_id, lengths)


def table_pages(table: SegmentTable, segment_id: int) -> RecoveredPages:
    """Returns the records of `table` with their locations."""
    footer = encode_footer(table, segment_id, bytes(32))
    trailer = decode_trailer(footer, table.end_block * BLOCK_BYTES + len(footer))
    pages = decode_footer(footer, trailer) if trailer is not None else None
    if pages is None:
        raise AssertionError("a footer just encoded must decode")
    return pages


def _pages(
    entries: npt.NDArray[np.void],
    adapters: npt.NDArray[np.uint8],
    segment_id: int,
    lengths: npt.NDArray[np.int64],
) -> RecoveredPages:
    rows = np.flatnonzero(entries["flags"] & FLAG_PRESENT)
    lora = np.concatenate([np.zeros((1, 32), np.uint8), adapters])[entries["lora"][rows]]
    blocks = 1 + np.cumsum(lengths) - lengths
    return RecoveredPages(
        hashes=np.ascontiguousarray(entries["hash"][rows]),
        lora=np.ascontiguousarray(lora),
        segment=np.full(len(rows), segment_id, np.uint32),
        block=blocks[rows].astype(np.uint32),
        num_blocks=lengths[rows].astype(np.uint16),
        quality=np.ascontiguousarray(entries["quality"][rows]),
    )


def _version(packed: bool, protected: bool) -> int:
    if protected:
        return PROTECTED_PACKED_VERSION if packed else PROTECTED_SLOTTED_VERSION
    return PACKED_VERSION if packed else SLOTTED_VERSION


def _kind(version: int) -> tuple[bool, bool]:
    """Whether segments of a version are packed, and whether they are protected."""
    packed = version in (PACKED_VERSION, PROTECTED_PACKED_VERSION)
    return packed, version >= PROTECTED_SLOTTED_VERSION


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
