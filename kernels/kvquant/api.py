"""Shape checks and dispatch to an engine; all of them give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from . import naive
from .spec import (
    I16,
    WORDS,
    Quantised,
    RawRows,
    TransformArrays,
    Words,
    check_dtype,
    check_indices,
    check_planes,
    check_tiles,
    clamp_limits,
)

Engine = Literal["numba", "naive", "triton"]
ENGINES: tuple[Engine, ...] = ("numba", "naive", "triton")


def quantise(
    planes: Words,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    *,
    first_level: int | None = None,
    raw_tokens: int = 0,
    rounding: float = 0.5,
    engine: Engine = "numba",
) -> Quantised:
    """Transform and quantise planes.

    Args:
        planes: words `[S, T, C]`, the bits of `dtype`.
        dtype: one of `spec.WORDS`.
        arrays: the transform.
        level: the level of the step; the last one of a layered stream.
        first_level: the base level of a layered stream; None if the stream has one layer.
        raw_tokens: first tokens that are kept as they are.
        rounding: what is added before rounding down: 0.5, which a layered stream needs, or less
            for a dead zone.
        engine: "numba", "naive", or "triton", which computes on the GPU if there is one.

    Returns:
        Coefficients and raw rows, the same whatever the engine.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
    """
    check_planes(planes, dtype, arrays)
    arrays.check_level(level)
    first = level if first_level is None else arrays.check_level(first_level)
    if first > level or raw_tokens < 0 or not 0 <= rounding <= 0.5:
        raise ValueError(
            f"expected first_level <= level, raw_tokens >= 0 and rounding in [0, 0.5], got "
            f"{first_level}, {level}, {raw_tokens} and {rounding}"
        )
    if first != level and rounding != 0.5:
        raise ValueError(f"a layered stream needs rounding 0.5, got {rounding}")
    clamp, raw_from = clamp_limits(arrays, first, level)
    run = naive.quantise if engine == "naive" else _engine(engine).quantise
    return run(planes, dtype, arrays, level, raw_tokens, rounding, clamp, raw_from)


def dequantise(
    tiles: I16,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    out: Words,
    *,
    raw: RawRows | None = None,
    engine: Engine = "numba",
) -> None:
    """Transform coefficients back to planes.

    Args:
        tiles: i16 `[N, T, 32]` in the layout of `level`; any values.
        dtype: that of `out`.
        arrays: the transform.
        level: the level that `tiles` are of.
        out: words `[S, T, C]` to write.
        raw: rows to restore.
        engine: as for `quantise`.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit, also those of `raw`; `out` is then not
            written.
    """
    check_planes(out, dtype, arrays)
    check_tiles(tiles, np.int16, arrays.layout(level))
    num_tokens = out.shape[1]
    if arrays.layout(level).num_tiles and tiles.shape[1] != num_tokens:
        raise ValueError(f"tiles have {tiles.shape[1]} tokens, planes {num_tokens}")
    if raw is None:
        raw = no_raw_rows(dtype, arrays)
    check_raw(raw, dtype, arrays, num_tokens)
    run = naive.dequantise if engine == "naive" else _engine(engine).dequantise
    run(tiles, dtype, arrays, level, out, raw)


def warm_up(dtypes: Sequence[str] = tuple(WORDS)) -> None:
    """Compile, or load from the cache, every CPU kernel that these dtypes need.

    After it nothing is compiled, whatever the shapes.  Takes about a minute the first time on a
    machine.
    """
    from . import numba_engine

    for dtype in dtypes:
        check_dtype(dtype)
    numba_engine.warm_up(tuple(dtypes))


def no_raw_rows(dtype: str, arrays: TransformArrays) -> RawRows:
    """An empty list of raw rows."""
    kind = check_dtype(dtype)
    return RawRows(
        np.empty(0, np.uint32),
        np.empty((0, arrays.block_channels), kind),
        np.empty((arrays.num_planes, 0, arrays.num_channels), kind),
    )


def check_raw(raw: RawRows, dtype: str, arrays: TransformArrays, num_tokens: int) -> None:
    """Raise ValueError unless `raw` are rows of chunks of `num_tokens` tokens."""
    kind = check_dtype(dtype)
    check_indices(arrays, num_tokens)
    s, c, n = arrays.num_planes, arrays.num_channels, arrays.block_channels
    if (
        raw.index.dtype != np.uint32
        or raw.index.ndim != 1
        or (raw.bits.dtype, raw.bits.shape) != (kind, (raw.index.size, n))
        or raw.sinks.dtype != kind
        or raw.sinks.ndim != 3
        or raw.sinks.shape != (s, raw.sinks.shape[1], c)
        or raw.sinks.shape[1] > num_tokens
    ):
        raise ValueError(
            f"raw rows must be u32 [R], {kind} [R, {n}] and {kind} [{s}, <= {num_tokens}, {c}], "
            f"got {raw.index.shape}, {raw.bits.dtype} {raw.bits.shape} and {raw.sinks.shape}"
        )
    index = raw.index
    if index.size and (
        int(index[-1]) >= arrays.num_blocks * num_tokens or not (index[1:] > index[:-1]).all()
    ):
        raise ValueError("raw rows must be ascending and lie in the chunk")


def _engine(engine: str) -> Any:
    if engine == "numba":
        from . import numba_engine

        return numba_engine
    if engine == "triton":
        from . import gpu

        return gpu
    raise ValueError(f"engine must be one of {list(ENGINES)}, got {engine!r}")
