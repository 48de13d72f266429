"""Encoding and decoding on one core of any kind, without the GIL.

Arrays are flat and every index is uint64: numba then neither wraps negative indices nor makes
slices. Nothing outside the arrays is read or written, whatever the words and states are; sizes,
offsets, tables and contexts are checked in `api.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from sglang_ext.compiling import jit as kept_jit

_F = TypeVar("_F", bound=Callable[..., Any])
_U, _W = np.uint64, np.uint32
_ZERO, _ONE, _LANES = _U(0), _U(1), _U(32)
# What `decode` returns, in the low two bits beside the group.
OK, RAN_OUT, LEFT_OVER, END_STATE = 0, 1, 2, 3


def jit(**options: Any) -> Callable[[_F], _F]:
    """`numba.njit` with this package's settings: frees the GIL, cached."""
    return kept_jit(**{"nogil": True, "error_model": "numpy", **options})


@jit(forceinline=True)
def _decode_step(
    words: Any, at: Any, end: Any, lut: Any, rows: Any, state: Any, out: Any, b: Any
) -> Any:
    """One symbol of each lane; the next word's index, or `end + 1` if words ran out."""
    # Not two loops, one of which would vectorise: the other's stores would be waited for.
    if end - at >= _LANES:
        for lane in range(_LANES):
            x = _U(state[lane])
            entry = _U(lut[_U(rows[lane]) | (x & _U(4095))])
            out[b + lane] = np.uint8(entry & _U(255))
            x = ((entry >> _U(20)) + _ONE) * (x >> _U(12)) + ((entry >> _U(8)) & _U(4095))
            filled = (x << _U(16)) | _U(words[at])
            low = x < _U(65536)
            state[lane] = _W(filled if low else x)
            at += _U(low)
        return at
    for lane in range(_LANES):
        x = _U(state[lane])
        entry = _U(lut[_U(rows[lane]) | (x & _U(4095))])
        out[b + lane] = np.uint8(entry & _U(255))
        x = ((entry >> _U(20)) + _ONE) * (x >> _U(12)) + ((entry >> _U(8)) & _U(4095))
        if x < _U(65536):
            if at >= end:
                return end + _ONE
            x = (x << _U(16)) | _U(words[at])
            at += _ONE
        state[lane] = _W(x)
    return at


@jit()
def decode(
    words: Any,
    offsets: Any,
    states: Any,
    lut: Any,
    classes: Any,
    context: Any,
    has_context: Any,
    num_tokens: Any,
    tiles_per_group: Any,
    out: Any,
) -> Any:
    """Fill `out`; 0, or the first group that cannot be decoded `<< 2 | ` what is wrong with it."""
    num_tiles = _U(classes.size) // _LANES
    num_groups = (num_tiles + tiles_per_group - _ONE) // tiles_per_group
    state = np.empty(32, np.uint32)
    rows = np.empty(32, np.uint32)
    for group in range(num_groups):
        at, end = _U(offsets[group]), _U(offsets[group + _ONE])
        for lane in range(_LANES):
            state[lane] = states[group * _LANES + lane]
        first = group * tiles_per_group
        for tile in range(first, min(first + tiles_per_group, num_tiles)):
            for lane in range(_LANES):
                rows[lane] = _W(classes[tile * _LANES + lane]) << _W(12)
            for token in range(num_tokens):
                b = (tile * num_tokens + token) * _LANES
                if has_context:
                    for lane in range(_LANES):
                        row = _W(classes[tile * _LANES + lane]) + _W(context[b + lane])
                        rows[lane] = _W(row << _W(12))
                at = _decode_step(words, at, end, lut, rows, state, out, b)
                if at > end:
                    return group << _U(2) | _U(RAN_OUT)
        if at != end:
            return group << _U(2) | _U(LEFT_OVER)
        for lane in range(_LANES):
            if state[lane] != _W(65536):
                return group << _U(2) | _U(END_STATE)
    return _U(OK)


@jit(forceinline=True)
def _encode_step(
    symbols: Any, b: Any, lut: Any, rows: Any, state: Any, scratch: Any, at: Any
) -> Any:
    """Push one symbol of each lane; the index of the last word written, and if all went well."""
    good = True
    for i in range(_LANES):
        lane = _LANES - _ONE - i
        entry = lut[_U(rows[lane]) | _U(symbols[b + lane])]
        freq = entry & _U(8191)
        x = _U(state[lane])
        full = (x >> _U(20)) >= freq
        scratch[at - _ONE] = np.uint16(x & _U(65535))
        at -= _U(full)
        x = x >> _U(16) if full else x
        quotient = ((x + (entry >> _U(30) & _ONE)) * (entry >> _U(32))) >> _U(32)
        quotient >>= entry >> _U(25) & _U(31)
        # x + quotient * (4096 - freq) is quotient * 4096 + remainder.
        state[lane] = _W(x + quotient * (_U(4096) - freq) + (entry >> _U(13) & _U(4095)))
        good &= freq != _ZERO
    return at, good


@jit()
def encode(
    symbols: Any,
    lut: Any,
    classes: Any,
    context: Any,
    has_context: Any,
    num_tokens: Any,
    tiles_per_group: Any,
    scratch: Any,
    states: Any,
    offsets: Any,
    words: Any,
) -> Any:
    """Fill the last three; 0, or the first group with a symbol of frequency 0, plus 1.

    `scratch` holds one group's words, at most one a symbol, and one more; `words` all groups'.
    """
    num_tiles = _U(classes.size) // _LANES
    num_groups = (num_tiles + tiles_per_group - _ONE) // tiles_per_group
    state = np.empty(32, np.uint32)
    rows = np.empty(32, np.uint32)
    filled = _ZERO
    for group in range(num_groups):
        for lane in range(_LANES):
            state[lane] = _W(65536)
        at = _U(scratch.size)
        first = group * tiles_per_group
        last = min(first + tiles_per_group, num_tiles)
        good = True
        for i in range(last - first):
            tile = last - _ONE - i
            for lane in range(_LANES):
                rows[lane] = _W(classes[tile * _LANES + lane]) << _W(8)
            for j in range(num_tokens):
                b = (tile * num_tokens + num_tokens - _ONE - j) * _LANES
                if has_context:
                    for lane in range(_LANES):
                        row = _W(classes[tile * _LANES + lane]) + _W(context[b + lane])
                        rows[lane] = _W(row << _W(8))
                at, fine = _encode_step(symbols, b, lut, rows, state, scratch, at)
                good &= fine
        if not good:
            return group + _ONE
        offsets[group] = _W(filled)
        for i in range(_U(scratch.size) - at):
            words[filled + i] = scratch[at + i]
        filled += _U(scratch.size) - at
        for lane in range(_LANES):
            states[group * _LANES + lane] = state[lane]
    offsets[num_groups] = _W(filled)
    return _ZERO
