"""`cachegen-paper`: its bytes decode to what its quantiser says, at the size it should have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.codec.ideal_bits import arithmetic_bits
from sglang_ext.codec import CodecError, create_codec
from sglang_ext.codec.base import PlaneArray
from sglang_ext.codec.cachegen.paper import CachegenPaperCodec
from sglang_ext.codec.cachegen.tables import FACTORS, PaperTables, measure_tables
from sglang_ext.codec.float_bits import from_float32, to_float32
from tests.unit.codec.cachegen_cases import (
    DTYPES,
    awkward_planes,
    check_refusals,
    check_resealed_damage,
    decoded,
    make_planes,
    make_values,
)


def make_codec(
    tables: PaperTables, dtype: str = "bf16", engine: str = "numba"
) -> CachegenPaperCodec:
    codec = create_codec("cachegen-paper", dtype=dtype, profile=tables, engine=engine)
    assert isinstance(codec, CachegenPaperCodec)
    return codec


def tables_of(planes: PlaneArray, dtype: str = "bf16") -> PaperTables:
    return measure_tables([planes], dtype)


def simulate(planes: PlaneArray, dtype: str, steps: list[float]) -> PlaneArray:
    """The quantiser alone, as plainly as it can be said."""
    out = planes.copy()
    for plane, step in enumerate(steps):
        rows = to_float32(planes[plane], dtype)
        finite = [bool(np.isfinite(row).all()) for row in rows]
        anchor = np.zeros(rows.shape[1], np.float32)
        for token, row in enumerate(rows):
            if token % 10 == 0:
                row = row if finite[token] else np.zeros_like(row)
                size = np.abs(row).max()
                q = np.rint(row.astype(np.float64) * 127 / (size or 1)) + 0.0  # no -0
                back = anchor = q.astype(np.float32) / np.float32(127) * size
            else:
                q = np.rint((row.astype(np.float64) - anchor) / step) + 0.0
                back = q.astype(np.float32) * np.float32(step) + anchor
            if finite[token]:
                out[plane, token] = from_float32(back, dtype)
    return out


def test_steps_are_the_pinned_ones() -> None:
    planes = make_planes(1, 16, 200, 4)
    tables = tables_of(planes)
    values = to_float32(planes, "bf16").astype(np.float64)
    for plane in range(16):
        anchors = values[plane, ::10].repeat(10, axis=0)
        deltas = (values[plane] - anchors)[np.arange(200) % 10 != 0]
        # Anchors are decoded ones there and exact ones here.
        assert tables.deviations[plane] == pytest.approx(deltas.std(), rel=0.01)
    bins = np.repeat([0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 1.5], 2)
    for level, factor in enumerate((1.0, 0.5, 0.25)):
        assert FACTORS[level] == factor
        assert tables.steps(level) == pytest.approx(bins * factor * tables.deviations)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    num_planes=st.sampled_from([2, 6]),
    num_tokens=st.sampled_from([1, 2, 9, 10, 11, 64, 131]),
    num_channels=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    level=st.integers(0, 2),
)
def test_bytes_decode_to_the_simulated_values(
    seed: int, num_planes: int, num_tokens: int, num_channels: int, dtype: str, level: int
) -> None:
    tables = tables_of(make_planes(seed + 1, num_planes, 50, num_channels, dtype), dtype)
    planes = make_planes(seed, num_planes, num_tokens, num_channels, dtype)
    codec = make_codec(tables, dtype)
    back = decoded(codec, codec.encode(planes, level=level), planes)
    assert np.array_equal(back, simulate(planes, dtype, tables.steps(level).tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_nan_and_infinity(dtype: str) -> None:
    planes, bad = awkward_planes(dtype)
    tables = tables_of(make_planes(6, 4, 60, 6, dtype), dtype)
    codec = make_codec(tables, dtype)
    back = decoded(codec, codec.encode(planes), planes)
    assert np.array_equal(back[bad], planes[bad])
    assert np.array_equal(back, simulate(planes, dtype, tables.steps(1).tolist()))


def test_values_far_outside_the_tables_are_escapes() -> None:
    tables = tables_of(make_planes(1, 2, 100, 4))
    values = make_values(2, 2, 25, 4)
    values[:, 5, 1] = 30000.0
    values[1, 10, 2] = -900.0
    planes = from_float32(values, "bf16")
    codec = make_codec(tables)
    back = decoded(codec, codec.encode(planes, level=2), planes)
    assert np.array_equal(back, simulate(planes, "bf16", tables.steps(2).tolist()))


def test_quotients_beyond_32_bits_are_limited_not_wrapped() -> None:
    tables = tables_of(from_float32(make_values(1, 2, 60, 2) * np.float32(1e-25), "fp32"), "fp32")
    planes = from_float32(np.full((2, 3, 2), 3.0e38, np.float32), "fp32")
    planes[:, 0] = 0
    codec = make_codec(tables, "fp32")
    back = to_float32(decoded(codec, codec.encode(planes), planes), "fp32")
    assert (back[:, 1:] > 0).all()
    assert np.isfinite(back).all()


def test_constant_planes_need_no_special_tables() -> None:
    planes = from_float32(np.full((2, 30, 3), 1.5, np.float32), "bf16")
    codec = make_codec(tables_of(planes))
    assert np.array_equal(decoded(codec, codec.encode(planes), planes), planes)


def test_engines_write_the_same_bytes() -> None:
    planes = make_planes(2, 2, 35, 3)
    tables = tables_of(planes)
    numba, naive = make_codec(tables), make_codec(tables, engine="naive")
    data = numba.encode(planes)
    assert naive.encode(planes) == data
    assert np.array_equal(decoded(naive, data, planes), decoded(numba, data, planes))


@pytest.mark.parametrize("num_tokens", [256, 1500])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_size_is_the_entropy_and_the_side_information(num_tokens: int, level: int) -> None:
    """A size for each anchor, 2 bytes for each stream, 8 for each escape; others' tables."""
    tables = tables_of(make_planes(4, 8, 3000, 32)[:, 1500:].copy())
    planes = make_planes(4, 8, num_tokens, 32)
    codec = make_codec(tables)
    quotients, _, _ = codec.quantise(planes, level)
    anchors = np.arange(num_tokens) % 10 == 0
    beyond = (np.abs(quotients) > 126) & ~anchors
    symbols = np.where(beyond, 253, np.where(anchors, quotients + 127, quotients + 126))
    numbers = np.arange(2 * 8 * 32, dtype=np.int32).reshape(-1, 2)
    bits = arithmetic_bits(
        symbols.reshape(-1, num_tokens).astype(np.uint8),
        tables.cdfs(level),
        numbers,
        (~anchors).astype(np.uint8),
    )
    side_bytes = 8 * -(-num_tokens // 10) * 2 + 8 * 32 * 2 + 8 * int(beyond.sum())
    num_bytes = len(codec.encode(planes, level=level))
    assert bits / 8 + side_bytes < num_bytes < 1.03 * (bits / 8 + side_bytes)


def test_damage_is_refused() -> None:
    planes = make_planes(6, 2, 40, 5)
    codec = make_codec(tables_of(planes))
    check_refusals(codec, create_codec("none", dtype="bf16"), codec.encode(planes), planes.shape)


def test_damage_under_a_good_checksum_stays_inside() -> None:
    planes, _ = awkward_planes("bf16")
    planes[1, 4, 2] = 0x7000  # an escape
    codec = make_codec(tables_of(make_planes(6, 4, 60, 6)))
    check_resealed_damage(codec, codec.encode(planes), planes.shape)


def test_streams_of_other_tables_and_other_models_are_refused() -> None:
    planes = make_planes(6, 2, 40, 5)
    codec, other = (make_codec(tables_of(make_planes(seed, 2, 60, 5))) for seed in (1, 2))
    with pytest.raises(CodecError, match="expected"):
        other.decode(codec.encode(planes), planes.copy())
    with pytest.raises(CodecError, match="tables are for"):
        codec.encode(make_planes(6, 2, 40, 6))
    with pytest.raises(CodecError, match="needs tables"):
        create_codec("cachegen-paper", dtype="bf16")


def test_a_file_of_tables_comes_back_and_damage_is_refused(tmp_path: Path) -> None:
    tables = tables_of(make_planes(6, 2, 40, 5))
    path = tmp_path / "model.hkct"
    tables.save(path)
    back = PaperTables.load(path)
    assert back.digest == tables.digest
    assert np.array_equal(back.delta_freqs, tables.delta_freqs)
    codec = create_codec("cachegen-paper", dtype="bf16", profile=path)
    planes = make_planes(7, 2, 12, 5)
    assert codec.encode(planes) == make_codec(tables).encode(planes)
    data = path.read_bytes()
    for at in range(0, len(data), 97):
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(CodecError):
            PaperTables.load(path)
    path.write_bytes(data[:11])
    with pytest.raises(CodecError):
        PaperTables.load(path)
