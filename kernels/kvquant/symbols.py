"""Coefficients as symbols for the entropy coder, in one layer or several, and back.

Elementwise work on tiles; one numba implementation for all engines, checked against
`naive_symbols.py`.  A stream whose base is level b and whose last level is e holds symbols of the
coefficients of level b and, for each level above, how they refine the level before:

    q[l - 1] = q[l] / 3 rounded,   q[l] = 3 q[l - 1] + r,   r in -1, 0, 1.

Encoder: `base_symbols` of the coarsest tiles, and for each finer level `refinement`; `split` does
all of it.  Decoder: `base_tiles`, then per level `spread`, `contexts`, decode, `refine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import symbol_loops as loops
from .spec import (
    I16,
    LANES,
    U8,
    U16,
    U32,
    KvQuantError,
    TransformArrays,
    behaved,
    check_indices,
    check_tiles,
)


@dataclass(frozen=True, eq=False)
class Symbols:
    """One layer for the entropy coder.

    Attributes:
        symbols: u8 `[N, T, 32]`; 0 in padding.
        classes: u16 `[N, 32]`, the table of each lane, or the first of three.
        contexts: u8 `[N, T, 32]`, 0 to 2, to be added to the class; None in a base layer.
    """

    symbols: U8
    classes: U16
    contexts: U8 | None


@dataclass(frozen=True, eq=False)
class Escapes:
    """Base coefficients for which their table has no symbol.

    Attributes:
        index: u32 `[E]`, flat index in `[N, T, 32]`, ascending.
        value: i16 `[E]`.
    """

    index: U32
    value: I16


@dataclass(frozen=True, eq=False)
class Layers:
    """All symbols of a stream: its base, and its refinements from coarse to fine."""

    base: Symbols
    escapes: Escapes
    refinements: tuple[Symbols, ...]


def split(tiles: I16, arrays: TransformArrays, first_level: int, last_level: int) -> Layers:
    """The symbols of a stream.

    Args:
        tiles: i16 `[N, T, 32]` of `last_level`, quantised with this `first_level`.
        arrays: the transform.
        first_level: level of the base.
        last_level: level of the last refinement; the same for a stream of one layer.

    Raises:
        ValueError: shapes or levels do not fit, or `tiles` were quantised with a finer
            `first_level`.
    """
    arrays.check_level(first_level)
    if first_level > arrays.check_level(last_level):
        raise ValueError(f"first level {first_level} is finer than last level {last_level}")
    refinements = []
    for level in range(last_level, first_level, -1):
        tiles, layer = refinement(tiles, arrays, level)
        refinements.append(layer)
    base, escapes = base_symbols(tiles, arrays, first_level)
    return Layers(base, escapes, tuple(reversed(refinements)))


def base_symbols(tiles: I16, arrays: TransformArrays, level: int) -> tuple[Symbols, Escapes]:
    """The symbols of a base layer: `q + radius`, or `2 radius + 1` and an escape.

    Raises:
        ValueError: shapes do not fit.
    """
    layout = arrays.layout(level)
    check_tiles(tiles, np.int16, layout)
    num_tokens = tiles.shape[1]
    check_indices(arrays, num_tokens)
    symbols = np.empty(tiles.shape, np.uint8)
    counts = np.zeros(layout.num_tiles, np.int64)
    flat = behaved(tiles).reshape(-1)
    loops.to_symbols(flat, layout.radius.reshape(-1), num_tokens, symbols.reshape(-1), counts)
    total = int(counts.sum())
    escapes = Escapes(np.empty(total, np.uint32), np.empty(total, np.int16))
    if total:
        loops.list_escapes(
            flat, layout.radius.reshape(-1), num_tokens, counts, escapes.index, escapes.value
        )
    return Symbols(symbols, layout.classes, None), escapes


def base_tiles(symbols: U8, escapes: Escapes, arrays: TransformArrays, level: int) -> I16:
    """The coefficients of a base layer.

    Args:
        symbols: u8 `[N, T, 32]`; any values.
        escapes: their escapes; any values.
        arrays: the transform.
        level: the level of the base.

    Raises:
        ValueError: shapes or dtypes do not fit.
        KvQuantError: a symbol that its table does not have, or escapes that are not exactly those
            of the symbols.
    """
    layout = arrays.layout(level)
    check_tiles(symbols, np.uint8, layout, "symbols")
    if (
        escapes.index.dtype != np.uint32
        or escapes.value.dtype != np.int16
        or escapes.index.ndim != 1
        or escapes.index.shape != escapes.value.shape
    ):
        raise ValueError(f"escapes must be u32 [E] and i16 [E], got {escapes.index.shape}")
    tiles = np.empty(symbols.shape, np.int16)
    radius = layout.radius.reshape(-1)
    num_escapes = loops.from_symbols(
        behaved(symbols).reshape(-1), radius, symbols.shape[1], tiles.reshape(-1)
    )
    if num_escapes < 0:
        raise KvQuantError("a symbol is larger than its table; the data is damaged")
    index, value = behaved(escapes.index), behaved(escapes.value)
    if num_escapes != index.size or not loops.put_escapes(
        index, value, radius, symbols.shape[1], tiles.reshape(-1)
    ):
        raise KvQuantError(
            f"{index.size} escapes do not match the symbols, which have {num_escapes}; the data "
            "is damaged"
        )
    _clear_padding(tiles, layout.num_live)
    return tiles


def refinement(tiles: I16, arrays: TransformArrays, level: int) -> tuple[I16, Symbols]:
    """The tiles of level `level - 1`, and the symbols that refine them to `tiles`.

    Raises:
        ValueError: shapes or levels do not fit, or a coefficient that becomes live at `level` is
            not -1, 0 or 1.
    """
    arrays.check_level(level - 1)
    fine, coarse = arrays.layout(level), arrays.layout(level - 1)
    check_tiles(tiles, np.int16, fine)
    symbols, context = np.empty(tiles.shape, np.uint8), np.empty(tiles.shape, np.uint8)
    thirds = np.empty(tiles.shape, np.int16)
    loops.divide(
        behaved(tiles).reshape(-1),
        symbols.reshape(-1),
        context.reshape(-1),
        thirds.reshape(-1),
    )
    _clear_padding(symbols, fine.num_live)
    layer = Symbols(symbols, fine.refine_classes, context)
    moves = arrays.moves(level)
    if moves is None:
        return thirds, layer
    moved = np.zeros((coarse.num_tiles, tiles.shape[1], LANES), np.int16)
    loops.move_runs(thirds.reshape(-1), moves, 1, tiles.shape[1], moved.reshape(-1))
    # Each nonzero third must have gone with the others: what becomes live here has none.
    if np.count_nonzero(thirds) != np.count_nonzero(moved):
        raise ValueError(
            f"tiles cannot be refined from level {level - 1}; quantise with that first_level"
        )
    return moved, layer


def spread(coarse: I16, arrays: TransformArrays, level: int) -> I16:
    """Tiles of level `level - 1` in the layout of `level`; 0 where it has more coefficients.

    Returns:
        i16 `[N, T, 32]`; `coarse` itself where the layouts are the same.

    Raises:
        ValueError: shapes or levels do not fit.
    """
    moves = arrays.moves(level)
    check_tiles(coarse, np.int16, arrays.layout(level - 1))
    if moves is None:
        return coarse
    num_tokens = coarse.shape[1]
    moved = np.zeros((arrays.layout(level).num_tiles, num_tokens, LANES), np.int16)
    loops.move_runs(behaved(coarse).reshape(-1), moves, 0, num_tokens, moved.reshape(-1))
    return moved


def contexts(spreaded: I16) -> U8:
    """The contexts in which the refinements of tiles are coded: `min(|q|, 2)`, u8 `[N, T, 32]`."""
    out = np.empty(spreaded.shape, np.uint8)
    loops.contexts(behaved(spreaded).reshape(-1), out.reshape(-1))
    return out


def refine(spreaded: I16, symbols: U8, arrays: TransformArrays, level: int) -> I16:
    """The tiles of `level`, from those of the level before in its layout, and its symbols.

    Args:
        spreaded: i16 `[N, T, 32]` from `spread`.
        symbols: u8 `[N, T, 32]`; any values.
        arrays: the transform.
        level: the level to reach.

    Raises:
        ValueError: shapes or dtypes do not fit.
        KvQuantError: a symbol larger than 2, or a coefficient that does not fit int16.
    """
    layout = arrays.layout(level)
    check_tiles(spreaded, np.int16, layout)
    check_tiles(symbols, np.uint8, layout, "symbols")
    if symbols.shape != spreaded.shape:
        raise ValueError(f"symbols are {symbols.shape}, tiles {spreaded.shape}")
    tiles = np.empty(spreaded.shape, np.int16)
    if not loops.multiply(
        behaved(spreaded).reshape(-1), behaved(symbols).reshape(-1), tiles.reshape(-1)
    ):
        raise KvQuantError("a refinement that no encoder writes; the data is damaged")
    _clear_padding(tiles, layout.num_live)
    return tiles


def _clear_padding(tiles: I16 | U8, num_live: int) -> None:
    if num_live % LANES:
        tiles[-1, :, num_live % LANES :] = 0
