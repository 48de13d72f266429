"""What the linker's and the cache's worlds need of a simulated device that real threads use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from sglang_ext.kernels import rope as rope_kernels
from sglang_ext.tiers.host import HostArena
from testkit.simulated.device import Cell, Stream
from testkit.simulated.kernels import SimulatedKernels
from testkit.simulated.threaded import ThreadedDevice


class RoughDevice(ThreadedDevice):
    """Of which now and then a copy fails half-way, or which has no memory left.

    It has many methods because `ThreadedDevice` has.

    Attributes:
        failure: how often, on the calling thread's rank; of a launch, too.
        forwards: the stream that forwards run on.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._failures: dict[str, float] = {}  # by rank
        self._slots: list[range] = []  # addresses of those of each arena
        self.forwards = self.new_stream(())

    @property
    def failure(self) -> float:
        """See the class."""
        return self._failures.get(self._rank, 0.0)

    @failure.setter
    def failure(self, share: float) -> None:
        self._failures[self._rank] = share

    def forward(self, what: str, cells: Sequence[Cell], *, writes: bool, stream: Stream) -> None:
        """A forward reads or writes on its stream, behind what the scheduler's has by now.

        The device gets there: what is read then is what is there.
        """
        self.wait(stream, self.record(self.current_stream()))
        with self.on(stream):
            self.touch_here(what, () if writes else cells, cells if writes else ())

    def touch_here(self, what: str, reads: Iterable[Cell], writes: Iterable[Cell]) -> None:
        """Something is read and written on the calling thread's stream; the device gets there."""
        self.launch(what, lambda: None, reads, writes)
        self.reach(self.record(self.current_stream()))

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """What is done in it may end as it likes: nothing was out of order so far."""
        try:
            yield
        finally:
            self.require_order()

    def add_arena(self, arena: HostArena) -> None:
        """Slots, whose accesses are noted."""
        self.add_memory(arena.slots, "slot", arena.slot_bytes)
        self._slots.append(range(arena.address, arena.address + arena.nbytes))

    def touch_slots(self, buffers: Sequence[memoryview], *, is_read: bool) -> None:
        """What the calling thread reads from the disk, or writes there; of slots it is noted."""
        for part in (np.frombuffer(buffer, np.uint8) for buffer in buffers):
            if any(part.ctypes.data in slots for slots in self._slots):
                what, cells = (
                    f"{'read from' if is_read else 'written to'} disk",
                    self.cells_of(part),
                )
                self.count(what)
                self.touch(what, () if is_read else cells, cells if is_read else ())

    def fails(self) -> bool:
        """Whether it does, this time."""
        with self._mutex:
            return self.rng.random() < self.failure

    def _queued(self, page_slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], bool]:
        self.copies_fail_in = 0 if self.fails() else None
        return super()._queued(page_slots)

    def _take(self, count: int) -> npt.NDArray[np.int64]:
        self.memory_left = 0 if self.fails() else None
        return super()._take(count)


class RoughLaunches(SimulatedKernels):
    """Kernels of a rough device.

    Attributes:
        gate: of `World`; nothing waits for it.
    """

    def __init__(self, device: RoughDevice) -> None:
        super().__init__(device, rope_kernels)
        self.gate = threading.Event()
        self._rough = device

    @property
    def failure(self) -> float:
        """How often a launch fails."""
        return self._rough.failure

    @failure.setter
    def failure(self, share: float) -> None:
        self._rough.failure = share

    def may_fail(self) -> None:
        """Raises by chance."""
        if self._rough.fails():
            self._rough.count("failed launches")
            raise RuntimeError("injected failure of a launch")
