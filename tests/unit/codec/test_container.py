"""The bytes around a chunk, and the rules every codec keeps."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.codec import (
    ChunkShape,
    Codec,
    CodecError,
    codec_ids,
    create_codec,
    kv_dtype,
    registry,
)
from sglang_ext.codec.container import Chunk, Section, read_header, write_chunk
from tests.unit.codec.codec_cases import ALL_DTYPES, make_planes, make_profile, random_bits

BF16 = kv_dtype("bf16")
SHAPE = ChunkShape(2, 3, 4)
DIGEST = bytes(range(32))


def _chunk(**changes: Any) -> bytes:
    sections = [Section(1, 1, b"raw"), Section(2, 1, b"base" * 5), Section(3, 3, b"finer")]
    arguments: dict[str, Any] = {"first_level": 1, "last_level": 3, "profile_digest": DIGEST}
    return write_chunk("hier", BF16, SHAPE, sections, **arguments | changes)


def _open(data: bytes, **changes: Any) -> Chunk:
    wanted: dict[str, Any] = {
        "codec_id": "hier", "dtype": BF16, "shape": SHAPE, "profile_digest": DIGEST,
    }  # fmt: skip
    return Chunk(data, **wanted | changes)


def _read_all(data: bytes) -> None:
    chunk = _open(data)
    for kind, level in ((1, 1), (2, 1), (3, 3)):
        chunk.section(kind, level)


def refixed(data: bytes) -> bytes:
    """`data` with the header's checksum made right again."""
    fixed = bytearray(data)
    end = 40 + (32 if fixed[9] & 1 else 0) + 20 * fixed[8]
    fixed[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(fixed[:end])))
    return bytes(fixed)


def test_header_round_trip() -> None:
    data = _chunk()
    header = read_header(data)
    assert (header.codec_id, header.dtype, header.shape) == ("hier", BF16, SHAPE)
    assert (header.first_level, header.last_level, header.profile_digest) == (1, 3, DIGEST)
    assert [(s.kind, s.level, s.end - s.start) for s in header.sections] == [
        (1, 1, 3), (2, 1, 20), (3, 3, 5),
    ]  # fmt: skip
    assert header.total_bytes == len(data)
    assert header.header_bytes == 40 + 32 + 3 * 20 + 8 == len(data) - 28
    assert read_header(data[: header.header_bytes]) == header
    assert bytes(_open(data).section(2, 1)) == b"base" * 5


def test_sections_may_be_cut_off() -> None:
    data = _chunk()
    header = read_header(data)
    assert (header.prefix_bytes(1), header.prefix_bytes(2)) == (len(data) - 5, len(data) - 5)
    assert header.prefix_bytes(3) == len(data)
    cut = _open(data[: header.prefix_bytes(1)])
    # Level 2 has no sections of its own, so it is whole; level 3 is not.
    assert cut.last_whole_level == cut.pick_level(None) == 2
    assert cut.pick_level(1) == 1
    with pytest.raises(CodecError, match="not enough for level 3"):
        cut.pick_level(3)
    with pytest.raises(CodecError, match="a section ends at"):
        cut.section(3, 3)
    with pytest.raises(CodecError, match="not enough for level 1"):
        _open(data[: header.prefix_bytes(1) - 1]).pick_level(None)
    for level in (0, 4):
        with pytest.raises(CodecError, match="levels 1 to 3"):
            _open(data).pick_level(level)


def test_every_damaged_byte_is_found() -> None:
    data = _chunk()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CodecError):
            _read_all(bytes(damaged))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codec_id": "zstd"}, "codec zstd"),
        ({"dtype": kv_dtype("fp16")}, "dtype fp16"),
        ({"shape": ChunkShape(2, 3, 5)}, "channels"),
        ({"profile_digest": b""}, "profile"),
        ({"profile_digest": bytes(32)}, "profile"),
    ],
)
def test_foreign_chunks_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(CodecError, match=match):
        _open(_chunk(), **change)


def test_bytes_behind_the_last_section_are_refused() -> None:
    with pytest.raises(CodecError, match="bytes of a chunk of"):
        _open(_chunk() + b"x")


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, 2), (5, 0), (5, 99), (6, 4), (6, 0), (7, 2), (8, 0), (9, 3), (10, 1), (12, 0), (24, 32),
     (24, 200), (27, 32), (40 + 32 + 22, 1), (40 + 32 + 24, 0), (40 + 32 + 21, 9)],
)  # fmt: skip
def test_header_fields_are_checked_behind_the_checksum(offset: int, value: int) -> None:
    damaged = bytearray(_chunk())
    damaged[offset] = value
    with pytest.raises(CodecError):
        read_header(refixed(bytes(damaged)))


def test_lengths_are_not_trusted() -> None:
    damaged = bytearray(_chunk())
    struct.pack_into("<Q", damaged, 40 + 32 + 2 * 20 + 4, 2**64 - 1)
    data = refixed(bytes(damaged))
    assert read_header(data).total_bytes > 2**63
    with pytest.raises(CodecError, match="a section ends at"):
        _open(data).section(3, 3)


