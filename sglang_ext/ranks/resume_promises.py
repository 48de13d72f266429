"""Where each waiting request of a hybrid is resumed, with several ranks: at one place, by all.

Such a prompt goes on only behind a place where its windows or its state are stored, and what lies
between two such places is of no use. So the least of what the ranks have need not be one. In each
step a rank tells the furthest place that it can bring, `end_page`, twice, for the least and the
most of all ranks, and whether all that it takes is verified and pinned here:

- the ranks name several places: those that named a further one look for one up to the least;
- they name one, and some rank still waits: they wait, too;
- they name one, and all have pinned everything: it is promised;
- they name one, and some rank cannot bring it: all look for one before it.

A rank that has asked a remote store, and does not know yet, names the furthest place that there
could be, and waits; when it is answered, or has waited for long enough, it names what it knows.
Where a place cannot be had though nobody is late, as what the store has of it proved to be bad on
one rank, all ask for one before it.

The places only come nearer, and after some rounds nothing is promised. What a place takes follows
from the prompt and the place alone, so what is promised is the same pages on all ranks.

Scheduler thread only; neither copies nor waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from sglang_ext.admission.place_question import PlaceQuestion
from sglang_ext.admission.resume_points import ResumePoint
from sglang_ext.admission.waiting_request import Readiness, ReusablePrefix
from sglang_ext.ranks.consensus import AgreedRequest, RequestReport
from sglang_ext.ranks.promises import (
    Promise,
    PromiseBook,
    chosen_of,
    no_pages,
    part_of,
    places_of,
)
from sglang_ext.tiers.store import KeySpace, LoadTicket, TierCounts
from sglang_ext.tiers.store.types import Hashes, Rows, Slots

MAX_ROUNDS: Final = 8
"""So many places are given up for a request; then it is computed."""
# Told as the quality of what is not all pinned; worse than any page's.
_NOT_WHOLE: Final = 1 << 8


@dataclass(kw_only=True)
class _ResumePromise(Promise):
    """One waiting request; `prefix.hashes` are what the place takes.

    Attributes:
        point: the place that this rank names.
        num_rounds: places that were given up, on all ranks alike.
        question: a remote store was asked for a further place than what is pinned, up to `point`;
            None where nothing is open.
    """

    point: ResumePoint
    num_rounds: int = 0
    question: PlaceQuestion | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all that the place takes is known and pinned."""
        return self.question is None and len(self.ticket.rows) == len(self.prefix.off_device)


class _NamedPlaces(NamedTuple):
    """What the ranks named for a request. It travels in the fields of a stretch of pages.

    Attributes:
        furthest: the furthest place that a rank named.
        nearest: the nearest one.
        is_whole: whether every rank has pinned all that its place takes.
    """

    furthest: int
    nearest: int
    is_whole: bool

    @classmethod
    def of(cls, agreed: AgreedRequest) -> _NamedPlaces:
        """Reads what came of `ResumeBook._report_of` on all ranks."""
        return cls(agreed.first_page, agreed.end_page, agreed.quality < _NOT_WHOLE)


