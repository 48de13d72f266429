"""The golden files of the record and segment formats, and what they are made of.

Run `python tests/tiers/disk/golden_segments.py --write` only for a new format version: the files
pin the bytes that servers in the field have on their disks.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np

from sglang_ext.tiers.base import record_blocks
from sglang_ext.tiers.disk.segments.layout import (
    SegmentHeader,
    SegmentTable,
    encode_footer,
    encode_header,
    segment_file_bytes,
)
from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import ByteArray, RecordMeta, write_meta

GOLDEN = Path(__file__).parents[2] / "golden"
RECORD = GOLDEN / "record-v1.bin"
SEGMENT = GOLDEN / "segment-v1.bin"
PACKED = GOLDEN / "segment-v2.bin"

SLOT_BYTES = 4096
PAYLOAD_BYTES = 1500
PACKED_SLOT_BYTES = 16384
PACKED_PAYLOADS = (1500, 9000, 7000)  # 1, 3 and 2 blocks
SEGMENT_ID = 7
NUM_SLOTS = 8
NAMESPACE = hashlib.sha256(b"golden namespace").digest()
ADAPTER = hashlib.sha256(b"golden adapter").digest()
METAS = (
    RecordMeta(hashlib.sha256(b"page 0").digest(), NAMESPACE, b"", 0, 64, "pre"),
    RecordMeta(hashlib.sha256(b"page 1").digest(), NAMESPACE, ADAPTER, 64, 64, "bound"),
    RecordMeta(
        hashlib.sha256(b"page 2").digest(),
        NAMESPACE,
        b"",
        2**40,
        17,
        "delta",
        codec="zstd",
        level=3,
        quality=200,
        profile=hashlib.sha256(b"profile").digest(),
    ),
)


def record(
    index: int, payload_bytes: int = PAYLOAD_BYTES, slot_bytes: int = SLOT_BYTES
) -> ByteArray:
    """Returns record `index` as a sealed slot; its padding is zeros."""
    slot = np.zeros(slot_bytes, np.uint8)
    slot[512 : 512 + payload_bytes] = (np.arange(payload_bytes) * (index + 3)) % 256
    write_meta(slot, METAS[index], payload_bytes)
    seal(slot)
    return slot


def packed_record(index: int) -> ByteArray:
    """Returns record `index` of the packed segment, in as many blocks as it fills."""
    slot = record(index, PACKED_PAYLOADS[index], PACKED_SLOT_BYTES)
    return slot[: record_blocks(PACKED_PAYLOADS[index]) * 4096]


def segment() -> bytes:
    """Returns a sealed segment of the three records, with a hole before the last."""
    file_bytes = segment_file_bytes(NUM_SLOTS, SLOT_BYTES)
    header = SegmentHeader(SEGMENT_ID, NUM_SLOTS, SLOT_BYTES, file_bytes, NAMESPACE)
    table = SegmentTable(SLOT_BYTES // 4096)
    table.add(METAS[0].page_hash, METAS[0].lora, METAS[0].quality)
    table.add(METAS[1].page_hash, METAS[1].lora, METAS[1].quality)
    table.add_hole()
    table.add(METAS[2].page_hash, METAS[2].lora, METAS[2].quality)
    slots = [record(0), record(1), np.zeros(SLOT_BYTES, np.uint8), record(2)]
    body = b"".join(slot.tobytes() for slot in slots)
    return encode_header(header) + body + encode_footer(table, SEGMENT_ID, NAMESPACE)


def packed_segment() -> bytes:
    """Returns a sealed segment of packed records, with a hole of two blocks before the last."""
    file_bytes = segment_file_bytes(NUM_SLOTS, PACKED_SLOT_BYTES)
    header = SegmentHeader(
        SEGMENT_ID, NUM_SLOTS, PACKED_SLOT_BYTES, file_bytes, NAMESPACE, packed=True
    )
    table = SegmentTable(PACKED_SLOT_BYTES // 4096, packed=True)
    records = [packed_record(index) for index in range(3)]
    for index, (meta, data) in enumerate(zip(METAS, records, strict=True)):
        if index == 2:
            table.add_hole()
            table.add_hole()
        table.add(meta.page_hash, meta.lora, meta.quality, data.size // 4096)
    parts = [records[0], records[1], np.zeros(8192, np.uint8), records[2]]
    body = b"".join(part.tobytes() for part in parts)
    return encode_header(header) + body + encode_footer(table, SEGMENT_ID, NAMESPACE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    RECORD.write_bytes(b"".join(record(index).tobytes() for index in range(len(METAS))))
    SEGMENT.write_bytes(segment())
    PACKED.write_bytes(packed_segment())
    print(f"wrote {RECORD}, {SEGMENT} and {PACKED}")
