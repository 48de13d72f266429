"""A disk folder with a key: nothing is read that was not written with it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from sglang_ext.tiers.base import Location
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.layout import LockedFooterError, decode_footer, decode_trailer
from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.disk import golden_segments as golden
from tests.tiers.protection_cases import KEY, OTHER_KEY, seals
from tests.tiers.tier_pages import (
    NAMESPACE,
    SLOT_BYTES,
    key,
    make_slot,
    payload,
    read_page,
    store,
)

OpenTier = Callable[..., DiskTier]
OK = VerifyResult.OK
MODES = ("tag", "encrypt")
NUM_PAGES = 12


def _open(open_tier: OpenTier, mode: str = "", *keys: bytes) -> tuple[DiskTier, int]:
    """A tier with its namespace open, and how many pages it found."""
    tier = open_tier(seals=seals(mode, *keys)) if mode else open_tier()
    return tier, len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {}))


def _read_all(tier: DiskTier, locations: list[Location]) -> set[VerifyResult]:
    return {read_page(tier, at, number) for number, at in enumerate(locations)}


def _segment(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "disk").glob("*/seg-*.hkv")
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_only_who_has_the_key_finds_pages(
    tmp_path: Path,
    open_tier: OpenTier,
    mode: str,
    is_sealed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier, _ = _open(open_tier, mode)
    locations = store(tier, range(NUM_PAGES))
    path = _segment(tmp_path)
    unsealed = path.read_bytes()
    tier.close()
    for other, keys in (("", ()), (mode, (OTHER_KEY,))):
        if not is_sealed:
            path.write_bytes(unsealed)  # as a killed process leaves it
        tier, num_found = _open(open_tier, other, *keys)
        assert num_found == 0
        assert tier.stats().errors == {"locked_segment": 1}
        assert "are of another key, or of none, and are not read" in caplog.text
        tier.close()
        assert path.exists()  # a mistake at start loses nothing
    if not is_sealed:
        path.write_bytes(unsealed)
    tier, num_found = _open(open_tier, mode, OTHER_KEY, KEY)
    assert num_found == NUM_PAGES
    assert _read_all(tier, locations) == {OK}


def test_what_was_written_without_a_key_is_not_read_with_one(
    tmp_path: Path, open_tier: OpenTier
) -> None:
    tier, _ = _open(open_tier)
    store(tier, range(NUM_PAGES))
    tier.close()
    tier, num_found = _open(open_tier, "tag")
    assert num_found == 0
    assert tier.stats().errors == {"locked_segment": 1}
    locations = store(tier, range(NUM_PAGES))  # and does not stand in the way
    assert _read_all(tier, locations) == {OK}


@pytest.mark.parametrize("mode", MODES)
def test_a_forger_puts_no_page_under_a_location(
    tmp_path: Path, open_tier: OpenTier, mode: str
) -> None:
    """With right checksums, pages that change places, and pages of yesterday's segment."""
    tier, _ = _open(open_tier, mode)
    locations = store(tier, range(NUM_PAGES))
    path = _segment(tmp_path)
    forged = make_slot(0)
    seal(forged)
    with path.open("r+b") as file:
        file.seek(4096 * locations[0].block)
        file.write(forged.tobytes())
        file.seek(4096 * locations[1].block)
        second = file.read(SLOT_BYTES)
        file.seek(4096 * locations[2].block)
        file.write(second)
    assert read_page(tier, locations[0], 0) is VerifyResult.UNPROTECTED
    assert read_page(tier, locations[1], 1) is OK
    assert read_page(tier, locations[2], 2) is VerifyResult.FOREIGN
    assert tier.stats().errors == {"unprotected": 1, "foreign": 1}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [0x18, 0x40, 0x60, 0x100])
def test_a_footer_that_was_changed_serves_nothing(
    tmp_path: Path, open_tier: OpenTier, mode: str, place: int
) -> None:
    """Its checksums are made right again, as somebody would who wants it to be believed."""
    tier, _ = _open(open_tier, mode)
    store(tier, range(NUM_PAGES))
    path = _segment(tmp_path)
    tier.close()
    data = bytearray(path.read_bytes())
    trailer = decode_trailer(bytes(data[-128:]), len(data))
    assert trailer is not None
    data[trailer.footer_offset + place] ^= 1
    path.write_bytes(_with_right_checksums(data, trailer.footer_offset))
    tier, num_found = _open(open_tier, mode)
    assert num_found == 0
    assert tier.stats().errors == {"locked_segment": 1}


