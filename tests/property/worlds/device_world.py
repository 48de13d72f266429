"""The real linker, copier, load path and save thread on a simulated device, and a scheduler.

Every row that a forward reads is compared with what a CPU loads, at the time the forward runs; the
simulated device sees to it that the order does not come from luck. Rows change hands as soon as
SGLang would hand them on: while the forward that wrote them is still queued. Slots are overwritten
as soon as their pins are gone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.copier import CopyError, PageCopier  # noqa: E402
from sglang_ext.device.transfers import LoadJob, Place, SaveJob  # noqa: E402
from sglang_ext.kernels import rope as rope_kernels  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from testkit.simulated_device import (  # noqa: E402
    Clock,
    ConflictError,
    SimulatedDevice,
)
from testkit.simulated_kernels import SimulatedKernels, pool_cell  # noqa: E402
from tests.property.worlds.device_parts import (  # noqa: E402
    CONTENTS,
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    PAGES,
    SLOTS,
    Batch,
    Load,
    Pages,
    bits_of,
    make_pool,
    make_ropes,
)

RING_PAGES = 3  # pages of a layer that a buffer of the ring holds


@dataclass
class DeviceWorld:
    """One linker on a simulated device; `step` does one random thing."""

    seed: int
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.device = SimulatedDevice(self.seed + 1)
        self.kernels = SimulatedKernels(self.device, rope_kernels)
        self.pool, self.shadow, origin = (make_pool(number) for number in range(3))
        self.layout = self.pool.layout(PAGE)
        object.__setattr__(self.layout, "max_corrections", 20)
        self.arena = np.zeros((SLOTS, self.layout.slot_bytes), np.uint8)
        self.device.add_memory(self.arena, "slot", self.layout.slot_bytes)
        ropes = make_ropes()
        plain = PageCopier(origin, self.layout, ropes, self.arena, mode="pre", kernels=rope_kernels)
        self.plain = PageCopier(
            self.shadow, self.layout, ropes, self.arena, mode="pre", kernels=rope_kernels
        )
        copier = PageCopier(
            self.pool, self.layout, ropes, self.arena, mode="pre", kernels=self.kernels
        )
        self.contents = self._contents(plain)
        for slot in range(SLOTS):
            self.arena[slot] = self.contents[slot % CONTENTS]
        self.unpinned: list[tuple[list[int], Clock]] = []
        self.store = Pages(self)
        with self.device.acting("assembly"):
            self.forwards = self.device.new_stream(())
            self.linker = HierKVLinker(
                self.store,  # type: ignore[arg-type]
                copier,
                num_layers=LAYERS,
                page_size=PAGE,
                kv_pool=None,
                port=self.device,
                forward_stream=self.forwards,
                ring_bytes=4 * RING_PAGES * max(copier.layer_bytes),
            )
            built = self.device.hand_over()
        for thread in ("scheduler", "load", "save"):
            with self.device.acting(thread):
                self.device.take_over(built)
        self.linker.loads.start = self._start  # type: ignore[assignment,method-assign]
        self.started: list[tuple[Any, Clock]] = []
        self.free_slots, self.free_pages = list(range(SLOTS)), list(range(1, PAGES))
        self.queued: list[Load] = []
        self.batches: list[Batch] = []
        self.running: list[Load] = []
        self.offered: list[tuple[SaveJob, Load, list[int], Clock]] = []
        self.set_aside: list[int] = []
        self.saving: Load | None = None
        self.next_rid = 0

    def _contents(self, copier: PageCopier) -> list[np.ndarray]:
        """Pages of position 0, PAGE, ...: some exact, some with corrections, some kept bound."""
        generator = torch.Generator().manual_seed(self.seed)
        pages = []
        for number in range(CONTENTS):
            rows = np.arange(PAGE, 2 * PAGE)
            for k, v in zip(copier.pool.k, copier.pool.v, strict=True):
                values = torch.randn(PAGE, HEADS, DIM, generator=generator)
                values[..., 0] *= (1.0, 30.0, 3000.0)[number % 3]
                k[rows] = values.to(k.dtype)
                v[rows] = torch.randn(PAGE, HEADS, DIM, generator=generator).to(v.dtype)
            copier.save(rows, number * PAGE, np.zeros(1, np.int64))
            pages.append(self.arena[0].copy())
        return pages

    # ---- threads ----

    def _start(self, *batch: Any) -> None:
        self.started.append((batch, self.device.hand_over()))

    def pump(self) -> bool | None:
        """The load thread gets to its next batch."""
        if not self.started:
            return False
        batch, clock = self.started.pop(0)
        with self.device.acting("load"):
            self.device.take_over(clock)
            with self._failing(0.15):
                self.linker.loads.load(*batch)
            told = self.device.hand_over()  # the counter's lock
        self.device.take_over(told)
        return None

    @contextmanager
    def _failing(self, share: float) -> Iterator[None]:
        """In which now and then a launch fails, or the device has no memory left."""
        if self.rng.random() < share:
            if self.rng.random() < 0.3:
                self.device.memory_left = 0
            else:
                self.kernels.fails_in = self.rng.randrange(12)
        try:
            yield
        finally:
            self.kernels.fails_in = self.device.memory_left = None

    # ---- what the scheduler does ----

    def step(self) -> None:
        name = self.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if getattr(self, name)() is not False:
            self.counts[name] = self.counts.get(name, 0) + 1
        self.device.require_order()

    def load(self) -> bool | None:
        """A request with some pages is admitted."""
        load = self._admit(self._queue)
        if load is None:
            return False
        self.queued.append(load)
        return None

    def _queue(self, ticket: Any, rows: torch.Tensor, position: int) -> None:
        job = LoadJob(SimpleNamespace(ticket=ticket), rows, position)  # type: ignore[arg-type]
        self.next_rid += 1
        self.linker._pending_loads[str(self.next_rid)] = job

    def abort(self) -> bool | None:
        """A request whose load was not begun is given up."""
        if not self.queued:
            return False
        at = self.rng.randrange(len(self.queued))
        assert self.linker.cancel_queued_load(list(self.linker._pending_loads)[at])
        self._give_back(self.queued.pop(at))
        return None

    def retract(self) -> bool | None:
        """A request that runs, perhaps one whose pages still come, gives its rows back."""
        if not self.running:
            return False
        self._give_back(self.running.pop(self.rng.randrange(len(self.running))))
        return None

    def flush(self) -> None:
        """The device is emptied, as soon as SGLang does it: all forwards are launched."""
        while self.batches:
            self.forward()
        while self.offered:
            self.save()
        while self.running:
            self.retract()
        self.linker.reset()
        while self.queued:
            self._give_back(self.queued.pop())

    def evict(self) -> bool | None:
        """Pages leave DRAM for others."""
        slots = [slot for slot in self.free_slots if self.rng.random() < 0.2]
        if not slots:
            return False
        clock = self.device.hand_over()
        with self.device.acting("promoter"):
            self.device.take_over(clock)
            self._overwrite(slots)
            came = self.device.hand_over()
        self.device.take_over(came)
        return None

    def _overwrite(self, slots: list[int]) -> None:
        for slot in slots:
            self.device.touch("new page", (), self.device.cells_of(self.arena[slot]))
            self.arena[slot] = self.contents[self.rng.randrange(CONTENTS)]

    def _admit(self, queue: Any, most: int = 7) -> Load | None:
        first = self.rng.randrange(CONTENTS)
        wanted = [number % CONTENTS for number in range(first, first + self.rng.randint(1, most))]
        wanted = wanted[: CONTENTS - first]
        slots = []
        for number in wanted:
            found = [s for s in self.free_slots if self._content_of(s) == number and s not in slots]
            if not found:
                break
            slots.append(self.rng.choice(found))
        if not slots or len(self.free_pages) < len(slots) + 4:
            return None
        self.rng.shuffle(self.free_pages)
        pages = [self.free_pages.pop() for _ in slots]
        rows = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
        self._touch_rows(rows)
        where = np.array(slots)
        job = self.plain.prepare_load(where, rows.numpy(), first * PAGE)
        for layer in range(LAYERS):
            self.plain.load_layer(job, layer)
        expected = [
            (k[rows].clone(), v[rows].clone())
            for k, v in zip(self.shadow.k, self.shadow.v, strict=True)
        ]
        for slot in slots:
            self.free_slots.remove(slot)
        queue(SimpleNamespace(slots=where.astype(np.int32)), rows, first * PAGE)
        return Load(first * PAGE, rows, expected)

    def _touch_rows(self, rows: torch.Tensor) -> None:
        """SGLang makes the tensor of rows on its own stream, some time before it is used."""
        self.device._kept.append(rows)
        self.device.launch("make rows", lambda: None, (), [("rows", id(rows))])

    def _content_of(self, slot: int) -> int:
        return next(
            number
            for number in range(CONTENTS)
            if np.array_equal(self.contents[number], self.arena[slot])
        )

    def begin(self) -> bool | None:
        """A batch begins."""
        if not self.queued:
            return False
        index = self.linker.start_layer_wise_loading()
        self.batches.append(Batch(index, self.queued))
        self.queued = []
        return None

    def forward(self) -> bool | None:
        """The batch's forward is launched, and after it the loads are ended."""
        if not self.batches:
            return False
        while self.started:
            self.pump()
        batch = self.batches.pop(0)
        device, counter = self.device, self.linker.layer_done_counter
        device.wait(self.forwards, device.record(device.current_stream()))
        counter.set_consumer(batch.index)
        failed = counter._batches[batch.index].error is not None
        with device.on(self.forwards):
            for layer in range(LAYERS):
                counter.wait_until(layer)
                for load in batch.loads:
                    self._read(load, layer, compare=not failed)
        counter.set_consumer(-1)
        if self.linker.finish_layer_wise_loading(batch.index):
            self.running += batch.loads
        else:
            self.counts["failed"] = self.counts.get("failed", 0) + 1
            for load in batch.loads:
                self._give_back(load)
        return None

    def _read(self, load: Load, layer: int, *, compare: bool = True) -> None:
        k, v, (want_k, want_v) = self.pool.k[layer], self.pool.v[layer], load.expected[layer]

        def read() -> None:
            if not compare:
                return
            same = torch.equal(bits_of(k[load.rows]), bits_of(want_k))
            assert same, "a forward read other K than a CPU loads"
            assert torch.equal(bits_of(v[load.rows]), bits_of(want_v)), "a forward read other V"

        rows = load.rows.tolist()
        cells = [pool_cell(tensor, row) for tensor in (k, v) for row in rows]
        self.device.launch("forward reads", read, cells, ())

    def decode(self) -> bool | None:
        """A step of running requests; rows of one that ends are given back while it is queued."""
        if not self.running:
            return False
        load = self.running.pop(self.rng.randrange(len(self.running)))
        device = self.device
        device.wait(self.forwards, device.record(device.current_stream()))
        with device.on(self.forwards):
            for layer in range(LAYERS):
                self._read(load, layer)
                cells = [
                    pool_cell(tensor, row)
                    for tensor in (self.pool.k[layer], self.pool.v[layer])
                    for row in load.rows.tolist()
                ]
                device.launch("forward writes", self._spoiler(load, layer), (), cells)
        self._give_back(load)
        return None

    def _spoiler(self, load: Load, layer: int) -> Any:
        def write() -> None:
            self.pool.k[layer][load.rows] = -77.0
            self.pool.v[layer][load.rows] = -77.0

        return write

    def _give_back(self, load: Load) -> None:
        self.free_pages += sorted({row // PAGE for row in load.rows.tolist()})

    def restore(self) -> bool | None:
        """A prompt's last page is put in place of what was recomputed; then a step reads it."""

        done = False

        def restore(ticket: Any, rows: torch.Tensor, position: int) -> None:
            hashes = np.zeros((1, 32), np.uint8)
            nonlocal done
            with self._failing(0.3):
                done = self.linker.restore_pages(
                    ticket,
                    None,  # type: ignore[arg-type]
                    hashes,
                    rows,
                    position,
                )

        load = self._admit(restore, most=1)
        if load is None:
            return False
        if done:
            self.running.append(load)
        else:
            self.counts["failed restores"] = self.counts.get("failed restores", 0) + 1
            self._give_back(load)
        return None

    def offer(self) -> bool | None:
        """A running request's pages are to be saved; until they are, its rows stay its own."""
        if not self.running:
            return False
        load = self.running[self.rng.randrange(len(self.running))]
        num_pages = len(load.rows) // PAGE
        if len(self.free_slots) < num_pages + 12:
            return False
        self.running.remove(load)
        slots = [self.free_slots.pop() for _ in range(num_pages)]
        device = self.device
        events = self.linker._save_path.ready_events()
        space: Any = SimpleNamespace(digest=bytes(32), lora=bytes(32))
        hashes = np.zeros((num_pages, 32), np.uint8)
        epoch = self.linker._saves._epoch
        job = SaveJob(Place(space, load.position, hashes[:0]), hashes, load.rows, events, epoch)
        self.offered.append((job, load, slots, device.hand_over()))
        return None

    def save(self) -> bool | None:
        """The save thread gets to its next job; now and then a launch fails."""
        if not self.offered:
            return False
        job, self.saving, self.set_aside, clock = self.offered.pop(0)
        with self.device.acting("save"), self._failing(0.25):
            self.device.take_over(clock)
            if not self.linker._saves.save(job):
                self.counts["failed saves"] = self.counts.get("failed saves", 0) + 1
            told = self.device.hand_over()
        self.device.take_over(told)
        self.running.append(self.saving)
        return None

    def published(self, slots: np.ndarray) -> None:
        """What is published is what a load would give back."""
        load = self.saving
        assert load is not None
        for slot in slots.tolist():
            self.device.touch("published", self.device.cells_of(self.arena[slot]), ())
        try:
            job = self.plain.prepare_load(slots, load.rows.numpy(), load.position)
        except CopyError as error:
            raise ConflictError(f"published before it was whole: {error}") from error
        for layer, (want_k, want_v) in enumerate(load.expected):
            self.plain.load_layer(job, layer)
            assert torch.equal(bits_of(self.shadow.k[layer][load.rows]), bits_of(want_k))
            assert torch.equal(bits_of(self.shadow.v[layer][load.rows]), bits_of(want_v))

    # ---- everything else ----

    def run(self) -> None:
        """The device gets some work done."""
        self.device.run(self.rng.choice((1, 5, 40)))

    def deliver(self) -> None:
        """What follows landed loads is done."""
        self.device.deliver()

    def reuse(self) -> bool | None:
        """Another page comes to slots whose pins are gone."""
        if not self.unpinned:
            return False
        slots, clock = self.unpinned.pop(0)
        with self.device.acting("promoter"):
            self.device.take_over(clock)
            self._overwrite(slots)
            came = self.device.hand_over()
        self.device.take_over(came)  # a page is looked up under the store's lock
        self.free_slots += slots
        return None

    def settle(self) -> None:
        """Everything ends, and the books are right."""
        while self.queued or self.batches:
            self.begin()
            self.forward()
        while self.offered:
            self.save()
        while self.running:
            self.decode()
        self.device.run_all()
        self.device.deliver(everything=True)
        while self.unpinned:
            self.reuse()
        self.device.require_order()
        assert sorted(self.free_slots) == list(range(SLOTS))
        assert sorted(self.free_pages) == list(range(1, PAGES))

    def close(self) -> None:
        """Ends the linker's threads."""
        with self.device.acting("end"):
            self.linker.close()


_WEIGHTS = {
    "load": 20, "begin": 12, "pump": 12, "forward": 12, "decode": 12, "restore": 4, "offer": 10,
    "save": 10, "run": 16, "deliver": 8, "reuse": 12, "abort": 3, "retract": 3, "flush": 1,
    "evict": 3,
}  # fmt: skip
