"""How many pages each waiting request is promised, with several ranks: what all of them have.

Each rank has a DRAM of its own, so a prefix may be ready on one rank and not on another. A rank
tells of a request only pages that it has verified and pinned; the least of all ranks is promised,
and no rank can fail to load it, whatever leaves its DRAM until then. A request that was not agreed
on yet is held and is promised nothing, on every rank alike.

Pins are given back when the request leaves the queue. They lie within those of its plan, so all
promises together pin no more than plans may.

Scheduler thread only; neither copies nor waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_ext.admission.waiting import Progress, WaitingRoom
from sglang_ext.admission.waiting_request import Readiness, ReusablePrefix
from sglang_ext.device.composition import Composition
from sglang_ext.ranks.consensus import (
    MAX_REQUESTS,
    AgreedRequest,
    MinReduce,
    RankDivergenceError,
    RequestReport,
)
from sglang_ext.tiers.store import KeySpace, LoadTicket, PageStore, TierCounts
from sglang_ext.tiers.store.types import Hashes, Rows, Slots

# Finds pages that cannot be loaded at a position, or at any (None), as indices.
FindDamaged = Callable[[Slots, int | None], Rows]
Note = Callable[[str], None]


@dataclass
class Promise:
    """One waiting request.

    Attributes:
        prefix: its pages.
        prompt: anything that the caller of `enter` wants back from `PromiseBook.prompt`.
        first_page: index of the first page that is pinned, or would be.
        ticket: the pages that are pinned.
        seen: how far the plan was when the ticket was last extended.
        closed: no further page is pinned: one proved damaged.
        settled: what was agreed; None before.
    """

    prefix: ReusablePrefix
    prompt: Any
    first_page: int
    ticket: LoadTicket
    seen: Progress | None = None
    closed: bool = False
    settled: AgreedRequest | None = None

    @property
    def end_page(self) -> int:
        """End of the pages that are pinned."""
        return self.first_page + len(self.ticket.rows)


class PromiseBook:
    """Promises of the waiting requests, by the requests' handles.

    It has many methods because a request's way is one, and steps of it differ for hybrids.

    Args:
        store: DRAM and disk.
        room: the plans of the waiting requests; entered and left through this book.
        page_size: tokens in a page.
        find_damaged: finds pages that cannot be loaded; asked before a page is told of.
        note: enters what happens into the history that all ranks must share.
    """

    def __init__(
        self,
        store: PageStore,
        room: WaitingRoom,
        *,
        page_size: int,
        find_damaged: FindDamaged,
        note: Note,
    ) -> None:
        self._store = store
        self._room = room
        self._page_size = page_size
        self._find_damaged = find_damaged
        self._note = note
        self._promises: dict[Hashable, Promise] = {}
        self._open: dict[Hashable, Promise] = {}  # those not agreed on, by time of entering
        self._last_pages: dict[Hashable, tuple[bytes, LoadTicket]] = {}
        # The requests of the report that is being agreed on.
        self._told: list[tuple[Hashable, Promise]] = []

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._promises)

    # ---- entering and leaving ----

    def enter(self, handle: Hashable, prefix: ReusablePrefix, prompt: Any = None) -> TierCounts:
        """A request enters the queue; it is held until all ranks told of it.

        Args:
            handle: of the request; its text is the same on all ranks.
            prefix: its pages.
            prompt: anything, to be had back from `prompt`.

        Returns:
            Where the pages that are not on the device lie, on this rank.
        """
        self.leave(handle)
        self._note(f"+{handle}:{prefix.num_on_device}:{len(prefix.hashes)}")
        found = self._room.enter(handle, prefix)
        promise = Promise(prefix, prompt, prefix.num_on_device, no_pages(prefix.space))
        self._promises[handle] = self._open[handle] = promise
        return found

    def enter_again(self, handle: Hashable, num_on_device: int) -> None:
        """The device lost pages of a request's prefix: it is held until it is agreed on again."""
        promise = self._promises[handle]
        self.enter(handle, replace(promise.prefix, num_on_device=num_on_device), promise.prompt)

    def leave(self, handle: Hashable, *, admitted: bool = False) -> None:
        """A request leaves the queue, to run or not."""
        self._room.leave(handle, admitted=admitted)
        promise = self._promises.pop(handle, None)
        self._open.pop(handle, None)
        if promise is not None:
            self._note(f"-{handle}")
            self._release(promise.ticket.slots)
        _, last = self._last_pages.pop(handle, (b"", None))
        if last is not None:
            self._release(last.slots)

    def leave_all(self) -> None:
        """Every request leaves."""
        for handle in [*self._promises, *self._last_pages]:
            self.leave(handle)

    # ---- agreeing ----

    def report(self, order: Iterable[Hashable] = ()) -> list[RequestReport]:
        """What this rank tells of the requests that were not agreed on yet.

        Args:
            order: handles in the order in which the scheduler will take them, the same on all
                ranks; requests that are not named come last.
        """
        if not self._open:
            self._told = []
            return []
        named = dict.fromkeys(handle for handle in order if handle in self._open)
        handles = [*named, *(h for h in self._open if h not in named)][:MAX_REQUESTS]
        self._told = [(handle, self._open[handle]) for handle in handles]
        reports = []
        for handle, promise in self._told:
            readiness = self._room.readiness(handle)
            self._extend(handle, promise)
            reports.append(self._report_of(handle, promise, readiness))
        return reports

    @property
    def num_ended_readings(self) -> int:
        """How many of the oldest `shared_readings` are over here; without any, 0."""
        return 0

    def settle_readings(self, num_ended: int, min_reduce: MinReduce) -> None:
        """Takes how many are over on every rank, behind `settle`; nothing without any.

        Args:
            num_ended: of the oldest.
            min_reduce: tells all ranks where the pages lie that they read next.
        """

    def settle(self, requests: list[AgreedRequest]) -> None:
        """Takes what was agreed on the requests of the last report.

        What was told of one is pinned until then; one that has left or entered anew since, on all
        ranks alike, is passed over.
        """
        for (handle, promise), agreed in zip(self._told, requests, strict=True):
            if self._open.get(handle) is promise:
                self._settle_one(handle, promise, agreed)
        self._told = []

    def _report_of(self, handle: Hashable, promise: Promise, readiness: Readiness) -> RequestReport:
        num = len(promise.ticket.rows)
        most = self._room.most_pages(handle, promise.end_page)
        if promise.closed:
            most = min(most, promise.end_page)
        if readiness is not Readiness.WAITING:  # else more may come, and nothing is promised yet
            device_tokens = promise.prefix.tokens_before + promise.first_page * self._page_size
            num = self._room.num_worth(handle, device_tokens, num)
        worst = int(promise.ticket.quality[:num].max(initial=0))
        return RequestReport(promise.first_page, promise.first_page + num, readiness, worst, most)

    def _settle_one(self, handle: Hashable, promise: Promise, agreed: AgreedRequest) -> None:
        if agreed.admit:
            del self._open[handle]
            promise.settled = agreed
            self._keep(promise, agreed.first_page, agreed.end_page)
        else:
            self._room.limit(handle, agreed.most_pages)

    def _extend(self, handle: Hashable, promise: Promise) -> None:
        """Pins the pages that the plan brought since the last step."""
        progress = self._room.progress(handle)
        if promise.closed or progress == promise.seen:
            return
        promise.seen = progress
        if progress.first_page != promise.first_page:
            self._keep(promise, promise.first_page, promise.first_page)
            promise.first_page = progress.first_page
        # If the plan was taken back for a request ahead, the pins here are given back, too.
        self._keep(promise, promise.first_page, progress.end_page)
        start, end = promise.end_page, progress.end_page
        if end <= start:
            return
        prefix = promise.prefix
        more = self._store.pin_leading(prefix.space, prefix.hashes[start:end], prefix.max_quality)
        damaged = self._damaged_of(promise, more.slots, start)
        if len(damaged):
            promise.closed = True
            self._store.drop_damaged(more, damaged)
            sound = int(damaged.min())
            self._release(more.slots[sound:])
            more = part_of(more, 0, sound)
        promise.ticket = _joined(promise.ticket, more)

    def _damaged_of(self, promise: Promise, slots: Slots, start: int) -> Rows:
        """Which of some pages cannot be loaded; `start` is the index of the first of them."""
        return self._find_damaged(slots, start * self._page_size)

    def _keep(self, promise: Promise, first_page: int, end_page: int) -> None:
        """Gives back the pins of all pages but these."""
        before = max(0, min(first_page - promise.first_page, len(promise.ticket.rows)))
        after = max(before, min(end_page - promise.first_page, len(promise.ticket.rows)))
        self._release(promise.ticket.slots[:before])
        self._release(promise.ticket.slots[after:])
        promise.ticket = part_of(promise.ticket, before, after)
        promise.first_page += before

    def _release(self, slots: Slots) -> None:
        if len(slots):
            self._store.release(slots)

    # ---- what was agreed ----

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request is held: it was not agreed on, or some rank waits for pages."""
        return handle not in self._open

    def gap(self, handle: Hashable) -> tuple[int, int]:
        """Pages of a request before those promised to it, and pages behind them."""
        promise = self._promises.get(handle)
        if promise is None or promise.settled is None:
            return 0, 0
        settled = promise.settled
        end_page = max(settled.first_page, settled.end_page)
        return settled.first_page, max(0, len(promise.prefix.hashes) - end_page)

    def prompt(self, handle: Hashable) -> Any:
        """What a request was entered with; None for one that is not known."""
        promise = self._promises.get(handle)
        return promise.prompt if promise is not None else None

    def num_promised(self, handle: Hashable, space: KeySpace, device_pages: int) -> int:
        """Pages promised behind a device prefix.

        0 when the device lost pages meanwhile, or when the key space has changed since the promise
        was made.
        """
        promise = self._promises.get(handle)
        if promise is None or promise.settled is None or promise.prefix.space != space:
            return 0
        settled = promise.settled
        if device_pages < settled.first_page:
            return 0
        return max(0, settled.end_page - device_pages)

    def composition(
        self, handle: Hashable, device_pages: int, num_pages: int
    ) -> Composition | None:
        """How promised pages behind a device prefix are made of others; None: they are stored."""
        return None

    def num_usable(self, handle: Hashable, space: KeySpace, device_pages: int, most: int) -> int:
        """As `num_promised`, where no more than `most` pages can be used."""
        return min(self.num_promised(handle, space, device_pages), most)

    def num_stored(self, handle: Hashable) -> int:
        """Leading pages of a hybrid's prompt that every rank had when it was agreed on."""
        promise = self._promises.get(handle)
        return promise.settled.most_pages if promise is not None and promise.settled else 0

    def take(
        self, handle: Hashable, space: KeySpace, device_pages: int, hashes: Hashes
    ) -> LoadTicket | None:
        """Hands over the pins of promised pages for a load; the request keeps those behind them.

        Args:
            handle: of the request.
            space: the request's, as of now.
            device_pages: index of the first page to load.
            hashes: u8 `[n, 32]`, the pages, all of them promised.

        Returns:
            The pages, with the quality that was agreed; to end with `PageStore.release`. None when
            they are not what was promised, on all ranks alike.

        Raises:
            RankDivergenceError: they were promised and are not pinned here; a bug.
        """
        end_page = device_pages + len(hashes)
        if self.num_promised(handle, space, device_pages) < len(hashes):
            return None
        promise = self._promises[handle]
        settled = promise.settled
        if settled is None or not np.array_equal(
            promise.prefix.hashes[device_pages:end_page], hashes
        ):
            return None
        self._keep(promise, device_pages, promise.end_page)
        if promise.first_page != device_pages or promise.end_page < end_page:
            raise RankDivergenceError(
                "hier-kv promised pages that it does not hold; restart the server and report this"
            )
        taken = part_of(promise.ticket, 0, len(hashes))
        promise.ticket = part_of(promise.ticket, len(hashes), len(promise.ticket.rows))
        promise.first_page = end_page
        promise.settled = settled._replace(first_page=end_page)
        self._store.begin_load(promise.prefix.space, taken, hashes)
        return replace(taken, quality=np.full(len(hashes), settled.quality, np.uint8))

    def admit(self, handle: Hashable, last_page: int | None) -> None:
        """A request is admitted: it leaves, but for one page that it may still put in place.

        Args:
            handle: of the request.
            last_page: index of its prompt's last page, when that is whole; see `take_last`.
        """
        promise = self._promises.get(handle)
        kept: tuple[bytes, LoadTicket] | None = None
        if promise is not None and promise.settled is not None and last_page is not None:
            at = self._index_of_last(promise, promise.settled, last_page)
            if at is not None:
                self._keep(promise, at, at + 1)
                quality = np.full(1, promise.settled.quality, np.uint8)
                page_hash = promise.prefix.hashes[at].tobytes()
                kept = page_hash, replace(promise.ticket, quality=quality)
                promise.ticket = no_pages(promise.prefix.space)
        self.leave(handle, admitted=True)
        if kept is not None:
            self._last_pages[handle] = kept

    def _index_of_last(
        self, promise: Promise, settled: AgreedRequest, last_page: int
    ) -> int | None:
        """Which of the prefix's pages is the prompt's last, where all ranks have it pinned."""
        return last_page if settled.first_page <= last_page < settled.end_page else None

    def take_last(self, handle: Hashable, page_hash: bytes) -> LoadTicket | None:
        """Hands over the pin of an admitted request's last page, if it is this one."""
        kept_hash, ticket = self._last_pages.get(handle, (b"", None))
        if ticket is None or kept_hash != page_hash:
            return None
        del self._last_pages[handle]
        return ticket


