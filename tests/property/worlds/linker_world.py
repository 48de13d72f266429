"""A scheduler, a device pool and a disk for the real linker, all of which lay traps.

- The device pool is SGLang's own `MHATokenToKVPool`. Rows that are given back are overwritten with
  poison at once; poison that changes was written after it was freed.
- The arena poisons every slot that becomes free, and looks at it again before it is handed out.
- A page's content follows from key space, page hash, layer, token and channel, so that any read of
  a wrong, old or half-written page shows.
- Kernels and disk calls are delayed, fail and come up short at random.
"""

from __future__ import annotations

import errno
import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

from sglang_ext.device.copier import PageCopier  # noqa: E402
from sglang_ext.device.pools import describe_pool  # noqa: E402
from sglang_ext.device.ports import DevicePort  # noqa: E402
from sglang_ext.device.ports.host import HostPort  # noqa: E402
from sglang_ext.device.rope_discovery import LayerRope  # noqa: E402
from sglang_ext.device.transfers import Place  # noqa: E402
from sglang_ext.kernels import rope as rope_kernels  # noqa: E402
from sglang_ext.kernels.rope import RopeSpec  # noqa: E402
from sglang_ext.seam import linker  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from sglang_ext.tiers.disk import DiskConfig, DiskTier  # noqa: E402
from sglang_ext.tiers.disk.segments.fileio import FileIO  # noqa: E402
from sglang_ext.tiers.host import HostArena, Slots  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.policy import PolicyConfig  # noqa: E402
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig, Plan  # noqa: E402

linker_module = linker

LAYERS, PAGE, HEADS, DIM = 3, 4, 2, 8
DEVICE_PAGES, ARENA_SLOTS = 64, 28
DOCUMENTS, PAGES_PER_DOCUMENT, SHARED_PAGES = 6, 6, 3
DISK_BYTES, SEGMENT_BYTES = 256 << 10, 64 << 10
ALL_LAYERS = range(LAYERS)
# Where the pool is a device's: of a ring of four buffers that hold three pages of a layer each.
RING_BYTES = 4 * 3 * 2 * PAGE * HEADS * DIM * 2
POISON_ROW = -77.0
POISON_BYTE = 0xA7
MAX_POSITION = 64


class Trap(AssertionError):
    """A page was read before it was written, or written after it was freed."""


