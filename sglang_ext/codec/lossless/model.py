"""What the lossless encoder chooses: scales and means of channels, and which rows to refer to.

Only the encoder runs this; a decoder is told the choices. Floats are summed in one order, so that
a chunk is coded to the same bytes everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_ext.codec.base import KVDtype, PlaneArray
from sglang_ext.codec.float_bits import to_float32
from sglang_ext.codec.lossless.lossless_kernels import (
    MAX_HOPS,
    MAX_NARROWER,
    MAX_SCALE,
    MODE_COPY,
    MODE_REFERENCE,
    RATE_BIAS,
    RAW_SCALE,
)
from sglang_ext.compiling import jit

_F = TypeVar("_F", bound=Callable[..., Any])
_BIAS = {"bf16": 127, "fp16": 15, "fp32": 127, "fp8_e4m3": 7, "fp8_e5m2": 15}
# Mean distance from the mean, over the standard deviation, is 0.80 for a Gaussian and 0.71 for a
# Laplacian.
_FAMILY_THRESHOLD = 0.755
_SIGMA_OF_MEAN_DISTANCE = (math.sqrt(math.pi / 2), math.sqrt(2))
_USEFUL = 0.85  # mean distance to a reference, over that to the mean, under which it is used
_TRIED_HOPS = 8


@dataclass(frozen=True)
class RowChoices:
    """How each row of each plane is coded.

    Attributes:
        links: u32 [T], how many tokens before it the token's last likeness is; 0 for none.
        hops: u8 [S, T], how many links lead to the row referred to; 0 for none.
        modes: u8 [S, T], `MODE_BASE`, `MODE_COPY` or `MODE_REFERENCE` + h.
    """

    links: npt.NDArray[np.uint32]
    hops: npt.NDArray[np.uint8]
    modes: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ChannelChoices:
    """How the values of each channel are spread, [S, C] each (see `lossless`)."""

    scales: npt.NDArray[np.int16]
    families: npt.NDArray[np.uint8]
    means: npt.NDArray[np.int32]


def _jit(function: _F) -> _F:
    return jit(nogil=True, error_model="numpy")(function)


def choose(planes: PlaneArray, dtype: KVDtype) -> tuple[ChannelChoices, RowChoices]:
    """Chooses for a chunk [S, T, C]."""
    num_planes, num_tokens, num_channels = planes.shape
    shape = (num_planes, num_channels)
    channels = ChannelChoices(
        np.zeros(shape, np.int16), np.zeros(shape, np.uint8), np.zeros(shape, np.int32)
    )
    links = _links(planes)
    hops = np.zeros((num_planes, num_tokens), np.uint8)
    modes = np.zeros((num_planes, num_tokens), np.uint8)
    unit = _BIAS[dtype.name] - 1 + dtype.mantissa_bits
    for s in range(num_planes):
        values = np.nan_to_num(to_float32(planes[s], dtype.name), posinf=0.0, neginf=0.0)
        spread = np.empty(num_channels, np.float32)
        _fit_channels(
            values, unit, dtype.mantissa_bits, channels.scales[s], channels.families[s],
            channels.means[s], spread,
        )  # fmt: skip
        if links.any():
            _choose_rows(planes[s], values, spread, links, hops[s], modes[s])
    return channels, RowChoices(links, hops, modes)


def _links(planes: PlaneArray) -> npt.NDArray[np.uint32]:
    """Distance of each token to the one before it that looks like the same token, 0 for none.

    In the first layer, V (and position-free K) depends on nothing but the token: equal rows mean
    the same token, whose rows in the next layers are alike as well.
    """
    rows = planes[min(1, len(planes) - 1)]
    links = np.zeros(len(rows), np.uint32)
    last: dict[bytes, int] = {}
    for t, row in enumerate(rows):
        key = row.tobytes()
        links[t] = t - last.get(key, t)
        last[key] = t
    return links


@_jit
def _scale_code(sigma: Any, unit: Any) -> Any:
    """Twice the log2 of sigma in smallest units, rounded, plus `RATE_BIAS`."""
    if not sigma > 0:
        return 0
    fraction, exponent = math.frexp(sigma)
    half = 2 * (exponent + unit)
    if fraction < 0.5946035575013605:  # 2^-0.75
        half -= 2
    elif fraction < 0.8408964152537145:  # 2^-0.25
        half -= 1
    return min(max(half + RATE_BIAS, 0), MAX_SCALE)


@_jit
def _fit_channels(
    values: Any, unit: Any, mantissa_bits: Any, scales: Any, families: Any, means: Any, spread: Any
) -> None:
    num_tokens, num_channels = values.shape
    total = np.zeros(num_channels, np.float64)
    for t in range(num_tokens):
        for c in range(num_channels):
            total[c] += values[t, c]
    mean = total / num_tokens
    absolute = np.zeros(num_channels, np.float64)
    square = np.zeros(num_channels, np.float64)
    zeros = np.zeros(num_channels, np.int64)
    for t in range(num_tokens):
        for c in range(num_channels):
            distance = values[t, c] - mean[c]
            absolute[c] += abs(distance)
            square[c] += distance * distance
            zeros[c] += values[t, c] == 0
    for c in range(num_channels):
        mad = absolute[c] / num_tokens
        spread[c] = mad
        families[c] = mad < _FAMILY_THRESHOLD * math.sqrt(square[c] / num_tokens)
        sigma = mad * _SIGMA_OF_MEAN_DISTANCE[families[c]]
        scale = _scale_code(sigma, unit)
        if mean[c] != 0:
            # So that the mean fits, and no table is narrower than the narrowest.
            top = math.frexp(abs(mean[c]))[1] - 1 + unit
            least = max(top - mantissa_bits - 10, top - 28)
            scale = max(scale, min(2 * (least + 2) + RATE_BIAS, MAX_SCALE))
        if 4 * zeros[c] > num_tokens and mad > 0:
            scale = RAW_SCALE  # zero is far from its neighbours on a logarithmic scale
        scales[c] = scale
        k = max(((scale - RATE_BIAS) >> 1) - 2, 0)
        means[c] = 0 if scale == RAW_SCALE else math.floor(math.ldexp(mean[c], unit - k))


@_jit
def _choose_rows(bits: Any, values: Any, spread: Any, links: Any, hops: Any, modes: Any) -> None:
    num_tokens, num_channels = bits.shape
    weights = np.zeros(num_channels, np.float32)
    for c in range(num_channels):
        if spread[c] > 0:
            weights[c] = np.float32(1) / spread[c]
    for t in range(num_tokens):
        best = np.float32(_USEFUL * num_channels)
        found = 0
        reference = t
        for hop in range(1, min(_TRIED_HOPS, MAX_HOPS) + 1):
            if links[reference] == 0:
                break
            reference -= links[reference]
            total = np.float32(0)
            for c in range(num_channels):
                distance = abs(values[t, c] - values[reference, c]) * weights[c]
                total += min(distance, np.float32(4))
            if total < best:
                best, found = total, hop
                target = reference
        if not found:
            continue
        same = best == 0
        if same:
            for c in range(num_channels):
                same &= bits[t, c] == bits[target, c]
        hops[t] = found
        if same:
            modes[t] = MODE_COPY
            continue
        narrower = RATE_BIAS - _scale_code(np.float64(best) / num_channels, 0)
        modes[t] = MODE_REFERENCE + min(max(narrower, 0), MAX_NARROWER)
