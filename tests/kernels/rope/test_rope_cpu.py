"""The CPU rope kernels against the plain reference, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels import rope
from sglang_ext.kernels.rope import Corrections, PagedView, RopeSpec, naive
from tests.kernels.rope.rope_cases import (
    DTYPES,
    RULES,
    make_bed,
    make_spec,
    page_rows,
    random_rows,
    same_bits,
)

# heads, head dim, first rotated column, rotary dim, gpt-j pairs
SHAPES = {
    "mha": (3, 16, 0, 16, False),
    "odd_half": (2, 22, 0, 22, False),
    "gptj": (2, 24, 0, 24, True),
    "partial": (2, 20, 0, 12, False),
    "partial_gptj": (1, 20, 0, 6, True),
    "mla": (1, 40, 32, 8, True),
    "wide": (1, 140, 0, 140, False),
    "one_pair": (5, 3, 1, 2, False),
}


def check_round_trip(
    rows: torch.Tensor, positions: np.ndarray, spec: RopeSpec, page_size: int
) -> Corrections:
    """Save and load at the saved positions: the pool's bits; elsewhere: the rotation of x."""
    bed = make_bed(rows, page_size)
    before = bed.pool.clone()
    fixes = rope.save_k(bed.pool, bed.slots, positions, spec, bed.view)
    assert same_bits(bed.pool, before)
    back = bed.loaded()
    rope.load_k(bed.view, positions, spec, back, bed.slots, fixes)
    assert same_bits(bed.gather(back), rows)
    untouched = np.setdiff1d(np.arange(back.shape[0]), bed.slots)
    assert back[torch.from_numpy(untouched)].isnan().all()

    x = page_rows(bed)
    plain = bed.loaded()
    rope.load_k(bed.view, positions, spec, plain, bed.slots, None)
    assert same_bits(bed.gather(plain), naive.rotate(x, positions, spec))
    # The list holds the differing words, all of them and no others.
    differ = (naive.bits(bed.gather(plain)) != naive.bits(rows)).flatten().nonzero().flatten()
    width = rows.shape[1] * rows.shape[2]
    listed = fixes.page.astype(np.int64) * page_size * width + fixes.element
    assert sorted(listed.tolist()) == differ.tolist()

    elsewhere = positions[::-1].copy()
    moved = bed.loaded()
    rope.load_k(bed.view, elsewhere, spec, moved, bed.slots, None)
    assert same_bits(bed.gather(moved), naive.rotate(x, elsewhere, spec))
    return fixes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(dtype: torch.dtype, rule: str, shape: str) -> None:
    heads, dim, first, rotary_dim, interleaved = SHAPES[shape]
    spec = make_spec(rotary_dim, rule, first=first, interleaved=interleaved, table=dtype)
    positions = np.random.default_rng(1).integers(0, spec.max_pos, 15)
    rows = naive.rotate(random_rows((15, heads, dim), dtype), positions, spec)
    check_round_trip(rows, positions, spec, page_size=5)


