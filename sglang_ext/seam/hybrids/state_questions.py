"""Asks a remote store where prompts of a model with states can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_ext.admission.state_question import StateQuestion
from sglang_ext.device.states.snapshots import Snapshots
from sglang_ext.device.transfers import Hashes
from sglang_ext.seam.hybrids.place_questions import Enter, PlaceQuestions
from sglang_ext.tiers.store import KeySpace, PageStore


class StateQuestions(PlaceQuestions):
    """Those of a model with states.

    Args:
        snapshots: how states are stored.
        store: see `PlaceQuestions`.
        enter: the same.
        longest_s: the same.
        clock: the same.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        store: PageStore,
        enter: Enter,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, enter, longest_s, clock)
        self._snapshots = snapshots

    def _question(
        self, space: KeySpace, tail: Hashes, last: Hashes, least: int, max_quality: int
    ) -> StateQuestion:
        return StateQuestion(
            self._snapshots, self._store, space, tail, last, least, max_quality, self._longest_s,
            self._clock,
        )  # fmt: skip

    def _of_last(self, last: Hashes) -> Hashes:
        return last
