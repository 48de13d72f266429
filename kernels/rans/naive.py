"""The plain statement of the coder, in numpy: one step of 32 lanes at a time, with divisions."""

from __future__ import annotations

import numpy as np

from .tables import (
    LANES,
    PROB_BITS,
    PROB_SUM,
    STATE_LOW,
    U8,
    U16,
    U32,
    RansError,
    Tables,
    cumulative,
)


def encode(
    symbols: U8, classes: U16, tables: Tables, tiles_per_group: int, context: U8 | None
) -> tuple[U32, U32, U16]:
    """States, offsets and words; arguments as in `api.encode`, checked there."""
    freqs, before = tables.freqs.astype(np.uint64), cumulative(tables.freqs).astype(np.uint64)
    rows = _table_rows(symbols, classes, context)
    states, offsets, streams = [], [0], []
    for first in range(0, symbols.shape[0], tiles_per_group):
        group = slice(first, first + tiles_per_group)
        state = np.full(LANES, STATE_LOW, np.uint64)
        pieces: list[U16] = []
        steps = zip(
            symbols[group].reshape(-1, LANES)[::-1],
            rows[group].reshape(-1, LANES)[::-1],
            strict=True,
        )
        for symbol, row in steps:
            freq = freqs[row, symbol]
            if not freq.all():
                raise ValueError(f"a symbol of tiles {group.start}.. has frequency 0 in its table")
            full = state >= freq << np.uint64(32 - PROB_BITS)
            pieces.append((state[full] & np.uint64(0xFFFF)).astype(np.uint16))
            state = np.where(full, state >> np.uint64(16), state)
            state = (state // freq << np.uint64(PROB_BITS)) + state % freq + before[row, symbol]
        states.append(state.astype(np.uint32))
        streams.append(np.concatenate(pieces[::-1]))
        offsets.append(offsets[-1] + streams[-1].size)
    words = np.concatenate([*streams, np.empty(0, np.uint16)])
    return np.array(states, np.uint32).reshape(-1, LANES), np.array(offsets, np.uint32), words


def decode(
    states: U32,
    offsets: U32,
    words: U16,
    classes: U16,
    tables: Tables,
    tiles_per_group: int,
    context: U8 | None,
    out: U8,
) -> None:
    """Fills `out`; arguments as in `api.decode`, checked there.

    Raises:
        RansError: a group's words do not fit its states.
    """
    freqs, before = tables.freqs.astype(np.uint64), cumulative(tables.freqs).astype(np.uint64)
    upper = np.cumsum(tables.freqs, 1, dtype=np.uint64)
    rows = _table_rows(out, classes, context)
    for group, first in enumerate(range(0, out.shape[0], tiles_per_group)):
        state = states[group].astype(np.uint64)
        at, end = int(offsets[group]), int(offsets[group + 1])
        for tile in range(first, min(first + tiles_per_group, out.shape[0])):
            for token in range(out.shape[1]):
                row = rows[tile, token]
                slot = state % np.uint64(PROB_SUM)
                symbol = (upper[row] <= slot[:, None]).sum(1)
                out[tile, token] = symbol
                state = freqs[row, symbol] * (state >> np.uint64(PROB_BITS))
                state += slot - before[row, symbol]
                low = state < STATE_LOW
                num = int(low.sum())
                if num > end - at:
                    raise RansError(f"the words of group {group} end before its symbols do")
                state[low] = state[low] << np.uint64(16) | words[at : at + num]
                at += num
        if at != end or (state != STATE_LOW).any():
            raise RansError(f"group {group} does not end in its first state, or has words left")


def _table_rows(shape: U8, classes: U16, context: U8 | None) -> U32:
    rows = np.broadcast_to(classes[:, None, :].astype(np.uint32), shape.shape)
    return rows if context is None else rows + context
