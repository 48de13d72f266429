"""The emptiest segment is found without a look at all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.disk.segments.catalog import Catalog, Namespace, Segment
from sglang_ext.tiers.disk.segments.thinned import ThinnedSegments

SLOT_BYTES, SEGMENT_BLOCKS = 8 * 4096, 512
DIGEST, OTHER = b"n" * 32, b"o" * 32


class World:
    """Sealed segments of two namespaces, and what is known of each."""

    def __init__(self, num_segments: int) -> None:
        self.catalog = Catalog()
        self.namespace = Namespace(DIGEST, Path(), SLOT_BYTES, 64, packed=True)
        self.other = Namespace(OTHER, Path(), SLOT_BYTES, 64, packed=True)
        for namespace in (self.namespace, self.other):
            self.catalog.add_namespace(namespace)
        for number in range(num_segments):
            self.add(number, DIGEST if number % 4 else OTHER)
        self.thinned = ThinnedSegments(self.catalog)
        self.live: dict[int, int] = {}
        self.looked: list[int] = []

    def add(self, number: int, digest: bytes, *, sealed: bool = True, packed: bool = True) -> None:
        self.catalog.add(
            Segment(number, digest, Path(), SLOT_BYTES, 1 + SEGMENT_BLOCKS, 0, 0, sealed, packed)
        )

    def note(self, live: dict[int, int]) -> None:
        self.live.update(live)
        self.thinned.note(live)

    def take(self, first_blocks: int = 1, fresh: dict[int, int] | None = None) -> int | None:
        def num_fresh(segment_id: int) -> int:
            self.looked.append(segment_id)
            return (fresh or {}).get(segment_id, 0)

        segment = self.thinned.take(self.namespace, first_blocks, num_fresh)
        if segment is None:
            return None
        del self.live[segment.segment_id]
        return segment.segment_id


@pytest.mark.parametrize("num_segments", [100, 10_000])
def test_the_emptiest_is_taken_and_few_are_looked_at(num_segments: int) -> None:
    world, rng = World(num_segments), np.random.default_rng(2)
    for _ in range(5):  # what was said before is behind the times
        world.note({number: int(rng.integers(0, 400)) for number in range(num_segments)})
    for _ in range(20):
        best = min(live for number, live in world.live.items() if number % 4)
        world.looked.clear()
        left = dict(world.live)
        taken = world.take()
        assert taken is not None
        assert left[taken] == best
        assert len(world.looked) <= 8
        world.note({number: int(rng.integers(0, 400)) for number in (1, 2, 3, taken)})


def test_what_was_said_before_does_not_pile_up() -> None:
    world = World(20)
    for number in range(2000):
        world.note({number % 20: 400 - number // 10})
    assert world.thinned._num_entries <= 2 * 20 + 64
    assert world.thinned._num_entries == sum(map(len, world.thinned._heaps.values()))


def test_one_that_is_written_to_or_cannot_be_or_was_just_filled_is_passed_over() -> None:
    world = World(9)
    world.add(20, DIGEST, sealed=False)
    world.add(21, DIGEST, packed=False)
    world.note({1: 300, 2: 200, 3: 100, 20: 0, 21: 0})
    # Of 3 nothing but 20 blocks is free: the owner does not know the rest yet.
    assert world.take(fresh={3: 392}) == 2
    assert world.take() == 3
    segment = world.namespace.segments[20]
    world.catalog.mark_sealed(segment, 0)
    assert world.take() == 20
    assert world.take() == 1
    assert world.take() is None
    world.note({2: 500})  # twelve blocks, no place for a record of thirteen
    assert world.take(first_blocks=13) is None


def test_one_that_grew_while_it_was_written_counts_with_all_it_has() -> None:
    world = World(9)
    world.note({1: 300, 2: 200})
    world.namespace.segments[1].end_block += 400
    world.note({3: 500})
    assert [world.take(), world.take(), world.take()] == [2, 1, None]
    world.note({1: 300, 2: 200})
    assert world.take() == 1


def test_a_segment_that_is_gone_is_forgotten() -> None:
    world = World(9)
    world.note({1: 300, 2: 200})
    world.catalog.remove(world.namespace.segments[2])
    assert [world.take(), world.take()] == [1, None]
    world.thinned.note({2: 0})
    assert world.thinned._live_blocks == {}


def test_unfit_segments_are_told_by_a_count() -> None:
    world = World(9)
    assert world.catalog.sealed_unfit(world.namespace) == []
    world.add(21, DIGEST, packed=False)
    assert [each.segment_id for each in world.catalog.sealed_unfit(world.namespace)] == [21]
    world.catalog.remove(world.namespace.segments[21])
    assert world.catalog.sealed_unfit(world.namespace) == []


def test_one_that_was_noted_often_is_looked_at_once() -> None:
    """A short segment may be worth it where long ones are not."""
    world = World(9)
    short = Segment(30, DIGEST, Path(), SLOT_BYTES, 3, 0, 0, True, True)
    world.catalog.add(short)
    for _ in range(9):
        world.note(dict.fromkeys((1, 2, 3), SEGMENT_BLOCKS - 3))
    world.note({30: 0})
    assert world.take() == 30
    assert len(world.looked) == 4
    world.looked.clear()
    for number in range(100, 140):
        world.add(number, DIGEST)
        world.note({number: SEGMENT_BLOCKS - 3})
    assert world.take() is None
    assert len(world.looked) <= 16
