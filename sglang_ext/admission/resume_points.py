"""Where a prompt of a hybrid can be resumed, also for several ranks that have to agree on a place.

Such a prompt goes on only behind a place where its windows or its state are stored, too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import Hashes, Rows


class ResumePoint(NamedTuple):
    """A place behind which a prompt could go on, and what that takes.

    Attributes:
        end_page: pages of the prompt before it. One more with the prompt's last page, which is
            computed and then replaced.
        num_stored: leading pages of the prompt whose full layers are on the device or stored here.
        hashes: u8 `[N, 32]`, keys: the pages before it, its windows or state, the last page.
        pages: `[N]`, which page of the prompt each key belongs to.
        num_last: how many keys at the end are of the last page.
    """

    end_page: int
    num_stored: int
    hashes: Hashes
    pages: Rows
    num_last: int


class Resumption(Protocol):
    """What knows where prompts can be resumed: the windows or the states of a model."""

    def wish(
        self, space: KeySpace, hashes: Hashes, num_on_device: int, limit: int
    ) -> tuple[Hashes, int]:
        """Keys of what a prompt could reuse, and how many pages behind the device that reaches.

        The keys are of the pages up to there, of windows or a state, and of the page behind `limit`
        where it reaches that.
        """

    def pages_between(self, first: int, end: int) -> Rows:
        """Which pages the wish's keys of windows or a state are of.

        Args:
            first: pages on the device.
            end: pages behind which the prompt is resumed.
        """


def what_resumes(
    layers: Resumption, space: KeySpace, hashes: Hashes, num_on_device: int, limit: int
) -> tuple[Hashes, int]:
    """Keys of what a prompt could reuse, and behind how many of its pages it goes on then.

    See `Resumption.wish`.
    """
    wanted, num = layers.wish(space, hashes, num_on_device, limit)
    return wanted, num_on_device + num


class PromptPoints:
    """The places of one prompt, by what this process has stored. Scheduler's thread only.

    Args:
        layers: of the model.
        store: DRAM and disk.
        space: where the prompt's pages belong.
        hashes: u8 `[N, 32]`, of all of them.
        limit: see `limit`.

    Attributes:
        limit: pages of the prompt that can be loaded at most.
        most: what `end_page` of a place can be at most.
    """

    def __init__(
        self, layers: Resumption, store: PageStore, space: KeySpace, hashes: Hashes, limit: int
    ) -> None:
        self.limit = limit
        self.most = min(limit + 1, len(hashes))  # a last page that is not whole is stored nowhere
        self._layers = layers
        self._store = store
        self._space = space
        self._hashes = hashes

    def furthest(self, num_on_device: int, most: int) -> ResumePoint:
        """The furthest place, in any tier; the end of the device prefix where there is none.

        What it takes follows from its `end_page` and the device prefix alone.

        Args:
            num_on_device: leading pages that are on the device, with windows or state.
            most: what `end_page` may be at most.
        """
        limit = min(self.limit, most)
        # The page behind the limit is wished for only where it is shown.
        shown = self._hashes[: min(self.limit + 1, most)]
        keys, num = self._layers.wish(self._space, shown, num_on_device, limit)
        end = num_on_device + num
        pages = np.arange(end)
        if num:
            pages = np.concatenate([pages, self._layers.pages_between(num_on_device, end)])
        num_last = len(keys) - len(pages)
        if num_last and not self._has(keys[len(pages) :]):
            keys, num_last = keys[: len(pages)], 0
        pages = np.concatenate([pages, np.full(num_last, limit)])
        behind = self._hashes[num_on_device:]
        stored = self._store.locate_prefix(self._space, behind).total if len(behind) else 0
        return ResumePoint(end + (num_last > 0), num_on_device + stored, keys, pages, num_last)

    def _has(self, keys: Hashes) -> bool:
        return bool((self._store.page_states(self._space, keys)[0] != 0).all())
