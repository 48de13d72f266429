"""The codec `zstd`: Zstandard on byte planes, or on the values as they are.

Byte plane b holds byte b of every value. High bytes (sign, exponent) repeat and low bytes do not;
apart, they compress better.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from sglang_ext.codec.base import CodecError, KVDtype, PlaneArray
from sglang_ext.codec.container import Chunk, Section
from sglang_ext.codec.one_level import OneLevelCodec

# Section kinds; stored on disk, never renumber. Which byte order the values were in is the kind.
_RAW = 1
_BYTE_PLANES = 2


class ZstdCodec(OneLevelCodec):
    """Zstandard. `profile` and `engine` are ignored.

    Args:
        compression_level: Zstandard's own level, 1 to 22.
        byte_planes: whether to part the bytes of values (for one-byte dtypes it changes nothing).
            Streams of either kind are decoded whatever is set here.
    """

    codec_id = "zstd"

    def __init__(
        self,
        dtype: KVDtype,
        *,
        profile: Any = None,
        engine: str = "numba",
        compression_level: int = 3,
        byte_planes: bool = True,
    ):
        if not 1 <= compression_level <= 22:
            raise CodecError(f"zstd's compression level is 1 to 22, got {compression_level}")
        self.dtype = dtype
        self.compression_level = compression_level
        self.byte_planes = byte_planes

    def sections(self, planes: PlaneArray) -> list[Section]:
        """One frame of all values."""
        values = planes.reshape(-1).view(np.uint8).reshape(-1, self.dtype.value_bytes)
        if self.byte_planes:
            values = np.ascontiguousarray(values.T)
        # A compressor of its own for each call: they may not be shared between threads.
        frame = zstandard.ZstdCompressor(level=self.compression_level).compress(values.data)
        kind = _BYTE_PLANES if self.byte_planes else _RAW
        return [Section(kind, 0, frame)]

    def fill(self, chunk: Chunk, out: PlaneArray) -> None:
        """See :meth:`OneLevelCodec.fill`."""
        kind = chunk.header.sections[0].kind
        if kind not in (_RAW, _BYTE_PLANES):
            raise CodecError(f"zstd has no sections of kind {kind}")
        values = decompress_exactly(chunk.section(kind, 0), out.nbytes)
        target = out.reshape(-1).view(np.uint8).reshape(-1, self.dtype.value_bytes)
        if kind == _RAW:
            target[:] = values.reshape(target.shape)
        else:
            target[:] = values.reshape(target.shape[::-1]).T


def decompress_exactly(frame: memoryview, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decompresses a frame that must hold exactly `num_bytes`; allocates no more than that.

    Raises:
        CodecError: it is damaged or holds something else.
    """
    try:
        # The frame's own header says how long its content is; a frame without is not ours.
        if zstandard.frame_content_size(frame) != num_bytes:
            raise CodecError(f"a zstd frame is not of {num_bytes} bytes")
        values = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            frame, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"a zstd frame is damaged: {error}") from error
    if len(values) != num_bytes:
        raise CodecError(f"a zstd frame holds {len(values)} bytes instead of {num_bytes}")
    return np.frombuffer(values, np.uint8)
