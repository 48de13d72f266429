"""What the two CacheGen baselines share: their container, and rows kept as they are.

Layout, little endian: a fixed header, the sections' lengths, the sections, xxh3 of all before it.
Every length is checked against the array to fill before anything is allocated or read by it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_ext.codec.base import Codec, CodecError, KVDtype, PlaneArray, check_out, check_planes
from sglang_ext.codec.float_bits import F32, to_float32

# Stored on disk; never renumber. Magic, version, dtype code, level, S, T, C, digest of the tables.
_HEADER = struct.Struct("<4sHBBIIIQ")
_VERSION = 1
_CHECKSUM_BYTES = 8
_INDEX = np.dtype("<u4")


@dataclass(frozen=True)
class Header:
    """Who wrote a stream and what for.

    Attributes:
        magic: 4 bytes, the codec's own.
        dtype: the KV dtype.
        level: the codec's level.
        shape: (S, T, C).
        tables: first 8 bytes of the digest of the tables it was written under, 0 without any.
    """

    magic: bytes
    dtype: KVDtype
    level: int
    shape: tuple[int, int, int]
    tables: int = 0


def pack(header: Header, sections: Sequence[bytes]) -> bytes:
    """The stream as bytes."""
    head = _HEADER.pack(
        header.magic, _VERSION, header.dtype.code, header.level, *header.shape, header.tables
    )
    lengths = struct.pack(f"<{len(sections)}I", *map(len, sections))
    body = b"".join((head, lengths, *sections))
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


def unpack(
    data: bytes | memoryview, expected: Header, num_levels: int, num_sections: int
) -> tuple[int, list[memoryview]]:
    """The stream's level and sections, after its header was found equal to the `expected` one.

    Args:
        data: bytes of any origin.
        expected: what the header has to say; its level is not compared.
        num_levels: levels there are.
        num_sections: sections that the codec writes.

    Raises:
        CodecError: the bytes are damaged, cut short, or not what is expected.
    """
    view = memoryview(data).cast("B")
    lengths_end = _HEADER.size + 4 * num_sections
    if len(view) < lengths_end + _CHECKSUM_BYTES:
        raise CodecError(
            f"expected at least {lengths_end + _CHECKSUM_BYTES} bytes, got {len(view)}"
        )
    magic, version, dtype, level, *rest = _HEADER.unpack_from(view)
    if (magic, version) != (expected.magic, _VERSION):
        raise CodecError(f"expected {expected.magic!r} version {_VERSION}, got {magic!r} {version}")
    found = (dtype, tuple(rest[:3]), rest[3])
    wanted = (expected.dtype.code, expected.shape, expected.tables)
    if found != wanted or level >= num_levels:
        raise CodecError(
            f"expected (dtype code, shape, tables) {wanted} at one of {num_levels} levels, "
            f"got {found} at level {level}"
        )
    lengths = struct.unpack_from(f"<{num_sections}I", view, _HEADER.size)
    end = len(view) - _CHECKSUM_BYTES
    if lengths_end + sum(lengths) != end:
        raise CodecError(f"sections have {sum(lengths)} bytes, the stream {end - lengths_end}")
    if xxhash.xxh3_64_intdigest(view[:end]) != int.from_bytes(view[end:], "little"):
        raise CodecError("the checksum does not match")
    starts = [lengths_end + sum(lengths[:at]) for at in range(num_sections)]
    return level, [view[a : a + size] for a, size in zip(starts, lengths, strict=True)]


def read_array(section: memoryview, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A section as an array of exactly this shape.

    Raises:
        CodecError: it has another number of bytes.
    """
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if len(section) != expected:
        raise CodecError(f"a section has {len(section)} bytes, expected {expected}")
    return np.frombuffer(section, dtype).reshape(shape)


def pack_rows(planes: PlaneArray, rows: NDArray[np.bool_]) -> bytes:
    """Marked rows [S, T] of the planes as they are: plane * T + token, then C values."""
    places = np.flatnonzero(rows).astype(_INDEX)
    values = planes.reshape(-1, planes.shape[2])[places]
    return places.tobytes() + values.tobytes()


