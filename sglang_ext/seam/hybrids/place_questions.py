"""Asks a remote store where the prompts of waiting requests of a hybrid model can be resumed.

A place is a page of the prompt behind which the model can go on: the full layers' pages up to it
are stored, and so are the window pages or the state that go with it. The questions are
`WindowQuestion` and `StateQuestion`. With one rank, the answer replaces the waiting request's
`ReusablePrefix`. Of several ranks each asks, and they agree on one place
(`ranks/resume_promises.py`).

Scheduler's thread only; never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_ext.admission.place_question import PlaceQuestion
from sglang_ext.admission.waiting_request import Remote, ReusablePrefix, WaitingRequest
from sglang_ext.device.transfers import Hashes
from sglang_ext.tiers.store import KeySpace, PageStore

Enter = Callable[[Hashable, ReusablePrefix, Any], Any]
"""Puts a request into the waiting room anew: its handle, what it could reuse, and its key."""
Find = Callable[[Hashable], WaitingRequest | None]
"""What the waiting room knows of a request."""

# So often a request asks again, for an earlier place, where pages of a place could not be fetched.
_MOST_AGAIN = 8


@dataclass
class _Asked:
    """A request whose question is open, or was answered with a place that is being fetched.

    Attributes:
        prefix: what it could reuse of what is here.
        key: SGLang's, of its pages.
        last: u8 `[0 or 1, 32]`, the page behind the furthest place: the request computes it, and
            the stored page is then put in place of the computed one.
        least: see `PlaceQuestions.begin`.
        question: the question that is open, or was answered last.
        first: the first question of the request; how long it waits counts from its start.
        num_again: questions of the request after the first one.
    """

    prefix: ReusablePrefix
    key: Any
    last: Hashes
    least: int
    question: PlaceQuestion
    first: PlaceQuestion
    num_again: int = 0


class PlaceQuestions:
    """The open questions, by the requests' handles.

    Args:
        kind: of questions.
        parts: how windows, or states, are stored.
        store: DRAM, disk and the remote store.
        enter: puts a request into the waiting room anew, with another prefix.
        find: finds a request there.
        longest_s: for how long a request waits for its answer; 0: not at all.
        clock: seconds; monotonic.
    """

    def __init__(
        self,
        kind: type[PlaceQuestion],
        parts: Any,
        store: PageStore,
        enter: Enter,
        find: Find,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = kind
        self._parts = parts
        self._store = store
        self._enter = enter
        self._find = find
        self._longest_s = longest_s
        self._clock = clock
        self._open: dict[Hashable, _Asked] = {}
        self._fetched: dict[Hashable, _Asked] = {}  # those that entered anew with an answer

    def begin(
        self,
        handle: Hashable,
        prefix: ReusablePrefix,
        key: Any,
        tail: Hashes,
        limit: int,
        least: int,
    ) -> None:
        """Asks for what is not here, if there is a store to ask.

        Args:
            handle: a request that just entered the queue.
            prefix: what it could reuse of what is here.
            key: SGLang's, of its pages.
            tail: u8 `[N, 32]`, the pages behind its device prefix.
            limit: most pages from the root on that may be reused; see `Resumption.wish`.
            least: pages of `tail` that the request can reuse without the remote store.
        """
        self.drop(handle)
        limit = max(0, limit - prefix.num_on_device)
        tail, last = tail[:limit], tail[limit : limit + 1]
        question = self._question(prefix.space, tail, last[:0], least, prefix.max_quality)
        if question.is_open:
            self._open[handle] = _Asked(prefix, key, last, least, question, question)

    def ask(
        self, space: KeySpace, tail: Hashes, last: Hashes, least: int, max_quality: int
    ) -> PlaceQuestion | None:
        """Asks for one of several ranks, which then calls the question's `step` itself.

        Args:
            space: where the pages belong.
            tail: u8 `[N, 32]`, the pages behind a device prefix that could be loaded.
            last: u8 `[0 or 1, 32]`, a prompt's last page, behind them.
            least: see `begin`.
            max_quality: the worst that may be loaded.

        Returns:
            The question; None where nothing is asked.
        """
        if not self._longest_s:
            return None
        question = self._question(space, tail, self._of_last(last), least, max_quality)
        return question if question.is_open else None

    def _question(
        self, space: KeySpace, tail: Hashes, last: Hashes, least: int, max_quality: int
    ) -> PlaceQuestion:
        """Asks the store; `last` are keys that are of use only with all of `tail`; see `begin`."""
        return self._kind(
            self._parts, self._store, space, tail, last, least, max_quality, self._longest_s,
            self._clock,
        )  # fmt: skip

    def _of_last(self, last: Hashes) -> Hashes:
        return self._kind.keys_of_last(self._parts, last)

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request should wait for the answer.

        Where a page could not be fetched that the store had said it has, the store is asked for an
        earlier place.
        """
        asked = self._open.get(handle)
        if asked is None:
            return not self._asks_again(handle)
        if not asked.first.is_late:
            return False
        if self._longest_s:
            self._store.counters.add("remote_lookups_late")
        waiting = self._find(handle)
        if waiting is not None:
            waiting.note_unanswered()
        self.drop(handle)
        self._go_by_what_is_here(handle, asked)
        return True

    def _asks_again(self, handle: Hashable) -> bool:
        """Asks for an earlier place if pages of the last one could not be fetched; mostly O(1)."""
        asked, waiting = self._fetched.get(handle), self._find(handle)
        if asked is None or waiting is None or waiting.remote is not Remote.FAILED:
            return False
        del self._fetched[handle]
        tail, end = asked.question.tail, asked.question.end
        assert end is not None
        if waiting.late:
            return False
        wanted = np.concatenate([tail[:end], asked.question.resume_keys])
        if (self._store.page_states(asked.prefix.space, wanted)[0] != 0).all():
            return False  # all of the place is here: only `last` is missing, or others fetched it
        again = replace(asked, last=asked.last[:0], num_again=asked.num_again + 1)
        if asked.first.is_late or asked.num_again == _MOST_AGAIN or not self._begin(again, end - 1):
            self._go_by_what_is_here(handle, again)
            return False
        self._store.counters.add("remote_lookups_nearer")
        self._open[handle] = again
        return True

    def _begin(self, again: _Asked, most: int) -> bool:
        """Asks for a place in the first `most` pages of the tail; False where nothing is asked."""
        prefix, tail = again.prefix, again.question.tail[:most]
        again.question = self._question(
            prefix.space, tail, again.last, again.least, prefix.max_quality
        )
        return again.question.is_open

    def _go_by_what_is_here(self, handle: Hashable, asked: _Asked) -> None:
        """Ends asking for a request that entered anew for a place which could not be fetched.

        Its prefix is still that place's. It enters once more with the prefix that it had at first,
        so that the nearer place that DRAM and the disk have is loaded.
        """
        if asked.num_again and asked.least:
            self._enter_anew(handle, asked.prefix, asked.key)

    def drop(self, handle: Hashable) -> None:
        """Nobody waits for the answer any more; unknown handles are ignored."""
        self._fetched.pop(handle, None)
        asked = self._open.pop(handle, None)
        if asked is not None:
            asked.question.drop()

    def drop_all(self) -> None:
        """As `drop`, for all requests."""
        for handle in [*self._open, *self._fetched]:
            self.drop(handle)

    def step(self) -> None:
        """Once a scheduler step: takes answers, and asks the next part of each question."""
        for handle, asked in list(self._open.items()):
            if asked.question.step():
                self.drop(handle)
                if asked.question.end is not None:
                    self._enter_with(handle, asked, asked.question.end)
                else:
                    self._go_by_what_is_here(handle, asked)

    def _enter_with(self, handle: Hashable, asked: _Asked, end: int) -> None:
        """Enters a request anew with the place at `end`, wherever its pages are stored."""
        prefix, question = asked.prefix, asked.question
        above = prefix.hashes[: prefix.num_on_device]
        wanted = [above, question.tail[:end], question.resume_keys]
        if end == len(question.tail):
            wanted.append(self._of_last(asked.last))
        hashes, resumes_at = np.concatenate(wanted), prefix.num_on_device + end
        prefix = replace(prefix, hashes=hashes, look_again=None, resumes_at=resumes_at)
        self._enter_anew(handle, prefix, asked.key)
        self._fetched[handle] = asked

    def _enter_anew(self, handle: Hashable, prefix: ReusablePrefix, key: Any) -> None:
        before = self._find(handle)
        self._enter(handle, prefix, key)
        waiting = self._find(handle)
        if before is not None and waiting is not None:
            waiting.is_held_as(before)  # it keeps the time since which it was held
