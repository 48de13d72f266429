"""What a world of a simulated device is made of: a pool, rotations, and a store of pages."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.transfers import SaveJob
from sglang_ext.kernels.rope import RopeSpec
from testkit.simulated.device import Clock
from tiers.store.types import StoreCounters

if TYPE_CHECKING:
    from tests.property.device.device_world import DeviceWorld

LAYERS, PAGE, HEADS, DIM, MAX_POSITION = 3, 4, 2, 8, 256
SLOTS, PAGES, CONTENTS = 30, 40, 6


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

    def end_load(self, ticket: Any) -> None:
        """See `PageStore.end_load`; no other rank reads these pages."""
        self.release(ticket.slots)

    def begin_save(self, space: Any, hashes: Any, ancestors: Any, quality: Any) -> Any:
        """Slots for the pages, which the scheduler had set aside."""
        offer = self._world.saving
        assert offer is not None
        slots = np.array(offer.slots, np.int32)
        return SimpleNamespace(rows=offer.pages, slots=slots, pages=offer.pages, dropped=0)

    def finish_save(self, ticket: Any, *, ok: bool) -> None:
        """The pages are there for everybody, or the slots are."""
        if ok:
            self._world.published(ticket.slots.astype(np.int64))
        self.release(ticket.slots)

    def close(self) -> None: ...


@dataclass(frozen=True)
class More:
    """What a request of a hybrid is loaded besides.

    Attributes:
        slots: slots of its pages and parts, as a ticket has them, behind the full layers'.
        first: number of the first page of its window, or of the page that its state is behind.
        rows: of the window layers.
        expected: K and V of each window layer in these.
        state: slot of its state.
    """

    slots: tuple[int, ...] = ()
    first: int = 0
    rows: torch.Tensor | None = None
    expected: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    state: int | None = None


@dataclass(eq=False)
class Load:
    """A request whose pages are loaded."""

    position: int
    rows: torch.Tensor
    expected: list[tuple[torch.Tensor, torch.Tensor]]
    more: More


@dataclass(frozen=True)
class Offer:
    """A save that is queued.

    Attributes:
        job: as the save thread has it.
        load: what is saved; nobody else's meanwhile.
        slots: set aside for it.
        pages: which of the job's pages go there.
        clock: of the scheduler when it was offered.
    """

    job: SaveJob
    load: Load
    slots: list[int]
    pages: np.ndarray
    clock: Clock


@dataclass
class Batch:
    """Loads of one forward."""

    index: int
    loads: list[Load]
    forwarded: bool = False


def make_pool(
    num_layers: int = LAYERS, num_pages: int = PAGES, sizes: tuple[int, int] = (DIM, DIM)
) -> DevicePool:
    """A pool in which nothing is; `sizes` are those of a head of K and of V."""
    k, v = (
        tuple(
            torch.full((num_pages * PAGE, HEADS, size), -77.0, dtype=torch.bfloat16)
            for _ in range(num_layers)
        )
        for size in sizes
    )
    return DevicePool("mha", torch.bfloat16, k, v, 0, num_pages * PAGE)


def make_ropes() -> list[LayerRope]:
    frequencies = 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
    angles = np.arange(MAX_POSITION)[:, None] * frequencies[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    spec = RopeSpec(cos, sin, DIM, 0, False, "eager")
    return [LayerRope(spec, movable=True) for _ in range(LAYERS - 1)] + [LayerRope(None, True)]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)
