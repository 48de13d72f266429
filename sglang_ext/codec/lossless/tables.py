"""Probability tables of the lossless codec, from integer arithmetic only.

A symbol is the distance, in cells, of a value from what was expected. Distances are taken as
Gaussian or Laplacian with a standard deviation of 2^(r/2) cells; r and the family name the table.
What was expected lies somewhere within its cell, any place alike, so the densities are smoothed
with a triangle two cells wide. Python integers throughout: tables are the same on every machine,
without being sent.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

# All of these are part of the format; a change needs a new section kind.
SCALE_BITS = 12
ZERO = 127  # the symbol of distance 0
ESCAPE = 255
MIN_RATE, MAX_RATE = -16, 5  # r of the narrowest and of the widest table
NUM_RATES = MAX_RATE - MIN_RATE + 1
NUM_FAMILIES = 2  # 0 Gaussian, 1 Laplacian
PADDING_TABLE = 0  # symbol 0 only: costs nothing
RAW_TABLE = 1  # ESCAPE only: costs nothing
FIRST_TABLE = 2  # then family * NUM_RATES + r - MIN_RATE
NUM_TABLES = FIRST_TABLE + NUM_FAMILIES * NUM_RATES

_ONE = 1 << 48
_SQRT2 = 398065729532861  # floor(2^48 * sqrt(2))
_POINTS = 16  # of the density, to a standard deviation
_REACH = (8, 16)  # standard deviations that a family's density is followed to
# Shares of every table that go to a Laplacian several times as wide, for values of another kind.
_TAIL_SHIFT = 6
_TAIL_RATE = 5


@cache
def table_freqs() -> npt.NDArray[np.uint16]:
    """Frequencies u16 [NUM_TABLES, 256], each row summing to 4096; 0: coded as an escape."""
    rows = np.zeros((NUM_TABLES, 256), np.uint16)
    rows[PADDING_TABLE, 0] = rows[RAW_TABLE, ESCAPE] = 1 << SCALE_BITS
    for family in range(NUM_FAMILIES):
        for rate in range(MIN_RATE, MAX_RATE + 1):
            row = FIRST_TABLE + family * NUM_RATES + rate - MIN_RATE
            rows[row] = _frequencies(family, rate)
    rows.setflags(write=False)
    return rows


def _frequencies(family: int, rate: int) -> npt.NDArray[np.uint16]:
    weights = _cells(family, rate)
    tail = _cells(1, min(rate + _TAIL_RATE, MAX_RATE + 2))
    mixed = [
        ((w << _TAIL_SHIFT) - w + t) >> _TAIL_SHIFT for w, t in zip(weights, tail, strict=True)
    ]
    total = sum(mixed)
    share = (1 << SCALE_BITS) - 1  # one for ESCAPE
    freqs = [(2 * weight * share + total) // (2 * total) for weight in mixed]
    freqs[ZERO] += share - sum(freqs)
    return np.array([*freqs, 1], np.uint16)


def _cells(family: int, rate: int) -> list[int]:
    """Weights of the distances -127 to 127."""
    half = rate >> 1
    sigma = _SQRT2 if rate & 1 else _ONE
    sigma = sigma << half if half >= 0 else sigma >> -half
    weights = [0] * 255
    for i in range(_POINTS * _REACH[family] + 1):
        density = _density(family, i)
        at = sigma * i // _POINTS
        cell, within = at >> 48, (at & (_ONE - 1)) >> 24
        for distance, part in ((cell, (1 << 24) - within), (cell + 1, within)):
            if distance <= ZERO:
                weights[ZERO + distance] += density * part
                if i:
                    weights[ZERO - distance] += density * part
    return weights


def _density(family: int, point: int) -> int:
    """exp(-u^2 / 2) or exp(-sqrt(2) u) at u = point / 16, times 2^48."""
    exponent = (point * point * _ONE) >> 9 if family == 0 else (point * _SQRT2) >> 4
    return _exp_negative(exponent)


def _exp_negative(x: int) -> int:
    """exp(-x / 2^48) times 2^48, floored."""
    term = total = 1 << 64
    part = x >> 6 if x < 1 << 54 else x >> 12
    rounds = 6 if x < 1 << 54 else 12
    for n in range(1, 40):
        term = -term * part // (n << 48)
        total += term
    for _ in range(rounds):
        total = (total * total) >> 64
    return total >> 16
