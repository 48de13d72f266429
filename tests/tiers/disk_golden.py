"""The golden files of the record and segment formats, and what they are made of.

Run `python tests/tiers/disk_golden.py --write` only for a new format version: the files pin the
bytes that servers in the field have on their disks.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np

from sglang_ext.tiers.disk.layout import (
    SegmentHeader,
    SegmentTable,
    encode_footer,
    encode_header,
    segment_file_bytes,
)
from sglang_ext.tiers.record import ByteArray, RecordMeta, seal, write_meta

GOLDEN = Path(__file__).parent.parent / "golden"
RECORD = GOLDEN / "record-v1.bin"
SEGMENT = GOLDEN / "segment-v1.bin"

SLOT_BYTES = 4096
PAYLOAD_BYTES = 1500
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


def record(index: int) -> ByteArray:
    """Returns record `index` as a sealed slot; its padding is zeros."""
    slot = np.zeros(SLOT_BYTES, np.uint8)
    slot[512 : 512 + PAYLOAD_BYTES] = (np.arange(PAYLOAD_BYTES) * (index + 3)) % 256
    write_meta(slot, METAS[index], PAYLOAD_BYTES)
    seal(slot)
    return slot


def segment() -> bytes:
    """Returns a sealed segment of the three records, with a hole before the last."""
    file_bytes = segment_file_bytes(NUM_SLOTS, SLOT_BYTES)
    header = SegmentHeader(SEGMENT_ID, NUM_SLOTS, SLOT_BYTES, file_bytes, NAMESPACE)
    table = SegmentTable()
    table.add(METAS[0].page_hash, METAS[0].lora, METAS[0].quality)
    table.add(METAS[1].page_hash, METAS[1].lora, METAS[1].quality)
    table.add_hole()
    table.add(METAS[2].page_hash, METAS[2].lora, METAS[2].quality)
    slots = [record(0), record(1), np.zeros(SLOT_BYTES, np.uint8), record(2)]
    body = b"".join(slot.tobytes() for slot in slots)
    return encode_header(header) + body + encode_footer(table, SEGMENT_ID, SLOT_BYTES, NAMESPACE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    RECORD.write_bytes(b"".join(record(index).tobytes() for index in range(len(METAS))))
    SEGMENT.write_bytes(segment())
    print(f"wrote {RECORD} and {SEGMENT}")
