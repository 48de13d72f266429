"""A scheduler around the real cache, SGLang's tree and its pools of rows and states.

As `window_world`, with states in the place of windows: a state holds a fingerprint of whose it is
and of all tokens before its position, in every value. So what a request is about to go on from,
and what lies in DRAM under any key, can be compared with what has to be there. SGLang's scheduler
tracks states by rules that are written down here again (`track_extend`, `track_decode`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.property.worlds.scheduler import Scheduler  # isort: skip
from tests.property.worlds.window_world import (  # isort: skip
    DIM, MAX_TOKENS, PAGE, POISON, Request, WindowWorld, WrongKVError,
)  # fmt: skip

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba

from sglang_ext.assembly.state_setup import awaited_layers, snapshots_of
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.pools import describe_pools
from sglang_ext.device.states.snapshots import part_hashes
from sglang_ext.tiers.records.record import parse_header
from sglang_ext.tiers.store.types import READY

TRACK = 2 * PAGE  # tokens between two states that a decode keeps
RUNNING = 5
_SHAPE = Mamba2StateShape.create(
    tp_world_size=1, intermediate_size=24, n_groups=1, num_heads=3, head_dim=8, state_size=12,
    conv_kernel=4,
)  # fmt: skip


@dataclass(frozen=True)
class StageLayers:
    """Layers of a pipeline stage, by the model's numbers.

    Attributes:
        full: those with full attention.
        stateful: those with a state.
        number: of the stage.
        num_stages: of the model.
    """

    full: tuple[int, ...]
    stateful: tuple[int, ...]
    number: int = 0
    num_stages: int = 1

    @property
    def first(self) -> int:
        """The stage's first layer."""
        return min(*self.full, *self.stateful)


WHOLE_MODEL = StageLayers((2, 5), (0, 1, 3, 4, 6))


def stages_of(*kinds: str) -> list[StageLayers]:
    """Stages whose layers have a state (`S`) or full attention (`F`) each."""
    stages, first = [], 0
    for number, letters in enumerate(kinds):
        full, stateful = (
            tuple(first + at for at, letter in enumerate(letters) if letter == kind)
            for kind in "FS"
        )
        stages.append(StageLayers(full, stateful, number, len(kinds)))
        first += len(letters)
    return stages


