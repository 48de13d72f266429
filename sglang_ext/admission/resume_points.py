"""Where a prompt of a hybrid can be resumed, also for several ranks that have to agree on a place.

Such a prompt goes on only behind a place where its windows or its state are stored, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from sglang_ext.admission.place_question import PlaceQuestion
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


Ask = Callable[[KeySpace, Hashes, Hashes, int, int], PlaceQuestion | None]
"""Asks of a prompt's pages behind the device and of the one behind these: `PlaceQuestions.ask`."""


class Resumption(Protocol):
    """What knows where prompts can be resumed: the windows or the states of a model."""

    def wish(
        self, space: KeySpace, hashes: Hashes, num_on_device: int, limit: int
    ) -> tuple[Hashes, int]:
        """Keys of what a prompt could reuse, and how many pages behind the device that reaches.

        The keys are of the pages up to there, of windows or a state, and of the page behind `limit`
        where it reaches that.
        """

    @property
    def most_pages(self) -> int:
        """Pages that a plan has room for, with their windows or a state."""

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
        ask: asks a remote store; None without one.

    Attributes:
        limit: pages of the prompt that can be loaded at most.
        most: what `end_page` of a place can be at most.
    """

    def __init__(
        self,
        layers: Resumption,
        store: PageStore,
        space: KeySpace,
        hashes: Hashes,
        limit: int,
        ask: Ask | None = None,
    ) -> None:
        self.limit = limit
        self.most = min(limit + 1, len(hashes))  # a last page that is not whole is stored nowhere
        self._layers = layers
        self._store = store
        self._space = space
        self._hashes = hashes
        self._ask = ask
        self._answer: tuple[int, PlaceQuestion] | None = None  # pages on the device, and it
        self._first_question: PlaceQuestion | None = None  # since it entered the queue

    def begin(self) -> None:
        """It enters the queue, maybe again: what is asked for depends on what the device has."""
        self._answer = self._first_question = None

    @property
    def is_late(self) -> bool:
        """Whether the remote store was waited for long enough, from the first question on.

        What is asked anew for a nearer place does not make a request wait for as long once more.
        """
        return self._first_question is not None and self._first_question.is_late

    def ask(
        self, num_on_device: int, most: int, num_here: int, max_quality: int
    ) -> PlaceQuestion | None:
        """Asks a remote store for a further place than one that is known; None: it is not asked.

        It is not once it was waited for long enough; see `is_late`.

        Args:
            num_on_device: leading pages that are on the device, with windows.
            most: what `end_page` may be at most.
            num_here: pages of the prompt behind which it can be resumed without the remote store.
            max_quality: the worst that may be loaded.
        """
        if self._ask is None or self.is_late:
            return None
        limit = min(self.limit, most)
        tail = self._hashes[num_on_device:limit][: self._layers.most_pages]
        last = self._hashes[limit : min(self.limit + 1, most)]
        if num_on_device + len(tail) < limit:
            last = last[:0]
        question = self._ask(self._space, tail, last, num_here - num_on_device, max_quality)
        self._first_question = self._first_question or question
        return question

    def hear(self, num_on_device: int, question: PlaceQuestion) -> None:
        """Takes what a question came to."""
        self._answer = None if question.end is None else (num_on_device, question)

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
        answer = self._answered(num_on_device, end, limit)
        if answer is not None:
            return self._elsewhere(num_on_device, answer, len(shown) > limit)
        pages = np.arange(end)
        if num:
            pages = np.concatenate([pages, self._layers.pages_between(num_on_device, end)])
        num_last = len(keys) - len(pages)
        if num_last and not self._has(keys[len(pages) :]):
            keys, num_last = keys[: len(pages)], 0
        pages = np.concatenate([pages, np.full(num_last, limit)])
        num_stored = self._num_stored(num_on_device)
        return ResumePoint(end + (num_last > 0), num_stored, keys, pages, num_last)

    def _answered(self, num_on_device: int, end: int, limit: int) -> PlaceQuestion | None:
        """A question whose answer is a place behind `end` and not behind `limit`."""
        first, question = self._answer or (-1, None)
        if question is None or question.end is None or first != num_on_device:
            return None
        return question if end < first + question.end <= limit else None

    def _elsewhere(self, first: int, question: PlaceQuestion, shows_last: bool) -> ResumePoint:
        """The place that a question came to, some of which is in the remote store."""
        assert question.end is not None
        end = first + question.end
        last = question.last_keys if shows_last else question.last_keys[:0]
        keys = np.concatenate([self._hashes[:end], question.resume_keys, last])
        pages = [np.arange(end), self._layers.pages_between(first, end), np.full(len(last), end)]
        num_stored = max(end, self._num_stored(first))
        end_page = end + (len(last) > 0)
        return ResumePoint(end_page, num_stored, keys, np.concatenate(pages), len(last))

    def _num_stored(self, num_on_device: int) -> int:
        behind = self._hashes[num_on_device:]
        stored = self._store.locate_prefix(self._space, behind).total if len(behind) else 0
        return num_on_device + stored

    def _has(self, keys: Hashes) -> bool:
        return bool((self._store.page_states(self._space, keys)[0] != 0).all())
