"""What a prefill server says, with a request's KV, of whose KV that is.

A decode server stores what it was sent under its own namespace, as KV of the tokens that it has.
That is right only where the other server has the same weights, keeps pages alike, computed the
request on exact KV, and was given the same tokens: each makes its own of a text, and nobody else
compares them. So both make a mark of the namespace, the request's room and its tokens: the one
sends it, the other compares. No mark, or another, means KV that must not be stored.
"""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
import numpy.typing as npt

Mark = npt.NDArray[np.int32]
NUM_WORDS = 8


def mark_of(digest: bytes, room: int, tokens: array[int]) -> Mark:
    """The mark of a request's KV, i32 `[NUM_WORDS]`.

    The room is in it so that what a former request left in a buffer is no mark of this one.

    Args:
        digest: of the namespace.
        room: the number under which both servers know the request.
        tokens: whose KV is sent, i64.
    """
    content = b"hier-kv handover 1" + digest + room.to_bytes(16, "little", signed=True)
    mark = hashlib.sha256(content)
    mark.update(tokens)
    return np.frombuffer(mark.digest(), np.int32).copy()


def no_mark() -> Mark:
    """The mark of KV that must not be stored."""
    return np.zeros(NUM_WORDS, np.int32)
