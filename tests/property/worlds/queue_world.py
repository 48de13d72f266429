"""A scheduler with a long queue over the real cache, linker and page store, on a disk that is slow.

Requests arrive, change places, are aborted, retracted and admitted in the queue's order; the device
and the tiers are flushed and cleared under them. `taint_world` has the device, the tree and the
check that every request attends to its own prompt and to nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    QUEUED,
    SPILLING,
    WRITE_DROPPED,
    Rows,
)
from tests.property.worlds.taint_world import PAGE, Request, TextScheduler, World

MAX_WAITING, MAX_RUNNING = 14, 3


class SlowDisk(FileIO):
    """Reads that take a while, and now and then fail."""

    def __init__(self, rng: random.Random) -> None:
        self.failing = 0.0
        self._rng = rng

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(self._rng.choice((0.0, 0.001, 0.004)))
        if self._rng.random() < self.failing:
            raise OSError("injected")
        return super().preadv(fd, buffers, offset)


class QueueWorld(TextScheduler, World):
    """One server with a queue; `step` does one random thing."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        with_disk: bool = True,
        disk_bytes: int = 16 << 20,
        policy: str = "write_through",
        prefetch_policy: str = "wait_complete",
    ) -> None:
        self.io = SlowDisk(random.Random(seed + 5))
        super().__init__(
            folder,
            patch,
            seed,
            policy=policy,
            lossy=False,
            host_pages=24,
            device_pages=40,
            with_disk=with_disk,
            disk_bytes=disk_bytes,
            io=self.io,
            placement=PolicyConfig(),
            prefetch_policy=prefetch_policy,
        )
        self.parents: dict[str, str] = {}  # of every page of every prompt, by hash
        self.num_held = self.num_evictions = self.num_unknown_links = 0
        self.unreachable: list[str] = []  # pages that lead to another and left DRAM before it
        books: Any = self.store._books
        self._victims = books.room.victims
        books.room.victims = self._watched_victims
        self.cache.bind_scheduler(self)

    @property
    def waiting_queue(self) -> list[Request]:
        """What the plugin asks the scheduler for."""
        return self.waiting

    def tokens(self) -> list[int]:
        """A prompt of one of a dozen documents, which share their heads in pairs."""
        document, length = self.rng.randrange(12), self.rng.randint(17, 36)
        return [
            1 + ((document // 2 if at < 8 else document) * 7 + at * 3) % 120 for at in range(length)
        ]

    # ---- the scheduler ----

    def step(self) -> None:
        kinds, weights = zip(*_WEIGHTS.items(), strict=True)
        self.do(self.rng.choices(kinds, weights)[0])

    def do(self, kind: str) -> None:
        """Does one thing, if it can be done now."""
        if getattr(self, f"_do_{kind}")() is not False:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def schedule(self) -> None:
        """One step of the scheduler: admits from the head of the queue what may run."""
        self.cache.check_hicache_events()
        for req in list(self.waiting):
            if len(self.running) >= MAX_RUNNING:
                return
            if not self.cache.check_prefetch_progress(req.cache_request_handle):
                self.num_held += 1
                continue
            self.admit(req, self.rng.choice((None, 8, 12)))

    def _do_arrive(self) -> bool | None:
        if len(self.waiting) >= MAX_WAITING:
            return False
        req = self.arrive(exact=False)
        self.note_path(req)
        return None

    def _do_schedule(self) -> None:
        self.schedule()

    def _do_abort(self) -> bool | None:
        """A request that waits is aborted."""
        if not self.waiting:
            return False
        req = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        self.cache.release_aborted_request(req.cache_request_handle)
        return None

    def _do_reorder(self) -> bool | None:
        """The scheduler sorts its queue in another way."""
        if len(self.waiting) < 2:
            return False
        if self.rng.random() < 0.5:
            self.rng.shuffle(self.waiting)
        else:
            self.waiting.insert(0, self.waiting.pop())
        return None

    def _do_events(self) -> None:
        super()._do_events()
        self.check_plans()
        assert not self.unreachable, self.unreachable

    def _do_clear(self) -> None:
        """`/hicache/storage-backend/clear`, in the middle of saves and promotions."""
        self.cache.clear_storage_backend()

    def _do_trouble(self) -> None:
        self.io.failing = self.rng.choice((0.0, 0.0, 0.05))

    def retract(self, req: Request) -> None:
        super().retract(req)
        self.waiting.remove(req)
        handle = req.cache_request_handle
        req.cache_request_handle = dataclasses.replace(handle, attempt_id=handle.attempt_id + 1)
        self.note_path(req)
        self.enqueue(req)

    def finish(self, req: Request) -> None:
        self.note_path(req)
        super().finish(req)

    # ---- checks ----

    def note_path(self, req: Request) -> None:
        keys = self.keys(req.tokens)
        for parent, child in itertools.pairwise(keys):
            self.parents[child] = parent

    def check_plans(self) -> None:
        """Plans pin no more than they may, and only what waits has any."""
        room, books = self.cache.waiting_room, self.store._books
        pinned = int((books.pins._by_slot > 0).sum())
        assert pinned == books.pins.num_pages <= books.pins.max_lone_plan_pages
        handles = {req.cache_request_handle for req in self.waiting}
        assert room._waiting.keys() <= handles
        assert room._plans.planned.keys() <= room._by_number.keys()
        for waiting in room._plans.planned.values():
            assert waiting.plan is not None, waiting  # a save may have taken its room since

    def _watched_victims(self, count: int, tenant: int | None = None) -> Rows:
        """What leaves DRAM; no page may go before one that it leads to and that could go too.

        A page that was lost (unreadable, or its segment reclaimed) and came back is not known to
        lead to what outlived it until that is used again; such pairs are counted.
        """
        victims: Rows = self._victims(count, tenant)
        books = self.store._books
        could_go = self._could_go()
        places = {key: place for place, key in enumerate(self._names(victims))}
        rows = dict(zip(places, victims.tolist(), strict=True))
        for child, row in zip(self._names(could_go), could_go.tolist(), strict=True):
            parent = self.parents.get(child)
            if parent in places and places.get(child, len(places)) > places[parent]:
                if rows[parent] not in books.table.parents.above(row)[:1]:
                    self.num_unknown_links += 1
                    continue
                # Raised later: this runs on the store's threads too.
                self.unreachable.append(f"{child[:8]} stays, {parent[:8]}, which leads to it, goes")
        self.num_evictions += len(victims)
        return victims

    def _could_go(self) -> Rows:
        """Pages that nothing keeps in DRAM."""
        table, writing = self.store._books.table, self.store._books.writing
        rows = table.index.lru_tail(table.arena.num_slots, FILLING | SPILLING | QUEUED)
        may = ~self.arena.pinned(table.index.host_slot[rows])
        if writing.through or writing.back:
            may &= (table.index.flags[rows] & (ON_DISK | WRITE_DROPPED)) != 0
        return rows[may]

    def _names(self, rows: Rows) -> list[str]:
        return [row.tobytes().hex() for row in self.store._books.table.index.keys(rows)[0]]

    # ---- the end ----

    def drain(self) -> None:
        """Every request is admitted and ends: nobody waits for ever."""
        self.io.failing = 0.0
        deadline_s = time.monotonic() + 300
        while self.running or self.waiting:
            assert time.monotonic() < deadline_s, self.stuck()
            for req in list(self.running):
                if req in self.running:
                    self.go_on(req)
            self.schedule()
        self.settle()
        self.check_nothing_waits()
        self._do_flush()

    def stuck(self) -> str:
        room = self.cache.waiting_room
        plans = {
            handle.rid: None if waiting.plan is None else vars(waiting.plan)  # type: ignore[attr-defined]
            for handle, waiting in room._waiting.items()
        }
        return f"requests are not admitted: {plans}, {self.store.stats()}"

    def check_nothing_waits(self) -> None:
        room, books = self.cache.waiting_room, self.store._books
        assert not room._waiting
        assert not room._plans.planned
        assert not room._by_number
        assert books.pins.num_pages == 0
        assert books.table.in_flight.num == 0
        assert not books.table.waits
        # With write_back the spiller may clean more pages at any time, and pins them meanwhile.
        self.wait_for(lambda: not self.arena._pins.any() and self.arena._num_deferred == 0)
        policy: Any = books.table.policy
        assert len(policy.queue) == 0
        assert not policy.wanted(books.table.index.rows()).any()
        promoter = self.store._promoter
        assert promoter is None or not promoter._reads


_WEIGHTS = {
    "arrive": 16, "schedule": 24, "go_on": 40, "events": 6, "evict": 3, "abort": 3, "reorder": 2,
    "retract": 1, "flush": 0.3, "clear": 0.3, "trouble": 1, "breathe": 4,
}  # fmt: skip
assert PAGE == 4
