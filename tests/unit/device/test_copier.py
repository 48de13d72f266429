"""Pages between a real pool and slots: exact at their position, refused where they cannot move."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.device.copier import CopyError, PageCopier
from sglang_ext.device.layout import ROPE_BOUND, ROPE_DELTA, ROPE_PRE, read_tails, write_tail
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels import rope as kernels
from sglang_ext.kernels.rope import RopeSpec, naive

PAGE, LAYERS, HEADS, DIM, PAGES = 8, 3, 2, 16, 40
MAX_POSITION = 4096


def spec(rotary_dim: int = DIM, interleaved: bool = False, rule: str = "eager") -> RopeSpec:
    freq = 10_000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(MAX_POSITION)[:, None] * freq[None]
    cos = np.ascontiguousarray(np.cos(angles), np.float32)
    return RopeSpec(cos, np.sin(angles).astype(np.float32), rotary_dim, 0, interleaved, rule)


class Rig:
    """A pool, an arena and a copier."""

    def __init__(
        self, *, mode: str = "pre", dtype: torch.dtype = torch.bfloat16, mla: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        shape = (PAGES * PAGE, 1 if mla else HEADS, DIM)
        self.k = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]
        self.v = [torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS)]
        self.pool = DevicePool(
            "mla" if mla else "mha", dtype, tuple(self.k), () if mla else tuple(self.v), 0,
            PAGES * PAGE,
        )  # fmt: skip
        self.layout = self.pool.layout(PAGE)
        self.slots = np.full((16, self.layout.slot_bytes), 0xEE, np.uint8)
        self.ropes = [
            LayerRope(spec(), movable=True),
            LayerRope(spec(8, interleaved=True, rule="fp32"), movable=True),
            LayerRope(None, movable=True),
        ]
        self.copier = PageCopier(
            self.pool, self.layout, self.ropes, self.slots, mode=mode, kernels=kernels
        )
        self._generator = generator

    def fill(self, rows: np.ndarray, position: int) -> list[torch.Tensor]:
        """Writes rotated K to rows of the pool, as a model would; returns it before rotation."""
        positions = position + np.arange(len(rows))
        plain = []
        for layer, rope in enumerate(self.ropes):
            x = torch.randn(len(rows), self.k[layer].shape[1], DIM, generator=self._generator)
            x = x.to(self.pool.dtype)
            plain.append(x)
            used = RIG_SPECS[layer] if rope.spec is None else rope.spec
            rotated = x if used is None else naive.rotate(x, positions, used)
            self.k[layer][torch.from_numpy(rows)] = rotated
        return plain

    def disturb(self, rows: np.ndarray) -> None:
        """Puts bits in layer 0 that no rotation of values on the grid gives."""
        noise = torch.randn(len(rows), HEADS, DIM, generator=self._generator)
        noise *= torch.tensor([500.0, *[0.001] * (DIM - 1)])
        self.k[0][torch.from_numpy(rows)] = noise.to(self.pool.dtype)

    def read(self, rows: np.ndarray) -> list[torch.Tensor]:
        index = torch.from_numpy(rows)
        return [t[index].clone() for t in (*self.k, *(self.v if self.pool.v else ()))]

    def load(self, page_slots: list[int], rows: np.ndarray, position: int) -> None:
        job = self.copier.prepare_load(np.array(page_slots), rows, position)
        for layer in range(LAYERS):
            self.copier.load_layer(job, layer)


RIG_SPECS = [spec(), spec(8, interleaved=True, rule="fp32"), None]
ROWS = np.arange(3 * PAGE, 6 * PAGE)
OTHER = np.arange(20 * PAGE, 23 * PAGE)[::-1].copy()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(naive.bits(x), naive.bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["pre", "delta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_the_same_position_gives_the_same_bits(mode: str, dtype: torch.dtype, mla: bool) -> None:
    rig = Rig(mode=mode, dtype=dtype, mla=mla)
    rig.fill(ROWS, 64)
    saved = rig.copier.save(ROWS, 64, np.array([5, 2, 9]))
    wanted = ROPE_PRE if mode == "pre" else ROPE_DELTA
    assert {page.rope_state for page in saved} == {wanted}
    assert (rig.slots[5, :512] == 0xEE).all()  # the header is the linker's
    assert (rig.slots[3] == 0xEE).all()
    before = rig.read(ROWS)
    rig.load([5, 2, 9], OTHER, 64)
    assert same(rig.read(OTHER), before)


def test_moved_pages_are_rotated_to_their_new_position() -> None:
    rig = Rig()
    plain = rig.fill(ROWS, 64)
    rig.copier.save(ROWS, 64, np.array([0, 1, 2]))
    rig.load([0, 1, 2], OTHER, 1000)
    for layer, used in enumerate(RIG_SPECS):
        found = rig.k[layer][torch.from_numpy(OTHER)]
        if used is None:
            assert torch.equal(found, plain[layer])
            continue
        wanted = naive.rotate(plain[layer], 1000 + np.arange(len(OTHER)), used)
        exact = (naive.bits(found) == naive.bits(wanted)).float().mean()
        assert exact > 0.75
        assert torch.allclose(found.float(), wanted.float(), rtol=0.04, atol=0.04)


def test_corrections_do_not_follow_a_page_that_moves() -> None:
    rig = Rig()
    rig.fill(ROWS, 64)
    rig.disturb(ROWS[PAGE : PAGE + 2])
    saved = rig.copier.save(ROWS, 64, np.array([0, 1, 2]))
    assert sum(page.num_corrections for page in saved) > 0
    job = rig.copier.prepare_load(np.array([0, 1, 2]), OTHER, 1000)
    assert job.corrections == [None] * LAYERS
    job = rig.copier.prepare_load(np.array([0, 1, 2]), OTHER, 64)
    assert any(job.corrections)


def test_a_bound_page_lists_nothing() -> None:
    """What it listed would be written to the position-free page behind it, which is another's."""
    rig = Rig()
    rig.fill(ROWS, 64)
    rig.copier.save(ROWS, 64, np.array([0, 1, 2]))
    layout, where = rig.layout, np.array([0, 1, 2])
    write_tail(rig.slots[1], layout, rope_state=ROPE_BOUND, position=64 + PAGE)
    assert not len(rig.copier.unusable(where, 64))
    before = rig.read(ROWS)
    rig.load([0, 1, 2], OTHER, 64)
    last = slice(2 * PAGE, None)
    assert same([t[last] for t in rig.read(OTHER)], [t[last] for t in before])
    write_tail(
        rig.slots[1], layout, rope_state=ROPE_BOUND, position=64 + PAGE,
        counts=[1, 0, 0], entries=np.array([[3, 0x4242]], np.uint32),
    )  # fmt: skip
    assert rig.copier.unusable(where, 64).tolist() == [1]
    assert rig.copier.damaged(where).tolist() == [1]
    with pytest.raises(CopyError, match="bound K saved at 72 is none of this model's"):
        rig.copier.prepare_load(where, OTHER, 64)


