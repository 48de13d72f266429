"""One link, several contexts: whose bytes are asked for next."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_ext.streaming.planner import ChunkFetch, ContextStream


class LinkShare:
    """Takes turns between contexts by how far each is.

    CacheGen batches concurrent requests by chunk index, so that none runs ahead. Here the context
    whose next bytes are the most urgent goes first, and among equals the one that was served least:
    the coarsest levels of all contexts come before refinements of any. Its owner's thread only.

    Args:
        max_in_flight: fetches on the link at once, of all contexts together.
    """

    def __init__(self, max_in_flight: int = 2) -> None:
        self._max_in_flight = max_in_flight
        self._streams: dict[Hashable, ContextStream] = {}
        self._served_bytes: dict[Hashable, int] = {}
        self._num_in_flight = 0

    def add(self, context: Hashable, stream: ContextStream) -> None:
        """A context joins."""
        self._streams[context] = stream
        self._served_bytes[context] = 0

    def remove(self, context: Hashable) -> None:
        """A context has begun its forward, or will not; its fetches in flight end by `done`."""
        self._streams.pop(context, None)
        self._served_bytes.pop(context, None)

    def next_fetch(self, now_s: float) -> tuple[Hashable, ChunkFetch] | None:
        """The next bytes to ask for, and for whom; None when the link has enough to do."""
        if self._num_in_flight >= self._max_in_flight:
            return None
        order = sorted(
            self._streams, key=lambda each: (self._streams[each].urgency, self._served_bytes[each])
        )
        for context in order:
            fetch = self._streams[context].next_fetch(now_s)
            if fetch is not None:
                self._served_bytes[context] += fetch.num_bytes
                self._num_in_flight += 1
                return context, fetch
        return None

    def done(self) -> None:
        """A fetch has ended, well or not, its context here or gone."""
        self._num_in_flight -= 1
