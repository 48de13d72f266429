"""Which states of a path are kept, against all that could be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from sglang_ext.seam.hybrids.state_choice import PathState, worth_keeping
from tests.long_form import count

CASES = count(300, 10_000)


def kept_of(states: Sequence[PathState], least: int) -> set[int]:
    keep = worth_keeping(states, least)
    return {state.end for state, keeps in zip(states, keep, strict=True) if keeps}


def lost_pages(states: Sequence[PathState], kept: set[int]) -> int:
    """Most pages that a request computes again, of those that it would not with all states."""
    there = {state.end for state in states if state.is_stored} | kept | {0}
    return max(
        state.end - max(end for end in there if end <= state.end) for state in states
    )  # at other places the loss is that of the state before


def test_a_left_out_state_costs_less_than_its_size_and_no_fewer_would_do() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(CASES):
        ends = sorted(rng.sample(range(1, 40), rng.randint(1, 9)))
        states = [PathState(end, rng.random() < 0.3, rng.random() < 0.2) for end in ends]
        least = rng.randint(1, 12)
        kept = kept_of(states, least)
        needed = {state.end for state in states if state.is_needed}
        assert needed <= kept
        assert lost_pages(states, kept) < least
        new = kept - {state.end for state in states if state.is_stored}
        free = [s.end for s in states if not s.is_needed and not s.is_stored]
        fewest = next(
            number
            for number in range(len(free) + 1)
            if any(lost_pages(states, needed | set(more)) < least
                   for more in combinations(free, number))
        )  # fmt: skip
        assert len(new - needed) == fewest
        seen.add((len(new), len(states)))
    assert len(seen) > 20


@pytest.mark.parametrize(
    ("ends", "needed", "expected"),
    [
        ([4, 8, 12, 16], [], [4, 8, 12, 16]),  # chunks as large as a state
        ([2, 4, 6, 8, 9], [9], [4, 8, 9]),  # smaller ones, and the end of a conversation
        ([1, 2], [1, 2], [1, 2]),
        ([3], [], []),
    ],
)
def test_states_stand_as_far_apart_as_they_are_large(
    ends: list[int], needed: list[int], expected: list[int]
) -> None:
    states = [PathState(end, False, end in needed) for end in ends]
    assert sorted(kept_of(states, 4)) == expected
