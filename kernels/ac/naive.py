"""Plain Python, to be read: the reference that the numba engine has to equal byte for byte.

The textbook's form (Witten, Neal and Cleary, 1987): bits that low and high agree on are written,
and a straddle of the middle is counted until the next bit decides it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = 32
_HALF, _QUARTER = 1 << (_BITS - 1), 1 << (_BITS - 2)


class _Interval:
    """[low, high] and its renormalisation, which is the same on both sides."""

    def __init__(self) -> None:
        self.low, self.high = 0, (1 << _BITS) - 1

    def narrow(self, start: int, stop: int) -> None:
        span = self.high - self.low + 1
        self.high = self.low + (span * stop >> 16) - 1
        self.low = self.low + (span * start >> 16)

    def offset(self) -> int | None:
        """What the next doubling takes away, or None when the interval is wide enough."""
        if self.high < _HALF:
            return 0
        if self.low >= _HALF:
            return _HALF
        if self.low >= _QUARTER and self.high < 3 * _QUARTER:
            return _QUARTER
        return None

    def double(self, offset: int) -> None:
        self.low = (self.low - offset) * 2
        self.high = (self.high - offset) * 2 + 1


def _encode(symbols: list[int], rows: list[list[int]]) -> bytes | None:
    interval, bits, pending = _Interval(), [], 0
    for symbol, row in zip(symbols, rows, strict=True):
        if symbol + 1 >= len(row) or row[symbol] == row[symbol + 1]:
            return None
        interval.narrow(row[symbol], row[symbol + 1])
        while (offset := interval.offset()) is not None:
            if offset == _QUARTER:
                pending += 1
            else:
                bit = offset // _HALF
                bits += [bit] + [1 - bit] * pending
                pending = 0
            interval.double(offset)
    bit = int(interval.low >= _QUARTER)
    bits += [bit] + [1 - bit] * (pending + 1)
    return np.packbits(np.array(bits, np.uint8)).tobytes()


def encode_streams(
    symbols: NDArray[Any],
    cdfs: NDArray[Any],
    tables: NDArray[Any],
    rules: NDArray[Any],
    out: NDArray[Any],
    lengths: NDArray[Any],
) -> bool:
    """As `cpu.encode_streams`."""
    for n, row in enumerate(symbols.tolist()):
        stream = _encode(row, [cdfs[tables[n, rule]].tolist() for rule in rules])
        if stream is None:
            return False
        out[n, : len(stream)] = np.frombuffer(stream, np.uint8)
        lengths[n] = len(stream)
    return True


def _decode(data: bytes, rows: list[list[int]]) -> list[int] | None:
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).tolist()
    next_bit = iter([*bits, *([0] * (40 * len(rows) + _BITS))])
    value, num_shifts = 0, 0
    for _ in range(_BITS):
        value = value * 2 + next(next_bit)
    interval, symbols = _Interval(), []
    for row in rows:
        span = interval.high - interval.low + 1
        count = ((value - interval.low + 1) * 65536 - 1) // span
        symbol = max(s for s in range(len(row) - 1) if row[s] <= count)
        symbols.append(symbol)
        interval.narrow(row[symbol], row[symbol + 1])
        while (offset := interval.offset()) is not None:
            interval.double(offset)
            value = (value - offset) * 2 + next(next_bit)
            num_shifts += 1
    return symbols if len(data) == (num_shifts + 2 + 7) // 8 else None


def decode_streams(
    data: NDArray[Any],
    starts: NDArray[Any],
    ends: NDArray[Any],
    cdfs: NDArray[Any],
    tables: NDArray[Any],
    rules: NDArray[Any],
    out: NDArray[Any],
) -> bool:
    """As `cpu.decode_streams`."""
    for n in range(out.shape[0]):
        stream = data[starts[n] : ends[n]].tobytes()
        symbols = _decode(stream, [cdfs[tables[n, rule]].tolist() for rule in rules])
        if symbols is None:
            return False
        out[n] = symbols
    return True
