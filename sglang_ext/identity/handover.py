"""What a prefill server says, with a request's KV, of whose KV that is and what it is worth.

A decode server stores what it was sent under its own namespace, as KV of the tokens that it has.
That is right only where the other server has the same weights, keeps pages alike, and was given the
same tokens: each makes its own of a text, and nobody else compares them. Nor does a row say whether
it was computed on exact KV. So both make a mark of the namespace, the request's room, its tokens,
who receives them and the KV's quality: the one sends it, the other looks for the quality of which
it is the mark. No mark, or another, means KV that must not be stored.

Of several ranks each sends and compares its own: the namespace has what differs between them.

A mark says what was sent, and not that all of it came to the same rows. A prefill server knows a
request by its room alone: where one is given up and another one comes with its room, parts that
still wait to be sent go to the rows of the second, with the mark of the first. So who receives is
in the mark, and a decode server remembers the rooms of what it gave up (`GivenUpRooms`). Nor does
it know that two of its own requests have a room: both are sent to the same rows, and parts of the
one may come between those of the other. So what of either is sent has no mark (`SendingRooms`).
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.records.quality import Quality

Mark = npt.NDArray[np.int32]
NUM_WORDS = 8
FOREIGN = 255
"""Worse than any quality: KV that must not be stored."""


class Handover:
    """One request's KV, as one of the two servers knows it.

    The room is in the mark so that what a former request left in a buffer is no mark of this one.

    Args:
        digest: of the namespace.
        room: the number under which both servers know the request.
        tokens: whose KV is sent, i64.
        receiver: name of the rank that it is sent to.
    """

    def __init__(self, digest: bytes, room: int, tokens: array[int], receiver: str) -> None:
        self._content = hashlib.sha256(b"hier-kv handover 3" + digest)
        self._content.update(room.to_bytes(16, "little", signed=True))
        self._content.update(hashlib.sha256(receiver.encode()).digest())
        self._content.update(tokens)

    def mark(self, quality: int) -> Mark:
        """What is sent with KV of a quality, i32 `[NUM_WORDS]`; of a later release's the worst."""
        marked = self._content.copy()
        marked.update(bytes([min(quality, max(Quality))]))
        return np.frombuffer(marked.digest(), np.int32).copy()

    def quality_of(self, sent: Sequence[int]) -> int:
        """The quality of what came with a mark; `FOREIGN` where it is no mark of this request."""
        for quality in Quality:
            if self.mark(quality).tolist() == list(sent):
                return int(quality)
        return FOREIGN


def no_mark() -> Mark:
    """The mark of KV that must not be stored."""
    return np.zeros(NUM_WORDS, np.int32)


class GivenUpRooms:
    """Rooms of requests that a decode server gave up while their KV was on its way.

    Args:
        most: rooms that are remembered, the last ones.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._rooms: OrderedDict[int, None] = OrderedDict()

    def add(self, room: int) -> None:
        """A request with this room was given up."""
        self._rooms[room] = None
        self._rooms.move_to_end(room)
        if len(self._rooms) > self._most:
            self._rooms.popitem(last=False)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms


class SendingRooms:
    """Which request of a prefill server a room belongs to; not locked.

    A room that a second request came to before the first one had sent all belongs to none from
    then on, and so does that of a request that ended before.

    Args:
        most: rooms that are remembered, the last ones.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        # What sends to a room, which may be gone meanwhile; None: it belongs to none.
        self._senders: OrderedDict[int, weakref.ref[Any] | None] = OrderedDict()

    def begin(self, room: int, sender: object) -> None:
        """A request is about to send to a room; its sender is what it is known by."""
        is_free = room not in self._senders
        self._senders[room] = weakref.ref(sender) if is_free else None
        self._senders.move_to_end(room)
        if len(self._senders) > self._most:
            self._senders.popitem(last=False)

    def has_alone(self, room: int, sender: object) -> bool:
        """Whether nobody else has sent to a room since this one began."""
        known = self._senders.get(room)
        return known is not None and known() is sender

    def end(self, room: int, sender: object) -> None:
        """A request has sent all: what comes to its room next begins anew."""
        if self.has_alone(room, sender):
            del self._senders[room]
