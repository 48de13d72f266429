"""The codec `lossless`: bit-exact whatever the bits, and small where values are alike."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.codec import DTYPES, CodecError, create_codec
from sglang_ext.codec.base import PlaneArray
from sglang_ext.codec.container import Section, read_header, write_chunk
from sglang_ext.codec.float_bits import from_float32
from sglang_ext.codec.lossless.tables import NUM_TABLES, table_freqs
from tests.unit.codec.codec_cases import ALL_DTYPES, make_planes, random_bits, special_planes

_RAW_KIND = 1


def _round_trip(planes: PlaneArray, dtype: str) -> bytes:
    codec = create_codec("lossless", dtype=dtype)
    before = planes.copy()
    data = codec.encode(planes)
    out = np.full_like(planes, 77)
    codec.decode(data, out)
    assert np.array_equal(out, planes)
    assert np.array_equal(before, planes)
    return data


def _is_raw(data: bytes) -> bool:
    return read_header(data).sections[0].kind == _RAW_KIND


@pytest.mark.parametrize("order", ["rising", "shuffled", "beside others", "one to a channel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_all_patterns_of_two_bytes(dtype: str, order: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    if order == "shuffled":
        patterns = np.random.default_rng(1).permutation(patterns)
    planes = patterns.reshape(2, 512, 64)
    if order == "beside others":
        planes = np.concatenate((planes, make_planes(2, 512, 512, dtype)), 2)
    if order == "one to a channel":
        planes = np.broadcast_to(patterns.reshape(8, 1, 8192), (8, 16, 8192)).copy()
        planes[:, 3] = 0x3C00
    data = _round_trip(planes, dtype)
    # All the patterns with nothing else cannot be made smaller; the others must be coded.
    assert _is_raw(data) == (order in ("rising", "shuffled"))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_all_patterns_of_one_byte(dtype: str) -> None:
    patterns = np.tile(np.arange(256, dtype=np.uint8), 32).reshape(1, 512, 16)
    ordinary = make_planes(1, 512, 128, dtype)
    data = _round_trip(np.concatenate((patterns, ordinary), 2), dtype)
    assert not _is_raw(data)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_special_values_and_rows(dtype: str) -> None:
    planes = special_planes(dtype)
    data = _round_trip(planes, dtype)
    assert not _is_raw(data)
    assert len(data) < planes.nbytes
    _round_trip(random_bits(dtype, (2, 33, 40)), dtype)


@settings(max_examples=60)
@given(
    st.sampled_from(ALL_DTYPES),
    st.tuples(st.integers(1, 4), st.integers(1, 70), st.integers(1, 70)),
    st.integers(0, 2**32),
    st.floats(-30, 30),
    st.floats(-20, 20),
)
def test_any_spread_and_mean(
    dtype: str, shape: tuple[int, int, int], seed: int, mean_bits: float, spread_bits: float
) -> None:
    rng = np.random.default_rng(seed)
    mean = 2.0**mean_bits * rng.standard_normal(shape[2])
    values = mean + 2.0**spread_bits * rng.standard_normal(shape)
    planes = from_float32(values.astype(np.float32), dtype)
    if seed % 3 == 0:  # a few of any kind, and rows that come again
        planes[rng.random(shape) < 0.05] = random_bits(dtype, (1,), seed)[0]
        planes[:, shape[1] // 2 :] = planes[:, : shape[1] - shape[1] // 2]
    _round_trip(planes, dtype)


@pytest.mark.parametrize(
    "shape",
    [(2, 1, 16), (2, 1, 1), (1, 8192, 16), (4, 64, 64 * 16), (2, 5, 16 * 256), (27, 64, 576)],
)
def test_shapes(shape: tuple[int, int, int]) -> None:
    planes = make_planes(*shape)
    data = _round_trip(planes, "bf16")
    if planes.size > 1000:
        assert len(data) < 0.8 * planes.nbytes


def test_constant_chunks_cost_almost_nothing() -> None:
    for value in (0, 0x8000, 0x3F80, 0x7FC1):
        planes = np.full((4, 300, 64), value, np.uint16)
        assert len(_round_trip(planes, "bf16")) < 0.01 * planes.nbytes


def test_constant_channels_cost_almost_nothing() -> None:
    planes = make_planes(2, 300, 64)
    alone = len(_round_trip(planes, "bf16"))
    wider = np.concatenate((planes, np.full_like(planes, 0x4049)), 2)
    assert len(_round_trip(wider, "bf16")) < alone + 0.01 * planes.nbytes


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_size_is_near_the_entropy_of_a_gaussian(dtype: str) -> None:
    rng = np.random.default_rng(3)
    mean = np.where(np.arange(128) % 2, 0, 4.0)
    values = (mean + rng.standard_normal((4, 1000, 128))).astype(np.float32)
    planes = from_float32(values, dtype)
    ulp = np.exp2(np.floor(np.log2(np.abs(values))) - DTYPES[dtype].mantissa_bits)
    density = np.exp(-((values - mean) ** 2) / 2) / np.sqrt(2 * np.pi)
    ideal = -np.log2(density * ulp).sum() / 8
    assert len(_round_trip(planes, dtype)) < 1.02 * ideal + 1000


def test_same_token_again_costs_little() -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 400)
    vectors = np.random.default_rng(1).standard_normal((4, 40, 128)).astype(np.float32)
    values = np.ascontiguousarray(vectors[:, tokens])
    noise = np.random.default_rng(2).standard_normal(values.shape).astype(np.float32)
    values[2:] += np.array([0.01, 0.1], np.float32)[:, None, None] * noise[2:]
    planes = from_float32(values, "bf16")
    shuffled = values[:, np.random.default_rng(4).permutation(400)]
    shuffled += np.random.default_rng(5).standard_normal(values.shape).astype(np.float32)
    # Planes 0 and 1 come for nothing, and the others differ only in their last bits.
    new = from_float32(np.ascontiguousarray(shuffled), "bf16")
    assert len(_round_trip(planes, "bf16")) < 0.45 * len(_round_trip(new, "bf16"))


def test_every_thread_and_engine_gets_the_same() -> None:
    planes = special_planes("bf16", (4, 130, 96))
    numba, naive = (create_codec("lossless", dtype="bf16", engine=e) for e in ("numba", "naive"))
    data = numba.encode(planes)
    assert naive.encode(planes) == data

    def run(_: int) -> tuple[bytes, PlaneArray]:
        out = np.zeros_like(planes)
        numba.decode(data, out)
        return numba.encode(planes), out

    with ThreadPoolExecutor(4) as pool:
        for again, out in pool.map(run, range(16)):
            assert again == data
            assert np.array_equal(out, planes)
    out = np.zeros_like(planes)
    naive.decode(data, out)
    assert np.array_equal(out, planes)


def test_damage_behind_right_checksums_is_found_or_harmless() -> None:
    codec = create_codec("lossless", dtype="bf16")
    planes = special_planes("bf16")
    header = read_header(data := codec.encode(planes))
    refused = 0
    for index, entry in enumerate(header.sections):
        for at in range(entry.start, entry.end, max(1, (entry.end - entry.start) // 40)):
            sections = [Section(e.kind, 0, data[e.start : e.end]) for e in header.sections]
            part = bytearray(sections[index].data)
            part[at - entry.start] ^= 0x10
            sections[index] = Section(entry.kind, 0, part)
            try:
                codec.decode(
                    write_chunk("lossless", header.dtype, header.shape, sections),
                    np.zeros_like(planes),
                )
            except CodecError:
                refused += 1
    assert refused > 100


def test_tables_are_what_they_were() -> None:
    freqs = table_freqs()
    assert freqs.shape == (NUM_TABLES, 256)
    assert (freqs.sum(1) == 4096).all()
    assert hashlib.sha256(freqs.astype("<u2").tobytes()).hexdigest() == TABLES_SHA256


# A change makes every stored chunk unreadable: it needs a new section kind.
TABLES_SHA256 = "5081794598eafb9218ac8967ea87cd0ecdb3c695ec80e3a9baf137234ec4ae8c"
