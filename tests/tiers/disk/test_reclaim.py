"""Staying under the bound: which segments go, what is kept, and who is told when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, RecoveredPages
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.tier_pages import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT_BYTES,
    key,
    make_slot,
    read_page,
    store,
)

OpenTier = Callable[..., DiskTier]
BOUND = 2 << 20
PER_SEGMENT = 30  # slots: (2 MiB / 8 - header - footer) / 8 KiB


class OwnerIndex:
    """What a store keeps: page to location, corrected by the tier's callbacks."""

    def __init__(self, tier: DiskTier) -> None:
        self.pages: dict[tuple[bytes, bytes], Location] = {}
        self.dropped: list[tuple[bytes, int]] = []
        self.hot: set[bytes] = set()
        tier.on_drop = self.on_drop
        tier.on_moved = self.on_moved
        tier.is_hot = self.is_hot

    def add(self, digest: bytes, numbers: Sequence[int], tier: DiskTier) -> None:
        for number in numbers:
            (location,) = tier.write(digest, [make_slot(number, digest)])
            if location is not None:
                self.pages[digest, key(number)] = location

    def on_drop(self, digest: bytes, segment_id: int) -> None:
        self.dropped.append((digest, segment_id))
        gone = [
            page
            for page, at in self.pages.items()
            if page[0] == digest and at.segment == segment_id
        ]
        for page in gone:
            del self.pages[page]

    def on_moved(self, digest: bytes, old: int, pages: RecoveredPages) -> None:
        for row in range(len(pages)):
            page = digest, pages.hashes[row].tobytes()
            if page in self.pages and self.pages[page].segment == old:
                self.pages[page] = Location(int(pages.segment[row]), int(pages.block[row]))

    def is_hot(
        self, digest: bytes, hashes: np.ndarray[Any, Any], lora: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        return np.array([row.tobytes() in self.hot for row in hashes])


@pytest.fixture
def tier(open_tier: OpenTier) -> DiskTier:
    tier = open_tier(max_bytes=BOUND)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    return tier


def used_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.hkv*"))


def test_the_bound_holds_and_the_newest_stay(tier: DiskTier, tmp_path: Path) -> None:
    owner = OwnerIndex(tier)
    for first in range(0, 1500, 20):
        owner.add(NAMESPACE, range(first, first + 20), tier)
        assert used_on_disk(tmp_path / "disk") <= BOUND
    assert len(owner.pages) >= 5 * PER_SEGMENT
    assert all((NAMESPACE, key(n)) in owner.pages for n in range(1500 - 4 * PER_SEGMENT, 1500))
    for (digest, page_hash), location in owner.pages.items():
        number = next(n for n in range(1500) if key(n) == page_hash)
        assert read_page(tier, location, number, digest) is VerifyResult.OK
    assert tier.stats().segments_dropped == len(owner.dropped)
    assert tier.stats().dropped == {}


def test_a_segment_that_is_read_outlives_newer_ones(tier: DiskTier) -> None:
    owner = OwnerIndex(tier)
    owner.add(NAMESPACE, range(PER_SEGMENT), tier)
    precious = owner.pages[NAMESPACE, key(0)]
    for first in range(1000, 2000, 10):
        owner.add(NAMESPACE, range(first, first + 10), tier)
        assert read_page(tier, precious, 0) is VerifyResult.OK
    assert len(owner.dropped) > 10


def test_hot_pages_are_salvaged_up_to_a_quarter(tier: DiskTier) -> None:
    owner = OwnerIndex(tier)
    owner.add(NAMESPACE, range(PER_SEGMENT), tier)
    owner.hot = {key(n) for n in range(PER_SEGMENT)}
    old = owner.pages[NAMESPACE, key(0)].segment
    number = 1000
    while (NAMESPACE, old) not in owner.dropped:
        owner.add(NAMESPACE, [number], tier)
        number += 1
    kept = [n for n in range(PER_SEGMENT) if (NAMESPACE, key(n)) in owner.pages]
    assert 1 <= len(kept) <= PER_SEGMENT // 4
    assert tier.stats().records_salvaged == len(kept)
    for n in kept:
        location = owner.pages[NAMESPACE, key(n)]
        assert location.segment != old
        assert read_page(tier, location, n) is VerifyResult.OK


def test_a_salvaged_page_lives_on_through_many_reclaims(tier: DiskTier) -> None:
    owner = OwnerIndex(tier)
    owner.hot = {key(0), key(5)}
    owner.add(NAMESPACE, range(3000), tier)
    for n in (0, 5):
        assert read_page(tier, owner.pages[NAMESPACE, key(n)], n) is VerifyResult.OK
    assert tier.stats().records_salvaged > 10
    useful = tier.stats().useful_bytes
    assert useful == 3000 * (SLOT_BYTES - 512 - 100), "salvage is not useful bytes"


def test_a_damaged_hot_page_is_not_salvaged(tier: DiskTier, tmp_path: Path) -> None:
    owner = OwnerIndex(tier)
    owner.hot = {key(n) for n in range(5)}
    owner.add(NAMESPACE, range(PER_SEGMENT + 1), tier)
    location = owner.pages[NAMESPACE, key(2)]
    path = tmp_path / "disk" / NAMESPACE.hex()[:16] / f"seg-{location.segment:08d}.hkv"
    with path.open("r+b") as file:
        file.seek(location.block * 4096 + 1000)
        file.write(b"damage")
    number = 1000
    while (NAMESPACE, location.segment) not in owner.dropped:
        owner.add(NAMESPACE, [number], tier)
        number += 1
    kept = [n for n in range(5) if (NAMESPACE, key(n)) in owner.pages]
    assert kept == [0, 1, 3, 4]


def test_old_segments_of_other_namespaces_go_first(tier: DiskTier) -> None:
    owner = OwnerIndex(tier)
    tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})
    owner.add(OTHER_NAMESPACE, range(2 * PER_SEGMENT), tier)
    owner.add(NAMESPACE, range(6 * PER_SEGMENT), tier)
    assert {digest for digest, _ in owner.dropped} == {OTHER_NAMESPACE}
    owner.add(NAMESPACE, range(6 * PER_SEGMENT, 9 * PER_SEGMENT), tier)
    assert not [page for page in owner.pages if page[0] == OTHER_NAMESPACE]


