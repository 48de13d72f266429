"""A random run goes on until all that it is meant to show has happened.

What the threads of a store get done between two steps differs from machine to machine, so no number
of steps is enough for sure, and any is far too many for most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

MAX_ROUNDS = 40


def missing(counts: Mapping[str, int], names: Mapping[str, int] | tuple[str, ...]) -> list[str]:
    """Those counted less often than asked for: once, or as often as a mapping says."""
    least = names if isinstance(names, Mapping) else dict.fromkeys(names, 1)
    return [name for name, least_num in least.items() if counts.get(name, 0) < least_num]


def run_until_all_seen(
    one_round: Callable[[], None], unseen: Callable[[], list[str]], *, num_rounds: int
) -> None:
    """At least `num_rounds` rounds, and on until nothing is unseen.

    Raises:
        AssertionError: many times as many rounds did not show all.
    """
    for number in itertools.count(1):
        one_round()
        if number >= num_rounds and not unseen():
            return
        assert number < MAX_ROUNDS * num_rounds, f"never happened: {unseen()}"


class World(Protocol):
    """What takes steps by chance, and counts."""

    store: Any
    counts: dict[str, int]

    def step(self) -> None:
        """One thing happens."""

    def drain(self) -> None:
        """All requests end."""


def run_until_counted(
    world: World, shown: Mapping[str, int] | tuple[str, ...], *, num_rounds: int
) -> None:
    """Rounds of 500 steps, behind each of which all ends, until its store has counted `shown`.

    Raises:
        AssertionError: see `run_until_all_seen`.
    """

    def one_round() -> None:
        for _ in range(500):
            world.step()
        world.drain()

    def unseen() -> list[str]:
        return missing(world.store.stats(), shown)

    run_until_all_seen(one_round, unseen, num_rounds=num_rounds)
    print(world.counts, world.store.stats())
