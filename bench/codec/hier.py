"""The product's codec in the bench: its methods, its checks, and what its bytes consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.codec.ideal_bits import rans_bits
from bench.codec.methods import Method, coded, of_codec
from bench.core.case import CaseFailedError
from sglang_ext.codec import create_codec
from sglang_ext.codec.container import read_header
from sglang_ext.codec.float_bits import Bits
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.kernels import kvquant
from sglang_ext.kernels.rans import api as rans
from sglang_ext.kernels.rans.tables import LANES, Tables

ZSTD_LEVEL = 3
_RAW_SECTION = 1  # of the container's kinds, the one with rows kept as they are
_CHECK_TOKENS = 48


def hier_methods(
    profile: Profile,
    dtype: str,
    *,
    name: str = "hier",
    rotated: bool = False,
    raw_tokens: int | None = None,
    levels: Sequence[int] | None = None,
) -> list[Method]:
    """All levels of the product's codec under a profile."""
    codec = create_codec("hier", dtype=dtype, profile=profile)
    return [
        of_codec(
            codec,
            name,
            level,
            str(level),
            rotated=rotated,
            raw_tokens=raw_tokens,
            expected=quantiser_of(profile, dtype, level, raw_tokens),
        )
        for level in (range(profile.num_levels) if levels is None else levels)
    ]


def quantiser_of(
    profile: Profile, dtype: str, level: int, raw_tokens: int | None = None
) -> Callable[[Bits, bool], Bits]:
    """What a stream of a level has to decode to: quantised and back, nothing coded."""
    kept = profile.raw_tokens if raw_tokens is None else raw_tokens

    def expected(planes: Bits, is_first: bool) -> Bits:
        out = np.empty_like(planes)
        quantised = _quantised(profile, dtype, planes, level, kept if is_first else 0)
        kvquant.dequantise(quantised.tiles, dtype, profile.transform, level, out, raw=quantised.raw)
        return out

    return expected


def quantised_tiles(
    profile: Profile, dtype: str, planes: Bits, level: int, raw_tokens: int
) -> NDArray[np.int16]:
    """Coefficients i16 [N, T, 32] at a level."""
    return _quantised(profile, dtype, planes, level, raw_tokens).tiles


def _quantised(
    profile: Profile, dtype: str, planes: Bits, level: int, raw_tokens: int
) -> kvquant.Quantised:
    return kvquant.quantise(
        np.ascontiguousarray(planes),
        dtype,
        profile.transform,
        level,
        first_level=min(level, profile.max_base_level),
        raw_tokens=raw_tokens,
    )


def check_engines(profile: Profile, dtype: str, planes: Bits) -> None:
    """The reference engine writes the same bytes as the fast one, and both read them alike.

    Raises:
        CaseFailedError: they differ.
    """
    few = np.ascontiguousarray(planes[:, :_CHECK_TOKENS])
    fast, plain = (
        create_codec("hier", dtype=dtype, profile=profile, engine=engine)
        for engine in ("numba", "naive")
    )
    last = min(profile.num_levels - 1, profile.default_level + 1)
    for levels in ({"level": profile.default_level}, {"level": 0, "last_level": last}):
        data = fast.encode(few, **levels)
        if plain.encode(few, **levels) != data:
            raise CaseFailedError(f"hier: the engines write different bytes at {levels}")
        by_fast, by_plain = coded(fast, data, few), coded(plain, data, few)
        if not np.array_equal(by_fast, by_plain):
            raise CaseFailedError(f"hier: the engines decode {levels} to different values")


def zstd_methods(profile: Profile, dtype: str) -> list[Method]:
    """The product's coefficients at all levels under zstandard instead of rANS.

    Values lie coefficient by coefficient, low bytes before high ones, which suits zstandard best.
    """
    return [_zstd_method(profile, dtype, level) for level in range(profile.num_levels)]


