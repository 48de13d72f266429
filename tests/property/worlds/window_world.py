"""A scheduler around the real cache, SGLang's tree and two pools, whose rows say what they are.

A row holds a fingerprint of whose it is (weights and tenant), of all tokens up to its own and of
its layer. So what a request is about to attend to, and what lies in DRAM under any key, can be
compared with what has to be there: in a full layer all rows before, in a window layer those of the
window. Rows that are free are poison. With a draft model (EAGLE) there is a layer of its own in the
full layers' rows, of which a token's row says which token follows, too, and keys are of pairs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache import unified_radix_cache  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from sglang_ext.admission.waiting_request import ReusablePrefix  # noqa: E402
from sglang_ext.assembly.draft_setup import count_loads_of  # noqa: E402
from sglang_ext.assembly.policy_setup import placement_of  # noqa: E402
from sglang_ext.assembly.window_setup import bound_ropes, place_questions_of, window_layers  # noqa: E402
from sglang_ext.codec.coded_shape import CodedShape  # noqa: E402
from sglang_ext.codec.page_codec import PageCodec  # noqa: E402
from sglang_ext.coded_remote.coded import coded_pages  # noqa: E402
from sglang_ext.coded_remote.remote_codec import RemotePageCodec  # noqa: E402
from sglang_ext.device.copier import PageCopier  # noqa: E402
from sglang_ext.device.layout import LayerGroups, PageLayout  # noqa: E402
from sglang_ext.device.local_pages import LocalPages  # noqa: E402
from sglang_ext.device.pools import DevicePool, describe_pools  # noqa: E402
from sglang_ext.device.ports.host import HostPort  # noqa: E402
from sglang_ext.device.rope_discovery import LayerRope  # noqa: E402
from sglang_ext.device.transfers import hashes_from_hex  # noqa: E402
from sglang_ext.device.windows.block_groups import BlockGroups  # noqa: E402
from sglang_ext.device.windows.window_layers import group_hashes  # noqa: E402
from sglang_ext.kernels import rope as rope_kernels  # noqa: E402
from sglang_ext.seam.cache import CacheParts, HierKVRadixCache  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from sglang_ext.seam.metrics.reporter import MetricsReporter  # noqa: E402
from sglang_ext.settings.config import HierKVConfig  # noqa: E402
from sglang_ext.tiers.coded_host import CachedDiskTier, MemoryTier, RecordTier  # noqa: E402
from sglang_ext.tiers.disk import DiskConfig, DiskTier  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.records.quality import ANY  # noqa: E402
from sglang_ext.tiers.records.record import parse_header  # noqa: E402
from sglang_ext.tiers.remote.remote_store import RemoteStore  # noqa: E402
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig  # noqa: E402
from sglang_ext.tiers.store.types import READY  # noqa: E402
from tests.property.worlds.scheduler import Scheduler, SchedulerRequest  # noqa: E402

PAGE, HEADS, DIM = 4, 2, 16
CODED_HEADS = 32  # so that a page is of several blocks of a disk, and coding it saves some
FULL, WINDOWED = (2, 5), (0, 1, 3, 4, 6)  # the model's layers
DRAFT = 7  # of a draft model, where there is one
SHARING = (7,), (8,)  # those of both kinds that read the KV of others, where there are such
# Of two shapes: K and V differ in each layer, and one of a window needs less than a full one.
TWO_SHAPES = {"v_head_dim": 12, "swa_head_num": 2, "swa_head_dim": 20, "swa_v_head_dim": 14}
MAX_TOKENS = 80
POISON = np.int16(-0x4080)  # -1 in bfloat16
# 256 numbers that bfloat16 holds, for each byte of what a row says.
_NUM_PRINTS = 8


# The same pages are looked at again and again, and a checksum a token is most of what a world does.
@functools.lru_cache(maxsize=1 << 13)
def _prints(tokens: tuple[int, ...], tenant: tuple[str | None, ...], weights: int) -> torch.Tensor:
    """See `WindowWorld.prints`; nobody may write to it."""
    print_ = zlib.crc32(repr((weights, tenant)).encode())
    other = print_ ^ 0x5A5A5A5A
    rows = array("Q")
    for token in tokens:
        value = token.to_bytes(4, "little")
        print_ = zlib.crc32(value, print_)
        other = zlib.adler32(value, other) ^ print_ >> 7
        rows.append((print_ & 0xFFFFFFFF) << 32 | other & 0xFFFFFFFF)
    rows_bytes = np.array(rows, "<u8").view(np.uint8).reshape(-1, _NUM_PRINTS)
    return torch.from_numpy(rows_bytes).to(torch.bfloat16)


# (model's layer, K or V, 0 or 1, heads and their size, offset in a slot) of a block.
PlacedBlock = tuple[int, int, Sequence[int], int]


def _blocks_of(layers: Sequence[int], pool: DevicePool, layout: PageLayout) -> list[PlacedBlock]:
    """Where K and V of some layers lie."""
    blocks: list[PlacedBlock] = []
    for index, layer in enumerate(layers):
        blocks.append((layer, 0, pool.k[index].shape[1:], layout.k_offsets[index]))
        blocks.append((layer, 1, pool.v[index].shape[1:], layout.v_offsets[index]))
    return blocks


def _part_of(
    groups: LayerGroups | BlockGroups, number: int, pool: DevicePool, frame: PageLayout
) -> list[PlacedBlock]:
    """Where the blocks of a group of window layers lie."""
    if isinstance(groups, LayerGroups):
        return _blocks_of([groups.window[i] for i in groups.groups[number]], pool, frame)
    blocks: list[PlacedBlock] = []
    offset = 512
    for block, rows in zip(groups.groups[number], pool.k, strict=True):
        blocks.append((groups.window[block.index], int(block.is_v), rows.shape[1:], offset))
        offset += -(-PAGE * math.prod(rows.shape[1:]) * 2 // 64) * 64
    return blocks


class Identity:
    """A namespace for each set of weights; nothing is kept while the device may hold two."""

    def __init__(self) -> None:
        self.weights = 0

    @property
    def digest(self) -> bytes:
        return bytes([1 + self.weights]) * 32

    def space_of(self, req: Any, store: PageStore) -> KeySpace:
        store.open_namespace(self.digest, {})
        return store.space(self.digest)

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
    extra_key: str | None = None
    exact: bool = False
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    cache_salt: str | None = None
    lora_id: None = None
    priority: int = 0
    session: Any = None
    session_id: None = None
    kv_rotation_base: None = None
    swa_branching_seqlen: int | None = None
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    extend_end: int = 0
    host_hit_length: int = 0
    num_loaded: int = 0
    num_decoded: int = 0
    done: bool = False

    def get_fill_ids(self) -> array[int]:
        return array("q", self.tokens[: self.extend_end])


def record_tier(folder: Path, disk_bytes: int, coded: str) -> RecordTier | None:
    """The disk, with coded records of it in DRAM or without, or such records alone."""
    in_memory = 256 << 10 if "host" in coded else 0
    if not disk_bytes:
        return MemoryTier(in_memory) if in_memory else None
    segment = min(256 << 10, disk_bytes // 4)
    disk = DiskTier(DiskConfig(folder / "disk", disk_bytes, 0, segment, direct_io="off"))
    return CachedDiskTier(disk, in_memory) if in_memory else disk


def codec_of(layout: PageLayout, coded: str, *, remotely: bool) -> Any:
    """What codes pages on disk, or in the remote store; None where they are raw."""
    if not coded or remotely != ("remote" in coded):
        return None
    shape = CodedShape.of(layout, "bf16", DIM)
    if "sometimes" in coded:
        return SometimesCodec(shape, "lossless", None)
    return (
        RemotePageCodec(shape, "lossless", None) if remotely else PageCodec(shape, "lossless", None)
    )


class SometimesCodec(RemotePageCodec):
    """Leaves half of the pages, and of the parts of a state or a window, as they are."""

    def encode(self, slot: Any) -> Any:
        """See `PageCodec.encode`."""
        return super().encode(slot) if parse_header(slot)[0].page_hash[5] & 1 else None


def opened_codec(layout: PageLayout, coded: str) -> Any:
    """What connects a codec for the remote store; None without."""
    codec = codec_of(layout, coded, remotely=True)
    return None if codec is None else coded_pages(codec, lambda num_new, num_before: None)


class WrongKVError(AssertionError):
    """Rows or pages are not what they are taken for."""


class WindowWorld(Scheduler):
    """One server's cache; `step` does one random thing.

    Attributes:
        server_args: what the plugin asks SGLang's scheduler for, which the world stands for.
        model_config: as these; the model has no images.
    """

    server_args: ClassVar[Any] = SimpleNamespace()
    model_config: ClassVar[Any] = SimpleNamespace(is_multimodal=False)
    exact_only = True  # no page is anything but exact
    of_pairs = False  # keys of the tree are of tokens
    draft_pools: Sequence[MHATokenToKVPool] = ()  # of the draft's layers

    host_pages = 48
    ropes: list[LayerRope]  # of the full layers
    full_pool: DevicePool
    layout: PageLayout
    kv_pool: Any
    allocator: Any
    req_pool: Any

    chunks: tuple[int | None, ...] = (None, 8, 12)  # tokens of a chunk; None: no chunks

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        policy: str = "write_through",
        device_pages: int = 48,
        host_pages: int | None = None,
        disk_bytes: int = 16 << 20,
        prefetch_policy: str = "timeout",
        timeout_ms: float = 300.0,
        lookahead: str = "on",
        remote: RemoteStore | None = None,
        is_one_of_many: bool = False,
        coded: str = "",
        index_pages: int = 4096,
        **model: Any,
    ) -> None:
        patch.setattr(
            unified_radix_cache, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null")
        )
        torch.set_num_threads(1)  # several spin at their barriers where others want the cores
        self.rng = random.Random(seed)
        self.heads = CODED_HEADS if coded else HEADS
        of_tree = self.make_pools(patch, device_pages, **model)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.req_pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_core_backend="python",
            **of_tree,
        )
        self.arena = HostArena(host_pages or self.host_pages, self.layout.slot_bytes)
        self.disk = record_tier(folder, disk_bytes, coded)
        config = HierKVConfig(
            tree_core="python", prefetch_policy=prefetch_policy, lookahead=lookahead,
            pin_share=0.25 if lookahead == "on" else 0.0,
            remote_url="file://there" if remote is not None else "",
            prefetch_timeout_ms=timeout_ms,
        )  # fmt: skip
        self.store = PageStore(
            self.arena,
            PageIndex(index_pages),
            self.disk,
            PageStoreConfig(policy, placement=placement_of(config, is_hybrid=True)),
            codec_of(self.layout, coded, remotely=False),
            remote=remote,
            open_coded=opened_codec(self.layout, coded),
            rules=LocalPages(self.layout, self.ropes, "pre", exact_only=self.exact_only),
        )
        if self.disk is not None:
            self.store.connect(self.disk)
        copier = PageCopier(
            self.full_pool, self.layout, self.ropes, self.arena.slots, mode="pre",
            kernels=rope_kernels,
        )  # fmt: skip
        self.identity = Identity()
        identity: Any = self.identity
        metrics = MetricsReporter(self.store, self.disk, enabled=False, labels={})

        def make_parts(cache: Any) -> CacheParts:
            of_model = self.of_linker(cache, copier)
            linker = HierKVLinker(
                self.store,
                copier,
                page_size=PAGE,
                kv_pool=self.kv_pool,
                port=HostPort(),
                forward_stream=None,
                accepts_all=is_one_of_many,
                **of_model,
            )
            questions = place_questions_of(
                of_model.get("windows"), of_model.get("snapshots"), self.store, config
            )
            return CacheParts(linker, identity, config, metrics, place_questions=questions)

        self.cache = HierKVRadixCache(params, make_parts)
        self.cache.bind_scheduler(self)
        self.count_loads(self.cache.hier_linker.layer_done_counter)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts: dict[str, int] = {}
        self.made: dict[bytes, tuple[int, tuple[str | None, ...], list[int]]] = {}
        self._next = 0
        self._poisoned: list[set[int]] = [set(), set()]  # what is free of both pools
        self.poison()

    # ---- what each model has of its own ----

    def make_pools(
        self, patch: pytest.MonkeyPatch, device_pages: int, *, window: int = 6,
        window_pages: int = 30, two_shapes: bool = False, drafts: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Makes the pools on the device, and says how their rows lie in a slot.

        Returns:
            What the tree is told of them, arguments of `CacheInitParams`.
        """
        self.window = window
        sizes = device_pages * PAGE, window_pages * PAGE
        full, windowed = SHARING if two_shapes else ((), ())
        self.kv_pool = SWAKVPool(
            *sizes, PAGE, torch.bfloat16, self.heads, DIM, [*WINDOWED, *windowed],
            [*FULL, *full], "cpu", **(TWO_SHAPES if two_shapes else {}),
        )  # fmt: skip
        self.allocator = SWATokenToKVPoolAllocator(
            *sizes, PAGE, torch.bfloat16, "cpu", self.kv_pool, False
        )
        self.req_pool = ReqToTokenPool(16, MAX_TOKENS, "cpu", False)
        self.of_pairs = drafts
        self.draft_pools = [
            MHATokenToKVPool(sizes[0], PAGE, torch.bfloat16, HEADS, DIM, 1, "cpu", False)
        ] * drafts
        read_layers = {*FULL, *WINDOWED} if two_shapes else None
        self._pools = describe_pools(self.kv_pool, read_layers, self.draft_pools)
        groups, self.full_pool = self._pools.groups, self._pools.full
        assert groups is not None
        assert isinstance(groups, BlockGroups) == two_shapes
        self.ropes, *self._window_ropes = map(
            self.ropes_of, [self.full_pool, *self._pools.window_parts()]
        )
        self.layout = self._pools.layout(PAGE)
        self.num_groups = len(groups.groups)
        self.parts = [_blocks_of(groups.full, self.full_pool, self.layout)]
        for number, part in enumerate(self._pools.window_parts()):
            self.parts.append(_part_of(groups, number, part, self.layout))
        return {
            "tree_components": (ComponentType.FULL, ComponentType.SWA),
            "sliding_window_size": window,
            "is_eagle": drafts,
        }

    def ropes_of(self, pool: DevicePool) -> list[LayerRope]:
        """How K of each layer of a part is stored."""
        return bound_ropes(pool)

    def of_linker(self, cache: Any, copier: PageCopier) -> dict[str, Any]:
        """What the linker is told of the model, arguments of `HierKVLinker`."""
        windows = window_layers(cache, self._pools, copier, self._window_ropes)
        assert windows is not None
        num_layers = len(FULL) + len(WINDOWED) + len(self.draft_pools)
        return {"num_layers": num_layers, "windows": windows}

    def count_loads(self, counter: Any) -> None:
        """Has forwards wait for the layers that are loaded."""
        self.kv_pool.register_layer_transfer_counter(counter)
        count_loads_of(
            [SimpleNamespace(token_to_kv_pool=each) for each in self.draft_pools], counter
        )

    @property
    def waiting_queue(self) -> list[Request]:
        """What the plugin asks the scheduler for."""
        return self.waiting

    # ---- the model ----

    def prints(
        self, tokens: Sequence[int], tenant: tuple[str | None, ...], weights: int
    ) -> torch.Tensor:
        """What the row of each token says, in every layer; bfloat16 `[N, 8]`."""
        return _prints(tuple(tokens), tenant, weights)

    def of_request(self, req: Request, end: int, layer: int = 0) -> torch.Tensor:
        """What the rows of a request's first `end` tokens say in a layer."""
        tenant = (req.extra_key, req.cache_salt)
        return self.of_layer(self.meant(req), end, tenant, self.identity.weights, layer)

    def of_layer(
        self, tokens: Sequence[int], end: int, tenant: tuple[str | None, ...], weights: int,
        layer: int,
    ) -> torch.Tensor:  # fmt: skip
        """As `prints`, of the first `end` tokens; a draft knows the token behind each, if any."""
        if layer != DRAFT or not self.draft_pools:
            return self.prints(tokens[:end], tenant, weights)
        found = self.prints(tokens[: end + 1], tenant, weights)
        return torch.cat([found, found[-1:]])[1 : end + 1]

    def meant(self, req: Request) -> list[int]:
        """What the tokens of a request stand for."""
        return req.tokens

    def layer_rows(self) -> list[tuple[int, bool, torch.Tensor, int]]:
        """(model's layer, whether it has a window, K or V, 0 or 1) of every buffer."""
        out = []
        for layer in (*FULL, *WINDOWED):
            index, is_window = self.kv_pool.layers_mapping[layer]
            pool = self.kv_pool.swa_kv_pool if is_window else self.kv_pool.full_kv_pool
            out.append((layer, is_window, pool.k_buffer[index], 0))
            out.append((layer, is_window, pool.v_buffer[index], 1))
        for pool in self.draft_pools:
            out.append((DRAFT, False, pool.k_buffer[0], 0))
            out.append((DRAFT, False, pool.v_buffer[0], 1))
        return out

    def window_rows(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.allocator.full_to_swa_index_mapping[rows]
        return found

    def forward(self, req: Request, start: int, end: int) -> None:
        """Computes tokens [start, end) on what is in the rows before them."""
        self.learn_follower(req, start)
        self.check_attended(req, start)
        rows = self.rows_of(req, start, end)
        for layer, is_window, buffer, kind in self.layer_rows():
            expected = self.of_request(req, end, layer)[start:]
            at = self.window_rows(rows) if is_window else rows
            if is_window and bool((at < PAGE).any()):
                raise WrongKVError(f"{req.rid} writes to the padding page")
            buffer[at] = self.row(expected, layer, kind, buffer.shape[1:])

    def learn_follower(self, req: Request, end: int) -> None:
        """A draft's last row was computed when no token was behind it yet, maybe."""
        if req.prefix_len < req.prompt_len or not end:
            return
        row = self.rows_of(req, end - 1, end)
        for pool in self.draft_pools:
            expected = self.of_request(req, end, DRAFT)[-1:]
            pool.k_buffer[0][row] = self.row(expected, DRAFT, 0)
            pool.v_buffer[0][row] = self.row(expected, DRAFT, 1)

    def row(
        self, prints: torch.Tensor, layer: int, kind: int, shape: Sequence[int] = (HEADS, DIM)
    ) -> torch.Tensor:
        """Rows of a layer, bfloat16 `[N, *shape]`."""
        out = torch.zeros(len(prints), *shape, dtype=torch.bfloat16)
        out[..., :_NUM_PRINTS] = prints[:, None]
        out[..., _NUM_PRINTS] = 2 * layer + kind + 1
        return out

    # ---- checks ----

    def check_attended(self, req: Request, end: int) -> None:
        """What a request is about to attend to is its own."""
        if not end:
            return
        rows = self.rows_of(req, 0, end)
        for layer, is_window, buffer, kind in self.layer_rows():
            expected = self.of_request(req, end, layer)
            first = max(0, end - self.window) if is_window else 0
            at = self.window_rows(rows[first:]) if is_window else rows
            wanted = self.row(expected[first:], layer, kind, buffer.shape[1:])
            if not torch.equal(buffer[at], wanted):
                bad = (buffer[at] != wanted).any(-1).any(-1).nonzero().view(-1) + first
                raise WrongKVError(f"{req.rid}, layer {layer}: tokens {bad.tolist()} of {end}")

    def note_pages(self, req: Request) -> None:
        """Remembers what every page of a request has to hold, by its key."""
        tenant = (req.extra_key, req.cache_salt)
        keys, meant = self.keys(req.tokens, *tenant), self.meant(req)
        for page, key in enumerate(keys):
            tokens = meant[: (page + 1) * PAGE + self.of_pairs]
            self.made[bytes.fromhex(key)] = (0, tenant, tokens)
        if not keys:
            return
        hashes = np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)
        for group in range(self.num_groups):
            for page, key in enumerate(group_hashes(hashes, group)):
                tokens = meant[: (page + 1) * PAGE + self.of_pairs]
                self.made[key.tobytes()] = (group + 1, tenant, tokens)

    def check_store(self) -> None:
        """Every page in DRAM is what its key says."""
        books = self.store._books
        with books.table.lock:
            rows = books.table.index.rows()
            rows = rows[(books.table.index.flags[rows] & READY) != 0]
            keys, numbers = books.table.index.keys(rows)
            assert not books.table.index.quality[rows].any(), "pages that are not exact"
            slots = self.arena.slots[books.table.index.host_slot[rows]]
            found = [
                (key.tobytes(), int(number), slot)
                for key, number, slot in zip(keys, numbers, slots, strict=True)
            ]
        for key, number, slot in found:
            space = self.store._spaces.find(number)
            assert space is not None
            weights = space.digest[0] - 1
            part, tenant, tokens = self.made[key]
            first = len(tokens) - self.of_pairs - PAGE
            meta, _ = parse_header(slot)
            assert (meta.page_hash, meta.position) == (key, first), meta
            rest = slot[512 : self.layout.tail_offset].copy()
            for layer, kind, shape, offset in self.parts[part]:
                num_bytes = PAGE * math.prod(shape) * 2
                values = torch.from_numpy(slot[offset : offset + num_bytes].copy())
                values = values.view(torch.bfloat16).view(PAGE, *shape)
                expected = self.of_layer(tokens, first + PAGE, tenant, weights, layer)[first:]
                if not torch.equal(values, self.row(expected, layer, kind, shape)):
                    raise WrongKVError(f"page {first // PAGE}, part {part}, layer {layer}")
                rest[offset - 512 : offset - 512 + num_bytes] = 0
            assert not rest.any(), "bytes of another page"

    def poison(self) -> None:
        """Overwrites the rows that became free, and the padding page."""
        for number, (allocator, pools) in enumerate(
            (
                (
                    self.allocator.full_attn_allocator,
                    [self.kv_pool.full_kv_pool, *self.draft_pools],
                ),
                (self.allocator.swa_attn_allocator, [self.kv_pool.swa_kv_pool]),
            )
        ):
            lists = (allocator.free_pages, allocator.release_pages)
            free = {page for each in lists if each is not None for page in each.tolist()} | {0}
            new = np.array(sorted(free - self._poisoned[number] | {0}))
            self._poisoned[number] = free
            rows = (new[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
            for pool in pools:
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer.view(torch.int16).numpy()[rows] = POISON

    # ---- requests ----

    def tokens(self) -> list[int]:
        """A prompt that shares its head with others: documents fork at several depths."""
        document = self.rng.randrange(4)
        length = self.rng.choice((self.rng.randint(3, 44), 4 * self.rng.randint(1, 11)))
        fork = self.rng.choice((8, 10, 20, 31, 44))
        branch = self.rng.randrange(2)
        return [
            1 + (document * 7 + at * 3 + (branch * 50 if at >= fork else 0)) % 120
            for at in range(length)
        ]

    def arrive(self) -> None:
        """A request enters the queue: it is matched, and its pages elsewhere are planned."""
        req = Request(
            f"r{self._next}",
            self.tokens(),
            self.rng.choice((0, 1, 3, 6, 14)),
            extra_key=self.rng.choice((None, None, "a")),
            exact=self.rng.random() < 0.2,
        )
        self._next += 1
        self.enqueue(req)

    def enqueue(self, req: Request) -> None:
        """As `_add_request_to_queue` does."""
        self.note_pages(req)
        super().enqueue(req)

    def match(self, req: Request) -> None:
        """As `match_kv_cache` does."""
        req.swa_branching_seqlen = self.matched(req).swa_branching_seqlen

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        """As the scheduler does: match, lock, load, allocate, compute, insert."""
        self.cache.check_hicache_events()
        if not self.may_run_more():
            return False
        if not self.cache.check_prefetch_progress(req.cache_request_handle):
            return False
        self.match_to_run(req)
        req.lock = self.cache.lock(req.last_node)
        if self.cache.linker.has_hit(req.rid):
            loaded, req.last_node = self.cache.linker.load_back(req)
            req.prefix_len += loaded
            req.num_loaded = loaded
        target = len(req.tokens)
        if chunk is not None:
            target = min(target, self.chunk_end(req.prefix_len + chunk))
        held = req.prefix_len
        rows = self.allocate(max(0, -(-target // PAGE) * PAGE - held))
        if rows is None:
            self.give_up(req)
            return False
        self.waiting.remove(req)
        prefix = self.cache.prefix_device_indices(req) if req.prefix_len else None
        self.make_room_for_states(req)
        self.req_pool.alloc([req])
        if prefix is not None:
            self.write(req, 0, prefix)
        self.write(req, held, rows)
        req.kv.kv_allocated_len = held + len(rows)
        self.cache.maybe_hand_to_session(req)
        index = self.cache.ready_to_load_host_cache()
        self.cache.hier_linker.layer_done_counter.set_consumer(index)
        assert not self.cache.finish_external_linker_loads([req])
        self.cache.hier_linker.layer_done_counter.set_consumer(-1)
        self.forward(req, req.prefix_len, target)
        self.checkpoint(req, target)
        self.running.append(req)
        return True

    def chunk_end(self, most: int) -> int:
        """Where a chunk of a prompt ends that may end there at most."""
        return most // PAGE * PAGE

    def may_run_more(self) -> bool:
        """Whether the model has what another request needs beside rows."""
        return True

    def match_to_run(self, req: Request) -> None:
        """The match of a request that is about to run."""
        self.match(req)

    def make_room_for_states(self, req: Request) -> None:
        """There are no states."""

    def free_loaded(self, rows: torch.Tensor) -> None:
        window = self.window_rows(rows)
        self.allocator.swa_attn_allocator.free(window[window > 0])
        self.allocator.clear_full_to_swa_mapping(rows)
        self.allocator.full_attn_allocator.free(rows)

    def allocate(self, num: int) -> torch.Tensor | None:
        if num == 0:
            return torch.empty(0, dtype=torch.int64)
        full, window = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        self.allocator.evict_to_free_tokens(self.cache, num)
        if min(full.available_size(), window.available_size()) < num:
            return None
        rows, window_rows = full.alloc(num), window.alloc(num)
        self.allocator.set_full_to_swa_mapping(rows, window_rows)
        found: torch.Tensor = rows
        return found

    def checkpoint(self, req: Request, up_to: int) -> None:
        req.extend_end = up_to
        self.cache.checkpoint(req, up_to=up_to)
        req.prefix_len = req.kv.kv_committed_len = up_to
        self.check_attended(req, up_to)

    def slide(self, req: Request) -> None:
        """As `maybe_evict_swa` does before a decode: the window leaves rows behind."""
        if req.num_decoded:
            self.cache.evict_sliding_windows(req, len(req.tokens) - 1)
        if req.num_decoded >= self.window:
            self.cache.release_swa_prefix_lock(req)
        req.num_decoded += 1

    def finish(self, req: Request) -> None:
        """As `release_kv_cache` does."""
        req.done = True
        self.running.remove(req)
        self.note_pages(req)
        assert not self.cache.claim_kv_row(req)
        self.cache.checkpoint(req, up_to=req.prefix_len)
        self.release(req)

    def retract(self, req: Request) -> None:
        """Its KV is dropped, and it waits again."""
        self.drop_kv(req)
        req.num_decoded, req.swa_branching_seqlen = 0, None
        handle = req.cache_request_handle
        req.cache_request_handle = dataclasses.replace(handle, attempt_id=handle.attempt_id + 1)
        self.enqueue(req)

    # ---- random steps ----

    def step(self) -> None:
        kinds, weights = zip(*_WEIGHTS.items(), strict=True)
        self.do(self.rng.choices(kinds, weights)[0])

    def do(self, kind: str) -> None:
        """Does one thing, if it can be done now."""
        if getattr(self, f"_do_{kind}")() is not False:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        self.poison()

    def _do_arrive(self) -> bool | None:
        if len(self.waiting) >= 5:
            return False
        self.arrive()
        return None

    def _do_admit(self) -> bool | None:
        if not self.waiting or len(self.running) >= 5:
            return False
        return self.admit(self.rng.choice(self.waiting), self.rng.choice(self.chunks))

    def _do_evict(self) -> None:
        """Both pools, or one of them."""
        num = PAGE * self.rng.randint(1, 12)
        self.cache.evict(
            self.rng.choice(
                (
                    EvictParams(num_tokens=num),
                    EvictParams(num_tokens=0, swa_num_tokens=num),
                    EvictParams(num_tokens=num, swa_num_tokens=num),
                )
            )
        )

    def _do_abort(self) -> bool | None:
        """A request that waits is aborted, or one that runs."""
        if self.waiting and self.rng.random() < 0.5:
            req = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.cache.release_aborted_request(req.cache_request_handle)
        elif self.running:
            req = self.rng.choice(self.running)
            self.finish(req)
        else:
            return False
        return None

    def _do_flush(self) -> bool | None:
        if self.running:
            return False
        self.flush()
        return None

    def _do_change_weights(self) -> bool | None:
        """Nothing runs; requests wait."""
        if self.running:
            return False
        self.cache.weights_change()
        self.flush()
        self.identity.weights = self.rng.choice((0, 0, 1, 2))
        return None

    def _do_clear(self) -> None:
        self.cache.clear_storage_backend()

    def _do_steer(self) -> bool | None:
        """Somebody steers what is stored of a prompt, as an operator may."""
        tenant = self.rng.choice((None, "a")), None
        keys = self.keys(self.tokens(), *tenant)
        lookahead = self.store.lookahead
        if not keys or lookahead is None:
            return False
        space = self.identity.space_of(None, self.store)
        hashes = self.cache.resumable(space, hashes_from_hex(keys))
        what = self.rng.choice(("prefetch", "prefetch", "pin", "unpin", "demote"))
        if what == "prefetch":
            self.cache.waiting_room.prefetch(ReusablePrefix(space, hashes, 0, max_quality=ANY))
        elif what == "pin":
            lookahead.pin(space, hashes, owner=0, seconds=self.rng.choice((0.01, 60.0)))
        elif what == "unpin":
            lookahead.unpin(space, hashes)
        else:
            lookahead.demote(space, hashes)
        return None

    # ---- the end ----

    def drain(self) -> None:
        """Every request ends, everything in flight lands, and all that was taken is given back."""
        deadline_s = time.monotonic() + 300
        while self.running or self.waiting or self.cache.waiting_room._prefetches:
            assert time.monotonic() < deadline_s, f"requests do not end: {self.store.stats()}"
            for req in list(self.running):
                self.go_on(req)
            for req in list(self.waiting):
                self.admit(req)
            self.cache.check_hicache_events()
            self.poison()
        self.settle()
        self.check_nothing_is_held()

    def one_round(self) -> None:
        """400 random steps, and the end of all that they began."""
        for _ in range(400):
            self.step()
        self.drain()

    def check_nothing_is_held(self) -> None:
        """No lock, row, plan or question outlives the requests."""
        assert not self.cache.linker.pending_offloads
        assert not self.cache.linker.hit_markers
        place_questions = self.cache.linker.place_questions
        assert place_questions is None or not place_questions._open
        self.cache.evict(EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20))
        for each in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator):
            assert each.available_size() == each.size, "rows are lost"
        assert not self.allocator.full_to_swa_index_mapping[:-1].any()

    def run(self, tokens: list[int]) -> Request:
        """One request from its arrival to its end; saves land."""
        req = Request(f"r{self._next}", list(tokens), 0)
        self._next += 1
        self.enqueue(req)
        self.drain()
        return req

    def keys(self, tokens: list[int], extra_key: str | None, salt: str | None) -> list[str]:
        whole = RadixKey(array("q", tokens), extra_key, is_bigram=self.of_pairs, cache_salt=salt)
        key = whole.page_aligned(PAGE)
        return list(get_storage_hash_str(key, None, page_size=PAGE)) if len(key) else []


_WEIGHTS = {
    "arrive": 10, "admit": 16, "go_on": 44, "events": 8, "evict": 5, "abort": 2, "retract": 1.5,
    "flush": 1, "change_weights": 0.5, "clear": 0.2, "breathe": 3, "steer": 2,
}  # fmt: skip
