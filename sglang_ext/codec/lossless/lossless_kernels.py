"""The lossless codec's passes over values, in numba; the format is told in `lossless`.

All arithmetic is int64 and uint64, without a float in decoding. Indices that come from a stream
are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from sglang_ext.codec.lossless.tables import (
    ESCAPE,
    FIRST_TABLE,
    MAX_RATE,
    MIN_RATE,
    NUM_RATES,
    RAW_TABLE,
    ZERO,
)
from sglang_ext.compiling import jit

_F = TypeVar("_F", bound=Callable[..., Any])
# Part of the format.
RATE_BIAS = 16  # a scale's code is twice the log2 of a standard deviation, plus this
MAX_SCALE = 1000
RAW_SCALE = 1023  # in place of a scale: the channel's values are stored as they are
MODE_BASE, MODE_COPY, MODE_REFERENCE = 0, 1, 2  # MODE_REFERENCE + h: scale narrower by h codes
MAX_NARROWER = 24
MAX_HOPS = 15
_UNARY = 8  # zeros at most in front of an exponent
_NARROWEST = 16  # a cell is at most 2^16 times finer than its value's last place
_FAR = 1 << 50  # the cell of a value that is coarser than that; only escapes reach it


def _jit(function: _F) -> _F:
    return jit(nogil=True, error_model="numpy")(function)


def _inline(function: _F) -> _F:
    return cast("_F", numba.njit(nogil=True, inline="always", error_model="numpy")(function))


@_inline
def _bit_length(x: Any) -> Any:
    """Bits of a non-negative int64."""
    n = 0
    for step in (32, 16, 8, 4, 2, 1):
        if x >> step:
            x >>= step
            n += step
    return n + (1 if x else 0)


@_inline
def _cell(bits: Any, k: Any, mantissa_bits: Any, magnitude_mask: Any) -> Any:
    """Number of the cell of 2^k smallest units that a value lies in; -1 - n for negative ones.

    Without branches, so that loops over a row become vector instructions.
    """
    magnitude = bits & magnitude_mask
    field = magnitude >> mantissa_bits
    exponent = max(field, 1) - 1
    significand = magnitude - (exponent << mantissa_bits)
    shift = k - exponent
    right = min(max(shift, 0), 63)
    left = min(max(-shift, 0), _NARROWEST)
    cell = (significand >> right) << left
    cell = cell if shift >= -_NARROWEST else _FAR
    return cell if magnitude == bits else -1 - cell


@_inline
def _cell_exponent(scale: Any, floor: Any) -> Any:
    """Exponent k of a row's cells: a quarter to an eighth of its scale, or the floor."""
    k = ((scale - RATE_BIAS) >> 1) - 2
    return max(k, floor)


@_inline
def _floor_exponent(scale: Any, mean: Any, mantissa_bits: Any) -> Any:
    """Exponent of the last place of a channel's typical value; cells are not made finer."""
    k = max(((scale - RATE_BIAS) >> 1) - 2, 0)
    size = mean if mean >= 0 else -1 - mean
    return max(max(_bit_length(size) - 1, 2) + k - mantissa_bits, 0)


@_jit
def _find_floors(scales: Any, means: Any, mantissa_bits: Any, floors: Any) -> None:
    """Floors of the exponents of a plane's cells, by channel."""
    for c in range(len(floors)):
        floors[c] = _floor_exponent(numba.int64(scales[c]), numba.int64(means[c]), mantissa_bits)


@_inline
def _table(scale: Any, family: Any, k: Any) -> Any:
    rate = scale - RATE_BIAS - 2 * k
    rate = min(max(rate, MIN_RATE), MAX_RATE)
    return FIRST_TABLE + family * NUM_RATES + rate - MIN_RATE