class ResumeBook(PromiseBook):
    """As `PromiseBook`, for a model with window layers or states: all of a place, or nothing.

    Every prefix has `points`.
    """

    def enter(self, handle: Hashable, prefix: ReusablePrefix, prompt: Any = None) -> TierCounts:
        """See `PromiseBook`."""
        self.leave(handle)
        points = prefix.points
        assert points is not None
        points.begin()
        num_on_device = min(prefix.num_on_device, points.limit)
        self._note(f"+{handle}:{num_on_device}:{points.limit}")
        prefix = replace(prefix, num_on_device=num_on_device)
        return self._name(handle, prefix, prompt, points.most, 0)

    def _name(
        self,
        handle: Hashable,
        prefix: ReusablePrefix,
        prompt: Any,
        most: int,
        num_rounds: int,
        *,
        asks: bool = True,
    ) -> TierCounts:
        """This rank names the furthest place up to `most`, and plans for it.

        Args:
            handle: of the request.
            prefix: its pages.
            prompt: see `enter`.
            most: what the place may be at most.
            num_rounds: see `_ResumePromise`.
            asks: a remote store may be asked for a further place.
        """
        points, first = prefix.points, prefix.num_on_device
        assert points is not None
        point = points.furthest(first, most)
        resumes_at = point.end_page - (point.num_last > 0)
        question = None
        if asks and point.end_page < most:
            question = points.ask(first, most, resumes_at, prefix.max_quality)
        prefix = replace(prefix, hashes=point.hashes, resumes_at=resumes_at)
        before = self._room.find(handle)
        found = self._room.enter(handle, prefix)
        waiting = self._room.find(handle)
        if before is not None and waiting is not None:
            waiting.is_held_as(before)  # it is the same request, no later one
        nothing = no_pages(prefix.space)
        if question is not None:
            point = point._replace(end_page=most)
        # A handle that is known keeps its place among the open ones, whichever ranks come here.
        self._promises[handle] = self._open[handle] = _ResumePromise(
            prefix, prompt, first, nothing, point=point, num_rounds=num_rounds, question=question
        )
        return found

    def leave(self, handle: Hashable, *, admitted: bool = False) -> None:
        """See `PromiseBook`."""
        promise = self._find(handle)
        if promise is not None:
            self._give_up_asking(handle, promise)
        super().leave(handle, admitted=admitted)

    # ---- agreeing ----

    def report(self, order: Iterable[Hashable] = ()) -> list[RequestReport]:
        """See `PromiseBook`; answers of a remote store are taken before."""
        for handle in list(self._open):
            promise = self._find(handle)
            if promise is not None and promise.question is not None:
                self._follow(handle, promise, promise.question)
        return super().report(order)

    def _follow(self, handle: Hashable, promise: _ResumePromise, question: PlaceQuestion) -> None:
        """Names what is known when a question is answered, or was waited for long enough."""
        points = promise.prefix.points
        assert points is not None
        if question.step():
            points.hear(promise.prefix.num_on_device, question)
        elif points.is_late:
            self._store.counters.add("remote_lookups_late")
            self._give_up_asking(handle, promise)
        else:
            return
        self._name_again(handle, promise, promise.point.end_page, asks=False)

    def _name_again(
        self, handle: Hashable, promise: _ResumePromise, most: int, *, asks: bool
    ) -> None:
        _stop_asking(promise)
        self._release(promise.ticket.slots)
        self._name(handle, promise.prefix, promise.prompt, most, promise.num_rounds, asks=asks)

    def _report_of(self, handle: Hashable, promise: Promise, readiness: Readiness) -> RequestReport:
        assert isinstance(promise, _ResumePromise)
        end, num_stored = promise.point.end_page, promise.point.num_stored
        worst = int(promise.ticket.quality.max(initial=0)) if promise.is_whole else _NOT_WHOLE
        if promise.question is not None:
            readiness = min(readiness, Readiness.WAITING)
        return RequestReport(end, end, readiness, worst, num_stored)

    def _settle_one(self, handle: Hashable, promise: Promise, agreed: AgreedRequest) -> None:
        """Everything here is decided on what was agreed, but for who has to look again."""
        assert isinstance(promise, _ResumePromise)
        named = _NamedPlaces.of(agreed)
        is_one = named.furthest == named.nearest
        if is_one and not agreed.admit:
            return
        first = promise.prefix.num_on_device
        if is_one and named.is_whole:
            self._promise(handle, promise, agreed._replace(first_page=first))
            return
        most = named.nearest if not is_one else named.nearest - 1
        promise.num_rounds += 1
        if most <= first or promise.num_rounds == MAX_ROUNDS:
            nothing = AgreedRequest(first, first, True, 0, agreed.most_pages)
            self._promise(handle, promise, nothing)
        elif promise.point.end_page > most:
            # Where all named one place, it cannot be had: what is behind a nearer one was not
            # fetched yet. Where somebody is late, nobody asks, and all go by what they have.
            self._name_again(handle, promise, most, asks=not (is_one and agreed.is_late))
            self._count_nearer(handle, is_one=is_one)

    def _count_nearer(self, handle: Hashable, *, is_one: bool) -> None:
        promise = self._find(handle)
        if is_one and promise is not None and promise.question is not None:
            self._store.counters.add("remote_lookups_nearer")

    def _promise(self, handle: Hashable, promise: _ResumePromise, settled: AgreedRequest) -> None:
        del self._open[handle]
        self._give_up_asking(handle, promise)
        promise.settled = settled
        if settled.end_page == settled.first_page:
            self._release(promise.ticket.slots)
            promise.ticket = no_pages(promise.prefix.space)

    def _give_up_asking(self, handle: Hashable, promise: _ResumePromise) -> None:
        """Its answer is not waited for any more, and its misses say so."""
        waiting = self._room.find(handle)
        if waiting is not None and promise.question is not None and promise.question.is_open:
            waiting.note_unanswered()
        _stop_asking(promise)

    def _find(self, handle: Hashable) -> _ResumePromise | None:
        promise = self._promises.get(handle)
        assert promise is None or isinstance(promise, _ResumePromise)
        return promise

    def _damaged_of(self, promise: Promise, slots: Slots, start: int) -> Rows:
        """Each run of pages at its own position: parts of a window or a state begin anew."""
        assert isinstance(promise, _ResumePromise)
        pages = promise.point.pages[start : start + len(slots)]
        found = [np.empty(0, np.int64)]
        for run in np.split(np.arange(len(pages)), np.flatnonzero(np.diff(pages) != 1) + 1):
            if len(run):
                position = int(pages[run[0]]) * self._page_size
                found.append(run[0] + self._find_damaged(slots[run], position))
        return np.concatenate(found)

    # ---- what was agreed ----

    def gap(self, handle: Hashable) -> tuple[int, int]:
        """Pages of a request before those promised to it, and pages behind them."""
        promise = self._find(handle)
        if promise is None or promise.settled is None:
            return 0, 0
        assert promise.prefix.points is not None
        settled = promise.settled
        return settled.first_page, promise.prefix.points.most - settled.end_page

    def num_promised(self, handle: Hashable, space: KeySpace, device_pages: int) -> int:
        """Pages of the full layers up to the place, behind a device prefix; see `PromiseBook`."""
        promise = self._find(handle)
        num = super().num_promised(handle, space, device_pages)
        return max(0, num - (promise is not None and promise.point.num_last > 0))

    def num_usable(self, handle: Hashable, space: KeySpace, device_pages: int, most: int) -> int:
        """All of what is promised, or nothing."""
        num = self.num_promised(handle, space, device_pages)
        return num if num <= most else 0

    def take(
        self, handle: Hashable, space: KeySpace, device_pages: int, hashes: Hashes
    ) -> LoadTicket | None:
        """See `PromiseBook`; the hashes are of the whole load: pages, then windows or the state."""
        promise = self._find(handle)
        if promise is None or not self.num_promised(handle, space, device_pages):
            return None
        settled = promise.settled
        assert settled is not None
        num_kept = len(promise.ticket.rows) - promise.point.num_last
        keys = promise.prefix.off_device[:num_kept]
        wanted = places_of(hashes, keys)
        if wanted is None:
            return None
        unused = np.ones(num_kept, np.bool_)
        unused[wanted] = False
        ticket = promise.ticket
        self._release(ticket.slots[:num_kept][unused])
        taken = chosen_of(ticket, wanted, settled.quality)
        promise.ticket = part_of(ticket, num_kept, len(ticket.rows))
        promise.settled = settled._replace(first_page=settled.end_page)
        self._store.begin_load(promise.prefix.space, taken, hashes)
        return taken

    def admit(self, handle: Hashable, last_page: int | None) -> None:
        """See `PromiseBook`; the last page is kept with all of its parts."""
        promise = self._find(handle)
        kept: tuple[bytes, LoadTicket] | None = None
        if promise is not None and promise.settled is not None and last_page is not None:
            point, num = promise.point, len(promise.ticket.rows)
            if num and point.num_last and int(point.pages[-1]) == last_page:
                quality = np.full(point.num_last, promise.settled.quality, np.uint8)
                ticket = replace(
                    part_of(promise.ticket, num - point.num_last, num), quality=quality
                )
                kept = point.hashes[-point.num_last :].tobytes(), ticket
                promise.ticket = part_of(promise.ticket, 0, num - point.num_last)
        self.leave(handle, admitted=True)
        if kept is not None:
            self._last_pages[handle] = kept


def _stop_asking(promise: _ResumePromise) -> None:
    if promise.question is not None:
        promise.question.drop()
        promise.question = None
