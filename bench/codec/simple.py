"""Plain quantisers to compare with: int8 and int4 per token, and one in the manner of KIVI.

Each codes planes [S, T, C] to bytes in which everything that decoding needs is counted, and says
what it decodes to by a second way (`simulate`), so that bytes that decode to something else are
seen.
They live in the bench only: their decoders trust their input.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_ext.codec.float_bits import F32, Bits, from_float32, to_float32

_SHAPE = struct.Struct("<III")
_KIVI_GROUP = 32


def pack_bits(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Codes below 2^bits, one after another without gaps; 1 to 8 bits."""
    spread = (codes.reshape(-1, 1) >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    return np.packbits(spread.astype(np.uint8), bitorder="little").tobytes()


def unpack_bits(data: bytes | memoryview, bits: int, count: int) -> NDArray[np.uint8]:
    """`count` codes of `pack_bits`."""
    spread = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return np.asarray(spread.reshape(count, bits) @ weights, np.uint8)


def num_packed_bytes(count: int, bits: int) -> int:
    """The length of what `pack_bits` returns."""
    return (count * bits + 7) // 8


@dataclass(frozen=True)
class Affine:
    """Codes 0..2^bits-1 between the least and the largest value of a group, both kept as fp16.

    The last axis of the values is the group.
    """

    bits: int

    def quantise(self, values: F32) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """Codes like `values`, and (least, step) [..., 2] as fp16."""
        low, high = values.min(axis=-1), values.max(axis=-1)
        steps = (high - low) / ((1 << self.bits) - 1)
        side = np.stack([low, steps], axis=-1).astype(np.float16)
        low, steps = (part.astype(np.float32)[..., None] for part in (side[..., 0], side[..., 1]))
        quotients = np.rint((values - low) / np.where(steps > 0, steps, 1))
        return np.clip(quotients, 0, (1 << self.bits) - 1).astype(np.uint8), side

    def dequantise(self, codes: NDArray[np.uint8], side: NDArray[np.float16]) -> F32:
        """The values that codes stand for."""
        low, steps = (side[..., at].astype(np.float32)[..., None] for at in (0, 1))
        return np.asarray(codes.astype(np.float32) * steps + low, np.float32)


@dataclass(frozen=True)
class PerToken:
    """One fp16 pair for each plane and token over all channels; int8 and int4."""

    bits: int
    dtype: str

    def encode(self, planes: Bits) -> bytes:
        """Header, pairs, codes."""
        codes, side = Affine(self.bits).quantise(to_float32(planes, self.dtype))
        return _SHAPE.pack(*planes.shape) + side.tobytes() + pack_bits(codes, self.bits)

    def decode(self, data: bytes) -> Bits:
        """What `encode` coded, rounded."""
        shape = _SHAPE.unpack_from(data)
        view = memoryview(data)[_SHAPE.size :]
        num_side = shape[0] * shape[1] * 2
        side = np.frombuffer(view[: 2 * num_side], np.float16).reshape(*shape[:2], 2)
        codes = unpack_bits(view[2 * num_side :], self.bits, int(np.prod(shape))).reshape(shape)
        return from_float32(Affine(self.bits).dequantise(codes, side), self.dtype)

    def simulate(self, planes: Bits) -> Bits:
        """Quantised and back, without bytes."""
        affine = Affine(self.bits)
        return from_float32(
            affine.dequantise(*affine.quantise(to_float32(planes, self.dtype))), self.dtype
        )


@dataclass(frozen=True)
class KiviLike:
    """K per channel over 32 tokens, V per token over 32 channels; what is left over is kept raw.

    As KIVI (arXiv 2402.02750) has it, on rotated K. Its window of recent tokens in fp16 belongs to
    the engine, not to stored prefixes, and is left out; tokens (of K) and channels (of V) that fill
    no group are kept in the KV dtype.
    """

    bits: int
    dtype: str

    def encode(self, planes: Bits) -> bytes:
        """Header; of each plane pairs, codes, and what is left over."""
        parts = [_SHAPE.pack(*planes.shape)]
        for plane, words in enumerate(planes):
            grouped, rest = self._split(words, is_key=plane % 2 == 0)
            codes, side = Affine(self.bits).quantise(to_float32(grouped, self.dtype))
            parts += [side.tobytes(), pack_bits(codes, self.bits), rest.tobytes()]
        return b"".join(parts)

    def decode(self, data: bytes) -> Bits:
        """What `encode` coded, rounded."""
        num_planes, num_tokens, num_channels = _SHAPE.unpack_from(data)
        view, at = memoryview(data), _SHAPE.size
        word = np.dtype(from_float32(np.zeros(1, np.float32), self.dtype).dtype)
        out = np.empty((num_planes, num_tokens, num_channels), word)
        for plane, words in enumerate(out):
            grouped, rest = self._split(words, is_key=plane % 2 == 0)
            num_groups, size = grouped[..., 0].size, grouped.size
            side = np.frombuffer(view[at : at + 4 * num_groups], np.float16)
            at += 4 * num_groups
            end = at + num_packed_bytes(size, self.bits)
            codes = unpack_bits(view[at:end], self.bits, size).reshape(grouped.shape)
            side = side.reshape(*grouped.shape[:-1], 2)
            values = from_float32(Affine(self.bits).dequantise(codes, side), self.dtype)
            at = end + rest.nbytes
            raw = np.frombuffer(view[end:at], word).reshape(rest.shape)
            self._join(words, values, raw, is_key=plane % 2 == 0)
        return out

    def simulate(self, planes: Bits) -> Bits:
        """Quantised and back, without bytes."""
        out, affine = planes.copy(), Affine(self.bits)
        for plane, words in enumerate(out):
            grouped, rest = self._split(words, is_key=plane % 2 == 0)
            values = affine.dequantise(*affine.quantise(to_float32(grouped, self.dtype)))
            back = from_float32(values, self.dtype)
            self._join(words, back, rest.copy(), is_key=plane % 2 == 0)
        return out

    @staticmethod
    def _split(words: Bits, *, is_key: bool) -> tuple[Bits, Bits]:
        """Groups [..., 32] of a plane [T, C], and what fills none."""
        rows = words.T if is_key else words
        whole = rows.shape[1] // _KIVI_GROUP * _KIVI_GROUP
        grouped = np.ascontiguousarray(rows[:, :whole]).reshape(len(rows), -1, _KIVI_GROUP)
        return grouped, np.ascontiguousarray(rows[:, whole:])

    @staticmethod
    def _join(words: Bits, grouped: Bits, rest: Bits, *, is_key: bool) -> None:
        rows = np.concatenate([grouped.reshape(len(rest), -1), rest], axis=1)
        words[:] = rows.T if is_key else rows
