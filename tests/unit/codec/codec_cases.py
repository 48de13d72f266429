"""Profiles and chunks for the tests of the codecs; small, deterministic, and not from any model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.codec import DTYPES
from sglang_ext.codec.base import PlaneArray
from sglang_ext.codec.float_bits import from_float32
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.kernels.kvquant import TransformArrays
from tests.kernels.kvquant.kvquant_cases import make_transform, make_values

ALL_DTYPES = tuple(DTYPES)


def make_profile(
    num_planes: int,
    num_channels: int,
    block_channels: int,
    *,
    num_levels: int = 3,
    raw_tokens: int = 0,
    seed: int = 0,
    coarsest_step: float = 1.0,
    reach: float = 5.0,
) -> Profile:
    """A profile of `make_planes`' channels.

    Tables have symbols for coefficients up to `reach` standard deviations at least.
    """
    arrays = make_transform(
        num_planes,
        num_channels,
        block_channels,
        num_levels=num_levels,
        seed=seed,
        coarsest_step=coarsest_step,
    )
    classes = _fitting_classes(arrays, reach)
    freqs = np.zeros((len(arrays.radius), 256), np.uint16)
    freqs[0, 0] = 4096
    for table in range(1, len(arrays.radius)):
        radius = int(arrays.radius[table])
        width = 0.4 * radius + (0.3 if table < 5 else 0.5 * ((table - 5) % 3))
        weights = np.exp(-np.abs(np.arange(-radius, radius + 1)) / width)
        num_symbols = 3 if table >= 5 else 2 * radius + 2
        row = np.ones(num_symbols, np.int64)
        row[: 2 * radius + 1] += np.floor(weights / weights.sum() * (4000 - num_symbols)).astype(
            int
        )
        row[radius] += 4096 - row.sum()
        freqs[table, :num_symbols] = row
    # Tables 5 and up are those of refinements and have no escape.
    return Profile(
        num_planes=num_planes,
        num_channels=num_channels,
        head_dim=block_channels,
        block_channels=block_channels,
        num_levels=num_levels,
        default_level=num_levels - 1,
        grid_exp=arrays.grid_exp,
        mean=arrays.mean,
        forward=arrays.forward,
        inverse=arrays.inverse,
        inv_step=arrays.inv_step,
        recon_shift=arrays.recon_shift,
        mean_f32=arrays.mean_f32,
        out_scale=arrays.out_scale,
        num_live=arrays.num_live,
        classes=classes,
        refine_classes=arrays.refine_classes,
        freqs=freqs,
        radius=arrays.radius,
        raw_tokens=raw_tokens,
        source="tests",
    )


def _fitting_classes(arrays: TransformArrays, reach: float) -> npt.NDArray[np.uint16]:
    """For each coefficient, the smallest table that holds `reach` standard deviations."""
    values = make_values(arrays.num_planes, 200, arrays.num_channels, seed=1)
    shape = (200, arrays.num_blocks, arrays.block_channels)
    grid = np.ldexp(values.transpose(1, 0, 2).reshape(shape), -arrays.grid_exp) - arrays.mean
    spread = np.einsum("tbc,bcj->tbj", grid, arrays.forward.astype(np.float64)).std(0)
    largest = reach * spread * arrays.inv_step
    tables = np.searchsorted(arrays.radius[1:4], largest) + 1
    return np.asarray(tables, np.uint16)


def make_planes(
    num_planes: int, num_tokens: int, num_channels: int, dtype: str = "bf16", seed: int = 0
) -> PlaneArray:
    """Correlated channels of different spread, some with a large mean."""
    return from_float32(make_values(num_planes, num_tokens, num_channels, seed), dtype)


def special_planes(dtype: str, shape: tuple[int, int, int] = (4, 40, 64)) -> PlaneArray:
    """Channels that are constant, zero, half zero, of one sign, far from zero, or not finite; rows
    that are zero, the same as others, or nearly so."""
    planes = make_planes(*shape, dtype)
    info = DTYPES[dtype]
    largest = ((1 << info.exponent_bits) - 1) << info.mantissa_bits
    sign = 1 << (info.exponent_bits + info.mantissa_bits)
    kind = info.storage.type
    planes[:, :, 0] = 0
    planes[:, :, 1] = kind(sign)
    planes[:, :, 2] = planes[0, 0, 2]
    planes[:, ::2, 3] = 0
    planes[:, :, 4] = kind(largest)
    planes[:, ::3, 5] = kind(largest | sign)
    planes[:, 1::3, 6] = kind(largest | 1)
    planes[:, :, 7] = np.arange(shape[1]).astype(info.storage)
    planes[:, 7] = 0
    planes[:, 11] = planes[:, 5]
    planes[:, 12:16] = planes[:, 5:6]
    planes[2:, 12:16, 8::3] ^= kind(1)
    return planes


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> PlaneArray:
    """Any bit patterns, all as likely."""
    kind: Any = DTYPES[dtype].storage
    high = 1 << (8 * kind.itemsize)
    return np.random.default_rng(seed).integers(0, high, shape, np.uint64).astype(kind)
