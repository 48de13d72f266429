"""A disk that deletes nothing: it is read-only, or its file system is gone for a while."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.conftest import OpenTier
from tests.tiers.disk.test_failures_told import _Unmounted
from tests.tiers.disk.test_reused_segments import LAYOUTS, World
from tests.tiers.disk.test_setup import GIB, SickDisk
from tests.tiers.tier_pages import (
    NAMESPACE,
    PACKED_SLOT_BYTES,
    SLOT_BYTES,
    make_slot,
    read_page,
    store,
)

READ_ONLY = ("open", "pwritev", "allocate", "truncate", "unlink", "rename")


class ReadOnlyDisk(SickDisk):
    """Files can be opened to be read, whatever they are told."""

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags) if flags & 3 else super(SickDisk, self).open(path, flags)


@pytest.mark.parametrize("keeps", [False, True], ids=["whole", "by page"])
@LAYOUTS
def test_a_full_disk_that_turns_read_only_can_still_be_read(
    open_tier: OpenTier, packed: bool, keeps: bool
) -> None:
    """What was dropped for room would make none: it goes on until the first file that stays."""
    io = ReadOnlyDisk(*READ_ONLY)
    world = World(open_tier, packed, io=io)
    if not keeps:
        world.tier.keeper = None
    number = 0
    while not world.tier.stats().segments_reused + world.tier.stats().segments_dropped:
        assert None not in world.write(range(number, number + 4))
        number += 4
    world.tier._writer.seal(NAMESPACE)  # else all writes go to the place that fails
    before = len(world.books.pages)
    io.sick, io.free = errno.EROFS, 0
    for _ in range(60):
        assert set(world.write(range(number, number + 4))) == {None}
        number += 4
    # A segment that could not be deleted went, and what segments to be opened anew gave up.
    assert len(world.books.pages) > before / 2
    for place, (page_hash, num_blocks) in world.books.pages.items():
        found = read_page(
            world.tier, place, world.numbers[page_hash], slot_bytes=PACKED_SLOT_BYTES,
            num_blocks=num_blocks,
        )  # fmt: skip
        assert found is VerifyResult.OK
    stats = world.tier.stats()
    assert stats.errors["io_unlink"] > 0
    assert stats.dropped["full"] + stats.dropped.get("io", 0) == 240
    io.sick, io.free = 0, 100 * GIB
    while None in world.write(range(number, number + 4)):
        number += 4
    world.check()


@pytest.mark.parametrize("call", ["unlink", "device_of"])
def test_what_was_cleared_while_it_could_not_be_deleted_goes_when_it_can(
    open_tier: OpenTier, tmp_path: Path, call: str
) -> None:
    folder, away = tmp_path / "disk", tmp_path / "away"
    io = SickDisk("unlink") if call == "unlink" else _Unmounted()
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    (location,) = store(tier, [1])
    io.sick = errno.EROFS
    if call == "device_of":
        folder.rename(away)
        folder.mkdir()
    tier.clear(NAMESPACE)
    assert tier.num_undeleted == 1
    assert read_page(tier, location, 1) is VerifyResult.MISSING
    if call == "device_of":
        folder.rmdir()
        away.rename(folder)
    io.sick = 0
    assert not len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})), "it came back"
    (location,) = store(tier, [2])
    assert tier.num_undeleted == 0
    assert read_page(tier, location, 2) is VerifyResult.OK
    tier.close()
    again = open_tier()
    assert len(again.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 1


def test_what_cannot_be_deleted_is_not_found_by_a_namespace_that_is_opened_again(
    open_tier: OpenTier,
) -> None:
    io = SickDisk("unlink")
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, [1])
    io.sick = errno.EROFS
    tier.clear(NAMESPACE)
    assert not len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {}))
    assert tier.num_undeleted == 1
    io.sick = 0
    tier.close()
    assert not len(open_tier().open_namespace(NAMESPACE, SLOT_BYTES, {}))


def test_a_file_that_somebody_removed_needs_no_second_try(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert tier.write(NAMESPACE, [make_slot(1)]) != [None]
    for file in (tmp_path / "disk").rglob("*.hkv"):
        file.unlink()
    tier.clear(NAMESPACE)
    assert tier.num_undeleted == 0
    assert tier.stats().errors == {}
    assert tier.stats().used_bytes == 0
