"""Offline tables of `cachegen-paper`: measured once for a model on other text, kept in a file.

For each plane the standard deviation of its deltas; for each (plane, channel) the frequencies of
anchor symbols, and of delta symbols at each level.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from sglang_ext.codec.base import (
    MAX_CHANNELS,
    MAX_PLANES,
    CodecError,
    LearnedShape,
    PlaneArray,
    kv_dtype,
)
from sglang_ext.codec.cachegen.stream import finite_plane
from sglang_ext.codec.float_bits import F32
from sglang_ext.kernels import ac
from sglang_ext.tiers.access import write_private

GROUP_TOKENS = 10
ANCHOR_MAX = 127
DELTA_RADIUS = 126
ESCAPE = 2 * DELTA_RADIUS + 1
NUM_SYMBOLS = 256
FACTORS = (1.0, 0.5, 0.25)  # levels x1.0, x0.5, x0.25: finer upwards
_BINS = (0.5, 1.0, 1.5)  # first, middle and last third of the layers
_MAX_QUOTIENT = (1 << 31) - 1
_PRIOR_COUNT = 8.0
_MAX_VALUES = 1 << 31

# Stored on disk; never renumber.
_MAGIC, _VERSION = b"HKCT", 1
_HEAD = struct.Struct("<4sHHII")  # magic, version, planes per layer, S, C


@dataclass(frozen=True)
class PaperTables:
    """What `cachegen-paper` knows of a model.

    Attributes:
        planes_per_layer: 2, or 1 for MLA.
        deviations: f32 [S], standard deviation of the deltas of each plane.
        anchor_freqs: u16 [S, C, 256], each row sums to 65,536.
        delta_freqs: u16 [levels, S, C, 256], likewise.
    """

    planes_per_layer: int
    deviations: F32
    anchor_freqs: NDArray[np.uint16]
    delta_freqs: NDArray[np.uint16]

    def steps(self, level: int) -> F32:
        """Each plane's step [S]: the bin of its layer, times the level's factor and deviation."""
        num_planes = len(self.deviations)
        layers = np.arange(num_planes) // self.planes_per_layer
        thirds = layers * 3 * self.planes_per_layer // num_planes
        steps = np.array(_BINS)[thirds] * FACTORS[level] * self.deviations
        return np.asarray(steps, np.float32)

    def cdfs(self, level: int) -> NDArray[np.uint32]:
        """Cumulative tables [S * C * 2, 257]: of each (plane, channel) anchors', then deltas'."""
        both = np.stack([self.anchor_freqs, self.delta_freqs[level]], axis=2)
        return ac.cdfs_of(both.reshape(-1, NUM_SYMBOLS))

    @property
    def digest(self) -> int:
        """64 bits of a digest of the content, to name it in streams."""
        digest = hashlib.blake2b(self._content(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.deviations.nbytes + self.anchor_freqs.nbytes + self.delta_freqs.nbytes

    def save(self, path: Path) -> None:
        """Writes a file that `load` reads."""
        num_planes, num_channels, _ = self.anchor_freqs.shape
        head = _HEAD.pack(_MAGIC, _VERSION, self.planes_per_layer, num_planes, num_channels)
        body = head + zstandard.ZstdCompressor(level=9).compress(self._content())
        write_private(path, body + xxhash.xxh3_64_digest(body))

    @classmethod
    def load(cls, path: Path) -> PaperTables:
        """Reads what `save` wrote.

        Raises:
            CodecError: it is no such file, or a damaged one.
        """
        try:
            return cls.from_bytes(path.read_bytes())
        except CodecError as error:
            raise CodecError(f"{path}: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, shape: LearnedShape | None = None) -> PaperTables:
        """The tables in a file's content; of this shape, where somebody else may have made it.

        Raises:
            CodecError: there are none, they are damaged, or of another model.
        """
        if len(data) < _HEAD.size + 8 or xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            raise CodecError("these are no tables of cachegen-paper, or they are damaged")
        magic, version, per_layer, num_planes, num_channels = _HEAD.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION) or per_layer not in (1, 2):
            raise CodecError(f"expected {_MAGIC!r} version {_VERSION}")
        num_rows = num_planes * num_channels * (1 + len(FACTORS))
        if not (0 < num_planes <= MAX_PLANES and 0 < num_channels <= MAX_CHANNELS):
            raise CodecError(f"no model has {num_planes} planes of {num_channels} channels")
        if shape is not None and (num_planes, num_channels) != shape:
            raise CodecError(f"tables of {num_planes} planes of {num_channels}, not of {shape}")
        size = 4 * num_planes + 2 * NUM_SYMBOLS * num_rows
        if num_planes % per_layer or size > _MAX_VALUES:
            raise CodecError(f"{num_planes} planes of {num_channels} channels do not fit")
        content = _decompress(data[_HEAD.size : -8], size)
        deviations = np.frombuffer(content, "<f4", num_planes)
        freqs = np.frombuffer(content, "<u2", offset=4 * num_planes)
        freqs = freqs.reshape(-1, num_planes, num_channels, NUM_SYMBOLS)
        if not np.all(np.isfinite(deviations) & (deviations > 0)):
            raise CodecError("a deviation is no positive number")
        if freqs.min() < 1 or np.any(freqs.sum(axis=-1, dtype=np.int64) != ac.api.TOTAL):
            raise CodecError(f"frequencies are 0 or do not sum to {ac.api.TOTAL}")
        return cls(per_layer, deviations, freqs[0], freqs[1:])

    def _content(self) -> bytes:
        arrays = (self.anchor_freqs.astype("<u2"), self.delta_freqs.astype("<u2"))
        return self.deviations.astype("<f4").tobytes() + b"".join(a.tobytes() for a in arrays)


def max_file_bytes(shape: LearnedShape) -> int:
    """No file of a model is longer."""
    num_rows = shape.num_planes * shape.num_channels * (1 + len(FACTORS))
    return (1 << 16) + (4 * shape.num_planes + 2 * NUM_SYMBOLS * num_rows) * 65 // 64


def _decompress(data: bytes, size: int) -> bytes:
    try:
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CodecError(str(error)) from error
    if len(content) != size:
        raise CodecError(f"expected {size} bytes, got {len(content)}")
    return content


def quantise_anchors(values: F32) -> tuple[NDArray[np.int32], F32]:
    """Anchors f32 [G, C] to -127..127 by each row's largest size; the sizes f32 [G]."""
    sizes = np.abs(values).max(axis=1)
    divisor = np.where(sizes > 0, sizes, 1)[:, None]
    return np.rint(values.astype(np.float64) * ANCHOR_MAX / divisor).astype(np.int32), sizes


