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
from typing import Any, ClassVar

import numpy as np
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.copier import CopyError, PageCopier  # noqa: E402
from sglang_ext.device.layout import PageLayout  # noqa: E402
from sglang_ext.device.pools import DevicePool  # noqa: E402
from sglang_ext.device.transfers import LoadJob, Place, SaveJob  # noqa: E402
from sglang_ext.kernels import rope as rope_kernels  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from testkit.simulated.device import (  # noqa: E402
    Clock,
    ConflictError,
    SimulatedDevice,
)
from testkit.simulated.kernels import SimulatedKernels, pool_cell  # noqa: E402
from tests.long_form import count  # noqa: E402
from tests.property.device.device_parts import (  # noqa: E402
    CONTENTS,
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    PAGES,
    SLOTS,
    Batch,
    Load,
    More,
    Offer,
    Pages,
    bits_of,
    make_pool,
    make_ropes,
)

RING_PAGES = 3  # pages of a layer that a buffer of the ring holds
STEPS = count(500, 100000)  # in all worlds of a kind together
STEPS_A_WORLD = 150
# What worlds of any kind must have done, several times each.
MUST_HAPPEN = (
    *("load", "forward", "decode", "restore", "save", "reuse", "failed", "failed restores"),
    *("failed saves", "abort", "retract", "flush", "evict", "loads at once"),
    *("loads without memory", "no memory on save", "failed copies on load"),
    "failed copies on save",
)


