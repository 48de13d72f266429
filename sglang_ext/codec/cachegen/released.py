"""`cachegen-released`: what CacheGen's published code does, as a baseline.

It is not the codec of the paper: no anchors, no deltas, no offline tables. Written from a
description of the code's behaviour:

- One scale per plane and token, the largest size in the row over all heads and channels;
  `q = round(x * m / scale + m)` with `m = bins // 2 - 1`, so 32 bins are 31 values.
- Bins by layer, K or V, and level: 32 to 12 (see `bins_of`).
- An arithmetic coder (`kernels/ac`) with a stream for each (plane, channel), cut every 256 tokens.
- The table of a stream is the histogram of its own chunk, 33 cumulative counts of 16 bits whatever
  the number of bins, and is stored: 66 bytes for each (plane, channel).
- A length for each stream, scales in the KV dtype. Lengths have 16 bits here, 32 there: a stream of
  256 symbols always fits, and the baseline shall not be larger than it has to be.

Its own container instead of the published one, which is a pickle of CUDA tensors. What that code
does not handle is handled so: an all-zero row has scale 0 and decodes to zeros; a row with NaN or
infinity is kept as it is; fewer layers, channels or tokens than any size divides by are no special
case. A chunk has at most 65,535 tokens, since counts have 16 bits there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_ext.codec.base import CodecError, KVDtype, PlaneArray
from sglang_ext.codec.cachegen.stream import (
    CachegenCodec,
    finite_plane,
    pack_rows,
    read_array,
    unpack_rows,
)
from sglang_ext.codec.float_bits import from_float32, to_float32
from sglang_ext.kernels import ac

PIECE_TOKENS = 256
NUM_SYMBOLS = 32
MAX_TOKENS = 65535
# Bins of (K in the first third of the layers, K after; V in the first two layers, V after).
_BINS = ((16, 12, 16, 12), (32, 16, 32, 16), (32, 32, 32, 32))
_NUM_EARLY_V = 2
_CDF_ENTRIES = NUM_SYMBOLS + 1


def bins_of(level: int, num_planes: int, planes_per_layer: int = 2) -> NDArray[np.int32]:
    """Bins of each plane [S].

    Levels L1, L2 and L3 are 0, 1 and 2. The first third of the layers is rounded to the nearest
    whole layer, at least one: 3 of 8, 11 of 32.
    """
    num_layers = num_planes // planes_per_layer
    early_k, late_k, early_v, late_v = _BINS[level]
    num_early_k = max(1, round(num_layers / 3))
    layers = np.arange(num_layers)
    bins = [np.where(layers < num_early_k, early_k, late_k)]
    if planes_per_layer == 2:
        bins.append(np.where(layers < _NUM_EARLY_V, early_v, late_v))
    return np.stack(bins, axis=1).reshape(-1).astype(np.int32)


class CachegenReleasedCodec(CachegenCodec):
    """CacheGen as released; see the module.

    Args:
        dtype: the KV dtype.
        profile: not used; tables travel in the stream.
        engine: `numba` or `naive`.
        planes_per_layer: 2, or 1 for MLA.
    """

    codec_id = "cachegen-released"
    level_names = ("L1", "L2", "L3")
    magic = b"HKCR"
    num_sections = 5  # scales, tables, lengths, rows kept, streams

    def __init__(
        self,
        dtype: KVDtype,
        *,
        profile: Any = None,
        engine: str = "numba",
        planes_per_layer: int = 2,
    ) -> None:
        super().__init__(dtype, engine=engine, planes_per_layer=planes_per_layer)

    def check_shape(self, axes: tuple[int, int, int]) -> None:
        """As the base class, and no more tokens than counts of 16 bits can count."""
        super().check_shape(axes)
        if axes[1] > MAX_TOKENS:
            raise CodecError(f"{self.codec_id} takes at most {MAX_TOKENS} tokens, got {axes[1]}")

    def encode_sections(self, planes: PlaneArray, level: int) -> list[bytes]:
        """Quantises, counts and codes."""
        symbols, scales, bad = self.quantise(planes, level)
        cdfs = histogram_cdfs(symbols)
        lengths, data = self._code(symbols, cdfs)
        return [
            scales.tobytes(),
            cdfs.astype("<u2").tobytes(),
            lengths.astype("<u2").tobytes(),
            pack_rows(planes, bad),
            data,
        ]

    def decode_sections(self, sections: list[memoryview], out: PlaneArray, level: int) -> None:
        """Decodes the streams and scales the symbols back."""
        num_planes, num_tokens, num_channels = out.shape
        num_streams = num_planes * num_channels
        num_pieces = -(-num_tokens // PIECE_TOKENS)
        scales = read_array(sections[0], self.dtype.storage, (num_planes, num_tokens))
        cdfs = read_array(sections[1], "<u2", (num_streams, _CDF_ENTRIES))
        lengths = read_array(sections[2], "<u2", (num_pieces, num_streams))
        data = np.frombuffer(sections[4], np.uint8)
        symbols = np.empty((num_streams, num_tokens), np.uint8)
        self._uncode(data, lengths.astype(np.uint32), cdfs.astype(np.uint32), symbols)
        self.dequantise(symbols.reshape(num_planes, num_channels, num_tokens), scales, level, out)
        unpack_rows(sections[3], out)

    def quantise(
        self, planes: PlaneArray, level: int
    ) -> tuple[NDArray[np.uint8], PlaneArray, NDArray[np.bool_]]:
        """Symbols u8 [S, C, T], scales as bits [S, T], and the rows [S, T] that are not finite."""
        num_planes, num_tokens, num_channels = planes.shape
        symbols = np.empty((num_planes, num_channels, num_tokens), np.uint8)
        scales = np.empty((num_planes, num_tokens), self.dtype.storage)
        bad = np.empty((num_planes, num_tokens), np.bool_)
        for plane, bins in enumerate(bins_of(level, num_planes, self.planes_per_layer)):
            middle = bins // 2 - 1
            values, bad[plane] = finite_plane(planes[plane], self.dtype)
            sizes = np.abs(values).max(axis=1)
            scales[plane] = from_float32(sizes, self.dtype.name)
            divisor = np.where(sizes > 0, sizes, 1)[:, None]
            quotients = values.astype(np.float64) * middle / divisor
            symbols[plane] = np.rint(quotients + middle).T
        return symbols, scales, bad

    def dequantise(
        self, symbols: NDArray[np.uint8], scales: PlaneArray, level: int, out: PlaneArray
    ) -> None:
        """The values that symbols u8 [S, C, T] and scales stand for, into `out`.

        Raises:
            CodecError: a symbol beyond its plane's bins, or a scale that is no size.
        """
        for plane, bins in enumerate(bins_of(level, len(out), self.planes_per_layer)):
            middle = bins // 2 - 1
            sizes = to_float32(scales[plane], self.dtype.name)
            if not np.all(np.isfinite(sizes) & (sizes >= 0)):
                raise CodecError("a scale is negative or not finite")
            if int(symbols[plane].max()) > 2 * middle:
                raise CodecError(f"a symbol lies beyond {bins} bins")
            parts = (symbols[plane].T.astype(np.float32) - np.float32(middle)) / np.float32(middle)
            out[plane] = from_float32(parts * sizes[:, None], self.dtype.name)

    def _code(
        self, symbols: NDArray[np.uint8], cdfs: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint32], bytes]:
        rows = symbols.reshape(-1, symbols.shape[2])
        tables = np.arange(len(rows), dtype=np.int32)[:, None]
        pieces = [
            ac.encode(
                rows[:, start : start + PIECE_TOKENS], _whole(cdfs), tables, engine=self.engine
            )
            for start in range(0, rows.shape[1], PIECE_TOKENS)
        ]
        lengths = np.stack([piece.lengths for piece in pieces])
        return lengths, b"".join(piece.data.tobytes() for piece in pieces)

    def _uncode(
        self,
        data: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        cdfs: NDArray[np.uint32],
        symbols: NDArray[np.uint8],
    ) -> None:
        sizes = lengths.sum(axis=1, dtype=np.int64)
        if int(sizes.sum()) != data.size:
            raise CodecError(f"lengths add up to {int(sizes.sum())} bytes, there are {data.size}")
        tables = np.arange(len(symbols), dtype=np.int32)[:, None]
        end = 0
        try:
            for piece, size in enumerate(sizes.tolist()):
                tokens = slice(piece * PIECE_TOKENS, (piece + 1) * PIECE_TOKENS)
                coded = ac.Coded(lengths[piece], data[end : end + size])
                part = np.empty_like(symbols[:, tokens], order="C")
                ac.decode(coded, _whole(cdfs), tables, part, engine=self.engine)
                symbols[:, tokens] = part
                end += size
        except ac.ACError as error:
            raise CodecError(str(error)) from error


def histogram_cdfs(symbols: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Cumulative counts [S * C, 33] of symbols u8 [S, C, T], scaled to 16 bits, each step > 0."""
    num_planes, num_channels, num_tokens = symbols.shape
    rows = symbols.reshape(-1, num_tokens).astype(np.int64)
    rows += np.arange(len(rows))[:, None] * NUM_SYMBOLS
    counts = np.bincount(rows.reshape(-1), minlength=num_planes * num_channels * NUM_SYMBOLS)
    cdfs = np.zeros((len(rows), _CDF_ENTRIES), np.int64)
    np.cumsum(counts.reshape(-1, NUM_SYMBOLS), axis=1, out=cdfs[:, 1:])
    cdfs = cdfs * (0xFFFF - NUM_SYMBOLS) // num_tokens + np.arange(_CDF_ENTRIES)
    return np.asarray(cdfs, np.uint32)


def _whole(cdfs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Stored tables end at 65,535 and mean 65,536, which has no 16 bits."""
    whole = cdfs.copy()
    whole[:, -1] += 1
    return whole
