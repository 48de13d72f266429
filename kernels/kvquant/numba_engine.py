"""The numba kernels behind the interface that the engines share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import cpu, symbols
from .naive import restore_raw
from .packed import packed
from .spec import (
    I16,
    LANES,
    WORDS,
    Quantised,
    RawRows,
    TransformArrays,
    Words,
    behaved,
    clamp_limits,
    row_places,
)
from .words import KERNEL_WORDS

U64 = npt.NDArray[np.uint64]


def quantise(
    planes: Words,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    raw_tokens: int,
    rounding: float,
    clamp: npt.NDArray[np.int32],
    raw_from: npt.NDArray[np.int32],
) -> Quantised:
    """As `api.quantise`, with the bounds that `spec.clamp_limits` gives."""
    layout, ready = arrays.layout(level), packed(arrays)
    num_tokens = planes.shape[1]
    num_sinks = min(raw_tokens, num_tokens)
    tiles = np.zeros((layout.num_tiles, num_tokens, LANES), np.int16)
    flags = np.zeros((arrays.num_blocks, num_tokens), np.uint8)
    cpu.quantise(
        _kernel_words(planes, dtype),
        _geometry(arrays, num_tokens, num_sinks),
        ready.scale.reshape(-1),
        arrays.mean.reshape(-1),
        arrays.forward.reshape(-1),
        ready.forward.panels,
        ready.forward.norms,
        arrays.inv_step[level].reshape(-1),
        float(rounding),
        clamp.reshape(-1),
        raw_from.reshape(-1),
        layout.starts.astype(np.uint64),
        tiles.reshape(-1),
        flags.reshape(-1),
    )
    flags[:, :num_sinks] = 0
    index = np.flatnonzero(flags)
    return Quantised(
        tiles,
        RawRows(
            index.astype(np.uint32),
            planes[row_places(index, arrays, num_tokens)],
            planes[:, :num_sinks].copy(),
        ),
    )


def dequantise(
    tiles: I16, dtype: str, arrays: TransformArrays, level: int, out: Words, raw: RawRows
) -> None:
    """As `api.dequantise`."""
    layout, ready = arrays.layout(level), packed(arrays)
    cpu.dequantise(
        behaved(tiles).reshape(-1),
        _geometry(arrays, out.shape[1], 0),
        layout.shift.reshape(-1),
        arrays.inverse.reshape(-1),
        ready.inverse.panels,
        ready.inverse.norms,
        arrays.mean_f32.reshape(-1),
        arrays.out_scale[level].reshape(-1),
        layout.starts.astype(np.uint64),
        _kernel_words(out, dtype),
    )
    restore_raw(raw, arrays, out)


def warm_up(dtypes: tuple[str, ...]) -> None:
    """Compile, or load from the cache, the kernels for these dtypes and those for symbols."""
    arrays = _smallest()
    for dtype in dtypes:
        planes = np.zeros((1, 1, 2), WORDS[dtype])
        found = quantise(planes, dtype, arrays, 1, 0, 0.5, *clamp_limits(arrays, 0, 1))
        dequantise(found.tiles, dtype, arrays, 1, planes, found.raw)
    tiles = np.zeros((1, 1, LANES), np.int16)
    tiles[0, 0, 0] = 4
    layers = symbols.split(tiles, arrays, 0, 1)
    coarse = symbols.base_tiles(layers.base.symbols, layers.escapes, arrays, 0)
    wide = symbols.spread(coarse, arrays, 1)
    symbols.contexts(wide)
    symbols.refine(wide, layers.refinements[0].symbols, arrays, 1)


def _smallest() -> TransformArrays:
    """One plane of one block, where each loop of the kernels and of the symbols has work."""
    return TransformArrays(
        num_planes=1,
        num_channels=2,
        block_channels=2,
        num_levels=2,
        grid_exp=np.zeros((1, 2), np.int8),
        mean=np.zeros((1, 2), np.int32),
        forward=np.eye(2, dtype=np.int32)[None],
        inverse=np.eye(2, dtype=np.int32)[None],
        inv_step=np.ones((2, 1, 2)),
        recon_shift=np.zeros((2, 1, 2), np.uint8),
        mean_f32=np.zeros((1, 2), np.float32),
        out_scale=np.ones((2, 1, 2), np.float32),
        num_live=np.array([[1], [2]], np.int32),
        classes=np.zeros((2, 1, 2), np.uint16),
        refine_classes=np.zeros((2, 1, 2), np.uint16),
        radius=np.zeros(3, np.uint8),
    )


def _geometry(arrays: TransformArrays, num_tokens: int, num_sinks: int) -> U64:
    return np.array(
        [num_tokens, arrays.num_channels, arrays.block_channels, arrays.num_blocks, num_sinks],
        np.uint64,
    )


def _kernel_words(planes: Words, dtype: str) -> Words:
    return behaved(planes).reshape(-1).view(KERNEL_WORDS[dtype])