def test_segments_of_a_namespace_not_opened_are_reclaimed(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=BOUND)
    tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})
    store(tier, range(5 * PER_SEGMENT), OTHER_NAMESPACE)
    tier.close()
    tier = open_tier(max_bytes=BOUND)
    assert tier.stats().used_bytes > BOUND // 2
    owner = OwnerIndex(tier)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    owner.add(NAMESPACE, range(5 * PER_SEGMENT), tier)
    assert {digest for digest, _ in owner.dropped} == {OTHER_NAMESPACE}
    assert len(owner.pages) == 5 * PER_SEGMENT


def test_idle_active_segments_give_way(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=BOUND)
    digests = [bytes([n]) * 32 for n in range(12)]
    for digest in digests:
        tier.open_namespace(digest, SLOT_BYTES, {})
        assert tier.write(digest, [make_slot(1, digest)]) != [None]
    assert tier.stats().used_bytes <= BOUND


def test_the_callback_comes_before_the_file_goes(tier: DiskTier, tmp_path: Path) -> None:
    owner = OwnerIndex(tier)
    seen: list[bool] = []

    def on_drop(digest: bytes, segment_id: int) -> None:
        name = f"{digest.hex()[:16]}/seg-{segment_id:08d}.hkv"
        seen.append((tmp_path / "disk" / name).exists())
        owner.on_drop(digest, segment_id)

    tier.on_drop = on_drop
    owner.add(NAMESPACE, range(12 * PER_SEGMENT), tier)
    assert seen
    assert all(seen)


def test_a_failing_callback_does_not_stop_the_disk(tier: DiskTier) -> None:
    def fail(*args: object) -> Any:
        raise RuntimeError("the owner's bug")

    tier.on_drop = tier.on_moved = tier.is_hot = fail
    for number in range(12 * PER_SEGMENT):
        assert tier.write(NAMESPACE, [make_slot(number)]) != [None]
    assert tier.stats().errors["callback"] > 0


