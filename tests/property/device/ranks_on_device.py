"""Ranks on a simulated device: what orders them is what they tell each other, and nothing else.

All ranks share one device object, as if each had a device: streams, threads and memory are a
rank's own, but where one keeps the pages of all, its slots are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.simulated.device import ConflictError
from testkit.simulated.threaded import FollowedDeque, following_locks
from tests.property.device.cache_on_device import CacheOnDevice, NotedArena, NotedIO
from tests.property.device.rough_device import RoughDevice
from tests.property.worlds import ranks_world
from tests.property.worlds.taint_world import Request
from tests.property.worlds.truncation_ranks import OneCopyRank, TruncationRank

from sglang_ext.tiers.disk.segments.fileio import FileIO  # isort: skip
from sglang_ext.tiers.host import HostArena  # isort: skip
from sglang_ext.tiers.store import LivePages, LoadTicket  # isort: skip


@contextmanager
def device_of_ranks(seed: int) -> Iterator[RoughDevice]:
    """A device for ranks, all of whose locks and threads have to be made in the context."""
    device = RoughDevice(seed)
    with following_locks(device), device.in_order():
        try:
            yield device
        finally:
            device.close()


class RankOnDevice(CacheOnDevice, TruncationRank):
    """A rank whose conversations overflow; it has many methods because its bases have.

    Args:
        number: of the rank.
    """

    is_alone = False

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, seed: int, *, number: int, **options: Any
    ) -> None:
        self.number = number
        with options["device"].of_rank(number):
            super().__init__(folder, patch, seed, **options)

    def one_round(self) -> None:
        """See `RankOfMany`; on the rank's own thread."""
        with self.device.of_rank(self.number):
            self.device.is_scheduler()
            super().one_round()

    def load_failed(self, req: Request) -> bool:
        """On any rank: they agree on it before the result of the batch is used."""
        self.cache.before_result([req])
        return req.discard_output_reason is not None


class OneCopyOnDevice(RankOnDevice, OneCopyRank):
    """One of which one keeps the pages of all; it has many methods because its bases have.

    A reading ends when the device is done with it, which is late by itself.
    """

    def _end_later(self, ticket: LoadTicket) -> None:
        self._end_load(ticket)

    @property
    def num_readings(self) -> int:
        """See `OneCopyRank`; one whose end was out of order is never over."""
        self.device.require_order()
        return super().num_readings


class StoreRankOnDevice(ranks_world.Rank):
    """A rank of `ranks_world`, whose loads are copies on a device, which ends them when it likes.

    It has many methods because `Rank` has.

    Args:
        device: that all ranks share.
    """

    def __init__(self, folder: Path, number: int, *args: Any, device: RoughDevice, **options: Any):
        self.simulated = device
        self._copies: dict[int, Any] = {}  # event behind those of pages, by identity
        with device.acting("assembly"), device.of_rank(number):
            super().__init__(folder, number, *args, **options)
            self.ended = FollowedDeque(device)  # type: ignore[assignment]
            built = device.hand_over()
        device.take_over(built)

    def _make_arena(self, *args: Any, **options: Any) -> HostArena:
        arena = NotedArena(*args, **options)
        self.simulated.add_arena(arena)
        arena.device = self.simulated
        return arena

    def _open_io(self, io: FileIO) -> FileIO:
        return NotedIO(self.simulated, io)

    def _cells(self, slots: Any) -> list[Any]:
        memory, cells_of = self.arena.slots, self.simulated.cells_of
        return [cell for slot in slots.tolist() for cell in cells_of(memory[slot])]

    def run(self, num_steps: int) -> None:
        """See `Rank`."""
        with self.simulated.of_rank(self.number):
            self.simulated.is_scheduler()
            super().run(num_steps)

    def step(self) -> None:
        """See `Rank`; nothing was out of order so far."""
        with self.simulated.in_order():
            super().step()

    @property
    def num_readings(self) -> int:
        """See `Rank`; one whose end was out of order is never over."""
        self.simulated.require_order()
        return super().num_readings

    def _save(self, *args: Any) -> bool:
        try:
            return super()._save(*args)
        except ConflictError:  # noted; the rank goes on until it looks
            return False

    def _fill(self, slots: Any, *args: Any) -> None:
        self.simulated.touch("saves", (), self._cells(slots))
        super()._fill(slots, *args)

    def _check_content(
        self, pages: LivePages, request: ranks_world.Request, first: int | None
    ) -> None:
        cells = self._cells(pages.ticket.slots)
        self.simulated.touch("looks at", cells, ())
        super()._check_content(pages, request, first)
        if first is not None:
            self.simulated.launch("copy", lambda: None, cells, ())
            self._copies[id(pages)] = self.simulated.record(self.simulated.current_stream())

    def _end_reading(self, pages: LivePages, request: ranks_world.Request) -> None:
        """When the device is done, on a thread of its own."""
        event = self._copies.pop(id(pages))
        self.simulated.when_done(event, partial(self._landed, pages, request))

    def _landed(self, pages: LivePages, request: ranks_world.Request) -> None:
        self._check_content(pages, request, None)
        self.store.end_load(pages.ticket)
