"""The transform on the CPU: one core, without the GIL, tokens in tiles that stay in the L2 cache.

Arrays are flat and indices uint64: numba then neither wraps negative indices nor makes slices, and
the loops vectorise.  Sums and flags are cast back to int32 at each step, as numba widens them to
int64.  Integer sums are int32 dot products of int16 wherever a bound proven for the tile at hand
allows, else float64; both are exact, so that the choice changes no bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .words import OFF_GRID, ROWS, decode, dot_rows, encode, jit, to_grid, use_wide_vectors

_U = np.uint64
_ZERO, _ONE, _TWO, _FIVE, _SIX = _U(0), _U(1), _U(2), _U(5), _U(6)
_LANES, _MASK = _U(32), _U(31)
_TOKENS = _U(64)  # tokens worked on at a time
_ROWS = _U(ROWS)
_SUM_LIMIT = 2.0**31 * (1 - 1e-6)  # the margin is for the rounding of the bound itself
_HUGE = 65536.0  # larger than any coefficient that is kept


@jit(forceinline=True)
def _grid_row(
    words: Any,
    start: Any,
    between: Any,
    parts: Any,
    per_part: Any,
    scale: Any,
    first: Any,
    row: Any,
) -> Any:
    """One row on its channels' grids; whether all of it lies there."""
    use_wide_vectors()
    bad = np.int32(0)
    for part in range(parts):
        at, to = start + part * between, part * per_part
        for c in range(per_part):
            value = to_grid(decode(words[at + c]) * scale[first + to + c])
            bad = np.int32(bad | np.int32(value == OFF_GRID))
            row[to + c] = value
    return bad == 0


@jit(forceinline=True)
def _take_row(row: Any, mean: Any, first: Any, n: Any, left: Any, at: Any, largest: Any) -> None:
    """Subtract the means, note the largest magnitudes; what does not fit int16 is cut off."""
    use_wide_vectors()
    for c in range(n):
        value = np.int32(row[c] - mean[first + c])
        left[at + c] = np.int16(value)
        largest[c] = max(largest[c], np.int32(abs(value)))


@jit(forceinline=True)
def _fits(largest: Any, begin: Any, num: Any, norm: Any) -> Any:
    """Whether all sums are below 2^31: the product of two norms bounds them (Cauchy, Schwarz)."""
    total, top = 0.0, np.int32(0)
    for c in range(begin, begin + num):
        top = max(top, largest[c])
        total += np.float64(largest[c]) * np.float64(largest[c])
    return top <= 32767 and math.sqrt(total) * norm < _SUM_LIMIT


@jit(forceinline=True)
def _quantise_row(
    sums: Any,
    at: Any,
    num: Any,
    inv_step: Any,
    column: Any,
    rounding: Any,
    clamp: Any,
    raw_from: Any,
    out: Any,
) -> Any:
    """Some coefficients of a row; whether none of them makes it raw."""
    use_wide_vectors()
    bad = np.int32(0)
    for c in range(num):
        y = sums[at + c]
        scaled = abs(np.float64(y)) * inv_step[column + c] + rounding
        size = np.int32(min(scaled, _HUGE))
        bad = np.int32(bad | np.int32(size >= raw_from[column + c]))
        size = min(size, clamp[column + c])
        out[c] = np.int16(size if y >= 0 else -size)
    return bad == 0


@jit(forceinline=True)
def _put_lanes(
    source: Any, num: Any, tiles: Any, position: Any, token: Any, num_tokens: Any
) -> None:
    """Store coefficients of a token at `position`; at most 32, so that they meet two tiles."""
    lane = position & _MASK
    at = ((position >> _FIVE) * num_tokens + token) * _LANES + lane
    here = min(num, _LANES - lane)
    for c in range(here):
        tiles[at + c] = source[c]
    after = at + here + (num_tokens - _ONE) * _LANES
    for c in range(here, num):
        tiles[after + c - here] = source[c]


@jit(forceinline=True)
def _dense_sums(left: Any, at: Any, num: Any, matrix: Any, base: Any, n: Any, sums: Any) -> None:
    """`sums[j] = sum_c left[at + c] matrix[base + n c + j]` in float64, where it is exact."""
    use_wide_vectors()
    for j in range(n):
        sums[j] = 0.0
    for c in range(num):  # terms
        value = np.float64(left[at + c])
        if value != 0.0:
            for j in range(n):
                sums[j] += value * np.float64(matrix[base + n * c + j])


@jit(forceinline=True)
def _quantise_columns(
    sums: Any,
    at: Any,
    block: Any,
    column: Any,
    steps: Any,
    out: Any,
    tiles: Any,
    flags: Any,
    token: Any,
    num_tokens: Any,
) -> None:
    """Quantise up to 32 coefficients of a row, from `column` on, and store the live ones."""
    b, n, position, live = block
    inv_step, rounding, clamp, raw_from = steps
    num = min(_LANES, n - column)
    if not _quantise_row(sums, at, num, inv_step, b * n + column, rounding, clamp, raw_from, out):
        flags[b * num_tokens + token] = 1
    if live > column:
        _put_lanes(out, min(num, live - column), tiles, position + column, token, num_tokens)


