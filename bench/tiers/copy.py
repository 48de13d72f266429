"""Host saves and loads through `PageCopier` against memcpy, for the `tiers` case.

What is timed is what the linker's threads do for a node: gather from the pool, un-rotate, search,
write K, V and corrections to the pages; and the way back. One core; K and V bytes are counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.core.case import CaseFailedError
from bench.core.output import Progress
from bench.core.speed import Memcpy
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels import rope as rope_kernels
from sglang_ext.kernels.rope import RopeSpec
from sglang_ext.tiers.host import HostArena

_PAGE = 64
_MAX_POSITION = 16_384


@dataclass(frozen=True)
class Shape:
    """KV of one model, bf16, neox pairing over the whole head.

    Attributes:
        layers: L.
        heads: KV heads.
        head_dim: D.
        tokens: tokens copied at a time, so that pool and pages together exceed any cache.
        rule: rounding rule of the rotation (`kernels/rope`).
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    rule: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all the tokens."""
        return 2 * 2 * self.layers * self.heads * self.head_dim * self.tokens


# Llama-3.2-1B's KV and a larger head. `eager` is the rule that `detect_rule` finds for SGLang's
# rotary embedding in bf16 on the CPU runtime, so the keys without a shape are about it; `fp32` (one
# rounding at the end) takes less searching and is there for comparison.
SHAPES: dict[str, Shape] = {
    "16x8x64 fp32": Shape(16, 8, 64, 8192, "fp32"),
    "16x8x64 eager": Shape(16, 8, 64, 8192, "eager"),
    "16x8x128 fp32": Shape(16, 8, 128, 4096, "fp32"),
    "16x8x128 eager": Shape(16, 8, 128, 4096, "eager"),
}


def measure_copies(repeats: int, progress: Progress) -> dict[str, dict[str, Any]]:
    """Measures every shape.

    Args:
        repeats: timed rounds; each runs memcpy, save and load once.
        progress: where to say how far it is.

    Returns:
        By shape: lists `memcpy`, `save` and `load` in GB/s, one value a round, and
        `corrections_per_million` K values.

    Raises:
        CaseFailedError: a value came back with other bits.
    """
    memcpy = Memcpy()
    found: dict[str, dict[str, Any]] = {}
    for name, shape in SHAPES.items():
        progress.update(name)
        with _one_core():
            found[name] = _measure(name, shape, memcpy, repeats)
    return found


def _measure(name: str, shape: Shape, memcpy: Memcpy, repeats: int) -> dict[str, Any]:
    bench = _CopyBench(shape)
    rates: dict[str, Any] = {"memcpy": [], "save": [], "load": []}
    try:
        for round_index in range(repeats + 1):
            measured = (memcpy.run(), bench.save(), bench.load())
            if not bench.came_back():
                raise CaseFailedError(f"{name}: K or V came back from DRAM with other bits")
            if round_index:  # the first round faults memory in and fills the compiler's caches
                for key, rate in zip(rates, measured, strict=True):
                    rates[key].append(rate)
    finally:
        bench.close()
    num_k = shape.kv_bytes // 4
    rates["corrections_per_million"] = 1e6 * bench.num_corrections / num_k
    return rates


class _CopyBench:
    """A pool with rotated K, an arena, and the copier between them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_corrections = 0
        rng = np.random.default_rng(3)
        rows = (shape.tokens // _PAGE + 1) * _PAGE
        size = (rows, shape.heads, shape.head_dim)
        generator = torch.Generator().manual_seed(3)
        # Channels of unequal scale, a few of them outliers, as real K has.
        scale = torch.from_numpy(rng.lognormal(0.0, 0.6, size[1:]).astype(np.float32))
        scale[:, rng.integers(0, shape.head_dim, 2)] *= 30
        k, v = [], []
        for _ in range(shape.layers):
            values = torch.randn(size, generator=generator) * scale
            k.append(values.to(torch.bfloat16))
            v.append(torch.randn(size, generator=generator).to(torch.bfloat16))
        self._pool = DevicePool("mha", torch.bfloat16, tuple(k), tuple(v), 0, rows)
        self._layout = self._pool.layout(_PAGE)
        num_pages = shape.tokens // _PAGE
        self._arena = HostArena(num_pages, self._layout.slot_bytes)
        self._slots = self._arena.alloc(num_pages).astype(np.int64)
        spec = _spec(shape)
        ropes = [LayerRope(spec, movable=True) for _ in range(shape.layers)]
        self._copier = PageCopier(
            self._pool, self._layout, ropes, self._arena.slots, mode="pre", kernels=rope_kernels
        )
        # Pages of the pool are handed out in any order; tokens of one lie together.
        pages = rng.permutation(num_pages) + 1
        self._tokens = (pages[:, None] * _PAGE + np.arange(_PAGE)).reshape(-1)
        self._rotate(spec)
        self._expected = [tensor.clone() for tensor in (*k, *v)]

    def _rotate(self, spec: RopeSpec) -> None:
        """Makes what lies in the pool K *after* rotation, by the rule under test."""
        positions = np.arange(self.shape.tokens, dtype=np.int64)
        layout: PageLayout = self._layout
        view = rope_kernels.PagedView(
            self._arena.slots, self._slots, layout.k_offsets[0], layout.page_size
        )
        for k in self._pool.k:
            rope_kernels.copy_rows_to_pages(k, self._tokens, view)
            rope_kernels.load_k(view, positions, spec, k, self._tokens, None)

    def save(self) -> float:
        """Pool to pages; GB/s."""
        start_s = time.perf_counter()
        saved = self._copier.save(self._tokens, 0, self._slots)
        rate = self._rate(start_s)
        self.num_corrections = sum(page.num_corrections for page in saved)
        return rate

    def load(self) -> float:
        """Pages to a pool that was wiped; GB/s."""
        for tensor in (*self._pool.k, *self._pool.v):
            tensor[_PAGE:].zero_()
        start_s = time.perf_counter()
        job = self._copier.prepare_load(self._slots, self._tokens, 0)
        for layer in range(self.shape.layers):
            self._copier.load_layer(job, layer)
        return self._rate(start_s)

    def _rate(self, start_s: float) -> float:
        return self.shape.kv_bytes / (time.perf_counter() - start_s) / 1e9

    def came_back(self) -> bool:
        """Whether the pool has the bits that it had at first."""
        return all(
            torch.equal(now.view(torch.int16), then.view(torch.int16))
            for now, then in zip((*self._pool.k, *self._pool.v), self._expected, strict=True)
        )

    def close(self) -> None:
        del self._copier
        self._arena.close()


def _spec(shape: Shape) -> RopeSpec:
    half = shape.head_dim // 2
    frequencies = 500_000.0 ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(_MAX_POSITION, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if shape.rule == "eager":  # such models hold their table in the KV dtype
        cos, sin = (torch.from_numpy(t).bfloat16().float().numpy() for t in (cos, sin))
    return RopeSpec(cos, sin, shape.head_dim, 0, False, shape.rule)


@contextmanager
def _one_core() -> Iterator[None]:
    """Keeps this thread on one core, so that 'one core' is the truth."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