def test_a_bound_page_cannot_move() -> None:
    rig = Rig()
    rig.copier.bind(1, "a test")
    rig.fill(ROWS, 64)
    saved = rig.copier.save(ROWS, 64, np.array([0, 1, 2]))
    assert saved[0].rope_state == ROPE_BOUND
    before = rig.read(ROWS)
    with pytest.raises(CopyError, match="bound to position 64"):
        rig.copier.prepare_load(np.array([0, 1, 2]), OTHER, 65)
    rig.load([0, 1, 2], OTHER, 64)
    assert same(rig.read(OTHER), before)


def test_delta_pages_are_rotated_by_the_difference() -> None:
    rig = Rig(mode="delta")
    plain = rig.fill(ROWS, 64)
    saved = rig.copier.save(ROWS, 64, np.array([0, 1, 2]))
    assert saved[0].rope_state == ROPE_DELTA
    rig.load([0, 1, 2], OTHER, 1000)
    for layer, used in enumerate(RIG_SPECS):
        found = rig.k[layer][torch.from_numpy(OTHER)]
        if used is None:
            assert torch.equal(found, plain[layer])
            continue
        wanted = naive.rotate(plain[layer], 1000 + np.arange(len(OTHER)), used)
        assert torch.allclose(found.float(), wanted.float(), rtol=0.04, atol=0.04)


