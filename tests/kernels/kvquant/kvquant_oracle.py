"""kvquant in Python integers and fractions: slow, and sharing no code with what it checks."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from sglang_ext.kernels.kvquant import TransformArrays, Words

# dtype: exponent bits, mantissa bits, bias, the largest finite value
FORMATS = {
    "bf16": (8, 7, 127, Fraction((2**8 - 1) * 2 ** (127 - 7))),
    "fp16": (5, 10, 15, Fraction(65504)),
    "fp32": (8, 23, 127, Fraction((2**24 - 1) * 2 ** (127 - 23))),
    "fp8_e4m3": (4, 3, 7, Fraction(448)),
    "fp8_e5m2": (5, 2, 15, Fraction(57344)),
}


def word_value(word: int, dtype: str) -> Fraction | None:
    """The value of a word; None if it is not finite."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[dtype]
    sign = -1 if word >> (exponent_bits + mantissa_bits) else 1
    exponent = (word >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = word & (2**mantissa_bits - 1)
    if exponent:
        mantissa += 2**mantissa_bits
    power = max(exponent, 1) - bias - mantissa_bits
    value = mantissa * Fraction(2) ** power
    return sign * value if value <= largest else None


def nearest_word(value: Fraction, dtype: str) -> int:
    """The word nearest to a value, ties to even, saturating; that of 0 is positive."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[dtype]
    size = min(abs(value), largest)
    sign = int(value < 0) << (exponent_bits + mantissa_bits)
    if size == 0:
        return 0
    power = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    while Fraction(2) ** power > size:
        power -= 1
    while Fraction(2) ** (power + 1) <= size:
        power += 1
    power = max(power, 1 - bias)
    units = round(size / Fraction(2) ** (power - mantissa_bits))  # ties to even
    # A carry into the next binade adds to the exponent by itself.
    return sign | (((power + bias - 1) << mantissa_bits) + units)


def to_fp32(value: Fraction) -> Fraction:
    """A value rounded to fp32, which must hold it."""
    assert abs(value) <= FORMATS["fp32"][3]
    rounded = word_value(nearest_word(value, "fp32"), "fp32")
    assert rounded is not None
    return rounded


def quantise(
    planes: Words,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    first_level: int,
    raw_tokens: int,
    rounding: float,
) -> tuple[list[list[list[int]]], list[int]]:
    """Coefficients `[T][B][live]`, and the raw rows, sinks not among them."""
    n, num_tokens = arrays.block_channels, planes.shape[1]
    rows: list[list[list[int]]] = []
    raw_rows = []
    for t in range(num_tokens):
        rows.append([])
        for b in range(arrays.num_blocks):
            live = int(arrays.num_live[level, b])
            q = quantise_row(planes, dtype, arrays, b, t, level, first_level, rounding)
            if q is None and t >= raw_tokens:
                raw_rows.append(b * num_tokens + t)
            rows[-1].append([0] * live if q is None or t < raw_tokens else q[:live])
            assert q is None or len(q) == n
    return rows, sorted(raw_rows)


def quantise_row(
    planes: Words,
    dtype: str,
    arrays: TransformArrays,
    b: int,
    t: int,
    level: int,
    first_level: int,
    rounding: float,
) -> list[int] | None:
    """All coefficients of a row; None if it is raw."""
    n = arrays.block_channels
    difference = []
    for c in range(n):
        plane, channel = divmod(b * n + c, arrays.num_channels)
        x = word_value(int(planes[plane, t, channel]), dtype)
        if x is None:
            return None
        xi = round(x * Fraction(2) ** -int(arrays.grid_exp[b, c]))
        if abs(xi) > 32767:
            return None
        difference.append(xi - int(arrays.mean[b, c]))
    coefficients = []
    for j in range(n):
        y = sum(d * int(arrays.forward[b, c, j]) for c, d in enumerate(difference))
        size = math.floor(abs(float(y)) * float(arrays.inv_step[level, b, j]) + rounding)
        if size > 32767:
            return None
        q = size if y >= 0 else -size
        # The coarser values, down to the one before the coefficient's first level.
        for coarser in range(level, first_level - 1, -1):
            if j < arrays.num_live[first_level, b]:
                break
            if j >= arrays.num_live[coarser, b] or coarser == first_level:
                break
            if coarser == first_level + 1 or j >= arrays.num_live[coarser - 1, b]:
                # Live from here on: its value here must have been -1, 0 or 1.
                here = third_of(q, level - coarser)
                if abs(here) >= 3:
                    return None
                while abs(third_of(q, level - coarser)) > 1:
                    q -= 1 if q > 0 else -1
                break
        if j >= arrays.num_live[level, b]:
            if size >= 3:
                return None
            q = 0
        coefficients.append(q)
    return coefficients


def third_of(q: int, times: int) -> int:
    """`q / 3`, rounded, so many times."""
    for _ in range(times):
        q = round(Fraction(q, 3))
    return q


def value_words(
    q: list[int], dtype: str, arrays: TransformArrays, b: int, level: int
) -> list[int | None]:
    """The words of a row from its live coefficients; None for a zero, which may have a sign."""
    words: list[int | None] = []
    recon = []
    for j, value in enumerate(q):
        d = int(arrays.recon_shift[level, b, j])
        recon.append(8 * value - ((value > 0) - (value < 0)) * d)
    for c in range(arrays.block_channels):
        z = sum(r * int(arrays.inverse[b, j, c]) for j, r in enumerate(recon))
        unit = Fraction(float(arrays.out_scale[level, b, c]))
        product = to_fp32(to_fp32(Fraction(z)) * unit)
        total = to_fp32(Fraction(float(arrays.mean_f32[b, c])) + product)
        word = nearest_word(total, dtype)
        words.append(word if word_value(word, dtype) != 0 else None)
    return words


def token_rows(tiles: np.ndarray, arrays: TransformArrays, level: int) -> list[list[list[int]]]:
    """Coefficients `[T][B][live]` of tiles."""
    starts = arrays.layout(level).starts.tolist()
    flat = tiles.transpose(1, 0, 2).reshape(tiles.shape[1], -1).tolist()
    return [[row[starts[b] : starts[b + 1]] for b in range(arrays.num_blocks)] for row in flat]
