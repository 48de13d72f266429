"""From statistics of KV to a profile: transform, integers, live coefficients, entropy tables.

Theory. Let x be a block of channels of one token, C its covariance, and let errors d cost d' M d on
average, M being the metric. In the coordinates ``M^(1/2) (x - mean)`` cost is plain squared error,
so the Karhunen-Loeve transform of ``M^(1/2) C M^(1/2)`` with one step for all coefficients is the
best at high rates (reverse water-filling), for every block at once: blocks share the step because
the metric carries their weight. Calibration takes M from gradients (``calibrate.py``); without
them it is the inverse variance of each plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.codec.calibration.entropy_tables import (
    ALPHABET,
    NUM_COLUMNS,
    PROB_SUM,
    base_tables,
    histograms,
    refine_tables,
)
from sglang_ext.codec.hier.profile import Profile

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

STEP_RATIO = 3
NUM_BASE_TABLES = 48
NUM_REFINE_TRIPLES = 16
# Up to this share of values that are not 0, a coefficient is dropped at a level.
MIN_SHARE = 1e-3
# In steps; a larger value of a dropped coefficient would be 3 a level finer, which a stream with
# refinements can only keep as a raw row.
_MAX_DEAD = 0.83
_RIDGE = 1e-2
# A channel's deviation is 128 to 256 points of its grid: finer than bf16 at that size.
_GRID_BITS = 7
_MEAN_BITS = 13
# The matrices' rounding may add this share to the finest level's noise; in deviations, not power.
_PRECISION = 0.2
_ROUNDING = 12**-0.5
_INT16_MAX = 32767.0
_INT32_MAX = 2.0**31
# The kernels sum products of int16 in int32 as long as norms bound them; a margin for outliers.
_HEADROOM = 6.0


@dataclass(frozen=True)
class Moments:
    """Mean [B, n], covariance [B, n, n] and metric [B, n, n] of position-free KV, float64."""

    mean: F64
    covariance: F64
    metric: F64


@dataclass(frozen=True)
class Transform:
    """A transform before it becomes integers.

    Attributes:
        mean: [B, n].
        deviation: [B, n], of the channels.
        forward: [B, n, n], (channel, coefficient).
        inverse: [B, n, n], (coefficient, channel).
        sigma: [B, n], deviation of the coefficients, descending.
    """

    mean: F64
    deviation: F64
    forward: F64
    inverse: F64
    sigma: F64


def plane_metric(covariance: F64, channels: int) -> F64:
    """The metric without gradients: one over the variance of a channel's plane."""
    b, n = covariance.shape[:2]
    variance = np.diagonal(covariance, axis1=1, axis2=2).reshape(-1, channels).mean(1)
    floor = max(float(variance.max()) * 1e-9, 1e-30)
    weight = np.repeat(1 / np.maximum(variance, floor), channels).reshape(b, n)
    return np.asarray(weight[:, :, None] * np.eye(n))


def transform_of(moments: Moments, ridge: float = _RIDGE) -> Transform:
    """The Karhunen-Loeve transform of each block in the coordinates of its metric.

    ``ridge``, times the metric's mean eigenvalue, is added to it: directions that no gradient
    showed to matter still keep some precision.
    """
    forward, inverse, sigma = [], [], []
    floor = float(np.trace(moments.metric, axis1=1, axis2=2).mean()) * 1e-9 + 1e-300
    for covariance, metric in zip(moments.covariance, moments.metric, strict=True):
        weight, axes = np.linalg.eigh(metric)
        weight = np.sqrt(np.maximum(weight, 0) + ridge * max(weight.mean(), 0) + floor)
        root, inverse_root = (axes * weight) @ axes.T, (axes / weight) @ axes.T
        power, basis = np.linalg.eigh(root @ covariance @ root)
        order = np.argsort(-power, kind="stable")
        basis = basis[:, order]
        forward.append(root @ basis)
        inverse.append(basis.T @ inverse_root)
        sigma.append(np.sqrt(np.maximum(power[order], 0)))
    deviation = np.sqrt(np.maximum(np.diagonal(moments.covariance, axis1=1, axis2=2), 0))
    return Transform(moments.mean, deviation, np.stack(forward), np.stack(inverse), np.stack(sigma))