def _with_right_checksums(data: bytearray, footer_at: int) -> bytes:
    body = bytes(data[footer_at:-128])
    trailer = bytearray(data[-128:])
    trailer[72:80] = struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    trailer[120:128] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(trailer[:120])))
    return bytes(data[:-128]) + bytes(trailer)


@pytest.mark.parametrize("mode", MODES)
def test_a_torn_footer_costs_no_page(tmp_path: Path, open_tier: OpenTier, mode: str) -> None:
    tier, _ = _open(open_tier, mode)
    locations = store(tier, range(NUM_PAGES))
    path = _segment(tmp_path)
    tier.close()
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    tier, num_found = _open(open_tier, mode)
    assert num_found == NUM_PAGES
    assert tier.stats().errors == {"damaged_footer": 1}
    assert _read_all(tier, locations) == {OK}


@pytest.mark.parametrize("mode", MODES)
def test_another_key_ends_no_segment_whose_first_page_is_damaged(
    tmp_path: Path, open_tier: OpenTier, mode: str
) -> None:
    tier, _ = _open(open_tier, mode)
    store(tier, range(NUM_PAGES))
    path = _segment(tmp_path)
    tier.close()
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # of the table, so that the pages alone say whose they are
    data[4096] ^= 1
    path.write_bytes(data)
    tier, num_found = _open(open_tier, mode, OTHER_KEY)
    assert num_found == 0
    assert tier.stats().errors == {"locked_segment": 1}
    tier.close()
    _, num_found = _open(open_tier, mode)
    assert num_found == NUM_PAGES - 1


def test_what_is_salvaged_was_proved_and_is_written_with_the_first_key(
    tmp_path: Path, open_tier: OpenTier
) -> None:
    small = {"max_bytes": 2 << 20, "segment_bytes": 256 << 10}
    tier = open_tier(seals=seals("tag", KEY), **small)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, range(30))
    tier.close()
    (path,) = (tmp_path / "disk").glob("*/seg-*.hkv")
    with path.open("r+b") as file:  # page 1: other bytes under a right checksum
        forged = make_slot(1)
        forged[600] ^= 1
        seal(forged)
        file.seek(4096 + SLOT_BYTES)
        file.write(forged.tobytes())
    tier = open_tier(seals=seals("tag", OTHER_KEY, KEY), **small)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    moved: list[tuple[bytes, Location]] = []
    wanted = {key(number) for number in range(3)}
    tier.is_hot = lambda _, hashes, __: np.array([row.tobytes() in wanted for row in hashes])
    tier.on_moved = lambda _, __, pages: moved.extend(
        (pages.hashes[row].tobytes(), Location(int(pages.segment[row]), int(pages.block[row])))
        for row in range(len(pages))
    )
    number = 1000
    while not tier.stats().segments_dropped:
        store(tier, [number])
        number += 1
    assert {page_hash for page_hash, _ in moved} == {key(0), key(2)}
    tier.close()
    tier = open_tier(seals=seals("tag", OTHER_KEY), **small)  # the old key is gone
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    for page_hash, location in moved:
        assert read_page(tier, location, 0 if page_hash == key(0) else 2) is OK


def test_a_folder_with_encryption_shows_nothing_of_its_pages(
    tmp_path: Path, open_tier: OpenTier
) -> None:
    tier, _ = _open(open_tier, "encrypt")
    store(tier, range(NUM_PAGES))
    tier.close()
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert NAMESPACE in data  # which model's they are is no secret: see docs/security.md
    for number in range(NUM_PAGES):
        assert key(number) not in data
        assert payload(key(number), NAMESPACE)[:16].tobytes() not in data


def test_a_footer_is_only_good_in_its_place() -> None:
    data = (golden.GOLDEN / "segment-v3-tag.bin").read_bytes()
    trailer = decode_trailer(data[-128:], len(data))
    assert trailer is not None
    footer = data[trailer.footer_offset :]
    pages = decode_footer(footer, trailer, seals("tag").footers)
    assert pages is not None
    assert [row.tobytes() for row in pages.hashes] == [m.page_hash for m in golden.METAS[:2]]
    for other in (replace(trailer, segment_id=8), replace(trailer, namespace=bytes(32))):
        with pytest.raises(LockedFooterError):
            decode_footer(footer, other, seals("tag").footers)