def test_a_batch_larger_than_the_tier_hands_out_only_what_it_kept(tier: DiskTier) -> None:
    numbers = range(12 * PER_SEGMENT)
    locations = tier.write(NAMESPACE, [make_slot(n) for n in numbers])
    assert sum(at is not None for at in locations) >= 5 * PER_SEGMENT
    for number, at in zip(numbers, locations, strict=True):
        if at is not None:
            assert read_page(tier, at, number) is VerifyResult.OK


def test_a_read_in_flight_keeps_its_file(open_tier: OpenTier) -> None:
    class SlowRead(FileIO):
        """Holds the first read until the segment is gone."""

        def __init__(self) -> None:
            self.reading = threading.Event()
            self.go_on = threading.Event()
            self.armed = False

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.armed:
                self.reading.set()
                assert self.go_on.wait(300)
            return super().preadv(fd, buffers, offset)

    io = SlowRead()
    tier = open_tier(io=io, max_bytes=BOUND)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    (location,) = store(tier, [1])
    results: list[VerifyResult] = []
    io.armed = True
    reader = threading.Thread(target=lambda: results.append(read_page(tier, location, 1)))
    reader.start()
    assert io.reading.wait(300)
    io.armed = False
    tier.clear(NAMESPACE)  # does not wait for the reader
    before = len(os.listdir("/proc/self/fd"))
    io.go_on.set()
    reader.join()
    assert results == [VerifyResult.OK]
    assert len(os.listdir("/proc/self/fd")) == before - 1, "closed by the last reader"
    assert read_page(tier, location, 1) is VerifyResult.MISSING


def test_readers_and_reclaim_run_together(tier: DiskTier) -> None:
    owner = OwnerIndex(tier)
    guard = threading.Lock()
    inner_drop, inner_moved = owner.on_drop, owner.on_moved

    def on_drop(digest: bytes, segment_id: int) -> None:
        with guard:
            inner_drop(digest, segment_id)

    def on_moved(digest: bytes, old: int, pages: RecoveredPages) -> None:
        with guard:
            inner_moved(digest, old, pages)

    tier.on_drop, tier.on_moved = on_drop, on_moved
    numbers = {key(n): n for n in range(3000)}
    owner.hot = {key(n) for n in range(0, 3000, 7)}
    stop = threading.Event()
    counts: list[dict[VerifyResult, int]] = []

    def keep_reading(seed: int) -> None:
        rng = np.random.default_rng(seed)
        seen = dict.fromkeys(VerifyResult, 0)
        while not stop.is_set():
            with guard:
                pages = list(owner.pages.items())
            if pages:
                (_, page_hash), location = pages[int(rng.integers(len(pages)))]
                seen[read_page(tier, location, numbers[page_hash])] += 1
        counts.append(seen)

    threads = [threading.Thread(target=keep_reading, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for first in range(0, 3000, 12):
        batch = range(first, first + 12)
        locations = tier.write(NAMESPACE, [make_slot(n) for n in batch])
        with guard:
            for n, at in zip(batch, locations, strict=True):
                if at is not None:
                    owner.pages[NAMESPACE, key(n)] = at
    stop.set()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    total = {kind: sum(seen[kind] for seen in counts) for kind in VerifyResult}
    assert total[VerifyResult.OK] > 0
    assert total[VerifyResult.OK] + total[VerifyResult.MISSING] == sum(total.values())


def test_what_a_call_just_wrote_goes_after_all_that_was_there(tier: DiskTier) -> None:
    """Also where no more than a few segments may go, and a request waits for each old one."""
    owner = OwnerIndex(tier)
    owner.add(NAMESPACE, range(4 * PER_SEGMENT), tier)
    sealed = sorted({at.segment for at in owner.pages.values()})[:-1]
    tier.num_needed = lambda segment: int(segment in sealed)
    tier.write(NAMESPACE, [make_slot(n) for n in range(1000, 1000 + 8 * PER_SEGMENT)])
    assert [segment for _, segment in owner.dropped[: len(sealed)]] == sealed