def no_pages(space: KeySpace) -> LoadTicket:
    """A ticket of nothing."""
    return LoadTicket(space, np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))


def part_of(ticket: LoadTicket, start: int, end: int) -> LoadTicket:
    """Some of a ticket's pages."""
    part = slice(start, end)
    return replace(
        ticket, rows=ticket.rows[part], slots=ticket.slots[part], quality=ticket.quality[part]
    )


def chosen_of(ticket: LoadTicket, places: Rows, quality: int) -> LoadTicket:
    """The pages of a ticket at these places, with the quality that was agreed."""
    agreed = np.full(len(places), quality, np.uint8)
    return replace(ticket, rows=ticket.rows[places], slots=ticket.slots[places], quality=agreed)


def places_of(hashes: Hashes, keys: Hashes) -> Rows | None:
    """Where each page is among others, the last place of each; None where one is not."""
    at_key = {key.tobytes(): at for at, key in enumerate(keys)}
    found = [at_key.get(key.tobytes()) for key in hashes]
    return None if None in found else np.array(found, np.int64)


def _joined(first: LoadTicket, second: LoadTicket) -> LoadTicket:
    """Both of the same prefix, so of the same key space."""
    return replace(
        first,
        rows=np.concatenate([first.rows, second.rows]),
        slots=np.concatenate([first.slots, second.slots]),
        quality=np.concatenate([first.quality, second.quality]),
    )
