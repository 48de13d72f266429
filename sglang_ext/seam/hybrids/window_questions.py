"""Asks a remote store where prompts of a model with windows can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from sglang_ext.admission.window_question import WindowQuestion
from sglang_ext.device.transfers import Hashes
from sglang_ext.device.windows.layers import WindowLayers
from sglang_ext.seam.hybrids.place_questions import Enter, PlaceQuestions
from sglang_ext.tiers.store import KeySpace, PageStore


class WindowQuestions(PlaceQuestions):
    """Those of a model with windows.

    Args:
        layers: how window layers are stored.
        store: see `PlaceQuestions`.
        enter: the same.
        longest_s: the same.
        clock: the same.
    """

    def __init__(
        self,
        layers: WindowLayers,
        store: PageStore,
        enter: Enter,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, enter, longest_s, clock)
        self._layers = layers

    def _question(
        self, space: KeySpace, tail: Hashes, last: Hashes, least: int, max_quality: int
    ) -> WindowQuestion:
        return WindowQuestion(
            self._layers, self._store, space, tail, last, least, max_quality, self._longest_s,
            self._clock,
        )  # fmt: skip

    def _of_last(self, last: Hashes) -> Hashes:
        return np.concatenate([last, self._layers.entries(last)]) if len(last) else last
