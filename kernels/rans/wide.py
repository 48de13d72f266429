"""Encoding and decoding on one core that has AVX-512, without the GIL: as `cpu.py`, but faster.

The inner loops are in `vector.py`; this walks over groups and tiles. `api.py` calls it where
`vector.SUPPORTED`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import vector
from .cpu import END_STATE, LEFT_OVER, OK, RAN_OUT, jit

_U, _W = np.uint64, np.uint32
_ZERO, _ONE, _LANES = _U(0), _U(1), _U(32)
_WAYS = 4  # groups decoded together


@jit(forceinline=True)
def _decode_tile(
    num_ways: Any,
    words: Any,
    cursors: Any,
    state: Any,
    lut: Any,
    classes: Any,
    context: Any,
    has_context: Any,
    out: Any,
    num_tokens: Any,
) -> Any:
    if num_ways == _ONE:
        if has_context:
            return vector.decode_1_context(
                words, cursors, state, lut, classes, context, out, num_tokens
            )
        return vector.decode_1(words, cursors, state, lut, classes, context, out, num_tokens)
    if has_context:
        return vector.decode_4_context(
            words, cursors, state, lut, classes, context, out, num_tokens
        )
    return vector.decode_4(words, cursors, state, lut, classes, context, out, num_tokens)


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
    """As `cpu.decode`."""
    num_tiles = _U(classes.size) // _LANES
    num_groups = (num_tiles + tiles_per_group - _ONE) // tiles_per_group
    num_whole = num_tiles // tiles_per_group
    cursors = np.zeros(3 * _WAYS, np.uint64)
    state = np.empty(32 * _WAYS, np.uint32)
    group = _ZERO
    while group < num_groups:
        num_ways: Any = _ONE
        num: Any = _ONE
        tiles = tiles_per_group
        if group >= num_whole:
            tiles = num_tiles - num_whole * tiles_per_group
        elif num_whole - group > _ONE:
            # Two or three groups take no longer with the last one decoded again beside them.
            num_ways, num = _U(_WAYS), min(_U(_WAYS), num_whole - group)
        for way in range(num_ways):
            source = group + min(way, num - _ONE)
            cursors[_U(3) * way] = _U(offsets[source])
            cursors[_U(3) * way + _ONE] = _U(offsets[source + _ONE])
            cursors[_U(3) * way + _U(2)] = source * tiles_per_group
            for lane in range(_LANES):
                state[way * _LANES + lane] = states[source * _LANES + lane]
        for _ in range(tiles):
            failed = _decode_tile(
                num_ways, words, cursors, state, lut, classes, context, has_context, out, num_tokens
            )
            if failed:
                return (group + failed - _ONE) << _U(2) | _U(RAN_OUT)
            for way in range(num_ways):
                cursors[_U(3) * way + _U(2)] += _ONE
        for way in range(num):
            if cursors[_U(3) * way] != cursors[_U(3) * way + _ONE]:
                return (group + way) << _U(2) | _U(LEFT_OVER)
            for lane in range(_LANES):
                if state[way * _LANES + lane] != _W(65536):
                    return (group + way) << _U(2) | _U(END_STATE)
        group += num
    return _U(OK)


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
    """As `cpu.encode`."""
    num_tiles = _U(classes.size) // _LANES
    num_groups = (num_tiles + tiles_per_group - _ONE) // tiles_per_group
    cursors = np.zeros(3, np.uint64)
    state = np.empty(32, np.uint32)
    filled = _ZERO
    for group in range(num_groups):
        for lane in range(_LANES):
            state[lane] = _W(65536)
        cursors[_ZERO] = _U(scratch.size)
        first = group * tiles_per_group
        last = min(first + tiles_per_group, num_tiles)
        for i in range(last - first):
            cursors[_U(2)] = last - _ONE - i
            if has_context:
                failed = vector.encode_1_context(
                    scratch, cursors, state, lut, classes, context, symbols, num_tokens
                )
            else:
                failed = vector.encode_1(
                    scratch, cursors, state, lut, classes, context, symbols, num_tokens
                )
            if failed:
                return group + _ONE
        at = cursors[_ZERO]
        offsets[group] = _W(filled)
        for i in range(_U(scratch.size) - at):
            words[filled + i] = scratch[at + i]
        filled += _U(scratch.size) - at
        for lane in range(_LANES):
            states[group * _LANES + lane] = state[lane]
    offsets[num_groups] = _W(filled)
    return _ZERO
