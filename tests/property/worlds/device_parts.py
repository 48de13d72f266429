"""What a world of a simulated device is made of: a pool, rotations, and a store of pages."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels.rope import RopeSpec
from tiers.store.types import StoreCounters

if TYPE_CHECKING:
    from tests.property.worlds.device_world import DeviceWorld

LAYERS, PAGE, HEADS, DIM, MAX_POSITION = 3, 4, 2, 8, 256
SLOTS, PAGES, CONTENTS = 24, 40, 6


class Pages:
    """What the load path asks of the page store: pins that are given back, counters, a gate."""

    def __init__(self, world: DeviceWorld) -> None:
        self.counters = StoreCounters()
        self.arena = SimpleNamespace(slots=world.arena)
        self.gate = SimpleNamespace(is_live=lambda pages: True, load=lambda ticket, space: ticket)
        self.events = SimpleNamespace(note=lambda *_, **__: None, pages=lambda *_, **__: None)
        self._world = world

    def release(self, slots: Any) -> None:
        """Somebody else may have the slots; the store's lock orders this before that."""
        self._world.unpinned.append((slots.tolist(), self._world.device.hand_over()))

    def begin_save(self, space: Any, hashes: Any, ancestors: Any, quality: Any) -> Any:
        """Slots for the pages, which the scheduler had set aside."""
        slots = np.array(self._world.set_aside, np.int32)
        places = np.arange(len(slots))
        return SimpleNamespace(rows=places, slots=slots, pages=places, dropped=0)

    def finish_save(self, ticket: Any, *, ok: bool) -> None:
        """The pages are there for everybody, or the slots are."""
        if ok:
            self._world.published(ticket.slots.astype(np.int64))
        self.release(ticket.slots)

    def close(self) -> None: ...


@dataclass(eq=False)
class Load:
    """A request whose pages are loaded."""

    position: int
    rows: torch.Tensor
    expected: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Batch:
    """Loads of one forward."""

    index: int
    loads: list[Load]
    forwarded: bool = False


def make_pool(seed: int) -> DevicePool:
    shape = (PAGES * PAGE, HEADS, DIM)
    k = tuple(torch.full(shape, -77.0, dtype=torch.bfloat16) for _ in range(LAYERS))
    v = tuple(torch.full(shape, -77.0, dtype=torch.bfloat16) for _ in range(LAYERS))
    return DevicePool("mha", torch.bfloat16, k, v, 0, PAGES * PAGE)


def make_ropes() -> list[LayerRope]:
    frequencies = 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
    angles = np.arange(MAX_POSITION)[:, None] * frequencies[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    spec = RopeSpec(cos, sin, DIM, 0, False, "eager")
    return [LayerRope(spec, movable=True) for _ in range(LAYERS - 1)] + [LayerRope(None, True)]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)
