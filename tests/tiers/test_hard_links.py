"""A folder that was copied by hard links: two servers, and the same files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.conftest import OpenTier
from tests.tiers.disk.test_reused_segments import LAYOUTS, World
from tests.tiers.disk.test_setup import refusal
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, read_page, store


def linked(folder: Path, copy: Path) -> Path:
    """As `cp -al` does it, but for the lock: with that, one of the two servers would not start."""
    shutil.copytree(folder, copy, copy_function=os.link, ignore=shutil.ignore_patterns("LOCK"))
    return copy


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*.hkv")}


def test_a_lock_that_was_linked_too_lets_one_server_start(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    open_tier()
    shutil.copytree(tmp_path / "disk", tmp_path / "copy", copy_function=os.link)
    assert "in use" in refusal(open_tier, path=tmp_path / "copy")


@LAYOUTS
def test_segments_of_two_folders_are_read_and_not_written_to(
    open_tier: OpenTier, tmp_path: Path, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each server may drop its own name of a segment; none finds another's records in it."""
    world = World(open_tier, packed)
    number = 0
    while not world.tier.stats().segments_reused:
        world.write(range(number, number + 4))
        number += 4
    world.tier.close()
    linked(tmp_path / "disk", tmp_path / "copy")
    before = content(tmp_path / "disk")
    copy = World(open_tier, packed, path=tmp_path / "copy")
    [line] = [r.getMessage() for r in caplog.records if "hard links" in r.getMessage()]
    assert str(tmp_path / "copy") in line
    copy.numbers = world.numbers
    assert copy.books.pages
    copy.check()
    for number in range(10_000, 10_400, 4):
        assert None not in copy.write(range(number, number + 4))
    copy.check()
    assert content(tmp_path / "disk") == before
    again = World(open_tier, packed)
    again.numbers = dict(world.numbers)
    again.check()
    # What has one name again is written to as ever.
    assert copy.tier.stats().segments_dropped > 0
    assert copy.tier.stats().segments_reused > 0


def test_a_segment_that_is_linked_while_it_serves_is_written_to_no_more(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    world = World(open_tier, packed=False)
    number = 0
    while not world.tier.stats().segments_reused:
        world.write(range(number, number + 4))
        number += 4
    world.tier._writer.seal(NAMESPACE)
    linked(tmp_path / "disk", tmp_path / "copy")
    before = content(tmp_path / "copy")
    for number in range(10_000, 10_200, 4):
        assert None not in world.write(range(number, number + 4))
    world.check()
    assert content(tmp_path / "copy") == before


def test_a_segment_that_its_server_still_writes_is_not_sealed_by_another(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    places = store(tier, [1, 2])
    before = content(tmp_path / "disk")
    other = open_tier(path=linked(tmp_path / "disk", tmp_path / "copy"))
    assert len(other.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 2
    other.close()
    assert content(tmp_path / "disk") == before
    places += store(tier, [3])
    for number, place in enumerate(places, start=1):
        assert read_page(tier, place, number) is VerifyResult.OK
    tier.close()
    assert len(open_tier().open_namespace(NAMESPACE, SLOT_BYTES, {})) == 3
