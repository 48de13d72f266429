"""Ropes, pools and pages that the rope tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.kernels.rope import PagedView, RopeSpec, naive

I64 = npt.NDArray[np.int64]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RULES = ("eager", "fp32", "fma_a", "fma_b")


def angles(rotary_dim: int, max_pos: int, scaling: str = "plain") -> npt.NDArray[np.float64]:
    """Angles of the families that only change the table (SGLang's rotary_embedding/)."""
    base, t = 10000.0, np.arange(max_pos, dtype=np.float64)
    if scaling == "dynamic":
        base *= 4.0 ** (rotary_dim / max(2, rotary_dim - 2))
    inverse = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if scaling == "linear":
        t /= 4.0
    if scaling == "llama3":
        wavelength = 2 * math.pi / inverse
        smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0.0, 1.0)
        inverse = (1 - smooth) * inverse / 8.0 + smooth * inverse
    if scaling == "yarn":
        ramp = np.clip(np.linspace(-0.5, 1.5, inverse.size), 0.0, 1.0)
        inverse = inverse * (1 - ramp) + inverse / 16.0 * ramp
    return t[:, None] * inverse[None, :]


def make_spec(
    rotary_dim: int,
    rule: str = "eager",
    *,
    max_pos: int = 512,
    first: int = 0,
    interleaved: bool = False,
    scaling: str = "plain",
    table: torch.dtype = torch.float32,
) -> RopeSpec:
    angle = angles(rotary_dim, max_pos, scaling)
    mscale = 1.2 if scaling == "yarn" else 1.0
    cos, sin = (
        torch.from_numpy(f(angle) * mscale).to(table).float().numpy() for f in (np.cos, np.sin)
    )
    return RopeSpec(cos, sin, rotary_dim, first, interleaved, rule)


def random_rows(
    shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0, ratio: float = 1.0
) -> torch.Tensor:
    """Gaussian rows; `ratio` scales every eighth column of the first half (outlier channels)."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., : shape[2] // 2 : 8] *= ratio
    return x.to(dtype)


@dataclass
class Bed:
    """A pool with shuffled rows, poisoned pages, and where each token lies."""

    pool: torch.Tensor
    rows: torch.Tensor
    slots: I64
    view: PagedView

    def loaded(self) -> torch.Tensor:
        """A pool to load into, full of NaN."""
        return torch.full_like(self.pool, float("nan"))

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        return pool[torch.from_numpy(self.slots)]


def make_bed(rows: torch.Tensor, page_size: int, seed: int = 0, fused: bool = True) -> Bed:
    """Lay `rows` `[T, H, D]` out in a pool that is, if `fused`, half of a K/V allocation."""
    rng = np.random.default_rng(seed)
    num_tokens, heads, dim = rows.shape
    spare = 3
    width = heads * dim
    backing = torch.full((num_tokens + spare, (2 if fused else 1) * width + 2), float("nan"))
    pool = backing.to(rows.dtype)[:, :width].view(-1, heads, dim)
    slots = rng.permutation(num_tokens + spare)[:num_tokens].astype(np.int64)
    pool[torch.from_numpy(slots)] = rows
    num_pages = num_tokens // page_size
    block_bytes = page_size * width * rows.element_size()
    offset = 24
    arena = np.full((num_pages + 2, -(-(offset + block_bytes) // 64) * 64 + 64), 0xFF, np.uint8)
    page_slots = rng.permutation(num_pages + 2)[:num_pages].astype(np.int64)
    return Bed(pool, rows, slots, PagedView(arena, page_slots, offset, page_size))


def page_rows(bed: Bed) -> torch.Tensor:
    """The rows that lie in the pages, `[T, H, D]`."""
    view, rows = bed.view, bed.rows
    num_bytes = view.page_size * rows.shape[1] * rows.shape[2] * rows.element_size()
    block = view.arena[view.page_slots, view.byte_offset : view.byte_offset + num_bytes]
    return torch.from_numpy(block.copy()).view(rows.dtype).view(rows.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(naive.bits(a.contiguous()), naive.bits(b.contiguous()))
