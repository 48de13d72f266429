"""kvquant's symbols: one layer or several, from any level to any level."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels import kvquant
from sglang_ext.kernels.kvquant import Escapes, KvQuantError, Layers, TransformArrays, naive_symbols
from tests.kernels.kvquant.kvquant_cases import (
    make_planes,
    make_transform,
    random_transform,
    random_words,
)


def join(layers: Layers, arrays: TransformArrays, first: int, level: int) -> Any:
    """What a decoder does, asking for contexts before it has the symbols."""
    tiles = kvquant.base_tiles(layers.base.symbols, layers.escapes, arrays, first)
    for l in range(first + 1, level + 1):  # noqa: E741
        layer = layers.refinements[l - first - 1]
        wide = kvquant.spread(tiles, arrays, l)
        assert layer.contexts is not None
        assert np.array_equal(kvquant.contexts(wide), layer.contexts)
        tiles = kvquant.refine(wide, layer.symbols, arrays, l)
    return tiles


def check_stream(tiles: Any, arrays: TransformArrays, first: int, last: int) -> Layers:
    """Split and joined at every level, as the plain implementation does it."""
    layers = kvquant.split(tiles, arrays, first, last)
    plain = naive_symbols.split(tiles, arrays, first, last)
    for got, wanted in zip(
        (layers.base, *layers.refinements), (plain.base, *plain.refinements), strict=True
    ):
        assert np.array_equal(got.symbols, wanted.symbols)
        assert np.array_equal(got.classes, wanted.classes)
        assert (got.contexts is None) == (wanted.contexts is None)
        if got.contexts is not None and wanted.contexts is not None:
            assert np.array_equal(got.contexts, wanted.contexts)
            assert got.symbols.max(initial=0) <= 2
    assert np.array_equal(layers.escapes.index, plain.escapes.index)
    assert np.array_equal(layers.escapes.value, plain.escapes.value)
    for level in range(first, last + 1):
        joined = join(layers, arrays, first, level)
        assert np.array_equal(joined, naive_symbols.join(plain, arrays, first, level))
    assert np.array_equal(joined, tiles)
    return layers


@pytest.mark.parametrize(
    "shape", [(2, 70, 64, 32), (4, 9, 24, 48), (1, 3, 576, 576), (2, 130, 20, 4), (1, 1, 16, 16)]
)
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_all_pairs_of_levels(shape: tuple[int, int, int, int], outlier: float) -> None:
    s, t, c, n = shape
    arrays = make_transform(s, c, n, outlier=outlier, live=0.6, dead=0.3)
    planes = make_planes("bf16", s, t, c, 3, outlier)
    for first in range(arrays.num_levels):
        for last in range(first, arrays.num_levels):
            found = kvquant.quantise(planes, "bf16", arrays, last, first_level=first)
            check_stream(found.tiles, arrays, first, last)


def test_a_coarser_level_is_a_third_rounded() -> None:
    """What a layered stream gives at a level is the fine value over 3, rounded, level by level."""
    arrays = make_transform(2, 64, 32, live=1.0, dead=-10.0)
    assert (arrays.num_live == 32).all()  # all live: no clamps, one layout
    planes = make_planes("bf16", 2, 50, 64, 3)
    fine = kvquant.quantise(planes, "bf16", arrays, 3, first_level=0).tiles
    layers = kvquant.split(fine, arrays, 0, 3)
    wanted = fine.astype(np.int64)
    for level in (2, 1, 0):
        wanted = np.rint(wanted / 3).astype(np.int64)
        assert np.array_equal(join(layers, arrays, 0, level), wanted)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_tokens=st.sampled_from([1, 2, 31, 33]))
def test_random_streams(seed: int, num_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    s, c, n = ((1, 1, 1), (2, 7, 7), (3, 40, 20), (4, 6, 12), (2, 33, 66))[rng.integers(0, 5)]
    arrays = random_transform(rng, s, c, n, 10, 10, int(rng.integers(0, 14)))
    planes = random_words(rng, "bf16", (s, num_tokens, c), 3.0)
    first = int(rng.integers(0, 3))
    last = int(rng.integers(first, 3))
    found = kvquant.quantise(planes, "bf16", arrays, last, first_level=first)
    check_stream(found.tiles, arrays, first, last)


def one_stream() -> tuple[TransformArrays, Layers]:
    arrays = make_transform(2, 24, 12, live=0.5)
    planes = make_planes("bf16", 2, 40, 24, 3)
    found = kvquant.quantise(planes, "bf16", arrays, 2, first_level=0)
    layers = kvquant.split(found.tiles, arrays, 0, 2)
    assert layers.escapes.index.size > 3
    return arrays, layers


def test_damaged_escapes_are_found() -> None:
    arrays, layers = one_stream()
    escapes, symbols = layers.escapes, layers.base.symbols
    radius = arrays.layout(0).radius
    plain_lane = int(np.flatnonzero(symbols.reshape(-1) == 0)[0])
    moved = escapes.index.copy()
    moved[0] = plain_lane
    outside = escapes.index.copy()
    outside[-1] = symbols.size + 5
    twice = escapes.index.copy()
    twice[1] = twice[0]
    lane = int(escapes.index[0])
    inside = escapes.value.copy()
    inside[0] = radius[lane // 32 // symbols.shape[1], lane % 32]
    lowest = escapes.value.copy()
    lowest[0] = -32768
    for damaged in (
        Escapes(escapes.index[1:], escapes.value[1:]),
        Escapes(np.append(escapes.index, np.uint32(0)), np.append(escapes.value, np.int16(300))),
        Escapes(np.sort(moved), escapes.value),
        Escapes(outside, escapes.value),
        Escapes(twice, escapes.value),
        Escapes(escapes.index[::-1].copy(), escapes.value),
        Escapes(escapes.index, inside),
        Escapes(escapes.index, lowest),
    ):
        with pytest.raises(KvQuantError):
            kvquant.base_tiles(symbols, damaged, arrays, 0)


def test_damaged_symbols_are_found() -> None:
    arrays, layers = one_stream()
    symbols = layers.base.symbols.copy()
    symbols[0, 0, 0] = 255
    with pytest.raises(KvQuantError):
        kvquant.base_tiles(symbols, layers.escapes, arrays, 0)
    tiles = kvquant.base_tiles(layers.base.symbols, layers.escapes, arrays, 0)
    wide = kvquant.spread(tiles, arrays, 1)
    finer = layers.refinements[0].symbols.copy()
    finer[0, 0, 0] = 3
    with pytest.raises(KvQuantError):
        kvquant.refine(wide, finer, arrays, 1)
    large = wide.copy()
    large[0, 0, 0] = -20000
    with pytest.raises(KvQuantError):
        kvquant.refine(large, layers.refinements[0].symbols, arrays, 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_symbols_are_harmless(seed: int) -> None:
    """Whatever an entropy decoder hands over, it is refused or gives coefficients."""
    arrays, layers = one_stream()
    rng = np.random.default_rng(seed)
    symbols = layers.base.symbols.copy()
    hit = rng.random(symbols.shape) < rng.choice([0, 0.001, 1])
    symbols[hit] = rng.integers(0, 256, int(hit.sum()))
    num = int(rng.integers(0, 20))
    escapes = layers.escapes
    if rng.random() < 0.5:
        index = np.sort(rng.integers(0, symbols.size + 10, num).astype(np.uint32))
        escapes = Escapes(index, rng.integers(-32768, 32768, num).astype(np.int16))
    finer = rng.integers(0, int(rng.choice([3, 256])), layers.refinements[0].symbols.shape)
    try:
        tiles = kvquant.base_tiles(symbols, escapes, arrays, 0)
        wide = kvquant.spread(tiles, arrays, 1)
        tiles = kvquant.refine(wide, finer.astype(np.uint8), arrays, 1)
    except KvQuantError:
        return
    out = np.zeros((2, symbols.shape[1], 24), np.uint16)
    kvquant.dequantise(tiles, "bf16", arrays, 1, out)


def test_tiles_of_another_first_level_are_refused() -> None:
    arrays = make_transform(2, 24, 12)
    num_live = np.array([[4] * 4, [12] * 4, [12] * 4, [12] * 4], np.int32)
    arrays = dataclasses.replace(arrays, num_live=num_live)
    planes = make_planes("bf16", 2, 40, 24, 3)
    found = kvquant.quantise(planes, "bf16", arrays, 3)
    with pytest.raises(ValueError, match="first_level"):
        kvquant.split(found.tiles, arrays, 0, 3)


def test_arguments_are_checked() -> None:
    arrays, layers = one_stream()
    planes = make_planes("bf16", 2, 4, 24)
    tiles = np.zeros((arrays.layout(1).num_tiles, 4, 32), np.int16)
    none = kvquant.no_raw_rows("bf16", arrays)
    bad_row = dataclasses.replace(
        none, index=np.array([99999], np.uint32), bits=np.zeros((1, 12), np.uint16)
    )
    for call in (
        lambda: kvquant.quantise(planes[:1], "bf16", arrays, 1),
        lambda: kvquant.quantise(planes, "fp32", arrays, 1),
        lambda: kvquant.quantise(planes, "int8", arrays, 1),
        lambda: kvquant.quantise(planes, "bf16", arrays, 4),
        lambda: kvquant.quantise(planes, "bf16", arrays, -1),
        lambda: kvquant.quantise(planes, "bf16", arrays, 1, first_level=2),
        lambda: kvquant.quantise(planes, "bf16", arrays, 1, first_level=0, rounding=0.3),
        lambda: kvquant.quantise(planes, "bf16", arrays, 1, raw_tokens=-1),
        lambda: kvquant.quantise(planes[:, ::2], "bf16", arrays, 1),
        lambda: kvquant.quantise(planes, "bf16", arrays, 1, engine="cuda"),  # type: ignore[arg-type]
        lambda: kvquant.dequantise(tiles[:, :2], "bf16", arrays, 1, planes),
        lambda: kvquant.dequantise(tiles[:0], "bf16", arrays, 1, planes),
        lambda: kvquant.dequantise(tiles, "bf16", arrays, 1, planes, raw=bad_row),
        lambda: kvquant.split(tiles, arrays, 2, 1),
        lambda: kvquant.base_tiles(layers.base.symbols[:, :1], layers.escapes, arrays, 0),
        lambda: dataclasses.replace(arrays, mean=arrays.mean.astype(np.int64)),
        lambda: dataclasses.replace(arrays, num_live=arrays.num_live + 99),
        lambda: dataclasses.replace(arrays, inv_step=arrays.inv_step * np.nan),
        lambda: dataclasses.replace(arrays, block_channels=7),
        lambda: dataclasses.replace(arrays, grid_exp=np.full_like(arrays.grid_exp, 127)),
        lambda: dataclasses.replace(arrays, radius=arrays.radius[:2]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()


def test_read_only_arrays_compile_nothing() -> None:
    """Arrays from a file are read-only, another type to numba."""
    from sglang_ext.kernels.kvquant import cpu, symbol_loops

    kvquant.warm_up(["bf16"])
    loops: list[Any] = [cpu.quantise, cpu.dequantise]
    loops += [getattr(symbol_loops, name) for name in ("from_symbols", "divide", "multiply")]
    before = [len(loop.signatures) for loop in loops]

    def frozen(array: Any) -> Any:
        raw = b"x" + array.tobytes()  # not aligned either
        return np.frombuffer(raw, np.uint8, offset=1).view(array.dtype).reshape(array.shape)

    arrays, layers = one_stream()
    fields = [f.name for f in dataclasses.fields(arrays) if f.type != "int"]
    arrays = dataclasses.replace(arrays, **{f: frozen(getattr(arrays, f)) for f in fields})
    planes = frozen(make_planes("bf16", 2, 40, 24, 3))
    found = kvquant.quantise(planes, "bf16", arrays, 2, first_level=0)
    escapes = Escapes(frozen(layers.escapes.index), frozen(layers.escapes.value))
    layers = Layers(layers.base, escapes, layers.refinements)
    kvquant.base_tiles(frozen(layers.base.symbols), escapes, arrays, 0)
    kvquant.split(frozen(found.tiles), arrays, 0, 2)
    wide = kvquant.spread(join(layers, arrays, 0, 0), arrays, 1)
    kvquant.refine(frozen(wide), frozen(layers.refinements[0].symbols), arrays, 1)
    out = np.empty((2, 40, 24), np.uint16)
    kvquant.dequantise(frozen(found.tiles), "bf16", arrays, 2, out, raw=found.raw)
    assert [len(loop.signatures) for loop in loops] == before
