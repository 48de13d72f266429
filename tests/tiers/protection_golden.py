"""The golden files of protected records and segments, and what they are made of.

Run `python -m tests.tiers.protection_golden --write` only for a new format version.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import numpy as np

from sglang_ext.tiers.disk.segments.layout import (
    SegmentHeader,
    SegmentTable,
    encode_footer,
    encode_header,
    segment_file_bytes,
)
from sglang_ext.tiers.protection import KeyedSeals
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, RecordError, write_meta
from sglang_ext.tiers.remote.staged import stage
from tests.tiers.disk import golden_segments as plain
from tests.tiers.protection_cases import seals

MODES = ("tag", "encrypt")
ENDS = (600, 1100, 2012)
SALT = bytes(range(100, 116))


def with_fixed_salt(mode: str) -> KeyedSeals:
    """Seals whose process drew `SALT`, and has counted to 0."""
    made = seals(mode)
    with patch("os.urandom", return_value=SALT):
        made._protection.begin(1)
    return made


def staged() -> ByteArray:
    """A plain staged record of three stages."""
    record = np.zeros(plain.SLOT_BYTES, np.uint8)
    write_meta(record, plain.METAS[2], 1500)
    record[HEADER_BYTES:2012] = np.arange(1500) % 251
    return stage(record, 1, ENDS)


def golden(mode: str) -> dict[str, bytes]:
    """File names and their bytes."""
    made = with_fixed_salt(mode)
    records = []
    for index in range(3):
        (sealed,) = made.seal([plain.record(index)], plain.NAMESPACE)
        assert not isinstance(sealed, RecordError)
        out = np.zeros(plain.SLOT_BYTES, np.uint8)
        if sealed.fill is None:
            out = np.concatenate(sealed.pieces)
        else:
            sealed.fill(out)
        records.append(out.tobytes())
    header, payload = made.seal_to_send(staged())
    table = SegmentTable(1)
    for index in (0, 1):
        meta = plain.METAS[index]
        table.add(meta.page_hash, meta.lora, meta.quality)
    file_bytes = segment_file_bytes(plain.NUM_SLOTS, plain.SLOT_BYTES)
    first = encode_header(
        SegmentHeader(
            plain.SEGMENT_ID,
            plain.NUM_SLOTS,
            plain.SLOT_BYTES,
            file_bytes,
            plain.NAMESPACE,
            protected=True,
        )
    )
    footer = encode_footer(table, plain.SEGMENT_ID, plain.NAMESPACE, made.footers)
    return {
        f"record-v2-{mode}.bin": b"".join(records),
        f"staged-v2-{mode}.bin": header.tobytes() + payload.tobytes(),
        f"segment-v3-{mode}.bin": first + records[0] + records[1] + footer,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    for mode in MODES:
        for name, data in golden(mode).items():
            (plain.GOLDEN / name).write_bytes(data)
