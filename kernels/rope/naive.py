"""The transform in plain torch, to be read beside README.md and to check the fast paths against.

Rows are gathered tensors `[T, H, D]`; nothing here knows of pages, strides or speed.
"""

from __future__ import annotations

import torch

from .spec import I64, RopeSpec

_QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}
_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def rotate(x: torch.Tensor, positions: I64, spec: RopeSpec) -> torch.Tensor:
    """Rotate rows `[T, H, D]` to `positions` `[T]` by the model's arithmetic."""
    c, s = _angles(positions, spec, torch.float32)
    x1, x2 = (part.float() for part in _pairs(x, spec))
    dtype = x.dtype

    def r(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).float()

    if spec.rule == "eager":
        o1 = r(x1 * c) - r(x2 * s)
        o2 = r(x2 * c) + r(x1 * s)
    elif spec.rule == "fp32":
        o1 = x1 * c - x2 * s
        o2 = x2 * c + x1 * s
    elif spec.rule == "fma_a":
        o1 = _fma(x1, c, -(x2 * s))
        o2 = _fma(x2, c, x1 * s)
    else:
        o1 = _fma(-x2, s, x1 * c)
        o2 = _fma(x1, s, x2 * c)
    return _with_pairs(x, _rounded(o1, dtype), _rounded(o2, dtype), spec)


def unrotate(y: torch.Tensor, positions: I64, spec: RopeSpec) -> torch.Tensor:
    """`R(p)^T y / (cos^2 + sin^2)`, rounded once to the grid of `y`'s dtype: no search."""
    wide = torch.float64 if y.dtype == torch.float32 else torch.float32
    c, s = _angles(positions, spec, wide)
    y1, y2 = (part.to(wide) for part in _pairs(y, spec))
    scale = 1.0 / (c * c + s * s)
    x1 = ((y1 * c + y2 * s) * scale).float()
    x2 = ((y2 * c - y1 * s) * scale).float()
    return _with_pairs(y, _rounded(x1, y.dtype), _rounded(x2, y.dtype), spec)


def move(y: torch.Tensor, saved: I64, wanted: I64, spec: RopeSpec) -> torch.Tensor:
    """`delta` mode: rows at positions `saved` moved to `wanted`, one rounding at the end."""
    wide = torch.float64 if y.dtype == torch.float32 else torch.float32
    c, s = _angles(saved, spec, wide)
    y1, y2 = (part.to(wide) for part in _pairs(y, spec))
    scale = 1.0 / (c * c + s * s)
    x1, x2 = (y1 * c + y2 * s) * scale, (y2 * c - y1 * s) * scale
    c, s = _angles(wanted, spec, wide)
    o1, o2 = (x1 * c - x2 * s).float(), (x2 * c + x1 * s).float()
    moved = _with_pairs(y, _rounded(o1, y.dtype), _rounded(o2, y.dtype), spec)
    same = torch.from_numpy(saved == wanted)[:, None, None]
    return torch.where(same, y, moved)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The words of `x` as signed integers of its size."""
    return x.view(_INTEGER[x.dtype])


def _angles(
    positions: I64, spec: RopeSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    c = torch.from_numpy(spec.cos[positions])[:, None, :]
    s = torch.from_numpy(spec.sin[positions])[:, None, :]
    return c.to(dtype), s.to(dtype)


def _columns(spec: RopeSpec) -> tuple[slice, slice]:
    end = spec.first + spec.rotary_dim
    if spec.interleaved:
        return slice(spec.first, end, 2), slice(spec.first + 1, end, 2)
    middle = spec.first + spec.rotary_dim // 2
    return slice(spec.first, middle), slice(middle, end)


def _pairs(x: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    one, two = _columns(spec)
    return x[..., one], x[..., two]


def _with_pairs(
    x: torch.Tensor, o1: torch.Tensor, o2: torch.Tensor, spec: RopeSpec
) -> torch.Tensor:
    one, two = _columns(spec)
    out = bits(x.contiguous()).clone()
    out[..., one] = bits(o1)
    out[..., two] = bits(o2)
    return out.view(x.dtype)


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 to `dtype`, ties to even, every NaN to the one quiet NaN."""
    nan = torch.tensor(_QUIET_NAN[dtype], dtype=_INTEGER[dtype])
    return torch.where(value.isnan(), nan, bits(value.to(dtype))).view(dtype)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` rounded once to fp32.

    The product is exact in fp64; the sum is made odd where it is not exact, so that the second
    rounding, to fp32, cannot see a tie that was not there.
    """
    product = a.double() * b.double()
    addend = c.double().expand_as(product)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    words = total.view(torch.int64)
    even = (words & 1) == 0
    inexact = (error != 0) & torch.isfinite(total)
    toward = torch.where((error > 0) == (total > 0), words + 1, words - 1)
    return torch.where(inexact & even, toward, words).view(torch.float64).float()
