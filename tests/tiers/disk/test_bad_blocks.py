"""A block that the disk does not give, or does not take, costs what lies there and no more."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.disk.test_recovery import found, write_and_leave
from tests.tiers.disk.test_reused_segments import LAYOUTS, World
from tests.tiers.tier_pages import (
    NAMESPACE,
    PACKED_SLOT_BYTES,
    SLOT_BYTES,
    key,
    make_slot,
    read_page,
    store,
    store_packed,
)

OpenTier = Callable[..., DiskTier]


class BadBlocks(FileIO):
    """A disk on which some bytes of some files can be neither read nor written.

    Attributes:
        bad: of a file's name, the bytes from one offset to another.
    """

    def __init__(self) -> None:
        self.bad: dict[str, tuple[int, int]] = {}

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().preadv(fd, buffers, offset)

    def _check(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        first, end = self.bad.get(name, (0, 0))
        if first < offset + sum(map(len, buffers)) and offset < end:
            raise OSError(errno.EIO, "bad block")


def test_a_bad_block_under_a_write_ends_no_writing(open_tier: OpenTier, tmp_path: Path) -> None:
    io = BadBlocks()
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    first = store(tier, range(2))
    place = 4096 + 3 * SLOT_BYTES
    io.bad["seg-00000001.hkv"] = place, place + 512
    assert None in tier.write(NAMESPACE, [make_slot(number) for number in range(2, 6)])
    later = store(tier, range(6, 20))
    assert {each.segment for each in later} == {2}
    stats = tier.stats()
    assert (stats.errors, stats.dropped["io"]) == ({"io_write": 1}, stats.dropped["io"])
    pages = {**dict(enumerate(first)), **dict(zip(range(6, 20), later, strict=True))}
    tier.close()
    tier = open_tier()
    assert found(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == {
        key(number): at for number, at in pages.items()
    }
    assert all(read_page(tier, at, number) is VerifyResult.OK for number, at in pages.items())
    assert tier.stats().errors == {}, "both segments were sealed"


def test_a_segment_whose_first_write_failed_is_not_kept(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    io = BadBlocks()
    io.bad["seg-00000001.hkv"] = 4096, 4608
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert tier.write(NAMESPACE, [make_slot(0)]) == [None]
    store(tier, range(5))
    assert [path.name for path in tmp_path.rglob("*.hkv")] == ["seg-00000002.hkv"]


@LAYOUTS
def test_a_bad_segment_of_a_full_folder_costs_one_write(open_tier: OpenTier, packed: bool) -> None:
    """It may have the most free places from then on, and is written to no more."""
    io = BadBlocks()
    world = World(open_tier, packed, io=io)
    for number in range(0, 600, 6):
        world.write(range(number, number + 6))
    bad = next(each for each in world.tier._catalog.segments() if each.sealed)
    io.bad[bad.path.name] = 4096, 4608
    written = [world.write(range(number, number + 6)) for number in range(600, 1800, 6)]
    assert sum(None in places for places in written) == 1
    assert world.tier.stats().errors == {"io_write": 1}
    io.bad.clear()
    world.check()


@LAYOUTS
def test_a_disk_that_takes_nothing_loses_none_of_the_pages_it_has(
    open_tier: OpenTier, packed: bool
) -> None:
    """To seal a segment, to open the next and to give up pages for it would mend nothing."""
    io = BadBlocks()
    world = World(open_tier, packed, io=io)
    for number in range(0, 600, 6):
        world.write(range(number, number + 6))
    names = [path.name for path in world.tier._config.path.rglob("*.hkv")]
    world.write(range(600, 606))
    before = len(world.books.pages)
    io.bad = dict.fromkeys(names, (4096, 1 << 40))
    for number in range(606, 1206, 6):
        world.write(range(number, number + 6))
    assert len(world.books.pages) >= before - 40, "one segment's worth at most"
    io.bad.clear()
    world.check()


@pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])
def test_a_bad_block_in_a_segment_of_a_killed_server_costs_its_record(
    open_tier: OpenTier, packed: bool
) -> None:
    slot_bytes = PACKED_SLOT_BYTES if packed else SLOT_BYTES
    killed = open_tier()
    killed.open_namespace(NAMESPACE, slot_bytes, {}, packed=packed)
    places = (store_packed if packed else store)(killed, range(8))
    assert len({place.segment for place in places}) == 1
    path = killed._config.path / NAMESPACE.hex()[:16] / f"seg-{places[0].segment:08d}.hkv"
    data = path.read_bytes()
    killed.close()
    path.write_bytes(data)
    io = BadBlocks()
    io.bad[path.name] = places[3].block * 4096, places[3].block * 4096 + 512
    tier = open_tier(io=io)
    pages = tier.open_namespace(NAMESPACE, slot_bytes, {}, packed=packed)
    there = {number: at for number, at in enumerate(places) if number != 3}
    assert found(pages) == {key(number): at for number, at in there.items()}
    assert tier.stats().errors == {"io_read": 1}
    assert path.read_bytes() == data, "the next start may be given more"
    tier.close()
    assert len(open_tier().open_namespace(NAMESPACE, slot_bytes, {}, packed=packed)) == 8


def test_a_bad_block_in_a_footer_costs_no_page(open_tier: OpenTier) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=True)
    io = BadBlocks()
    io.bad[path.name] = path.stat().st_size - 512, path.stat().st_size
    tier = open_tier(io=io)
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert found(pages) == {key(number): at for number, at in enumerate(locations)}
    assert read_page(tier, locations[19], 19) is VerifyResult.OK


def test_where_much_is_bad_what_lies_before_it_is_found(open_tier: OpenTier) -> None:
    """A dying disk may take seconds over each block: a start does not ask for all of them."""
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=False)
    io = BadBlocks()
    io.bad[path.name] = locations[5].block * 4096, 1 << 40
    tier = open_tier(io=io, segment_bytes=1 << 20)
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert found(pages) == {key(number): locations[number] for number in range(5)}


def test_a_segment_of_which_no_record_is_given_stays(open_tier: OpenTier) -> None:
    """It is not empty: nobody knows."""
    _, (path,) = write_and_leave(open_tier, range(20), sealed=False)
    io = BadBlocks()
    io.bad[path.name] = 4096, 1 << 40
    tier = open_tier(io=io)
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 0
    assert tier.stats().errors == {"damaged_segment": 1}
    tier.close()
    assert len(open_tier().open_namespace(NAMESPACE, SLOT_BYTES, {})) == 20


class _NotWritable(FileIO):
    def open(self, path: Path, flags: int) -> int:
        if path.suffix == ".hkv" and flags & os.O_RDWR and not flags & os.O_CREAT:
            raise OSError(errno.EACCES, "not to be written to")
        return super().open(path, flags)


def test_a_segment_that_can_only_be_read_is_read(open_tier: OpenTier) -> None:
    """Such as another user's, as a backup was brought back: never sealed, it was not found."""
    locations, _ = write_and_leave(open_tier, range(20), sealed=False)
    tier = open_tier(io=_NotWritable())
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 20
    assert read_page(tier, locations[19], 19) is VerifyResult.OK
