"""What this process finds out of pages in a store that servers share, as it uses the store.

Such a store drops pages and tells nobody. But each call that asks for a page, reads or stores it
ends with whether it is there, so what is believed of a page is as old as its last use from here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.tiers.remote.base import Outcome, RemoteKey

# Pages that nobody has taken yet.
_MAX_HEARD = 1 << 17
_THERE = frozenset({Outcome.OK, Outcome.KEPT})
# A value that is no sound record is of no use to anybody.
_GONE = frozenset({Outcome.MISSING, Outcome.REJECTED})


class Sighting(NamedTuple):
    """A page that was seen in the store, or seen to be gone.

    Attributes:
        namespace: 32 bytes.
        lora: 32 bytes, digest of the adapter's weights, or empty.
        page_hash: 32 bytes.
        is_there: at any level.
    """

    namespace: bytes
    lora: bytes
    page_hash: bytes
    is_there: bool


class Sightings:
    """A bounded queue of them. Thread-safe; no call blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: deque[Sighting] = deque()  # guarded by _lock, as is the next
        self._num_heard = 0  # with those that there was no room for

    def hear(self, keys: Sequence[RemoteKey], outcomes: Sequence[Outcome]) -> None:
        """A call ended. What it could not say, as the store did not answer, changes nothing.

        Args:
            keys: what it was about; a page may be in it at several levels.
            outcomes: one a key.
        """
        seen: dict[tuple[bytes, bytes, bytes], bool] = {}
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome in _THERE or outcome in _GONE:
                page = key.namespace, key.lora, key.page_hash
                seen[page] = seen.get(page, False) or outcome in _THERE
        with self._lock:
            self._num_heard += len(seen)
            if self._num_heard <= _MAX_HEARD:
                self._heard.extend(Sighting(*page, is_there) for page, is_there in seen.items())

    def take(self) -> Sequence[Sighting] | None:
        """All since the last call, in order; None if there were more than are kept."""
        with self._lock:
            heard, num_heard = self._heard, self._num_heard
            self._heard, self._num_heard = deque(), 0
        return heard if num_heard <= _MAX_HEARD else None
