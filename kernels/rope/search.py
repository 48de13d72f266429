"""Finding position-free words that rotate back to the pool's bits (README, "The grid search").

Phase 1, in `cpu.py`, rounds the un-rotated pair and finds it right nine times in ten.  What it
leaves comes here: `try_neighbours` looks at the eight pairs one grid point around, vectorised over
a list of pairs; `solve_pair` then takes each candidate of the larger component and solves for the
smaller one, which also reaches outlier channels, where the smaller grid is much finer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rotate import rotate
from .words import decode, encode, jit, step, use_wide_vectors, wide

# Candidates of the outer component lie within REACH grid points of the rounded one; POINTS values
# of the inner one are tried in each candidate's interval.
REACH = 6
POINTS = 12
# Measured on random pairs: a full step overshoots the half of the residual that is rounding noise.
_GAIN = np.float32(0.75)
_UP, _DOWN = np.int32(1), np.int32(-1)


@jit(forceinline=True)
def reciprocal(c: Any, s: Any, norm: Any, like: Any) -> Any:
    """`1 / (c^2 + s^2)`, to first order around `norm`, which spares the row loops a division.

    Tables differ from a constant norm by their rounding only, so the error is the square of that.
    Where a table is not so, the guess is poor and the search, which divides, has more to do.
    """
    c = wide(c, like)
    s = wide(s, like)
    inverse = wide(np.float32(1.0), like) / wide(norm, like)
    return inverse * (wide(np.float32(2.0), like) - (c * c + s * s) * inverse)


@jit(forceinline=True)
def unrotate(w1: Any, w2: Any, c: Any, s: Any, scale: Any) -> Any:
    """The position-free pair of the words `(w1, w2)`, not rounded to the grid.

    Computed in fp32 for 16-bit words and in fp64 for fp32 words.  `scale`, `1 / (c^2 + s^2)`,
    undoes a table rounded to bf16 and YaRN's scale alike.
    """
    y1 = wide(decode(w1), w1)
    y2 = wide(decode(w2), w1)
    c = wide(c, w1)
    s = wide(s, w1)
    return (y1 * c + y2 * s) * scale, (y2 * c - y1 * s) * scale


@jit(forceinline=True)
def unrotate_exactly(w1: Any, w2: Any, c: Any, s: Any) -> Any:
    """As `unrotate`, with the division done."""
    one = wide(np.float32(1.0), w1)
    c1, s1 = wide(c, w1), wide(s, w1)
    return unrotate(w1, w2, c, s, one / (c1 * c1 + s1 * s1))


@jit(forceinline=True)
def newton(y1: Any, y2: Any, o1: Any, o2: Any, x1: Any, x2: Any, c: Any, s: Any,
           scale: Any) -> Any:
    """Move the words `(x1, x2)`, which rotate to `(o1, o2)`, towards those that give `(y1, y2)`."""
    e1 = wide(decode(y1), y1) - wide(decode(o1), y1)
    e2 = wide(decode(y2), y1) - wide(decode(o2), y1)
    c = wide(c, y1)
    s = wide(s, y1)
    gain = wide(_GAIN, y1) * scale
    v1 = wide(decode(x1), y1) + (e1 * c + e2 * s) * gain
    v2 = wide(decode(x2), y1) + (e2 * c - e1 * s) * gain
    return encode(np.float32(v1), y1), encode(np.float32(v2), y1)


@jit(forceinline=True)
def _neighbours(rule: Any, y1: Any, y2: Any, cos: Any, sin: Any, x1: Any, x2: Any, ok: Any,
                num: Any) -> None:
    use_wide_vectors()
    for i in range(num):
        c, s = cos[i], sin[i]
        z1, z2 = y1[i], y2[i]
        v1, v2 = unrotate_exactly(z1, z2, c, s)
        a = encode(np.float32(v1), z1)
        b = encode(np.float32(v2), z1)
        # Forward is the side on which the unrounded value lies, so near pairs come first.
        side1 = v1 > wide(decode(a), z1)
        side2 = v2 > wide(decode(b), z1)
        a_up, a_down = step(a, _UP), step(a, _DOWN)
        b_up, b_down = step(b, _UP), step(b, _DOWN)
        af = a_up if side1 else a_down
        ab = a_down if side1 else a_up
        bf = b_up if side2 else b_down
        bb = b_down if side2 else b_up
        # Tried from the last choice to the first: an earlier choice overwrites a later one.
        best1, best2, found = a, b, False
        for_1 = (ab, af, ab, a, ab, af, a, af)
        for_2 = (bb, bb, bf, bb, b, bf, bf, b)
        for k in _EIGHT:
            o1, o2 = rotate(rule, for_1[k], for_2[k], c, s)
            hit = (o1 == z1) & (o2 == z2)
            best1 = for_1[k] if hit else best1
            best2 = for_2[k] if hit else best2
            found = found | hit
        x1[i] = best1
        x2[i] = best2
        ok[i] = found


_EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)


@jit()
def try_neighbours(rule: Any, y1: Any, y2: Any, cos: Any, sin: Any, x1: Any, x2: Any, ok: Any,
                   num: Any) -> None:
    """Look one grid point around, for `num` listed pairs of words `(y1, y2)`.

    Writes to `x1`, `x2` the first pair of words that rotates to `(y1, y2)`, else the rounded
    un-rotated pair; `ok` (uint8) tells which.
    """
    use_wide_vectors()
    if rule == 0:
        _neighbours(0, y1, y2, cos, sin, x1, x2, ok, num)
    elif rule == 1:
        _neighbours(1, y1, y2, cos, sin, x1, x2, ok, num)
    elif rule == 2:
        _neighbours(2, y1, y2, cos, sin, x1, x2, ok, num)
    else:
        _neighbours(3, y1, y2, cos, sin, x1, x2, ok, num)


@jit()
def _half_gap(word: Any) -> Any:
    value = np.float64(decode(word))
    above = np.float64(decode(step(word, _UP))) - value
    below = value - np.float64(decode(step(word, _DOWN)))
    return 0.5 * max(above, below)


@jit()
def _solve_inner(rule: Any, y1: Any, y2: Any, c: Any, s: Any, outer: Any, inner_guess: Any,
                 slack: Any, first_is_outer: Any) -> Any:
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
    v1, v2 = unrotate_exactly(y1, y2, c, s)
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