def unpack_rows(section: memoryview, out: PlaneArray) -> None:
    """Puts the rows of `pack_rows` back.

    Raises:
        CodecError: no whole rows, or places that do not rise or lie outside.
    """
    num_rows, num_channels = out.shape[0] * out.shape[1], out.shape[2]
    count, rest = divmod(len(section), _INDEX.itemsize + num_channels * out.dtype.itemsize)
    if rest or count > num_rows:
        raise CodecError(f"{len(section)} bytes are no rows of {num_channels} values")
    split = count * _INDEX.itemsize
    places = np.frombuffer(section[:split], _INDEX).astype(np.int64)
    check_places(places, num_rows)
    values = np.frombuffer(section[split:], out.dtype).reshape(count, num_channels)
    out.reshape(num_rows, num_channels)[places] = values


def check_places(places: NDArray[np.int64], limit: int) -> None:
    """Places have to rise and to be below `limit`.

    Raises:
        CodecError: they do not.
    """
    if places.size and (int(places[-1]) >= limit or np.any(np.diff(places) <= 0)):
        raise CodecError(f"expected rising places below {limit}")


def finite_plane(plane: PlaneArray, dtype: KVDtype) -> tuple[F32, NDArray[np.bool_]]:
    """A plane [T, C] as float32, rows that hold NaN or infinity set to 0, and which they are."""
    values = np.array(to_float32(plane, dtype.name))
    bad = np.asarray(np.logical_not(np.isfinite(values).all(axis=1)), np.bool_)
    values[bad] = 0
    return values, bad


class CachegenCodec(Codec):
    """What the two codecs do alike.

    Args:
        dtype: the KV dtype.
        planes_per_layer: 2 for K and V, 1 for MLA, whose one plane is treated as K.
    """

    lossy = True
    num_levels = 3
    default_level = 1
    magic: bytes
    num_sections: int

    def __init__(self, dtype: KVDtype, *, engine: str, planes_per_layer: int) -> None:
        if engine not in ("numba", "naive"):
            raise CodecError(f"{self.codec_id} has the engines numba and naive, got {engine!r}")
        if planes_per_layer not in (1, 2):
            raise CodecError(f"a layer has 1 or 2 planes, got {planes_per_layer}")
        self.dtype = dtype
        self.engine = engine
        self.planes_per_layer = planes_per_layer

    def encode(
        self,
        planes: PlaneArray,
        *,
        level: int | None = None,
        last_level: int | None = None,
        raw_tokens: int | None = None,
    ) -> bytes:
        """As `Codec.encode`. CacheGen keeps no tokens raw: `raw_tokens` changes nothing."""
        shape = check_planes(planes, self.dtype)
        level = self.default_level if level is None else level
        if not 0 <= level < self.num_levels or last_level not in (None, level):
            raise CodecError(
                f"{self.codec_id} has levels 0..{self.num_levels - 1} and one level a stream, "
                f"got {level} to {last_level}"
            )
        self.check_shape(shape.axes)
        sections = self.encode_sections(planes, level)
        return pack(self._header(level, shape.axes), sections)

    def decode(
        self, data: bytes | memoryview, out: PlaneArray, *, level: int | None = None
    ) -> None:
        """As `Codec.decode`; a stream has one level, and `level` is that one or None."""
        shape = check_out(out, self.dtype)
        self.check_shape(shape.axes)
        expected = self._header(0, shape.axes)
        found, sections = unpack(data, expected, self.num_levels, self.num_sections)
        if level not in (None, found):
            raise CodecError(f"the stream is of level {found}, not {level}")
        self.decode_sections(sections, out, found)

    def check_shape(self, axes: tuple[int, int, int]) -> None:
        """Refuses a chunk that the format cannot hold (CodecError)."""
        if axes[0] % self.planes_per_layer:
            raise CodecError(
                f"expected whole layers of {self.planes_per_layer}, got {axes[0]} planes"
            )

    def encode_sections(self, planes: PlaneArray, level: int) -> list[bytes]:
        """The stream's sections."""
        raise NotImplementedError

    def decode_sections(self, sections: list[memoryview], out: PlaneArray, level: int) -> None:
        """Fills `out` from the sections."""
        raise NotImplementedError

    def tables_id(self) -> int:
        """What the header says of tables."""
        return 0

    def _header(self, level: int, axes: tuple[int, int, int]) -> Header:
        return Header(self.magic, self.dtype, level, axes, self.tables_id())
