"""`cachegen-released`: its bytes decode to what its quantiser says, at the size it should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.codec import CodecError, create_codec, kv_dtype
from sglang_ext.codec.base import PlaneArray
from sglang_ext.codec.cachegen.released import CachegenReleasedCodec, bins_of
from sglang_ext.codec.float_bits import from_float32, to_float32
from tests.unit.codec.cachegen_cases import (
    DTYPES,
    awkward_planes,
    check_refusals,
    check_resealed_damage,
    decoded,
    make_planes,
)


def make_codec(dtype: str = "bf16", **options: Any) -> CachegenReleasedCodec:
    codec = create_codec("cachegen-released", dtype=dtype, **options)
    assert isinstance(codec, CachegenReleasedCodec)
    return codec


def simulate(planes: PlaneArray, dtype: str, bins: list[int]) -> PlaneArray:
    """The quantiser alone, as plainly as it can be said."""
    out = planes.copy()
    for plane, num_bins in enumerate(bins):
        middle = np.float64(num_bins // 2 - 1)
        for token, row in enumerate(to_float32(planes[plane], dtype)):
            if not np.isfinite(row).all():
                continue
            scale = np.abs(row).max()
            if scale == 0:
                out[plane, token] = 0
                continue
            q = np.rint(row.astype(np.float64) * middle / np.float64(scale) + middle) - middle
            back = q.astype(np.float32) / np.float32(middle) * scale
            out[plane, token] = from_float32(back, dtype)
    return out


def test_bins_are_the_pinned_ones_on_eight_layers() -> None:
    k, v = slice(0, None, 2), slice(1, None, 2)
    low, middle, high = (bins_of(level, 16) for level in range(3))
    assert low[k].tolist() == [16] * 3 + [12] * 5
    assert low[v].tolist() == [16] * 2 + [12] * 6
    assert middle[k].tolist() == [32] * 3 + [16] * 5
    assert middle[v].tolist() == [32] * 2 + [16] * 6
    assert high.tolist() == [32] * 16


def test_bins_of_any_number_of_layers() -> None:
    assert bins_of(0, 2).tolist() == [16, 16]
    assert bins_of(1, 64)[0::2].tolist() == [32] * 11 + [16] * 21
    assert bins_of(0, 5, planes_per_layer=1).tolist() == [16, 16, 12, 12, 12]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    num_planes=st.sampled_from([2, 4, 10]),
    num_tokens=st.sampled_from([1, 2, 9, 64, 255, 256, 257, 520]),
    num_channels=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    level=st.integers(0, 2),
)
def test_bytes_decode_to_the_simulated_values(
    seed: int, num_planes: int, num_tokens: int, num_channels: int, dtype: str, level: int
) -> None:
    planes = make_planes(seed, num_planes, num_tokens, num_channels, dtype)
    codec = make_codec(dtype)
    expected = simulate(planes, dtype, bins_of(level, num_planes).tolist())
    assert np.array_equal(decoded(codec, codec.encode(planes, level=level), planes), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_nan_and_infinity(dtype: str) -> None:
    planes, bad = awkward_planes(dtype)
    codec = make_codec(dtype)
    back = decoded(codec, codec.encode(planes), planes)
    assert np.array_equal(back[bad], planes[bad])
    assert np.array_equal(back, simulate(planes, dtype, bins_of(1, 4).tolist()))


def test_largest_values_of_fp32_do_not_overflow() -> None:
    planes = from_float32(np.array([[[3.4e38, -3.4e38, 1.0]]] * 2, np.float32), "fp32")
    codec = make_codec("fp32")
    back = decoded(codec, codec.encode(planes, level=2), planes)
    assert np.array_equal(back[:, :, :2], planes[:, :, :2])
    assert (to_float32(back, "fp32")[:, :, 2] == 0).all()


def test_engines_write_the_same_bytes() -> None:
    planes = make_planes(2, 2, 300, 3)
    numba, naive = make_codec(), make_codec(engine="naive")
    data = numba.encode(planes)
    assert naive.encode(planes) == data
    assert np.array_equal(decoded(naive, data, planes), decoded(numba, data, planes))


@pytest.mark.parametrize("num_tokens", [256, 1500])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_size_is_the_entropy_and_the_side_information(num_tokens: int, level: int) -> None:
    """Tables 66 bytes and lengths 2 a piece for each stream, a scale for each row."""
    planes = make_planes(4, 8, num_tokens, 32)
    codec = make_codec()
    symbols, _, _ = codec.quantise(planes, level)
    bits = 0.0
    for stream in symbols.reshape(-1, num_tokens):
        shares = np.bincount(stream) / num_tokens
        bits -= num_tokens * float(np.sum(shares * np.log2(np.where(shares > 0, shares, 1))))
    streams, pieces = 8 * 32, -(-num_tokens // 256)
    side_bytes = streams * (66 + 2 * pieces) + 8 * num_tokens * 2
    num_bytes = len(codec.encode(planes, level=level))
    assert bits / 8 + side_bytes < num_bytes < 1.03 * (bits / 8 + side_bytes)


def test_damage_is_refused() -> None:
    planes = make_planes(6, 2, 40, 5)
    codec = make_codec()
    check_refusals(codec, create_codec("none", dtype="bf16"), codec.encode(planes), planes.shape)


def test_damage_under_a_good_checksum_stays_inside() -> None:
    planes, _ = awkward_planes("bf16")
    codec = make_codec()
    check_resealed_damage(codec, codec.encode(planes), planes.shape)


def test_more_tokens_than_counts_can_count_are_refused() -> None:
    codec = CachegenReleasedCodec(kv_dtype("bf16"))
    with pytest.raises(CodecError, match="65535"):
        codec.encode(np.zeros((2, 65536, 1), np.uint16))


def test_options_are_checked() -> None:
    bad: list[dict[str, Any]] = [{"engine": "triton"}, {"planes_per_layer": 3}]
    for options in bad:
        with pytest.raises(CodecError):
            make_codec(**options)
    with pytest.raises(CodecError, match="whole layers"):
        make_codec().encode(np.zeros((3, 2, 1), np.uint16))
