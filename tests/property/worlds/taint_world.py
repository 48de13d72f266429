"""A scheduler around the real cache, tree, linker and store, where exactness is in the KV itself.

One element of every K and V row says whether the row is exact. A forward writes it: a new row is
exact when all rows it attends to are. The disk's codec is lossy and clears it. So whatever the
plugin says of a page can be compared with what is in the page.
"""

from __future__ import annotations

import mmap
import random
import time
import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache import unified_radix_cache  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute  # noqa: E402
from sglang_ext.device.copier import PageCopier  # noqa: E402
from sglang_ext.device.layout import PageLayout  # noqa: E402
from sglang_ext.device.pools import describe_pool  # noqa: E402
from sglang_ext.device.ports import DevicePort  # noqa: E402
from sglang_ext.device.ports.host import HostPort  # noqa: E402
from sglang_ext.device.rope_discovery import LayerRope  # noqa: E402
from sglang_ext.kernels import rope as rope_kernels  # noqa: E402
from sglang_ext.provenance.request_state import state_of, wants_exact  # noqa: E402
from sglang_ext.seam.cache import CacheParts, HierKVRadixCache  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from sglang_ext.seam.metrics.reporter import MetricsReporter  # noqa: E402
from sglang_ext.settings.config import HierKVConfig  # noqa: E402
from sglang_ext.tiers.disk import DiskConfig, DiskTier  # noqa: E402
from sglang_ext.tiers.disk.segments.fileio import FileIO  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.policy import PolicyConfig  # noqa: E402
from sglang_ext.tiers.policy.cost_model import CostModel  # noqa: E402
from sglang_ext.tiers.records.quality import Quality  # noqa: E402
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, parse_header, write_meta  # noqa: E402
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals  # noqa: E402
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig  # noqa: E402
from sglang_ext.tiers.store.reader_store import ReaderStore  # noqa: E402
from sglang_ext.tiers.store.types import READY  # noqa: E402
from sglang_ext.tiers.transcoder import PageTranscoder, coded_record, raw_header  # noqa: E402
from tests.property.worlds.scheduler import Scheduler, SchedulerRequest  # noqa: E402

LAYERS, PAGE, HEADS, DIM = 2, 4, 4, 32
MAX_TOKENS = 64
DIGEST = b"m" * 32
EXACT_BIT = 0  # element of a row that is 1.0 when the row is not exact
IDENTITY = 1  # elements from here on say whose row it is
# Where the pool is a device's: of a ring of four buffers that hold three pages of a layer each.
RING_BYTES = 4 * 3 * 2 * PAGE * HEADS * DIM * 2


class LossyCodec(PageTranscoder):
    """Compresses pages and marks every row as not exact; some pages it leaves as they are."""

    quality = int(Quality.LOSSY)

    def __init__(self, layout: PageLayout, raw_share: float, rng: random.Random) -> None:
        self._layout = layout
        self._raw_share = raw_share
        self._rng = rng

    def encode(self, slot: ByteArray) -> ByteArray | None:
        if self._rng.random() < self._raw_share:
            return None
        meta, payload_bytes = parse_header(slot)
        slot = slot.copy()
        for rows in page_rows(slot, self._layout):
            rows[..., EXACT_BIT] = np.float32(1).view(np.uint32) >> 16
        payload = zlib.compress(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes].tobytes(), 1)
        return coded_record(
            meta, np.frombuffer(payload, np.uint8), codec="test", quality=self.quality
        )

    def decode(self, record: ByteArray, out_slot: ByteArray) -> bool:
        meta, _ = parse_header(record)
        payload = np.frombuffer(zlib.decompress(record[HEADER_BYTES:].tobytes()), np.uint8)
        write_meta(out_slot, raw_header(meta), payload.size)
        out_slot[HEADER_BYTES : HEADER_BYTES + payload.size] = payload
        return True


def ready_slots(store: PageStore) -> npt.NDArray[np.uint8]:
    """What lies in the slots of all pages that are ready in DRAM, u8 `[N, bytes]`."""
    table = store._books.table
    with table.lock:
        rows = table.index.rows()
        rows = rows[(table.index.flags[rows] & READY) != 0]
        slots: npt.NDArray[np.uint8] = store.arena.slots[table.index.host_slot[rows]]
    return slots


