"""The world of long prompts, with the real cache, tree and linker, on a simulated device.

As in `linker_on_device.py`, threads are real and ordered by what they share, and forwards by
events. What the cache copies on the device itself is noted where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.ports import DevicePort  # noqa: E402
from sglang_ext.tiers.disk.segments.fileio import FileIO  # noqa: E402
from sglang_ext.tiers.host import HostArena, Slots  # noqa: E402
from testkit.simulated.device import Cell  # noqa: E402
from testkit.simulated.kernels import pool_cell  # noqa: E402
from testkit.simulated.threaded import FollowedDeque, following_locks  # noqa: E402
from tests.property.device.rough_device import RoughDevice, RoughLaunches  # noqa: E402
from tests.property.worlds.truncation_world import TruncationWorld  # noqa: E402


class NotedArena(HostArena):
    """Whoever gives a slot back, or takes it, writes it.

    It has many methods because `HostArena` has.
    """

    device: RoughDevice | None = None

    def _note(self, what: str, slots: Slots) -> None:
        device = self.device
        if device is not None:
            for slot in slots.tolist():
                device.touch(what, (), device.cells_of(self.slots[slot]))

    def _push(self, slots: Slots) -> None:
        self._note("free", slots)
        super()._push(slots)

    def alloc(self, count: int) -> Slots:
        """See `HostArena`."""
        taken = super().alloc(count)
        self._note("take", taken)
        return taken


class NotedIO(FileIO):
    """The disk's, of which the device is told where slots are read or written."""

    def __init__(self, device: RoughDevice) -> None:
        self._device = device

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FileIO`."""
        self._device.touch_slots(buffers, is_read=False)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FileIO`."""
        self._device.touch_slots(buffers, is_read=True)
        return super().preadv(fd, buffers, offset)


class TruncationOnDevice(TruncationWorld):
    """A world whose pool lies on a simulated device; see `TruncationWorld`.

    It has many methods because `TruncationWorld` has.
    """

    arena_type = NotedArena

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        self.device = RoughDevice(seed + 3)
        self.kernels = RoughLaunches(self.device)
        self.forwards = self.device.forwards
        with self.device.acting("assembly"), following_locks(self.device):
            super().__init__(folder, patch, seed, io=NotedIO(self.device), **options)
            linker: Any = self.cache.hier_linker
            linker._saves._completed = FollowedDeque(self.device)
            self._in_forward_order = linker._load_path.in_forward_order
            linker._load_path.in_forward_order = self.in_forward_order
            built = self.device.hand_over()
        self.device.take_over(built)

    def _open_port(self) -> DevicePort:
        assert isinstance(self.arena, NotedArena)
        self.device.add_arena(self.arena)
        self.arena.device = self.device
        return self.device

    def _cells(self, rows: torch.Tensor) -> list[Cell]:
        buffers = (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer)
        return [pool_cell(buffer, row) for buffer in buffers for row in rows.view(-1).tolist()]

    def at_rows(self, what: str, rows: torch.Tensor, *, writes: bool) -> None:
        """Queues it."""
        self.device.forward(what, self._cells(rows), writes=writes)

    @contextmanager
    def in_forward_order(self, target: torch.Tensor, source: torch.Tensor) -> Iterator[None]:
        """As the load path has it; of the copy that is made in it, what it must be behind is noted.

        A save that was offered before may still read the target: each value it has is the former
        or the better one, and it says the former quality. So the target is noted as if it was read.
        """
        device = self.device
        with self._in_forward_order(device.tensor(target), device.tensor(source)):
            device.touch_here("overwrites", [*self._cells(source), *self._cells(target)], ())
            yield

    def step(self) -> None:
        """One thing happens, and nothing was out of order so far."""
        with self.device.in_order():
            super().step()

    def drain(self) -> None:
        """See `World`."""
        with self.device.in_order():
            super().drain()
