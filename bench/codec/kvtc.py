"""A codec in the manner of KVTC (arXiv 2511.01815), to compare with; see `KvtcLike`.

Written from the paper's summary: one basis for K and one for V over all layers and heads together,
mean removed; bits given to groups of components by dynamic programming; DEFLATE over the codes; the
first four tokens kept as they are; K before rotation.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.codec.simple import Affine, num_packed_bytes, pack_bits, unpack_bits
from sglang_ext.codec.float_bits import F32, Bits, from_float32, to_float32

SINK_TOKENS = 4
_BLOCK = 16  # groups start at multiples of this many components
_GROUP_BLOCKS = (1, 4, 16, 64)  # groups of 16, 64, 256 and 1024
_BITS = (1, 2, 3, 4, 5, 6, 8)
_SIDE_BITS = 32  # a least value and a step, fp16 each
_MAX_BASIS = 2048
_SAMPLE_TOKENS = 96
_HEAD = struct.Struct("<IIII")


@dataclass(frozen=True)
class Group:
    """Components [start, stop) coded with `bits` each; 0 bits: dropped."""

    start: int
    stop: int
    bits: int


@dataclass(frozen=True)
class Basis:
    """Principal components of the planes `planes` together.

    Attributes:
        planes: numbers of planes whose channels are concatenated.
        mean: f32 [n].
        vectors: f32 [n, n], a component in each column, by falling variance.
    """

    planes: tuple[int, ...]
    mean: F32
    vectors: F32

    def gather(self, values: F32) -> F32:
        """Planes f32 [S, T, C] to rows [T, n]."""
        picked = values[list(self.planes)]
        return np.ascontiguousarray(picked.transpose(1, 0, 2).reshape(values.shape[1], -1))

    def project(self, values: F32) -> F32:
        """Planes f32 [S, T, C] to coefficients [T, n]."""
        return np.asarray((self.gather(values) - self.mean) @ self.vectors, np.float32)

    def restore(self, coefficients: F32, out: F32) -> None:
        """Coefficients [T, n] back into planes f32 [S, T, C]."""
        rows = coefficients @ self.vectors.T + self.mean
        shaped = rows.reshape(out.shape[1], len(self.planes), out.shape[2])
        out[list(self.planes)] = shaped.transpose(1, 0, 2)


def fit_bases(chunks: Sequence[Bits], dtype: str) -> list[Basis]:
    """Bases of K and of V over all layers, or over as many layers as a basis of 2,048 can hold."""
    num_planes, _, num_channels = chunks[0].shape
    per_basis = max(1, _MAX_BASIS // num_channels)
    bases = []
    for kind in (0, 1):
        planes = list(range(kind, num_planes, 2))
        for start in range(0, len(planes), per_basis):
            picked = tuple(planes[start : start + per_basis])
            empty = np.zeros(0, np.float32)
            rows = [
                Basis(picked, empty, empty).gather(to_float32(chunk, dtype)[:, SINK_TOKENS:])
                for chunk in chunks
            ]
            bases.append(_principal(picked, np.concatenate(rows)))
    return bases


def _principal(planes: tuple[int, ...], rows: F32) -> Basis:
    mean = rows.mean(axis=0)
    centred = (rows - mean).astype(np.float64)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    return Basis(planes, mean, np.ascontiguousarray(vectors[:, ::-1].astype(np.float32)))


class Allocator:
    """Which groups of components get how many bits, for any price of a bit.

    Args:
        coefficients: f32 [T, n] of calibration text under one basis.
    """

    def __init__(self, coefficients: F32) -> None:
        picks = np.linspace(0, len(coefficients) - 1, min(_SAMPLE_TOKENS, len(coefficients)))
        sample = coefficients[picks.astype(np.int64)]
        self.num_components = sample.shape[1]
        self._energy = np.concatenate([[0.0], np.cumsum((sample.astype(np.float64) ** 2).mean(0))])
        self._errors: dict[Group, float] = {}
        for start in range(0, self.num_components, _BLOCK):
            for blocks in _GROUP_BLOCKS:
                stop = min(start + blocks * _BLOCK, self.num_components)
                for bits in _BITS:
                    affine, part = Affine(bits), sample[:, start:stop]
                    back = affine.dequantise(*affine.quantise(part))
                    error = float(((back - part).astype(np.float64) ** 2).sum(axis=1).mean())
                    self._errors[Group(start, stop, bits)] = error

    def choose(self, price: float) -> list[Group]:
        """Groups of least squared error plus `price` times bits a token; the rest is dropped."""
        best: dict[int, tuple[float, list[Group]]] = {0: (0.0, [])}
        total = self._energy[-1]
        answer = (total, list[Group]())
        for start in range(0, self.num_components, _BLOCK):
            cost, chosen = best[start]
            dropped = cost + total - self._energy[start]
            if dropped < answer[0]:
                answer = (dropped, chosen)
            for blocks in _GROUP_BLOCKS:
                stop = min(start + blocks * _BLOCK, self.num_components)
                for bits in _BITS:
                    group = Group(start, stop, bits)
                    more = self._errors[group] + price * (bits * (stop - start) + _SIDE_BITS)
                    if stop not in best or cost + more < best[stop][0]:
                        best[stop] = (cost + more, [*chosen, group])
        last = best[self.num_components]
        return last[1] if last[0] < answer[0] else answer[1]


@dataclass(frozen=True)
class KvtcLike:
    """Codes position-free planes.

    Attributes:
        bases: of K and of V.
        groups: of each basis.
        dtype: the KV dtype.
    """

    bases: list[Basis]
    groups: list[list[Group]]
    dtype: str

    @classmethod
    def make(
        cls, bases: list[Basis], allocators: list[Allocator], price: float, dtype: str
    ) -> KvtcLike:
        """The codec at one price of a bit, the same for all bases."""
        return cls(bases, [allocator.choose(price) for allocator in allocators], dtype)

    def encode(self, planes: Bits, *, raw_tokens: int = SINK_TOKENS) -> bytes:
        """Header, raw tokens, and DEFLATE over pairs and codes, in the form that is smaller."""
        raw_tokens = min(raw_tokens, planes.shape[1])
        sides, codes = [], []
        values = to_float32(planes[:, raw_tokens:], self.dtype)
        for basis, groups in zip(self.bases, self.groups, strict=True):
            coefficients = basis.project(values)
            for group in groups:
                code, side = Affine(group.bits).quantise(coefficients[:, group.start : group.stop])
                sides.append(side.tobytes())
                codes.append((code, group.bits))
        packed = b"".join(pack_bits(code, bits) for code, bits in codes)
        plain = b"".join(np.ascontiguousarray(code.T).tobytes() for code, _ in codes)
        pairs = b"".join(sides)
        forms = [zlib.compress(pairs + body, 6) for body in (packed, plain)]
        form = int(len(forms[1]) < len(forms[0]))
        head = _HEAD.pack(*planes.shape, raw_tokens * 2 + form)
        return head + planes[:, :raw_tokens].tobytes() + forms[form]

    def decode(self, data: bytes) -> Bits:
        """What `encode` coded, rounded."""
        num_planes, num_tokens, num_channels, flags = _HEAD.unpack_from(data)
        raw_tokens, form = divmod(flags, 2)
        word = from_float32(np.zeros(1, np.float32), self.dtype).dtype
        raw_end = _HEAD.size + num_planes * raw_tokens * num_channels * word.itemsize
        raw = np.frombuffer(data[_HEAD.size : raw_end], word)
        body = memoryview(zlib.decompress(data[raw_end:]))
        rows = num_tokens - raw_tokens
        num_sides = sum(map(len, self.groups)) * rows
        sides = np.frombuffer(body[: 4 * num_sides], np.float16).reshape(-1, rows, 2)
        coefficients = self._read(body[4 * num_sides :], sides, rows, form)
        values = np.empty((num_planes, rows, num_channels), np.float32)
        for basis, part in zip(self.bases, coefficients, strict=True):
            basis.restore(part, values)
        restored = from_float32(values, self.dtype)
        return np.concatenate([raw.reshape(num_planes, raw_tokens, num_channels), restored], axis=1)

    def simulate(self, planes: Bits, *, raw_tokens: int = SINK_TOKENS) -> Bits:
        """Quantised and back, without bytes."""
        raw_tokens = min(raw_tokens, planes.shape[1])
        values = to_float32(planes[:, raw_tokens:], self.dtype)
        out = np.empty_like(values)
        for basis, groups in zip(self.bases, self.groups, strict=True):
            coefficients, kept = basis.project(values), np.zeros((values.shape[1], len(basis.mean)))
            for group in groups:
                part, affine = slice(group.start, group.stop), Affine(group.bits)
                kept[:, part] = affine.dequantise(*affine.quantise(coefficients[:, part]))
            basis.restore(kept.astype(np.float32), out)
        back = from_float32(out, self.dtype)
        return np.concatenate([planes[:, :raw_tokens], back], axis=1)

    def _read(
        self, codes: memoryview, sides: NDArray[np.float16], rows: int, form: int
    ) -> list[F32]:
        """Coefficients [T, n] of each basis, from codes in either form."""
        at, number = 0, 0
        coefficients = []
        for basis, groups in zip(self.bases, self.groups, strict=True):
            values = np.zeros((rows, len(basis.mean)), np.float32)
            for group in groups:
                width = group.stop - group.start
                count = rows * width
                size = count if form else num_packed_bytes(count, group.bits)
                part = codes[at : at + size]
                if form:
                    code = np.frombuffer(part, np.uint8).reshape(width, rows).T
                else:
                    code = unpack_bits(part, group.bits, count).reshape(rows, width)
                values[:, group.start : group.stop] = Affine(group.bits).dequantise(
                    code, sides[number]
                )
                at, number = at + size, number + 1
            coefficients.append(values)
        return coefficients
