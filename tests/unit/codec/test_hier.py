"""The codec `hier` on profiles made up for the tests: layers, levels, raw rows, engines, damage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.codec import CodecError, create_codec
from sglang_ext.codec.base import Codec, PlaneArray
from sglang_ext.codec.container import Section, read_header, write_chunk
from sglang_ext.codec.float_bits import to_float32
from sglang_ext.codec.hier.profile import Profile
from tests.unit.codec.codec_cases import ALL_DTYPES, make_planes, make_profile, random_bits

_BASE_KIND, _REFINEMENT_KIND = 2, 3


@cache
def _profile(shape: tuple[int, int, int] = (4, 64, 32), raw_tokens: int = 0) -> Profile:
    return make_profile(*shape, raw_tokens=raw_tokens)


def _codec(profile: Profile | None = None, dtype: str = "bf16", engine: str = "numba") -> Codec:
    return create_codec("hier", dtype=dtype, profile=profile or _profile(), engine=engine)


def _decoded(codec: Codec, data: bytes, like: PlaneArray, level: int | None = None) -> PlaneArray:
    out = np.full_like(like, 5)
    codec.decode(data, out, level=level)
    return out


def _error(a: PlaneArray, b: PlaneArray, dtype: str = "bf16") -> float:
    x, y = to_float32(a, dtype).astype(np.float64), to_float32(b, dtype).astype(np.float64)
    return float(np.sqrt(((x - y) ** 2).mean() / x.var()))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_finer_levels_cost_more_and_err_less(dtype: str) -> None:
    planes = make_planes(4, 64, 64, dtype)
    codec = _codec(dtype=dtype)
    streams = [codec.encode(planes, level=level) for level in range(3)]
    assert [read_header(data).last_level for data in streams] == [0, 1, 2]
    assert len(streams[0]) < len(streams[1]) < len(streams[2]) < planes.nbytes
    errors = [_error(planes, _decoded(codec, data, planes), dtype) for data in streams]
    assert errors[0] < 0.5
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < errors[1] if "fp8" in dtype else errors[2] < 0.7 * errors[1]


def test_one_stream_serves_all_its_levels() -> None:
    planes = make_planes(4, 50, 64)
    codec = _codec()
    data = codec.encode(planes, level=0, last_level=2)
    header = read_header(data)
    assert (header.first_level, header.last_level) == (0, 2)
    errors = []
    for level in range(3):
        whole = _decoded(codec, data, planes, level)
        prefix = data[: header.prefix_bytes(level)]
        assert np.array_equal(_decoded(codec, prefix, planes), whole)
        assert np.array_equal(_decoded(codec, prefix + data[len(prefix) :][:7], planes), whole)
        if level < 2:
            with pytest.raises(CodecError, match=f"not enough for level {level + 1}"):
                _decoded(codec, prefix, planes, level + 1)
        with pytest.raises(CodecError):
            _decoded(codec, prefix[:-1], planes, level)
        errors.append(_error(planes, whole))
    assert errors == sorted(errors, reverse=True)
    single = codec.encode(planes, level=0)
    assert _error(planes, _decoded(codec, single, planes)) < 1.05 * errors[0]


def test_a_refinement_is_worth_its_base_only() -> None:
    planes = make_planes(4, 20, 64)
    codec = _codec()
    data = codec.encode(planes, level=1, last_level=2)
    with pytest.raises(CodecError, match="levels 1 to 2"):
        _decoded(codec, data, planes, 0)
    header = read_header(data)
    *_, base, finer = (Section(e.kind, e.level, data[e.start : e.end]) for e in header.sections)
    other = codec.encode(make_planes(4, 20, 64, seed=9), level=1, last_level=2)
    entry = read_header(other).sections[-1]
    for sections in ([base], [base, base, finer], [base, Section(3, 2, other[entry.start :])]):
        with pytest.raises(CodecError):
            _decoded(
                codec,
                write_chunk("hier", header.dtype, header.shape, sections, first_level=1,
                            last_level=2, profile_digest=header.profile_digest),
                planes,
                2,
            )  # fmt: skip


@pytest.mark.parametrize("raw_tokens", [0, 1, 5, 100])
def test_first_tokens_are_kept_exactly(raw_tokens: int) -> None:
    planes = make_planes(4, 12, 64)
    codec = _codec()
    out = _decoded(codec, codec.encode(planes, level=0, raw_tokens=raw_tokens), planes)
    assert np.array_equal(out[:, :raw_tokens], planes[:, :raw_tokens])
    assert (out[:, raw_tokens:] != planes[:, raw_tokens:]).any() == (raw_tokens < 12)
    if raw_tokens == 5:
        by_profile = create_codec("hier", dtype="bf16", profile=_profile(raw_tokens=5))
        again = _decoded(by_profile, by_profile.encode(planes, level=0), planes)
        assert np.array_equal(again, out)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_rows_that_cannot_be_quantised_are_kept_exactly(dtype: str) -> None:
    planes = make_planes(4, 20, 64, dtype)
    wild = random_bits(dtype, (4, 3, 64), seed=4)
    planes[:, 10:13] = wild
    planes[1, 3, 5] = planes.dtype.type({1: 0x7F, 2: 0x7FC0, 4: 0x7FC00001}[planes.itemsize])
    if dtype == "fp16":
        planes[1, 3, 5] = 0x7E01
    codec = _codec(dtype=dtype)
    for level in range(3):
        out = _decoded(codec, codec.encode(planes, level=0, last_level=2), planes, level)
        finite = np.isfinite(to_float32(planes, dtype)).reshape(4, 20, 2, 32).all(3)
        assert not finite.all()
        kept = out.reshape(4, 20, 2, 32)[~finite]
        assert np.array_equal(kept, planes.reshape(4, 20, 2, 32)[~finite])
        assert np.isfinite(to_float32(out, dtype).reshape(4, 20, 2, 32)[finite]).all()


@pytest.mark.parametrize(
    ("shape", "num_tokens", "block"),
    [
        ((4, 64), 1, 32),
        ((2, 32), 8192, 16),
        ((2, 64 * 16), 33, 16),
        ((2, 256), 70, 256),
        ((2, 256), 70, 64),
        ((3, 576), 40, 64),
        ((2, 576), 9, 576),
        ((4, 32), 65, 64),
        ((2, 16), 300, 16),
        ((8, 128), 256, 128),
    ],
)
def test_shapes(shape: tuple[int, int], num_tokens: int, block: int) -> None:
    codec = _codec(_profile((*shape, block)))
    planes = make_planes(shape[0], num_tokens, shape[1])
    planes[:, num_tokens // 2 + 1 :: 7] = 0
    planes[0, :, 3] = 0x3F80
    data = codec.encode(planes, level=0, last_level=2)
    layered = [_error(planes, _decoded(codec, data, planes, level)) for level in range(3)]
    # The finest level may make rows raw whose coarse form would do without.
    assert layered[2] <= layered[0] < 0.6
    streams = [codec.encode(planes, level=level) for level in range(3)]
    errors = [_error(planes, _decoded(codec, data, planes)) for data in streams]
    assert errors[2] < errors[0] < 0.6


@settings(max_examples=40)
@given(
    st.sampled_from([(4, 64, 32), (2, 16, 16), (3, 48, 48), (2, 32, 64)]),
    st.integers(1, 130),
    st.sampled_from(ALL_DTYPES),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(0, 2**32),
)
def test_engines_make_and_read_the_same(
    shape: tuple[int, int, int],
    num_tokens: int,
    dtype: str,
    first: int,
    more: int,
    raw_tokens: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    planes = make_planes(shape[0], num_tokens, shape[1], dtype, seed)
    planes[rng.random(planes.shape[:2]) < 0.1] = random_bits(dtype, (shape[1],), seed)
    last = min(first + more, 2)
    numba, naive = (_codec(_profile(shape), dtype, engine) for engine in ("numba", "naive"))
    data = numba.encode(planes, level=first, last_level=last, raw_tokens=raw_tokens)
    assert naive.encode(planes, level=first, last_level=last, raw_tokens=raw_tokens) == data
    for level in range(first, last + 1):
        out = _decoded(numba, data, planes, level)
        assert np.array_equal(_decoded(naive, data, planes, level), out)
        assert np.array_equal(out[:, :raw_tokens], planes[:, :raw_tokens])


@pytest.mark.gpu
def test_triton_makes_and_reads_the_same() -> None:
    planes = make_planes(4, 200, 64)
    triton, numba = _codec(engine="triton"), _codec()
    data = triton.encode(planes, level=0, last_level=2, raw_tokens=4)
    assert data == numba.encode(planes, level=0, last_level=2, raw_tokens=4)
    for level in range(3):
        out = _decoded(triton, data, planes, level)
        assert np.array_equal(out, _decoded(numba, data, planes, level))


def test_every_thread_gets_the_same() -> None:
    planes = make_planes(4, 200, 64)
    codec = _codec()
    data = codec.encode(planes, level=0, last_level=2, raw_tokens=3)
    expected = _decoded(codec, data, planes)

    def run(_: int) -> bool:
        again = codec.encode(planes, level=0, last_level=2, raw_tokens=3)
        return again == data and np.array_equal(_decoded(codec, data, planes), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(16)))


def test_a_dead_zone_makes_streams_smaller() -> None:
    planes = make_planes(4, 200, 64)
    plain = _codec().encode(planes, level=0)
    codec = create_codec("hier", dtype="bf16", profile=_profile(), rounding=0.35)
    dead = codec.encode(planes, level=0)
    assert len(dead) < len(plain)
    assert np.array_equal(_decoded(codec, dead, planes), _decoded(_codec(), dead, planes))
    # Layers need exact thirds; the dead zone is left out there.
    layered = codec.encode(planes, level=0, last_level=1)
    assert layered == _codec().encode(planes, level=0, last_level=1)


def test_another_profile_is_refused() -> None:
    planes = make_planes(4, 20, 64)
    data = _codec().encode(planes)
    other = _codec(make_profile(4, 64, 32, seed=3))
    with pytest.raises(CodecError, match="with profile"):
        _decoded(other, data, planes)
    # The text of a profile is no part of it.
    same = make_profile(4, 64, 32)
    object.__setattr__(same, "source", "elsewhere")
    assert np.array_equal(_decoded(_codec(same), data, planes), _decoded(_codec(), data, planes))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "needs the model's profile, got NoneType"),
        ({"profile": "x.hkp"}, "needs the model's profile, got str"),
        ({"profile": 1, "engine": "cuda"}, "engines are numba"),
        ({"profile": 1, "rounding": 0.7}, "rounding is 0 to 0.5"),
    ],
)
def test_options_are_checked(options: dict[str, Any], match: str) -> None:
    if options.get("profile") == 1:
        options = options | {"profile": _profile()}
    with pytest.raises(CodecError, match=match):
        create_codec("hier", dtype="bf16", **options)


def test_chunks_of_another_model_are_refused() -> None:
    codec = _codec()
    for shape in ((2, 20, 64), (4, 20, 32)):
        with pytest.raises(CodecError, match="the profile is for 4 planes of 64 channels"):
            codec.encode(make_planes(*shape))
        with pytest.raises(CodecError, match="the profile is for"):
            codec.decode(codec.encode(make_planes(4, 20, 64)), make_planes(*shape))


def test_an_array_between_words_is_refused_and_not_left_as_it_was() -> None:
    codec, planes = _codec(), make_planes(4, 20, 64)
    out = np.full(planes.nbytes + 1, 5, np.uint8)[1:].view(planes.dtype).reshape(planes.shape)
    assert not out.flags.aligned
    with pytest.raises(CodecError, match="aligned"):
        codec.decode(codec.encode(planes), out)


def test_damage_behind_right_checksums_is_found_or_harmless() -> None:
    codec = _codec()
    planes = make_planes(4, 30, 64)
    planes[1, 4, 2] = 0x7FC0
    data = codec.encode(planes, level=0, last_level=2, raw_tokens=2)
    header = read_header(data)
    refused = 0
    for index, entry in enumerate(header.sections):
        for at in range(entry.start, entry.end, max(1, (entry.end - entry.start) // 40)):
            sections = [Section(e.kind, e.level, data[e.start : e.end]) for e in header.sections]
            part = bytearray(sections[index].data)
            part[at - entry.start] ^= 0x10
            sections[index] = Section(entry.kind, entry.level, part)
            bad = write_chunk("hier", header.dtype, header.shape, sections, last_level=2,
                              profile_digest=header.profile_digest)  # fmt: skip
            try:
                _decoded(codec, bad, planes)
            except CodecError:
                refused += 1
    assert refused > 100
