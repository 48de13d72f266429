"""The product's codec with one idea taken away, each as a profile of its own.

All are built as the product's profile is, on the same samples; the coarsest step is chosen so that
the default level costs about what the product's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.codec.hier import hier_methods, zstd_methods
from bench.codec.ideal_bits import transform_bits
from bench.codec.methods import Method
from sglang_ext.codec.calibration.design import (
    F64,
    STEP_RATIO,
    Moments,
    Transform,
    build_profile,
    plane_metric,
    transform_of,
)
from sglang_ext.codec.float_bits import F32, Bits, to_float32
from sglang_ext.codec.hier.profile import Profile

_SAMPLE_ROWS = 800
_ROUNDS = 14


def rows_of(chunks: Sequence[Bits], dtype: str, skip: int) -> F32:
    """Rows f32 [T, S * C] of chunks [S, T, C], without the first `skip` tokens of each."""
    parts = [
        to_float32(np.ascontiguousarray(chunk[:, skip:]), dtype).transpose(1, 0, 2)
        for chunk in chunks
    ]
    return np.asarray(np.concatenate([part.reshape(len(part), -1) for part in parts]), np.float32)


def metric_of(profile: Profile) -> F64:
    """The metric [B, n, n] that the profile's transform was made for, its coarsest step being 1.

    A transform is `M^(1/2)` times an orthonormal basis, so it gives back M.
    """
    grid = 2.0 ** profile.grid_exp.astype(np.float64)
    forward = profile.forward * profile.inv_step[0][:, None, :] / grid[:, :, None]
    return np.asarray(forward @ forward.transpose(0, 2, 1), np.float64)


def rotated_metric(metric: F64, turns: F64) -> F64:
    """The metric of K as it is cached: the mean of R M R' over positions; V's part stays.

    Args:
        metric: [B, n, n] in the order of planes, K then V of each layer.
        turns: [P, C, C], row vectors of K times these are rotated.
    """
    num_channels = turns.shape[1]
    block = metric.shape[1]
    out = np.zeros_like(metric)
    for turn in turns:
        whole = np.zeros((len(metric), block, block))
        whole[:] = np.eye(block)
        for number in range(len(metric)):
            for start in range(0, block, num_channels):
                width = min(num_channels, block)
                first = number * block + start
                if first // num_channels % 2 == 0:
                    at = first % num_channels
                    part = turn[at : at + width, at : at + width]
                    whole[number, start : start + width, start : start + width] = part
        # Rows y = x R have gradients R^-1 g, and R is orthogonal: M becomes R' M R.
        out += whole.transpose(0, 2, 1) @ metric @ whole
    return out / len(turns)


def moments_of(rows: F32, metric: F64) -> Moments:
    """Mean and covariance of rows [T, B * n] by block, beside a given metric [B, n, n]."""
    mean, covariance, block = [], [], metric.shape[1]
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block].astype(np.float64)
        mean.append(part.mean(axis=0))
        covariance.append(np.cov(part.T, bias=True).reshape(block, block))
    return Moments(np.stack(mean), np.stack(covariance), metric)


def without_klt(moments: Moments) -> Transform:
    """Channels on their own: steps by the metric's diagonal, means removed."""
    weight = np.sqrt(np.diagonal(moments.metric, axis1=1, axis2=2))
    weight = np.maximum(weight, weight.max() * 1e-6)
    deviation = np.sqrt(np.maximum(np.diagonal(moments.covariance, axis1=1, axis2=2), 0))
    num_blocks, size = weight.shape
    # A block's coefficients go by falling deviation, since the live ones are its first.
    order = np.argsort(-deviation * weight, axis=1, kind="stable")
    forward = np.zeros((num_blocks, size, size))
    inverse = np.zeros_like(forward)
    blocks, places = np.arange(num_blocks)[:, None], np.arange(size)[None]
    picked = np.take_along_axis(weight, order, axis=1)
    forward[blocks, order, places] = picked
    inverse[blocks, places, order] = 1 / picked
    sigma = np.take_along_axis(deviation * weight, order, axis=1)
    return Transform(moments.mean, deviation, forward, inverse, sigma)


def without_metric(moments: Moments, num_channels: int) -> Moments:
    """The metric of models without gradients: one over each plane's variance."""
    return replace(moments, metric=plane_metric(moments.covariance, num_channels))


def profile_like(profile: Profile, transform: Transform, rows: F32, wanted_bits: float) -> Profile:
    """A profile of another transform, with as many levels and about the same rate.

    Args:
        profile: the product's.
        transform: the other one.
        rows: samples [T, S * C].
        wanted_bits: ideal bits a value at the default level.
    """
    sample = rows[:: max(1, len(rows) // _SAMPLE_ROWS)]
    low, high = -20.0, 20.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if transform_bits(transform, sample, 2.0**middle) > wanted_bits:
            low = middle
        else:
            high = middle
    return build_profile(
        transform,
        rows,
        num_channels=profile.num_channels,
        head_dim=profile.head_dim,
        coarsest_step=2.0**high * STEP_RATIO**profile.default_level,
        num_levels=profile.num_levels,
        default_level=profile.default_level,
        raw_tokens=profile.raw_tokens,
    )


def ablations(
    profile: Profile, dtype: str, rows: F32, rotated_rows: F32, turns: F64, wanted: float
) -> list[Method]:
    """Methods with one idea taken away.

    Args:
        profile: the product's; its metric is used wherever there is one.
        dtype: of the KV.
        rows: samples [T, S * C] of position-free KV.
        rotated_rows: the same with K as it is cached.
        turns: see `rotated_metric`.
        wanted: the product's bits a value at its default level.
    """
    moments = moments_of(rows, metric_of(profile))
    turned = moments_of(rotated_rows, rotated_metric(moments.metric, turns))
    methods = zstd_methods(profile, dtype)
    # First tokens raw where the profile has them coded, and the reverse.
    kept, name = (0, "hier/no-raw-sinks") if profile.raw_tokens else (4, "hier/4-raw-sinks")
    methods += hier_methods(profile, dtype, name=name, raw_tokens=kept)
    for name, transform, samples in (
        ("no-klt", without_klt(moments), rows),
        ("no-metric", transform_of(without_metric(moments, profile.num_channels)), rows),
        ("rotated-k", transform_of(turned), rotated_rows),
    ):
        other = profile_like(profile, transform, samples, wanted)
        methods += hier_methods(other, dtype, name=f"hier/{name}", rotated=samples is rotated_rows)
    return methods