@_jit
def fill_tables(
    modes: Any, scales: Any, families: Any, means: Any, mantissa_bits: Any, out: Any
) -> Any:
    """Tables u8 of all coded values, plane by plane, row by row; returns how many there are.

    `out` must have room for all values of the chunk, or for as many as are coded.
    """
    num_planes, num_tokens = modes.shape
    num_channels = scales.shape[1]
    floors = np.empty(num_channels, np.int64)
    rows = np.zeros((MODE_REFERENCE + MAX_NARROWER + 1, num_channels), np.uint8)
    known = np.zeros(MODE_REFERENCE + MAX_NARROWER + 1, np.bool_)
    at = 0
    for s in range(num_planes):
        _find_floors(scales[s], means[s], mantissa_bits, floors)
        known[:] = False
        for t in range(num_tokens):
            mode = numba.int64(modes[s, t])
            if mode == MODE_COPY:
                continue
            if not known[mode]:
                known[mode] = True
                narrower = max(mode - MODE_REFERENCE, 0)
                for c in range(num_channels):
                    scale = numba.int64(scales[s, c])
                    if scale == RAW_SCALE:
                        rows[mode, c] = RAW_TABLE
                        continue
                    scale = max(scale - narrower, 0)
                    family = numba.int64(families[s, c]) if mode == MODE_BASE else 1
                    rows[mode, c] = _table(scale, family, _cell_exponent(scale, floors[c]))
            out[at : at + num_channels] = rows[mode]
            at += num_channels
    return at


@_jit
def code_values(
    planes: Any,
    modes: Any,
    references: Any,
    scales: Any,
    means: Any,
    tables: Any,
    coded: Any,
    mantissa_bits: Any,
    exponent_bits: Any,
    symbols: Any,
    low: Any,
    rare: Any,
) -> Any:
    """Symbols u8 of all coded values, and their other bits into zeroed u64 words.

    `coded` [num tables, 256] says which symbols a table has. `low` gets the bits that a cell leaves
    open, `rare` those of cells next to zero and of escapes. Returns the numbers of bits of both.
    """
    num_planes, num_tokens, num_channels = planes.shape
    magnitude_bits = mantissa_bits + exponent_bits
    magnitude_mask = (1 << magnitude_bits) - 1
    floors = np.empty(num_channels, np.int64)
    exponents = np.empty(num_channels, np.int64)
    expectations = np.empty(num_channels, np.int64)
    cells = np.empty(num_channels, np.int64)
    at = low_at = rare_at = 0
    for s in range(num_planes):
        _find_floors(scales[s], means[s], mantissa_bits, floors)
        for t in range(num_tokens):
            mode = numba.int64(modes[s, t])
            if mode == MODE_COPY:
                continue
            _expect_row(
                planes[s, references[s, t]], mode, scales[s], means[s], floors, mantissa_bits,
                magnitude_mask, exponents, expectations,
            )  # fmt: skip
            for c in range(num_channels):
                cells[c] = _cell(
                    numba.int64(planes[s, t, c]), exponents[c], mantissa_bits, magnitude_mask
                )
            for c in range(num_channels):
                bits = numba.int64(planes[s, t, c])
                magnitude = bits & magnitude_mask
                k, cell = exponents[c], cells[c]
                size = cell if cell >= 0 else -1 - cell
                distance = cell - expectations[c]
                symbol = ESCAPE
                if size != _FAR and -ZERO <= distance <= ZERO:
                    symbol = distance + ZERO
                if not coded[tables[at], symbol]:
                    symbol = ESCAPE
                symbols[at] = symbol
                at += 1
                if symbol != ESCAPE and size > 0:
                    exponent = max(magnitude >> mantissa_bits, 1) - 1
                    count = max(k - exponent, 0)
                    value = magnitude & ((1 << count) - 1)
                    low_at = _put(low, low_at, value, count)
                    continue
                if symbol == ESCAPE:
                    value, count = bits, magnitude_bits + 1
                else:
                    value, count = _near_zero(magnitude, k, mantissa_bits, magnitude_bits)
                rare_at = _put(rare, rare_at, value, count)
    return low_at, rare_at


@_inline
def _near_zero(magnitude: Any, k: Any, mantissa_bits: Any, magnitude_bits: Any) -> Any:
    """Bits of a value in a cell of 2^k next to zero, and how many; `_restore_rare` reads them."""
    depth = min(_UNARY, max(k - mantissa_bits, 0))
    exponent = max(magnitude >> mantissa_bits, 1) - 1
    zeros = k - mantissa_bits - 1 - exponent
    if zeros < depth and magnitude >> mantissa_bits:
        fraction = magnitude & ((1 << mantissa_bits) - 1)
        value = (1 | fraction << 1) << zeros
        count = zeros + 1 + mantissa_bits
    else:
        value = magnitude << depth
        wide = magnitude_bits if k - mantissa_bits > _UNARY else mantissa_bits
        count = depth + min(wide, k)
    return value, count