def test_one_bound_layer_binds_the_page_and_bind_all_every_layer() -> None:
    rig = Rig()
    rig.copier.bind_all("a test")
    rig.fill(ROWS, 0)
    assert {page.rope_state for page in rig.copier.save(ROWS, 0, np.array([0, 1, 2]))} == {
        ROPE_BOUND
    }
    assert all(not rope.movable for rope in rig.copier.ropes)


def test_position_free_pages_are_refused_where_a_layer_has_no_known_rotation() -> None:
    rig = Rig()
    rig.fill(ROWS, 0)
    rig.copier.save(ROWS, 0, np.array([0, 1, 2]))
    rig.copier.bind(0, "a test")
    with pytest.raises(CopyError, match="pre K saved at 0 is none of this model's"):
        rig.copier.prepare_load(np.array([0, 1, 2]), OTHER, 0)


def test_a_page_with_too_many_corrections_is_kept_bound_and_the_others_are_not() -> None:
    rig = Rig()
    rig.fill(ROWS, 64)
    rig.disturb(ROWS[PAGE : 2 * PAGE])
    object.__setattr__(rig.layout, "max_corrections", 4)
    saved = rig.copier.save(ROWS, 64, np.array([0, 1, 2]))
    assert [page.rope_state for page in saved] == [ROPE_PRE, ROPE_BOUND, ROPE_PRE]
    assert saved[1].num_corrections == 0
    tails = read_tails(rig.slots, np.array([1]), rig.layout)
    assert tails is not None
    assert tails.position.tolist() == [64 + PAGE]
    # A load of mixed pages, then each kind alone.
    before = rig.read(ROWS)
    rig.load([0, 1, 2], OTHER, 64)
    assert same(rig.read(OTHER), before)
    rig.load([1], OTHER[:PAGE], 64 + PAGE)
    assert same(rig.read(OTHER[:PAGE]), rig.read(ROWS[PAGE : 2 * PAGE]))
    with pytest.raises(CopyError):
        rig.copier.prepare_load(np.array([0, 1, 2]), OTHER, 128)


def test_mixed_pages_with_corrections_each_to_its_own_page() -> None:
    """Places of corrections are counted anew when the bound pages are left out."""
    rig = Rig()
    object.__setattr__(rig.layout, "max_corrections", 200)
    rig.fill(ROWS, 64)
    rig.disturb(ROWS[:3])
    rig.disturb(ROWS[-3:])
    first = rig.copier.save(ROWS[: 2 * PAGE], 64, np.array([0, 1]))
    assert sum(page.num_corrections for page in first) > 0
    object.__setattr__(rig.layout, "max_corrections", -1)
    middle = np.arange(30 * PAGE, 31 * PAGE)
    rig.fill(middle, 64 + PAGE)
    (bound,) = rig.copier.save(middle, 64 + PAGE, np.array([7]))
    assert bound.rope_state == ROPE_BOUND
    object.__setattr__(rig.layout, "max_corrections", 200)
    last = rig.copier.save(ROWS[2 * PAGE :], 64 + 2 * PAGE, np.array([2]))
    assert last[0].num_corrections > 0
    rows = np.concatenate([ROWS[:PAGE], middle, ROWS[2 * PAGE :]])
    before = rig.read(rows)
    rig.load([0, 7, 2], OTHER, 64)
    assert same(rig.read(OTHER), before)


def test_a_slot_that_holds_no_page_of_this_layout() -> None:
    rig = Rig()
    with pytest.raises(CopyError, match="holds no page of this layout"):
        rig.copier.prepare_load(np.array([4]), OTHER[:PAGE], 0)


def test_a_table_that_grew_is_read_again() -> None:
    rig, whole = Rig(), spec()

    class Module:
        cos_sin_cache = torch.from_numpy(np.concatenate([whole.cos, whole.sin], axis=1))
        rotary_dim, is_neox_style = DIM, True

    rig.fill(ROWS, 2000)
    short = RopeSpec(whole.cos[:100].copy(), whole.sin[:100].copy(), DIM, 0, False, "eager")
    rig.copier.ropes[0] = LayerRope(short, movable=True, module=Module())
    rig.copier.save(ROWS, 2000, np.array([0, 1, 2]))
    before = rig.read(ROWS)
    rig.load([0, 1, 2], OTHER, 2000)
    assert same(rig.read(OTHER), before)
    grown = rig.copier.ropes[0].spec
    assert grown is not None
    assert grown.max_pos == MAX_POSITION
