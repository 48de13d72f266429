"""The linker's world on a simulated device: its real threads, store and disk are ordered by locks.

What a forward reads or writes is queued on its stream, so it is ordered against copies by events
alone. A slot of the arena is written by whoever gives it back, by whoever takes it next, and by the
disk's threads, and read by these and by copies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_ext.device.ports import DevicePort
from testkit.simulated.kernels import pool_cell
from testkit.simulated.threaded import FollowedDeque, following_locks
from tests.property.device.rough_device import RoughDevice, RoughLaunches
from tests.property.worlds.linker_world import ALL_LAYERS, PAGE, World


class LinkerOnDevice(World):
    """A world whose pool lies on a simulated device; see `World`.

    It has many methods because `World` has.
    """

    def __init__(self, folder: Path, seed: int, **options: Any) -> None:
        self.device = RoughDevice(seed + 3)
        with self.device.acting("assembly"), following_locks(self.device):
            self.forwards = self.device.forwards
            super().__init__(folder, seed, **options)
            # It takes no lock: the deque itself orders the threads that save and that ask.
            self.linker._saves._completed = FollowedDeque(self.device)  # type: ignore[assignment]
            built = self.device.hand_over()
        self.device.take_over(built)

    def _make_kernels(self, rng: random.Random) -> Any:
        return RoughLaunches(self.device)

    def _open_port(self) -> DevicePort:
        device, slots = self.device, self.arena.slots
        device.add_arena(self.arena)
        self.disk_io.note = lambda buffers, is_read: device.touch_slots(buffers, is_read=is_read)
        self.arena.note = lambda what, slot: device.touch(what, (), device.cells_of(slots[slot]))
        return device

    def at_rows(
        self, what: str, pages: Sequence[int], *, writes: bool, layers: Sequence[int] = ALL_LAYERS
    ) -> None:
        """Queues it."""
        pool = self.kv_pool
        cells = [
            pool_cell(buffer, row)
            for layer in layers
            for buffer in (pool.k_buffer[layer], pool.v_buffer[layer])
            for page in pages
            for row in range(page * PAGE, (page + 1) * PAGE)
        ]
        self.device.forward(what, cells, writes=writes, stream=self.forwards)

    def layer_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward's stream waits for the layer."""
        with self.device.on(self.forwards):
            return super().layer_of(layer)

    def slots_of(self, pages: list[int]) -> torch.Tensor:
        """A tensor on the device."""
        return self.device.tensor(super().slots_of(pages))

    def trouble(self) -> None:
        """See `World`; the device fails more often."""
        super().trouble()
        if not self.batches:
            self.device.failure = self.rng.choice((0.0, 0.0, 0.0, 0.02, 0.1))

    def load_failed(self) -> None:
        """Its slots, or its buffers, are wanted again at once, now and then."""
        kind = self.rng.choice(("", "clear", "load"))
        if kind == "clear":
            self.store.clear()
        elif kind == "load":
            self.device.failure = 0.0
            for _ in range(4):
                self.load()
            self.forward()

    def step(self) -> None:
        """One thing happens, and nothing was out of order so far."""
        with self.device.in_order():
            super().step()

    def settle(self) -> None:
        """See `World`."""
        with self.device.in_order():
            super().settle()