@_inline
def _put(words: Any, position: Any, value: Any, count: Any) -> Any:
    """ORs `count` bits, at most 63, into the words at a bit position; returns the next one."""
    index, within = position >> 6, np.uint64(position & 63)
    words[index] |= np.uint64(value) << within
    words[index + 1] |= (np.uint64(value) >> np.uint64(1)) >> (np.uint64(63) - within)
    return position + count


@_inline
def _window(words: Any, position: Any) -> Any:
    """The 64 bits from a bit position on."""
    index, within = np.uint64(position) >> np.uint64(6), np.uint64(position) & np.uint64(63)
    high = (words[index + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - within)
    return words[index] >> within | high


@_jit
def _expect_row(
    reference: Any,
    mode: Any,
    scales: Any,
    means: Any,
    floors: Any,
    mantissa_bits: Any,
    magnitude_mask: Any,
    exponents: Any,
    expectations: Any,
) -> None:
    """Of one row's values: exponents of their cells, and numbers of the expected cells."""
    narrower = max(mode - MODE_REFERENCE, 0)
    num_channels = len(scales)
    for c in range(num_channels):
        scale = max(numba.int64(scales[c]) - narrower, 0)
        exponents[c] = _cell_exponent(scale, floors[c])
    if mode == MODE_BASE:
        for c in range(num_channels):
            first = _cell_exponent(numba.int64(scales[c]), 0)
            expectations[c] = numba.int64(means[c]) >> (exponents[c] - first)
    else:
        for c in range(num_channels):
            expectations[c] = _cell(
                numba.int64(reference[c]), exponents[c], mantissa_bits, magnitude_mask
            )


@_jit
def restore_values(
    out: Any,
    modes: Any,
    references: Any,
    scales: Any,
    means: Any,
    symbols: Any,
    low: Any,
    num_low: Any,
    rare: Any,
    num_rare: Any,
    mantissa_bits: Any,
    exponent_bits: Any,
) -> Any:
    """Fills `out` [S, T, C]; the inverse of `code_values`.

    `low` and `rare` have two words more than `num_low` and `num_rare` bits fill. Returns the
    numbers of bits used, -1 for both if the streams do not fit the symbols.
    """
    num_planes, num_tokens, num_channels = out.shape
    magnitude_mask = (1 << (mantissa_bits + exponent_bits)) - 1
    floors = np.empty(num_channels, np.int64)
    exponents = np.empty(num_channels, np.int64)
    expectations = np.empty(num_channels, np.int64)
    sizes = np.empty(num_channels, np.float64)
    shifts = np.empty(num_channels, np.int64)
    positions = np.empty(num_channels, np.int64)
    windows = np.empty(num_channels, np.uint64)
    rare_at_channel = np.empty(num_channels, np.int64)
    at = low_at = rare_at = 0
    for s in range(num_planes):
        _find_floors(scales[s], means[s], mantissa_bits, floors)
        for t in range(num_tokens):
            mode = numba.int64(modes[s, t])
            reference = out[s, references[s, t]]
            row = out[s, t]
            if mode == MODE_COPY:
                row[:] = reference
                continue
            _expect_row(
                reference, mode, scales[s], means[s], floors, mantissa_bits, magnitude_mask,
                exponents, expectations,
            )  # fmt: skip
            part = symbols[at : at + num_channels]
            at += num_channels
            low_at = _locate_row(
                part, exponents, expectations, mantissa_bits, sizes, shifts, positions, low_at
            )
            if low_at > num_low:
                return -1, -1
            _read_windows(low, positions, windows)
            if _restore_row(
                row, expectations, exponents, shifts, windows, mantissa_bits, magnitude_mask
            ):
                return -1, -1
            num = _find_rare(part, expectations, rare_at_channel)
            rare_at = _restore_rare(
                row, part, expectations, exponents, rare_at_channel[:num], rare, rare_at, num_rare,
                mantissa_bits, exponent_bits,
            )  # fmt: skip
            if rare_at < 0:
                return -1, -1
    return low_at, rare_at


@_jit
def _locate_row(
    symbols: Any,
    exponents: Any,
    cells: Any,
    mantissa_bits: Any,
    sizes: Any,
    shifts: Any,
    positions: Any,
    low_at: Any,
) -> Any:
    """Turns expected cells into a row's cells, and finds its low bits; returns where they end.

    `shifts` becomes how many bits of each value its cell leaves open, negative where the cell is
    finer than the value's last place.
    """
    num_channels = len(symbols)
    for c in range(num_channels):
        cell = cells[c] + numba.int64(symbols[c]) - ZERO
        cells[c] = cell
        sizes[c] = max(cell, -1 - cell)
    # Sizes are below 2^51 or so, hence exact as float64, whose exponent field is their length.
    fields = sizes.view(np.int64)
    for c in range(num_channels):
        length = (fields[c] >> 52) - 1022
        shift = min(mantissa_bits + 1 - length, exponents[c])
        shift = shift if symbols[c] != ESCAPE and fields[c] != 0 else 0
        shifts[c] = shift
    for c in range(num_channels):
        positions[c] = low_at
        low_at += max(shifts[c], 0)
    return low_at


# Passes of few arrays each: with more, LLVM gives up on telling them apart, and on vectors.
@_jit
def _read_windows(low: Any, positions: Any, windows: Any) -> None:
    """The 64 bits from each position on."""
    for c in range(len(positions)):
        windows[c] = _window(low, positions[c])


@_jit
def _find_rare(symbols: Any, cells: Any, found: Any) -> Any:
    """Channels of values next to zero, and of escapes; returns how many there are."""
    num = 0
    for c in range(len(symbols)):
        found[num] = c
        num += (symbols[c] == ESCAPE) | (cells[c] == 0) | (cells[c] == -1)
    return num


@_jit
def _restore_row(
    row: Any,
    cells: Any,
    exponents: Any,
    shifts: Any,
    windows: Any,
    mantissa_bits: Any,
    magnitude_mask: Any,
) -> Any:
    """The values of a row whose cells are not next to zero; whether one is out of range."""
    over = 0
    for c in range(len(row)):
        cell, shift = cells[c], shifts[c]
        size = max(cell, -1 - cell)
        left, right = np.uint64(max(shift, 0)), np.uint64(min(max(-shift, 0), 63))
        fraction = windows[c] & ((np.uint64(1) << left) - np.uint64(1))
        significand = ((np.uint64(size) << left) | fraction) >> right
        magnitude = numba.int64(significand) + ((exponents[c] - shift) << mantissa_bits)
        # Zero shifts are those of rare values too, which are not restored here.
        over |= magnitude if shift else 0
        row[c] = (magnitude & magnitude_mask) | (magnitude_mask + 1 if cell < 0 else 0)
    return over > magnitude_mask or over < 0


@_jit
def _restore_rare(
    row: Any,
    symbols: Any,
    cells: Any,
    exponents: Any,
    channels: Any,
    rare: Any,
    at: Any,
    num_rare: Any,
    mantissa_bits: Any,
    exponent_bits: Any,
) -> Any:
    """The row's values in `channels`; returns where their bits end, -1 if past the stream's."""
    magnitude_bits = mantissa_bits + exponent_bits
    sign = np.uint64(1) << np.uint64(magnitude_bits)
    for c in channels:
        cell = cells[c]
        if at > num_rare:
            return -1
        window = _window(rare, at)
        if symbols[c] == ESCAPE:
            row[c] = window & (sign | (sign - np.uint64(1)))
            at += magnitude_bits + 1
            continue
        k = exponents[c]
        depth = min(_UNARY, max(k - mantissa_bits, 0))
        zeros = 0
        while zeros < depth and not (window >> np.uint64(zeros)) & np.uint64(1):
            zeros += 1
        if zeros < depth:
            fraction = numba.int64(window >> np.uint64(zeros + 1)) & ((1 << mantissa_bits) - 1)
            magnitude = fraction | (k - mantissa_bits - zeros) << mantissa_bits
            count = zeros + 1 + mantissa_bits
        else:
            wide = magnitude_bits if k - mantissa_bits > _UNARY else mantissa_bits
            wide = min(wide, k)
            magnitude = numba.int64(window >> np.uint64(depth)) & ((1 << wide) - 1)
            count = depth + wide
        at += count
        # Against k of a damaged stream; a right one stays within the magnitude's bits.
        row[c] = (np.uint64(magnitude) & (sign - np.uint64(1))) | (sign if cell else np.uint64(0))
    return at if at <= num_rare else -1