def coefficients(transform: Transform, rows: F32) -> Iterator[F32]:
    """The coefficients [T, n] of each block of rows [T, B * n]."""
    b, n = transform.mean.shape
    for block in range(b):
        part = rows[:, block * n : (block + 1) * n] - transform.mean[block].astype(np.float32)
        yield part @ transform.forward[block].astype(np.float32)


def restored(transform: Transform, rows: F32, step: float) -> F32:
    """Rows [T, B * n] after quantisation by a step: what a profile's level does, in float32."""
    out = np.empty_like(rows)
    n = transform.mean.shape[1]
    for block, values in enumerate(coefficients(transform, rows)):
        values = np.rint(values / step) * np.float32(step)
        part = values @ transform.inverse[block].astype(np.float32)
        out[:, block * n : (block + 1) * n] = part + transform.mean[block].astype(np.float32)
    return out


def expected_bits(transform: Transform, step: float) -> float:
    """Bits per value at a step: the rate of Gaussian coefficients, within some 0.1 bit."""
    power = 2 * np.pi * np.e * (transform.sigma / step) ** 2
    return float(0.5 * np.log2(1 + power).mean())


def build_profile(
    transform: Transform,
    rows: F32,
    *,
    num_channels: int,
    head_dim: int,
    coarsest_step: float,
    num_levels: int,
    default_level: int,
    raw_tokens: int = 0,
    source: str = "",
) -> Profile:
    """A profile from a transform and sample rows [T, S * C] of position-free KV.

    Level l has the step ``coarsest_step / 3**l``. The rows fill the entropy tables and decide which
    coefficients are kept at which level; 8,000 tokens or more are wanted.
    """
    b, n = transform.mean.shape
    steps = np.asarray(coarsest_step / float(STEP_RATIO) ** np.arange(num_levels), np.float64)
    flipped = _upright(transform, rows)
    tables, live = _entropy(flipped, rows, steps)
    return Profile(
        num_planes=b * n // num_channels,
        num_channels=num_channels,
        head_dim=head_dim,
        block_channels=n,
        num_levels=num_levels,
        default_level=default_level,
        **_integers(flipped, steps),
        recon_shift=np.zeros((num_levels, b, n), np.uint8),
        num_live=live,
        **tables,
        raw_tokens=raw_tokens,
        source=source,
    )


def _upright(transform: Transform, rows: F32) -> Transform:
    """Coefficients turned so that their longer tail is positive: fewer kinds of tables."""
    skew = np.stack([(values**3).mean(0) for values in coefficients(transform, rows)])
    sign = np.where(skew < 0, -1.0, 1.0)
    return Transform(
        transform.mean,
        transform.deviation,
        transform.forward * sign[:, None, :],
        transform.inverse * sign[:, :, None],
        transform.sigma,
    )


def _integers(transform: Transform, steps: F64) -> dict[str, Any]:
    """The transform's integer arrays, and the scales that make up for the rounding."""
    b, n = transform.mean.shape
    size = np.maximum(
        transform.deviation * 2.0**-_GRID_BITS, np.abs(transform.mean) * 2.0**-_MEAN_BITS
    )
    grid_exp = np.clip(np.floor(np.log2(np.where(size > 0, size, 2.0**-10))), -100, 100)
    grid = 2.0**grid_exp
    forward = transform.forward * grid[:, :, None]
    row_norm = np.sqrt(((transform.deviation / grid) ** 2 + 1).sum(1))[:, None]
    forward_scale = _scales(
        forward,
        row_norm / (_PRECISION * steps[-1]),
        _INT32_MAX / (_HEADROOM * row_norm),
    )
    sigmas = np.sqrt(((transform.sigma / steps[-1]) ** 2 + 1).sum(1))[:, None]
    inverse_norm = np.sqrt((transform.inverse**2).sum(1))
    inverse_scale = _scales(
        transform.inverse,
        sigmas / (_PRECISION * np.maximum(inverse_norm, 1e-300)),
        _INT32_MAX / (_HEADROOM * 8 * sigmas),
    )
    shape = (len(steps), b, n)
    return {
        "grid_exp": grid_exp.astype(np.int8),
        "mean": np.rint(transform.mean / grid).astype(np.int32),
        "forward": np.rint(forward * forward_scale[:, None, :]).astype(np.int32),
        "inverse": np.rint(transform.inverse * inverse_scale[:, None, :]).astype(np.int32),
        "inv_step": np.broadcast_to(1 / (forward_scale * steps[:, None, None]), shape).astype(
            np.float64, order="C"
        ),
        "mean_f32": transform.mean.astype(np.float32),
        "out_scale": (steps[:, None, None] / 8 / inverse_scale).astype(np.float32),
    }


