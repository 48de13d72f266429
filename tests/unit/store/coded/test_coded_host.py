"""Coded pages in DRAM: alone, and in front of a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, RecoveredPages
from sglang_ext.tiers.coded_host import CachedDiskTier, MemoryTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.records.record import VerifyResult
from testkit.page_books import PageBooks
from tests.tiers.tier_pages import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT_BYTES,
    key,
    make_slot,
    read_page,
    store,
)
from tests.unit.store.coded.coded_world import Rig, Zstd, pages

OK, MISSING = VerifyResult.OK, VerifyResult.MISSING
RECORD = SLOT_BYTES - 100  # header and payload of a page of `tier_pages`


class Owner:
    """Notes what it is told, and keeps the page numbers of `hot`."""

    def __init__(self, tier: Any, hot: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.dropped: list[int] = []
        self.moved: dict[bytes, tuple[int, int]] = {}
        self._hot = {key(number) for number in hot}
        tier.on_drop = lambda digest, segment: self.dropped.append(segment)
        tier.on_moved = self._on_moved
        tier.is_hot = lambda digest, hashes, lora: np.array(
            [row.tobytes() in self._hot for row in hashes], np.bool_
        )

    def _on_moved(self, digest: bytes, segment: int, found: RecoveredPages) -> None:
        for at in range(len(found)):
            place = int(found.segment[at]), int(found.block[at])
            self.moved[found.hashes[at].tobytes()] = place


@pytest.fixture
def memory() -> Iterator[MemoryTier]:
    with MemoryTier(64 * RECORD) as tier:
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        yield tier


def test_memory_is_bounded_and_the_owner_is_told_of_every_loss(memory: MemoryTier) -> None:
    owner = Owner(memory)
    locations = [store(memory, [number])[0] for number in range(200)]
    assert memory.stats().used_bytes <= 64 * RECORD
    there = [read_page(memory, place, number) is OK for number, place in enumerate(locations)]
    assert there == [place.segment not in owner.dropped for place in locations]
    assert sum(there) >= 60


def test_what_was_read_last_stays(memory: MemoryTier) -> None:
    Owner(memory)
    locations = store(memory, range(64))
    for number in range(100, 130):
        assert read_page(memory, locations[0], 0) is OK
        store(memory, [number])
    assert read_page(memory, locations[10], 10) is MISSING


def test_hot_records_move_out_of_a_segment_that_goes() -> None:
    with MemoryTier(640 * RECORD) as tier:  # 20 records a segment, 5 of which may move
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        owner = Owner(tier, hot=set(range(10)))
        first = store(tier, range(640))[0]
        store(tier, [1000])
        assert owner.dropped[0] == first.segment
        assert set(owner.moved) == {key(number) for number in range(5)}
        segment, block = owner.moved[key(0)]
        assert read_page(tier, Location(segment, block), 0) is OK
        assert read_page(tier, first, 0) is MISSING


def test_a_segment_is_no_larger_in_a_larger_memory() -> None:
    """What a record that leaves costs is the records beside it."""
    with MemoryTier(3200 * RECORD) as tier:
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        books = PageBooks(1)
        books.connect(tier)
        number, left = 0, []
        for _ in range(106):
            numbers = range(number, number + 32)
            places = tier.write(NAMESPACE, [make_slot(each) for each in numbers])
            books.add([key(each) for each in numbers], places, [2] * 32)
            number += 32
            left += [len(each.records) for each in tier._segments.values()]
        assert max(left) <= 64
        assert sum(len(each.records) for each in tier._segments.values()) == len(books.pages)
        assert tier.stats().used_bytes <= 3200 * RECORD
        assert tier.stats().segments_dropped == 0
        for place in list(books.pages)[::100]:
            (found,) = [n for n in range(number) if key(n) == books.pages[place][0]]
            assert read_page(tier, place, found) is OK


def test_records_that_became_no_pages_give_their_room_back(memory: MemoryTier) -> None:
    """Nobody speaks of them, so the segments of a call are looked at with the next one."""
    books = PageBooks(1)
    books.connect(memory)
    store(memory, range(32))
    places = store(memory, range(100, 132))
    books.add([key(number) for number in range(100, 132)], places, [2] * 32)
    assert memory.stats().used_bytes == 32 * RECORD
    places = store(memory, range(200, 232))
    books.add([key(number) for number in range(200, 232)], places, [2] * 32)
    assert len(books.pages) == 64
    assert all(read_page(memory, place, 200 + n) is OK for n, place in enumerate(places))
    assert memory.stats().used_bytes == 64 * RECORD


def test_a_call_larger_than_the_memory_stores_what_fits(memory: MemoryTier) -> None:
    books = PageBooks(1)
    books.connect(memory)
    places = store(memory, range(40))
    books.add([key(number) for number in range(40)], places, [2] * 40)
    found = memory.write(NAMESPACE, [make_slot(number) for number in range(100, 200)])
    there = [n for n, place in enumerate(found) if place is not None]
    assert len(there) >= 32
    assert not books.pages
    for n in there:
        place = found[n]
        assert place is not None
        assert read_page(memory, place, 100 + n) is OK
    assert memory.stats().used_bytes <= 64 * RECORD


def test_a_record_larger_than_the_memory_is_not_stored() -> None:
    with MemoryTier(RECORD - 1) as tier:
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        assert tier.write(NAMESPACE, [make_slot(1)]) == [None]
        assert tier.stats().dropped == {"full": 1}


def test_namespaces_share_the_room(memory: MemoryTier) -> None:
    owner = Owner(memory)
    memory.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})
    others = store(memory, range(40), OTHER_NAMESPACE)
    store(memory, range(64))
    assert others[0].segment in owner.dropped
    assert memory.stats().used_bytes <= 64 * RECORD


def test_a_damaged_record_in_memory_is_a_miss(memory: MemoryTier) -> None:
    (location,) = store(memory, [1])
    memory._segments[location.segment].records[location.block][-1] ^= 1
    assert read_page(memory, location, 1) is VerifyResult.BAD_CHECKSUM


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[CachedDiskTier]:
    disk = DiskTier(DiskConfig(tmp_path / "d", 64 << 20, 0, segment_bytes=256 << 10))
    with CachedDiskTier(disk, 10 * RECORD) as tier:
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        yield tier


def test_what_was_written_last_is_read_from_memory(cached: CachedDiskTier) -> None:
    locations = store(cached, range(30))
    for number in range(20, 30):
        assert read_page(cached, locations[number], number) is OK
    assert cached.memory_stats() == {
        "records": 10,
        "used_bytes": 10 * RECORD,
        "max_bytes": 10 * RECORD,
        "hits": 10,
    }
    assert cached.stats().records_read == 0


def test_what_was_read_from_disk_is_in_memory_then(cached: CachedDiskTier) -> None:
    locations = store(cached, range(30))
    assert read_page(cached, locations[0], 0) is OK
    assert read_page(cached, locations[0], 0) is OK
    assert (cached.num_hits, cached.stats().records_read) == (1, 1)


def test_damage_in_memory_is_mended_from_disk(cached: CachedDiskTier) -> None:
    (location,) = store(cached, [1])
    copy = cached._copies[location].record
    assert copy is not None
    copy[-1] ^= 1
    assert read_page(cached, location, 1) is OK
    assert (cached.num_hits, cached.stats().records_read) == (0, 1)
    assert read_page(cached, location, 1) is OK
    assert cached.num_hits == 1


def test_a_cleared_namespace_is_cleared_in_memory(cached: CachedDiskTier) -> None:
    locations = store(cached, range(5))
    cached.clear(NAMESPACE)
    assert cached.memory_stats()["used_bytes"] == 0
    assert all(read_page(cached, place, n) is MISSING for n, place in enumerate(locations))


def test_coded_memory_holds_more_pages_than_slots_would(tmp_path: Path) -> None:
    """Forty pages in the room of twenty."""
    rig = Rig(tmp_path, Zstd(), slots=16, below="host", memory_bytes=20 * 65536)
    all_pages = pages("a", 40)
    try:
        for at in range(0, 40, 8):
            rig.save(all_pages[at : at + 8])
            rig.settle()
        for at in range(0, 40, 8):
            assert rig.bring_back(all_pages[at : at + 8]) == 8
            assert rig.is_exact(all_pages[at : at + 8])
        assert rig.disk.stats().used_bytes <= 20 * 65536
    finally:
        rig.store.close(5)
