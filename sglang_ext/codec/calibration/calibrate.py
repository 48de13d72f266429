"""Profiles from a model and text, or from nothing but some of its KV.

With the model (:func:`calibrate_model`) the metric of ``design.py`` is measured: tokens are drawn
from the model's own predictions of a continuation, and the second moment of the gradient of their
log-likelihood by position-free K and V is the Fisher information of the KV. Half its quadratic form
is, to second order, the KL divergence that an error causes. It contains what is otherwise weighed
apart: the query energy of RoPE pairs, the output projection, the sensitivity of layers and heads.

Without it (:func:`profile_from_planes`) the metric is one over the variance of each plane. That is
numpy only, and takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.codec.calibration import design
from sglang_ext.codec.calibration.moments import NUM_SINKS, MomentSums, num_samples, rows_of, usable
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.float_bits import to_float32
from sglang_ext.codec.hier.profile import Profile

__all__ = [
    "NUM_SINKS",
    "MomentSums",
    "block_channels_for",
    "calibrate_model",
    "profile_from_planes",
]

F32 = npt.NDArray[np.float32]
Progress = Callable[[str], None]

# Mean squared coefficient, in variances, from which first tokens are kept raw.
_SINK_POWER = 8.0
# Of the default level without gradients. On the bundled model: a KL of about 0.001.
_PLAIN_BITS = 2.0


def block_channels_for(num_planes: int, num_channels: int, head_dim: int, limit: int) -> int:
    """The largest block of at most ``limit`` channels: planes, a plane, or heads of a plane."""
    planes = [g * num_channels for g in range(1, num_planes + 1) if num_planes % g == 0]
    parts = [n for n in range(1, num_channels) if num_channels % n == 0]
    heads = [n for n in parts if n % head_dim == 0] if num_channels % head_dim == 0 else []
    for sizes in (planes, heads, parts):
        fitting = [n for n in sizes if n <= limit]
        if fitting:
            return max(fitting)
    return 1


def profile_from_planes(
    planes: Sequence[npt.NDArray[Any]],
    dtype: str,
    *,
    head_dim: int,
    options: CalibrationOptions | None = None,
    source: str = "KV samples",
) -> Profile:
    """A profile from position-free KV alone.

    Args:
        planes: bit patterns ``[S, T, C]``, one array a sequence, its first token first. 2,000
            tokens or more are wanted in all; with fewer, blocks get smaller.
        dtype: of the bit patterns, as codecs name it.
        head_dim: D; blocks do not cut heads.
        options: block size, levels.
        source: for people.

    Raises:
        ValueError: no tokens to learn from, or shapes differ.
    """
    options = options or CalibrationOptions()
    num_planes, _, num_channels = planes[0].shape
    parts = [rows_of(to_float32(part, dtype)) for part in planes]
    rows = usable(np.concatenate([part[NUM_SINKS:] for part in parts]))
    if len(rows) < 2:
        raise ValueError("calibration needs some finite tokens behind the first four")
    limit = max(1, min(options.max_block_channels, len(rows) // 4))
    block = block_channels_for(num_planes, num_channels, head_dim, limit)
    sums = MomentSums(block)
    for start in range(0, len(rows), 4096):
        sums.add(rows[start : start + 4096])
    transform = design.transform_of(sums.moments(num_channels))
    samples = rows[:: max(1, len(rows) // num_samples(rows.shape[1]))]
    step = _step_for_bits(transform, _PLAIN_BITS)
    first = usable(np.concatenate([part[:NUM_SINKS] for part in parts]))
    return design.build_profile(
        transform,
        samples,
        num_channels=num_channels,
        head_dim=head_dim,
        coarsest_step=step * float(design.STEP_RATIO) ** options.default_level,
        num_levels=options.num_levels,
        default_level=options.default_level,
        raw_tokens=_raw_tokens(transform, first),
        source=source,
    )


def calibrate_model(
    model_path: str,
    texts: Sequence[str],
    *,
    options: CalibrationOptions | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Profile:
    """A profile from a Hugging Face model and text. Minutes for a small model.

    Args:
        model_path: folder or name.
        texts: what to run it on; what is measured later should not be among it.
        options: see :class:`CalibrationOptions`.
        device: of torch.
        progress: called with a line now and then.

    Raises:
        ValueError: there is too little text, or the model is of an unknown kind.
    """
    from sglang_ext.codec.calibration.hf_capture import CausalLm
    from sglang_ext.codec.calibration.hf_statistics import collect, cut_windows, step_for_kl

    options = options or CalibrationOptions()
    tell = progress or (lambda _: None)
    if model_path.startswith(("/", "./", "../", "~")) and not Path(model_path).is_dir():
        raise ValueError(f"{model_path} is no folder; name a model's folder, or a model of a hub")
    model = CausalLm(model_path, device=device)
    windows, prefix = cut_windows(model, texts, options)
    held_out, windows = windows[: options.held_out], windows[options.held_out :]
    num_channels = model.num_kv_heads * model.head_dim
    block = block_channels_for(
        2 * model.num_layers, num_channels, model.head_dim, options.max_block_channels
    )
    tell(f"{len(windows)} windows of {prefix} tokens, blocks of {block} channels")
    sums, first = collect(model, windows, prefix, block, options, tell)
    moments = sums.moments(num_channels)
    transform = design.transform_of(moments)
    step = step_for_kl(model, transform, held_out, prefix, options, tell)
    tell("tables")
    return design.build_profile(
        transform,
        np.concatenate(sums.samples),
        num_channels=num_channels,
        head_dim=model.head_dim,
        coarsest_step=step * float(design.STEP_RATIO) ** options.default_level,
        num_levels=options.num_levels,
        default_level=options.default_level,
        raw_tokens=_raw_tokens(transform, first),
        source=f"{len(windows)} windows of {prefix} tokens, {options.num_draws} gradients each",
    )


def _step_for_bits(transform: design.Transform, target: float) -> float:
    """The step that gives about so many bits a value."""
    low, high = -100.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        if design.expected_bits(transform, 2.0**middle) > target:
            low = middle
        else:
            high = middle
    return float(2.0**high)


def _raw_tokens(transform: design.Transform, first: F32) -> int:
    """How many first tokens lie so far from all others that they are kept as they are."""
    if not len(first):
        return 0
    power = [
        (values / np.maximum(sigma, 1e-3 * max(sigma.max(), 1e-30))) ** 2
        for values, sigma in zip(
            design.coefficients(transform, first), transform.sigma, strict=True
        )
    ]
    mean = float(np.mean([part.mean() for part in power]))
    return NUM_SINKS if mean > _SINK_POWER else 0