def page_rows(slot: ByteArray, layout: PageLayout) -> list[np.ndarray]:
    """K and V of each layer in a slot, as views u16 `[P, H, D]`."""
    views = []
    for offsets, row_bytes in (
        (layout.k_offsets, layout.k_row_bytes),
        (layout.v_offsets, layout.v_row_bytes),
    ):
        for offset, num in zip(offsets, row_bytes, strict=True):
            block = slot[offset : offset + PAGE * num].view(np.uint16)
            views.append(block.reshape(PAGE, HEADS, DIM))
    return views


def page_prints(values: np.ndarray, num: int) -> torch.Tensor:
    """The fingerprints in what `page_rows` has of a layer, `num` values of each head."""
    prints = np.ascontiguousarray(values[..., IDENTITY : IDENTITY + num])
    return torch.from_numpy(prints.view(np.int16)).view(torch.bfloat16)


class Identity:
    """One namespace, always."""

    def space_of(self, req: Any, store: PageStore) -> KeySpace:
        return store.space(DIGEST)

    def device_was_reset(self) -> None:
        pass

    def step(self, store: PageStore) -> None:
        pass


@dataclass
class Request(SchedulerRequest):
    """What of SGLang's `Req` the cache looks at."""

    rid: str
    tokens: list[int]
    num_new: int
    exact: bool
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: None = None
    priority: int = 0
    session: None = None
    session_id: None = None
    kv_rotation_base: None = None
    swa_branching_seqlen: None = None
    skip_radix_cache_insert: bool = False
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    host_hit_length: int = 0
    cached_tokens: int = 0
    done: bool = False
    discard_output_reason: Any = None


class Wrong(AssertionError):
    """What the plugin says of a page is not what is in it."""


class TextScheduler:
    """What the plugin asks SGLang's scheduler for, of a model without images.

    Attributes:
        waiting_queue: of nobody.
        server_args: SGLang's.
        model_config: SGLang's.
        chunked_req: none; here a request whose load fails ends at once.
    """

    waiting_queue: Any = ()
    server_args: ClassVar[Any] = SimpleNamespace()
    model_config: ClassVar[Any] = SimpleNamespace(is_multimodal=False)
    chunked_req = None