@jit(forceinline=True)
def _clear_rows(
    block: Any, start: Any, num_rows: Any, out: Any, tiles: Any, flags: Any, num_tokens: Any
) -> None:
    """Set the coefficients of raw rows to 0."""
    b, _, position, live = block
    out[:] = 0
    for i in range(num_rows):
        if flags[b * num_tokens + start + i]:
            for column in range(_ZERO, live, _LANES):
                num = min(_LANES, live - column)
                _put_lanes(out, num, tiles, position + column, start + i, num_tokens)


@jit()
def quantise(
    words: Any,
    geometry: Any,
    scale: Any,
    mean: Any,
    forward: Any,
    panels: Any,
    norms: Any,
    inv_step: Any,
    rounding: Any,
    clamp: Any,
    raw_from: Any,
    starts: Any,
    tiles: Any,
    flags: Any,
) -> None:
    """Quantise planes; all arrays flat.

    Args:
        words: `[S, T, C]`.
        geometry: uint64 T, C, n, B, sinks.
        scale: f32 `[B, n]`.
        mean: i32 `[B, n]`.
        forward: i32 `[B, n, n]`.
        panels: the same, packed.
        norms: f64 `[B]`, of the packed matrix.
        inv_step: f64 `[B, n]`.
        rounding: f64.
        clamp: i32 `[B, n]`.
        raw_from: i32 `[B, n]`.
        starts: uint64 `[B + 1]`, positions of blocks.
        tiles: i16 `[N, T, 32]`, all zero; written.
        flags: u8 `[B, T]`, all zero; 1 is written for raw rows, sinks included.
    """
    use_wide_vectors()
    num_tokens, width, n = geometry[0], geometry[1], geometry[2]
    num_blocks, num_sinks = geometry[3], geometry[4]
    per_part = min(n, width)
    parts, between = n // per_part, num_tokens * width
    num_panels, num_pairs = (n + _MASK) >> _FIVE, (n + _ONE) >> _ONE
    stride = num_panels << _FIVE
    row, out = np.empty(n, np.int32), np.zeros(_LANES, np.int16)
    left, largest = np.zeros(_TOKENS * stride, np.int16), np.empty(n, np.int32)
    sums, dense = np.empty(_TOKENS * _LANES, np.int32), np.empty(n, np.float64)
    steps = (inv_step, rounding, clamp, raw_from)
    for b in range(num_blocks):
        plane, channel, first = b * n // width, b * n % width, b * n
        block = (b, n, starts[b], starts[b + _ONE] - starts[b])
        for start in range(_ZERO, num_tokens, _TOKENS):
            num_rows = min(_TOKENS, num_tokens - start)
            largest[:] = 0
            for i in range(num_rows):
                token = start + i
                at = plane * between + token * width + channel
                if token >= num_sinks and _grid_row(
                    words, at, between, parts, per_part, scale, first, row
                ):
                    _take_row(row, mean, first, n, left, i * stride, largest)
                else:
                    flags[b * num_tokens + token] = 1
                    left[i * stride : (i + _ONE) * stride] = 0
            fits = _fits(largest, _ZERO, n, norms[b])
            for p in range(num_panels if fits else _ZERO):
                panel = ((b * num_panels + p) * num_pairs) << _SIX
                for i in range(_ZERO, num_rows, _ROWS):
                    dot_rows(left, i * stride, stride, panels, panel, num_pairs, sums, i << _FIVE)
                for i in range(num_rows):
                    _quantise_columns(
                        sums, i << _FIVE, block, p << _FIVE, steps, out, tiles, flags, start + i,
                        num_tokens,
                    )  # fmt: skip
            for i in range(num_rows if not fits else _ZERO):
                token = start + i
                if flags[b * num_tokens + token]:
                    continue
                at = plane * between + token * width + channel
                _grid_row(words, at, between, parts, per_part, scale, first, row)
                for c in range(n):
                    row[c] -= mean[first + c]
                _dense_sums(row, _ZERO, n, forward, first * n, n, dense)
                for column in range(_ZERO, n, _LANES):
                    _quantise_columns(
                        dense, column, block, column, steps, out, tiles, flags, token, num_tokens
                    )
            _clear_rows(block, start, num_rows, out, tiles, flags, num_tokens)


@jit(forceinline=True)
def _recon(q: Any, d: Any) -> Any:
    return np.int32(8 * q - (d if q > 0 else (-d if q < 0 else 0)))


