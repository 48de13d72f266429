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

from sglang_ext.provenance.request_state import state_of
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.policy.cost_model import OTHERS_WEIGHT, CostModel
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
_UNMEASURED_S = 0.05  # of waiting, until speeds are known
_ASKED_AGAIN_S = 0.001  # a decision to go on waiting may be so old
# Of a token's prefill, and of a page's reading, writing and copying to the device, that a server
# under `cost` is told of.
_SPEEDS_S = (1e-5, 3e-3, 0.1), (1e-4, 2e-3), (1e-4, 1e-2), (1e-5, 1e-5, 2e-2)


class SlowDisk(FileIO):
    """Reads, and where asked for writes, that take a while, and now and then fail."""

    def __init__(self, rng: random.Random, *, writes: bool = False) -> None:
        self.failing = 0.0
        self._rng, self._writes = rng, writes

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._writes:
            time.sleep(self._rng.choice((0.0, 0.004, 0.02)))
            if self._rng.random() < self.failing:
                raise OSError("injected")
        return super().pwritev(fd, buffers, offset)

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
        by_cost = prefetch_policy == "cost"
        self.io = SlowDisk(random.Random(seed + 5), writes=by_cost)
        self.cost = CostModel(_UNMEASURED_S) if by_cost else None
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
            cost=self.cost,
        )
        self.parents: dict[str, str] = {}  # of every page of every prompt, by hash
        self.num_held = self.num_evictions = self.num_unknown_links = self.num_reused = 0
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
            now_s = time.monotonic()
            if not self.cache.check_prefetch_progress(req.cache_request_handle):
                self.num_held += 1
                self.check_wait(req, now_s)
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
        if self.cost is None:
            return
        token_s, page_s, write_s, load_s = (self.rng.choice(each) for each in _SPEEDS_S)
        for num_pages in (1, 2, 4, 8) * 2:
            num_bytes = num_pages * self.layout.kv_bytes
            self.cost.note_prefill([(num_pages * PAGE, 0)], token_s * num_pages * PAGE)
            self.cost.note_read(num_bytes, page_s * num_pages)
            self.cost.note_write(num_bytes, write_s * num_pages)
            self.cost.note_load(num_bytes, load_s * num_pages)

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

    def runs(self, req: Request) -> None:
        """As SGLang's batch does; what is reused and what is counted as missed are the prompt."""
        state = state_of(req)
        if state.is_counted:
            return
        req.cached_tokens = req.prefix_len
        self.cache.misses.runs(req, self.cache.space_of(req))
        assert sum(state.by_tier(req.prefix_len).values()) == req.prefix_len
        num_whole = (req.prompt_len - 1) // PAGE * PAGE
        assert max(req.prefix_len, num_whole) == req.prefix_len + sum(state.missed.values())
        self.num_reused += req.prefix_len

    # ---- checks ----

    def check_wait(self, req: Request, now_s: float) -> None:
        """Under `cost` a request that was held then has not waited longer than it may."""
        waiting = self.cache.waiting_room.find(req.cache_request_handle)
        estimate = None if waiting is None else waiting.estimate
        if estimate is None or estimate.held_since_s is None:
            return
        limit_s = _UNMEASURED_S
        if estimate.budget_s is not None:
            limit_s = (1 + OTHERS_WEIGHT) * estimate.budget_s
        assert now_s - estimate.held_since_s <= limit_s + _ASKED_AGAIN_S, (waiting, now_s)

    def note_path(self, req: Request) -> None:
        keys = self.keys(req.tokens)
        for parent, child in itertools.pairwise(keys):
            self.parents[child] = parent

    def check_plans(self) -> None:
        """Plans pin no more than they may, and only what waits has any: none outlives its request.

        But for the one that measures the disk, under `cost`.
        """
        room, books = self.cache.waiting_room, self.store._books
        pinned = int((books.pins._by_slot > 0).sum())
        assert pinned == books.pins.num_pages <= books.pins.max_lone_plan_pages
        handles = {req.cache_request_handle for req in self.waiting}
        assert room._waiting.keys() <= handles
        assert room._plans.planned.keys() <= room._by_number.keys()
        for waiting in room._plans.planned.values():
            assert waiting.plan is not None, waiting  # a save may have taken its room since
        owned = [waiting.plan for waiting in room._plans.planned.values()]
        if room._decider is not None:
            owned.append(room._decider._probe)
        assert books.pins._plans.keys() <= set(owned)

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
        self.wait_for(self.measures_nothing)
        self.settle()
        self.check_nothing_waits()
        self._do_flush()

    def measures_nothing(self) -> bool:
        """Whether no page is read, or stays pinned, only to see how fast the disk is."""
        self.cache.check_hicache_events()
        decider = self.cache.waiting_room._decider
        return decider is None or decider._probe is None

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
        if room._decider is not None:
            assert room._decider.num_waiting == 0
            assert room._decider._ahead_s == 0.0
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
        assert not self.store.counters.snapshot().get("miss_report_failures")


_WEIGHTS = {
    "arrive": 16, "schedule": 24, "go_on": 40, "events": 6, "evict": 3, "abort": 3, "reorder": 2,
    "retract": 1, "flush": 0.3, "clear": 0.3, "trouble": 1, "breathe": 4,
}  # fmt: skip
assert PAGE == 4