class TrappedArena(HostArena):
    """Poisons free slots and checks that nobody wrote to them."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self.slots[:] = POISON_BYTE
        # Called when the calling thread writes a slot, or looks at a free one.
        self.note: Callable[[str, int], None] = lambda what, slot: None

    def _push(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.note("free", slot)
            self.slots[slot] = POISON_BYTE
        super()._push(slots)

    def alloc(self, count: int) -> Slots:
        taken = super().alloc(count)
        for slot in taken.tolist():
            self.note("take", slot)
            if not (self.slots[slot] == POISON_BYTE).all():
                raise Trap(f"arena slot {slot} was written while it was free")
        return taken

    def check_free_slots(self) -> None:
        """Verifies every free slot."""
        with self._lock:
            for slot in self._stack[: self._num_free].tolist():
                self.note("look at", slot)
                if not (self.slots[slot] == POISON_BYTE).all():
                    raise Trap(f"arena slot {slot} was written while it was free")


class BadDisk(FileIO):
    """A disk that is slow, fails and comes up short while `trouble` is above 0."""

    def __init__(self, rng: random.Random) -> None:
        self.trouble = 0.0
        # Called with what the calling thread reads from the disk (True) or writes there.
        self.note: Callable[[Sequence[memoryview], bool], None] = lambda buffers, is_read: None
        self._rng = rng
        self._lock = threading.Lock()

    def _may_fail(self) -> None:
        with self._lock:
            draw, kind = self._rng.random(), self._rng.random()
        if draw < self.trouble:
            if kind < 0.5:
                raise OSError(errno.EIO if kind < 0.25 else errno.ENOSPC, "injected")
            time.sleep(0.003)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may_fail()
        self.note(buffers, False)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may_fail()
        self.note(buffers, True)
        return super().preadv(fd, buffers, offset)


class RoughKernels:
    """The real kernels, now and then late or failing."""

    def __init__(self, rng: random.Random) -> None:
        self.failure = 0.0
        self.delay = 0.05
        self.gate = threading.Event()
        self.gate.set()
        self._rng = rng
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(rope_kernels, name)

        def kernel(*args: Any) -> Any:
            self.gate.wait()
            with self._lock:
                draw, late = self._rng.random(), self._rng.random()
            if late < self.delay:
                time.sleep(0.0005)
            if draw < self.failure:
                raise RuntimeError("injected kernel failure")
            return real(*args)

        return kernel


@dataclass(frozen=True)
class Chain:
    """A document: page hashes on a path, and the key space they are used in."""

    number: int
    space: KeySpace
    hashes: npt.NDArray[np.uint8]

    def keys(self, start: int, end: int) -> list[str]:
        return [row.tobytes().hex() for row in self.hashes[start:end]]


@dataclass
class Node:
    """Pages on the device that belong to the tree."""

    chain: Chain
    start: int
    pages: list[int]
    locks: int = 0


@dataclass
class Running:
    """A request with a queued or running load."""

    rid: str
    chain: Chain
    start: int
    pages: list[int]


@dataclass
class Batch:
    """Loads of one forward; `stale`: the weights changed before they began."""

    index: int
    requests: list[Running] = field(default_factory=list)
    stale: bool = False


class World:
    """One linker with everything around it; `step` does one random thing.

    It has many methods because each is one thing that may happen.

    Attributes:
        forwards: the stream that forwards run on; None where the CPU does the work.
    """

    forwards: Any = None

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        policy: str,
        mode: str,
        disk: bool = True,
        placement: PolicyConfig | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.disk_io = BadDisk(random.Random(seed + 1))
        self.kernels: Any = self._make_kernels(random.Random(seed + 2))
        self.kv_pool = MHATokenToKVPool(
            DEVICE_PAGES * PAGE, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False
        )
        pool = describe_pool(self.kv_pool)
        layout = pool.layout(PAGE)
        # So that some pages overflow their corrections and are stored position-bound.
        object.__setattr__(layout, "max_corrections", 20)
        self.arena = TrappedArena(ARENA_SLOTS, layout.slot_bytes)
        self.disk: DiskTier | None = None
        if disk:
            config = DiskConfig(
                folder / "disk", DISK_BYTES, 0, segment_bytes=SEGMENT_BYTES, direct_io="off"
            )
            self.disk = DiskTier(config, io=self.disk_io)
        store_config = PageStoreConfig(policy, placement=placement)
        self.store = PageStore(self.arena, PageIndex(512), self.disk, store_config)
        if self.disk is not None:
            self.store.connect(self.disk)
        port = self._open_port()
        copier = PageCopier(
            pool, layout, _ropes(), self.arena.slots, mode=mode, kernels=self.kernels
        )
        self.linker = HierKVLinker(
            self.store,
            copier,
            num_layers=LAYERS,
            page_size=PAGE,
            kv_pool=self.kv_pool,
            port=port,
            forward_stream=self.forwards,
            ring_bytes=RING_BYTES,
        )
        self.kv_pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.chains = self._make_chains()
        self.free = list(range(1, DEVICE_PAGES + 1))  # page 0 is SGLang's padding
        for page in self.free:
            self._poison(page)
        self.nodes: list[Node] = []
        self.saving: list[Node] = []  # in the order of their offloads
        self.queued: list[Running] = []
        self.batches: list[Batch] = []
        self.plans: list[Plan] = []
        self.expected: list[int] = []  # requests that wait, by name, where the store looks ahead
        self.counts: dict[str, int] = {}
        self._next_rid = 0
        self._canaries: dict[tuple[int, bytes], tuple[torch.Tensor, torch.Tensor]] = {}

    def _make_kernels(self, rng: random.Random) -> Any:
        return RoughKernels(rng)

    def _open_port(self) -> DevicePort:
        """What the pool lies on; the arena is there by now."""
        return HostPort()

    def at_rows(
        self, what: str, pages: Sequence[int], *, writes: bool, layers: Sequence[int] = ALL_LAYERS
    ) -> None:
        """A forward reads or writes device pages, in some layers; the CPU does so in order."""

    # ---- content ----

    def _make_chains(self) -> list[Chain]:
        digests = [hashlib.sha256(b"model %d" % number).digest() for number in range(2)]
        lora = hashlib.sha256(b"adapter").digest()
        for digest in digests:
            self.store.open_namespace(digest, {})
        spaces = [
            self.store.space(digests[0]),
            self.store.space(digests[1]),
            self.store.space(digests[0], lora),
        ]
        chains = []
        for number in range(DOCUMENTS):
            prior, rows = b"", []
            for page in range(PAGES_PER_DOCUMENT):
                # Documents come in pairs with the same first pages; key spaces share all hashes.
                salt = number // 2 if page < SHARED_PAGES else number
                prior = hashlib.sha256(prior + b"%d" % salt).digest()
                rows.append(np.frombuffer(prior, np.uint8))
            chains += [Chain(number, space, np.stack(rows)) for space in spaces]
        return chains

    def canary(self, chain: Chain, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one page as the engine computed them, bf16 `[L, P, H, D]`."""
        name = (chain.space.number, chain.hashes[page].tobytes())
        if name not in self._canaries:
            seed = hashlib.sha256(name[1] + bytes([name[0]])).digest()
            generator = np.random.default_rng(list(seed))
            values = generator.standard_normal((2, LAYERS, PAGE, HEADS, DIM)).astype(np.float32)
            if seed[0] % 3 == 0:
                values[..., 0] *= 300.0  # an outlier channel: corrections, and pages kept bound
            k, v = torch.from_numpy(values).to(torch.bfloat16)
            self._canaries[name] = (k, v)
        return self._canaries[name]

    def rows(self, page: int) -> slice:
        return slice(page * PAGE, (page + 1) * PAGE)

    def slots_of(self, pages: list[int]) -> torch.Tensor:
        pieces = [torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages]
        return torch.cat(pieces).to(torch.int64)

    def write(self, chain: Chain, index: int, page: int) -> None:
        k, v = self.canary(chain, index)
        self.at_rows("computes", [page], writes=True)
        for layer in range(LAYERS):
            self.kv_pool.k_buffer[layer][self.rows(page)] = k[layer]
            self.kv_pool.v_buffer[layer][self.rows(page)] = v[layer]

    def expect(self, chain: Chain, index: int, page: int, layers: Sequence[int]) -> None:
        k, v = self.canary(chain, index)
        for layer in layers:
            # The pool's own getters wait for the layer, as the forward does.
            buffers = self.layer_of(layer)
            self.at_rows("reads", [page], writes=False, layers=[layer])
            found_k, found_v = (buffer[self.rows(page)] for buffer in buffers)
            if not (_same(found_k, k[layer]) and _same(found_v, v[layer])):
                raise Trap(f"device page {page} is not page {index} of its chain, layer {layer}")

    def layer_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, when a forward may read them."""
        return self.kv_pool.get_key_buffer(layer), self.kv_pool.get_value_buffer(layer)

    def _poison(self, page: int) -> None:
        self.at_rows("writes over freed rows", [page], writes=True)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            buffer[self.rows(page)] = POISON_ROW

    def check_poison(self) -> None:
        """No free row of the device, and no free slot of the arena, was written."""
        pages = torch.tensor(self.free, dtype=torch.int64)
        self.at_rows("looks at freed rows", self.free, writes=False)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            rows = buffer.view(-1, PAGE * HEADS * DIM)[pages]
            if not (rows == POISON_ROW).all():
                raise Trap("a device row was written after it was freed")
        self.arena.check_free_slots()

    # ---- device rows ----

    def take(self, count: int) -> list[int] | None:
        while len(self.free) < count:
            unlocked = [node for node in self.nodes if not node.locks]
            if not unlocked:
                return None
            self.evict(self.rng.choice(unlocked))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._poison(page)
        self.free += pages
        self.rng.shuffle(self.free)

    def evict(self, node: Node) -> None:
        self.nodes.remove(node)
        self.give_back(node.pages)

    # ---- operations ----

    def step(self) -> None:
        names, weights = zip(*_WEIGHTS.items(), strict=True)
        name = self.rng.choices(names, weights)[0]
        if getattr(self, name)() is not False:
            self.counts[name] = self.counts.get(name, 0) + 1

    def save(self) -> bool | None:
        """A request's new tokens go to the tree; the node is locked until it is saved."""
        chain = self.rng.choice(self.chains)
        start = self.rng.choice((0, 0, 0, 1, 2, 3, 5))
        pages = self.take(self.rng.randint(1, PAGES_PER_DOCUMENT - start))
        if pages is None:
            return False
        for offset, page in enumerate(pages):
            self.write(chain, start + offset, page)
        self.insert(Node(chain, start, pages))
        return None

    def insert(self, node: Node) -> None:
        self.nodes.append(node)
        chain, end = node.chain, node.start + len(node.pages)
        transfer = PoolTransfer(
            name=PoolName.KV,
            device_indices=self.slots_of(node.pages),
            keys=chain.keys(node.start, end),
        )
        place = Place(chain.space, node.start * PAGE, chain.hashes[: node.start])
        with self.linker.placed(place):
            queued = self.linker.offload([transfer])
        if queued:
            node.locks += 1
            self.saving.append(node)

    def collect(self) -> None:
        """Finished saves give their nodes free."""
        for _ in range(min(self.linker.num_completed_offloads(), len(self.saving))):
            self.linker.pop_completed_offload()
            self.saving.pop(0).locks -= 1

    def evict_device(self) -> bool | None:
        unlocked = [node for node in self.nodes if not node.locks]
        if not unlocked:
            return False
        self.evict(self.rng.choice(unlocked))
        return None

    def load(self) -> bool | None:
        """A request is admitted: what is ready in DRAM is promised and queued."""
        chain = self.rng.choice(self.chains)
        start = self.rng.choice((0, 0, 0, 1, 3))
        with self.linker.placed(Place(chain.space, start * PAGE, chain.hashes[:start])):
            keys = chain.keys(start, PAGES_PER_DOCUMENT)
            lengths = self.linker.lookup("", [PoolTransfer(name=PoolName.KV, keys=keys)])
            pages = self.take(lengths[-1]) if lengths else None
            if pages is None:
                return False
            rid = f"r{self._next_rid}"
            self._next_rid += 1
            transfer = PoolTransfer(
                name=PoolName.KV, device_indices=self.slots_of(pages), keys=keys[: len(pages)]
            )
            if not self.linker.load(rid, [transfer]):
                self.give_back(pages)
                return False
            self.queued.append(Running(rid, chain, start, pages))
        return None

    def abort(self) -> bool | None:
        """A request is aborted before its load began."""
        if not self.queued:
            return False
        request = self.queued.pop(self.rng.randrange(len(self.queued)))
        assert self.linker.cancel_queued_load(request.rid)
        self.give_back(request.pages)
        return None

    def forward(self) -> bool | None:
        """A batch begins: its loads start, and the forward reads layer by layer."""
        if not self.queued:
            return False
        stale = not all(self.store.gate.is_open(each.chain.space) for each in self.queued)
        index = self.linker.start_layer_wise_loading()
        batch = Batch(index, self.queued, stale=stale)
        self.queued = []
        self.batches.append(batch)
        if self.rng.random() < 0.6 and not stale:
            self.read_layers(batch)
        return None

    def read_layers(self, batch: Batch) -> None:
        self.linker.layer_done_counter.set_consumer(batch.index)
        if self.kernels.failure:  # a failed load shows only at the end, as SGLang has it
            return
        for layer in range(LAYERS):
            for request in batch.requests:
                for offset, page in enumerate(request.pages):
                    self.expect(request.chain, request.start + offset, page, [layer])
        self.linker.layer_done_counter.set_consumer(-1)

    def finish(self) -> bool | None:
        """The oldest batch's forward is over; its requests go on, retract or were aborted."""
        if not self.batches:
            return False
        batch = self.batches.pop(0)
        self.linker.layer_done_counter.set_consumer(-1)
        landed = self.linker.finish_layer_wise_loading(batch.index)
        assert not (landed and batch.stale), "a load outlived the weights of its pages"
        for request in batch.requests:
            if not landed or self.rng.random() < 0.4:  # aborted, or retracted
                self.give_back(request.pages)
                continue
            for offset, page in enumerate(request.pages):
                self.expect(request.chain, request.start + offset, page, range(LAYERS))
            self.insert(Node(request.chain, request.start, request.pages))
        if not landed and not batch.stale:
            self.load_failed()
        return None

    def load_failed(self) -> None:
        """A batch's copies failed; its requests are given up."""

    def plan(self) -> bool | None:
        """A request waits in the queue while its pages are brought from disk."""
        chain = self.rng.choice(self.chains)
        plan = self.store.plan(chain.space, chain.hashes[self.rng.choice((0, 0, 2)) :])
        if plan is None:
            return False
        self.plans.append(plan)
        return None

    def change_queue(self) -> bool | None:
        """The queue changes: a request comes or goes, or the order becomes another one."""
        lookahead = self.store.lookahead
        if lookahead is None:
            return False
        if len(self.expected) > 5:
            lookahead.leave(self.expected.pop(self.rng.randrange(len(self.expected))))
        chain, self._next_rid = self.rng.choice(self.chains), self._next_rid + 1
        self.expected.append(self._next_rid)
        lookahead.expect(self._next_rid, chain.space, chain.hashes, self.rng.choice((0, 2)))
        self.rng.shuffle(self.expected)
        lookahead.set_order(self.expected)
        assert set(lookahead.window()) <= set(self.expected)
        if self.rng.random() < 0.3:
            lookahead.used(chain.space, chain.hashes, None)
        return None

    def cancel_plan(self) -> bool | None:
        if not self.plans:
            return False
        plan = self.plans.pop(self.rng.randrange(len(self.plans)))
        self.store.cancel_plan(plan)
        self.store.cancel_plan(plan)  # twice is once
        return None

    def flush(self) -> bool | None:
        """`/flush_cache`: nothing runs; the device tier is dropped under whatever is pending."""
        if self.batches or self.rng.random() < 0.5:
            return False
        self.linker.reset()
        for request in self.queued:
            self.give_back(request.pages)
        for node in list(self.nodes):
            self.evict(node)
        self.queued, self.saving = [], []
        return None

    def clear(self) -> bool | None:
        """`/hicache/storage-backend/clear`, in the middle of saves and promotions."""
        if self.rng.random() < 0.7:
            return False
        self.store.clear()
        return None

    def change_weights(self) -> None:
        """Weights change under whatever is pending; nobody waits for it, and nothing is dropped.

        What was asked for under the former key spaces must come to nothing, or be what these say.
        """
        self.store.end_epoch()
        if self.rng.random() < 0.2:  # a request that kept its key space
            chain = self.rng.choice(self.chains)
            transfer = PoolTransfer(
                name=PoolName.KV, device_indices=self.slots_of([0]), keys=chain.keys(0, 1)
            )
            with self.linker.placed(Place(chain.space, 0, chain.hashes[:0])):
                assert not self.linker.load("stale", [transfer])
        self.chains = [
            replace(chain, space=self.store.space(chain.space.digest, chain.space.lora))
            for chain in self.chains
        ]

    def trouble(self) -> None:
        """The disk and the kernels change their mood."""
        self.disk_io.trouble = self.rng.choice((0.0, 0.0, 0.2, 0.6))
        self.kernels.failure = self.rng.choice((0.0, 0.0, 0.0, 0.01)) if not self.batches else 0.0

    def look(self) -> None:
        self.check_poison()

    def breathe(self) -> None:
        """The scheduler has other things to do for a moment."""
        time.sleep(self.rng.choice((0.0, 0.0002, 0.002)))

    # ---- the end ----

    def settle(self) -> None:
        """Ends everything in order and verifies the books."""
        self.disk_io.trouble, self.kernels.failure = 0.0, 0.0
        while self.batches or self.queued:
            self.forward()
            self.finish()
        assert self.linker.quiesce()
        self.collect()
        while self.plans:
            self.cancel_plan()
        while self.expected and self.store.lookahead is not None:
            self.store.lookahead.leave(self.expected.pop())
        assert self.store.wait_idle(300.0)
        deadline_s = time.monotonic() + 300.0
        while (self.store.stats()["spill_queue_pages"] or self.arena._pins.any()) and (
            time.monotonic() < deadline_s
        ):
            time.sleep(0.005)
        self.check_books()

    def check_books(self) -> None:
        assert not self.saving
        assert all(not node.locks for node in self.nodes)
        assert self.linker.num_completed_offloads() == 0
        self.check_poison()
        for node in self.nodes:
            for offset, page in enumerate(node.pages):
                self.expect(node.chain, node.start + offset, page, range(LAYERS))
        self.store.check()
        books = self.store._books
        assert books.table.in_flight.num == 0
        assert books.pins.num_pages == 0, "a plan leaked"
        assert not books.pins._by_slot.any()
        if books.table.policy is not None:
            wanted = books.table.policy.wanted(books.table.index.rows())
            assert not wanted.any(), "a page is wanted and nobody waits"
        assert not books.table.waits, "a plan still waits for pages that nobody brings"
        # With write_back the spill thread may begin to clean at any time; what leaked stays.
        deadline_s = time.monotonic() + 300.0
        while self.arena._pins.any():
            assert time.monotonic() < deadline_s, "a pin leaked"
            time.sleep(0.001)
        assert self.arena._num_deferred == 0
        assert not self.linker.layer_done_counter._batches, "a batch of loads leaked"
        held = sorted([*self.free, *(page for node in self.nodes for page in node.pages)])
        assert held == list(range(1, DEVICE_PAGES + 1))

    def close(self) -> None:
        self.kernels.gate.set()
        self.linker.close()
        names = {"hier-kv-save", "hier-kv-load", "hier-kv-spill"}
        assert not names & {thread.name for thread in threading.enumerate()}


_WEIGHTS = {
    "save": 16, "collect": 14, "evict_device": 8, "load": 18, "abort": 4, "forward": 12,
    "finish": 12, "plan": 7, "cancel_plan": 6, "change_queue": 5, "flush": 1.5, "clear": 2,
    "change_weights": 2, "trouble": 1.5, "look": 2, "breathe": 4,
}  # fmt: skip


def _ropes() -> list[LayerRope]:
    """Two rotated layers of both pairings and partial width, and one without."""
    angles = np.arange(MAX_POSITION)[:, None] * (0.7 ** np.arange(4))[None] * 0.9
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    narrow = (np.ascontiguousarray(cos[:, :2]), np.ascontiguousarray(sin[:, :2]))
    return [
        LayerRope(RopeSpec(cos, sin, 8, 0, False, "eager"), movable=True),
        LayerRope(RopeSpec(*narrow, 4, 0, True, "fp32"), movable=True),
        LayerRope(None, movable=True),
    ]


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))