@given(st.binary(max_size=200), st.integers(0, 120))
def test_any_bytes_are_read_or_refused(data: bytes, keep: int) -> None:
    for candidate in (data, _chunk()[:keep] + data):
        try:
            header = read_header(candidate)
        except CodecError:
            continue
        assert header.header_bytes <= len(candidate)


def test_largest_header() -> None:
    sections = [Section(1, 0, b"")] * 64
    data = write_chunk("x" * 16, BF16, SHAPE, sections, profile_digest=DIGEST)
    assert len(data) == 40 + 32 + 20 * 64 + 8
    assert len(read_header(data).sections) == 64


@pytest.mark.parametrize(
    ("sections", "changes"),
    [
        ([], {}),
        ([Section(1, 0, b"")] * 65, {}),
        ([Section(1, 1, b""), Section(1, 0, b"")], {"last_level": 1}),
        ([Section(1, 0, b"")], {"profile_digest": b"short"}),
        ([Section(1, 1, b"")], {}),
    ],
)
def test_illegal_chunks_are_not_written(sections: list[Section], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"digest|sections"):
        write_chunk("hier", BF16, SHAPE, sections, **changes)


@pytest.mark.parametrize("axes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (5000, 1, 1), (4096, 2**20, 2)])
def test_shapes_are_bounded(axes: tuple[int, int, int]) -> None:
    with pytest.raises(CodecError):
        ChunkShape(*axes)


def _codecs(dtype: str) -> dict[str, Codec]:
    return {
        "none": create_codec("none", dtype=dtype),
        "zstd": create_codec("zstd", dtype=dtype),
        "zstd raw": create_codec("zstd", dtype=dtype, byte_planes=False, compression_level=19),
        "lossless": create_codec("lossless", dtype=dtype),
        "hier": create_codec("hier", dtype=dtype, profile=make_profile(2, 32, 16)),
    }


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("name", ["none", "zstd", "zstd raw"])
def test_plain_codecs_keep_every_bit(name: str, dtype: str) -> None:
    codec = _codecs(dtype)[name]
    for planes in (random_bits(dtype, (2, 9, 32)), make_planes(2, 70, 32, dtype)):
        out = np.zeros_like(planes)
        codec.decode(memoryview(bytearray(codec.encode(planes))), out)
        assert np.array_equal(out, planes)


@pytest.mark.parametrize("name", ["none", "zstd", "lossless", "hier"])
def test_misuse_is_a_codec_error(name: str) -> None:
    codec = _codecs("bf16")[name]
    planes = make_planes(2, 8, 32)
    data = codec.encode(planes)
    read_only = np.zeros_like(planes)
    read_only.setflags(write=False)
    for out in (
        np.zeros((2, 8, 31), np.uint16),
        np.zeros((2, 9, 32), np.uint16),
        np.zeros((2, 8, 32), np.uint32),
        np.zeros((2, 8, 64), np.uint16)[:, :, ::2],
        np.zeros((16, 32), np.uint16),
        np.zeros((2, 0, 32), np.uint16),
        read_only,
    ):
        with pytest.raises(CodecError):
            codec.decode(data, out)
    for bad in (planes[:, :, ::2], planes.astype(np.uint32), planes[0], planes[:, :0]):
        with pytest.raises(CodecError):
            codec.encode(bad)
    for level, last in ((-1, None), (0, -1), (codec.num_levels, None), (0, codec.num_levels)):
        with pytest.raises(CodecError):
            codec.encode(planes, level=level, last_level=last)
    with pytest.raises(CodecError):
        codec.decode(data, np.zeros_like(planes), level=codec.num_levels)
    with pytest.raises(CodecError):
        codec.decode(create_codec("none", dtype="fp16").encode(planes), np.zeros_like(planes))


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"none", "zstd", "lossless", "hier", "cachegen-paper", "cachegen-released"} <= set(
        codec_ids()
    )
    with pytest.raises(CodecError, match="no codec is called 'gzip'; known are cachegen-paper"):
        create_codec("gzip", dtype="bf16")
    with pytest.raises(CodecError, match="no KV dtype is called 'int8'"):
        create_codec("none", dtype="int8")
    monkeypatch.setattr(registry._CODECS, "_targets", dict(registry._CODECS._targets))
    registry.register_codec("mine", "sglang_ext.codec.none:NoneCodec")
    assert create_codec("mine", dtype="bf16").codec_id == "none"
    registry.register_codec("bad", "sglang_ext.codec.base:KVDtype")
    with pytest.raises(CodecError, match="subclass of Codec"):
        create_codec("bad", dtype="bf16")
    registry.register_codec("gone", "no_such_package.codec:Codec")
    with pytest.raises(CodecError, match="'gone' cannot be imported from no_such_package"):
        create_codec("gone", dtype="bf16")
    for ident, target in (("none", "a:b"), ("x" * 17, "a:b"), ("", "a:b")):
        with pytest.raises(ValueError, match="codec"):
            registry.register_codec(ident, target)


@pytest.mark.parametrize("options", [{"compression_level": 0}, {"compression_level": 23}])
def test_zstd_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(CodecError, match="1 to 22"):
        create_codec("zstd", dtype="bf16", **options)
