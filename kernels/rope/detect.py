"""Which rounding rule the loaded model's own rotation follows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import naive
from .spec import RULES, RopeSpec

if TYPE_CHECKING:
    from .spec import RotateFn

_MAGNITUDES = (1e-3, 0.1, 1.0, 30.0, 1000.0)


def detect_rule(
    rotate_fn: RotateFn,
    spec: RopeSpec,
    dtype: torch.dtype,
    head_dim: int,
    num_positions: int = 1024,
) -> str | None:
    """Find the rule that reproduces the model's rotation bit by bit.

    Rules that no sample tells apart count as the first of them.

    Args:
        rotate_fn: the model's own rotation: rows `[T, 1, head_dim]` of `dtype` on the CPU and
            int64 positions `[T]` to rotated rows of the same shape.
        spec: tables and pairing; its rule is not looked at.
        dtype: the KV dtype.
        head_dim: head dimension, at least `spec.first + spec.rotary_dim`.
        num_positions: positions sampled; all of them where the table is no longer.

    Returns:
        The first name in `RULES` that is bit-equal at every sampled position and magnitude, else
        None: such a layer's K has to stay position-bound.
    """
    generator = torch.Generator().manual_seed(20)
    count = min(num_positions, spec.max_pos)
    positions = np.unique(np.linspace(0, spec.max_pos - 1, count).astype(np.int64))
    left = list(RULES)
    for trial in range(2 * len(_MAGNITUDES)):
        rows = torch.randn(positions.size, 1, head_dim, generator=generator)
        # Every other trial cancels: rotated, the even columns vanish but for rounding, and that
        # is where rules that differ in the last bit of a product come apart.
        rows[..., ::2] *= 0.0 if trial % 2 else 20.0
        rows *= _MAGNITUDES[trial // 2]
        if trial % 2:
            rows = naive.unrotate(rows, positions, spec)
        x = rows.to(dtype)
        expected = naive.bits(rotate_fn(x.clone(), positions).contiguous())
        left = [
            rule
            for rule in left
            if torch.equal(
                naive.bits(naive.rotate(x, positions, replace(spec, rule=rule))), expected
            )
        ]
        if not left:
            return None
    return left[0]
