"""What is given to the disk in one call: so much that it takes a certain time, within bounds."""

from __future__ import annotations

import pytest

from sglang_ext.tiers.store.movers.piece_size import PieceSize

MIB = 1 << 20


def test_follows_the_speed_of_the_disk() -> None:
    size = PieceSize(0.05, 32 * MIB, 128 * MIB)
    assert size.num_bytes == 32 * MIB
    size.note(32 * MIB, 0.02)
    assert size.num_bytes == pytest.approx(80 * MIB, rel=1e-6)
    size.note(80 * MIB, 0.1)
    assert size.num_bytes == pytest.approx(40 * MIB, rel=1e-6)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 128), (1e-4, 128), (60.0, 32)])
def test_stays_within_its_bounds(seconds: float, expected: int) -> None:
    size = PieceSize(0.05, 32 * MIB, 128 * MIB)
    size.note(32 * MIB, seconds)
    assert size.num_bytes == expected * MIB


def test_a_short_call_says_nothing_of_the_speed() -> None:
    size = PieceSize(0.05, 32 * MIB, 128 * MIB)
    size.note(15 * MIB, 1e-4)
    assert size.num_bytes == 32 * MIB


def test_bounds_that_cross_leave_the_least() -> None:
    size = PieceSize(0.05, 32 * MIB, 4 * MIB)
    size.note(32 * MIB, 1e-4)
    assert size.num_bytes == 32 * MIB
