"""Packed segments: records of any length side by side, and what is found of them after a crash."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, ReadRequest, RecoveredPages, record_blocks
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO, aligned_array
from sglang_ext.tiers.disk.segments.layout import decode_header
from sglang_ext.tiers.disk.segments.recovery import recover_segment
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    VerifyResult,
    write_meta,
)
from tests.tiers.tier_pages import (
    NAMESPACE,
    PACKED_SLOT_BYTES,
    is_right,
    key,
    make_record,
    make_slot,
    packed_blocks,
    packed_payload_bytes,
    read_packed,
    read_page,
    store_packed,
)

OpenTier = Callable[..., DiskTier]
OK, MISSING = VerifyResult.OK, VerifyResult.MISSING
SLOT_BLOCKS = PACKED_SLOT_BYTES // 4096
FOLDER = NAMESPACE.hex()[:16]
SEGMENT = 4 << 20


class Unsealed(FileIO):
    """Keeps segments as a killed process leaves them: preallocated, without a footer."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if bytes(buffers[0][:4]) == b"HKVF":
            raise OSError(5, "killed")
        return super().pwritev(fd, buffers, offset)


class CountedReads(FileIO):
    """Counts reads of records and how many bytes they asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.sizes.append(sum(len(buffer) for buffer in buffers))
        return super().preadv(fd, buffers, offset)


def open_packed(open_tier: OpenTier, *, packed: bool = True, **settings: object) -> DiskTier:
    tier = open_tier(**({"segment_bytes": SEGMENT} | settings))
    tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=packed)
    return tier


def reopen(open_tier: OpenTier, **settings: object) -> tuple[DiskTier, RecoveredPages]:
    tier = open_tier(**({"segment_bytes": SEGMENT} | settings))
    return tier, tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=True)


def found(pages: RecoveredPages) -> dict[bytes, tuple[int, int, int]]:
    return {
        pages.hashes[row].tobytes(): (
            int(pages.segment[row]),
            int(pages.block[row]),
            int(pages.num_blocks[row]),
        )
        for row in range(len(pages))
    }


def expected(locations: Sequence[Location], numbers: Sequence[int]) -> dict[bytes, object]:
    return {key(n): (*locations[n], packed_blocks(key(n))) for n in numbers}


def segments(tier: DiskTier) -> list[Path]:
    return sorted((tier._config.path / FOLDER).glob("*.hkv"))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def small_record(number: int, num_bytes: int = 100) -> ByteArray:
    """A record in one block, of a page whose number says what is in it."""
    record = aligned_array(record_blocks(num_bytes) * 4096)
    write_meta(record, RecordMeta(key(number), NAMESPACE, b"", 0, 64, "pre", "x"), num_bytes)
    record[HEADER_BYTES : HEADER_BYTES + num_bytes] = number % 251
    return record


# ---- layout --------------------------------------------------------------------------------------


def test_records_lie_next_to_each_other(open_tier: OpenTier) -> None:
    tier = open_packed(open_tier)
    locations = store_packed(tier, range(30))
    block = 1
    for number, location in enumerate(locations):
        assert location.block == block
        block += packed_blocks(key(number))
        assert read_packed(tier, location, number) is OK
    lengths = {packed_blocks(key(n)) for n in range(30)}
    assert lengths >= {1, 2, SLOT_BLOCKS}, "the test wants lengths of every kind"
    tier.close()
    (path,) = segments(tier)
    assert path.stat().st_size == block * 4096 + 4096


def test_a_whole_slot_may_be_a_record_too(open_tier: OpenTier) -> None:
    tier = open_packed(open_tier)
    slot = make_slot(1, slot_bytes=PACKED_SLOT_BYTES)
    first, second, third = tier.write(NAMESPACE, [slot, make_record(2), slot])
    assert first is not None
    assert second is not None
    assert third is not None
    assert second.block == first.block + SLOT_BLOCKS
    for location in (first, third):
        for num_blocks in (SLOT_BLOCKS, 0):
            args = (1, NAMESPACE, b"", PACKED_SLOT_BYTES, num_blocks)
            assert read_page(tier, location, *args) is OK


def test_neighbours_are_read_at_once_and_no_byte_more(open_tier: OpenTier) -> None:
    io = CountedReads()
    tier = open_packed(open_tier, io=io)
    locations = store_packed(tier, range(30))
    outs = aligned_array(30 * PACKED_SLOT_BYTES).reshape(30, -1)
    requests = [
        ReadRequest(location, key(n), b"", outs[n], packed_blocks(key(n)))
        for n, location in enumerate(locations)
    ]
    io.sizes.clear()
    order = np.random.default_rng(0).permutation(30).tolist()
    assert tier.read(NAMESPACE, [requests[n] for n in order]) == [OK] * 30
    total = sum(packed_blocks(key(n)) for n in range(30)) * 4096
    assert io.sizes == [total], "less than 1 MiB of neighbours: one call"
    assert tier.stats().bytes_read == total
    assert all(is_right(outs[n], key(n), NAMESPACE) for n in range(30))


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_memory_need_not_be_aligned(open_tier: OpenTier, direct_io: str) -> None:
    tier = open_packed(open_tier, direct_io=direct_io)
    room = np.zeros(9 * PACKED_SLOT_BYTES, np.uint8)
    records, at = [], 77
    for number in range(8):
        data = make_record(number)
        records.append(room[at : at + data.size])
        records[-1][:] = data
        at += data.size
    locations = tier.write(NAMESPACE, records)
    outs = [room[77 + n * PACKED_SLOT_BYTES :][:PACKED_SLOT_BYTES] for n in range(8)]
    requests = [
        ReadRequest(location, key(n), b"", outs[n], packed_blocks(key(n)))
        for n, location in enumerate(locations)
        if location is not None
    ]
    room[:] = 0
    assert tier.read(NAMESPACE, requests) == [OK] * 8
    assert all(is_right(outs[n], key(n), NAMESPACE) for n in range(8))


def test_a_wrong_length_is_a_miss(open_tier: OpenTier) -> None:
    tier = open_packed(open_tier)
    locations = store_packed(tier, range(30))
    number = next(n for n in range(20) if packed_blocks(key(n)) > 2)
    right = packed_blocks(key(number))

    def read(num_blocks: int) -> VerifyResult:
        args = (number, NAMESPACE, b"", PACKED_SLOT_BYTES, num_blocks)
        return read_page(tier, locations[number], *args)

    assert read(right) is OK
    assert read(right - 1) is VerifyResult.BAD_HEADER
    assert [read(n) for n in (-1, SLOT_BLOCKS + 1, 10**9)] == [MISSING] * 3


def test_lengths_that_are_none_are_refused(open_tier: OpenTier) -> None:
    tier = open_packed(open_tier)
    useless = [
        make_record(1)[:-1],
        make_record(1)[:0],
        np.concatenate([make_record(1), np.zeros(PACKED_SLOT_BYTES, np.uint8)]),
        make_record(next(n for n in range(99) if packed_blocks(key(n)) > 1))[:4096],
    ]
    assert tier.write(NAMESPACE, useless) == [None] * 4
    assert tier.stats().dropped == {"malformed": 4}
    assert read_packed(tier, store_packed(tier, [1])[0], 1) is OK


def test_whole_slots_take_no_parts(open_tier: OpenTier) -> None:
    tier = open_packed(open_tier, packed=False)
    number = next(n for n in range(99) if packed_blocks(key(n)) < SLOT_BLOCKS)
    assert tier.write(NAMESPACE, [make_record(number)]) == [None]
    assert tier.stats().dropped == {"malformed": 1}


def test_a_slot_longer_than_any_record_is_refused(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=16 << 30)
    with pytest.raises(TierConfigError, match="smaller page size"):
        tier.open_namespace(NAMESPACE, 65536 * 4096, {})


def test_a_segment_of_tiny_records_keeps_room_for_its_footer(open_tier: OpenTier) -> None:
    """Many more records than slots: their table must still fit in front of the file's end."""
    tier = open_packed(open_tier, segment_bytes=256 << 10)
    records = [small_record(n) for n in range(200)]
    locations = tier.write(NAMESPACE, records)
    assert all(location is not None for location in locations)
    paths = segments(tier)
    assert len(paths) > 2
    for path in paths[:-1]:
        header = decode_header(path.read_bytes()[:4096])
        assert header is not None
        assert header.packed
        assert path.stat().st_size <= header.file_bytes
        # As full as it can be: one more record and its line in the table would not fit.
        assert path.stat().st_size + 2 * 4096 > header.file_bytes
    tier.close()
    _, pages = reopen(open_tier)
    assert len(pages) == 200
    assert set(pages.num_blocks.tolist()) == {1}


