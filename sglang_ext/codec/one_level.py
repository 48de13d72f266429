"""Codecs that keep every bit and have one level: what they do alike around their sections."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from sglang_ext.codec.base import Codec, CodecError, PlaneArray, check_out, check_planes
from sglang_ext.codec.container import Buffer, Chunk, Section, write_chunk


class OneLevelCodec(Codec):
    """A lossless codec whose streams are sections of level 0 in a container that checks them."""

    lossy = False

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
        if level not in (None, 0) or last_level not in (None, 0):
            raise CodecError(
                f"a lossless codec has level 0 only, asked for {level} to {last_level}"
            )
        return write_chunk(self.codec_id, self.dtype, shape, self.sections(planes))

    def decode(self, data: Buffer, out: PlaneArray, *, level: int | None = None) -> None:
        """See :meth:`Codec.decode`."""
        shape = check_out(out, self.dtype)
        chunk = Chunk(data, codec_id=self.codec_id, dtype=self.dtype, shape=shape)
        chunk.pick_level(level)
        self.fill(chunk, out)

    @abstractmethod
    def sections(self, planes: PlaneArray) -> list[Section]:
        """The sections of a stream, all of level 0."""

    @abstractmethod
    def fill(self, chunk: Chunk, out: PlaneArray) -> None:
        """Decodes a stream's sections into `out`.

        Raises:
            CodecError: they are damaged or of something else.
        """


def copy_values(values: memoryview, out: PlaneArray) -> None:
    """Fills `out` with values that were stored as they are.

    Raises:
        CodecError: they are of another length.
    """
    if len(values) != out.nbytes:
        raise CodecError(f"a chunk of {out.nbytes} bytes was stored as {len(values)}")
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(values, np.uint8)
