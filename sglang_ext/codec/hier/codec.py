"""The codec `hier`: the model's transform and steps from a profile, and rANS without sent tables.

A stream has a base, which decodes at its first level, and a refinement for each level above, up to
its last. It is cut after any of its sections without harm to the levels in front of the cut.
Sections: raw rows (first tokens, and rows that the quantiser cannot hold), base symbols with their
escapes, refinement symbols. Little-endian; see `coded_symbols` for symbols, and docs/formats.md.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any

import numpy as np
import zstandard

from sglang_ext.codec.base import (
    Codec,
    CodecError,
    KVDtype,
    LearnedKind,
    PlaneArray,
    check_out,
    check_planes,
)
from sglang_ext.codec.coded_symbols import pack_symbols, unpack_symbols
from sglang_ext.codec.container import Buffer, Chunk, Section, write_chunk
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.codec.profile_file import max_file_bytes
from sglang_ext.codec.zstd import decompress_exactly
from sglang_ext.kernels import kvquant
from sglang_ext.kernels.rans import api as rans
from sglang_ext.kernels.rans.tables import LANES, Tables, lookup_bytes

# Section kinds; stored on disk, never renumber.
_RAW_ROWS, _BASE, _REFINEMENT = 1, 2, 3
_RAW_HEAD = struct.Struct("<II")
_ESCAPE_BYTES = 6
_RAW_ZSTD_LEVEL = 9


class HierCodec(Codec):
    """The product's lossy codec.

    Args:
        profile: the model's :class:`Profile`.
        engine: "numba", "naive" or "triton"; all make and read the same bytes.
        rounding: what the quantiser of a stream without refinements adds before it rounds down:
            0.5, or less for a dead zone. Decoding does not depend on it.
    """

    codec_id = "hier"
    lossy = True
    layered = True
    default_level = 2
    expected_kl = (0.0355, 0.00627, 0.00123, 0.00029, 0.00005, 0.00001)  # docs/codec.md

    @classmethod
    def learned_kind(cls) -> LearnedKind:
        """A `Profile`."""
        from sglang_ext.codec.calibration.calibrate import profile_from_planes
        from sglang_ext.codec.calibration.options import CalibrationOptions

        return LearnedKind(
            ".hkp",
            Profile.load,
            Profile.from_bytes,
            max_file_bytes,
            lambda profile: bytes(profile.digest),
            CalibrationOptions().num_levels,
            lambda chunks, dtype, head_dim, source: profile_from_planes(
                chunks, dtype, head_dim=head_dim, source=source
            ),
            is_calibrated=True,
            of_rank=Profile.of_rank,
        )

    def __init__(
        self,
        dtype: KVDtype,
        *,
        profile: Any = None,
        engine: str = "numba",
        rounding: float = 0.5,
    ):
        if not isinstance(profile, Profile):
            raise CodecError(
                f"the codec hier needs the model's profile, got {type(profile).__name__}; "
                "make one with `hier-kv calibrate`"
            )
        if engine not in kvquant.ENGINES:
            raise CodecError(f"engines are {', '.join(kvquant.ENGINES)}, got {engine!r}")
        if not 0 <= rounding <= 0.5:
            raise CodecError(f"rounding is 0 to 0.5, got {rounding}")
        self.dtype = dtype
        self.profile = profile
        self.engine: Any = engine
        self.rounding = rounding
        self.num_levels = profile.num_levels

    @property
    def table_bytes(self) -> int:
        """See :meth:`Codec.table_bytes`: the coder's look-ups, and packed matrices."""
        profile = self.profile
        packed = (profile.forward.nbytes + profile.inverse.nbytes) // 2
        return lookup_bytes(len(profile.freqs)) + packed

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.profile.freqs)

    def encode(
        self,
        planes: PlaneArray,
        *,
        level: int | None = None,
        last_level: int | None = None,
        raw_tokens: int | None = None,
    ) -> bytes:
        """See :meth:`Codec.encode`. Defaults: those of the profile.

        A level finer than the profile's tables can hold in one layer becomes a coarser base with
        refinements up to it.
        """
        shape = check_planes(planes, self.dtype)
        self._check_shape(planes)
        if level is None:
            level = self.profile.default_level if last_level is None else 0
        last = level if last_level is None else last_level
        if not 0 <= level <= last < self.num_levels:
            raise CodecError(f"levels are 0 to {self.num_levels - 1}, asked for {level} to {last}")
        first = min(level, self.profile.max_base_level)
        arrays = self.profile.transform
        quantised = kvquant.quantise(
            planes,
            self.dtype.name,
            arrays,
            last,
            first_level=first,
            raw_tokens=self.profile.raw_tokens if raw_tokens is None else max(raw_tokens, 0),
            rounding=self.rounding if first == last else 0.5,
            engine=self.engine,
        )
        layers = kvquant.split(quantised.tiles, arrays, first, last)
        sections = _raw_sections(quantised.raw, first)
        base = self._encode_symbols(layers.base)
        escapes = (
            layers.escapes.index.astype("<u4").tobytes(),
            layers.escapes.value.astype("<i2").tobytes(),
        )
        sections.append(Section(_BASE, first, b"".join((base, *escapes))))
        for refined, layer in enumerate(layers.refinements, first + 1):
            sections.append(Section(_REFINEMENT, refined, self._encode_symbols(layer)))
        return write_chunk(
            self.codec_id,
            self.dtype,
            shape,
            sections,
            first_level=first,
            last_level=last,
            profile_digest=self.profile.digest,
        )

    def decode(self, data: Buffer, out: PlaneArray, *, level: int | None = None) -> None:
        """See :meth:`Codec.decode`."""
        shape = check_out(out, self.dtype)
        self._check_shape(out)
        chunk = Chunk(
            data,
            codec_id=self.codec_id,
            dtype=self.dtype,
            shape=shape,
            profile_digest=self.profile.digest,
        )
        if chunk.header.last_level >= self.num_levels:
            raise CodecError(
                f"a stream with levels up to {chunk.header.last_level}; "
                f"the profile has {self.num_levels}"
            )
        wanted = chunk.pick_level(level)
        arrays = self.profile.transform
        try:
            raw = self._read_raw(chunk, shape.num_tokens)
            tiles = self._decode_base(chunk, shape.num_tokens)
            for refined in range(chunk.header.first_level + 1, wanted + 1):
                tiles = self._decode_refinement(chunk, tiles, refined)
            kvquant.dequantise(
                tiles, self.dtype.name, arrays, wanted, out, raw=raw, engine=self.engine
            )
        except CodecError:
            raise
        except ValueError as error:  # RansError, KvQuantError, and checks of what was read
            raise CodecError(f"a chunk of codec hier is damaged: {error}") from error

    def _check_shape(self, planes: PlaneArray) -> None:
        profile = self.profile
        want = (profile.num_planes, profile.num_channels)
        if (planes.shape[0], planes.shape[2]) != want:
            raise CodecError(
                f"the profile is for {want[0]} planes of {want[1]} channels, got {planes.shape}"
            )
        if (want[0] * want[1] + LANES) * planes.shape[1] >= 1 << 32:
            raise CodecError(f"{planes.shape[1]} tokens are too many for one chunk; split it")

    def _encode_symbols(self, layer: kvquant.Symbols) -> bytes:
        if not len(layer.symbols):
            return b""
        group = rans.tiles_per_group_for(layer.symbols.shape[1])
        return pack_symbols(
            rans.encode(
                layer.symbols, layer.classes, self._tables, group, layer.contexts, self.engine
            )
        )

    def _decode_symbols(
        self, data: memoryview, classes: Any, contexts: Any, num_tokens: int
    ) -> tuple[Any, memoryview]:
        """Symbols u8 [N, T, 32], and what follows them in `data`."""
        symbols = np.empty((len(classes), num_tokens, LANES), np.uint8)
        if not len(classes):
            return symbols, data
        group = rans.tiles_per_group_for(num_tokens)
        coded, rest = unpack_symbols(data, rans.num_groups(len(classes), group))
        rans.decode(coded, classes, self._tables, num_tokens, group, contexts, symbols, self.engine)
        return symbols, rest

    def _decode_base(self, chunk: Chunk, num_tokens: int) -> Any:
        level = chunk.header.first_level
        arrays = self.profile.transform
        data = chunk.section(_BASE, level)
        symbols, rest = self._decode_symbols(data, arrays.layout(level).classes, None, num_tokens)
        count, odd = divmod(len(rest), _ESCAPE_BYTES)
        if odd:
            raise CodecError(f"{len(rest)} bytes of escapes are no multiple of {_ESCAPE_BYTES}")
        index = np.frombuffer(rest, "<u4", count).astype(np.uint32)
        value = np.frombuffer(rest, "<i2", count, offset=4 * count).astype(np.int16)
        return kvquant.base_tiles(symbols, kvquant.Escapes(index, value), arrays, level)

    def _decode_refinement(self, chunk: Chunk, tiles: Any, level: int) -> Any:
        arrays = self.profile.transform
        spread = kvquant.spread(tiles, arrays, level)
        symbols, rest = self._decode_symbols(
            chunk.section(_REFINEMENT, level),
            arrays.layout(level).refine_classes,
            kvquant.contexts(spread),
            spread.shape[1],
        )
        if len(rest):
            raise CodecError(f"{len(rest)} bytes follow the refinement to level {level}")
        return kvquant.refine(spread, symbols, arrays, level)

    def _read_raw(self, chunk: Chunk, num_tokens: int) -> kvquant.RawRows | None:
        first = chunk.header.first_level
        if not any(entry.kind == _RAW_ROWS for entry in chunk.header.sections):
            return None
        data = chunk.section(_RAW_ROWS, first)
        if len(data) < _RAW_HEAD.size:
            raise CodecError(f"raw rows of {len(data)} bytes")
        num_sinks, num_rows = _RAW_HEAD.unpack_from(data)
        arrays = self.profile.transform
        if num_sinks > num_tokens or num_rows > arrays.num_blocks * num_tokens:
            raise CodecError(f"{num_sinks} raw tokens and {num_rows} raw rows are too many")
        sink_values = arrays.num_planes * num_sinks * arrays.num_channels
        values = sink_values + num_rows * arrays.block_channels
        width = self.dtype.value_bytes
        content = decompress_exactly(data[_RAW_HEAD.size :], 4 * num_rows + width * values)
        index = content[: 4 * num_rows].view("<u4").astype(np.uint32)
        bits = np.ascontiguousarray(content[4 * num_rows :].reshape(width, -1).T)
        bits = bits.reshape(-1).view(self.dtype.storage)
        return kvquant.RawRows(
            index,
            bits[sink_values:].reshape(num_rows, arrays.block_channels),
            bits[:sink_values].reshape(arrays.num_planes, num_sinks, arrays.num_channels),
        )


def _raw_sections(raw: kvquant.RawRows, level: int) -> list[Section]:
    """No section if there is nothing raw.

    u32 raw tokens, u32 raw rows; then, in a zstandard frame, u32 index of each row, and the values
    of tokens [S, tokens, C] and rows [rows, n] as byte planes.
    """
    num_sinks, num_rows = raw.sinks.shape[1], len(raw.index)
    if not num_sinks and not num_rows:
        return []
    bits = np.concatenate((raw.sinks.reshape(-1), raw.bits.reshape(-1)))
    planes = bits.view(np.uint8).reshape(-1, bits.itemsize).T
    content = raw.index.astype("<u4").tobytes() + planes.tobytes()
    frame = zstandard.ZstdCompressor(level=_RAW_ZSTD_LEVEL).compress(content)
    return [Section(_RAW_ROWS, level, _RAW_HEAD.pack(num_sinks, num_rows) + frame)]
