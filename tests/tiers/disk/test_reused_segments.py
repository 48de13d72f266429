"""Room is made page by page: records are written in the places of those that were given up."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, RecoveredPages
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.config import MIN_SLOTS
from sglang_ext.tiers.disk.reused_segments import ReusedSegment
from sglang_ext.tiers.disk.segments.catalog import Segment
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.layout import footer_bytes_bound, segment_file_bytes
from sglang_ext.tiers.records.record import VerifyResult
from testkit.page_books import PageBooks
from tests.tiers.conftest import OpenTier
from tests.tiers.protection_cases import KEY, seals
from tests.tiers.tier_pages import (
    NAMESPACE,
    PACKED_SLOT_BYTES,
    key,
    make_record,
    make_slot,
    read_page,
)

MAX_BYTES = 4 << 20
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])


class World:
    """A small full disk and its owner."""

    def __init__(self, open_tier: OpenTier, packed: bool, **settings: object) -> None:
        self.packed = packed
        self.books = PageBooks(1)
        settings = {"max_bytes": MAX_BYTES, "direct_io": "off"} | settings
        self.tier: DiskTier = open_tier(**settings)
        self.books.connect(self.tier)
        self.books.add_recovered(
            self.tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=packed)
        )
        self.numbers: dict[bytes, int] = {}

    def write(self, numbers: range) -> list[Location | None]:
        make = make_record if self.packed else make_slot
        records = [make(number, slot_bytes=PACKED_SLOT_BYTES) for number in numbers]
        places = self.tier.write(NAMESPACE, records)
        hashes = [key(number) for number in numbers]
        self.books.add(hashes, places, [record.size // 4096 for record in records])
        self.numbers.update(zip(hashes, numbers, strict=True))
        return places

    def check(self) -> None:
        """Every page of the books is there, and right."""
        for place, (page_hash, num_blocks) in self.books.pages.items():
            result = read_page(
                self.tier, place, self.numbers[page_hash], slot_bytes=PACKED_SLOT_BYTES,
                num_blocks=num_blocks,
            )  # fmt: skip
            assert result is VerifyResult.OK
        # Of a segment that was opened again the end is a hole: its length is no matter.
        files = [file.stat() for file in self.tier._config.path.rglob("*.hkv")]
        used = sum(min(file.st_size, file.st_blocks * 512) for file in files)
        assert used <= MAX_BYTES + 4096 * len(self.tier._writer.actives)
        assert self.tier.stats().used_bytes <= MAX_BYTES


@LAYOUTS
def test_what_is_kept_stays_and_nothing_is_copied_for_it(open_tier: OpenTier, packed: bool) -> None:
    """Every second page is wanted for good, wherever it lies; the others pass through."""
    world = World(open_tier, packed)
    world.write(range(50))
    world.books.keep = lambda page_hash: page_hash[0] % 2 == 0 and world.numbers[page_hash] < 50
    kept = {page_hash for page_hash in world.numbers if world.books.keep(page_hash)}
    number = 50
    while number < 1500:
        count = 1 + number % 7
        assert None not in world.write(range(number, number + count))
        number += count
    world.check()
    assert kept <= {page_hash for page_hash, _ in world.books.pages.values()}
    stats = world.tier.stats()
    assert (stats.bytes_moved, stats.segments_dropped, stats.errors) == (0, 0, {})
    assert stats.segments_reused > 10
    written = stats.bytes_written / stats.records_written
    record = np.mean([blocks for _, blocks in world.books.pages.values()]) * 4096
    assert written < 1.3 * record


@LAYOUTS
def test_a_restart_finds_what_was_written_in_place(
    open_tier: OpenTier, packed: bool, tmp_path: Path
) -> None:
    """After an orderly end from footers, after a kill from the records."""
    world = World(open_tier, packed)
    for number in range(0, 600, 6):
        world.write(range(number, number + 6))
    active = next(iter(world.tier._writer.actives.values()))
    pages = dict(world.books.pages)
    assert any(place.segment == active.segment.segment_id for place in pages)
    assert active.may_be_split, "a segment is open again"
    shutil.copytree(tmp_path / "disk", tmp_path / "killed")
    world.tier.close()
    for folder in ("disk", "killed"):
        again = World(open_tier, packed, path=tmp_path / folder)
        again.numbers = world.numbers
        for place, (page_hash, num_blocks) in pages.items():
            assert again.books.pages[place] == (page_hash, num_blocks)
        again.check()
        assert again.tier.stats().errors == {}
        again.tier.close()


def test_what_is_left_under_the_bound_becomes_a_shorter_segment(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    """It is written, killed, filled again and found like any other."""
    settings = {"segment_bytes": 480 << 10}  # eight of 14 slots, and 13 slots are left
    world = World(open_tier, packed=False, **settings)
    world.write(range(112))
    world.write(range(112, 118))
    assert len(world.books.pages) == 118
    assert world.tier.stats().segments_reused == 0
    shutil.copytree(tmp_path / "disk", tmp_path / "killed")
    killed = dict(world.books.pages)
    for number in range(118, 718, 6):
        assert None not in world.write(range(number, number + 6))
    world.check()
    stats = world.tier.stats()
    assert MAX_BYTES - stats.used_bytes < segment_file_bytes(MIN_SLOTS, PACKED_SLOT_BYTES)
    assert (stats.segments_dropped, stats.errors) == (0, {})
    assert stats.segments_reused > 10
    pages = dict(world.books.pages)
    world.tier.close()
    for folder, expected in (("disk", pages), ("killed", killed)):
        again = World(open_tier, packed=False, path=tmp_path / folder, **settings)
        again.numbers = world.numbers
        assert {place: again.books.pages[place] for place in expected} == expected
        again.check()
        assert again.tier.stats().errors == {}
        again.tier.close()


class _FullDisk(FileIO):
    """A file system with so many bytes free, that can refuse to allocate."""

    free, refuses, num_asked = 1 << 40, False, 0

    def allocate(self, fd: int, num_bytes: int) -> None:
        if self.refuses:
            raise OSError(errno.ENOSPC, "injected")
        super().allocate(fd, num_bytes)

    def free_bytes(self, path: Path) -> int:
        self.num_asked += 1
        return self.free


def test_what_another_leaves_on_the_disk_is_not_cut_into_small_segments(
    open_tier: OpenTier,
) -> None:
    """At the floor places are written again; it is asked a few times, not once for each slot."""
    io = _FullDisk()
    world = World(open_tier, packed=False, io=io, segment_bytes=480 << 10)  # 14 slots
    world.write(range(14))
    for number in range(14, 314, 6):
        io.free = segment_file_bytes(MIN_SLOTS + number % 3, PACKED_SLOT_BYTES)
        io.num_asked = 0
        world.write(range(number, number + 6))
        assert io.num_asked < 20
    assert len(world.tier._context.catalog.segments()) == 1
    assert world.tier.stats().segments_reused > 0
    world.check()


def test_nothing_is_dropped_for_a_shorter_segment(open_tier: OpenTier) -> None:
    """A quota is met that nobody could see: places of single pages do, as without the rest."""
    io = _FullDisk()
    world = World(open_tier, packed=False, io=io, segment_bytes=480 << 10)
    world.write(range(112))
    io.refuses = True
    assert None not in world.write(range(112, 118))
    stats = world.tier.stats()
    assert stats.segments_dropped == 0
    assert stats.segments_reused > 0
    world.check()


@LAYOUTS
def test_under_a_smaller_bound_segments_go_until_the_rest_fits(
    open_tier: OpenTier, packed: bool
) -> None:
    """What is left is written in place again, as before."""
    world = World(open_tier, packed)
    for number in range(0, 300, 6):
        world.write(range(number, number + 6))
    world.tier.close()
    smaller = World(open_tier, packed, max_bytes=MAX_BYTES * 3 // 4)
    smaller.numbers = world.numbers
    assert smaller.tier.stats().used_bytes > MAX_BYTES * 3 // 4
    for number in range(300, 600, 6):
        assert None not in smaller.write(range(number, number + 6))
    stats = smaller.tier.stats()
    assert MAX_BYTES // 2 < stats.used_bytes <= MAX_BYTES * 3 // 4
    assert 0 < stats.segments_dropped < 8
    assert (stats.segments_reused > 0, stats.errors) == (True, {})
    smaller.check()


@LAYOUTS
def test_pages_that_a_call_just_wrote_are_not_overwritten_by_the_rest_of_it(
    open_tier: OpenTier, packed: bool
) -> None:
    """The owner does not know them as pages before the call returns."""
    world = World(open_tier, packed)
    world.write(range(200))  # more than the disk holds
    before = world.tier.stats()
    for first in range(200, 800, 100):
        assert None not in world.write(range(first, first + 100))
        world.check()
    # The segments that it wrote to have free places left, so none of them goes as a whole.
    assert world.tier.stats().segments_dropped == before.segments_dropped


@LAYOUTS
def test_a_kill_in_a_call_that_fills_segments_twice_loses_no_page(
    open_tier: OpenTier, packed: bool, tmp_path: Path
) -> None:
    """At each step at which a segment is opened again or sealed: what it held then is found."""
    killed: dict[str, tuple[Path, set[bytes]]] = {}

    def kill(step: str) -> None:
        if calls > 1 and step not in killed:
            folder = tmp_path / f"killed {len(killed)}"
            shutil.copytree(tmp_path / "disk", folder)
            killed[step] = folder, {page_hash for page_hash, _ in world.books.pages.values()}

    calls = 0
    world = World(open_tier, packed, failpoints=kill)
    world.books.keep = lambda page_hash: page_hash[0] % 3 == 0 and page_hash[1] < 128
    for calls in range(4):
        world.write(range(150 * calls, 150 * (calls + 1)))
    steps = {"before_footer", "before_truncate", "done"}
    assert killed.keys() >= {"reuse:before_open", "reuse:opened", *(f"seal:{s}" for s in steps)}
    for folder, pages in killed.values():
        again = World(open_tier, packed, path=folder)
        found = {page_hash: (place, num) for place, (page_hash, num) in again.books.pages.items()}
        assert pages <= found.keys()
        numbers = {key(number): number for number in range(150 * (calls + 1))}
        for page_hash, (place, num_blocks) in found.items():
            result = read_page(
                again.tier, place, numbers[page_hash], slot_bytes=PACKED_SLOT_BYTES,
                num_blocks=num_blocks,
            )  # fmt: skip
            assert result is VerifyResult.OK
        again.tier.close()


def test_a_page_that_was_given_up_is_a_miss_and_never_another(open_tier: OpenTier) -> None:
    world = World(open_tier, False)
    world.write(range(200))
    old = {place: world.numbers[page[0]] for place, page in world.books.pages.items()}
    for number in range(200, 500, 5):
        world.write(range(number, number + 5))
    gone = [(place, number) for place, number in old.items()
            if world.books.pages.get(place, (b"", 0))[0] != key(number)]  # fmt: skip
    assert len(gone) > 20
    results = {
        read_page(world.tier, place, number, slot_bytes=PACKED_SLOT_BYTES) for place, number in gone
    }
    assert VerifyResult.FOREIGN in results
    assert results <= {VerifyResult.FOREIGN, VerifyResult.OK}  # some were not overwritten yet


def test_a_damaged_footer_keeps_a_segment_from_being_reused(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    """What lies in it is not known, so its pages stay until it goes as a whole."""
    world = World(open_tier, False)
    world.write(range(200))
    for file in (tmp_path / "disk").rglob("*.hkv"):
        data = bytearray(file.read_bytes())
        data[-64] ^= 1
        file.write_bytes(data)
    for number in range(200, 260, 5):
        world.write(range(number, number + 5))
    world.check()
    assert world.tier.stats().segments_dropped > 0


@LAYOUTS
def test_segments_of_no_key_that_is_here_make_room_for_pages(
    open_tier: OpenTier, packed: bool
) -> None:
    """What nobody can read goes before pages do."""
    world = World(open_tier, packed)
    world.write(range(200))
    num_pages = len(world.books.pages)
    world.tier.close()
    world = World(open_tier, packed, seals=seals("tag", KEY))
    assert not world.books.pages
    for number in range(200, 500, 5):
        world.write(range(number, number + 5))
    world.check()
    assert len(world.books.pages) > num_pages * 0.7


def test_segments_that_are_not_written_to_any_more_go_when_no_page_is_left(
    open_tier: OpenTier,
) -> None:
    """Their places would take no record: they were packed, and new ones are not."""
    world = World(open_tier, True)
    world.write(range(200))
    numbers = world.numbers
    world.tier.close()
    world = World(open_tier, False)
    world.numbers.update(numbers)
    for number in range(200, 900, 5):
        world.write(range(number, number + 5))
    world.check()
    assert not any(segment.packed for segment in world.tier._catalog.segments())


@LAYOUTS
def test_what_a_call_wrote_does_not_go_to_make_room_for_the_rest_of_it(
    open_tier: OpenTier, packed: bool
) -> None:
    """Its records are no pages yet, but will be."""
    world = World(open_tier, packed)
    world.write(range(200))
    world.books.keep = lambda page_hash: True  # so segments go as a whole
    assert None not in world.write(range(200, 240))
    world.check()


class _Unreadable(FileIO):
    """A disk that does not open what it has, while it is told not to."""

    refuses = False

    def open(self, path: Path, flags: int) -> int:
        if self.refuses and not flags & os.O_CREAT:
            raise OSError(errno.EIO, "injected")
        return super().open(path, flags)


def test_a_disk_that_fails_costs_few_good_pages(open_tier: OpenTier) -> None:
    """Pages that are given up for a segment that cannot be opened are lost for nothing."""
    io = _Unreadable()
    world = World(open_tier, False, io=io)
    while not world.tier.stats().segments_reused:
        assert None not in world.write(range(len(world.numbers), len(world.numbers) + 1))
    before = len(world.books.pages)
    writer = world.tier._writer
    io.refuses = True
    namespace = world.tier._catalog.namespace(NAMESPACE)
    assert namespace is not None
    assert writer._reuser.open(namespace, world.books, [8], {}) is None
    assert before - len(world.books.pages) <= 2 * (namespace.num_slots // 8 + 1)
    assert world.tier.stats().errors["io_read"] == 3
    io.refuses = False
    assert writer._reuser.open(namespace, world.books, [8], {}) is not None


def test_salvage_moves_no_more_than_fits_the_places_of_a_reused_segment(
    open_tier: OpenTier,
) -> None:
    """Two places take three records in the order of their heat, but not in that of their places."""
    world = World(open_tier, True)
    world.write(range(300))
    writer, context = world.tier._writer, world.tier._context
    writer.seal(NAMESPACE)
    lying: dict[int, list[tuple[Location, bytes, int]]] = {}
    for place, (page_hash, num_blocks) in sorted(world.books.pages.items()):
        lying.setdefault(place.segment, []).append((place, page_hash, num_blocks))
    reused, *victims = lying
    lengths = {num_blocks: place for place, _, num_blocks in reversed(lying[reused])}

    # Places for `long` and for `long + short`; of three records the short one lies first.
    def lie_so(a: int, b: int, c: int) -> bool:
        return a < b == c and b in lengths and a + b in lengths

    victim, first, second, third = next(
        (victim, *three)
        for victim in victims
        for three in itertools.combinations(lying[victim], 3)
        if lie_so(*(each[2] for each in three))
    )
    places = [lengths[second[2]], lengths[first[2] + second[2]]]
    world.books._forget(places)
    segments = {each.segment_id: each for each in context.catalog.segments()}
    opened = ReusedSegment.open(context, segments[reused], world.books, {}, first[2])
    assert opened is not None
    assert len(opened._gaps) == 2
    writer.actives[NAMESPACE] = opened
    assert opened.count_fitting([second[2], third[2], first[2]]) == 3
    heat = {second[1]: 2, third[1]: 2, first[1]: 1}
    world.tier.is_hot = lambda digest, hashes, lora: np.array(
        [heat.get(row.tobytes(), 0) for row in hashes], np.uint8
    )
    writer.reclaimer.reclaim(segments[victim])
    assert world.tier.stats().records_salvaged == 2


def test_a_segment_that_could_not_be_opened_once_is_not_forgotten(open_tier: OpenTier) -> None:
    """A process out of file descriptors for a moment does not lose the room of empty segments."""
    io = _Unreadable()
    world = World(open_tier, False, io=io)
    while not world.tier.stats().segments_reused:
        assert None not in world.write(range(len(world.numbers), len(world.numbers) + 1))
    writer = world.tier._writer
    namespace = world.tier._catalog.namespace(NAMESPACE)
    assert namespace is not None
    writer.seal(NAMESPACE)
    emptied = sorted({place.segment for place in world.books.pages})[:2]
    world.books._forget([place for place in world.books.pages if place.segment in emptied])
    io.refuses = True
    assert writer._reuser.open(namespace, world.books, [8], {}) is None
    io.refuses = False
    opened = writer._reuser.open(namespace, world.books, [8], {})
    assert opened is not None
    assert opened.segment.segment_id in emptied


def _reopened(gaps: list[tuple[int, int]], footer_bytes: int, num_kept: int = 0) -> ReusedSegment:
    """A packed segment with these free runs, and so much room for its footer."""
    opened = ReusedSegment.__new__(ReusedSegment)
    opened.segment = Segment(1, NAMESPACE, Path(), PACKED_SLOT_BYTES, 500, 0, 0, False, True)
    opened._gaps = np.array(gaps, np.int64)
    opened._footer_bytes = footer_bytes
    opened._entries = dict.fromkeys(range(1000, 1000 + num_kept), (b"", b"", 0, 1))
    return opened


def test_a_record_takes_the_shortest_run_that_holds_it() -> None:
    opened = _reopened([(1, 9), (20, 24), (30, 36)], 1 << 20)
    assert opened._find_places([4, 6, 8]) == [20, 30, 1]
    assert opened._find_places([3, 1, 6, 2]) == [20, 23, 30, 1]
    assert opened.count_fitting([8, 6, 5]) == 2


@pytest.mark.parametrize("num_kept", [0, 1, 500])
def test_no_more_records_are_taken_than_the_footer_has_room_for(num_kept: int) -> None:
    for more in range(1, 40):
        footer_bytes = footer_bytes_bound(num_kept + 1 + 2 * more)
        opened = _reopened([(1, 400)], footer_bytes, num_kept)
        most = opened.count_fitting([1] * 300)
        assert footer_bytes_bound(num_kept + 1 + 2 * most) <= footer_bytes
        assert most == 300 or footer_bytes_bound(num_kept + 1 + 2 * (most + 1)) > footer_bytes
        assert opened.count_fitting([1] * min(most, 3)) == min(most, 3)


def test_what_a_namespace_holds_is_entered_under_the_write_lock(open_tier: OpenTier) -> None:
    """Nobody makes room in it before the owner knows what is a page."""
    world = World(open_tier, True)
    world.write(range(10))
    world.tier.close()
    tier = open_tier(max_bytes=MAX_BYTES, direct_io="off")
    may_write: list[bool] = []

    def enter(pages: RecoveredPages) -> None:
        assert len(pages) == 10
        with ThreadPoolExecutor(1) as other:
            lock = tier._writer.lock
            may_write.append(other.submit(lock.acquire, blocking=False).result())

    tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}, packed=True, enter=enter)
    assert may_write == [False]
