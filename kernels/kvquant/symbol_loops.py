"""The loops of `symbols.py` on flat arrays; see there."""

from __future__ import annotations

from typing import Any

import numpy as np

from .words import jit, use_wide_vectors

_U = np.uint64
_ZERO, _ONE, _FIVE, _LANES, _MASK = _U(0), _U(1), _U(5), _U(32), _U(31)


@jit()
def to_symbols(tiles: Any, radius: Any, num_tokens: Any, symbols: Any, counts: Any) -> None:
    """Base symbols of `tiles`; `counts` `[N]` is the number of escapes in each tile."""
    use_wide_vectors()
    tokens, escaped = _U(num_tokens), np.empty(32, np.int32)
    for i in range(_U(counts.size)):
        lanes = i << _FIVE
        escaped[:] = 0
        for t in range(tokens):
            at = (i * tokens + t) << _FIVE
            for c in range(_LANES):
                double = np.uint16(2 * np.uint16(radius[lanes + c]))
                # Below -radius it wraps around to a large number.
                symbol = np.uint16(np.uint16(tiles[at + c]) + np.uint16(radius[lanes + c]))
                out = symbol > double
                symbols[at + c] = np.uint8(double + 1 if out else symbol)
                escaped[c] += np.int32(out)
        counts[i] = escaped.sum()


@jit()
def list_escapes(
    tiles: Any, radius: Any, num_tokens: Any, counts: Any, index: Any, value: Any
) -> None:
    """Index and value of the coefficients beyond the radius, in order."""
    use_wide_vectors()
    num, tokens = 0, _U(num_tokens)
    for i in range(_U(counts.size)):
        lanes = i << _FIVE
        for t in range(tokens if counts[i] else _ZERO):
            at = (i * tokens + t) << _FIVE
            beyond = np.int32(0)
            for c in range(_LANES):  # most rows have none, which is soon seen
                q, r = np.int16(abs(tiles[at + c])), np.int16(radius[lanes + c])
                beyond = np.int32(beyond | np.int32(q > r))
            for c in range(_LANES if beyond else _ZERO):
                q, r = tiles[at + c], np.int16(radius[lanes + c])
                if (q > r) | (q < -r):
                    index[num] = at + c
                    value[num] = q
                    num += 1


@jit()
def from_symbols(symbols: Any, radius: Any, num_tokens: Any, tiles: Any) -> Any:
    """Coefficients of base symbols, `radius + 1` for escapes; their number, or -1."""
    use_wide_vectors()
    tokens, total = _U(num_tokens), 0
    escaped, wrong = np.empty(32, np.int32), np.zeros(32, np.int32)
    for i in range(_U(radius.size) >> _FIVE):
        lanes = i << _FIVE
        escaped[:] = 0
        for t in range(tokens):
            at = (i * tokens + t) << _FIVE
            for c in range(_LANES):
                r = np.int16(radius[lanes + c])
                q = np.int16(np.int16(symbols[at + c]) - r)
                tiles[at + c] = q
                escaped[c] += np.int32(q == r + 1)
                wrong[c] |= np.int32(q > r + 1)
        total += escaped.sum()
    return -1 if wrong.any() else total


@jit()
def put_escapes(index: Any, value: Any, radius: Any, num_tokens: Any, tiles: Any) -> bool:
    """Write escapes over their marks; whether they are ascending, marked and beyond the radius."""
    tokens, before = _U(num_tokens), np.int64(-1)
    for k in range(index.size):
        here = np.int64(index[k])
        if here <= before or here >= tiles.size:
            return False
        before = here
        at = _U(here)
        r = np.int64(radius[((at >> _FIVE) // tokens << _FIVE) + (at & _MASK)])
        q = np.int64(value[k])
        if np.int64(tiles[at]) != r + 1 or abs(q) <= r or q == -32768:
            return False
        tiles[at] = value[k]
    return True


@jit()
def divide(tiles: Any, symbols: Any, context: Any, thirds: Any) -> None:
    """Coefficients over 3, rounded, and the symbols and contexts of what is left."""
    use_wide_vectors()
    for k in range(_U(tiles.size)):
        q = np.int32(tiles[k])
        size = np.int32(abs(q))
        third = np.int32((size + 1) // 3)
        rest = np.int32(size - 3 * third)  # towards or away from zero
        # At 0 the rest keeps its sign; else it is counted away from zero.
        symbols[k] = np.uint8(1 + (q if third == 0 else rest))
        context[k] = np.uint8(third if third < 2 else 2)
        thirds[k] = np.int16(third if q > 0 else -third)


@jit()
def contexts(tiles: Any, out: Any) -> None:
    """`min(|q|, 2)`."""
    use_wide_vectors()
    for k in range(_U(tiles.size)):
        size = abs(np.int32(tiles[k]))
        out[k] = np.uint8(size if size < 2 else 2)


@jit()
def multiply(tiles: Any, symbols: Any, out: Any) -> Any:
    """Refined coefficients; whether all symbols are at most 2 and all results fit int16."""
    use_wide_vectors()
    bad = np.int32(0)
    for k in range(_U(tiles.size)):
        q, rest = np.int32(tiles[k]), np.int32(np.int32(symbols[k]) - 1)
        value = np.int32(3 * q + (rest if q >= 0 else -rest))
        out[k] = np.int16(value)
        bad = np.int32(bad | np.int32((rest > 1) | (value > 32767) | (value < -32767)))
    return bad == 0


@jit()
def move_runs(source: Any, moves: Any, source_column: Any, num_tokens: Any, target: Any) -> None:
    """Copy runs of coefficients of all tokens from one layout to another.

    Args:
        source: i16 `[N, T, 32]`, flat.
        moves: uint64 `[M, 3]`, see `TransformArrays.moves`.
        source_column: the column of `moves` that holds positions in `source`, 0 or 1.
        num_tokens: T.
        target: as `source`; what is not copied to is left.
    """
    tokens = _U(num_tokens)
    for m in range(moves.shape[0]):
        a, b, num = moves[m, source_column], moves[m, 1 - source_column], moves[m, 2]
        at = ((a >> _FIVE) * tokens << _FIVE) + (a & _MASK)
        to = ((b >> _FIVE) * tokens << _FIVE) + (b & _MASK)
        for _ in range(tokens):
            for c in range(num):
                target[to + c] = source[at + c]
            at += _LANES
            to += _LANES