# ---- recovery ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [True, False])
def test_what_was_written_is_found(open_tier: OpenTier, sealed: bool) -> None:
    tier = open_packed(open_tier, io=None if sealed else Unsealed())
    locations = store_packed(tier, range(60))
    tier.close()
    (path,) = segments(tier)
    before = path.stat().st_size
    tier, pages = reopen(open_tier)
    assert found(pages) == expected(locations, range(60))
    assert (path.stat().st_size < before) == (not sealed)
    assert tier.stats().errors == {}
    assert tier.stats().used_bytes == path.stat().st_size
    assert all(read_packed(tier, at, n) is OK for n, at in enumerate(locations))


@pytest.mark.parametrize("where", ["header", "payload", "end"])
def test_an_unsealed_segment_ends_at_the_first_torn_record(open_tier: OpenTier, where: str) -> None:
    tier = open_packed(open_tier, io=Unsealed())
    locations = store_packed(tier, range(30))
    tier.close()
    (path,) = segments(tier)
    payload_bytes = packed_payload_bytes(key(12))
    at = {"header": 40, "payload": 512, "end": 512 + payload_bytes - 1}[where]
    offset = locations[12].block * 4096 + at
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
    tier, pages = reopen(open_tier)
    assert found(pages) == expected(locations, range(12))
    assert read_packed(tier, locations[12], 12) is MISSING
    assert read_packed(tier, store_packed(tier, [77])[0], 77) is OK


