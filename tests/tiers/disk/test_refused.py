"""Batches in which some slots hold no record of the namespace, over several runs of one write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_ext.tiers.base import Location
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.records.record import ByteArray, VerifyResult
from tests.tiers.tier_pages import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PACKED_SLOT_BYTES,
    SLOT_BYTES,
    make_record,
    make_slot,
    read_page,
)

OpenTier = Callable[..., DiskTier]
OK = VerifyResult.OK
SEGMENT_BYTES = 64 << 20


def _spoil(slots: list[ByteArray], row: int, number: int, make: Callable[..., ByteArray]) -> None:
    """Every third row of the refused is foreign, the others malformed in two ways."""
    kind = number % 3
    if kind == 0:
        slots[row] = make(row, OTHER_NAMESPACE)
    elif kind == 1:
        slots[row][0] ^= 1  # the magic
    else:
        slots[row][500] = 1  # behind the map


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "refused",
    [(0,), (499,), (5, 130, 131, 260, 499), tuple(range(120, 300)), tuple(range(0, 500, 7))],
    ids=["first", "last", "several", "a stretch", "every seventh"],
)
def test_the_others_are_stored_side_by_side(
    open_tier: OpenTier, packed: bool, refused: tuple[int, ...]
) -> None:
    make = make_record if packed else make_slot
    slot_bytes = PACKED_SLOT_BYTES if packed else SLOT_BYTES
    tier = open_tier(segment_bytes=SEGMENT_BYTES, max_bytes=4 * SEGMENT_BYTES, helper_threads=2)
    tier.open_namespace(NAMESPACE, slot_bytes, {}, packed=packed)
    slots = [make(row) for row in range(500)]  # over 4 MB: several runs
    for number, row in enumerate(refused):
        _spoil(slots, row, number, make)

    locations = tier.write(NAMESPACE, slots)

    assert [row for row, found in enumerate(locations) if found is None] == list(refused)
    stored = [row for row, found in enumerate(locations) if found is not None]
    for row in stored:
        assert read_page(tier, _at(locations, row), row, slot_bytes=slot_bytes) is OK
    blocks = np.cumsum([1, *(slots[row].size // 4096 for row in stored)])
    assert [_at(locations, row).block for row in stored] == blocks[:-1].tolist()
    stats = tier.stats()
    foreign = (len(refused) + 2) // 3
    assert stats.dropped.get("foreign", 0) == foreign
    assert stats.dropped.get("malformed", 0) == len(refused) - foreign
    assert stats.records_written == len(stored)
    tier.close()
    found = open_tier(segment_bytes=SEGMENT_BYTES).open_namespace(
        NAMESPACE, slot_bytes, {}, packed=packed
    )
    assert len(found) == len(stored)


def _at(locations: list[Location | None], row: int) -> Location:
    location = locations[row]
    assert location is not None
    return location