def _scales(matrices: F64, wanted: F64, max_norm: F64) -> F64:
    """The wanted scale of each column, or what int16 and a bound on its norm allow."""
    largest = np.maximum(np.abs(matrices).max(1), 1e-300)
    norm = np.maximum(np.sqrt((matrices**2).sum(1)), 1e-300)
    limit = np.minimum(_INT16_MAX / largest, max_norm / norm)
    return np.asarray(np.where(largest > 1e-300, np.minimum(wanted * _ROUNDING, limit), 1.0))


def _entropy(
    transform: Transform, rows: F32, steps: F64
) -> tuple[dict[str, Any], npt.NDArray[np.int32]]:
    """Tables with the classes of all coefficients, and the numbers of live ones."""
    b, n = transform.mean.shape
    levels = len(steps)
    base = np.zeros((levels, b, n, NUM_COLUMNS), np.float32)
    refine = np.zeros((levels, b, n, 9), np.float32)
    live = np.zeros((levels, b), np.int32)
    for block, values in enumerate(coefficients(transform, rows)):
        quotients = [np.rint(values / np.float32(step)) for step in steps]
        for level, q in enumerate(quotients):
            needed = (q != 0).mean(0) > MIN_SHARE
            needed |= np.abs(values).max(0) > _MAX_DEAD * steps[level]
            live[level, block] = np.flatnonzero(needed)[-1] + 1 if needed.any() else 0
            base[level, block] = histograms(q)
            if level:
                refine[level, block] = _refinements(quotients[level - 1], q)
    live = np.maximum.accumulate(live, axis=0)
    alive = np.arange(n) < live[..., None]
    fine = alive.copy()
    fine[0] = False
    first = base_tables(base[alive].astype(np.float64), NUM_BASE_TABLES)
    second = refine_tables(refine[fine].astype(np.float64).reshape(-1, 3, 3), NUM_REFINE_TRIPLES)
    classes = np.zeros((levels, b, n), np.uint16)
    classes[alive] = 1 + first.classes
    refine_classes = np.full((levels, b, n), 1 + len(first.freqs), np.uint16)
    refine_classes[fine] = 1 + len(first.freqs) + second.classes
    padding = np.zeros((1, ALPHABET), np.uint16)
    padding[0, 0] = PROB_SUM
    found = {
        "classes": classes,
        "refine_classes": refine_classes,
        "freqs": np.concatenate([padding, first.freqs, second.freqs]),
        "radius": np.concatenate([np.zeros(1, np.uint8), first.radius, second.radius]),
    }
    return found, live


def _refinements(coarse: F32, fine: F32) -> F64:
    """Counts [n, 9] of (context, symbol) for going from one level to the next."""
    residual = np.clip(fine - 3 * coarse, -1, 1)
    symbol = 1 + residual * np.where(coarse < 0, -1, 1)
    context = np.minimum(np.abs(coarse), 2)
    codes = (context * 3 + symbol).astype(np.int64) + np.arange(coarse.shape[1]) * 9
    counts = np.bincount(codes.ravel(), minlength=9 * coarse.shape[1])
    return counts.reshape(-1, 9).astype(np.float64)