class World(Scheduler):
    """One server's cache; `step` does one random thing.

    It has many methods because each is one thing that may happen.

    Attributes:
        forwards: the stream that forwards run on; None where the CPU does the work.
        kernels: that copy pages.
        can_fail: whether copies to and from the device may.
    """

    forwards: Any = None
    kernels: Any = rope_kernels
    can_fail = False
    arena_type: ClassVar[type[HostArena]] = HostArena

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        core: str = "python",
        policy: str = "write_through",
        raw_share: float = 0.2,
        device_pages: int = 48,
        host_pages: int = 24,
        lossy: bool = True,
        with_disk: bool = True,
        disk_bytes: int = 16 << 20,
        io: FileIO | None = None,
        seals: RecordSeals = CHECKSUMS,
        placement: PolicyConfig | None = None,
        prefetch_policy: str = "timeout",
        timeout_ms: float = 2000.0,
        cost: CostModel | None = None,
        of_pairs: bool = False,
        ropes: list[LayerRope] | None = None,
        is_one_of_many: bool = False,
        shared: dict[str, mmap.mmap] | None = None,
        keeps: bool = True,
    ) -> None:
        """Builds it.

        With `cost` it decides by that between loading and computing.
        `shared` is of ranks of which the one that `keeps` has the pages of all: the first of them
        leaves the memory there.
        """
        patch.setattr(
            unified_radix_cache, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null")
        )
        self.rng = random.Random(seed)
        size = device_pages * PAGE
        self.kv_pool = MHATokenToKVPool(
            size, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            size, PAGE, torch.bfloat16, "cpu", self.kv_pool, False
        )
        self.req_pool = ReqToTokenPool(16, MAX_TOKENS, "cpu", False)
        pool = describe_pool(self.kv_pool)
        self.layout = pool.layout(PAGE)
        memory: mmap.mmap | None = None
        if shared is not None:
            num_bytes = host_pages * self.layout.slot_bytes
            memory = shared.setdefault("memory", mmap.mmap(-1, num_bytes))
        self.arena = self.arena_type(
            host_pages, self.layout.slot_bytes, memory=memory, is_borrowed=not keeps
        )
        disk: DiskTier | None = None
        if with_disk and keeps:
            disk_config = DiskConfig(
                folder / "disk", disk_bytes, 0, min(256 << 10, disk_bytes // 4), direct_io="off"
            )
            disk = DiskTier(disk_config, seals=seals, io=self._open_io(io))
        codec: LossyCodec | None = None
        if lossy and keeps:
            codec = LossyCodec(self.layout, raw_share, random.Random(seed + 1))
        store_config = PageStoreConfig(policy, placement=placement)
        kind = PageStore if keeps else ReaderStore
        self.store: PageStore = kind(self.arena, PageIndex(4096), disk, store_config, codec)
        if disk is not None:
            self.store.connect(disk)
        self.store.open_namespace(DIGEST, {})
        ropes = ropes or [LayerRope(None, movable=True) for _ in range(LAYERS)]
        port = self._open_port()
        copier = PageCopier(
            pool, self.layout, ropes, self.arena.slots, mode="pre", kernels=self.kernels
        )
        linker = HierKVLinker(
            self.store,
            copier,
            num_layers=LAYERS,
            page_size=PAGE,
            kv_pool=self.kv_pool,
            port=port,
            forward_stream=self.forwards,
            ring_bytes=RING_BYTES,
            accepts_all=is_one_of_many,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.req_pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
            is_eagle=of_pairs,
        )
        metrics = MetricsReporter(self.store, disk, enabled=False, labels={})
        identity: Any = Identity()
        config = HierKVConfig(
            tree_core=core, prefetch_policy=prefetch_policy, prefetch_timeout_ms=timeout_ms
        )
        decider: LoadOrCompute | None = None
        dram: DramChoice | None = None
        if cost is not None:
            sizes: Any = {"page_tokens": PAGE, "kv_bytes_per_page": self.layout.kv_bytes}
            decider = LoadOrCompute(self.store, cost, **sizes)
            dram = DramChoice(cost, self.store.counters, **sizes)
        parts = CacheParts(
            linker, identity, config, metrics, decider=decider, dram=dram,
            shares_pages=shared is not None,
        )  # fmt: skip
        self.cache = HierKVRadixCache(params, lambda cache: parts)
        self.kv_pool.register_layer_transfer_counter(linker.layer_done_counter)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts: dict[str, int] = {}
        self.of_pairs = of_pairs
        self._positions: dict[bytes, int] = {}  # of pages that were inserted, by hash
        self._next = 0

    def _open_port(self) -> DevicePort:
        """What the pool lies on; the arena is there by now."""
        return HostPort()

    def _open_io(self, io: FileIO | None) -> FileIO | None:
        """The disk's system calls; None for the operating system's."""
        return io

    def at_rows(self, what: str, rows: torch.Tensor, *, writes: bool) -> None:
        """A forward reads or writes rows of all layers; the CPU does so in order."""

    @property
    def space(self) -> KeySpace:
        """The key space of now."""
        return self.store.space(DIGEST)

    # ---- the model ----

    def inexact(self, rows: torch.Tensor) -> bool:
        """Whether any of these rows of the device is not exact, in any layer."""
        self.at_rows("looks at", rows, writes=False)
        buffers = (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer)
        return any(bool(buffer[:, -1, EXACT_BIT][rows].any()) for buffer in buffers)

    def row_values(self, tokens: list[int], end: int) -> torch.Tensor:
        """What the rows before `end` say of themselves: a fingerprint of the tokens up to each."""
        prints, print_ = [], 0
        for token in tokens[:end]:
            print_ = zlib.crc32(token.to_bytes(4, "little"), print_)
            prints.append([print_ >> shift & 127 for shift in (0, 8, 16, 24)])
        return torch.tensor(prints, dtype=torch.bfloat16)

    def forward(self, req: Request, start: int, end: int) -> None:
        """Computes tokens [start, end) on what is in the rows before them."""
        rows = self.rows_of(req, 0, end)
        self.check_attended(req, start)
        inexact = float(self.inexact(rows[:start])) if start else 0.0
        new = torch.zeros(end - start, HEADS, DIM, dtype=torch.bfloat16)
        new[..., EXACT_BIT] = inexact
        new[..., IDENTITY : IDENTITY + 4] = self.row_values(req.tokens, end)[start:, None]
        self.at_rows("computes", rows[start:], writes=True)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            buffer[rows[start:]] = new

    # ---- checks ----

    def check_attended(self, req: Request, end: int) -> None:
        """What a request is about to attend to is its own prompt, and as good as it is said."""
        if not end:
            return
        rows = self.rows_of(req, 0, end)
        expected = self.row_values(req.tokens, end)
        self.at_rows("attends to", rows, writes=False)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            if not torch.equal(buffer[:, 0, IDENTITY : IDENTITY + 4][rows], expected):
                raise Wrong(f"rows of {req.rid} are another's")
        inexact = self.inexact(rows)
        if inexact and wants_exact(req):
            raise Wrong(f"{req.rid} asked for exact KV and attends to other")
        if inexact and state_of(req).taint == Quality.EXACT:
            raise Wrong(f"{req.rid} attends to lossy KV and does not know")

    def check_tree(self) -> None:
        """No page of the device tree is worse than it is said to be."""
        if self.cache.hier_config.tree_core != "python":
            return
        exact = [torch.empty(0, PAGE, dtype=torch.int64)]
        for node in self.cache.tree_core._node_arena.values():
            if node is not self.cache.tree_core.root_node:
                rows = node.component_data[ComponentType.FULL].value.view(-1, PAGE)
                exact.append(rows[self.cache.taint.pages.of(node.hash_value) == Quality.EXACT])
        if self.inexact(torch.cat(exact).view(-1)):
            raise Wrong("a page of the tree is taken for exact and is not")

    def check_store(self) -> None:
        """Pages in DRAM are not worse than they are said to be, and lie where they say."""
        books = self.store._books
        with books.table.lock:
            rows = books.table.index.rows()
            rows = rows[(books.table.index.flags[rows] & READY) != 0]
            for row in rows.tolist():
                slot = self.arena.slots[books.table.index.host_slot[row]]
                meta, _ = parse_header(slot)
                quality = int(books.table.index.quality[row])
                if meta.position != self._positions.get(meta.page_hash, meta.position):
                    raise Wrong(f"a header says that its page begins at {meta.position}")
                if meta.quality != quality:
                    raise Wrong(f"a header says {meta.quality} and the index {quality}")
                if quality == 0 and any(v[..., EXACT_BIT].any() for v in self.slot_rows(slot)):
                    raise Wrong("a page in DRAM is taken for exact and is not")

    def slot_rows(self, slot: ByteArray) -> list[np.ndarray]:
        return page_rows(slot, self.layout)

    # ---- requests ----

    def tokens(self) -> list[int]:
        """A prompt that shares its head with others: documents fork at several depths."""
        document = self.rng.randrange(4)
        length = self.rng.randint(5, 36)
        fork = self.rng.choice((8, 12, 20, 40))
        branch = self.rng.randrange(2)
        return [
            1 + (document * 7 + at * 3 + (branch * 50 if at >= fork else 0)) % 120
            for at in range(length)
        ]

    def arrive(
        self, tokens: list[int] | None = None, *, exact: bool | None = None, num_new: int = 6
    ) -> Request:
        """A request enters the queue: it is matched and its pages on disk are planned."""
        req = Request(
            f"r{self._next}",
            self.tokens() if tokens is None else tokens,
            self.rng.randint(0, num_new),
            self.rng.random() < 0.35 if exact is None else exact,
        )
        self._next += 1
        self.enqueue(req)
        return req

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        """As the scheduler does: match, lock, load, allocate, compute, insert."""
        self.cache.check_hicache_events()  # as SGLang does before every admission
        if not self.cache.check_prefetch_progress(req.cache_request_handle):
            return False
        self.match(req)
        req.lock = self.cache.lock(req.last_node)
        if self.cache.linker.has_hit(req.rid):
            loaded, req.last_node = self.cache.linker.load_back(req)
            req.prefix_len += loaded
        target = len(req.tokens)
        if chunk is not None:
            target = min(target, (req.prefix_len + chunk) // PAGE * PAGE)
        # A turn of a session goes on in the session's rows, of which the last page is begun.
        held = -(-req.kv.kv_allocated_len // PAGE) * PAGE if req.kv.holds_kv else req.prefix_len
        need = max(0, -(-target // PAGE) * PAGE - held)
        rows = self.allocate(need)
        if rows is None:
            self.give_up(req)
            return False
        self.waiting.remove(req)
        if req.prefix_len and not req.kv.holds_kv:
            prefix = self.cache.prefix_device_indices(req)
            self.req_pool.alloc([req])
            self.write(req, 0, prefix)
        else:
            self.req_pool.alloc([req])
        self.write(req, held, rows)
        req.kv.kv_allocated_len = held + need
        self.cache.maybe_hand_to_session(req)
        index = self.cache.ready_to_load_host_cache()
        self.cache.hier_linker.layer_done_counter.set_consumer(index)
        failed = self.cache.finish_external_linker_loads([req])
        self.cache.hier_linker.layer_done_counter.set_consumer(-1)
        if failed or self.load_failed(req):
            self.abort(req)
            return True
        self.check_report(req)
        self.runs(req)
        self.forward(req, req.prefix_len, target)
        self.checkpoint(req, target)
        self.running.append(req)
        return True

    def load_failed(self, req: Request) -> bool:
        """Whether a load failed of which `finish_external_linker_loads` could not tell yet."""
        return False

    def abort(self, req: Request) -> None:
        """Its load failed: what was computed is dropped, and it ends."""
        assert self.can_fail
        assert req.discard_output_reason is not None
        assert req.skip_radix_cache_insert
        req.done = True
        self.counts["failed loads"] = self.counts.get("failed loads", 0) + 1
        assert not self.cache.claim_kv_row(req)
        self.release(req)

    def runs(self, req: Request) -> None:
        """A request is about to be computed, its loads are queued."""

    def check_report(self, req: Request) -> None:
        """What is said of the reused tokens is what they are."""
        inexact = bool(req.prefix_len) and self.inexact(self.rows_of(req, 0, req.prefix_len))
        if inexact and state_of(req).reused == Quality.EXACT:
            raise Wrong(f"{req.rid} is told that it reuses exact KV only")

    def insert(self, req: Request, up_to: int) -> None:
        for page, key in enumerate(self.keys(req.tokens[:up_to])):
            self._positions[bytes.fromhex(key)] = page * PAGE
        if not req.skip_radix_cache_insert:
            self.cache.checkpoint(req, up_to=up_to)

    def checkpoint(self, req: Request, up_to: int) -> None:
        self.insert(req, up_to)
        req.prefix_len = req.kv.kv_committed_len = up_to
        self.check_attended(req, up_to)
        self.check_tree()

    def finish(self, req: Request) -> None:
        """As `release_kv_cache` does."""
        req.done = True
        self.running.remove(req)
        assert not self.cache.claim_kv_row(req)
        self.insert(req, req.prefix_len)
        self.release(req)
        self.check_tree()

    def retract(self, req: Request) -> None:
        """Its KV is dropped, and it waits again."""
        self.drop_kv(req)
        self.waiting.append(req)

    # ---- random steps ----

    def step(self) -> None:
        kinds = ("arrive", "admit", "go_on", "events", "evict", "flush", "retract", "breathe")
        kind = self.rng.choices(kinds, (10, 16, 40, 10, 4, 0.3, 1, 3))[0]
        if getattr(self, f"_do_{kind}")() is not False:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def _do_arrive(self) -> bool | None:
        if len(self.waiting) >= 4:
            return False
        self.arrive()
        return None

    def _do_admit(self) -> bool | None:
        if not self.waiting or len(self.running) >= 6:
            return False
        chunk = self.rng.choice((None, 8, 12))
        return self.admit(self.rng.choice(self.waiting), chunk)

    def _do_evict(self) -> None:
        self.cache.evict(EvictParams(num_tokens=PAGE * self.rng.randint(1, 12)))

    def _do_flush(self) -> bool | None:
        if self.running or self.waiting:
            return False
        self.flush()
        return None

    # ---- the end ----

    def drain(self) -> None:
        """Every request ends and everything in flight lands."""
        deadline_s = time.monotonic() + 300
        while self.running or self.waiting:
            assert time.monotonic() < deadline_s, "requests do not end"
            for req in list(self.running):
                if req in self.running:
                    self.go_on(req)
            for req in list(self.waiting):
                self.admit(req)
            self.cache.check_hicache_events()
        self.settle()

    def settle(self) -> None:
        """Saves, reads and writes in flight land."""
        super().settle()
        self.check_tree()

    def run(self, tokens: list[int], *, exact: bool = False) -> Request:
        """One request from its arrival to its end; saves land."""
        req = self.arrive(list(tokens), exact=exact, num_new=0)
        self.serve(req)
        return req

    def serve(self, req: Request) -> None:
        """One that waits, to its end; saves land."""
        deadline_s = time.monotonic() + 300
        while not self.admit(req):
            assert time.monotonic() < deadline_s
        while req in self.running:
            self.go_on(req)
        self.settle()

    def keys(self, tokens: list[int]) -> list[str]:
        key = RadixKey(array("q", tokens), None, is_bigram=self.of_pairs).page_aligned(PAGE)
        return list(get_storage_hash_str(key, None, page_size=PAGE))
