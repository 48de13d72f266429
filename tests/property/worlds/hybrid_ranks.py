"""Ranks of one server of a hybrid without the server: a window or state world for each.

Each world is a thread that does the same random things, over the real cache and SGLang's tree, with
a page store of its own: of another size, late by its own chance, and losing pages at random. What
has to be alike goes into a trace; a row, window or state that is not a request's own fails at once.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.provenance.request_state import state_of
from sglang_ext.seam import cache as cache_module
from sglang_ext.tiers.store.types import READY
from testkit.slow.store import add_jitter
from tests.property.worlds.ranks_world import WAIT_S, Wire
from tests.property.worlds.state_world import StateWorld
from tests.property.worlds.window_world import Request, WindowWorld

JITTER_S, LOSS = 0.001, 0.02
MAX_ROUNDS = 20
_SLOW = ("saves.begin", "saves.finish", "plans.begin", "plans.finish_promotion")


class _Rank(WindowWorld):
    """What a world of either kind does otherwise as one of several."""

    own: random.Random
    trace: list[Any]
    num_lost = 0

    def begin(self, number: int, seed: int) -> None:
        self.own, self.trace = random.Random(1000 * seed + number), []
        self.counts["loaded"] = 0
        add_jitter(self.store._books, _SLOW, JITTER_S, seed=self.own.randrange(1 << 30))

    def do(self, kind: str) -> None:
        super().do(kind)
        self.note(kind)
        if self.own.random() < LOSS:
            self.lose()

    def note(self, kind: str) -> None:
        """What has to be alike: what was decided, and what SGLang's tree and pools came to."""
        self.trace.append((
            kind,
            [req.rid for req in self.waiting],
            [(req.rid, req.prefix_len, req.num_loaded) for req in self.running],
            len(self.cache.linker.pending_offloads),
            sorted(self.cache.linker.hit_markers),
            self.rows_left(),
            self.rows_in_use(),
            self.branches(),
        ))  # fmt: skip

    def rows_left(self) -> list[int]:
        """What is free on the device, of each pool."""
        raise NotImplementedError

    def rows_in_use(self) -> list[int]:
        """What the tree has and may not give up, of each pool."""
        raise NotImplementedError

    def branches(self) -> list[Any]:
        """Where SGLang was asked to keep a state, or where windows will be saved."""
        raise NotImplementedError

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        admitted = super().admit(req, chunk)
        self.trace.append(("admitted" if admitted else "held", req.rid, req.num_loaded))
        self.counts["loaded"] += bool(admitted and req.num_loaded)
        return admitted

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
            space = self.store._spaces.of(int(numbers[at]))
            ticket = self.store.pin_ready(space, keys[at : at + 1])
            if ticket is not None:
                self.store.drop_damaged(ticket, np.zeros(1, np.int64))
                self.store.release(ticket.slots)
                self.num_lost += 1

    def _do_steer(self) -> bool:
        return False

    def settle(self) -> None:
        self.cache.quiesce()
        super().settle()


class WindowRank(_Rank):
    """A rank of a model with window layers."""

    def rows_left(self) -> list[int]:
        """See `_Rank`."""
        parts = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        return [int(each.available_size()) for each in parts]

    def rows_in_use(self) -> list[int]:
        """See `_Rank`."""
        return [int(self.cache.full_protected_size()), int(self.cache.swa_protected_size())]

    def branches(self) -> list[Any]:
        """See `_Rank`."""
        return [sorted(state_of(req).resume_pages) for req in (*self.waiting, *self.running)]


class StateRank(_Rank, StateWorld):
    """A rank of a model with states."""

    def rows_left(self) -> list[int]:
        """See `_Rank`."""
        parts = self.allocator, self.req_pool.mamba_allocator
        return [int(each.available_size()) for each in parts]

    def rows_in_use(self) -> list[int]:
        """See `_Rank`."""
        return [int(self.cache.full_protected_size()), int(self.cache.mamba_protected_size())]

    def branches(self) -> list[Any]:
        """See `_Rank`."""
        return sorted(self._branches.items())


def run_worlds(
    kind: type[_Rank],
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    seed: int,
    num_loads: int,
    own: list[dict[str, Any]],
    **options: Any,
) -> list[_Rank]:
    """Rounds of all ranks, each to the end of all that it began, until there were some loads.

    Args:
        kind: of the worlds.
        folder: for their disks.
        patch: undone with the test.
        seed: of what they do.
        num_loads: of prompts, at least.
        own: options of each rank's world alone.
        options: of all worlds.
    """
    wire, worlds = Wire(len(own)), []
    patch.setattr(cache_module, "min_reduce", wire.min_reduce)
    for number, more in enumerate(own):
        patch.setattr(cache_module, "group_of", lambda cache, number=number: number)
        world = kind(folder / str(number), patch, seed, is_one_of_many=True, **options, **more)
        world.begin(number, seed)
        worlds.append(world)
    errors: list[BaseException] = []

    def run(world: _Rank) -> None:
        try:
            for _ in range(MAX_ROUNDS):
                world.one_round()
                if world.counts["loaded"] >= num_loads:
                    return
            raise AssertionError(f"few prompts are resumed: {world.counts}")
        except BaseException as error:
            errors.append(error)
            wire.abort()

    threads = [threading.Thread(target=run, args=(world,), daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 4 * WAIT_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    try:
        real = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        assert len(set(wire.rounds)) == 1, wire.rounds
    finally:
        for world in worlds:
            world.close()
    return worlds
