"""The numba engine: one pass per stream, on the caller's thread, without the GIL.

All arithmetic is int64 on values below 2^49, so that numba never mixes signed and unsigned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from sglang_ext.compiling import jit

_F = TypeVar("_F", bound=Callable[..., Any])
_TOP, _HALF, _QUARTER = (1 << 32) - 1, 1 << 31, 1 << 30


def _jit(function: _F) -> _F:
    return jit(nogil=True, error_model="numpy")(function)


@_jit
def _int(value: Any) -> Any:
    """`value` as int64."""
    return numba.int64(value)


@_jit
def _put(out: Any, at: Any, bit: Any) -> Any:
    """Sets bit number `at` (from the most significant of byte 0) of a zeroed row."""
    out[at >> 3] |= bit << (7 - (at & 7))
    return at + 1


@_jit
def _put_run(out: Any, at: Any, bit: Any, pending: Any) -> Any:
    at = _put(out, at, bit)
    for _ in range(pending):
        at = _put(out, at, 1 - bit)
    return at


@_jit
def encode_streams(
    symbols: Any, cdfs: Any, tables: Any, rules: Any, out: Any, lengths: Any
) -> bool:
    """Codes u8 [N, T] into zeroed rows of `out`; False where a symbol cannot be coded."""
    num_known = cdfs.shape[1] - 1
    for n in range(symbols.shape[0]):
        row = out[n]
        low, high, pending, at = 0, _TOP, 0, 0
        for t in range(symbols.shape[1]):
            symbol = _int(symbols[n, t])
            if symbol >= num_known:
                return False
            table = tables[n, rules[t]]
            start, stop = _int(cdfs[table, symbol]), _int(cdfs[table, symbol + 1])
            if start == stop:
                return False
            span = high - low + 1
            high = low + ((span * stop) >> 16) - 1
            low = low + ((span * start) >> 16)
            while True:
                if high < _HALF:
                    at = _put_run(row, at, 0, pending)
                    pending = 0
                elif low >= _HALF:
                    at = _put_run(row, at, 1, pending)
                    pending = 0
                    low -= _HALF
                    high -= _HALF
                elif low >= _QUARTER and high < 3 * _QUARTER:
                    pending += 1
                    low -= _QUARTER
                    high -= _QUARTER
                else:
                    break
                low <<= 1
                high = (high << 1) | 1
        at = _put_run(row, at, 1 if low >= _QUARTER else 0, pending + 1)
        lengths[n] = (at + 7) >> 3
    return True


@_jit
def _bit(data: Any, at: Any, end: Any) -> Any:
    """Bit number `at` of the data, or 0 from bit `end` on."""
    if at >= end:
        return 0
    return (_int(data[at >> 3]) >> (7 - (at & 7))) & 1


@_jit
def _find(row: Any, count: Any) -> Any:
    """The symbol whose interval of the table holds `count`."""
    below, above = 0, row.shape[0] - 1
    while above - below > 1:
        middle = (below + above) >> 1
        if _int(row[middle]) <= count:
            below = middle
        else:
            above = middle
    return below


@_jit
def decode_streams(
    data: Any, starts: Any, ends: Any, cdfs: Any, tables: Any, rules: Any, out: Any
) -> bool:
    """Decodes u8 [N, T]; False where a stream has not the length that its symbols need.

    Any bytes decode to symbols of the tables: `value` lies within [low, high] throughout.
    """
    for n in range(out.shape[0]):
        first, end = starts[n] * 8, ends[n] * 8
        at = first
        value = 0
        for _ in range(32):
            value = (value << 1) | _bit(data, at, end)
            at += 1
        low, high = 0, _TOP
        for t in range(out.shape[1]):
            row = cdfs[tables[n, rules[t]]]
            span = high - low + 1
            symbol = _find(row, (((value - low + 1) << 16) - 1) // span)
            out[n, t] = symbol
            high = low + ((span * _int(row[symbol + 1])) >> 16) - 1
            low = low + ((span * _int(row[symbol])) >> 16)
            while True:
                if high < _HALF:
                    pass
                elif low >= _HALF:
                    low -= _HALF
                    high -= _HALF
                    value -= _HALF
                elif low >= _QUARTER and high < 3 * _QUARTER:
                    low -= _QUARTER
                    high -= _QUARTER
                    value -= _QUARTER
                else:
                    break
                low <<= 1
                high = (high << 1) | 1
                value = (value << 1) | _bit(data, at, end)
                at += 1
        # An encoder wrote one bit per shift, and two to end with.
        if ends[n] - starts[n] != (at - first - 32 + 2 + 7) >> 3:
            return False
    return True
