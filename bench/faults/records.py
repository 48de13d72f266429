"""Records in segment files: where they lie, and ways to damage them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES, record_blocks
from sglang_ext.tiers.disk.segments.layout import decode_header
from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    parse_header,
    write_meta,
)


@dataclass(frozen=True)
class Spot:
    """Where a record lies."""

    path: Path
    offset: int
    num_bytes: int

    def load(self) -> bytes:
        """The record with its padding: a whole slot, or the blocks that it fills."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.num_bytes)

    def store(self, data: bytes) -> None:
        """Overwrites the record in place; what is too long for it is cut."""
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(data[: self.num_bytes])

    def cut(self) -> None:
        """Ends the file in the middle of the record."""
        with self.path.open("r+b") as file:
            file.truncate(self.offset + self.num_bytes // 2)


def find_records(folder: Path) -> dict[str, Spot]:
    """Every record in the segments below `folder`, by page hash; the youngest of a page wins.

    A segment is read up to the first place that holds none, so damage is done after this.
    """
    return {
        page: spot
        for path in sorted(folder.glob("*/seg-*.hkv"))
        for page, spot in _records_of(path)
    }


def _records_of(path: Path) -> Iterator[tuple[str, Spot]]:
    with path.open("rb") as file:
        header = decode_header(file.read(BLOCK_BYTES))
    if header is None:
        return
    spot = Spot(path, BLOCK_BYTES, header.slot_bytes)
    while True:
        try:
            meta, payload_bytes = parse_header(np.frombuffer(spot.load(), np.uint8))
        except RecordError:
            return  # the footer, or what is not written yet
        if header.packed:
            spot = replace(spot, num_bytes=record_blocks(payload_bytes) * BLOCK_BYTES)
        yield meta.page_hash.hex(), spot
        spot = Spot(path, spot.offset + spot.num_bytes, header.slot_bytes)


# ---- damage --------------------------------------------------------------------------------------

Damage = Callable[[bytes, bytes, random.Random], bytes]
"""From a slot, another page's slot, and chance, what takes the slot's place."""


def flip_header_bit(slot: bytes, other: bytes, rng: random.Random) -> bytes:
    """Flips one bit of the header."""
    return _flipped(slot, rng.randrange(HEADER_BYTES), rng)


def flip_payload_bit(slot: bytes, other: bytes, rng: random.Random) -> bytes:
    """Flips one bit of the payload."""
    _, payload_bytes = parse_header(np.frombuffer(slot, np.uint8))
    return _flipped(slot, HEADER_BYTES + rng.randrange(payload_bytes), rng)


def tear(slot: bytes, other: bytes, rng: random.Random) -> bytes:
    """Leaves the start, of any length, and zeros or another record's end behind it."""
    kept = rng.randrange(HEADER_BYTES, max(HEADER_BYTES + 1, len(slot) - 2 * BLOCK_BYTES))
    rest = other if rng.random() < 0.5 else bytes(len(slot))
    return slot[:kept] + rest[kept:]


def stale_namespace(slot: bytes, other: bytes, rng: random.Random) -> bytes:
    """An intact record of the same page, computed by another model."""
    return _with_meta(slot, lambda meta: replace(meta, namespace=rng.randbytes(32)))


def foreign_adapter(slot: bytes, other: bytes, rng: random.Random) -> bytes:
    """An intact record of the same page, computed with an adapter."""
    return _with_meta(slot, lambda meta: replace(meta, lora=rng.randbytes(32)))


def other_record(slot: bytes, other: bytes, rng: random.Random) -> bytes:
    """Another page's intact record."""
    return other


DAMAGES: dict[str, Damage] = {
    "bit_flip_header": flip_header_bit,
    "bit_flip_payload": flip_payload_bit,
    "torn_record": tear,
    "swapped_record": other_record,
    "stale_namespace": stale_namespace,
    "foreign_adapter": foreign_adapter,
}


def _flipped(slot: bytes, index: int, rng: random.Random) -> bytes:
    data = bytearray(slot)
    data[index] ^= 1 << rng.randrange(8)
    return bytes(data)


def _with_meta(slot: bytes, change: Callable[[RecordMeta], RecordMeta]) -> bytes:
    data: ByteArray = np.frombuffer(bytearray(slot), np.uint8)
    meta, payload_bytes = parse_header(data)
    write_meta(data, change(meta), payload_bytes)
    seal(data)
    return data.tobytes()
