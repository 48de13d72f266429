"""Bit patterns of the KV dtypes to float32 and back, in numpy.

bf16, fp16, fp32 and the two fp8 formats of machine learning (e4m3 without infinities, e5m2).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_ext.codec.base import kv_dtype

F32 = NDArray[np.float32]
Bits = NDArray[Any]
_F32_MAX = np.finfo(np.float32).max


def to_float32(bits: Bits, dtype: str) -> F32:
    """The values of `bits`, of any shape; exact for every dtype.

    Raises:
        ValueError: the array's type is not the dtype's.
    """
    if bits.dtype != kv_dtype(dtype).storage:
        raise ValueError(f"expected {kv_dtype(dtype).storage} for {dtype}, got {bits.dtype}")
    bits = np.ascontiguousarray(bits)
    if dtype == "fp32":
        return bits.view(np.float32)
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return _fp8_values(dtype)[bits]


def from_float32(values: F32, dtype: str) -> Bits:
    """`values` rounded to `dtype`, half to even.

    Infinities and what overflows become the largest finite value. NaN is not expected.
    """
    values = np.clip(np.asarray(values, np.float32), -_F32_MAX, _F32_MAX)
    if dtype == "fp32":
        return values.view(np.uint32)
    if dtype == "bf16":
        bits = values.view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (bits + half) >> np.uint32(16)
        rounded -= (rounded & np.uint32(0x7FFF)) == 0x7F80  # infinity: one below is finite
        return rounded.astype(np.uint16)
    if dtype == "fp16":
        return np.clip(values, -65504.0, 65504.0).astype(np.float16).view(np.uint16)
    return _round_fp8(values, dtype)


@cache
def _fp8_values(dtype: str) -> F32:
    code = np.arange(256)
    mantissa_bits, bias = (3, 7) if dtype == "fp8_e4m3" else (2, 15)
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1.0 + fraction, exponent - bias),
    )
    if dtype == "fp8_e4m3":
        values[(code & 0x7F) == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.where(fraction[exponent == 31] == 0, np.inf, np.nan)
    return np.where(code >= 128, -values, values).astype(np.float32)


def _round_fp8(values: F32, dtype: str) -> Bits:
    """The nearest of the finite codes; codes rise with their values."""
    known = _fp8_values(dtype)[:128].astype(np.float64)
    known = known[np.isfinite(known)]
    middles = (known[1:] + known[:-1]) / 2
    sizes = np.abs(values).astype(np.float64)
    lower, upper = (np.searchsorted(middles, sizes, side) for side in ("left", "right"))
    codes = np.where(lower % 2 == 0, lower, upper)  # they differ on a tie only: take the even one
    return np.asarray(codes | (np.signbit(values) * 128), np.uint8)
