"""One question to a remote store: where a prompt of a model with window layers can be resumed.

Behind the full layers' pages, from their end backwards, the pages of the window layers in the last
window are asked for; where one lacks, in the window that ends before it, a few times. Scheduler's
thread only; never blocks.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.admission.place_question import PlaceQuestion
from sglang_ext.device.transfers import Hashes
from sglang_ext.device.windows.window_layers import WindowLayers
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup

# So many windows of a request are asked for, from the furthest backwards.
_MOST_WINDOWS = 4


class WindowQuestion(PlaceQuestion):
    """What a remote store, with what is here, has of one prompt; see `PlaceQuestion`."""

    _parts: WindowLayers

    # The end before which windows are asked for, the pages of these, from the last one on, and how
    # many windows were asked for.
    _asked_end = 0
    _pages: tuple[int, ...] = ()
    _num_windows = 0

    @staticmethod
    def keys_of_last(parts: WindowLayers, last: Hashes) -> Hashes:
        """Keys of the page's full layers, and of its window layers."""
        return parts.page_keys(last)

    @property
    def resume_keys(self) -> Hashes:
        """Keys of the window layers' pages that going on behind `end` takes; u8 `[n, 32]`."""
        assert self.end is not None
        return self._parts.entries(self.tail[self._parts.window_of(self.end)])

    def _seek(self, furthest: int) -> None:
        """Asks for what is not here of the window before `furthest`, or knows that all is."""
        if furthest <= self._least or self._num_windows == _MOST_WINDOWS:
            return
        window = self._parts.window_of(furthest)
        there = self._is_here(self._parts.entries(self.tail[window]))
        whole = there.reshape(self._parts.num_groups, -1).all(axis=0)
        pages = tuple(window.start + i for i in np.flatnonzero(~whole)[::-1].tolist())
        if not pages:
            self._resume(furthest)
            return
        keys = [self._parts.entries(self.tail[page : page + 1]) for page in pages]
        self._asked_end, self._pages = furthest, pages
        self._num_windows += 1
        self._ask(np.concatenate(keys))

    def _take(self, lookup: RemoteLookup) -> None:
        num_whole = len(lookup.sizes) // self._parts.num_groups
        if num_whole == len(self._pages):
            self._resume(self._asked_end)
        else:
            self._seek(self._pages[num_whole])
