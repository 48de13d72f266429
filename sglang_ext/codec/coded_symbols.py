"""rANS-coded symbols as bytes of a section: word counts, states, words.

Little-endian: u32 words of each of G groups, u32 states [G, 32], u16 words, group after group.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.codec.base import CodecError
from sglang_ext.kernels.rans.api import Coded
from sglang_ext.kernels.rans.tables import LANES


def pack_symbols(coded: Coded) -> bytes:
    """The bytes of `coded`."""
    lengths = np.diff(coded.offsets.astype(np.int64)).astype("<u4")
    states, words = coded.states.astype("<u4"), coded.words.astype("<u2")
    return b"".join((lengths.tobytes(), states.tobytes(), words.tobytes()))


def unpack_symbols(data: memoryview, num_groups: int) -> tuple[Coded, memoryview]:
    """Reads the coded symbols of `num_groups` groups at the start of `data`; also what follows.

    Raises:
        CodecError: `data` is too short for what it says it holds.
    """
    fixed = 4 * (1 + LANES) * num_groups
    if len(data) < fixed:
        raise CodecError(f"{num_groups} groups of symbols take {fixed} bytes, got {len(data)}")
    lengths = np.frombuffer(data, "<u4", num_groups).astype(np.int64)
    states = np.frombuffer(data, "<u4", num_groups * LANES, offset=4 * num_groups)
    num_words = int(lengths.sum())  # below 2^32 * 2^32: no overflow
    end = fixed + 2 * num_words
    if num_words >= 1 << 32 or len(data) < end:
        raise CodecError(f"symbols of {num_words} words end at {end}, got {len(data)} bytes")
    offsets = np.zeros(num_groups + 1, np.uint32)
    offsets[1:] = np.cumsum(lengths)
    words = np.frombuffer(data, "<u2", num_words, offset=fixed)
    return Coded(states.reshape(-1, LANES), offsets, words), data[end:]
