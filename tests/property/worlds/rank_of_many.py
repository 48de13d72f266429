"""Ranks of one server without the server: a world for each, over the real cache and SGLang's tree.

Each world is a thread that does the same random things, with a page store of its own: of another
size, late by its own chance, and losing pages at random. What has to be alike goes into a trace.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.seam import cache as cache_module  # noqa: E402
from sglang_ext.tiers.store import PageStore  # noqa: E402
from sglang_ext.tiers.store.types import READY  # noqa: E402
from testkit.slow.store import add_jitter  # noqa: E402
from tests.property.worlds import ranks_world  # noqa: E402
from tests.property.worlds.ranks_world import Stages, Wire  # noqa: E402

JITTER_S, LOSS = 0.001, 0.02
MAX_ROUNDS = 20
# Worlds with a mistake: so many may not show it, and so long they wait for one another then.
MAX_WORLDS, SHORT_WAIT_S = 8, 10.0


class TooFewLoadsError(AssertionError):
    """The rounds are over, and fewer prompts were resumed than should have been."""


_SLOW = ("saves.begin", "saves.finish", "plans.begin", "plans.finish_promotion")


class RankOfMany:
    """What a world does otherwise as one of several.

    `counts["loaded"]` and `counts["quoted"]` are of what is to be seen.

    Attributes:
        own: random numbers of this rank alone.
        trace: what has to be alike.
        num_lost: pages that this rank alone lost.
    """

    store: PageStore
    cache: Any
    counts: dict[str, int]
    own: random.Random
    trace: list[Any]
    num_lost = 0

    def begin(self, number: int, seed: int) -> None:
        """It is the rank of this number."""
        self.own, self.trace = random.Random(1000 * seed + number), []
        self.counts["loaded"] = self.counts["quoted"] = 0
        add_jitter(self.store._books, _SLOW, JITTER_S, seed=self.own.randrange(1 << 30))

    def wait_as_stages_do(self, stages: Stages, number: int) -> None:
        """It is a rank of a pipeline stage: each step waits for what SGLang's loop waits for.

        The world's way to a step's end is SGLang's batch; a step ends where the next one begins.
        """
        takes, steps = self.cache.check_hicache_events, itertools.count()

        def step() -> None:
            at = next(steps)
            if at:
                stages.exchange(number, at - 1)
            stages.enter(number, at)
            takes()

        self.cache.check_hicache_events = step

    def may_lose(self) -> None:
        """Once a step."""
        if self.own.random() < LOSS:
            self.lose()

    def lose(self) -> None:
        """Pages, windows or parts of states of this rank alone prove damaged, or leave DRAM."""
        table = self.store._books.table
        if self.own.random() < 0.5:
            with table.lock:
                self.store._books.room.evict(self.own.randint(1, 12))
            return
        with table.lock:
            rows = table.index.rows()
            rows = rows[(table.index.flags[rows] & READY) != 0]
            keys, numbers = table.index.keys(rows)
        for at in self.own.sample(range(len(rows)), min(3, len(rows))):
            space = self.store._spaces.find(int(numbers[at]))
            assert space is not None
            ticket = self.store.pin_ready(space, keys[at : at + 1])
            if ticket is not None:
                self.store.drop_damaged(ticket, np.zeros(1, np.int64))
                self.store.release(ticket.slots)
                self.num_lost += 1

    def one_round(self) -> None:
        """Random things, and all that they began to its end."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the world's threads."""
        raise NotImplementedError


Rank = TypeVar("Rank", bound=RankOfMany)


def run_worlds(
    kind: Callable[..., Rank],
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    seed: int,
    num_loads: int,
    num_quotes: int = 0,
    max_rounds: int = MAX_ROUNDS,
    num_stages: int = 1,
    own: list[dict[str, Any]],
    **options: Any,
) -> list[Rank]:
    """Rounds of all ranks, each to the end of all that it began, until there were some loads.

    Args:
        kind: of the worlds.
        folder: for their disks.
        patch: undone with the test.
        seed: of what they do.
        num_loads: so many, at least.
        num_quotes: so many among these of prompts that quote, at least.
        max_rounds: in which there are to be so many.
        num_stages: the ranks are of so many pipeline stages, stage by stage.
        own: options of each rank's world alone.
        options: of all worlds.
    """
    wire = Wire(len(own)) if num_stages == 1 else Stages(len(own), num_stages)
    worlds: list[Rank] = []
    if isinstance(wire, Stages):
        patch.setattr(cache_module, "begin_min_reduce", wire.begin_reduce)
    else:
        patch.setattr(cache_module, "min_reduce", wire.min_reduce)
    for number, more in enumerate(own):
        patch.setattr(cache_module, "group_of", lambda cache, number=number: number)
        world = kind(folder / str(number), patch, seed, is_one_of_many=True, **options, **more)
        world.begin(number, seed)
        if isinstance(wire, Stages):
            world.wait_as_stages_do(wire, number)
        worlds.append(world)
    errors: list[BaseException] = []

    def run(number: int, world: Rank) -> None:
        try:
            for _ in range(max_rounds):
                world.one_round()
                counts = world.counts
                if counts["loaded"] >= num_loads and counts["quoted"] >= num_quotes:
                    if isinstance(wire, Stages):
                        wire.leave(number)
                    return
            raise TooFewLoadsError(f"few prompts are resumed: {world.counts}")
        except BaseException as error:
            errors.append(error)
            wire.abort()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(worlds)]
    for thread in threads:
        thread.start()
    ranks_world.join_all(threads)
    try:
        real = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        assert len(set(wire.rounds)) == 1, wire.rounds
    finally:
        for world in worlds:
            world.close()
    return worlds


def run_until_found(
    run: Callable[[Path, int], object],
    folder: Path,
    patch: pytest.MonkeyPatch,
    num_worlds: int = MAX_WORLDS,
    *,
    hangs: bool = False,
) -> None:
    """Runs worlds with a mistake in them, until one raises what it leads to.

    Threads decide when a mistake shows, so one seed's rounds may end before, or have waited for one
    another in vain by then.

    Args:
        run: runs worlds in a folder by a seed; more loads than there will be keep them going.
        folder: for all of them.
        patch: undone with the test.
        num_worlds: so many may not show it.
        hangs: ranks that wait for one another in vain are what the mistake may lead to.
    """
    patch.setattr(ranks_world, "WAIT_S", SHORT_WAIT_S)
    in_vain = () if hangs else (threading.BrokenBarrierError,)
    shows_nothing = (TooFewLoadsError, ranks_world.WaitedInVainError, *in_vain)
    for seed in range(1, 1 + num_worlds):
        with contextlib.suppress(*shows_nothing):
            run(folder / str(seed), seed)
