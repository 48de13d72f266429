"""One question to a remote store: where a prompt of a model with states can be resumed.

First the full layers' pages, up to the first gap; then, from their end backwards, the first part of
the state behind each, as a state is kept behind few pages; then the other parts of the furthest
state of which there is one, and where one lacks, of the next nearer state, a few times; and the
prompt's last page. Scheduler's thread only; never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.device.states.snapshots import Snapshots, part_hashes
from sglang_ext.device.transfers import Hashes
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup

# So many states of a request are asked for whole, from the furthest backwards.
_MOST_STATES = 4


class StateQuestion:
    """What a remote store, with what is here, has of one prompt.

    Args:
        snapshots: how states are stored.
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
        snapshots: Snapshots,
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
        self._snapshots = snapshots
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
        self._furthest = 0  # the end before which the beginning of a state is sought
        self._begun: int | None = None  # the end behind which one begins, of which more is asked
        self._num_states = 0
        self._lookup: RemoteLookup | None = None
        if least < len(tail):
            self._ask(tail[self._num_local :])

    @property
    def is_open(self) -> bool:
        """Whether an answer is waited for."""
        return self._lookup is not None

    @property
    def is_late(self) -> bool:
        """Whether it was waited for long enough."""
        return max(self._clock() - self._since_s, self._store.remote_stalled_s) >= self._longest_s

    @property
    def resume_keys(self) -> Hashes:
        """Keys of the state's parts that going on behind `end` takes; u8 `[n, 32]`."""
        assert self.end is not None
        return self._entries(self.end)

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
        elif self._begun is None:
            self._ask_whole(lookup)
        elif len(lookup.sizes) == len(lookup.hashes):
            self._resume(self._begun)
        else:
            self._seek(self._begun - 1)
        return self._lookup is None

    def _seek(self, furthest: int) -> None:
        """Asks for the beginning of a state behind a page, from `furthest` on backwards."""
        self._begun = None
        if furthest <= self._least or self._num_states == _MOST_STATES:
            return
        self._furthest = furthest
        firsts = part_hashes(self.tail[self._least : furthest], 0)
        here = np.flatnonzero(self._is_here(firsts))
        # Nothing nearer than one that begins here is asked for.
        nearest = self._least + int(here[-1]) if len(here) else self._least
        keys = firsts[nearest - self._least :][::-1]
        if len(here) and len(keys) == 1:
            self._ask_rest(furthest)
        else:
            self._ask(keys, seeks=True)

    def _ask_whole(self, lookup: RemoteLookup) -> None:
        """Asks for the other parts of a state that begins in the remote store, or here."""
        num = len(lookup.hashes)
        at = num - 1 if lookup.first is None else lookup.first
        end = self._furthest - at
        if lookup.first is None and not self._is_here(lookup.hashes[at : at + 1]).all():
            return  # no state begins anywhere
        self._ask_rest(end)

    def _ask_rest(self, end: int) -> None:
        """Asks for what is not here of the state behind `end` pages, or knows that all is."""
        self._begun = end
        self._num_states += 1
        entries = self._entries(end)
        missing = entries[~self._is_here(entries)]
        if len(missing):
            self._ask(missing)
        else:
            self._resume(end)

    def _resume(self, end: int) -> None:
        """Knows that the prompt can be resumed behind `end` pages."""
        self.end = end
        if end == len(self.tail) and len(self._last):
            missing = self._last[~self._is_here(self._last)]
            self.has_last = not len(missing)
            if len(missing):
                self._ask(missing)

    def _ask(self, keys: Hashes, *, seeks: bool = False) -> bool:
        lookup = RemoteLookup(self._space, keys, 0, self._max_quality, seeks=seeks)
        if self._store.ask_remote(lookup):
            self._lookup = lookup
        return self._lookup is not None

    def _entries(self, end: int) -> Hashes:
        return self._snapshots.entries(self.tail[end - 1])

    def _is_here(self, keys: Hashes) -> npt.NDArray[np.bool_]:
        flags = self._store.page_states(self._space, keys)[0]
        return np.asarray(flags != 0)
