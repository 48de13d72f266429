"""Coded or raw on disk, by what reading and decoding cost."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    parse_header,
    write_meta,
)
from sglang_ext.tiers.store.disk_coding import PageEncoder
from sglang_ext.tiers.store.types import StoreCounters
from sglang_ext.tiers.transcoder import PageTranscoder, coded_record

SLOT = 16384


class Halving(PageTranscoder):
    """Keeps every other byte; nobody decodes here."""

    def encode(self, slot: ByteArray) -> ByteArray | None:
        meta, num_bytes = parse_header(slot)
        half = slot[HEADER_BYTES : HEADER_BYTES + num_bytes : 2]
        return coded_record(meta, half, codec="half", quality=1)

    def decode(self, record: ByteArray, out_slot: ByteArray) -> bool:
        return False


def make_slots(count: int) -> list[ByteArray]:
    slots = []
    for number in range(count):
        slot = aligned_array(SLOT)
        page_hash = hashlib.sha256(number.to_bytes(4, "little")).digest()
        write_meta(slot, RecordMeta(page_hash, bytes(32), b"", 0, 64, "pre"), SLOT - HEADER_BYTES)
        slots.append(slot)
    return slots


def model(read_mb_s: float, decode_mb_s: float | None) -> CostModel:
    cost = CostModel(2.0)
    for power in (16, 20, 24) * 2:
        size = 1 << power
        decoded = size if decode_mb_s else 0
        decode_s = size / (1e6 * decode_mb_s) if decode_mb_s else 0.0
        cost.note_read(size, size / (1e6 * read_mb_s), decoded, decode_s)
    return cost


@pytest.mark.parametrize(
    ("read", "decode", "share", "raw"),
    [
        (7000, 1000, 0.5, True),
        (200, 1000, 0.5, False),
        (1000, 1000, 0.01, True),  # just slower, however small
        (1000, 2100, 0.5, False),
        (1000, 1900, 0.5, True),
        (7000, None, 0.5, False),
    ],
)
def test_raw_where_decoding_costs_more_than_the_bytes_it_saves(
    read: float, decode: float | None, share: float, raw: bool
) -> None:
    assert model(read, decode).prefers_raw(share) is raw


def test_before_anything_was_measured_pages_are_coded() -> None:
    assert CostModel(2.0).prefers_raw(0.5) is False


def test_pages_that_are_kept_raw_are_whole_and_some_are_still_coded() -> None:
    counters = StoreCounters()
    asked: list[float] = []

    def keep_raw(share: float) -> bool:
        asked.append(share)
        return True

    encoder = PageEncoder(Halving(), SLOT, 64, counters, keep_raw)
    slots = make_slots(64)
    assert all(r.data.size < SLOT for r in encoder.encode(slots[:8]))  # no share is known yet
    assert asked == []
    records = encoder.encode(slots)
    assert asked == [pytest.approx(0.75, abs=0.01)]  # 12 KiB of 16, in whole blocks
    raw = [record for record in records if record.data.size == SLOT]
    assert 60 <= len(raw) < 64
    assert all(record.quality == 0 for record in raw)
    assert {record.quality for record in records} == {0, 1}
    found = counters.snapshot()
    assert found["kept_raw_pages"] == len(raw)
    assert found["coded_pages"] == 8 + 64 - len(raw)
    assert "uncoded_pages" not in found


def test_a_disk_that_is_short_of_room_gets_coded_pages(tmp_path: Path) -> None:
    feeds = CostFeeds(model(7000, 1000), SLOT, StoreCounters())
    config = DiskConfig(tmp_path, 4 << 20, 0, segment_bytes=256 << 10, direct_io="off")
    with DiskTier(config) as disk:
        disk.open_namespace(bytes(32), SLOT, {})
        assert feeds.keep_raw(disk, 0.5)
        while disk.stats().used_bytes < 2 << 20:
            disk.write(bytes(32), make_slots(16))
        assert not feeds.keep_raw(disk, 0.5)


def test_the_choice_needs_a_codec() -> None:
    HierKVConfig(codec="lossless", disk_dir="x", coding="cost").validate()
    with pytest.raises(HierKVConfigError, match="need a codec"):
        HierKVConfig(coding="cost").validate()
