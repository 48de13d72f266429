"""The codec `lossless`: bit-exact for every bit pattern, smaller than a general compressor.

Values of one channel are close to each other, on a linear scale. A channel's line is cut into cells
of 2^k smallest units, a quarter to an eighth of its standard deviation, and a value is coded as

- the distance of its cell from the expected one, as a symbol, with rANS and a table that was made
  for the channel's scale (`lossless_tables`); a distance that has no symbol is an escape;
- then, as plain bits, what the cell leaves open: the mantissa's lower bits. Within the two cells
  around zero the exponent is open too, and is sent in unary, which is its best code where a density
  is flat. After an escape come all the bits of the value.

Expected is the channel's mean over the chunk; or, for a row that looks like an earlier row of the
same plane (the same token again), the earlier row's value, with a scale narrowed for the row.
Cells are never finer than the last place of the channel's typical value.

Sections: channels (scale, family and mean of each), rows (references), symbols, low bits, and the
bits of values next to zero and of escapes. Where that is no gain, one section holds the values as
they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from sglang_ext.codec.base import ChunkShape, CodecError, KVDtype, PlaneArray
from sglang_ext.codec.coded_symbols import pack_symbols, unpack_symbols
from sglang_ext.codec.container import Chunk, Section
from sglang_ext.codec.lossless import lossless_kernels as kernels
from sglang_ext.codec.lossless.model import ChannelChoices, RowChoices, choose
from sglang_ext.codec.lossless.tables import NUM_FAMILIES, table_freqs
from sglang_ext.codec.one_level import OneLevelCodec, copy_values
from sglang_ext.codec.zstd import decompress_exactly
from sglang_ext.kernels.rans import api as rans
from sglang_ext.kernels.rans.tables import LANES, RansError, Tables

# Section kinds; stored on disk, never renumber.
_RAW, _CHANNELS, _ROWS, _SYMBOLS, _LOW, _RARE = 1, 2, 3, 4, 5, 6
_TILE_TOKENS = 512
_SIDE_LEVEL = 9  # zstd's, for channels and rows
_I64 = npt.NDArray[np.int64]


class LosslessCodec(OneLevelCodec):
    """Bit-exact. `profile` is ignored; `engine` is rANS's, the rest runs in numba."""

    codec_id = "lossless"

    def __init__(self, dtype: KVDtype, *, profile: Any = None, engine: str = "numba"):
        self.dtype = dtype
        self.engine: Any = engine

    def sections(self, planes: PlaneArray) -> list[Section]:
        """What is coded, or the values as they are where that is no gain."""
        coded = self._coded(planes)
        if sum(len(section.data) for section in coded) < planes.nbytes:
            return coded
        return [Section(_RAW, 0, planes.reshape(-1).view(np.uint8).data)]

    def fill(self, chunk: Chunk, out: PlaneArray) -> None:
        """See :meth:`OneLevelCodec.fill`."""
        if chunk.header.sections[0].kind == _RAW:
            copy_values(chunk.section(_RAW, 0), out)
            return
        shape = ChunkShape(*out.shape)
        channels = _read_channels(chunk.section(_CHANNELS, 0), shape)
        rows = _read_rows(chunk.section(_ROWS, 0), shape)
        references = _references(rows)
        symbols = self._decode_symbols(chunk.section(_SYMBOLS, 0), channels, rows, shape)
        low, rare = _read_words(chunk.section(_LOW, 0)), _read_words(chunk.section(_RARE, 0))
        used = kernels.restore_values(
            out, rows.modes, references, channels.scales, channels.means, symbols, *low, *rare,
            self.dtype.mantissa_bits, self.dtype.exponent_bits,
        )  # fmt: skip
        if not (0 <= low[1] - used[0] < 8 and 0 <= rare[1] - used[1] < 8):
            raise CodecError("the low bits of a lossless chunk do not fit its symbols")

    def _coded(self, planes: PlaneArray) -> list[Section]:
        channels, rows = choose(planes, self.dtype)
        tables = self._tables(channels, rows, planes.size)
        symbols = np.zeros(tables.shape, np.uint8)
        bits = self.dtype.mantissa_bits + self.dtype.exponent_bits
        low = np.zeros(planes.size * bits // 64 + 2, np.uint64)
        rare = np.zeros(planes.size * (bits + 9) // 64 + 2, np.uint64)
        num_low, num_rare = kernels.code_values(
            planes, rows.modes, _references(rows), channels.scales, channels.means,
            tables.reshape(-1), _tables().freqs > 0, self.dtype.mantissa_bits,
            self.dtype.exponent_bits, symbols.reshape(-1), low, rare,
        )  # fmt: skip
        coded = rans.encode(
            symbols, _classes(tables), _tables(), _group(tables), tables, self.engine
        )
        return [
            Section(_CHANNELS, 0, _write_channels(channels)),
            Section(_ROWS, 0, _write_rows(rows)),
            Section(_SYMBOLS, 0, pack_symbols(coded)),
            Section(_LOW, 0, _write_words(low, num_low)),
            Section(_RARE, 0, _write_words(rare, num_rare)),
        ]

    def _tables(
        self, channels: ChannelChoices, rows: RowChoices, num_values: int
    ) -> npt.NDArray[np.uint8]:
        """Tables u8 [N, T', 32] of the coded values in order, `PADDING_TABLE` behind them."""
        num_coded = int((rows.modes != kernels.MODE_COPY).sum()) * channels.scales.shape[1]
        tokens = min(_TILE_TOKENS, -(-num_coded // LANES))
        tables = np.zeros((-(-num_coded // (LANES * tokens)), tokens, LANES), np.uint8)
        kernels.fill_tables(
            rows.modes, channels.scales, channels.families, channels.means,
            self.dtype.mantissa_bits, tables.reshape(-1),
        )  # fmt: skip
        return tables

    def _decode_symbols(
        self, data: memoryview, channels: ChannelChoices, rows: RowChoices, shape: ChunkShape
    ) -> npt.NDArray[np.uint8]:
        tables = self._tables(channels, rows, shape.num_values)
        group = _group(tables)
        coded, rest = unpack_symbols(data, rans.num_groups(len(tables), group))
        if len(rest):
            raise CodecError(f"{len(rest)} bytes follow the symbols of a lossless chunk")
        symbols = np.empty(tables.shape, np.uint8)
        try:
            rans.decode(
                coded, _classes(tables), _tables(), tables.shape[1], group, tables, symbols,
                self.engine,
            )  # fmt: skip
        except RansError as error:
            raise CodecError(f"the symbols of a lossless chunk are damaged: {error}") from error
        return symbols.reshape(-1)


@cache
def _tables() -> Tables:
    return Tables(table_freqs())


def _classes(tables: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    return np.zeros((len(tables), LANES), np.uint16)


def _group(tables: npt.NDArray[np.uint8]) -> int:
    return rans.tiles_per_group_for(tables.shape[1])


def _write_channels(channels: ChannelChoices) -> bytes:
    """u16 scale | family << 15, i32 mean, as byte planes."""
    scales = channels.scales.astype("<u2") | channels.families.astype("<u2") << np.uint16(15)
    means = channels.means.astype("<i4")
    raw = b"".join(
        array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes() for array in (scales, means)
    )
    return zstandard.ZstdCompressor(level=_SIDE_LEVEL).compress(raw)


def _read_channels(data: memoryview, shape: ChunkShape) -> ChannelChoices:
    axes = (shape.num_planes, shape.num_channels)
    count = shape.num_planes * shape.num_channels
    raw = decompress_exactly(data, 6 * count)
    packed = np.ascontiguousarray(raw[: 2 * count].reshape(2, -1).T).view("<u2").reshape(axes)
    means = np.ascontiguousarray(raw[2 * count :].reshape(4, -1).T).view("<i4").reshape(axes)
    scales = (packed & np.uint16(0x7FFF)).astype(np.int16)
    if ((scales > kernels.MAX_SCALE) & (scales != kernels.RAW_SCALE)).any():
        raise CodecError(f"a channel's scale is {scales.max()}, over {kernels.MAX_SCALE}")
    families = (packed >> np.uint16(15)).astype(np.uint8)
    return ChannelChoices(scales, families, means.astype(np.int32))


def _write_rows(rows: RowChoices) -> bytes:
    links = rows.links.astype("<u4").view(np.uint8).reshape(-1, 4).T
    raw = b"".join((links.tobytes(), rows.hops.tobytes(), rows.modes.tobytes()))
    return zstandard.ZstdCompressor(level=_SIDE_LEVEL).compress(raw)


def _read_rows(data: memoryview, shape: ChunkShape) -> RowChoices:
    count, num_tokens = shape.num_planes * shape.num_tokens, shape.num_tokens
    raw = decompress_exactly(data, 4 * num_tokens + 2 * count)
    links = np.ascontiguousarray(raw[: 4 * num_tokens].reshape(4, -1).T).view("<u4").reshape(-1)
    hops, modes = raw[4 * num_tokens :].reshape(2, shape.num_planes, num_tokens).copy()
    if (links > np.arange(num_tokens)).any():
        raise CodecError("a token of a lossless chunk links to one before the first")
    if hops.max() > kernels.MAX_HOPS or modes.max() > kernels.MODE_REFERENCE + kernels.MAX_NARROWER:
        raise CodecError(f"a row is of mode {modes.max()}, {hops.max()} hops; this is not known")
    if ((modes == kernels.MODE_BASE) != (hops == 0)).any():
        raise CodecError("a row of a lossless chunk has a reference without a mode, or the reverse")
    return RowChoices(links.astype(np.uint32), hops, modes)


def _write_words(words: npt.NDArray[np.uint64], num_bits: int) -> memoryview:
    """The first `num_bits` bits, in whole bytes."""
    return words.astype("<u8", copy=False).view(np.uint8)[: -(-num_bits // 8)].data


def _read_words(data: memoryview) -> tuple[npt.NDArray[np.uint64], int]:
    """Bits as u64 words, with two words more than they fill, and their number."""
    padded = np.zeros(len(data) // 8 + 3, "<u8")
    padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return padded.astype(np.uint64, copy=False), 8 * len(data)


def _references(rows: RowChoices) -> _I64:
    """Token i64 [S, T] that each row refers to, itself for rows without.

    Raises:
        CodecError: a row's links end before its hops do.
    """
    num_tokens = len(rows.links)
    back = np.arange(num_tokens) - rows.links
    references = np.broadcast_to(np.arange(num_tokens), rows.hops.shape).copy()
    for hop in range(int(rows.hops.max())):
        going = rows.hops > hop
        if (rows.links[references[going]] == 0).any():
            raise CodecError("a row of a lossless chunk refers to a token without a link")
        references[going] = back[references[going]]
    return references


assert NUM_FAMILIES == 2  # one bit in the channels section
