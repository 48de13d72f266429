"""The bytes on disk are pinned, and what is encoded decodes to the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiers.base import Location, ReadRequest
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.disk.segments.layout import (
    LATEST_VERSION,
    FutureVersionError,
    SegmentHeader,
    SegmentTable,
    decode_footer,
    decode_header,
    decode_trailer,
    encode_footer,
    encode_header,
    footer_bytes_bound,
    record_offset,
    segment_file_bytes,
    table_pages,
)
from sglang_ext.tiers.records.checks import verify
from sglang_ext.tiers.records.record import VerifyResult, read_meta
from tests.tiers.disk import golden_segments as golden

rows = st.lists(
    st.tuples(
        st.binary(min_size=32, max_size=32),
        st.one_of(st.just(b""), st.sampled_from([b"a" * 32, b"b" * 32])),
        st.integers(0, 255),
        st.booleans(),
    ),
    max_size=200,
)


def test_golden_records_are_reproduced_and_read() -> None:
    data = golden.RECORD.read_bytes()
    slots = np.frombuffer(data, np.uint8).reshape(-1, golden.SLOT_BYTES)
    for index, (slot, meta) in enumerate(zip(slots, golden.METAS, strict=True)):
        assert slot.tobytes() == golden.record(index).tobytes()
        assert read_meta(slot) == meta
        assert verify(slot, meta.page_hash, meta.namespace, meta.lora) is VerifyResult.OK


def test_the_golden_segment_is_reproduced() -> None:
    assert golden.SEGMENT.read_bytes() == golden.segment()


def test_the_golden_packed_segment_is_reproduced() -> None:
    assert golden.PACKED.read_bytes() == golden.packed_segment()


@pytest.mark.parametrize("packed", [False, True])
def test_the_golden_segment_is_served(open_tier: Callable[..., DiskTier], packed: bool) -> None:
    """Whether new segments of the namespace are packed or not."""
    tier = open_tier()
    tier.open_namespace(golden.NAMESPACE, golden.SLOT_BYTES, {}, packed=packed)
    folder = tier._config.path / golden.NAMESPACE.hex()[:16]
    tier.close()
    shutil.copy(golden.SEGMENT, folder / f"seg-{golden.SEGMENT_ID:08d}.hkv")
    tier = open_tier()
    pages = tier.open_namespace(golden.NAMESPACE, golden.SLOT_BYTES, {}, packed=packed)
    assert pages.block.tolist() == [1, 2, 4]
    assert pages.num_blocks.tolist() == [1, 1, 1]
    assert pages.quality.tolist() == [0, 0, 200]
    for row, meta in enumerate(golden.METAS):
        out = aligned_array(golden.SLOT_BYTES)
        location = Location(golden.SEGMENT_ID, int(pages.block[row]))
        request = ReadRequest(location, meta.page_hash, meta.lora, out)
        assert tier.read(golden.NAMESPACE, [request]) == [VerifyResult.OK]
        assert out.tobytes() == golden.record(row).tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_the_golden_packed_segment_is_served(
    open_tier: Callable[..., DiskTier], packed: bool
) -> None:
    tier = open_tier()
    tier.open_namespace(golden.NAMESPACE, golden.PACKED_SLOT_BYTES, {}, packed=packed)
    folder = tier._config.path / golden.NAMESPACE.hex()[:16]
    tier.close()
    shutil.copy(golden.PACKED, folder / f"seg-{golden.SEGMENT_ID:08d}.hkv")
    tier = open_tier()
    pages = tier.open_namespace(golden.NAMESPACE, golden.PACKED_SLOT_BYTES, {}, packed=packed)
    assert pages.block.tolist() == [1, 2, 7]
    assert pages.num_blocks.tolist() == [1, 3, 2]
    assert pages.quality.tolist() == [0, 0, 200]
    for row, meta in enumerate(golden.METAS):
        location = Location(golden.SEGMENT_ID, int(pages.block[row]))
        for num_blocks in (int(pages.num_blocks[row]), 0):
            out = aligned_array(golden.PACKED_SLOT_BYTES)
            request = ReadRequest(location, meta.page_hash, meta.lora, out, num_blocks)
            assert tier.read(golden.NAMESPACE, [request]) == [VerifyResult.OK]
            data = golden.packed_record(row).tobytes()
            assert out[: len(data)].tobytes() == data


def test_what_the_tier_packs_is_the_golden_layout(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier(segment_bytes=4096)
    tier.open_namespace(golden.NAMESPACE, golden.PACKED_SLOT_BYTES, {}, packed=True)
    records = [golden.packed_record(index) for index in range(3)]
    for data in records:
        data[16:24] = 0
    locations = tier.write(golden.NAMESPACE, records)
    assert [location and location.block for location in locations] == [1, 2, 5]
    folder = tier._config.path / golden.NAMESPACE.hex()[:16]
    tier.close()
    table = SegmentTable(4, packed=True)
    for meta, data in zip(golden.METAS, records, strict=True):
        table.add(meta.page_hash, meta.lora, meta.quality, data.size // 4096)
    file_bytes = segment_file_bytes(8, golden.PACKED_SLOT_BYTES)
    header = SegmentHeader(1, 8, golden.PACKED_SLOT_BYTES, file_bytes, golden.NAMESPACE, True)
    expected = (
        encode_header(header)
        + b"".join(golden.packed_record(index).tobytes() for index in range(3))
        + encode_footer(table, 1, golden.NAMESPACE)
    )
    assert (folder / "seg-00000001.hkv").read_bytes() == expected


def test_what_the_tier_writes_is_the_golden_layout(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier(segment_bytes=4096)
    tier.open_namespace(golden.NAMESPACE, golden.SLOT_BYTES, {})
    slots = []
    for index in range(3):
        slot = golden.record(index)
        slot[16:24] = 0  # as write_meta leaves it: the tier seals
        slots.append(slot)
    assert None not in tier.write(golden.NAMESPACE, slots)
    folder = tier._config.path / golden.NAMESPACE.hex()[:16]
    tier.close()
    table = SegmentTable(1)
    for meta in golden.METAS:
        table.add(meta.page_hash, meta.lora, meta.quality)
    file_bytes = segment_file_bytes(8, golden.SLOT_BYTES)
    header = SegmentHeader(1, 8, golden.SLOT_BYTES, file_bytes, golden.NAMESPACE)
    expected = (
        encode_header(header)
        + b"".join(golden.record(index).tobytes() for index in range(3))
        + encode_footer(table, 1, golden.NAMESPACE)
    )
    assert (folder / "seg-00000001.hkv").read_bytes() == expected


@given(rows=rows, segment_id=st.integers(1, 2**32 - 2), blocks=st.integers(1, 1000))
def test_a_footer_decodes_to_its_table(
    rows: list[tuple[bytes, bytes, int, bool]], segment_id: int, blocks: int
) -> None:
    table = SegmentTable(blocks)
    for page_hash, lora, quality, present in rows:
        if present:
            table.add(page_hash, lora, quality)
        else:
            table.add_hole()
    slot_bytes = blocks * 4096
    footer = encode_footer(table, segment_id, b"n" * 32)
    assert len(footer) % 4096 == 0
    assert len(footer) <= footer_bytes_bound(len(rows))
    trailer = decode_trailer(footer, record_offset(len(rows), slot_bytes) + len(footer))
    assert trailer is not None
    assert (trailer.segment_id, trailer.slot_bytes) == (segment_id, slot_bytes)
    pages = decode_footer(footer, trailer)
    assert pages is not None
    expected = [
        (page_hash, lora or bytes(32), quality, 1 + index * blocks)
        for index, (page_hash, lora, quality, present) in enumerate(rows)
        if present
    ]
    found = [
        (pages.hashes[i].tobytes(), pages.lora[i].tobytes(), pages.quality[i], pages.block[i])
        for i in range(len(pages))
    ]
    assert found == expected


@given(
    rows=rows,
    lengths=st.lists(st.integers(1, 16), min_size=200, max_size=200),
    segment_id=st.integers(1, 2**32 - 2),
)
def test_a_packed_footer_decodes_to_its_table(
    rows: list[tuple[bytes, bytes, int, bool]], lengths: list[int], segment_id: int
) -> None:
    table = SegmentTable(16, packed=True)
    expected = []
    for (page_hash, lora, quality, present), num_blocks in zip(rows, lengths, strict=False):
        if present:
            expected.append((page_hash, lora or bytes(32), quality, table.end_block, num_blocks))
            table.add(page_hash, lora, quality, num_blocks)
        else:
            for _ in range(num_blocks):
                table.add_hole()
    footer = encode_footer(table, segment_id, b"n" * 32)
    assert len(footer) <= footer_bytes_bound(len(rows))
    trailer = decode_trailer(footer, table.end_block * 4096 + len(footer))
    assert trailer is not None
    assert (trailer.packed, trailer.end_block) == (True, table.end_block)
    pages = decode_footer(footer, trailer)
    assert pages is not None
    columns = (pages.quality, pages.block, pages.num_blocks)
    found = [
        (pages.hashes[i].tobytes(), pages.lora[i].tobytes(), *(int(c[i]) for c in columns))
        for i in range(len(pages))
    ]
    assert found == expected


def test_a_long_hole_takes_several_entries() -> None:
    table = SegmentTable(4, packed=True)
    table.add(b"a" * 32, b"", 0, 3)
    for _ in range(70_000):
        table.add_hole()
    table.add(b"b" * 32, b"", 0, 2)
    assert len(table) == 4
    assert table_pages(table, 1).block.tolist() == [1, 70_004]
    for _ in range(5):
        table.add_hole()
    table.strip_holes()
    assert (len(table), table.end_block) == (4, 70_006)


@pytest.mark.parametrize("lengths", [(0, 6), (5, 1), (3, 2)])
def test_a_footer_with_impossible_lengths_is_damaged(lengths: tuple[int, int]) -> None:
    table = SegmentTable(4, packed=True)
    for name in (b"a", b"b"):
        table.add(name * 32, b"", 0, 3)
    table.num_blocks[:] = lengths
    footer = encode_footer(table, 1, b"n" * 32)
    trailer = decode_trailer(footer, table.end_block * 4096 + len(footer))
    assert trailer is not None
    assert decode_footer(footer, trailer) is None


@given(where=st.integers(0, 4095), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_footer_is_found(where: int, bit: int) -> None:
    table = SegmentTable(1)
    for index in range(20):
        table.add(bytes([index]) * 32, b"", 0)
    good = encode_footer(table, 5, b"n" * 32)
    footer = bytearray(good)
    footer[where % len(good)] ^= 1 << bit
    file_bytes = record_offset(20, 4096) + len(good)
    trailer = decode_trailer(bytes(footer), file_bytes)
    assert trailer is None or decode_footer(bytes(footer), trailer) is None


@given(where=st.integers(0, 71), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_header_is_found(where: int, bit: int) -> None:
    block = bytearray(encode_header(SegmentHeader(1, 8, 4096, 65536, b"n" * 32)))
    block[where] ^= 1 << bit
    assert decode_header(bytes(block)) is None


@pytest.mark.parametrize("junk", [b"", b"HKVS", bytes(4096), b"HKVS" + bytes(4092)])
def test_junk_is_no_header_and_no_trailer(junk: bytes) -> None:
    assert decode_header(junk) is None
    assert decode_trailer(junk, len(junk)) is None


def test_a_later_header_is_told_from_damage() -> None:
    import xxhash

    block = bytearray(encode_header(SegmentHeader(1, 8, 4096, 65536, b"n" * 32)))
    block[4] = LATEST_VERSION + 1
    block[64:72] = xxhash.xxh3_64_digest(bytes(block[:64]))[::-1]
    with pytest.raises(FutureVersionError):
        decode_header(bytes(block))


def test_no_footer_is_longer_than_its_records_need() -> None:
    import xxhash

    good = encode_footer(SegmentTable(1), 5, b"n" * 32)
    fixed = bytearray(good[-128:-8])
    fixed[32:40] = (1 << 40).to_bytes(8, "little")
    trailer = bytes(fixed) + xxhash.xxh3_64_intdigest(bytes(fixed)).to_bytes(8, "little")
    assert decode_trailer(good, 4096 + len(good)) is not None
    assert decode_trailer(trailer, 4096 + (1 << 40)) is None
