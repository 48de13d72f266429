"""The codec `none`: bit patterns as they are, in the container that checks them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_ext.codec.base import Codec, CodecError, KVDtype, PlaneArray, check_out, check_planes
from sglang_ext.codec.container import Buffer, Chunk, Section, write_chunk

_VALUES = 1  # section kind; stored on disk, never renumber


def check_only_level(level: int | None, last_level: int | None) -> None:
    """Checks the level arguments of a codec that has level 0 only.

    Raises:
        CodecError: another level was asked for.
    """
    if level not in (None, 0) or last_level not in (None, 0):
        raise CodecError(f"a lossless codec has level 0 only, asked for {level} to {last_level}")


def open_only_level(data: Buffer, out: PlaneArray, codec: Codec, level: int | None) -> Chunk:
    """Opens the stream of a codec that has level 0 only, for decoding into `out`.

    Raises:
        CodecError: as `Codec.decode`.
    """
    shape = check_out(out, codec.dtype)
    chunk = Chunk(data, codec_id=codec.codec_id, dtype=codec.dtype, shape=shape)
    chunk.pick_level(level)
    return chunk


def copy_values(values: memoryview, out: PlaneArray) -> None:
    """Fills `out` with values that were stored as they are.

    Raises:
        CodecError: they are of another length.
    """
    if len(values) != out.nbytes:
        raise CodecError(f"a chunk of {out.nbytes} bytes was stored as {len(values)}")
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(values, np.uint8)


class NoneCodec(Codec):
    """No compression. `profile` and `engine` are ignored."""

    codec_id = "none"
    lossy = False

    def __init__(self, dtype: KVDtype, *, profile: Any = None, engine: str = "numba"):
        self.dtype = dtype

    def encode(
        self,
        planes: PlaneArray,
        *,
        level: int | None = None,
        last_level: int | None = None,
        raw_tokens: int | None = None,
    ) -> bytes:
        """See :meth:`Codec.encode`. All tokens are kept exactly."""
        shape = check_planes(planes, self.dtype)
        check_only_level(level, last_level)
        values = planes.reshape(-1).view(np.uint8).data
        return write_chunk(self.codec_id, self.dtype, shape, [Section(_VALUES, 0, values)])

    def decode(self, data: Buffer, out: PlaneArray, *, level: int | None = None) -> None:
        """See :meth:`Codec.decode`."""
        chunk = open_only_level(data, out, self, level)
        copy_values(chunk.section(_VALUES, 0), out)
