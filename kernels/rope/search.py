"""Finding position-free words that rotate back to the pool's bits (README, "The grid search").

Phase 1, in `cpu.py`, tries four pairs for all.  What it leaves comes here: `try_neighbours` looks
around where Newton's method leads, vectorised over a list of pairs; `solve_pair` then takes each
candidate of the larger component and solves for the smaller one, which also reaches outlier
channels, where the smaller grid is much finer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rotate import rotate, rotated
from .words import decode, encode, jit, nearest, pack, rounds_to, step, use_wide_vectors, wide

# Candidates of the outer component lie within REACH grid points of the rounded one; POINTS values
# of the inner one are tried in each candidate's interval.
REACH = 6
POINTS = 12
_ONE, _TWO, _DOWN = np.int32(1), np.int32(2), np.int32(-1)


@jit(forceinline=True)
def inverse(c: Any, s: Any, like: Any) -> Any:
    """`(c, s)` over `c^2 + s^2`, which undoes a table rounded to bf16 and YaRN's scale alike.

    fp32 for 16-bit words and fp64 for fp32 words, as all un-rotation.
    """
    c, s, one = wide(c, like), wide(s, like), wide(np.float32(1.0), like)
    scale = one / (c * c + s * s)
    return c * scale, s * scale


@jit(forceinline=True)
def unrotate(y1: Any, y2: Any, c: Any, s: Any, like: Any) -> Any:
    """The position-free pair of fp32 values `(y1, y2)`, not rounded; `c, s` are of `inverse`."""
    z1, z2 = wide(y1, like), wide(y2, like)
    return z1 * c + z2 * s, z2 * c - z1 * s


@jit(forceinline=True)
def unrotate_words(w1: Any, w2: Any, c: Any, s: Any) -> Any:
    """The position-free pair of two words, not rounded, as `naive.move` has it."""
    z1, z2 = wide(decode(w1), w1), wide(decode(w2), w1)
    c, s, one = wide(c, w1), wide(s, w1), wide(np.float32(1.0), w1)
    scale = one / (c * c + s * s)
    return (z1 * c + z2 * s) * scale, (z2 * c - z1 * s) * scale


@jit(forceinline=True)
def rotates_to(rule: Any, x1: Any, x2: Any, y1: Any, y2: Any, c: Any, s: Any, like: Any) -> Any:
    """Whether the model rotates fp32 `(x1, x2)` to `(y1, y2)`, all on the grid of `like`."""
    o1, o2 = rotated(rule, x1, x2, c, s, like)
    return rounds_to(o1, y1, like) & rounds_to(o2, y2, like)


@jit(forceinline=True)
def _attempt(
    rule: Any, x1: Any, x2: Any, y1: Any, y2: Any, c: Any, s: Any, like: Any, best: Any
) -> Any:
    hit = rotates_to(rule, x1, x2, y1, y2, c, s, like)
    return x1 if hit else best[0], x2 if hit else best[1], hit | best[2]


@jit(forceinline=True)
def _newton(
    rule: Any, x1: Any, x2: Any, y1: Any, y2: Any, c: Any, s: Any, ci: Any, si: Any, like: Any
) -> Any:
    """`(x1, x2)` less the un-rotated error of what it rotates to."""
    o1, o2 = rotated(rule, x1, x2, c, s, like)
    d1, d2 = unrotate(y1 - o1, y2 - o2, ci, si, like)
    return wide(x1, like) + d1, wide(x2, like) + d2


@jit(forceinline=True)
def _steps(value: Any, near: Any, places: Any, like: Any) -> Any:
    """The grid values `places` beside `near`: that on the side of `value`, and the other."""
    word = pack(near, like)
    up = decode(step(word, places))
    down = decode(step(word, np.int32(-places)))
    above = value > wide(near, like)
    return up if above else down, down if above else up


@jit(forceinline=True)
def _neighbours(
    rule: Any,
    ring: Any,
    words1: Any,
    words2: Any,
    cos: Any,
    sin: Any,
    x1: Any,
    x2: Any,
    ok: Any,
    num: Any,
) -> None:
    use_wide_vectors()
    for i in range(num):
        c, s, w = cos[i], sin[i], words1[i]
        z1, z2 = decode(w), decode(words2[i])
        ci, si = inverse(c, s, w)
        v1, v2 = unrotate(z1, z2, ci, si, w)
        r1, r2 = nearest(np.float32(v1), w), nearest(np.float32(v2), w)
        v1, v2 = _newton(rule, r1, r2, z1, z2, c, s, ci, si, w)
        a, b = nearest(np.float32(v1), w), nearest(np.float32(v2), w)
        if ring == 2:
            v1, v2 = _newton(rule, a, b, z1, z2, c, s, ci, si, w)
            a, b = nearest(np.float32(v1), w), nearest(np.float32(v2), w)
        # f: one grid point towards the unrounded value, where near pairs are; b: one away.
        af, ab = _steps(v1, a, _ONE, w)
        bf, bb = _steps(v2, b, _ONE, w)
        # Tried from the last choice to the first: an earlier choice overwrites a later one.
        best = (r1, r2, False)
        if ring == 2:
            aff, abb = _steps(v1, a, _TWO, w)
            bff, bbb = _steps(v2, b, _TWO, w)
            best = _attempt(rule, abb, bbb, z1, z2, c, s, w, best)
            best = _attempt(rule, aff, bbb, z1, z2, c, s, w, best)
            best = _attempt(rule, abb, bff, z1, z2, c, s, w, best)
            best = _attempt(rule, aff, bff, z1, z2, c, s, w, best)
            best = _attempt(rule, abb, bb, z1, z2, c, s, w, best)
            best = _attempt(rule, abb, bf, z1, z2, c, s, w, best)
            best = _attempt(rule, ab, bbb, z1, z2, c, s, w, best)
            best = _attempt(rule, af, bbb, z1, z2, c, s, w, best)
            best = _attempt(rule, ab, bff, z1, z2, c, s, w, best)
            best = _attempt(rule, aff, bb, z1, z2, c, s, w, best)
            best = _attempt(rule, a, bbb, z1, z2, c, s, w, best)
            best = _attempt(rule, abb, b, z1, z2, c, s, w, best)
            best = _attempt(rule, af, bff, z1, z2, c, s, w, best)
            best = _attempt(rule, aff, bf, z1, z2, c, s, w, best)
            best = _attempt(rule, a, bff, z1, z2, c, s, w, best)
            best = _attempt(rule, aff, b, z1, z2, c, s, w, best)
        best = _attempt(rule, ab, bb, z1, z2, c, s, w, best)
        best = _attempt(rule, af, bb, z1, z2, c, s, w, best)
        best = _attempt(rule, ab, bf, z1, z2, c, s, w, best)
        best = _attempt(rule, a, bb, z1, z2, c, s, w, best)
        best = _attempt(rule, ab, b, z1, z2, c, s, w, best)
        best = _attempt(rule, af, bf, z1, z2, c, s, w, best)
        best = _attempt(rule, a, bf, z1, z2, c, s, w, best)
        best = _attempt(rule, af, b, z1, z2, c, s, w, best)
        best = _attempt(rule, a, b, z1, z2, c, s, w, best)
        x1[i], x2[i] = pack(best[0], w), pack(best[1], w)
        ok[i] = best[2] & (v1 == v1)  # with a NaN nothing is found (see cpu.py)


@jit()
def try_neighbours(
    rule: Any, ring: Any, y1: Any, y2: Any, cos: Any, sin: Any, x1: Any, x2: Any, ok: Any, num: Any
) -> None:
    """Look around where `ring` (1 or 2) Newton steps lead, for `num` listed pairs `(y1, y2)`.

    Tries the pairs up to `ring` grid points away.  Writes to `x1`, `x2` one that rotates to
    `(y1, y2)`, the nearest first, else the rounded un-rotated pair; `ok` (uint8) tells which.
    """
    use_wide_vectors()
    if ring == 1:
        if rule == 0:
            _neighbours(0, 1, y1, y2, cos, sin, x1, x2, ok, num)
        elif rule == 1:
            _neighbours(1, 1, y1, y2, cos, sin, x1, x2, ok, num)
        elif rule == 2:
            _neighbours(2, 1, y1, y2, cos, sin, x1, x2, ok, num)
        else:
            _neighbours(3, 1, y1, y2, cos, sin, x1, x2, ok, num)
    elif rule == 0:
        _neighbours(0, 2, y1, y2, cos, sin, x1, x2, ok, num)
    elif rule == 1:
        _neighbours(1, 2, y1, y2, cos, sin, x1, x2, ok, num)
    elif rule == 2:
        _neighbours(2, 2, y1, y2, cos, sin, x1, x2, ok, num)
    else:
        _neighbours(3, 2, y1, y2, cos, sin, x1, x2, ok, num)


@jit()
def _half_gap(word: Any) -> Any:
    value = np.float64(decode(word))
    above = np.float64(decode(step(word, _ONE))) - value
    below = value - np.float64(decode(step(word, _DOWN)))
    return 0.5 * max(above, below)


@jit()
def _solve_inner(
    rule: Any,
    y1: Any,
    y2: Any,
    c: Any,
    s: Any,
    outer: Any,
    inner_guess: Any,
    slack: Any,
    first_is_outer: Any,
) -> Any:
    """Words of the inner component that rotate, with `outer`, to `(y1, y2)`: `(found, word)`.

    Both outputs are monotone in the inner component, so each bounds it to an interval; `slack`
    widens them by what the roundings in between may add.
    """
    x = np.float64(decode(outer))
    if first_is_outer:  # x1 is known: y1 = x1 c - x2 s, y2 = x2 c + x1 s
        k1, r1 = -s, np.float64(decode(y1)) - x * c
        k2, r2 = c, np.float64(decode(y2)) - x * s
    else:  # x2 is known: y1 = x1 c - x2 s, y2 = x1 s + x2 c
        k1, r1 = c, np.float64(decode(y1)) + x * s
        k2, r2 = s, np.float64(decode(y2)) - x * c
    e1 = _half_gap(y1) + slack * abs(x * k2)
    e2 = _half_gap(y2) + slack * abs(x * k1)
    spread = slack * abs(np.float64(decode(inner_guess)))
    low, high = -np.inf, np.inf
    if k1 != 0.0:
        low = r1 / k1 - abs(e1 / k1) - spread
        high = r1 / k1 + abs(e1 / k1) + spread
    if k2 != 0.0:
        low = max(low, r2 / k2 - abs(e2 / k2) - spread)
        high = min(high, r2 / k2 + abs(e2 / k2) + spread)
    if not low <= high:  # also NaN
        return False, inner_guess
    middle, reach = 0.5 * (low + high), 0.5 * (high - low)
    last = inner_guess
    for i in range(POINTS):
        sign = 1.0 if i & 1 else -1.0
        point = encode(np.float32(middle + sign * reach * (((i + 1) >> 1) / (POINTS // 2))), y1)
        if i > 0 and point == last:
            continue
        last = point
        if first_is_outer:
            o1, o2 = rotate(rule, outer, point, c, s)
        else:
            o1, o2 = rotate(rule, point, outer, c, s)
        if o1 == y1 and o2 == y2:
            return True, point
    return False, inner_guess


@jit()
def solve_pair(rule: Any, y1: Any, y2: Any, c: Any, s: Any, slack: Any) -> Any:
    """The pair of words that rotates to `(y1, y2)` and lies near the un-rotated one.

    Returns:
        `(found, x1, x2)`; the rounded un-rotated pair where none was found.
    """
    ci, si = inverse(c, s, y1)
    v1, v2 = unrotate(decode(y1), decode(y2), ci, si, y1)
    a = encode(np.float32(v1), y1)
    b = encode(np.float32(v2), y1)
    if not (np.isfinite(v1) and np.isfinite(v2)):
        return False, a, b
    first_larger = abs(v1) >= abs(v2)
    for turn in range(2):
        first_is_outer = first_larger == (turn == 0)
        for i in range(2 * REACH + 1):
            places = np.int32(-((i + 1) >> 1) if i & 1 else (i >> 1))
            if first_is_outer:
                outer = step(a, places)
                found, word = _solve_inner(rule, y1, y2, c, s, outer, b, slack, True)
                if found:
                    return True, outer, word
            else:
                outer = step(b, places)
                found, word = _solve_inner(rule, y1, y2, c, s, outer, a, slack, False)
                if found:
                    return True, word, outer
    return False, a, b
