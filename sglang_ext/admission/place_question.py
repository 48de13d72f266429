"""What a remote store is asked of one prompt of a hybrid model: where it can be resumed.

First the full layers' pages, up to the first gap; then, from their end backwards, what the other
layers need to go on there (`window_question.py`, `state_question.py`); and, where it is asked for,
the prompt's last page. Scheduler's thread only; never blocks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from sglang_ext.tiers.store.types import Hashes


class PlaceQuestion(ABC):
    """What a remote store, with what is here, has of one prompt.

    Args:
        parts: how what the other layers need is stored; the subclass says of which type.
        store: DRAM, disk and the remote store.
        space: where the pages belong.
        tail: u8 `[N, 32]`, the pages behind its device prefix that could be loaded.
        last: u8 `[M, 32]`, keys of a page behind them that is of use with all of them.
        least: pages of the tail that it can reuse without the remote store.
        max_quality: the worst that it may be given.
        longest_s: for how long an answer is waited for.
        clock: seconds; monotonic.

    Attributes:
        tail: as given.
        end: pages of the tail behind which it can be resumed; None where that is not known, or no
            further than `least`.
        has_last: whether all of `last` is there, too.
    """

    def __init__(
        self,
        parts: Any,
        store: PageStore,
        space: KeySpace,
        tail: Hashes,
        last: Hashes,
        least: int,
        max_quality: int,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tail = tail
        self.end: int | None = None
        self.has_last = False
        self._parts = parts
        self._store = store
        self._space = space
        self._last = last
        self._least = least
        self._max_quality = max_quality
        self._longest_s = longest_s
        self._clock = clock
        self._since_s = clock()
        self._num_local = store.locate_prefix(space, tail, max_quality).total
        self._num_stored: int | None = None  # pages of the tail that are here or there
        self._lookup: RemoteLookup | None = None
        if least < len(tail):
            self._ask(tail[self._num_local :])

    @staticmethod
    def keys_of_last(parts: Any, last: Hashes) -> Hashes:
        """Keys of what is put in place of a prompt's last page, u8 `[n, 32]`, by that page's."""
        return last

    @property
    def is_open(self) -> bool:
        """Whether an answer is waited for."""
        return self._lookup is not None

    @property
    def is_late(self) -> bool:
        """Whether it was waited for long enough."""
        return max(self._clock() - self._since_s, self._store.remote_stalled_s) >= self._longest_s

    @property
    @abstractmethod
    def resume_keys(self) -> Hashes:
        """Keys of what the other layers need to go on behind `end`; u8 `[n, 32]`."""

    @property
    def last_keys(self) -> Hashes:
        """`last` where it is there, else nothing; u8 `[n, 32]`."""
        return self._last if self.has_last else self._last[:0]

    def drop(self) -> None:
        """Nobody waits for the answer any more."""
        if self._lookup is not None:
            self._lookup.cancelled = True
            self._lookup = None

    def step(self) -> bool:
        """Once a scheduler step: takes an answer, and asks on; returns whether that was all."""
        lookup = self._lookup
        if lookup is None or not lookup.done:
            return lookup is None
        self._lookup = None
        if self.end is not None:
            self.has_last = len(lookup.sizes) == len(lookup.hashes)
        elif self._num_stored is None:
            self._num_stored = self._num_local + len(lookup.sizes)
            self._seek(self._num_stored)
        else:
            self._take(lookup)
        return self._lookup is None

    @abstractmethod
    def _seek(self, furthest: int) -> None:
        """Asks for what is needed to go on behind `furthest` pages, or behind fewer."""

    @abstractmethod
    def _take(self, lookup: RemoteLookup) -> None:
        """Takes the answer to what `_seek` asked, and asks on."""

    def _resume(self, end: int) -> None:
        """Knows that the prompt can be resumed behind `end` pages."""
        self.end = end
        if end == len(self.tail) and len(self._last):
            missing = self._last[~self._is_here(self._last)]
            self.has_last = not len(missing)
            if len(missing):
                self._ask(missing)

    def _ask(self, keys: Hashes, *, seeks: bool = False) -> None:
        lookup = RemoteLookup(self._space, keys, 0, self._max_quality, seeks=seeks)
        if self._store.ask_remote(lookup):
            self._lookup = lookup

    def _is_here(self, keys: Hashes) -> npt.NDArray[np.bool_]:
        flags = self._store.page_states(self._space, keys)[0]
        return np.asarray(flags != 0)
