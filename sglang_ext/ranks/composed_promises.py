"""Promises to prompts that were cut, with several ranks: made of stored pages, on all ranks alike.

Which stored pages a cut prompt is made of was agreed on when it entered the queue: of those that
every rank had. They are listed in the order of their first use, so what all ranks have pinned of
the list, from its beginning on, makes the leading pages of the prompt, the same ones on all ranks.
A page that one rank has lost since ends what is promised there: what lies behind it is not used, as
a prompt is computed from one place on.

Pins are of the stored pages, each once. Scheduler thread only; neither copies nor waits.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.composition import Composition
from sglang_ext.ranks.consensus import AgreedRequest, RankDivergenceError
from sglang_ext.ranks.promises import Promise, PromiseBook, chosen_of, part_of, places_of
from sglang_ext.tiers.store import KeySpace, LoadTicket, TierCounts
from sglang_ext.tiers.store.types import Hashes, Rows, Slots


class CompositionBook(PromiseBook):
    """As `PromiseBook`, also for prompts whose pages are made of others."""

    def enter(self, handle: Hashable, prefix: ReusablePrefix, prompt: Any = None) -> TierCounts:
        """See `PromiseBook`."""
        found = super().enter(handle, prefix, prompt)
        composition = _composition_of(prefix)
        if composition is not None:  # ranks that differ in it must not load
            self._note(f"/{composition.digest()}")
        return found

    def enter_again(self, handle: Hashable, num_on_device: int) -> None:
        """See `PromiseBook`; of a cut prompt all ranks look again what it can be made of."""
        promise = self._promises[handle]
        cut = promise.prefix.cut
        if cut is None:
            super().enter_again(handle, num_on_device)
        else:
            self.enter(handle, cut.again(num_on_device), promise.prompt)

    def _damaged_of(self, promise: Promise, slots: Slots, start: int) -> Rows:
        if _composition_of(promise.prefix) is None:
            return super()._damaged_of(promise, slots, start)
        return self._find_damaged(slots, None)

    # ---- what was agreed ----

    def gap(self, handle: Hashable) -> tuple[int, int]:
        """See `PromiseBook`."""
        promise = self._promises.get(handle)
        composition = None if promise is None else _composition_of(promise.prefix)
        if promise is None or promise.settled is None or composition is None:
            return super().gap(handle)
        assert promise.prefix.cut is not None
        first, end = _promised_pages(composition, promise.settled)
        return first, max(0, promise.prefix.cut.num_pages - end)

    def num_promised(self, handle: Hashable, space: KeySpace, device_pages: int) -> int:
        """See `PromiseBook`; of a cut prompt, pages of the prompt."""
        promise = self._promises.get(handle)
        composition = None if promise is None else _composition_of(promise.prefix)
        if promise is None or composition is None:
            return super().num_promised(handle, space, device_pages)
        if promise.settled is None or promise.prefix.space != space:
            return 0
        first, end = _promised_pages(composition, promise.settled)
        return 0 if device_pages < first else max(0, end - device_pages)

    def composition(
        self, handle: Hashable, device_pages: int, num_pages: int
    ) -> Composition | None:
        """See `PromiseBook`."""
        promise = self._promises.get(handle)
        composition = None if promise is None else _composition_of(promise.prefix)
        if composition is None or not num_pages:
            return None
        return composition.part(device_pages - composition.start // self._page_size, num_pages)

    def take(
        self, handle: Hashable, space: KeySpace, device_pages: int, hashes: Hashes
    ) -> LoadTicket | None:
        """See `PromiseBook`; the hashes are of the stored pages that those to load are made of."""
        promise = self._promises.get(handle)
        if promise is None or _composition_of(promise.prefix) is None:
            return super().take(handle, space, device_pages, hashes)
        settled = promise.settled
        if settled is None or not self.num_promised(handle, space, device_pages):
            return None
        num = settled.end_page
        wanted = places_of(hashes, promise.prefix.hashes[:num])
        if wanted is None:
            return None
        if promise.first_page or promise.end_page != num:
            raise RankDivergenceError(
                "hier-kv promised pages that it does not hold; restart the server and report this"
            )
        return self._hand_over(promise, settled, wanted, hashes)

    def _hand_over(
        self, promise: Promise, settled: AgreedRequest, wanted: Rows, hashes: Hashes
    ) -> LoadTicket:
        """Gives up all pins but those of the load, which are handed over, and of the last page."""
        ticket, num = promise.ticket, settled.end_page
        unused = np.ones(num, np.bool_)
        unused[wanted] = False
        keeps_last = bool(num == len(promise.prefix.hashes) and unused[-1])
        unused[num - 1] &= not keeps_last
        self._release(ticket.slots[unused])
        promise.first_page = num - keeps_last
        promise.ticket = part_of(ticket, promise.first_page, num)
        promise.settled = settled._replace(end_page=0)
        taken = chosen_of(ticket, wanted, settled.quality)
        self._store.begin_load(promise.prefix.space, taken, hashes)
        return taken

    def _index_of_last(
        self, promise: Promise, settled: AgreedRequest, last_page: int
    ) -> int | None:
        """Of a cut prompt the last page is put in place only where it is stored as its own."""
        composition = _composition_of(promise.prefix)
        if composition is None:
            return super()._index_of_last(promise, settled, last_page)
        end = composition.start // self._page_size + composition.num_pages
        if last_page != end - 1 or not composition.stored[-1]:
            return None
        at = len(promise.prefix.hashes) - 1  # used nowhere before
        return at if promise.first_page <= at < promise.end_page else None


def _composition_of(prefix: ReusablePrefix) -> Composition | None:
    return None if prefix.cut is None else prefix.cut.composition


def _promised_pages(composition: Composition, settled: AgreedRequest) -> tuple[int, int]:
    """The first page of a cut prompt that was promised, and the end of these."""
    first = composition.start // composition.page_size
    return first, first + composition.num_covered(settled.end_page)