def anchor_values(quotients: NDArray[np.int32], sizes: F32) -> F32:
    """The values f32 [G, C] that anchors decode to, before they are rounded to the KV dtype."""
    parts = quotients.astype(np.float32) / np.float32(ANCHOR_MAX)
    return np.asarray(parts * sizes[:, None], np.float32)


def deltas_of(values: F32, anchors: F32) -> NDArray[np.float64]:
    """Rows f32 [T, C] minus the decoded anchor of their group; anchors' own rows are 0."""
    spread = np.repeat(anchors, GROUP_TOKENS, axis=0)[: len(values)]
    deltas = values.astype(np.float64) - spread
    deltas[::GROUP_TOKENS] = 0
    return np.asarray(deltas)


def quantise_deltas(deltas: NDArray[np.float64], step: float) -> NDArray[np.int32]:
    """Deltas to whole steps, limited to 32 bits."""
    quotients = np.clip(np.rint(deltas / step), -_MAX_QUOTIENT, _MAX_QUOTIENT)
    return np.asarray(quotients, np.int32)


def symbols_of(quotients: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Delta symbols: shifted by the radius, `ESCAPE` beyond it."""
    inside = np.abs(quotients.astype(np.int64)) <= DELTA_RADIUS
    return np.where(inside, quotients + DELTA_RADIUS, ESCAPE).astype(np.uint8)


def measure_tables(
    chunks: Sequence[PlaneArray], dtype: str, *, planes_per_layer: int = 2
) -> PaperTables:
    """Tables from chunks [S, T, C] of calibration text, which may differ in T.

    A frequency is a channel's count plus a little of its plane's distribution, so that a symbol
    that a channel never showed has a fair price. A plane whose deltas are all 0 gets deviation 1.

    Raises:
        ValueError: no chunk has a second token in a group, or shapes differ.
    """
    shapes = {(chunk.shape[0], chunk.shape[2]) for chunk in chunks}
    if len(shapes) != 1 or all(chunk.shape[1] < 2 for chunk in chunks):
        raise ValueError(f"expected chunks of one model and over one token, got shapes {shapes}")
    ((num_planes, num_channels),) = shapes
    deviations = np.empty(num_planes, np.float32)
    freqs = np.empty((1 + len(FACTORS), num_planes, num_channels, NUM_SYMBOLS), np.uint16)
    for plane in range(num_planes):
        anchors, deltas = _plane_samples([chunk[plane] for chunk in chunks], dtype)
        deviations[plane] = float(deltas.std()) or 1.0
        freqs[0, plane] = _freqs((anchors + ANCHOR_MAX).astype(np.uint8))
        tables = PaperTables(planes_per_layer, deviations, freqs[0], freqs[1:])
        for level in range(len(FACTORS)):
            step = float(tables.steps(level)[plane])
            freqs[1 + level, plane] = _freqs(symbols_of(quantise_deltas(deltas, step)))
    return PaperTables(planes_per_layer, deviations, freqs[0], freqs[1:])


def _plane_samples(
    chunks: Sequence[PlaneArray], dtype: str
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Anchors [., C] and deltas [., C] of one plane over all chunks."""
    anchors, deltas = [], []
    for chunk in chunks:
        values, bad = finite_plane(chunk, kv_dtype(dtype))
        quotients, sizes = quantise_anchors(values[::GROUP_TOKENS])
        kept = ~bad & (np.arange(len(values)) % GROUP_TOKENS != 0)
        deltas.append(deltas_of(values, anchor_values(quotients, sizes))[kept])
        anchors.append(quotients)
    return np.concatenate(anchors), np.concatenate(deltas)


def _freqs(symbols: NDArray[np.uint8]) -> NDArray[Any]:
    """Frequencies [C, 256] that sum to 65,536, of symbols [N, C]."""
    num_channels = symbols.shape[1]
    places = symbols.astype(np.int64) + np.arange(num_channels) * NUM_SYMBOLS
    counts = np.bincount(places.reshape(-1), minlength=num_channels * NUM_SYMBOLS)
    counts = counts.reshape(num_channels, NUM_SYMBOLS).astype(np.float64)
    whole = counts.sum(axis=0)
    shares = counts + _PRIOR_COUNT * (whole + 1e-9) / (whole + 1e-9).sum()
    shares /= shares.sum(axis=1, keepdims=True)
    freqs = 1 + np.floor(shares * (ac.api.TOTAL - NUM_SYMBOLS)).astype(np.int64)
    best = freqs.argmax(axis=1)
    freqs[np.arange(num_channels), best] += ac.api.TOTAL - freqs.sum(axis=1)
    return np.asarray(freqs)
