"""The worlds with the real cache, tree, linker, store and disk, on a simulated device.

As in `linker_on_device.py`, threads are real and ordered by what they share, and forwards by
events. What the cache copies on the device itself is noted where it runs. Now and then a copy or a
launch fails, and the device has no memory left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402

from sglang_ext.device.ports import DevicePort  # noqa: E402
from sglang_ext.tiers.disk.segments.fileio import FileIO  # noqa: E402
from sglang_ext.tiers.host import HostArena, Slots  # noqa: E402
from testkit.simulated.device import Cell, ConflictError, DeviceThreadError  # noqa: E402
from testkit.simulated.kernels import pool_cell  # noqa: E402
from testkit.simulated.threaded import FollowedDeque, following_locks  # noqa: E402
from tests.property.device.rough_device import RoughDevice, RoughLaunches  # noqa: E402
from tests.property.drafts.branching_world import BranchingWorld  # noqa: E402
from tests.property.drafts.late_world import LateWorld  # noqa: E402
from tests.property.test_pairs_interleavings import PairsWorld  # noqa: E402
from tests.property.worlds.queue_world import QueueWorld  # noqa: E402
from tests.property.worlds.taint_world import PAGE, Request, World  # noqa: E402
from tests.property.worlds.truncation_world import CONTEXT, TruncationWorld  # noqa: E402

TROUBLE = 0.02  # of the steps, at which the device's share of failures changes
FAILURES = (0.0, 0.0, 0.0, 0.02, 0.1)
SENDS, SENDS_OF_RESTORED, CLEARS = 0.02, 0.4, 0.5
AGAIN = 0.03  # of the steps, before which a prompt comes again in whole pages


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

    def __init__(self, device: RoughDevice, io: FileIO | None) -> None:
        self._device, self._io = device, io or FileIO()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FileIO`."""
        self._device.touch_slots(buffers, is_read=False)
        return self._io.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FileIO`."""
        self._device.touch_slots(buffers, is_read=True)
        return self._io.preadv(fd, buffers, offset)


class CacheOnDevice(World):
    """A world whose pool lies on a simulated device; see `World`.

    It has many methods because `World` has.

    Args:
        device: the one that ranks share; None where the world has one of its own.

    Attributes:
        is_alone: it may do what ranks would have to do all at once.
    """

    arena_type = NotedArena
    can_fail = True
    is_alone = True

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        device: RoughDevice | None = None,
        **options: Any,
    ) -> None:
        self.device = device or RoughDevice(seed + 3)
        self.kernels = RoughLaunches(self.device)
        self._mood = random.Random(seed + 4)
        self._restored = False
        with self.device.acting("assembly"), following_locks(self.device):
            self.forwards = self.device.new_stream(())
            super().__init__(folder, patch, seed, **options)
            self._follow_linker(self.cache.hier_linker)
            built = self.device.hand_over()
        self.device.take_over(built)

    def _follow_linker(self, linker: Any) -> None:
        linker._saves._completed = FollowedDeque(self.device)
        self._in_forward_order = linker._load_path.in_forward_order
        linker._load_path.in_forward_order = self.in_forward_order
        self._restore_pages = linker.restore_pages
        linker.restore_pages = self.restore_pages

    def _open_port(self) -> DevicePort:
        assert isinstance(self.arena, NotedArena)
        self.device.add_arena(self.arena)
        self.arena.device = self.device
        return self.device

    def _open_io(self, io: FileIO | None) -> FileIO:
        return NotedIO(self.device, io)

    def _cells(self, rows: torch.Tensor) -> list[Cell]:
        buffers = (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer)
        return [pool_cell(buffer, row) for buffer in buffers for row in rows.view(-1).tolist()]

    def at_rows(self, what: str, rows: torch.Tensor, *, writes: bool) -> None:
        """Queues it."""
        self.device.forward(what, self._cells(rows), writes=writes, stream=self.forwards)

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

    # ---- pages that are restored, and rows that are sent ----

    def restore_pages(self, *args: Any, **kwargs: Any) -> bool:
        """As the linker's."""
        self._restored = True
        done: bool = self._restore_pages(*args, **kwargs)
        return done

    def insert(self, req: Request, up_to: int) -> None:
        """As the world's; what was computed is now and then sent to another server."""
        computed, before = self.device.record(self.forwards), self._restored
        self._restored = False
        super().insert(req, up_to)
        share = SENDS_OF_RESTORED if self._restored else SENDS
        self._restored |= before
        if self._mood.random() < share:
            self.send(self.rows_of(req, 0, up_to), computed)

    def send(self, rows: torch.Tensor, computed: Any) -> None:
        """A thread reads rows past the streams, behind the forward that computed them.

        What was put in place of that it has to wait for besides; see
        `hooks/disaggregation.py`. Whether there is anything to wait for depends on how far the
        device is, so it is no count: ranks compare those.
        """
        device = self.device
        restored, clock = self.cache.hier_linker.restoring(), device.hand_over()
        with device.acting("transfer"):
            device.take_over(clock)
            computed.synchronize()
            if restored is not None:
                restored.synchronize()
            device.touch("sent", self._cells(rows), ())
            sent = device.hand_over()
        device.take_over(sent)  # rows change hands behind that

    # ---- steps ----

    def step(self) -> None:
        """One thing happens, and nothing was out of order so far.

        Behind a page that was restored, DRAM is cleared now and then: its slot is wanted at once.
        """
        if self._mood.random() < TROUBLE:
            self.device.failure = self._mood.choice(FAILURES)
        with self.device.in_order():
            super().step()
            restored, self._restored = self._restored, False
            if restored and self.is_alone and self._mood.random() < CLEARS:
                self.cache.clear_storage_backend()

    def drain(self) -> None:
        """See `World`."""
        self.device.failure = 0.0
        with self.device.in_order():
            super().drain()


class TruncationOnDevice(CacheOnDevice, TruncationWorld):
    """Prompts that are cut; it has many methods because `TruncationWorld` has.

    Some come again when they have left the device: of whole pages, the last one is restored.
    """

    def step(self) -> None:
        """See `CacheOnDevice`."""
        if self._mood.random() < AGAIN and self.talks and len(self.waiting) < 4:
            tokens, key = self._mood.choice(self.talks)
            num = min(len(tokens), CONTEXT) // PAGE * PAGE
            if num:
                self.cache.evict(EvictParams(num_tokens=PAGE * num))
                self.arrive(tokens[:num], key=key, num_new=0)
        super().step()


class QueueOnDevice(CacheOnDevice, QueueWorld):
    """A long queue over a slow disk; it has many methods because `QueueWorld` has."""


class PairsOnDevice(CacheOnDevice, PairsWorld):
    """Keys of pairs of tokens; it has many methods because `PairsWorld` has."""


class LateOnDevice(CacheOnDevice, LateWorld):
    """Guesses heard of one step late; it has many methods because `LateWorld` has.

    What the device has not done yet is a matter of its streams here.
    """

    may_lag = False


class BranchesOnDevice(CacheOnDevice, BranchingWorld):
    """The same of guesses that branch; it has many methods because `BranchingWorld` has."""

    may_lag = False


def require_found(make: Callable[[int], CacheOnDevice], num_worlds: int = 20) -> None:
    """Runs worlds with a mistake in them, one by one, until one has found it.

    Raises:
        AssertionError: none did.
    """
    for seed in range(num_worlds):
        world = make(seed)
        try:
            for _ in range(500):
                world.step()
            world.drain()
        except ConflictError:
            return
        except DeviceThreadError:  # something else that the mistake breaks
            continue
        finally:
            world.close()
    raise AssertionError("the mistake is not found")
