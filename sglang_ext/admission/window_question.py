"""One question to a remote store: where a prompt of a model with window layers can be resumed.

First the full layers' pages, up to the first gap; then, from their end backwards, the pages of the
window layers in the last window; where one lacks, in the window that ends before it, a few times;
and, where it is asked for, the prompt's last page. Scheduler's thread only; never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from sglang_ext.device.transfers import Hashes
from sglang_ext.device.windows.layers import Bools, WindowLayers
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup

# So many windows of a request are asked for, from the furthest backwards.
_MOST_WINDOWS = 4


class WindowQuestion:
    """What a remote store, with what is here, has of one prompt.

    Args:
        layers: how window layers are stored.
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
        layers: WindowLayers,
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
        self._layers = layers
        self._store = store
        self._space = space
        self._last = last
        self._least = least
        self._max_quality = max_quality
        self._longest_s = longest_s
        self._clock = clock
        self._since_s = clock()
        self._num_local = store.locate_prefix(space, tail, max_quality).total
        # The end before which windows are asked for, the pages of these, from the last one on, and
        # how many windows were asked for.
        self._asked_end: int | None = None
        self._pages: tuple[int, ...] = ()
        self._num_windows = 0
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
        """Keys of the window layers' pages that going on behind `end` takes; u8 `[n, 32]`."""
        assert self.end is not None
        return self._layers.entries(self.tail[self._layers.window_of(self.end)])

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
        num_found = len(lookup.sizes)
        if self.end is not None:
            self.has_last = num_found == len(lookup.hashes)
        elif self._asked_end is None:
            self._ask_window(self._num_local + num_found)
        else:
            num_whole = num_found // self._layers.num_groups
            is_whole = num_whole == len(self._pages)
            self._ask_window(self._asked_end if is_whole else self._pages[num_whole])
        return self._lookup is None

    def _ask(self, keys: Hashes) -> bool:
        lookup = RemoteLookup(self._space, keys, 0, self._max_quality)
        if self._store.ask_remote(lookup):
            self._lookup = lookup
        return self._lookup is not None

    def _ask_window(self, end: int) -> None:
        """Asks for the window before `end`, or knows that it is there."""
        if end <= self._least or (end != self._asked_end and self._num_windows == _MOST_WINDOWS):
            return
        window = self._layers.window_of(end)
        if end != self._asked_end:
            there = self._is_here(self._layers.entries(self.tail[window]))
            whole = there.reshape(self._layers.num_groups, -1).all(axis=0)
            pages = tuple(window.start + i for i in np.flatnonzero(~whole)[::-1].tolist())
            if pages:
                keys = [self._layers.entries(self.tail[page : page + 1]) for page in pages]
                self._asked_end, self._pages = end, pages
                self._num_windows += 1
                self._ask(np.concatenate(keys))
                return
        self.end = end
        if end == len(self.tail) and len(self._last):
            missing = self._last[~self._is_here(self._last)]
            self.has_last = not len(missing)
            if len(missing):
                self._ask(missing)

    def _is_here(self, keys: Hashes) -> Bools:
        flags = self._store.page_states(self._space, keys)[0]
        return np.asarray(flags != 0)
