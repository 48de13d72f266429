"""Damage of every kind, injected into segment files: each a miss of a known kind, never bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.base import Location
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.record import HEADER_BYTES, VerifyResult, seal
from tests.tiers.tier_pages import (
    ADAPTER,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    key,
    make_slot,
    read_page,
    store,
)

OpenTier = Callable[..., DiskTier]
NUM_PAGES = 60
CHECKED_BYTES = HEADER_BYTES + PAYLOAD_BYTES


@dataclass
class Target:
    """An open tier with pages on disk, and their files to damage."""

    tier: DiskTier
    folder: Path
    locations: list[Location]
    injected: int = 0
    results: list[VerifyResult] = field(default_factory=list)

    def file(self, number: int) -> Path:
        return self.folder / f"seg-{self.locations[number].segment:08d}.hkv"

    def load(self, number: int) -> bytes:
        with self.file(number).open("rb") as file:
            file.seek(self.locations[number].block * 4096)
            return file.read(SLOT_BYTES)

    def save(self, number: int, data: bytes) -> None:
        with self.file(number).open("r+b") as file:
            file.seek(self.locations[number].block * 4096)
            file.write(data)

    def damaged_read(self, number: int, data: bytes) -> VerifyResult:
        """Puts `data` in a page's place, reads the page, and puts things right again."""
        good = self.load(number)
        self.save(number, data)
        result = read_page(self.tier, self.locations[number], number)
        self.save(number, good)
        assert result is not VerifyResult.OK
        self.injected += 1
        self.results.append(result)
        return result


@pytest.fixture(params=["auto", "off"])
def target(open_tier: OpenTier, tmp_path: Path, request: pytest.FixtureRequest) -> Target:
    tier = open_tier(direct_io=request.param)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, range(NUM_PAGES))
    assert len({location.segment for location in locations}) > 1
    return Target(tier, tmp_path / "disk" / NAMESPACE.hex()[:16], locations)


def counted(target: Target) -> None:
    """Every injected damage is in the counters under the kind that the read returned."""
    kinds = {kind: target.results.count(kind) for kind in target.results}
    assert target.tier.stats().errors == {kind.value: n for kind, n in kinds.items()}
    assert all(
        read_page(target.tier, at, n) is VerifyResult.OK for n, at in enumerate(target.locations)
    ), "the damage was undone"


def test_300_flipped_bits(target: Target) -> None:
    rng = np.random.default_rng(7)
    for index in range(300):
        number = int(rng.integers(NUM_PAGES))
        limit = 128 if index < 100 else CHECKED_BYTES  # a third of them in the header
        data = bytearray(target.load(number))
        data[int(rng.integers(limit))] ^= 1 << int(rng.integers(8))
        target.damaged_read(number, bytes(data))
    assert set(target.results) >= {VerifyResult.BAD_CHECKSUM, VerifyResult.BAD_HEADER}
    counted(target)


def test_60_torn_records(target: Target) -> None:
    rng = np.random.default_rng(8)
    for number in range(NUM_PAGES):
        kept = int(rng.integers(0, CHECKED_BYTES))
        stale = bytes(SLOT_BYTES) if number % 2 else target.load((number + 1) % NUM_PAGES)
        good = target.load(number)
        target.damaged_read(number, good[:kept] + stale[kept:])
    counted(target)


def test_90_swapped_records(target: Target) -> None:
    for number in range(NUM_PAGES):
        neighbour = (number + 1) % NUM_PAGES
        assert target.damaged_read(number, target.load(neighbour)) is VerifyResult.FOREIGN
    for number in range(30):
        across = target.load(NUM_PAGES - 1 - number)
        assert target.damaged_read(number, across) is VerifyResult.FOREIGN
    counted(target)


@pytest.mark.parametrize("index", range(10))
def test_intact_records_of_other_keys(target: Target, index: int) -> None:
    stale = make_slot(index, OTHER_NAMESPACE)
    adapted = make_slot(index, NAMESPACE, lora=ADAPTER)
    for slot in (stale, adapted):
        seal(slot)
        assert target.damaged_read(index, slot.tobytes()) is VerifyResult.FOREIGN
    counted(target)


def test_forged_lengths(target: Target) -> None:
    rng = np.random.default_rng(9)
    lengths = [0, 1, PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, SLOT_BYTES, 2**31, 2**63, 2**64 - 1]
    for number in range(20):
        for offset, width in ((6, 2), (8, 8), (24, 4)):
            good = target.load(number)
            length = lengths[int(rng.integers(len(lengths)))] % (1 << (8 * width))
            forged = length.to_bytes(width, "little")
            if forged == good[offset : offset + width]:
                forged = b"\xff" * width
            target.damaged_read(number, good[:offset] + forged + good[offset + width :])
    counted(target)


def test_cut_files(target: Target) -> None:
    number = NUM_PAGES // 4
    path, location = target.file(number), target.locations[number]
    data = path.read_bytes()
    start = location.block * 4096
    for cut in (0, 4096, start, start + 1, start + 5000):
        path.write_bytes(data[:cut])
        result = read_page(target.tier, location, number)
        target.results.append(result)
        assert result is VerifyResult.MISSING
        path.write_bytes(data)
    counted(target)


def test_files_taken_away(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, range(NUM_PAGES))
    for path in (tmp_path / "disk").rglob("*.hkv"):
        path.unlink()
    results = [read_page(tier, at, n) for n, at in enumerate(locations)]
    assert set(results) == {VerifyResult.MISSING}
    assert tier.stats().errors == {"missing": NUM_PAGES}


def test_segments_swapped_for_each_other(target: Target) -> None:
    first, last = target.file(0), target.file(NUM_PAGES - 1)
    one, two = first.read_bytes(), last.read_bytes()
    first.write_bytes(two)
    last.write_bytes(one)
    results = [read_page(target.tier, at, n) for n, at in enumerate(target.locations)]
    swapped = {target.locations[0].segment, target.locations[NUM_PAGES - 1].segment}
    for at, result in zip(target.locations, results, strict=True):
        assert (result is VerifyResult.OK) == (at.segment not in swapped)


def test_flipped_footers_never_mislead(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, range(20))
    tier.close()
    (path,) = (tmp_path / "disk").rglob("*.hkv")
    good = path.read_bytes()
    rng = np.random.default_rng(3)
    numbers = {key(n): n for n in range(20)}
    for _ in range(60):
        data = bytearray(good)
        data[len(data) - 1 - int(rng.integers(4096))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        tier = open_tier()
        pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        assert len(pages) == 20
        assert tier.stats().errors == {"damaged_footer": 1}
        for row in range(20):
            location = Location(int(pages.segment[row]), int(pages.block[row]))
            number = numbers[pages.hashes[row].tobytes()]
            assert read_page(tier, location, number) is VerifyResult.OK
        tier.close()