class StateWorld(WindowWorld):
    """One server's cache; `step` does one random thing."""

    host_pages = 64

    chunks = (None, 8, 9)

    def make_pools(  # type: ignore[override]  # each model has options of its own
        self, patch: pytest.MonkeyPatch, device_pages: int, *, num_states: int = 40,
        layers: StageLayers = WHOLE_MODEL,
    ) -> dict[str, Any]:  # fmt: skip
        """See `WindowWorld.make_pools`."""
        settings = SimpleNamespace(
            mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False
        )
        patch.setattr(mamba, "get_exec", lambda: SimpleNamespace(mamba=settings))
        patch.setattr(mamba, "mamba_cache_chunk_size", lambda: PAGE)
        patch.setattr(mamba, "mamba_checkpoint_grid", lambda page: page)
        self.num_states, self.layers = num_states, layers
        self.req_pool = HybridReqToTokenPool(
            size=16, mamba_size=num_states, mamba_spec_state_size=16,
            max_context_len=MAX_TOKENS, device="cpu", enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                shape=_SHAPE, layers=list(layers.stateful),
                dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
            ),
            mamba_layer_ids=list(layers.stateful), enable_mamba_extra_buffer=True,
            start_layer=layers.first,
        )  # fmt: skip
        self.kv_pool = HybridLinearKVPool(
            size=device_pages * PAGE, dtype=torch.bfloat16, page_size=PAGE, head_num=self.heads,
            head_dim=DIM, full_attention_layer_ids=list(layers.full), device="cpu",
            mamba_pool=self.req_pool.mamba_pool, start_layer=layers.first,
        )  # fmt: skip
        self.allocator = PagedTokenToKVPoolAllocator(
            device_pages * PAGE, PAGE, torch.bfloat16, "cpu", self.kv_pool, False
        )
        self.full_pool = describe_pools(self.kv_pool).full
        self.ropes, self.layout = self.ropes_of(self.full_pool), self.full_pool.layout(PAGE)
        params = SimpleNamespace(req_to_token_pool=self.req_pool, pp_size=layers.num_stages)
        snapshots = snapshots_of(SimpleNamespace(is_hybrid_ssm=True, params=params), self.layout)
        assert snapshots is not None
        self.snapshots = snapshots
        self._branches: dict[str, int | None] = {}
        self._part_bytes = self.layout.tail_offset - 512
        # Each check of the store looks at all states in it.
        self._values_of = functools.lru_cache(maxsize=1024)(self._make_values)
        self._bytes_of = functools.lru_cache(maxsize=1024)(self._make_bytes)
        return {
            "tree_components": (ComponentType.FULL, ComponentType.MAMBA),
            "enable_mamba_extra_buffer": True,
            "pp_rank": layers.number,
            "pp_size": layers.num_stages,
        }

    def of_linker(self, cache: Any, copier: PageCopier) -> dict[str, Any]:
        """See `WindowWorld.of_linker`."""
        layers = awaited_layers(self.snapshots, self.kv_pool)
        return {
            "num_layers": 1 + max(map(max, layers)),
            "snapshots": self.snapshots,
            "state_layers": layers,
        }

    def count_loads(self, counter: Any) -> None:
        """See `WindowWorld.count_loads`."""
        for each in (self.kv_pool, self.req_pool):
            each.register_layer_transfer_counter(counter)

    # ---- the model ----

    def layer_rows(self) -> list[tuple[int, bool, torch.Tensor, int]]:
        """See `WindowWorld.layer_rows`; of the layers with full attention."""
        pool = self.kv_pool.full_kv_pool
        return [
            (layer, False, buffers[index], kind)
            for layer, index in self.kv_pool.full_attention_layer_id_mapping.items()
            for kind, buffers in enumerate((pool.k_buffer, pool.v_buffer))
        ]

    def state_values(
        self, tokens: list[int], tenant: tuple[str | None, ...], weights: int
    ) -> list[torch.Tensor]:
        """The state behind some tokens: `[L, ...]` of each tensor."""
        return self._values_of(self._last_print(tokens, tenant, weights))

    def _last_print(
        self, tokens: list[int], tenant: tuple[str | None, ...], weights: int
    ) -> tuple[float, ...]:
        return tuple(self.prints(tokens, tenant, weights)[-1].tolist())

    def _make_values(self, last: tuple[float, ...]) -> list[torch.Tensor]:
        """The state behind a token with these fingerprints; nobody may write to it."""
        prints = torch.tensor(last)
        out = []
        for tensor in self.snapshots.pool.tensors:
            values = torch.empty(tensor.shape[0], *tensor.shape[2:])
            number = values[0].numel()
            marks = prints.repeat(-(-number // len(prints)))[:number].reshape(values.shape[1:])
            for value, layer in zip(values, self.layers.stateful, strict=True):
                value[:] = torch.where(marks % 2 == layer % 2, marks, -marks - layer)
            if tensor.dtype == torch.float32:  # no two values of it alike
                values += torch.arange(number).reshape(values.shape[1:]) * 512
            out.append(values.to(tensor.dtype))
        return out

    def _make_bytes(self, last: tuple[float, ...]) -> bytes:
        """That state as it lies in DRAM, put together here, not by what is tested."""
        pieces = []
        for values in self._values_of(last):
            piece = values.contiguous().view(torch.uint8).numpy().tobytes()
            pieces.append(piece + bytes(-len(piece) % 64))
        whole = b"".join(pieces)
        return whole + bytes(-len(whole) % self._part_bytes)

    def write_state(self, slot: Any, req: Request, end: int) -> None:
        tenant = (req.extra_key, req.cache_salt)
        values = self.state_values(self.meant(req)[:end], tenant, self.identity.weights)
        for tensor, value in zip(self.snapshots.pool.tensors, values, strict=True):
            tensor[:, int(slot)] = value

    def check_state(self, req: Request, end: int) -> None:
        """What a request is about to go on from is its own state, at this position."""
        tenant = (req.extra_key, req.cache_salt)
        values = self.state_values(self.meant(req)[:end], tenant, self.identity.weights)
        slot = int(req.kv.mamba_pool_idx)
        for tensor, value in zip(self.snapshots.pool.tensors, values, strict=True):
            if not torch.equal(tensor[:, slot], value):
                raise WrongKVError(f"{req.rid}: its state is not that behind {end} tokens")

    def forward(self, req: Request, start: int, end: int) -> None:
        """Computes tokens [start, end) on the rows before them and on its state."""
        if not start and (req.kv.mamba_cow_src_index is not None or not req.kv.mamba_needs_clear):
            raise WrongKVError(f"{req.rid} begins with a state that is not empty")
        if req.kv.mamba_cow_src_index is not None:
            slot = req.kv.mamba_pool_idx.unsqueeze(0)
            self.req_pool.copy_mamba_state(req.kv.mamba_cow_src_index, slot)
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if start:
            self.check_state(req, start)
        super().forward(req, start, end)
        if end <= req.prompt_len:
            self.track_extend(req, start, end)
        elif end % TRACK == 0:
            self.track_decode(req, end)
        self.write_state(req.kv.mamba_pool_idx, req, end)

    def track_extend(self, req: Request, start: int, end: int) -> None:
        """As `_mamba_radix_cache_v2_req_prepare_for_extend` and the kernels behind it."""
        at = start + (end - start) // PAGE * PAGE
        if at == start:
            return
        kv = req.kv
        slot = kv.mamba_ping_pong_track_buffer[kv.mamba_next_track_idx]
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.req_pool.get_mamba_ping_pong_other_idx(
            kv.mamba_next_track_idx
        )
        branch = self._branches.get(req.rid)
        if branch is not None and start < branch < end and (branch - start) % PAGE == 0:
            at = branch
        kv.mamba_last_track_seqlen = at
        self.write_state(slot, req, at)

    def track_decode(self, req: Request, end: int) -> None:
        """As the decode of every so many tokens."""
        kv = req.kv
        self.write_state(kv.mamba_ping_pong_track_buffer[kv.mamba_next_track_idx], req, end)
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.req_pool.get_mamba_ping_pong_other_idx(
            kv.mamba_next_track_idx
        )
        kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, end

    def check_attended(self, req: Request, end: int) -> None:
        """See `WindowWorld.check_attended`."""
        self.window = MAX_TOKENS
        super().check_attended(req, end)

    # ---- checks ----

    def note_pages(self, req: Request) -> None:
        """Remembers what every page and part of a state of a request has to hold, by its key."""
        tenant = (req.extra_key, req.cache_salt)
        meant = self.meant(req)
        for page, key in enumerate(self.keys(req.tokens, *tenant)):
            tokens = meant[: (page + 1) * PAGE]
            page_hash = np.frombuffer(bytes.fromhex(key), np.uint8)
            self.made[page_hash.tobytes()] = (0, tenant, tokens)
            for part in range(self.snapshots.num_parts):
                self.made[part_hashes(page_hash, part).tobytes()] = (part + 1, tenant, tokens)

    def check_store(self) -> None:
        """Every page and part in DRAM is what its key says."""
        table = self.store._books.table
        with table.lock:
            rows = table.index.rows()
            rows = rows[(table.index.flags[rows] & READY) != 0]
            keys, numbers = table.index.keys(rows)
            slots = self.arena.slots[table.index.host_slot[rows]]
        for key, number, slot in zip(keys, numbers, slots, strict=True):
            space = self.store._spaces.find(int(number))
            assert space is not None
            weights = space.digest[0] - 1
            part, tenant, tokens = self.made[key.tobytes()]
            first = len(tokens) - PAGE
            meta, _ = parse_header(slot)
            assert (meta.page_hash, meta.position) == (key.tobytes(), first), meta
            if part:
                self.check_part(slot, part - 1, tokens, tenant, weights)
            else:
                self.check_page(slot, self.prints(tokens, tenant, weights)[first:])

    def check_page(self, slot: Any, expected: torch.Tensor) -> None:
        for index, layer in enumerate(self.layers.full):
            for kind, offsets in enumerate((self.layout.k_offsets, self.layout.v_offsets)):
                block = slot[offsets[index] :][: PAGE * self.heads * DIM * 2].view(np.int16)
                values = torch.from_numpy(block.copy()).view(torch.bfloat16)
                shape = self.heads, DIM
                wanted = self.row(expected, layer, kind, shape)
                if not torch.equal(values.view(PAGE, *shape), wanted):
                    raise WrongKVError(f"a page, layer {layer}")

    def check_part(
        self, slot: Any, part: int, tokens: list[int], tenant: Any, weights: int
    ) -> None:
        """Compares with what `_make_bytes` says."""
        size = self._part_bytes
        whole = self._bytes_of(self._last_print(tokens, tenant, weights))
        if slot[512 : 512 + size].tobytes() != whole[part * size : (part + 1) * size]:
            raise WrongKVError(f"part {part} of the state behind {len(tokens)} tokens")

    def poison(self) -> None:
        """Overwrites rows and states that became free, and the padding ones."""
        lists = (self.allocator.free_pages, self.allocator.release_pages)
        free = {page for each in lists if each is not None for page in each.tolist()} | {0}
        new = np.array(sorted(free - self._poisoned[0] | {0}))
        rows = (new[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        pool = self.kv_pool.full_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.view(torch.int16).numpy()[rows] = POISON
        slots = set(self.req_pool.mamba_allocator.free_slots.tolist()) | {0}
        fresh = sorted(slots - self._poisoned[1] | {0})
        for tensor in self.snapshots.pool.tensors:
            tensor[:, fresh] = -7777.0
        self._poisoned = [free, slots]

    # ---- requests ----

    def match(self, req: Request, *, takes_state: bool = False) -> None:
        """As `match_kv_cache` does."""
        result = self.matched(req, cow_mamba=takes_state)
        self._branches[req.rid] = result.mamba_branching_seqlen

    def chunk_end(self, most: int) -> int:
        """Inside of a page, too, as with `--enable-mixed-chunk`."""
        return most

    def may_run_more(self) -> bool:
        """SGLang runs no more requests than there are five states for each."""
        return len(self.running) < min(RUNNING, self.num_states // 5)

    def match_to_run(self, req: Request) -> None:
        """See `WindowWorld.match_to_run`."""
        self.match(req, takes_state=True)

    def refuse(self, req: Request) -> None:
        """As the scheduler does where a request that it has matched finds no room.

        What was noted of its state is void. Its slot is given back; that of a session's turn stays
        with it, as SGLang takes it for the session's.
        """
        self.match(req, takes_state=True)
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if req.kv.holds_mamba and not req.session:
            self.req_pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
            req.kv.mamba_pool_idx = None

    def make_room_for_states(self, req: Request) -> None:
        """As `alloc_req_slots` does."""
        needed = 2 + (not req.kv.holds_mamba)
        lacks = needed - self.req_pool.mamba_allocator.available_size()
        if lacks > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=lacks))

    def give_up(self, req: Request) -> None:
        """No room: what was prepared is taken back, its state too."""
        super().give_up(req)
        if req.kv.holds_mamba:
            self.req_pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_pool_idx = None

    def free_loaded(self, rows: torch.Tensor) -> None:
        self.allocator.free(rows)

    def allocate(self, num: int) -> torch.Tensor | None:
        return Scheduler.allocate(self, num)

    def checkpoint(self, req: Request, up_to: int) -> None:
        super().checkpoint(req, up_to)
        self.check_state(req, up_to)

    def slide(self, req: Request) -> None:
        """There are no windows."""

    def release(self, req: Request) -> None:
        if req.kv.holds_mamba:
            self.req_pool.free_mamba_cache(req)
        super().release(req)

    # ---- random steps ----

    def _do_evict(self) -> None:
        """Rows, or states, or both."""
        num, states = PAGE * self.rng.randint(1, 12), self.rng.randint(1, 6)
        self.cache.evict(
            self.rng.choice(
                (
                    EvictParams(num_tokens=num),
                    EvictParams(num_tokens=0, mamba_num=states),
                    EvictParams(num_tokens=num, mamba_num=states),
                )
            )
        )

    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self.req_pool.clear()

    def check_nothing_is_held(self) -> None:
        """No lock, row, state or plan outlives the requests."""
        assert not self.cache.linker.pending_offloads
        assert not self.cache.linker.hit_markers
        self.cache.evict(EvictParams(num_tokens=1 << 20, mamba_num=1 << 20))
        assert self.allocator.available_size() == self.allocator.size, "rows are lost"
        states = self.req_pool.mamba_allocator
        assert states.available_size() == states.size, "states are lost"
