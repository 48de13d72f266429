"""Frequency tables, and what the coders look up in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

PROB_BITS = 12
PROB_SUM = 1 << PROB_BITS  # every table's frequencies add up to this
LANES = 32
STATE_LOW = 1 << 16  # states lie in [STATE_LOW, 2^32); encoding starts, and decoding ends, here
ALPHABET = 256  # columns of `freqs`; a table uses as many of the first ones as it likes
MAX_TABLES = 1 << 16


class RansError(ValueError):
    """Coded data is not what `encode` makes: cut short, too long, or changed."""


@dataclass(frozen=True, eq=False)
class Tables:
    """K frequency tables, prepared once for any number of calls from any thread.

    Attributes:
        freqs: uint16 `[K, 256]`; every row adds up to 4096. A symbol of frequency 0 cannot be
            coded, one of 4096 costs nothing.
        decode_lut: uint32 `[K * 4096]`; entry `k << 12 | slot` is `freq - 1 << 20 | bias << 8 |
            symbol`, where bias is the slot less the frequencies of the symbols before.
        encode_lut: uint64 `[K * 256]`; entry `k << 8 | symbol` is, from bit 0, the frequency (13
            bits), the sum of those before (12), a shift (5), an increment (1), and from bit 32 a
            multiplier: `((x + increment) * multiplier >> 32) >> shift` is `x // freq` for every
            state below `freq << 20`. A symbol of frequency 0 has entry 0.

    Raises:
        ValueError: `freqs` is not of that shape and type, or a row adds up to something else.
    """

    freqs: U16
    decode_lut: U32 = field(init=False, repr=False)
    encode_lut: U64 = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the frequencies and makes the lookup tables."""
        freqs = self.freqs
        if freqs.dtype != np.uint16 or freqs.ndim != 2 or freqs.shape[1] != ALPHABET:
            raise ValueError(
                f"freqs must be uint16 [K, {ALPHABET}], got {freqs.dtype} {freqs.shape}"
            )
        if not 1 <= freqs.shape[0] <= MAX_TABLES:
            raise ValueError(f"1 to {MAX_TABLES} tables, got {freqs.shape[0]}")
        sums = freqs.sum(1, dtype=np.int64)
        if (sums != PROB_SUM).any():
            row = int((sums != PROB_SUM).argmax())
            raise ValueError(f"row {row} of freqs must add up to {PROB_SUM}, got {sums[row]}")
        object.__setattr__(self, "freqs", np.array(freqs, order="C"))
        object.__setattr__(self, "decode_lut", _decode_lut(self.freqs))
        object.__setattr__(self, "encode_lut", _encode_lut(self.freqs))

    @property
    def num_tables(self) -> int:
        """K."""
        return int(self.freqs.shape[0])


def lookup_bytes(num_tables: int) -> int:
    """Bytes of what the coders look up in so many tables, which is much more than these take."""
    return num_tables * (4 * PROB_SUM + 8 * ALPHABET)


def cumulative(freqs: U16) -> U32:
    """Sum of the frequencies before each symbol, uint32 `[K, 256]`."""
    sums = np.cumsum(freqs, 1, dtype=np.uint32) - freqs
    return sums.astype(np.uint32)


def _decode_lut(freqs: U16) -> U32:
    symbols = np.tile(np.arange(ALPHABET, dtype=np.uint32), freqs.shape[0])
    packed = (freqs.astype(np.uint32).reshape(-1) - np.uint32(1)) << np.uint32(20) | symbols
    slots = np.tile(np.arange(PROB_SUM, dtype=np.uint32), freqs.shape[0])
    counts = freqs.reshape(-1)
    bias = slots - np.repeat(cumulative(freqs).reshape(-1), counts)
    lut: U32 = np.repeat(packed, counts) | bias << np.uint32(8)
    return lut


def _encode_lut(freqs: U16) -> U64:
    counts = freqs.astype(np.uint64)
    before = np.where(counts > 0, cumulative(freqs), 0).astype(np.uint64)
    entries: U64 = (_divisors()[freqs] | counts | before << np.uint64(13)).reshape(-1)
    return entries


@lru_cache(maxsize=1)
def _divisors() -> U64:
    """Shift, increment and multiplier (see `Tables.encode_lut`) for each divisor 0..4096."""
    entries = np.zeros(PROB_SUM + 1, np.uint64)
    for divisor in range(1, PROB_SUM + 1):
        shift, increment, multiplier = _divisor(divisor)
        entries[divisor] = multiplier << 32 | increment << 30 | shift << 25
    return entries


def _divisor(divisor: int) -> tuple[int, int, int]:
    # With m = (2^k + e) / d, n * m / 2^k exceeds n / d by n * e / (d * 2^k), which must stay under
    # the 1 / d to the next integer; with e < 0 the same holds from above for n + 1.
    limit = divisor << 20  # states are smaller when they are divided
    for shift in range(PROB_BITS + 1):
        power = 1 << (32 + shift)
        above = -(-power // divisor)
        if above < 1 << 32 and (limit - 1) * (above * divisor - power) < power:
            return shift, 0, above
        below = min(power // divisor, (1 << 32) - 1)
        gap = power - below * divisor
        if gap > 0 and limit * gap <= power:
            return shift, 1, below
    raise AssertionError(f"no multiplier of 32 bits divides by {divisor}")