@jit(forceinline=True)
def _recon_rows(
    tiles: Any,
    at: Any,
    num_rows: Any,
    shift: Any,
    lane: Any,
    left: Any,
    to: Any,
    stride: Any,
    largest: Any,
) -> None:
    """`8 q - sign(q) d` of a tile, and its largest magnitudes; what does not fit is cut off."""
    use_wide_vectors()
    for i in range(num_rows):
        for c in range(_LANES):
            q = np.int32(tiles[at + i * _LANES + c])
            left[to + i * stride + c] = np.int16(_recon(q, np.int32(shift[lane + c])))
            largest[to + c] = max(largest[to + c], np.int32(8 * abs(q)))


@jit(forceinline=True)
def _value_row(
    sums: Any, at: Any, num: Any, mean: Any, scale: Any, column: Any, words: Any, to: Any
) -> None:
    """Some values of a row from their integer sums."""
    use_wide_vectors()
    for c in range(num):
        z = np.float32(sums[at + c])
        words[to + c] = encode(mean[column + c] + z * scale[column + c], words[to + c])


@jit(forceinline=True)
def _value_rows(
    sums: Any,
    num_rows: Any,
    column: Any,
    num: Any,
    places: Any,
    units: Any,
    words: Any,
) -> None:
    """Values of rows from their sums `[rows, 32]`, columns of a block from `column` on.

    A panel meets two planes or more where a plane is no multiple of 32 channels.
    """
    origin, width, between, per_part = places
    first, mean, scale = units
    part, inside, done = column // per_part, column % per_part, _ZERO
    while done < num:
        here = min(num - done, per_part - inside)
        to = origin + part * between + inside
        for i in range(num_rows):
            at, unit = (i << _FIVE) + done, first + column + done
            _value_row(sums, at, here, mean, scale, unit, words, to + i * width)
        done += here
        part += _ONE
        inside = _ZERO


@jit()
def dequantise(
    tiles: Any,
    geometry: Any,
    shift: Any,
    inverse: Any,
    panels: Any,
    norms: Any,
    mean: Any,
    scale: Any,
    starts: Any,
    words: Any,
) -> None:
    """Write planes from coefficients; all arrays flat.

    Args:
        tiles: i16 `[N, T, 32]`.
        geometry: uint64 T, C, n, B, sinks.
        shift: u8 `[N, 32]`, the recon shift of each position.
        inverse: i32 `[B, n, n]`.
        panels: the same, packed.
        norms: f64 `[B]`, of the packed matrix.
        mean: f32 `[B, n]`.
        scale: f32 `[B, n]`.
        starts: uint64 `[B + 1]`, positions of blocks.
        words: `[S, T, C]`, written.
    """
    use_wide_vectors()
    num_tokens, width, n, num_blocks = geometry[0], geometry[1], geometry[2], geometry[3]
    per_part, between = min(n, width), num_tokens * width
    num_panels, num_pairs = (n + _MASK) >> _FIVE, (n + _ONE) >> _ONE
    stride = (num_panels + _TWO) << _FIVE
    left, largest = np.zeros(_TOKENS * stride, np.int16), np.empty(stride, np.int32)
    sums, dense = np.empty(_TOKENS * _LANES, np.int32), np.empty(n, np.float64)
    row = np.empty(n, np.int32)
    for b in range(num_blocks):
        plane, channel, first, position = b * n // width, b * n % width, b * n, starts[b]
        live = starts[b + _ONE] - position
        tile, lane = position >> _FIVE, position & _MASK
        units = (first, mean, scale)
        for start in range(_ZERO, num_tokens, _TOKENS):
            num_rows = min(_TOKENS, num_tokens - start)
            origin = plane * between + start * width + channel
            largest[:] = 0
            for k in range((lane + live + _MASK) >> _FIVE):
                at = ((tile + k) * num_tokens + start) << _FIVE
                lanes = (tile + k) << _FIVE
                _recon_rows(tiles, at, num_rows, shift, lanes, left, k << _FIVE, stride, largest)
            # What follows the last coefficient is the next block's, but its pair is used.
            for i in range(num_rows):
                left[i * stride + lane + live] = 0
            fits = _fits(largest, lane, live, norms[b])
            for p in range(num_panels if fits else _ZERO):
                panel, pairs = ((b * num_panels + p) * num_pairs) << _SIX, (live + _ONE) >> _ONE
                for i in range(_ZERO, num_rows, _ROWS):
                    at = i * stride + lane
                    dot_rows(left, at, stride, panels, panel, pairs, sums, i << _FIVE)
                column = p << _FIVE
                num, places = min(_LANES, n - column), (origin, width, between, per_part)
                _value_rows(sums, num_rows, column, num, places, units, words)
            for i in range(num_rows if not fits else _ZERO):
                for j in range(live):
                    p = position + j
                    at = ((p >> _FIVE) * num_tokens + start + i) * _LANES + (p & _MASK)
                    row[j] = _recon(np.int32(tiles[at]), np.int32(shift[p]))
                _dense_sums(row, _ZERO, live, inverse, first * n, n, dense)
                for part in range(_ZERO, n, per_part):
                    to = origin + i * width + part // per_part * between
                    _value_row(dense, part, per_part, mean, scale, first + part, words, to)
