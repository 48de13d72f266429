"""Measure the shares of kernels/rope/README.md: `python -m tests.kernels.rope.measure_rope`."""

from __future__ import annotations

import numpy as np
import torch

from sglang_ext.kernels import rope
from sglang_ext.kernels.rope import RopeSpec, naive
from tests.kernels.rope.rope_cases import make_bed, make_spec, random_rows

NUM_TOKENS, HEADS, DIM = 2048, 4, 128


def correction_share(dtype: torch.dtype, spec: RopeSpec, ratio: float) -> float:
    """Values that need a correction, of all."""
    positions = np.arange(NUM_TOKENS)
    x = random_rows((NUM_TOKENS, HEADS, DIM), dtype, ratio=ratio)
    bed = make_bed(naive.rotate(x, positions, spec), 64)
    return len(rope.save_k(bed.pool, bed.slots, positions, spec, bed.view)) / x.numel()


def pair_share(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pairs whose two words are equal, neox pairing."""
    equal = naive.bits(a) == naive.bits(b)
    half = equal.shape[-1] // 2
    return (equal[..., :half] & equal[..., half:]).float().mean().item()


def moved_shares(dtype: torch.dtype, rule: str, num_tokens: int = NUM_TOKENS) -> dict[str, float]:
    """Pairs of moved K equal to recomputing at the new position, and plain rounding in place."""
    table = dtype if rule == "eager" else torch.float32
    spec = make_spec(DIM, rule, max_pos=2 * num_tokens, table=table)
    saved = np.arange(num_tokens)
    wanted = saved + num_tokens * 3 // 5
    x = random_rows((num_tokens, HEADS, DIM), dtype)
    y, truth = naive.rotate(x, saved, spec), naive.rotate(x, wanted, spec)
    bed = make_bed(y, 64)
    rope.save_k(bed.pool, bed.slots, saved, spec, bed.view)
    moved = bed.loaded()
    rope.load_k(bed.view, wanted, spec, moved, bed.slots, None)
    rounded = naive.unrotate(y, saved, spec)
    return {
        "in_place": pair_share(naive.rotate(rounded, saved, spec), y),
        "pre": pair_share(bed.gather(moved), truth),
        "plain": pair_share(naive.rotate(rounded, wanted, spec), truth),
        "delta": pair_share(naive.move(y, saved, wanted, spec), truth),
    }


def measure_shares() -> None:
    """Print both tables."""
    print("corrections, % of values; ratio of outlier channels 1, 10, 100, 1000")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rule in ("eager", "fp32"):
            for scaling, table in (
                ("plain", dtype),
                ("plain", torch.float32),
                ("yarn", dtype),
                ("yarn", torch.float32),
            ):
                spec = make_spec(DIM, rule, max_pos=NUM_TOKENS, scaling=scaling, table=table)
                shares = [100 * correction_share(dtype, spec, r) for r in (1, 10, 100, 1000)]
                name = f"{str(dtype)[6:]} {rule} {scaling} table {str(table)[6:]}"
                print(f"{name:42}", *(f"{share:8.4f}" for share in shares))
    print("pairs equal to recomputation, %")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rule in ("eager", "fp32"):
            parts = moved_shares(dtype, rule).items()
            print(f"{str(dtype)[6:]:10} {rule:6}", *(f"{k} {100 * v:.1f}" for k, v in parts))


if __name__ == "__main__":
    measure_shares()