@dataclass
class DeviceWorld:
    """One linker on a simulated device; `step` does one random thing.

    It has many methods because each is one thing that happens, and a hybrid's world replaces some.
    """

    seed: int
    counts: dict[str, int] = field(default_factory=dict)

    num_layers: ClassVar[int] = LAYERS  # of the model
    num_slots: ClassVar[int] = SLOTS
    num_rings: ClassVar[int] = 1
    make_ropes: ClassVar[Any] = staticmethod(make_ropes)
    weights: ClassVar[dict[str, int]] = {
        "load": 20, "begin": 12, "pump": 12, "forward": 12, "decode": 12, "restore": 4,
        "offer": 24, "save": 14, "run": 16, "deliver": 8, "reuse": 12, "abort": 3, "retract": 3,
        "flush": 1, "evict": 3,
    }  # fmt: skip

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.device = SimulatedDevice(self.seed + 1)
        self.kernels = SimulatedKernels(self.device, rope_kernels)
        self.pool, self.shadow, origin = (self._make_pool() for _ in range(3))
        self.layout = self._layout()
        self.arena = np.zeros((self.num_slots, self.layout.slot_bytes), np.uint8)
        self.device.add_memory(self.arena, "slot", self.layout.slot_bytes)
        ropes = self.make_ropes()
        plain = PageCopier(origin, self.layout, ropes, self.arena, mode="pre", kernels=rope_kernels)
        self.plain = PageCopier(
            self.shadow, self.layout, ropes, self.arena, mode="pre", kernels=rope_kernels
        )
        copier = PageCopier(
            self.pool, self.layout, ropes, self.arena, mode="pre", kernels=self.kernels
        )
        self.contents = self._contents(plain)
        more = self._parts(copier)
        for slot in range(self.num_slots):
            self.arena[slot] = self.contents[slot % len(self.contents)]
        self.unpinned: list[tuple[list[int], Clock]] = []
        self.store = Pages(self)
        with self.device.acting("assembly"):
            self.forwards = self.device.new_stream(())
            self.linker = HierKVLinker(
                self.store,  # type: ignore[arg-type]
                copier,
                num_layers=self.num_layers,
                page_size=PAGE,
                kv_pool=None,
                port=self.device,
                forward_stream=self.forwards,
                ring_bytes=self.num_rings * 4 * RING_PAGES * max(copier.layer_bytes),
                **more,
            )
            built = self.device.hand_over()
        for thread in ("scheduler", "load", "save"):
            with self.device.acting(thread):
                self.device.take_over(built)
        self.linker.loads.start = self._start  # type: ignore[assignment,method-assign]
        self.started: list[tuple[Any, Clock]] = []
        self.free_slots, self.free_pages = list(range(self.num_slots)), list(range(1, PAGES))
        self.queued: list[Load] = []
        self.batches: list[Batch] = []
        self.running: list[Load] = []
        self.offered: list[Offer] = []
        self.saving: Offer | None = None
        self.next_rid = 0

    def _make_pool(self) -> DevicePool:
        return make_pool()

    def _layout(self) -> PageLayout:
        """Of the pages, with room for few corrections."""
        layout = self.pool.layout(PAGE)
        object.__setattr__(layout, "max_corrections", 20)
        return layout

    def _parts(self, copier: PageCopier) -> dict[str, Any]:
        """What a hybrid's linker is given besides; its contents are added to the others."""
        return {}

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
                values = torch.randn(PAGE, *v.shape[1:], generator=generator)
                v[rows] = values.to(v.dtype) if v.is_floating_point() else values.view(v.dtype)
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
        num_queued = len(self.batches) - len(self.started)  # whose forward is still to come
        if num_queued > 1 or len(batch[1]) > 1:
            self.counts["loads at once"] = self.counts.get("loads at once", 0) + 1
        with self.device.acting("load"):
            self.device.take_over(clock)
            with self._failing(0.3):
                self.linker.loads.load(*batch)
                if self.device.memory_left == 0:
                    self._require_served(batch[0])
            told = self.device.hand_over()  # the counter's lock
        self.device.take_over(told)
        return None

    def _require_served(self, index: int) -> None:
        """A batch for which the device had no memory was queued all the same: it needs none."""
        assert self.linker.layer_done_counter._batches[index].error is None
        self.counts["loads without memory"] = self.counts.get("loads without memory", 0) + 1

    @contextmanager
    def _failing(self, share: float) -> Iterator[None]:
        """In which now and then a launch or a copy fails, or the device has no memory left."""
        if self.rng.random() < share:
            kind = self.rng.random()
            if kind < 0.25:
                self.device.memory_left = 0
            elif kind < 0.6:
                self.device.copies_fail_in = self.rng.randrange(3)
            else:
                self.kernels.fails_in = self.rng.randrange(12)
        try:
            yield
        finally:
            self.kernels.fails_in = self.device.memory_left = self.device.copies_fail_in = None

    # ---- what the scheduler does ----

    def step(self) -> None:
        name = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
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

    def _queue(self, ticket: Any, load: Load) -> None:
        pages: Any = SimpleNamespace(ticket=ticket)
        job = self._job(pages, self.device.tensor(load.rows), load)
        self.next_rid += 1
        self.linker._pending_loads[str(self.next_rid)] = job

    def _job(self, pages: Any, rows: torch.Tensor, load: Load) -> LoadJob:
        return LoadJob(pages, rows, load.position)

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
        self._promote(slots, self.device.hand_over())
        return None

    def _overwrite(self, slots: list[int]) -> None:
        for slot in slots:
            self.device.touch("new page", (), self.device.cells_of(self.arena[slot]))
            self.arena[slot] = self.rng.choice(self.contents)

    def _admit(self, queue: Any, most: int = 7) -> Load | None:
        first = self.rng.randrange(CONTENTS)
        wanted = [number % CONTENTS for number in range(first, first + self.rng.randint(1, most))]
        wanted = wanted[: CONTENTS - first]
        slots: list[int] = []
        for number in wanted:
            found = self._find(number, slots)
            if found is None:
                break
            slots.append(found)
        if not slots or len(self.free_pages) < len(slots) + 4:
            return None
        more = self._admit_more(first, slots, is_restored=most == 1)
        if more is None:
            return None
        rows = self._take_rows(self.free_pages, len(slots))
        where = np.array(slots)
        job = self.plain.prepare_load(where, rows.numpy(), first * PAGE)
        for layer in range(LAYERS):
            self.plain.load_layer(job, layer)
        expected = [
            (k[rows].clone(), v[rows].clone())
            for k, v in zip(self.shadow.k, self.shadow.v, strict=True)
        ]
        load = Load(first * PAGE, rows, expected, more)
        for slot in (*slots, *more.slots):
            self.free_slots.remove(slot)
        queue(SimpleNamespace(slots=np.array([*slots, *more.slots], np.int32)), load)
        return load

    def _admit_more(self, first: int, slots: list[int], *, is_restored: bool) -> More | None:
        """What a hybrid's request needs beside pages of the full layers; None where it lacks."""
        return More()

    def _take_rows(self, free_pages: list[int], num_pages: int) -> torch.Tensor:
        self.rng.shuffle(free_pages)
        pages = [free_pages.pop() for _ in range(num_pages)]
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    def _find(self, content: int, taken: list[int]) -> int | None:
        """A slot that holds a content, and is none of those taken."""
        wanted = self.contents[content]
        found = [
            slot
            for slot in self.free_slots
            if slot not in taken and np.array_equal(wanted, self.arena[slot])
        ]
        return self.rng.choice(found) if found else None

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
            for layer in range(self.num_layers):
                self._wait_for(counter, layer)
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

    def _wait_for(self, counter: Any, layer: int) -> None:
        """As SGLang's pools do when a forward asks for a layer's rows."""
        counter.wait_until(layer)

    def _read(self, load: Load, layer: int, *, compare: bool = True) -> None:
        """A forward reads a layer of the model."""
        self._read_rows(self.pool, layer, load.rows, load.expected[layer], compare=compare)

    def _read_rows(
        self, pool: Any, layer: int, rows: torch.Tensor, expected: Any, *, compare: bool
    ) -> None:
        k, v, (want_k, want_v) = pool.k[layer], pool.v[layer], expected

        def read() -> None:
            if not compare:
                return
            same = torch.equal(bits_of(k[rows]), bits_of(want_k))
            assert same, "a forward read other K than a CPU loads"
            assert torch.equal(bits_of(v[rows]), bits_of(want_v)), "a forward read other V"

        cells = [pool_cell(tensor, row) for tensor in (k, v) for row in rows.tolist()]
        self.device.launch("forward reads", read, cells, ())

    def decode(self) -> bool | None:
        """A step of running requests; rows of one that ends are given back while it is queued."""
        if not self.running:
            return False
        load = self.running.pop(self.rng.randrange(len(self.running)))
        device = self.device
        device.wait(self.forwards, device.record(device.current_stream()))
        with device.on(self.forwards):
            for layer in range(self.num_layers):
                self._read(load, layer)
                self._write(load, layer)
        self._give_back(load)
        return None

    def _compute(self, load: Load) -> None:
        """A forward writes a running request's rows, as prefills do that compute them."""
        device = self.device
        device.wait(self.forwards, device.record(device.current_stream()))
        with device.on(self.forwards):
            for layer in range(self.num_layers):
                self._write(load, layer, is_kept=True)

    def _write(self, load: Load, layer: int, *, is_kept: bool = False) -> None:
        """A forward writes a layer of the model: something else, or what is there."""
        self._write_rows(self.pool, layer, load.rows, load.expected[layer] if is_kept else None)

    def _write_rows(self, pool: Any, layer: int, rows: torch.Tensor, values: Any) -> None:
        tensors = pool.k[layer], pool.v[layer]

        def write() -> None:
            for at, tensor in enumerate(tensors):
                tensor[rows] = -77.0 if values is None else values[at]

        cells = [pool_cell(tensor, row) for tensor in tensors for row in rows.tolist()]
        self.device.launch("forward writes", write, (), cells)

    def _give_back(self, load: Load) -> None:
        self.free_pages += sorted({row // PAGE for row in load.rows.tolist()})

    def restore(self) -> bool | None:
        """A prompt's last page is put in place of what was recomputed; then a step reads it."""

        done = False

        def restore(ticket: Any, load: Load) -> None:
            space: Any = None
            hashes, rows = np.zeros((1, 32), np.uint8), self.device.tensor(load.rows)
            windows = None if load.more.rows is None else self.device.tensor(load.more.rows)
            nonlocal done
            with self._failing(0.3):
                done = self.linker.restore_pages(
                    ticket, space, hashes, rows, load.position, windows
                )

        load = self._admit(restore, most=1)
        if load is None:
            return False
        if done:
            if self.rng.random() < 0.5:
                self._send(load)
            self.running.append(load)
        else:
            self.counts["failed restores"] = self.counts.get("failed restores", 0) + 1
            self._give_back(load)
        return None

    def _send(self, load: Load) -> None:
        """A thread reads a restored page past the streams, to send it to another server."""
        event, clock = self.linker.restoring(), self.device.hand_over()
        with self.device.acting("transfer"):
            self.device.take_over(clock)
            if event is not None:
                event.synchronize()
            tensors = (*self.pool.k, *self.pool.v)
            cells = [pool_cell(tensor, row) for tensor in tensors for row in load.rows.tolist()]
            self.device.touch("sent", cells, ())
            sent = self.device.hand_over()
        self.device.take_over(sent)  # rows change hands behind that
        kind = "sent at once" if event is None else "sent behind an event"
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def offer(self) -> bool | None:
        """A running request's pages are to be saved; until they are, its rows stay its own."""
        if not self.running:
            return False
        load = self.running[self.rng.randrange(len(self.running))]
        num_pages = len(load.rows) // PAGE
        if len(self.free_slots) < num_pages + self.num_slots // 3:
            return False
        self.running.remove(load)
        if self.rng.random() < 0.7:
            self._compute(load)
        self._offer(load, load.position, load.rows, np.arange(num_pages))
        return None

    def _offer(
        self, load: Load, position: int, rows: torch.Tensor, pages: np.ndarray, **kind: bool
    ) -> None:
        """Queues a save of some pages of a job, by index; until it is done the load is nobody's."""
        slots = [self.free_slots.pop() for _ in pages]
        there = self.device.tensor(rows)
        events = self.linker._save_path.ready_events()
        space: Any = SimpleNamespace(digest=bytes(32), lora=bytes(32))
        hashes, resets = np.zeros((1 + max(pages), 32), np.uint8), self.linker._saves._num_resets
        job = SaveJob(Place(space, position, hashes[:0]), hashes, there, events, resets, **kind)
        self.offered.append(Offer(job, load, slots, pages, self.device.hand_over()))

    def save(self) -> bool | None:
        """The save thread gets to its next job; now and then a launch fails."""
        if not self.offered:
            return False
        self.saving = offer = self.offered.pop(0)
        with self.device.acting("save"), self._failing(0.3):
            self.device.take_over(offer.clock)
            if not self.linker._saves.save(offer.job):
                self.counts["failed saves"] = self.counts.get("failed saves", 0) + 1
            told = self.device.hand_over()
        self.device.take_over(told)
        self._saved(offer)
        self.saving = None
        return None

    def _saved(self, offer: Offer) -> None:
        """What a save had kept is the request's again."""
        self.running.append(offer.load)

    def published(self, slots: np.ndarray) -> None:
        """What is published is what a load would give back."""
        for slot in slots.tolist():
            self.device.touch("published", self.device.cells_of(self.arena[slot]), ())
        assert self.saving is not None
        self._check_saved(self.saving, slots)

    def _check_saved(self, offer: Offer, slots: np.ndarray) -> None:
        load = offer.load
        self._check_pages(self.plain, self.shadow, slots, load.rows, load.position, load.expected)

    def _check_pages(
        self, copier: PageCopier, pool: Any, slots: Any, rows: Any, position: int, expected: Any
    ) -> None:
        try:
            job = copier.prepare_load(slots, rows.numpy(), position)
        except CopyError as error:
            raise ConflictError(f"published before it was whole: {error}") from error
        for layer, wanted in enumerate(expected):
            copier.load_layer(job, layer)
            tensors = (pool.k[layer], *pool.v[layer : layer + 1])  # blocks have no V
            for tensor, want in zip(tensors, wanted, strict=True):
                assert torch.equal(bits_of(tensor[rows]), bits_of(want))

    # ---- everything else ----

    def run(self) -> None:
        """The device gets some work done."""
        self.device.run(self.rng.choice((1, 5, 40)))

    def deliver(self) -> None:
        """What follows landed loads is done."""
        self.device.deliver()

    def _promote(self, slots: list[int], clock: Clock) -> None:
        """Other pages come to slots, by a thread that knows what was done up to `clock`."""
        with self.device.acting("promoter"):
            self.device.take_over(clock)
            self._overwrite(slots)
            came = self.device.hand_over()
        self.device.take_over(came)  # a page is looked up under the store's lock

    def reuse(self) -> bool | None:
        """Another page comes to slots whose pins are gone."""
        if not self.unpinned:
            return False
        slots, clock = self.unpinned.pop(0)
        self._promote(slots, clock)
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
        assert sorted(self.free_slots) == list(range(self.num_slots))
        assert sorted(self.free_pages) == list(range(1, PAGES))

    def close(self) -> None:
        """Ends the linker's threads."""
        with self.device.acting("end"):
            self.linker.close()


def run_world(kind: type[DeviceWorld], seed: int) -> DeviceWorld:
    """A world's steps, and its end."""
    world = kind(seed)
    try:
        for _ in range(STEPS_A_WORLD):
            world.step()
        world.settle()
    finally:
        world.close()
    return world


def run_worlds(kind: type[DeviceWorld], must_happen: tuple[str, ...]) -> None:
    """Worlds of a kind, until there were enough steps and everything happened a few times."""
    counts = dict.fromkeys(must_happen, 0)
    num_worlds = max(8, STEPS // STEPS_A_WORLD)
    for seed in range(40 * num_worlds):
        if seed >= num_worlds and min(counts.values()) >= 5:
            return
        world = run_world(kind, seed)
        found = (world.counts, world.device.counts, world.store.counters.snapshot())
        for name in must_happen:
            counts[name] += sum(each.get(name, 0) for each in found)
    raise AssertionError(counts)


def run_seeds(kind: type[DeviceWorld], num_worlds: int) -> None:
    """Worlds of a kind."""
    for seed in range(num_worlds):
        run_world(kind, seed)