def test_records_behind_a_failed_write_are_found(open_tier: OpenTier) -> None:
    """What a failed write left behind lies under, or behind, what is written next."""

    class FailsOnce(Unsealed):
        armed = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.armed:
                self.armed = False
                super().pwritev(fd, buffers, offset)  # all of it is there, and not acknowledged
                raise OSError(5, "injected")
            return super().pwritev(fd, buffers, offset)

    io = FailsOnce()
    tier = open_packed(open_tier, io=io)
    kept = dict(zip(range(10), store_packed(tier, range(10)), strict=True))
    io.armed = True
    assert None in tier.write(NAMESPACE, [make_record(n) for n in range(100, 120)])
    for first in range(200, 206, 2):
        numbers = range(first, first + 2)
        kept |= dict(zip(numbers, store_packed(tier, numbers), strict=True))
    tier.close()
    tier, pages = reopen(open_tier)
    where = found(pages)
    for number, location in kept.items():
        assert where[key(number)][:2] == location
        assert read_packed(tier, location, number) is OK
    for row in range(len(pages)):  # also those nobody was told of are whole
        out = aligned_array(PACKED_SLOT_BYTES)
        at = Location(int(pages.segment[row]), int(pages.block[row]))
        page_hash = pages.hashes[row].tobytes()
        request = ReadRequest(at, page_hash, b"", out, int(pages.num_blocks[row]))
        assert tier.read(NAMESPACE, [request]) == [OK]


@pytest.mark.parametrize("damage", ["footer", "header and footer", "header", "trailer"])
def test_damaged_tables_cost_no_page(open_tier: OpenTier, damage: str) -> None:
    tier = open_packed(open_tier)
    locations = store_packed(tier, range(60))
    tier.close()
    (path,) = segments(tier)
    size = path.stat().st_size
    if "header" in damage:
        overwrite(path, 20, b"damage")
    if "footer" in damage:
        overwrite(path, size - 200, b"damage")
    if "trailer" in damage:
        overwrite(path, size - 60, b"damage")
    for errors in ({} if damage == "header" else {"damaged_footer": 1}, {}):
        tier, pages = reopen(open_tier)
        assert found(pages) == expected(locations, range(60))
        assert tier.stats().errors == errors
        assert all(read_packed(tier, at, n) is OK for n, at in enumerate(locations))
        tier.close()


