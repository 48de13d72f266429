"""Profiles: the file, what it refuses, the invariants; and the clustering of entropy tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.codec.base import CodecError
from sglang_ext.codec.calibration.calibrate import profile_from_planes
from sglang_ext.codec.calibration.entropy_tables import (
    base_tables,
    histograms,
    integer_freqs,
    refine_tables,
)
from sglang_ext.codec.calibration.hf_capture import float_to_bits
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.codec.profile_file import _HEAD
from sglang_ext.codec.registry import create_codec

TINYLM = Path(__file__).parents[2] / "assets" / "tinylm.hkp"


def changed(profile: Profile, **arrays: Any) -> Profile:
    return dataclasses.replace(profile, **arrays)


def edited(array: Any, index: Any, value: Any) -> Any:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.fixture(scope="module")
def bundled() -> Profile:
    return Profile.load(TINYLM)


@pytest.fixture(scope="module")
def stored() -> bytes:
    return TINYLM.read_bytes()


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    _, _, size = _HEAD.unpack_from(data)
    return msgpack.unpackb(data[_HEAD.size : _HEAD.size + size]), data[_HEAD.size + size : -8]


def sealed(header: Any, frame: bytes, version: int = 1) -> bytes:
    packed = msgpack.packb(header)
    body = _HEAD.pack(b"HKVP", version, len(packed)) + packed + frame
    return bytes(body + xxhash.xxh3_64_digest(body))


def test_the_bundled_profile_fits_the_bundled_model(bundled: Profile) -> None:
    assert (bundled.num_planes, bundled.num_channels, bundled.head_dim) == (16, 128, 64)
    assert bundled.num_levels >= 4
    assert 0 <= bundled.default_level <= bundled.max_base_level


def test_a_file_comes_back_whole(bundled: Profile, tmp_path: Path) -> None:
    bundled.save(tmp_path / "p.hkp")
    again = Profile.load(tmp_path / "p.hkp")
    assert [path.name for path in tmp_path.iterdir()] == ["p.hkp"]
    for field in dataclasses.fields(Profile):
        before, after = getattr(bundled, field.name), getattr(again, field.name)
        assert np.array_equal(before, after), field.name
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype, field.name
    assert again.digest == bundled.digest


def test_the_digest_names_the_numbers(bundled: Profile) -> None:
    assert changed(bundled, source="elsewhere").digest == bundled.digest
    assert changed(bundled, raw_tokens=bundled.raw_tokens + 1).digest != bundled.digest
    moved = edited(bundled.mean, (0, 0), bundled.mean[0, 0] + 1)
    assert changed(bundled, mean=moved).digest != bundled.digest


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("freqs", (1, 0), 0, "sum to 4096"),
        ("freqs", 0, np.eye(1, 256, 1, dtype=np.uint16)[0] * 4096, "padding"),
        ("classes", (0, 0, 0), 60_000, "known tables"),
        ("classes", (0, 0, 0), 0, "lacks a symbol"),
        ("refine_classes", (1, 0, 0), 0, "three symbols"),
        ("inv_step", (0, 0, 0), np.nan, "inv_step"),
        ("out_scale", (0, 0, 0), np.inf, "out_scale"),
        ("recon_shift", (0, 0, 0), 4, "recon_shift"),
        ("num_live", (-1, 0), 0, "num_live"),
        ("num_live", (-1, 0), 1 << 20, "num_live"),
        ("grid_exp", (0, 0), 101, "grid_exp"),
        ("radius", 1, 127, "radius"),
    ],
)
def test_an_invariant_that_does_not_hold_is_named(
    bundled: Profile, field: str, index: Any, value: Any, message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        changed(bundled, **{field: edited(getattr(bundled, field), index, value)})


@pytest.mark.parametrize(
    "wrong",
    [{"default_level": 99}, {"num_levels": 0}, {"raw_tokens": 65}, {"num_planes": 15}],
)
def test_wrong_sizes_are_refused(bundled: Profile, wrong: dict[str, int]) -> None:
    with pytest.raises(CodecError):
        changed(bundled, **wrong)


def test_sums_that_could_be_inexact_are_refused(bundled: Profile) -> None:
    n = bundled.block_channels
    huge = np.full_like(bundled.forward, 2**31 - 1)
    assert 65536 * n * (2**31 - 1) > 2**53
    with pytest.raises(CodecError, match="2\\^53"):
        changed(bundled, forward=huge)


def test_damaged_files_are_refused(stored: bytes) -> None:
    data = stored
    header, frame = header_of(data)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(data), 20):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(CodecError):
            Profile.from_bytes(bytes(flipped))
    for cut in (0, 4, 10, 30, len(data) // 2, len(data) - 1):
        with pytest.raises(CodecError):
            Profile.from_bytes(data[:cut])
    with pytest.raises(CodecError, match="version"):
        Profile.from_bytes(sealed(header, frame, version=2))
    body = _HEAD.pack(b"HKVP", 1, 1 << 31) + b"\0" * 64
    with pytest.raises(CodecError, match="too long"):
        Profile.from_bytes(body + xxhash.xxh3_64_digest(body))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_planes": -1},
        {"num_planes": 1 << 40},
        {"num_planes": 4096, "num_channels": 1 << 18},
        {"num_channels": True},
        {"block_channels": 0},
        {"block_channels": 7},
        {"num_levels": "6"},
        {"widths": {}},
        {"widths": None},
        {"source": 3},
    ],
)
def test_headers_that_lie_are_refused(stored: bytes, wrong: dict[str, Any]) -> None:
    """With a right checksum, as someone who means harm would have."""
    header, frame = header_of(stored)
    with pytest.raises(CodecError):
        Profile.from_bytes(sealed(header | wrong, frame))


def test_headers_that_are_none_are_refused(stored: bytes) -> None:
    _, frame = header_of(stored)
    headers: list[Any] = [[], 3, None, {"a": 1}]
    for header in headers:
        with pytest.raises(CodecError):
            Profile.from_bytes(sealed(header, frame))


def test_a_frame_of_another_size_is_not_unpacked(stored: bytes) -> None:
    header, frame = header_of(stored)
    content = zstandard.ZstdDecompressor().decompress(frame)
    for other in (content + b"\0", content[:-1], b""):
        with pytest.raises(CodecError, match="size"):
            Profile.from_bytes(sealed(header, zstandard.ZstdCompressor().compress(other)))
    with pytest.raises(CodecError):
        Profile.from_bytes(sealed(header, b"no frame"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=254))
def test_frequencies_sum_to_4096_and_leave_none_out(weights: list[float]) -> None:
    freqs = integer_freqs(np.array(weights) + 1e-9)
    assert freqs.sum(dtype=np.int64) == 4096
    assert freqs.min() >= 1


def test_tables_code_what_they_were_made_of_near_its_entropy() -> None:
    rng = np.random.default_rng(1)
    scales = np.geomspace(0.2, 30, 64)
    quotients = np.rint(rng.normal(size=(4000, 64)) * scales)
    counts = histograms(quotients)
    share = counts / counts.sum(1, keepdims=True)
    entropy = -(counts * np.log2(np.maximum(share, 1e-12))).sum()
    costs = [base_tables(counts, num).bits / entropy for num in (4, 16, 48)]
    assert costs[0] > costs[1] > costs[2]
    assert 1 < costs[2] < 1.01


def test_wide_symbols_escape_and_rare_ones_do_not_widen_a_table() -> None:
    rng = np.random.default_rng(2)
    quotients = np.rint(rng.normal(size=(20_000, 2)) * [0.5, 200])
    quotients[0, 0] = 90
    tables = base_tables(histograms(quotients), 2)
    narrow, wide = tables.classes
    assert tables.radius[narrow] < 10
    assert tables.radius[wide] == 126
    escape = tables.freqs[wide, 253] / 4096
    assert escape == pytest.approx((np.abs(quotients[:, 1]) > 126).mean(), abs=0.01)


def test_refinement_tables_tell_contexts_apart() -> None:
    counts = np.zeros((2, 3, 3))
    counts[0, 0] = (100, 800, 100)
    counts[1, 0] = (300, 300, 300)
    counts[:, 1] = (500, 300, 200)
    tables = refine_tables(counts, 2)
    assert sorted(tables.classes.tolist()) == [0, 3]
    peaked, flat = tables.freqs[tables.classes[0]], tables.freqs[tables.classes[1]]
    assert peaked[1] > 3000
    assert abs(int(flat[1]) - 1365) < 40
    assert (tables.freqs[:, :3] > 0).all()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ranks_part_codes_its_heads_as_the_whole_does(num_ranks: int) -> None:
    """Of two heads; of four ranks two each have the same one."""
    rng, num_planes, head_dim = np.random.default_rng(3), 4, 16
    mix = rng.normal(size=(2 * head_dim, 2 * head_dim))
    values = rng.normal(size=(num_planes, 600, 2 * head_dim)) @ mix + rng.normal(size=2 * head_dim)
    planes = float_to_bits(values.astype(np.float32), "bf16")
    options = CalibrationOptions(max_block_channels=head_dim)
    whole = profile_from_planes([planes], "bf16", head_dim=head_dim, options=options)
    assert whole.block_channels == head_dim
    parts = [whole.of_rank(head_dim, rank, num_ranks) for rank in range(num_ranks)]
    assert len({part.digest for part in parts}) == 2

    def through(profile: Profile, chunk: Any, level: int) -> Any:
        codec, out = create_codec("hier", dtype="bf16", profile=profile), np.empty_like(chunk)
        codec.decode(codec.encode(chunk, level=level), out)
        return out

    for level in (0, 2, whole.num_levels - 1):
        decoded = through(whole, planes, level)
        assert not np.array_equal(decoded, planes)
        for rank, part in enumerate(parts):
            head = rank * 2 // num_ranks
            own = np.ascontiguousarray(planes[:, :, head * head_dim : (head + 1) * head_dim])
            assert np.array_equal(
                through(part, own, level),
                decoded[:, :, head * head_dim : (head + 1) * head_dim],
            )


def test_a_part_that_cannot_be_had_is_refused_in_a_sentence(bundled: Profile) -> None:
    assert bundled.of_rank(bundled.num_channels, 1, 2) is bundled
    with pytest.raises(CodecError, match=r"blocks of 512 channels .* calibrate --max-block 64"):
        bundled.of_rank(64, 0, 2)
    with pytest.raises(CodecError, match="for planes of 128 channels, which do not lie on 3 ranks"):
        bundled.of_rank(64, 0, 3)
