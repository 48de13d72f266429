"""Window layers of another shape than the full ones: their groups, their pages, what these take."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.assembly.window_setup import bound_ropes, read_layers
from sglang_ext.device.copier import CopyError, PageCopier
from sglang_ext.device.layout import (
    HEADER_BYTES,
    NUM_WORD,
    ROPE_BOUND,
    LayerGroups,
    PageLayout,
    read_tails,
)
from sglang_ext.device.local_pages import LocalPages
from sglang_ext.device.pools import HybridPools, describe_pools
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.windows.block_groups import Block, BlockGroups, group_blocks
from sglang_ext.errors import HierKVConfigError
from sglang_ext.kernels import rope as kernels

PAGE, ROWS = 16, 12  # tokens of a page, pages of the pool


def mha_pool(shapes: list[tuple[int, int, int]], dtype: torch.dtype = torch.bfloat16) -> Any:
    """What of SGLang's pool is looked at: random K and V of layers of (heads, K size, V size)."""
    generator = torch.Generator().manual_seed(3)
    k, v = (
        [
            torch.randn(PAGE * ROWS, heads, sizes[at], generator=generator).to(dtype)
            for heads, *sizes in shapes
        ]
        for at in (0, 1)
    )

    class MHATokenToKVPool(SimpleNamespace):
        pass

    return MHATokenToKVPool(k_buffer=k, v_buffer=v, dtype=dtype)


def hybrid_pool(
    full: list[tuple[int, int, int]], window: list[tuple[int, int, int]], **options: Any
) -> Any:
    """SGLang's pool of a model whose layers alternate for as long as there are full ones."""
    order = [False, True] * len(full) + [True] * (len(window) - len(full))
    counts = [0, 0]
    layers: dict[int, tuple[int, bool]] = {}
    for layer, is_window in enumerate(order):
        if counts[is_window] < len((full, window)[is_window]):
            layers[layer] = (counts[is_window], is_window)
            counts[is_window] += 1

    class SWAKVPool(SimpleNamespace):
        pass

    return SWAKVPool(
        full_kv_pool=mha_pool(full), swa_kv_pool=mha_pool(window, **options),
        layers_mapping=layers, page_size=PAGE,
    )  # fmt: skip


class Rig:
    """Pools of two shapes, an arena full of other pages' bytes, and a copier a part."""

    def __init__(self) -> None:
        self.pools: HybridPools = describe_pools(
            hybrid_pool([(1, 48, 32)] * 3, [(2, 40, 24)] * 4), None
        )
        self.frame = self.pools.layout(PAGE)
        self.slots = np.full((8, self.frame.slot_bytes), 0xEE, np.uint8)
        full = PageCopier(
            self.pools.full, self.frame, bound_ropes(self.pools.full), self.slots,
            mode="pre", kernels=kernels,
        )  # fmt: skip
        self.parts = [
            full.for_pool(part, bound_ropes(part), part.layout(PAGE, self.frame, is_bound=True))
            for part in self.pools.window_parts()
        ]