@pytest.mark.parametrize("header", ["right", "damaged"])
def test_a_search_behind_damage_goes_on_block_by_block(open_tier: OpenTier, header: str) -> None:
    tier = open_packed(open_tier)
    locations = store_packed(tier, range(40))
    tier.close()
    (path,) = segments(tier)
    overwrite(path, path.stat().st_size - 60, b"damage")
    if header == "damaged":
        overwrite(path, 20, b"damage")
    bad = [0, 5, 6, 20, 39]
    for number in bad:
        overwrite(path, locations[number].block * 4096 + 30, b"damage")
    good = [n for n in range(40) if n not in bad]
    for _ in range(2):  # by the search, then by the footer that it wrote
        tier, pages = reopen(open_tier)
        assert found(pages) == expected(locations, good)
        assert all(read_packed(tier, locations[n], n) is OK for n in good)
        assert all(read_packed(tier, locations[n], n) is not OK for n in bad)
        tier.close()


@pytest.mark.parametrize("cut", range(6))
def test_a_cut_file_gives_what_is_left_of_it(open_tier: OpenTier, cut: int) -> None:
    tier = open_packed(open_tier)
    locations = store_packed(tier, range(20))
    tier.close()
    (path,) = segments(tier)
    starts = [location.block * 4096 for location in locations]
    ends = [*starts[1:], path.stat().st_size - 4096]
    num_bytes = (0, 4096, starts[1] - 1, starts[9] + 700, ends[12], ends[19] + 100)[cut]
    os.truncate(path, num_bytes)
    _, pages = reopen(open_tier)
    assert found(pages) == expected(locations, [n for n in range(20) if ends[n] <= num_bytes])


def test_records_that_straddle_the_buffer_of_a_scan(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_packed(open_tier, io=Unsealed())
    locations = store_packed(tier, range(80))
    tier.close()
    (path,) = segments(tier)
    image = path.read_bytes()
    for scan_bytes in (1, 3 * PACKED_SLOT_BYTES, 5 * PACKED_SLOT_BYTES + 1, 64 << 20):
        path.write_bytes(image)
        monkeypatch.setattr("sglang_ext.tiers.disk.segments.recovery._SCAN_BYTES", scan_bytes)
        result = recover_segment(FileIO(), path, 1, NAMESPACE, PACKED_SLOT_BYTES, sync=False)
        assert found(result.pages) == expected(locations, range(80))
        assert result.packed


def test_slots_whose_header_is_lost_are_found_too(open_tier: OpenTier) -> None:
    """Nothing says which layout it was; the search finds records that fill part of their slot."""
    tier = open_packed(open_tier, packed=False)
    slots = []
    for number in range(12):
        slots.append(aligned_array(PACKED_SLOT_BYTES))
        data = make_record(number)
        slots[-1][: data.size] = data
    locations = tier.write(NAMESPACE, slots)
    tier.close()
    (path,) = segments(tier)
    overwrite(path, 20, b"damage")
    overwrite(path, path.stat().st_size - 60, b"damage")
    for _ in range(2):
        tier, pages = reopen(open_tier)
        assert {page: place[:2] for page, place in found(pages).items()} == {
            key(n): location for n, location in enumerate(locations)
        }
        assert all(
            read_packed(tier, location, n) is OK
            for n, location in enumerate(locations)
            if location is not None
        )
        tier.close()


# ---- both layouts, and reclaim -------------------------------------------------------------------


def test_a_namespace_may_change_its_layout(open_tier: OpenTier) -> None:
    places: dict[int, Location] = {}
    for run, packed in enumerate([False, True, False, True]):
        tier = open_packed(open_tier, packed=packed)
        numbers = range(100 * run, 100 * run + 20)
        make = make_record if packed else make_slot
        stored = tier.write(NAMESPACE, [make(n, slot_bytes=PACKED_SLOT_BYTES) for n in numbers])
        places |= {n: at for n, at in zip(numbers, stored, strict=True) if at is not None}
        for number, location in places.items():
            args = (location, number, NAMESPACE, b"", PACKED_SLOT_BYTES)
            assert read_page(tier, *args) is OK
        tier.close()
    assert len(places) == 80
    _, pages = reopen(open_tier)
    assert {page: place[:2] for page, place in found(pages).items()} == {
        key(n): location for n, location in places.items()
    }


@pytest.mark.parametrize("packed", [True, False])
def test_salvage_between_layouts(open_tier: OpenTier, packed: bool) -> None:
    """Hot pages of a segment of one layout move into an active segment of the other."""
    bound = 4 << 20
    tier = open_packed(open_tier, packed=not packed, max_bytes=bound)
    make = make_slot if packed else make_record
    tier.write(NAMESPACE, [make(n, slot_bytes=PACKED_SLOT_BYTES) for n in range(12)])
    first = segments(tier)
    tier.close()
    tier, pages = reopen(open_tier, max_bytes=bound)
    tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=packed)
    moved: dict[bytes, tuple[int, int, int]] = {}
    dropped: list[int] = []
    hot = {key(3).hex(), key(7).hex()}
    tier.is_hot = lambda digest, hashes, lora: np.array(
        [row.tobytes().hex() in hot for row in hashes]
    )
    tier.on_moved = lambda digest, old, pages: moved.update(found(pages))
    tier.on_drop = lambda digest, segment_id: dropped.append(segment_id)
    make = make_record if packed else make_slot
    number = 100
    while int(pages.segment[0]) not in dropped:
        assert tier.write(NAMESPACE, [make(number, slot_bytes=PACKED_SLOT_BYTES)]) != [None]
        number += 1
    assert not first[0].exists()
    assert moved
    for page, (segment, block, num_blocks) in moved.items():
        out = aligned_array(PACKED_SLOT_BYTES)
        request = ReadRequest(Location(segment, block), page, b"", out, num_blocks)
        assert tier.read(NAMESPACE, [request]) == [OK]
        assert is_right(out, page, NAMESPACE)
        assert num_blocks == SLOT_BLOCKS or packed is False


