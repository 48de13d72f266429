"""The codec `none`: bit patterns as they are, in the container that checks them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_ext.codec.base import KVDtype, PlaneArray
from sglang_ext.codec.container import Chunk, Section
from sglang_ext.codec.one_level import OneLevelCodec, copy_values

_VALUES = 1  # section kind; stored on disk, never renumber


class NoneCodec(OneLevelCodec):
    """No compression. `profile` and `engine` are ignored."""

    codec_id = "none"

    def __init__(self, dtype: KVDtype, *, profile: Any = None, engine: str = "numba"):
        self.dtype = dtype

    def sections(self, planes: PlaneArray) -> list[Section]:
        """The values."""
        return [Section(_VALUES, 0, planes.reshape(-1).view(np.uint8).data)]

    def fill(self, chunk: Chunk, out: PlaneArray) -> None:
        """See :meth:`OneLevelCodec.fill`."""
        copy_values(chunk.section(_VALUES, 0), out)