def test_blocks_are_put_into_groups_in_order_and_no_group_takes_more_than_it_has_room_for() -> None:
    rng = random.Random(5)
    for _ in range(500):
        sizes = [rng.choice((64, 128, 192, 256)) for _ in range(rng.randint(1, 30))]
        capacity = rng.randint(max(sizes), 1000)
        blocks = [(Block(at // 2, bool(at % 2)), size) for at, size in enumerate(sizes)]
        groups = group_blocks(blocks, capacity)
        assert [block for group in groups for block in group] == [block for block, _ in blocks]
        size_of = dict(blocks)
        taken = [sum(size_of[block] for block in group) for group in groups]
        assert all(0 < num <= capacity for num in taken)
        # And each begins where the next block did not fit any more.
        for before, group in zip(taken, groups[1:], strict=False):
            assert before + size_of[group[0]] > capacity
    with pytest.raises(ValueError, match="a block of 128 bytes in groups of 64"):
        group_blocks([(Block(0, is_v=False), 128)], 64)


def test_what_was_saved_of_every_block_is_loaded_again_and_nothing_else_is_in_a_page() -> None:
    rig = Rig()
    rows, others = np.arange(2 * PAGE, 4 * PAGE), np.arange(7 * PAGE, 9 * PAGE)[::-1].copy()
    window = rig.pools.window
    assert window is not None
    wanted = [tensor[torch.from_numpy(rows)].clone() for tensor in (*window.k, *window.v)]
    assert len(rig.parts) == 3
    for number, part in enumerate(rig.parts):
        slots = np.array([2 * number, 2 * number + 1])
        saved = part.save(rows, 5 * PAGE, slots)
        # A page of a group is one of the full layers to everybody else.
        expected = (ROPE_BOUND, rig.frame.payload_bytes(0), 0)
        assert {(p.rope_state, p.payload_bytes, p.num_corrections) for p in saved} == {expected}
        tails = read_tails(rig.slots, slots, rig.frame)
        assert tails is not None
        assert tails.position.tolist() == [5 * PAGE, 6 * PAGE]
        for gap in part.layout.gaps:
            assert not rig.slots[slots, gap].any()
    for tensor in (*window.k, *window.v):
        tensor[torch.from_numpy(others)] = 0
    for number, part in enumerate(rig.parts):
        job = part.prepare_load(np.array([2 * number, 2 * number + 1]), others, 5 * PAGE)
        for layer in range(part.pool.num_layers):
            part.load_layer(job, layer)
    for tensor, values in zip((*window.k, *window.v), wanted, strict=True):
        assert torch.equal(tensor[torch.from_numpy(others)], values)


def test_a_page_of_a_group_that_lists_corrections_or_has_moved_is_not_loaded() -> None:
    rig = Rig()
    part, rows = rig.parts[-1], np.arange(PAGE)
    # Fewer blocks than the tail has layers: what is listed for those names no block.
    assert part.pool.num_layers < rig.frame.num_layers
    part.save(rows, 0, np.array([0]))
    with pytest.raises(CopyError, match="cannot be loaded elsewhere"):
        part.prepare_load(np.array([0]), rows, PAGE)
    tail = rig.slots[0, rig.frame.tail_offset :].view(np.uint32)
    tail[NUM_WORD] = 1
    tail[6 + rig.frame.num_layers - 1] = 1
    assert read_tails(rig.slots, np.array([0]), part.layout) is None
    with pytest.raises(CopyError, match="holds no page of this layout"):
        part.prepare_load(np.array([0]), rows, 0)


def test_the_rules_of_the_full_layers_pages_hold_for_those_of_groups() -> None:
    rig = Rig()
    full = LocalPages(rig.frame, bound_ropes(rig.pools.full), "pre", exact_only=True)
    for part in rig.parts:
        assert (part.layout.slot_bytes, part.layout.tail_offset) == (
            rig.frame.slot_bytes, rig.frame.tail_offset,
        )  # fmt: skip
        assert part.layout.payload_bytes(0) == rig.frame.payload_bytes(0)
        assert part.rules.states == full.states
    movable = [LayerRope(None, movable=True)] * rig.parts[0].pool.num_layers
    with pytest.raises(ValueError, match="hold K as the engine has it"):
        rig.parts[0].for_pool(rig.parts[0].pool, movable, rig.parts[0].layout)


def test_blocks_that_do_not_fit_into_their_frame_are_no_layout() -> None:
    frame = PageLayout(PAGE, (64,), (64,), 2, is_bound=True)
    assert (frame.gaps, frame.max_corrections) == ((), 0)
    assert PageLayout(PAGE, (96,), (0,), 2, frame, is_bound=True).gaps == (slice(2048, 2560),)
    with pytest.raises(ValueError, match="whose tail is at"):
        PageLayout(PAGE, (64, 65), (0, 0), 2, frame, is_bound=True)
    with pytest.raises(ValueError, match="nothing to list"):
        PageLayout(PAGE, (64,), (0,), 2, frame)


def test_layers_of_one_shape_are_grouped_by_layers_as_they_always_were() -> None:
    found = describe_pools(hybrid_pool([(2, 32, 32)] * 2, [(2, 32, 32)] * 3))
    assert not isinstance(found.groups, BlockGroups)
    assert found.groups is not None
    assert found.groups.describe() == [[0, 2], [1, 3], [3, 4]]
    assert [len(part.k) for part in found.window_parts()] == [2, 2]


def test_a_drafts_layers_lie_behind_the_full_ones_and_are_numbered_behind_all() -> None:
    whole = hybrid_pool([(2, 32, 32)] * 2, [(2, 32, 32)] * 5)
    draft = mha_pool([(2, 32, 32)])
    found = describe_pools(whole, drafts=[draft])
    assert isinstance(found.groups, LayerGroups)
    assert found.groups.describe() == [[0, 2, 7], [1, 3, 4], [4, 5, 6]]
    assert found.full.k[2] is draft.k_buffer[0]
    assert found.full.v[2] is draft.v_buffer[0]
    assert {len(part.k) for part in found.window_parts()} == {3}


def test_beside_a_draft_with_rows_of_another_width_windows_are_blocks() -> None:
    draft = mha_pool([(1, 32, 32)])
    found = describe_pools(hybrid_pool([(2, 32, 32)] * 2, [(2, 32, 32)] * 3), drafts=[draft])
    assert isinstance(found.groups, BlockGroups)
    assert (found.groups.full, found.groups.window) == ((0, 2, 5), (1, 3, 4))
    assert sum(map(len, found.groups.groups)) == 6
    layout = found.layout(PAGE)
    for part in found.window_parts():
        assert part.layout(PAGE, layout, is_bound=True).slot_bytes == layout.slot_bytes


def test_layers_whose_kv_nobody_reads_are_left_out() -> None:
    whole = hybrid_pool([(1, 64, 64)] * 3, [(2, 32, 48)] * 5)
    found = describe_pools(whole, {0, 1, 2, 3, 6})
    assert isinstance(found.groups, BlockGroups)
    assert (found.groups.full, found.groups.window) == ((0, 2), (1, 3, 6))
    assert found.full.num_layers == 2
    assert found.groups.describe() == [[0, 2], [[1, "k"], [1, "v"], [3, "k"]],
                                       [[3, "v"], [6, "k"], [6, "v"]]]  # fmt: skip
    first = whole.swa_kv_pool
    assert found.window_parts()[1].k[1] is first.k_buffer[whole.layers_mapping[6][0]]


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        (hybrid_pool([(1, 16, 16)], [(4, 32, 16)]), "as large as K or V of one window layer"),
        (
            hybrid_pool([(1, 32, 32)], [(1, 16, 16)], dtype=torch.float16),
            "in torch.bfloat16 and mha in torch.float16",
        ),
        (hybrid_pool([], [(1, 16, 16)]), "a model without one of the two"),
    ],
)
def test_pools_that_do_not_fit_together_are_refused(pool: Any, sentence: str) -> None:
    if not pool.full_kv_pool.k_buffer:  # SGLang would not build the tree, either
        pool.full_kv_pool = mha_pool([(1, 16, 16)])
        pool.layers_mapping = {0: (0, True)}
    with pytest.raises(HierKVConfigError, match=sentence):
        describe_pools(pool)


def test_which_layers_are_read_is_compared_with_the_configuration() -> None:
    def read(num_sharing: int | None, layers: list[int]) -> set[int] | None:
        class Attention(torch.nn.Module):
            def __init__(self, layer_id: int) -> None:
                super().__init__()
                self.layer_id, self.attn_type = layer_id, "decoder"

        model = torch.nn.ModuleList([Attention(layer) for layer in layers])
        config = SimpleNamespace(num_hidden_layers=5)
        if num_sharing is not None:
            config.num_kv_shared_layers = num_sharing
        return read_layers(config, model)

    assert read(None, [0, 1]) is None
    assert read(0, [0, 1]) is None
    assert read(2, [0, 1, 2, 1, 2]) == {0, 1, 2}
    with pytest.raises(HierKVConfigError, match=r"one that reads layers \[0, 1, 2, 3\]"):
        read(2, [0, 1, 2, 3, 1])


@dataclasses.dataclass(frozen=True)
class Published:
    """A model of a published size.

    Attributes:
        num_full: full layers with KV of their own.
        full: heads of one, size of K, size of V.
        num_window: window layers with KV of their own.
        window: as `full`.
        width: tokens of a window.
        taken: how many times the bytes that its layers need a prompt takes, on one of 1, 2, 4 and
            8 ranks.
    """

    num_full: int
    full: tuple[int, int, int]
    num_window: int
    window: tuple[int, int, int]
    width: int
    taken: tuple[float, float, float, float]


PUBLISHED = {
    "gemma-4-e2b": Published(3, (1, 512, 512), 12, (1, 256, 256), 512, (1.010,) * 4),
    "gemma-4-e4b": Published(
        4, (2, 512, 512), 20, (2, 256, 256), 512, (1.052, 1.056, 1.056, 1.056)
    ),
    "gemma-4-26b-a4b": Published(
        5, (2, 512, 512), 25, (8, 256, 256), 1024, (1.003, 1.006, 1.006, 1.084)
    ),
    "gemma-4-31b": Published(
        10, (4, 512, 512), 50, (16, 256, 256), 1024, (1.001, 1.002, 1.003, 1.003)
    ),
    "mimo-v2-flash": Published(
        9, (4, 192, 128), 39, (8, 192, 128), 128, (1.036, 1.039, 1.044, 1.030)
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_takes_the_bytes_that_its_layers_need(name: str) -> None:
    """A prompt of 4,096 tokens in bfloat16 that is resumed at its end, with headers and all."""
    model = PUBLISHED[name]
    taken = [_taken_of_a_prompt(model, num_ranks) for num_ranks in (1, 2, 4, 8)]
    assert taken == pytest.approx(model.taken, abs=6e-4)


@pytest.mark.parametrize(
    ("name", "num_ranks", "taken"), [("gemma-4-e4b", 8, 1.015), ("gemma-4-26b-a4b", 8, 1.021)]
)
def test_what_a_window_takes_is_little_of_a_long_prompt(
    name: str, num_ranks: int, taken: float
) -> None:
    found = _taken_of_a_prompt(PUBLISHED[name], num_ranks, 32_768)
    assert found == pytest.approx(taken, abs=6e-4)


def _taken_of_a_prompt(model: Published, num_ranks: int, num_tokens: int = 4096) -> float:
    """In bytes that its layers need, on each rank."""
    page = 64
    (full_k, full_v), (window_k, window_v) = (
        tuple(max(1, heads // num_ranks) * values * 2 for values in (k, v))
        for heads, k, v in (model.full, model.window)
    )
    rows = (full_k,) * model.num_full, (full_v,) * model.num_full
    layout = PageLayout(page, *rows, 2, is_bound=True)
    blocks = [
        (Block(at, is_v), page * size)
        for at in range(model.num_window)
        for is_v, size in ((False, window_k), (True, window_v))
    ]
    groups = group_blocks(blocks, layout.tail_offset - HEADER_BYTES)
    num_window = -(-model.width // page)
    taken = (num_tokens // page + len(groups) * num_window) * layout.slot_bytes
    needed = num_tokens * model.num_full * (full_k + full_v)
    needed += num_window * page * model.num_window * (window_k + window_v)
    return taken / needed
