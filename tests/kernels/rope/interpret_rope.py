"""Checks of the Triton rope kernels under the interpreter; run by test_rope_triton.py.

A process of its own, because `TRITON_INTERPRET` counts when the kernels are imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sglang_ext.kernels import rope
from sglang_ext.kernels.rope import RopeSpec, gpu, naive, tail_lists
from tests.kernels.interpreted import patch_once_a_launch
from tests.kernels.rope.rope_cases import (
    DTYPES,
    RULES,
    Bed,
    make_bed,
    make_spec,
    page_rows,
    random_rows,
    same_bits,
)
from tests.long_form import either

SHAPES = ((3, 16, 0, 16, False), (2, 20, 4, 10, True), (1, 40, 32, 8, True))


def check(rows: torch.Tensor, positions: np.ndarray, spec: RopeSpec, page_size: int) -> Bed:
    bed = make_bed(rows, page_size)
    fixes = gpu.save_k(bed.pool, bed.slots, positions, spec, bed.view)
    for load in (gpu.load_k, rope.load_k):  # either path loads what this one saved
        back = bed.loaded()
        load(bed.view, positions, spec, back, bed.slots, fixes)
        assert same_bits(bed.gather(back), rows)
    elsewhere = positions[::-1].copy()
    moved = bed.loaded()
    gpu.load_k(bed.view, elsewhere, spec, moved, bed.slots, None)
    assert same_bits(bed.gather(moved), naive.rotate(page_rows(bed), elsewhere, spec))

    on_cpu = make_bed(rows, page_size)
    fixes = rope.save_k(on_cpu.pool, on_cpu.slots, positions, spec, on_cpu.view)
    back = on_cpu.loaded()
    gpu.load_k(on_cpu.view, positions, spec, back, on_cpu.slots, fixes)
    assert same_bits(on_cpu.gather(back), rows)
    return bed


def check_shapes() -> None:
    # Any two of dtype, rule and shape meet; all three meet in test_rope_cpu.py. A page has a row by
    # default, as the interpreter takes its time for each; those of other checks have more.
    num_rows, page_size = either((2, 1), (4, 2))
    for i, dtype in enumerate(DTYPES):
        for j, rule in enumerate(RULES):
            heads, dim, first, rotary_dim, interleaved = SHAPES[(i + j) % len(SHAPES)]
            spec = make_spec(rotary_dim, rule, first=first, interleaved=interleaved, table=dtype)
            positions = np.random.default_rng(1).integers(0, spec.max_pos, num_rows)
            rows = naive.rotate(random_rows((num_rows, heads, dim), dtype), positions, spec)
            check(rows, positions, spec, page_size)


def check_random_bits() -> None:
    words = np.random.default_rng(0).integers(0, 256, 4 * 3 * 16 * 4, np.uint8)
    for dtype in DTYPES:
        rows = torch.from_numpy(words).view(dtype)[: 4 * 3 * 16].view(4, 3, 16)
        check(rows, np.arange(4) + 60, make_spec(16), 2)


def check_moves_and_copies() -> None:
    saved = np.arange(6) + 9
    wanted = saved + np.array([0, 5, 5, 0, 70, 1])
    for dtype in DTYPES:
        spec = make_spec(16, first=2, table=dtype)
        bed = make_bed(random_rows((6, 2, 20), dtype), 3)
        gpu.copy_rows_to_pages(bed.pool, bed.slots, bed.view)
        assert same_bits(page_rows(bed), bed.rows)
        back = bed.loaded()
        gpu.copy_pages_to_rows(bed.view, back, bed.slots[1:5], first_row=1)
        assert same_bits(bed.gather(back)[1:5], bed.rows[1:5])
        moved = bed.loaded()
        gpu.move_k(bed.view, saved, wanted, spec, moved, bed.slots)
        assert same_bits(bed.gather(moved), naive.move(bed.rows, saved, wanted, spec))


def check_corrections_are_rare() -> None:
    num_tokens = either(8, 16)
    positions = np.arange(num_tokens) * 31
    for ratio in (1.0, 1000.0):
        spec = make_spec(128, "fp32")
        x = random_rows((num_tokens, 2, 128), torch.bfloat16, ratio=ratio)
        bed = make_bed(naive.rotate(x, positions, spec), num_tokens)
        fixes = gpu.save_k(bed.pool, bed.slots, positions, spec, bed.view)
        assert len(fixes) / x.numel() < 0.002, (ratio, len(fixes))


def check_warm_up() -> None:
    for dtype in DTYPES:
        pool = random_rows((4, 2, 20), dtype)
        before = pool.clone()
        for spec in (make_spec(16, first=2, table=dtype), None):
            gpu.warm_up(pool, spec, 3)
        assert same_bits(pool, before)


def check_pages_of_an_index() -> None:
    """Words of a page of an index, as many a token as it takes: pages come back byte for byte."""
    size, row_bytes, num_pages = 8, 132, 5
    random = np.random.default_rng(5).integers(0, 256, (num_pages, size * row_bytes), np.uint8)
    index = torch.from_numpy(random)
    words = index.view(torch.int32).view(-1, 1, row_bytes // 4)
    gpu.warm_up(words, None, size)
    saved, wanted = np.array([3, 0]), np.array([1, 4])
    rows, other = (
        (pages[:, None] * size + np.arange(size)).reshape(-1) for pages in (saved, wanted)
    )
    wraps: list[Any] = [np.asarray, torch.from_numpy]  # in DRAM, and on the device
    for wrap in wraps:
        arena = np.full((3, 64 + size * row_bytes + 32), 0xEE, np.uint8)
        view = rope.PagedView(wrap(arena), wrap(np.array([2, 0])), 64, size)
        gpu.copy_rows_to_pages(words, wrap(rows), view)
        assert np.array_equal(arena[[2, 0], 64:-32], random[saved])
        assert (arena[1] == 0xEE).all()
        assert (arena[:, :64] == 0xEE).all()
        back = torch.zeros_like(index)
        gpu.copy_pages_to_rows(view, back.view(torch.int32).view(words.shape), wrap(other))
        assert np.array_equal(back[wanted].numpy(), random[saved])
        assert not back[[0, 2, 3]].any()


def check_what_lies_on_the_device() -> None:
    """Pages and indices as tensors give what arrays give, at any row of any page."""
    for dtype in DTYPES:
        spec = make_spec(16, first=2, table=dtype)
        positions = np.arange(6) + 30
        rows = naive.rotate(random_rows((6, 2, 20), dtype, ratio=300.0), positions, spec)
        bed = make_bed(rows, 3)
        fixes = gpu.save_k(bed.pool, bed.slots, positions, spec, bed.view)
        pages: Any = torch.from_numpy(bed.view.arena[bed.view.page_slots])
        numbers: Any = torch.arange(2)
        there = rope.PagedView(pages, numbers, bed.view.byte_offset, 3)
        on_device: list[Any] = [
            torch.from_numpy(each.astype(np.int64))
            for each in (fixes.page, fixes.element, fixes.bits)
        ]
        for first in (0, 1, 4):
            index = torch.from_numpy(bed.slots[first:])
            for rest in (None, rope.Corrections(*on_device)):
                want, back = bed.loaded(), bed.loaded()
                late = positions[first:]
                listed = None if rest is None else fixes
                gpu.load_k(bed.view, late, spec, want, bed.slots[first:], listed, first)
                gpu.load_k(there, torch.from_numpy(late), spec, back, index, rest, first)
                assert same_bits(back, want)
                assert rest is None or same_bits(bed.gather(back)[first:], rows[first:])


class Pages:
    """Poisoned pages and tails, as a device has them, for two layers."""

    def __init__(self, num_pages: int, page_size: int, width: int, item: int, capacity: int):
        block = page_size * width * item
        self.capacity = capacity
        self.first_byte = 64
        self.pages = np.full((num_pages, self.first_byte + 2 * block + 32), 0xEE, np.uint8)
        self.tails = np.full((num_pages, 4 * (6 + 2 + 2 * capacity) + 16), 0xEE, np.uint8)
        self.offsets = (self.first_byte, self.first_byte + block)
        self.heads = np.arange(3 * num_pages, dtype=np.int64) << 33
        self.heads[2::3] = 0
        self.page_size = page_size

    def save(self, kernels: Any, on_device: Any, bed: Bed, positions: Any, layers: Any) -> None:
        """Two layers: what of the pool is position-free, and the same as it is."""
        tokens = len(bed.slots)
        scratch = [np.full(n, 0xA5, np.uint8) for n in (bed.rows[0].numel() * tokens, 4 * tokens)]
        tails = on_device(self.tails)
        listing = rope.Listing(tails, 2, self.capacity, *map(on_device, scratch))
        kernels.begin_tails(tails, on_device(self.heads))
        rows, index = on_device(bed.slots), on_device(np.arange(len(self.pages)))
        for layer, spec in enumerate(layers):
            view = rope.PagedView(on_device(self.pages), index, self.offsets[layer], self.page_size)
            if spec is None:
                kernels.copy_rows_to_pages(bed.pool, rows, view)
            else:
                kernels.save_to_pages(
                    bed.pool, rows, on_device(positions), spec, view, listing, layer
                )

    def corrections(self, layer: int) -> rope.Corrections:
        words = self.tails.view(np.uint32)
        page, entries = [], []
        for at in range(len(words)):
            counts = words[at, 6:8]
            assert words[at, 4] == counts.sum()
            first = 8 + 2 * int(counts[:layer].sum())
            entries.append(words[at, first : first + 2 * counts[layer]].reshape(-1, 2))
            page += [at] * int(counts[layer])
        flat = np.concatenate(entries)
        return rope.Corrections(np.array(page, np.int32), flat[:, 0].copy(), flat[:, 1].copy())


def check_images() -> None:
    """Pages and tails that a device lays out are, byte by byte, those of the plain statement.

    That is given the same search: a CPU may find another x. Its load gives the engine's bits back.
    """
    shapes = ((2, 64, 0, 64, False), *SHAPES[1:])
    for dtype, rule, shape in zip(DTYPES, RULES, shapes, strict=False):
        heads, dim, first, rotary_dim, interleaved = shape
        spec = make_spec(rotary_dim, rule, first=first, interleaved=interleaved, table=dtype)
        positions = np.arange(4) + 300
        rows = naive.rotate(random_rows((4, heads, dim), dtype, ratio=900.0), positions, spec)
        rows[1:3] = random_rows((2, heads, dim), dtype)  # to some of it no x rotates
        rows[1:3, :, dim // 2 :] *= 1e-4
        bed = make_bed(rows, 2)
        made = [Pages(2, 2, heads * dim, bed.pool.element_size(), 2000) for _ in range(2)]
        on_cpu, there = made
        with patch.object(tail_lists, "save_k", gpu.save_k):
            on_cpu.save(rope, np.asarray, bed, positions, (spec, None))
        there.save(gpu, torch.from_numpy, bed, positions, (spec, None))
        assert np.array_equal(on_cpu.pages, there.pages)
        assert np.array_equal(on_cpu.tails, there.tails)
        assert (there.pages[:, :64] == 0xEE).all()
        back = bed.loaded()
        view = rope.PagedView(there.pages, np.arange(2), there.offsets[0], 2)
        rope.load_k(view, positions, spec, back, bed.slots, there.corrections(0))
        assert same_bits(bed.gather(back), rows)
    # What is too much is counted, and nothing behind is touched.
    short = Pages(2, 2, heads * dim, bed.pool.element_size(), 0)
    short.save(gpu, torch.from_numpy, bed, positions, (spec, None))
    counted = there.tails.view(np.uint32)[:, 4]
    assert counted.max() > 0, counted
    assert np.array_equal(short.tails.view(np.uint32)[:, 4], counted)
    assert (short.tails[:, -16:] == 0).all()


if __name__ == "__main__":
    patch_once_a_launch()
    check_images()
    check_shapes()
    check_random_bits()
    check_moves_and_copies()
    check_corrections_are_rare()
    check_warm_up()
    check_pages_of_an_index()
    check_what_lies_on_the_device()
    print("all checks passed")
