"""Damage of every kind, injected into segment files: each a miss of a known kind, never bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.base import Location
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import HEADER_BYTES, VerifyResult
from tests.tiers.tier_pages import (
    ADAPTER,
    NAMESPACE,
    OTHER_NAMESPACE,
    PACKED_SLOT_BYTES,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    key,
    make_record,
    make_slot,
    packed_blocks,
    packed_payload_bytes,
    read_packed,
    read_page,
    store,
    store_packed,
)

OpenTier = Callable[..., DiskTier]
NUM_PAGES = 60


@dataclass
class Target:
    """An open tier with pages on disk, and their files to damage."""

    tier: DiskTier
    folder: Path
    locations: list[Location]
    packed: bool = False
    injected: int = 0
    results: list[VerifyResult] = field(default_factory=list)

    def num_blocks(self, number: int) -> int:
        return packed_blocks(key(number)) if self.packed else SLOT_BYTES // 4096

    def payload_bytes(self, number: int) -> int:
        return packed_payload_bytes(key(number)) if self.packed else PAYLOAD_BYTES

    def read(self, number: int) -> VerifyResult:
        read = read_packed if self.packed else read_page
        return read(self.tier, self.locations[number], number)

    def file(self, number: int) -> Path:
        return self.folder / f"seg-{self.locations[number].segment:08d}.hkv"

    def load(self, number: int) -> bytes:
        with self.file(number).open("rb") as file:
            file.seek(self.locations[number].block * 4096)
            return file.read(self.num_blocks(number) * 4096)

    def save(self, number: int, data: bytes) -> None:
        with self.file(number).open("r+b") as file:
            file.seek(self.locations[number].block * 4096)
            file.write(data)

    def damaged_read(self, number: int, data: bytes) -> VerifyResult:
        """Puts `data` in a page's place, reads the page, and puts things right again."""
        good = self.load(number)
        self.save(number, data.ljust(len(good), b"\0")[: len(good)])
        result = self.read(number)
        self.save(number, good)
        assert result is not VerifyResult.OK
        self.injected += 1
        self.results.append(result)
        return result


@pytest.fixture(params=["auto", "off", "auto-packed", "off-packed"])
def target(open_tier: OpenTier, tmp_path: Path, request: pytest.FixtureRequest) -> Target:
    mode, _, packed = request.param.partition("-")
    tier = open_tier(direct_io=mode)
    slot_bytes = PACKED_SLOT_BYTES if packed else SLOT_BYTES
    tier.open_namespace(NAMESPACE, slot_bytes, {}, packed=bool(packed))
    locations = (store_packed if packed else store)(tier, range(NUM_PAGES))
    assert len({location.segment for location in locations}) > 1
    return Target(tier, tmp_path / "disk" / NAMESPACE.hex()[:16], locations, bool(packed))


def counted(target: Target) -> None:
    """Every injected damage is in the counters under the kind that the read returned."""
    kinds = {kind: target.results.count(kind) for kind in target.results}
    assert target.tier.stats().errors == {kind.value: n for kind, n in kinds.items()}
    right = [target.read(number) is VerifyResult.OK for number in range(NUM_PAGES)]
    assert all(right), "the damage was undone"


def test_300_flipped_bits(target: Target) -> None:
    rng = np.random.default_rng(7)
    for index in range(300):
        number = int(rng.integers(NUM_PAGES))
        checked_bytes = HEADER_BYTES + target.payload_bytes(number)
        limit = 128 if index < 100 else checked_bytes  # a third of them in the header
        data = bytearray(target.load(number))
        data[int(rng.integers(limit))] ^= 1 << int(rng.integers(8))
        target.damaged_read(number, bytes(data))
    assert set(target.results) >= {VerifyResult.BAD_CHECKSUM, VerifyResult.BAD_HEADER}
    counted(target)


def test_60_torn_records(target: Target) -> None:
    rng = np.random.default_rng(8)
    for number in range(NUM_PAGES):
        kept = int(rng.integers(0, HEADER_BYTES + target.payload_bytes(number)))
        good = target.load(number)
        stale = bytes(len(good)) if number % 2 else target.load((number + 1) % NUM_PAGES)
        target.damaged_read(number, good[:kept] + stale[kept:])
    counted(target)


def test_90_swapped_records(target: Target) -> None:
    for number in range(NUM_PAGES):
        others = [(number + 1) % NUM_PAGES] + [NUM_PAGES - 1 - number] * (number < 30)
        for other in others:
            fits = target.num_blocks(other) <= target.num_blocks(number)
            result = target.damaged_read(number, target.load(other))
            assert result is (VerifyResult.FOREIGN if fits else VerifyResult.BAD_HEADER)
    counted(target)


@pytest.mark.parametrize("index", range(10))
def test_intact_records_of_other_keys(target: Target, index: int) -> None:
    make = make_record if target.packed else make_slot
    stale = make(index, OTHER_NAMESPACE)
    adapted = make(index, NAMESPACE, lora=ADAPTER)
    for slot in (stale, adapted):
        seal(slot)
        assert target.damaged_read(index, slot.tobytes()) is VerifyResult.FOREIGN
    counted(target)


def test_forged_lengths(target: Target) -> None:
    rng = np.random.default_rng(9)
    for number in range(20):
        right, most = target.payload_bytes(number), target.num_blocks(number) * 4096
        lengths = [0, 1, max(0, right - 1), right + 1, most, 2**31, 2**63, 2**64 - 1]
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
    end = start + target.num_blocks(number) * 4096
    for cut in (0, 4096, start, start + 1, end - 4096 + 904):
        path.write_bytes(data[:cut])
        result = target.read(number)
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
    results = [target.read(number) for number in range(NUM_PAGES)]
    swapped = {target.locations[0].segment, target.locations[NUM_PAGES - 1].segment}
    for at, result in zip(target.locations, results, strict=True):
        assert (result is VerifyResult.OK) == (at.segment not in swapped)


@pytest.mark.parametrize("packed", [False, True])
def test_flipped_footers_never_mislead(open_tier: OpenTier, tmp_path: Path, packed: bool) -> None:
    tier = open_tier(segment_bytes=4 << 20)
    slot_bytes = PACKED_SLOT_BYTES if packed else SLOT_BYTES
    tier.open_namespace(NAMESPACE, slot_bytes, {}, packed=packed)
    (store_packed if packed else store)(tier, range(20))
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
        pages = tier.open_namespace(NAMESPACE, slot_bytes, {}, packed=packed)
        assert len(pages) == 20
        assert tier.stats().errors == {"damaged_footer": 1}
        for row in range(20):
            location = Location(int(pages.segment[row]), int(pages.block[row]))
            number = numbers[pages.hashes[row].tobytes()]
            read = read_packed if packed else read_page
            assert read(tier, location, number) is VerifyResult.OK
        tier.close()
