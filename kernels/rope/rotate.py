"""The model's rotation of one pair of components, for numba, by the rules of `spec.RULES`."""

from __future__ import annotations

from typing import Any

from .words import decode, encode, fma, jit, nearest

EAGER, FP32, FMA_A, FMA_B = 0, 1, 2, 3


@jit(forceinline=True)
def rotated(rule: Any, x1: Any, x2: Any, c: Any, s: Any, like: Any) -> Any:
    """Rotate fp32 `(x1, x2)` by `(c, s)` as the model does, up to the last rounding.

    `rule` is a constant wherever this is inlined into a loop, so no branch is left there.
    """
    if rule == EAGER:
        o1 = nearest(x1 * c, like) - nearest(x2 * s, like)
        o2 = nearest(x2 * c, like) + nearest(x1 * s, like)
    elif rule == FP32:
        o1 = x1 * c - x2 * s
        o2 = x2 * c + x1 * s
    elif rule == FMA_A:
        o1 = fma(x1, c, -(x2 * s))
        o2 = fma(x2, c, x1 * s)
    else:
        o1 = fma(-x2, s, x1 * c)
        o2 = fma(x1, s, x2 * c)
    return o1, o2


@jit(forceinline=True)
def rotate(rule: Any, w1: Any, w2: Any, c: Any, s: Any) -> Any:
    """Rotate the words `(w1, w2)` by fp32 `(c, s)` as the model does."""
    o1, o2 = rotated(rule, decode(w1), decode(w2), c, s, w1)
    return encode(o1, w1), encode(o2, w1)