def _zstd_method(profile: Profile, dtype: str, level: int) -> Method:
    arrays = profile.transform

    def encode(planes: Bits, is_first: bool) -> bytes:
        kept = profile.raw_tokens if is_first else 0
        quantised = _quantised(profile, dtype, planes, level, kept)
        values = quantised.tiles.transpose(0, 2, 1).astype(np.int32)
        zigzag = (np.abs(values) * 2 - (values < 0)).astype("<u2")
        raw = quantised.raw
        counts = np.array([raw.index.size, raw.sinks.shape[1]], "<u4")
        halves = (zigzag.astype(np.uint8), (zigzag >> 8).astype(np.uint8))
        parts = (counts, *halves, raw.index, raw.bits, raw.sinks)
        content = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content)

    def decode(data: bytes, like: Bits) -> Bits:
        content = zstandard.ZstdDecompressor().decompress(data)
        num_rows, num_sinks = np.frombuffer(content, "<u4", 2).tolist()
        shape = (arrays.layout(level).num_tiles, LANES, like.shape[1])
        size = int(np.prod(shape))
        low, high = np.frombuffer(content, np.uint8, 2 * size, 8).astype(np.int32).reshape(2, -1)
        zigzag = low + 256 * high
        values = np.where(zigzag & 1, -(zigzag + 1) // 2, zigzag // 2).astype(np.int16)
        at = 8 + 2 * size
        index = np.frombuffer(content, np.uint32, num_rows, at)
        words = np.frombuffer(content[at + 4 * num_rows :], like.dtype)
        bits, sinks = np.split(words, [num_rows * arrays.block_channels])
        raw = kvquant.RawRows(
            index,
            bits.reshape(num_rows, arrays.block_channels),
            sinks.reshape(len(like), num_sinks, like.shape[2]),
        )
        tiles = np.ascontiguousarray(values.reshape(shape).transpose(0, 2, 1))
        out = np.empty_like(like)
        kvquant.dequantise(tiles, dtype, arrays, level, out, raw=raw)
        return out

    expected = quantiser_of(profile, dtype, level)
    return Method("hier/zstd", str(level), False, encode, decode, expected)


@dataclass(frozen=True)
class StreamParts:
    """What a stream of the product's codec consists of, in bytes.

    Attributes:
        ideal: the symbols' information under the profile's tables.
        words: rANS words.
        states: 32 lane states of each group.
        escapes: coefficients beyond their table.
        raw: tokens and rows kept as they are.
        other: header, section table, word counts.
    """

    ideal: float
    words: int
    states: int
    escapes: int
    raw: int
    other: int

    @property
    def gap(self) -> float:
        """Coded symbols with all lane states over their ideal, minus 1."""
        return (self.words + self.states) / self.ideal - 1

    @property
    def overhead(self) -> float:
        """What is neither symbols nor raw, over all."""
        total = self.words + self.states + self.escapes + self.raw + self.other
        return self.other / total


def stream_parts(profile: Profile, dtype: str, planes: Bits, level: int, kept: int) -> StreamParts:
    """Codes planes in one layer and takes the stream apart; sizes add up to its length."""
    codec = create_codec("hier", dtype=dtype, profile=profile)
    data = codec.encode(np.ascontiguousarray(planes), level=level, raw_tokens=kept)
    quantised = _quantised(profile, dtype, planes, level, kept)
    first = min(level, profile.max_base_level)
    layers = kvquant.split(quantised.tiles, profile.transform, first, level)
    tables = Tables(profile.freqs)
    group = rans.tiles_per_group_for(planes.shape[1])
    ideal, words, states = 0.0, 0, 0
    for layer in (layers.base, *layers.refinements):
        ideal += rans_bits(layer.symbols, layer.classes, tables, layer.contexts) / 8
        coded = rans.encode(layer.symbols, layer.classes, tables, group, layer.contexts)
        words, states = words + coded.words.nbytes, states + coded.states.nbytes
    escapes = 6 * layers.escapes.index.size
    sections = read_header(data).sections
    raw = sum(part.end - part.start for part in sections if part.kind == _RAW_SECTION)
    other = len(data) - words - states - escapes - raw
    return StreamParts(ideal, words, states, escapes, raw, other)
