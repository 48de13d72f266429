"""kvquant against an oracle of integers and fractions; numba against the naive engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kernels import kvquant
from sglang_ext.kernels.kvquant import TransformArrays, Words
from sglang_ext.kernels.kvquant.naive import decode_words, encode_words
from tests.kernels.kvquant import kvquant_oracle as oracle
from tests.kernels.kvquant.kvquant_cases import (
    DTYPES,
    make_planes,
    make_transform,
    quantise_alike,
    random_transform,
    random_words,
    spoil,
)


def both(
    planes: Words, dtype: str, arrays: TransformArrays, level: int, **options: Any
) -> kvquant.Quantised:
    """Quantise and dequantise with both CPU engines, which must agree."""
    return quantise_alike(planes, dtype, arrays, level, "naive", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("level", "first_level"), [(2, 2), (2, 0), (3, 2)])
def test_against_the_oracle(dtype: str, level: int, first_level: int) -> None:
    for shape, outlier in (((2, 9, 8, 4), 1.0), ((2, 5, 6, 12), 1000.0), ((1, 7, 12, 12), 30.0)):
        s, t, c, n = shape
        arrays = make_transform(s, c, n, outlier=outlier, live=0.5, dead=0.3)
        planes = spoil(make_planes(dtype, s, t, c, 4, outlier), dtype)
        for raw_tokens in (0, 2):
            found = both(
                planes, dtype, arrays, level, first_level=first_level, raw_tokens=raw_tokens
            )
            rows, raw = oracle.quantise(planes, dtype, arrays, level, first_level, raw_tokens, 0.5)
            assert oracle.token_rows(found.tiles, arrays, level) == rows
            assert found.raw.index.tolist() == raw
        check_values(found.tiles, dtype, arrays, level, t)


def check_values(
    tiles: Any, dtype: str, arrays: TransformArrays, level: int, num_tokens: int
) -> None:
    """Dequantised words are those of the oracle."""
    s, c, n = arrays.num_planes, arrays.num_channels, arrays.block_channels
    out = np.zeros((s, num_tokens, c), kvquant.WORDS[dtype])
    kvquant.dequantise(tiles, dtype, arrays, level, out)
    sign_bit = 1 << (8 * out.itemsize - 1)
    for t, blocks in enumerate(oracle.token_rows(tiles, arrays, level)):
        for b, q in enumerate(blocks):
            for i, word in enumerate(oracle.value_words(q, dtype, arrays, b, level)):
                plane, channel = divmod(b * n + i, c)
                got = int(out[plane, t, channel])
                assert got == word if word is not None else got & ~sign_bit == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dead_zone_against_the_oracle(dtype: str) -> None:
    arrays = make_transform(1, 8, 8)
    planes = make_planes(dtype, 1, 12, 8, 4)
    for rounding in (0.0, 0.3):
        found = both(planes, dtype, arrays, 1, rounding=rounding)
        rows, raw = oracle.quantise(planes, dtype, arrays, 1, 1, 0, rounding)
        assert oracle.token_rows(found.tiles, arrays, 1) == rows
        assert found.raw.index.tolist() == raw


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.sampled_from([1, 2, 7, 8, 63, 64, 65, 130]),
    shape=st.sampled_from(
        [(1, 1, 1), (2, 5, 5), (3, 40, 20), (4, 6, 12), (2, 33, 66), (1, 96, 48)]
    ),
    forward_bits=st.integers(1, 24),
    inverse_bits=st.integers(1, 24),
    step_bits=st.integers(0, 40),
)
def test_engines_agree_on_random_transforms(
    seed: int,
    dtype: str,
    num_tokens: int,
    shape: tuple[int, int, int],
    forward_bits: int,
    inverse_bits: int,
    step_bits: int,
) -> None:
    """Of any size: sums that fit int32 and others, steps from far too small to far too large."""
    rng = np.random.default_rng(seed)
    s, c, n = shape
    arrays = random_transform(rng, s, c, n, forward_bits, inverse_bits, step_bits)
    planes = random_words(rng, dtype, (s, num_tokens, c), float(rng.uniform(0, 30)))
    level = int(rng.integers(0, arrays.num_levels))
    first_level = int(rng.integers(0, level + 1))
    both(planes, dtype, arrays, level, first_level=first_level, raw_tokens=int(rng.integers(0, 3)))
    # Coefficients that no encoder writes.
    wild = rng.integers(-32768, 32768, (arrays.layout(level).num_tiles, num_tokens, 32))
    tiles = (wild >> int(rng.integers(0, 16))).astype(np.int16)
    outs = [np.zeros_like(planes), np.ones_like(planes)]
    kvquant.dequantise(tiles, dtype, arrays, level, outs[0])
    kvquant.dequantise(tiles, dtype, arrays, level, outs[1], engine="naive")
    assert np.array_equal(outs[0], outs[1])


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 16, 16), (2, 3, 1024, 16), (1, 2, 2048, 256), (2, 65, 128, 128), (4, 9, 64, 256),
        (1, 33, 576, 576), (1, 8192, 32, 32), (3, 70, 80, 80), (6, 5, 48, 96), (2, 12, 512, 1024),
    ],
)  # fmt: skip
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_engines_agree_on_shapes(shape: tuple[int, int, int, int], outlier: float) -> None:
    s, t, c, n = shape
    # Steps that go with outliers; level 2 is a ninth of them.
    arrays = make_transform(s, c, n, outlier=outlier, coarsest_step=max(1.0, outlier / 20))
    planes = make_planes("bf16", s, t, c, 1, outlier)
    found = both(planes, "bf16", arrays, 2, raw_tokens=4)
    assert found.raw.index.size < 0.01 * arrays.num_blocks * t + 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_those_of_the_step(dtype: str) -> None:
    """In the transformed space an error is half a step, so in ours it is as long."""
    arrays = make_transform(2, 64, 64, live=1.0, recon=False)
    planes = make_planes(dtype, 2, 100, 64, 5)
    x = decode_words(planes, dtype)
    for level in range(arrays.num_levels):
        found = both(planes, dtype, arrays, level)
        out = np.zeros_like(planes)
        kvquant.dequantise(found.tiles, dtype, arrays, level, out, raw=found.raw)
        error = float(np.sqrt(np.square(decode_words(out, dtype) - x).mean()))
        coarse = {"fp8_e4m3": 2.0**-5, "fp8_e5m2": 2.0**-4, "bf16": 2.0**-9}.get(dtype, 0.0)
        own = coarse * float(np.sqrt(np.square(x).mean()))
        assert error <= 1.3 * 3.0**-level / np.sqrt(12) + own + 0.01


def test_rows_that_do_not_fit_are_kept() -> None:
    planes = make_planes("bf16", 2, 20, 32, 5)
    arrays = make_transform(2, 32, 16)
    planes[0, 3, 17] = 0x7F80  # infinity
    planes[1, 4, 0] = 0xFFC1  # NaN
    planes[1, 5, 31] = 0x7E00  # huge
    planes[0, 0, 0] = 0x7F81  # a NaN in a sink
    found = both(planes, "bf16", arrays, 3, raw_tokens=1)
    assert found.raw.index.tolist() == [1 * 20 + 3, 2 * 20 + 4, 3 * 20 + 5]
    out = np.zeros_like(planes)
    kvquant.dequantise(found.tiles, "bf16", arrays, 3, out, raw=found.raw)
    assert np.array_equal(out[:, 0], planes[:, 0])
    assert np.array_equal(out[0, 3, 16:], planes[0, 3, 16:])
    assert np.array_equal(out[1, 4, :16], planes[1, 4, :16])
    assert np.array_equal(out[1, 5, 16:], planes[1, 5, 16:])
    flat = found.tiles.transpose(1, 0, 2).reshape(20, -1)
    starts = arrays.layout(3).starts
    assert not flat[3, starts[1] : starts[2]].any()
    assert flat[3, starts[0] : starts[1]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_channels_and_zero_rows(dtype: str) -> None:
    values = np.zeros((2, 40, 24), np.float32)
    values[0, :, :12] = 1.5
    planes = encode_words(values, dtype)
    planes[1, 7] = 0
    arrays = make_transform(2, 24, 12, planes=planes, dtype=dtype)
    found = both(planes, dtype, arrays, 3)
    out = np.ones_like(planes)
    kvquant.dequantise(found.tiles, dtype, arrays, 3, out, raw=found.raw)
    assert np.array_equal(decode_words(out, dtype), values)


def test_any_bits_in_any_order_of_threads() -> None:
    arrays = make_transform(4, 64, 64)
    planes = random_words(np.random.default_rng(3), "bf16", (4, 100, 64), 3.0)

    def work(_: int) -> tuple[Any, Any]:
        found = kvquant.quantise(planes, "bf16", arrays, 2)
        out = np.empty_like(planes)
        kvquant.dequantise(found.tiles, "bf16", arrays, 2, out, raw=found.raw)
        return found.tiles, out

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    for tiles, out in results[1:]:
        assert np.array_equal(tiles, results[0][0])
        assert np.array_equal(out, results[0][1])


def test_nothing_is_written_outside() -> None:
    arrays = make_transform(2, 40, 20)
    for num_tokens in (1, 5, 64, 67):
        planes = make_planes("bf16", 2, num_tokens, 40, 1)
        found = kvquant.quantise(planes, "bf16", arrays, 1)
        buffer = np.full(planes.size + 128, 0xABCD, np.uint16)
        out = buffer[64:-64].reshape(planes.shape)
        kvquant.dequantise(found.tiles, "bf16", arrays, 1, out, raw=found.raw)
        assert (buffer[:64] == 0xABCD).all()
        assert (buffer[-64:] == 0xABCD).all()


def test_a_large_sum_is_rounded_once() -> None:
    """A sum beyond 2^24 goes to fp32 from its exact value, ties to even."""
    one = np.ones((1, 1), np.float32)
    for inverse, q in ((2**22 + 1, 1), (2**22 + 3, 1), (2**21 + 1, 3), (2**30 - 1, 5)):
        arrays = TransformArrays(
            num_planes=1, num_channels=1, block_channels=1, num_levels=1,
            grid_exp=np.zeros((1, 1), np.int8), mean=np.zeros((1, 1), np.int32),
            forward=np.ones((1, 1, 1), np.int32), inverse=np.full((1, 1, 1), inverse, np.int32),
            inv_step=np.ones((1, 1, 1)), recon_shift=np.zeros((1, 1, 1), np.uint8),
            mean_f32=one * 0, out_scale=one[None], num_live=np.ones((1, 1), np.int32),
            classes=np.zeros((1, 1, 1), np.uint16), refine_classes=np.zeros((1, 1, 1), np.uint16),
            radius=np.zeros(1, np.uint8),
        )  # fmt: skip
        tiles = np.zeros((1, 1, 32), np.int16)
        tiles[0, 0, 0] = q
        exact = oracle.nearest_word(Fraction(8 * q * inverse), "fp32")
        for engine in ("numba", "naive"):
            out = np.zeros((1, 1, 1), np.uint32)
            kvquant.dequantise(tiles, "fp32", arrays, 0, out, engine=engine)
            assert int(out[0, 0, 0]) == exact
