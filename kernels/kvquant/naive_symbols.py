"""`symbols.split` and its inverse in plain numpy, to check `symbols.py` against."""

from __future__ import annotations

import numpy as np

from .spec import I16, LANES, TransformArrays
from .symbols import Escapes, Layers, Symbols


def split(tiles: I16, arrays: TransformArrays, first_level: int, last_level: int) -> Layers:
    """As `symbols.split`."""
    refinements = []
    for level in range(last_level, first_level, -1):
        fine, coarse = arrays.layout(level), arrays.layout(level - 1)
        q = tiles.astype(np.int64)
        third = np.rint(q / 3).astype(np.int64)
        rest = (q - 3 * third) * np.where(third < 0, -1, 1)
        symbols = np.where(_inside(fine.num_live, fine.num_tiles), 1 + rest, 0)
        refinements.append(
            Symbols(
                symbols.astype(np.uint8),
                fine.refine_classes,
                np.minimum(np.abs(third), 2).astype(np.uint8),
            )
        )
        flat, target = _flat(third), np.zeros((tiles.shape[1], coarse.num_tiles * LANES), np.int64)
        for b in range(arrays.num_blocks):
            num = arrays.num_live[level - 1, b]
            a, to = fine.starts[b], coarse.starts[b]
            target[:, to : to + num] = flat[:, a : a + num]
        tiles = _tiled(target)
    layout = arrays.layout(first_level)
    q, radius = tiles.astype(np.int64), layout.radius[:, None, :].astype(np.int64)
    escaped = np.abs(q) > radius
    base = np.where(escaped, 2 * radius + 1, q + radius).astype(np.uint8)
    index = np.flatnonzero(escaped)
    escapes = Escapes(index.astype(np.uint32), tiles.reshape(-1)[index].astype(np.int16))
    return Layers(Symbols(base, layout.classes, None), escapes, tuple(reversed(refinements)))


def join(layers: Layers, arrays: TransformArrays, first_level: int, level: int) -> I16:
    """The tiles of `level` from the base and the first `level - first_level` refinements."""
    layout = arrays.layout(first_level)
    q = layers.base.symbols.astype(np.int64) - layout.radius[:, None, :]
    q.reshape(-1)[layers.escapes.index] = layers.escapes.value
    for finer in range(first_level + 1, level + 1):
        coarse, fine = arrays.layout(finer - 1), arrays.layout(finer)
        flat, target = _flat(q), np.zeros((q.shape[1], fine.num_tiles * LANES), np.int64)
        for b in range(arrays.num_blocks):
            num = arrays.num_live[finer - 1, b]
            a, to = coarse.starts[b], fine.starts[b]
            target[:, to : to + num] = flat[:, a : a + num]
        q = _tiled(target).astype(np.int64)
        rest = layers.refinements[finer - first_level - 1].symbols.astype(np.int64) - 1
        q = 3 * q + rest * np.where(q < 0, -1, 1)
        q = np.where(_inside(fine.num_live, fine.num_tiles), q, 0)
    return q.astype(np.int16)


def _inside(num_live: int, num_tiles: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    position = np.arange(num_tiles * LANES).reshape(num_tiles, 1, LANES)
    return position < num_live


def _flat(q: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> I16:
    return q.transpose(1, 0, 2).reshape(q.shape[1], -1).astype(np.int16)


def _tiled(flat: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> I16:
    num_tokens = flat.shape[0]
    tiles = flat.reshape(num_tokens, flat.shape[1] // LANES, LANES).transpose(1, 0, 2)
    return np.ascontiguousarray(tiles).astype(np.int16)
