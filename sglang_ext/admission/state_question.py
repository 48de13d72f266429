"""One question to a remote store: where a prompt of a model with states can be resumed.

Behind the full layers' pages the first part of the state behind each of them is sought, from their
end backwards, as a state is kept behind few pages; then the other parts of the furthest state of
which there is one are asked for, and where one lacks, of the next nearer state, a few times.
Scheduler's thread only; never blocks.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.admission.place_question import PlaceQuestion
from sglang_ext.device.states.snapshots import Snapshots, part_hashes
from sglang_ext.device.transfers import Hashes
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup

# So many states of a request are asked for whole, from the furthest backwards.
_MOST_STATES = 4


class StateQuestion(PlaceQuestion):
    """What a remote store, with what is here, has of one prompt; see `PlaceQuestion`."""

    _parts: Snapshots

    _furthest = 0  # the end before which the beginning of a state is sought
    _begun: int | None = None  # the end behind which one begins, of which more is asked
    _num_states = 0

    @property
    def resume_keys(self) -> Hashes:
        """Keys of the state's parts that going on behind `end` takes; u8 `[n, 32]`."""
        assert self.end is not None
        return self._entries(self.end)

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

    def _take(self, lookup: RemoteLookup) -> None:
        if self._begun is None:
            self._ask_whole(lookup)
        elif len(lookup.sizes) == len(lookup.hashes):
            self._resume(self._begun)
        else:
            self._seek(self._begun - 1)

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

    def _entries(self, end: int) -> Hashes:
        return self._parts.entries(self.tail[end - 1])
