"""Transforms and planes for the kvquant tests: small, deterministic, and not from any model."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_ext.kernels import kvquant
from sglang_ext.kernels.kvquant import WORDS, TransformArrays, Words
from sglang_ext.kernels.kvquant.naive import decode_words, encode_words

DTYPES = tuple(WORDS)
# Bits of the integer matrices.
FORWARD_BITS = 12
INVERSE_BITS = 12


def make_values(
    num_planes: int, num_tokens: int, num_channels: int, seed: int = 0, outlier: float = 1.0
) -> np.ndarray[Any, Any]:
    """Correlated channels of different spread, some with a large mean, f32 `[S, T, C]`."""
    rng = np.random.default_rng(99)  # the channels; `seed` is for the tokens
    spread = np.exp(rng.normal(0, 0.7, (num_planes, 1, num_channels)))
    mean = rng.normal(0, 2, (num_planes, 1, num_channels))
    mix = rng.normal(0, 1, (num_planes, num_channels, max(1, min(64, num_channels // 4))))
    rng = np.random.default_rng(seed)
    hidden = rng.normal(0, 1, (num_planes, num_tokens, mix.shape[2]))
    x = hidden @ mix.transpose(0, 2, 1) / np.sqrt(mix.shape[2])
    x = (x + 0.3 * rng.normal(0, 1, x.shape)) * spread
    x += mean
    x[..., ::8] *= outlier
    values: np.ndarray[Any, Any] = x.astype(np.float32)
    return values


def make_planes(
    dtype: str,
    num_planes: int,
    num_tokens: int,
    num_channels: int,
    seed: int = 0,
    outlier: float = 1.0,
) -> Words:
    """Words of `make_values`."""
    return encode_words(make_values(num_planes, num_tokens, num_channels, seed, outlier), dtype)


def make_transform(
    num_planes: int,
    num_channels: int,
    block_channels: int,
    *,
    num_levels: int = 4,
    coarsest_step: float = 1.0,
    seed: int = 0,
    outlier: float = 1.0,
    live: float = 0.8,
    planes: Words | None = None,
    dtype: str = "bf16",
    dead: float = 0.0,
    recon: bool = True,
    radius_deviations: float = 2.0,
) -> TransformArrays:
    """A per-block KLT of synthetic data (or of `planes`), rounded to integers."""
    n = block_channels
    num_blocks = num_planes * num_channels // n
    if planes is None:
        values = make_values(num_planes, 2 * n + 64, num_channels, seed + 1, outlier)
    else:
        values = decode_words(planes, dtype)
        values = np.where(np.isfinite(values), values, 0)
    x = values.transpose(1, 0, 2).reshape(values.shape[1], num_blocks, n).astype(np.float64)
    rng = np.random.default_rng(seed)
    grid = np.clip(np.ceil(np.log2(np.abs(x).max(axis=0) + 1e-9)) - 9, -20, 20).astype(np.int8)
    units = np.ldexp(1.0, grid)
    xi = x / units
    mean = np.rint(xi.mean(axis=0)).astype(np.int32)
    forward = np.zeros((num_blocks, n, n), np.int32)
    inverse = np.zeros((num_blocks, n, n), np.int32)
    inv_step = np.zeros((num_levels, num_blocks, n))
    out_scale = np.zeros((num_levels, num_blocks, n), np.float32)
    num_live = np.zeros((num_levels, num_blocks), np.int32)
    radius = np.array([0, 2, 7, 20, 126, 1, 1, 1, 1, 1, 1], np.uint8)
    classes = np.zeros((num_levels, num_blocks, n), np.uint16)
    third = 3.0 ** -np.arange(num_levels)
    for b in range(num_blocks):
        centred = x[:, b] - mean[b] * units[b]
        power, basis = np.linalg.eigh(centred.T @ centred / len(centred))
        power, basis = power[::-1], basis[:, ::-1]  # most first
        # Coefficient j of a row is sum_c xi_c units_c basis_cj.
        f = units[b][:, None] * basis
        scale = (2.0**FORWARD_BITS - 1) / np.abs(f).max()
        forward[b] = np.rint(f * scale)
        step = coarsest_step * np.ones(n)
        inv_step[:, b] = 1 / (step * scale * third[:, None])
        # x_c = units of out_scale_c * sum_j q_j inverse_jc / 8, out_scale alike for all channels
        g = basis.T * step[:, None]
        back = (2.0**INVERSE_BITS - 1) / np.abs(g).max()
        inverse[b] = np.rint(g * back)
        out_scale[:, b] = (third / (8 * back))[:, None]
        for level in range(num_levels):
            wanted = np.sqrt(np.maximum(power, 0)) > 0.3 * step * third[level]
            reach = radius_deviations * np.sqrt(np.maximum(power, 0)) / (step * third[level])
            classes[level, b] = 1 + np.searchsorted(radius[1:4], reach)
            share = live * (level + 1) / num_levels
            num_live[level, b] = min(n, max(int(wanted.sum() * (1 - dead)), int(share * n)))
    refine = rng.integers(0, 2, (num_levels, num_blocks, n)).astype(np.uint16) * 3 + 5
    return TransformArrays(
        num_planes=num_planes,
        num_channels=num_channels,
        block_channels=n,
        num_levels=num_levels,
        grid_exp=grid,
        mean=np.clip(mean, -32768, 32768).astype(np.int32),
        forward=forward,
        inverse=inverse,
        inv_step=inv_step,
        recon_shift=rng.integers(0, 4 if recon else 1, inv_step.shape).astype(np.uint8),
        mean_f32=(mean * units).astype(np.float32),
        out_scale=out_scale,
        num_live=np.maximum.accumulate(num_live, axis=0).astype(np.int32),
        classes=classes,
        refine_classes=refine.astype(np.uint16),
        radius=radius,
    )


def random_transform(
    rng: np.random.Generator,
    num_planes: int,
    num_channels: int,
    block_channels: int,
    forward_bits: int,
    inverse_bits: int,
    step_bits: int,
) -> TransformArrays:
    """A transform of random integers of at most so many bits; not one that could be inverted."""
    n, levels = block_channels, 3
    b = num_planes * num_channels // n

    def integers(limit: int, *shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(-limit, limit + 1, shape).astype(np.int32)

    return TransformArrays(
        num_planes=num_planes,
        num_channels=num_channels,
        block_channels=n,
        num_levels=levels,
        grid_exp=rng.integers(-20, 8, (b, n)).astype(np.int8),
        mean=integers(int(rng.choice([0, 100, 32768])), b, n),
        forward=integers(2**forward_bits - 1, b, n, n),
        inverse=integers(2**inverse_bits - 1, b, n, n),
        inv_step=rng.uniform(0.1, 1, (levels, b, n)) * 2.0**-step_bits,
        recon_shift=rng.integers(0, 4, (levels, b, n)).astype(np.uint8),
        mean_f32=rng.normal(0, 10, (b, n)).astype(np.float32),
        out_scale=np.exp(rng.normal(0, 3, (levels, b, n))).astype(np.float32),
        num_live=np.sort(rng.integers(0, n + 1, (levels, b)), axis=0).astype(np.int32),
        classes=rng.integers(1, 4, (levels, b, n)).astype(np.uint16),
        refine_classes=rng.integers(1, 2, (levels, b, n)).astype(np.uint16),
        radius=np.array([0, 1, 5, 126], np.uint8),
    )


def random_words(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...], spread: float
) -> Words:
    """Values over `spread` powers of two, one in a thousand any word whatever."""
    values = rng.normal(0, 1, shape) * np.exp2(rng.uniform(-spread, spread / 3, shape))
    words = encode_words(values.astype(np.float32), dtype)
    wild = rng.random(shape) < 0.001
    words[wild] = rng.integers(0, 256**words.itemsize, int(wild.sum())).astype(words.dtype)
    return words


def spoil(words: Words, dtype: str) -> Words:
    """The same with a NaN, a large and a zero value, in rows of their own."""
    spoiled = words.copy()
    spoiled[0, 1, 2] = np.array(-1).astype(words.dtype)
    spoiled[-1, 2, 0] = encode_words(np.array([3e38], np.float32), dtype)[0]
    spoiled[0, 3] = 0
    return spoiled


def quantise_alike(
    planes: Words, dtype: str, arrays: TransformArrays, level: int, engine: Any, **options: Any
) -> kvquant.Quantised:
    """Quantises and dequantises with the default engine and another, which must agree."""
    found = kvquant.quantise(planes, dtype, arrays, level, **options)
    other = kvquant.quantise(planes, dtype, arrays, level, engine=engine, **options)
    assert np.array_equal(found.tiles, other.tiles)
    assert np.array_equal(found.raw.index, other.raw.index)
    assert np.array_equal(found.raw.bits, other.raw.bits)
    assert np.array_equal(found.raw.sinks, other.raw.sinks)
    outs = [np.full_like(planes, 1), np.full_like(planes, 2)]
    kvquant.dequantise(found.tiles, dtype, arrays, level, outs[0], raw=found.raw)
    kvquant.dequantise(found.tiles, dtype, arrays, level, outs[1], raw=found.raw, engine=engine)
    assert np.array_equal(outs[0], outs[1])
    return found