def test_salvage_takes_a_quarter_of_the_bytes_not_of_the_records(open_tier: OpenTier) -> None:
    tier = open_packed(open_tier, max_bytes=8 << 20, segment_bytes=1 << 20)
    blocks: Counter[int] = Counter()
    moved: Counter[int] = Counter()

    def on_moved(digest: bytes, old: int, pages: RecoveredPages) -> None:
        moved[old] += int(pages.num_blocks.sum())
        for segment, _, num_blocks in found(pages).values():
            blocks[segment] += num_blocks

    tier.is_hot = lambda digest, hashes, lora: np.ones(len(hashes), np.bool_)
    tier.on_moved = on_moved
    for number in range(1500):
        (location,) = tier.write(NAMESPACE, [make_record(number)])
        assert location is not None
        blocks[location.segment] += packed_blocks(key(number))
    assert moved
    assert all(num_blocks <= blocks[old] // 4 for old, num_blocks in moved.items())
    files = sum(path.stat().st_size for path in segments(tier))
    assert files == tier.stats().used_bytes <= 8 << 20
    assert tier.stats().dropped == {}


def test_the_disk_holds_more_of_what_is_shorter(open_tier: OpenTier, tmp_path: Path) -> None:
    bound = 8 << 20
    kept = {}
    for packed in (False, True):
        path = tmp_path / f"packed-{packed}"
        tier = open_tier(max_bytes=bound, path=path)
        tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=packed)
        for number in range(0, 2000, 50):
            batch = [small_record(n, 4000) for n in range(number, number + 50)]
            if not packed:
                slots = [aligned_array(PACKED_SLOT_BYTES) for _ in batch]
                for slot, data in zip(slots, batch, strict=True):
                    slot[: data.size] = data
                batch = slots
            assert None not in tier.write(NAMESPACE, batch)
        tier.close()
        tier = open_tier(max_bytes=bound, path=path)
        kept[packed] = len(tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=packed))
        tier.close()
    assert kept[False] < bound // PACKED_SLOT_BYTES
    assert kept[True] > 3.5 * kept[False], "two blocks in the place of eight"
