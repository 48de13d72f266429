"""Planes for the tests of the CacheGen codecs, and what both have to refuse."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_ext.codec import Codec, CodecError
from sglang_ext.codec.base import PlaneArray, kv_dtype
from sglang_ext.codec.float_bits import from_float32

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")


def make_values(
    seed: int, num_planes: int, num_tokens: int, num_channels: int
) -> NDArray[np.float32]:
    """Channels of unequal scale and offset, tokens that follow one another slowly."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((num_planes, num_tokens, num_channels))
    for token in range(1, num_tokens):
        noise[:, token] = 0.4 * noise[:, token - 1] + 0.9 * noise[:, token]
    scales = np.exp(rng.standard_normal((num_planes, 1, num_channels)))
    offsets = 2 * rng.standard_normal((num_planes, 1, num_channels))
    return np.asarray((noise + offsets) * scales, np.float32)


def make_planes(
    seed: int, num_planes: int, num_tokens: int, num_channels: int, dtype: str = "bf16"
) -> PlaneArray:
    return from_float32(make_values(seed, num_planes, num_tokens, num_channels), dtype)


def decoded(codec: Codec, data: bytes, like: PlaneArray) -> PlaneArray:
    out = np.full_like(like, 7)
    codec.decode(data, out)
    return out


def awkward_planes(dtype: str) -> tuple[PlaneArray, NDArray[np.bool_]]:
    """Planes with rows of zeros, NaN and infinity, and which rows are not finite."""
    planes = make_planes(5, 4, 23, 6, dtype)
    planes[:, 3] = 0
    planes[2] = 0
    not_finite = {"bf16": 0x7FC1, "fp16": 0xFC00, "fp32": 0x7F800000}.get(dtype, 0x7F)
    bad = np.zeros(planes.shape[:2], np.bool_)
    for plane, token in ((0, 0), (0, 7), (1, 10), (3, 22), (2, 3)):
        planes[plane, token, 4] = kv_dtype(dtype).storage.type(not_finite)
        bad[plane, token] = True
    return planes, bad


def check_refusals(codec: Codec, other: Codec, data: bytes, shape: tuple[int, int, int]) -> None:
    """Every damaged byte, cut and wrong shape is a `CodecError`, and so are foreign bytes."""
    out: PlaneArray = np.zeros(shape, codec.dtype.storage)
    for at in range(0, len(data), max(1, len(data) // 400)):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        for bad in (bytes(damaged), data[:at], data[:at] + data[at + 1 :]):
            with pytest.raises(CodecError):
                codec.decode(bad, out)
    wrong: PlaneArray = np.zeros((shape[0], shape[1] + 1, shape[2]), out.dtype)
    foreign = other.encode(out)
    for bad, target in ((data, wrong), (data + b"\0", out), (foreign, out), (b"", out)):
        with pytest.raises(CodecError):
            codec.decode(bad, target)
    for level in (-1, 3):
        with pytest.raises(CodecError):
            codec.encode(out, level=level)
    with pytest.raises(CodecError):
        codec.encode(out, level=0, last_level=2)


def reseal(data: bytes) -> bytes:
    """The bytes under a checksum that matches them."""
    import xxhash

    return data[:-8] + xxhash.xxh3_64_intdigest(data[:-8]).to_bytes(8, "little")


def check_resealed_damage(codec: Codec, data: bytes, shape: tuple[int, int, int]) -> None:
    """Damage under a good checksum decodes to something or is a `CodecError`; nothing else."""
    rng = np.random.default_rng(1)
    guarded: PlaneArray = np.full((shape[0] + 2, *shape[1:]), 77, codec.dtype.storage)
    for _ in range(400):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data) - 8, rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        if rng.integers(3) == 0:
            del damaged[rng.integers(len(damaged)) :]
        sealed = reseal(bytes(damaged)) if len(damaged) > 8 else bytes(damaged)
        try:
            codec.decode(sealed, guarded[1:-1])
        except CodecError:
            continue
    assert (guarded[[0, -1]] == 77).all()