@pytest.mark.parametrize("scaling", ["plain", "linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_tables(scaling: str, table: torch.dtype) -> None:
    spec = make_spec(32, "eager", scaling=scaling, table=table)
    positions = np.arange(16) * 31
    rows = naive.rotate(random_rows((16, 2, 32), torch.bfloat16), positions, spec)
    check_round_trip(rows, positions, spec, page_size=16)


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=4 * 2 * 12 * 4, max_size=4 * 2 * 12 * 4),
    dtype=st.sampled_from(DTYPES),
    rule=st.sampled_from(RULES),
    interleaved=st.booleans(),
    start=st.integers(0, 500),
)
def test_any_bits_come_back(
    data: bytes, dtype: torch.dtype, rule: str, interleaved: bool, start: int
) -> None:
    words = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)[: 4 * 2 * 12]
    spec = make_spec(10, rule, first=1, interleaved=interleaved, table=dtype)
    check_round_trip(words.view(4, 2, 12).clone(), np.arange(4) + start, spec, page_size=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_survive(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4
    big = torch.finfo(dtype).max
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), tiny, -tiny, big, -big, 1.0]
    rows = torch.cartesian_prod(*[torch.tensor(special)] * 2).to(dtype).reshape(10, 5, 4)
    if dtype is not torch.float32:  # a NaN with a payload and a sign
        naive.bits(rows)[0, 0, 0] = -1
    for rule in RULES:
        spec = make_spec(4, rule, table=dtype)
        check_round_trip(rows, np.arange(10) * 50, spec, page_size=10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_position_zero_needs_no_corrections(dtype: torch.dtype) -> None:
    spec = make_spec(64)
    rows = random_rows((64, 2, 64), dtype, ratio=1000.0)
    assert len(check_round_trip(rows, np.zeros(64, np.int64), spec, page_size=16)) == 0


def test_zero_rows_need_no_corrections() -> None:
    spec = make_spec(64)
    rows = torch.zeros(512, 1, 64, dtype=torch.bfloat16)
    assert len(check_round_trip(rows, np.arange(512), spec, page_size=16)) == 0


# A 16-bit table adds rounding of its own; measured shares are in the README.
@pytest.mark.parametrize("ratio", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("rule", ["eager", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_corrections_are_rare(dtype: torch.dtype, rule: str, ratio: float) -> None:
    table = dtype if rule == "eager" else torch.float32
    spec = make_spec(128, rule, table=table)
    positions = np.arange(512)
    x = random_rows((512, 2, 128), dtype, ratio=ratio)
    fixes = check_round_trip(naive.rotate(x, positions, spec), positions, spec, page_size=64)
    assert len(fixes) / x.numel() < 0.001


def test_same_input_same_output() -> None:
    spec = make_spec(32)
    positions = np.arange(128)
    rows = naive.rotate(random_rows((128, 2, 32), torch.bfloat16), positions, spec)
    beds = [make_bed(rows, 16), make_bed(rows, 16)]
    lists = [rope.save_k(b.pool, b.slots, positions, spec, b.view) for b in beds]
    assert np.array_equal(beds[0].view.arena, beds[1].view.arena)
    for name in ("page", "element", "bits"):
        assert np.array_equal(getattr(lists[0], name), getattr(lists[1], name))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_move_equals_reference(dtype: torch.dtype, interleaved: bool) -> None:
    spec = make_spec(18, "fp32", first=2, interleaved=interleaved, table=dtype)
    rows = random_rows((12, 3, 24), dtype)
    bed = make_bed(rows, 4)
    saved = np.arange(12) + 7
    wanted = np.where(np.arange(12) % 3 == 0, saved, saved + 91)
    rope.copy_rows_to_pages(bed.pool, bed.slots, bed.view)
    moved = bed.loaded()
    rope.move_k(bed.view, saved, wanted, spec, moved, bed.slots)
    assert same_bits(bed.gather(moved), naive.move(rows, saved, wanted, spec))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_plain_copies(dtype: torch.dtype) -> None:
    rows = torch.randn(12, 2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    width = 10
    pool = torch.zeros(20, 2 * width, dtype=dtype)[:, width:].view(-1, 2, 5)
    slots = np.random.default_rng(0).permutation(20)[:12].astype(np.int64)
    pool[torch.from_numpy(slots)] = rows
    arena = np.zeros((4, 256), np.uint8)
    view = PagedView(arena, np.array([3, 0, 1]), 6, 4)
    rope.save_v(pool, slots, view)
    back = torch.zeros_like(pool)
    rope.load_v(view, back, slots)
    assert torch.equal(back.view(torch.uint8), pool.view(torch.uint8))
    part = torch.zeros_like(pool)
    rope.load_v(view, part, slots[3:9], first_row=3)
    wanted = torch.zeros_like(pool)
    wanted[torch.from_numpy(slots[3:9])] = rows[3:9]
    assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))


def test_no_rope_copies() -> None:
    bed = make_bed(random_rows((8, 2, 6), torch.bfloat16), 4)
    positions = np.arange(8)
    assert len(rope.save_k(bed.pool, bed.slots, positions, None, bed.view)) == 0
    assert same_bits(page_rows(bed), bed.rows)
    back = bed.loaded()
    rope.load_k(bed.view, positions + 5, None, back, bed.slots, None)
    assert same_bits(bed.gather(back), bed.rows)


def test_part_of_pages_with_corrections() -> None:
    spec = make_spec(16)
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 65536, (12, 2, 16), np.uint16))
    rows = rows.view(torch.bfloat16)
    bed = make_bed(rows, 4)
    positions = np.arange(12) + 3
    fixes = rope.save_k(bed.pool, bed.slots, positions, spec, bed.view)
    assert len(fixes) > 0
    back = bed.loaded()
    rope.load_k(bed.view, positions[3:10], spec, back, bed.slots[3:10], fixes, first_row=3)
    assert same_bits(bed.gather(back)[3:10], rows[3:10])
    assert bed.gather(back)[10:].isnan().all()


def test_refuses_what_does_not_fit() -> None:
    spec = make_spec(16, max_pos=20)
    bed = make_bed(random_rows((8, 2, 16), torch.bfloat16), 4)
    positions = np.arange(8)
    with pytest.raises(IndexError, match="positions"):
        rope.save_k(bed.pool, bed.slots, positions + 15, spec, bed.view)
    with pytest.raises(IndexError, match="token slots"):
        rope.save_k(bed.pool, bed.slots + 100, positions, spec, bed.view)
    with pytest.raises(ValueError, match="fill"):
        rope.save_k(bed.pool, bed.slots[:7], positions[:7], spec, bed.view)
    far = replace(bed.view, byte_offset=bed.view.arena.shape[1])
    with pytest.raises(ValueError, match="does not lie in a slot"):
        rope.save_k(bed.pool, bed.slots, positions, spec, far)
    sparse = torch.zeros(11, 2, 32, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match="dense"):
        rope.save_k(sparse, bed.slots, positions, spec, bed.view)
    with pytest.raises(ValueError, match="rounding rule"):
        replace(spec, rule="float")


@pytest.mark.parametrize("rule", ["fp32", "fma_a", "fma_b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_detects_the_rule(dtype: torch.dtype, rule: str) -> None:
    spec = make_spec(16, "eager")
    found = rope.detect_rule(
        lambda x, p: naive.rotate(x, p, replace(spec, rule=rule)), spec, dtype, 16
    )
    expected = "eager" if (dtype, rule) == (torch.float32, "fp32") else rule
    assert found == expected


def test_detects_torch_eager_and_refuses_others() -> None:
    dtype = torch.bfloat16
    spec = make_spec(16, table=dtype)

    def eager(x: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        c = torch.from_numpy(spec.cos[positions])[:, None].to(dtype)
        s = torch.from_numpy(spec.sin[positions])[:, None].to(dtype)
        x1, x2 = x.chunk(2, -1)
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)

    assert rope.detect_rule(eager, spec, dtype, 16) == "eager"
    assert rope.detect_rule(lambda x, p: eager(x, p) * 1.01, spec, dtype, 16) is None


def test_fma_reference_rounds_once() -> None:
    # 1 + 2^-23 squared, minus its rounding: only a fused operation sees the 2^-46.
    a = torch.tensor([1.0 + 2.0**-23])
    c = -(a * a)
    assert naive._fma(a, a, c).item() == 2.0**-46


@pytest.mark.parametrize(("rule", "least"), [("fp32", 0.81), ("eager", 0.73)])
def test_moved_k_is_nearer_to_recomputation_than_delta(rule: str, least: float) -> None:
    from tests.kernels.rope.measure_rope import moved_shares

    shares = moved_shares(torch.bfloat16, rule, num_tokens=512)
    assert shares["pre"] > least
    assert shares["pre"] >= shares["plain"] > shares["delta"]
    assert shares["delta"] < 0.5
