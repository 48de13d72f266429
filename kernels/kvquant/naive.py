"""The transform in plain numpy, to be read beside README.md and to check the other engines against.

Integers are int64 throughout: every sum of a valid `TransformArrays` is below 2^53.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .spec import (
    F32,
    I16,
    MAX_GRID,
    WORDS,
    Layout,
    Quantised,
    RawRows,
    TransformArrays,
    Words,
    row_places,
)

_MAX_FINITE = {
    "bf16": 0x7F7F0000,
    "fp16": 0x477FE000,
    "fp32": 0x7F7FFFFF,
    "fp8_e4m3": 0x43E00000,
    "fp8_e5m2": 0x47600000,
}  # as fp32 bits


def decode_words(words: Words, dtype: str) -> F32:
    """The fp32 values of words; exact."""
    if dtype == "bf16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp16":
        return words.view(np.float16).astype(np.float32)
    if dtype == "fp32":
        return words.view(np.float32).copy()
    return _fp8_values(dtype)[words]


def encode_words(values: F32, dtype: str) -> Words:
    """fp32 values, none of them NaN, as words: ties to even, saturating at the largest finite."""
    bits = values.view(np.uint32)
    sign = bits >> 31
    magnitude = np.minimum(bits & np.uint32(0x7FFFFFFF), np.uint32(_MAX_FINITE[dtype]))
    words: Words
    if dtype == "fp32":
        words = magnitude | (sign << 31)
        return words
    if dtype == "bf16":
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        words = (rounded | (sign << 15)).astype(np.uint16)
        return words
    if dtype == "fp16":
        half = magnitude.view(np.float32).astype(np.float16).view(np.uint16)
        words = half | (sign << 15).astype(np.uint16)
        return words
    # The nearest of the 127 or fewer finite magnitudes, of two equally near the even one.
    finite = _fp8_values(dtype)[:128].astype(np.float64)
    finite = finite[np.isfinite(finite)]
    wanted = magnitude.view(np.float32).astype(np.float64)
    above = np.searchsorted(finite, wanted).clip(1, finite.size - 1)
    low, high = wanted - finite[above - 1], finite[above] - wanted
    up = (high < low) | ((high == low) & (above % 2 == 0))
    words = (above - 1 + up).astype(np.uint8) | (sign << 7).astype(np.uint8)
    return words


def quantise(
    planes: Words,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    raw_tokens: int,
    rounding: float,
    clamp: npt.NDArray[np.int32],
    raw_from: npt.NDArray[np.int32],
) -> Quantised:
    """As `api.quantise`, with the bounds that `spec.clamp_limits` gives."""
    layout = arrays.layout(level)
    num_tokens = planes.shape[1]
    num_sinks = min(raw_tokens, num_tokens)
    flat = np.zeros((num_tokens, layout.num_tiles * 32), np.int16)
    index, bits = [], []
    for b, rows in enumerate(_blocks(planes, arrays)):
        x = decode_words(rows, dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            xi = np.rint(x * np.ldexp(np.float32(1), -arrays.grid_exp[b].astype(np.int32)))
            raw = ~(np.abs(xi) <= MAX_GRID).all(axis=1)
        xi = np.where(raw[:, None], 0, xi).astype(np.int64)
        y = (xi - arrays.mean[b]) @ arrays.forward[b].astype(np.int64)
        scaled = np.abs(y).astype(np.float64) * arrays.inv_step[level, b] + rounding
        size = np.floor(np.minimum(scaled, 65536.0)).astype(np.int64)
        raw |= (size >= raw_from[b]).any(axis=1)
        raw[:num_sinks] = True
        q = np.where(raw[:, None], 0, np.minimum(size, clamp[b]) * np.sign(y))
        start, end = layout.starts[b], layout.starts[b + 1]
        flat[:, start:end] = q[:, : end - start]
        raw[:num_sinks] = False
        tokens = np.flatnonzero(raw)
        index.append(b * num_tokens + tokens)
        bits.append(rows[tokens])
    raw_rows = RawRows(
        np.concatenate(index).astype(np.uint32),
        np.concatenate(bits),
        planes[:, :num_sinks].copy(),
    )
    return Quantised(_to_tiles(flat, layout), raw_rows)


def dequantise(
    tiles: I16, dtype: str, arrays: TransformArrays, level: int, out: Words, raw: RawRows
) -> None:
    """As `api.dequantise`."""
    layout = arrays.layout(level)
    num_tokens = tiles.shape[1]
    flat = tiles.transpose(1, 0, 2).reshape(num_tokens, -1).astype(np.int64)
    blocks = []
    for b in range(arrays.num_blocks):
        start, end = layout.starts[b], layout.starts[b + 1]
        q = flat[:, start:end]
        r = 8 * q - np.sign(q) * arrays.recon_shift[level, b, : end - start]
        z = r @ arrays.inverse[b, : end - start].astype(np.int64)
        with np.errstate(over="ignore"):
            x = arrays.mean_f32[b] + z.astype(np.float32) * arrays.out_scale[level, b]
        blocks.append(encode_words(x, dtype))
    _from_blocks(blocks, arrays, out)
    restore_raw(raw, arrays, out)


def restore_raw(raw: RawRows, arrays: TransformArrays, out: Words) -> None:
    """Write the raw rows and the sinks to planes."""
    out[row_places(raw.index, arrays, out.shape[1])] = raw.bits
    out[:, : raw.sinks.shape[1]] = raw.sinks


def _blocks(planes: Words, arrays: TransformArrays) -> list[Words]:
    """The rows `[T, n]` of each block."""
    num_tokens = planes.shape[1]
    channels = planes.transpose(1, 0, 2).reshape(num_tokens, arrays.num_blocks, -1)
    return [np.ascontiguousarray(channels[:, b]) for b in range(arrays.num_blocks)]


def _from_blocks(blocks: list[Words], arrays: TransformArrays, out: Words) -> None:
    channels = np.concatenate(blocks, axis=1).reshape(out.shape[1], arrays.num_planes, -1)
    out[...] = channels.transpose(1, 0, 2)


def _to_tiles(flat: I16, layout: Layout) -> I16:
    tiles = flat.reshape(flat.shape[0], layout.num_tiles, 32).transpose(1, 0, 2)
    return np.ascontiguousarray(tiles)


@lru_cache(maxsize=2)
def _fp8_values(dtype: str) -> F32:
    """The value of every word; e4m3 is the finite-only variant, with no infinities."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "fp8_e4m3" else (5, 2, 15)
    assert WORDS[dtype] == np.uint8
    values: list[Any] = []
    for word in range(256):
        exponent = (word >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = word & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        if exponent == 0:
            value = fraction * 2.0 ** (1 - bias)
        else:
            value = (1 + fraction) * 2.0 ** (exponent - bias)
        if dtype == "fp8_e4m3" and word & 0x7F == 0x7F:
            value = np.nan
        elif dtype == "fp8_e5m2" and exponent == 31:
            value = np.nan if mantissa else np.inf
        values.append(-value if word & 0x80 else value)
    return np.array(values, np.float32)
