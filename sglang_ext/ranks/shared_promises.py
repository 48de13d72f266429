"""What each waiting request is promised where one rank keeps the pages of all: what that one has.

The ranks of a model with MLA hold the same KV, so one of them, the keeper, keeps it once in memory
that all have mapped. It plans, verifies and pins as it would alone, and the others, the readers,
agree to all that it tells. When a request was agreed on, the keeper's slots are told to all in a
reduction of their own; the pins stay with the keeper, for a load until it is over on all ranks
(`shared_readings.py`).

Scheduler thread only; neither copies nor waits, but for that reduction.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sglang_ext.admission.waiting_request import Readiness
from sglang_ext.ranks.composed_promises import CompositionBook
from sglang_ext.ranks.consensus import (
    AgreedRequest,
    MinReduce,
    RankDivergenceError,
    RequestReport,
)
from sglang_ext.ranks.promises import Promise
from sglang_ext.ranks.shared_readings import SharedReadings
from sglang_ext.tiers.store import KeySpace, LoadTicket
from sglang_ext.tiers.store.types import Hashes

# Told by readers, who know of no slot; more than any.
_ANY_SLOT: Final = np.iinfo(np.int32).max


class SharedBook(CompositionBook):
    """As `CompositionBook`, on every rank of a group of which one keeps the pages.

    Attributes:
        readings: the loads that are not over on all ranks.
    """

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._keeps = self._store.keeps_pages
        self.readings = SharedReadings(self._store.release)
        # Agreed on in this step; their slots are told next.
        self._agreed: list[Promise] = []

    # ---- agreeing ----

    @property
    def num_ended_readings(self) -> int:
        """See `PromiseBook`."""
        return self.readings.num_ended

    def settle_readings(self, num_ended: int, min_reduce: MinReduce) -> None:
        """See `PromiseBook`."""
        self.readings.settle(num_ended)
        self.tell_slots(min_reduce)

    def _extend(self, handle: Hashable, promise: Promise) -> None:
        """A reader pins nothing."""
        if self._keeps:
            super()._extend(handle, promise)

    def _report_of(self, handle: Hashable, promise: Promise, readiness: Readiness) -> RequestReport:
        """A reader agrees to whatever the keeper tells."""
        if self._keeps:
            return super()._report_of(handle, promise, readiness)
        return RequestReport(0, len(promise.prefix.hashes), Readiness.READY, 0)

    def _settle_one(self, handle: Hashable, promise: Promise, agreed: AgreedRequest) -> None:
        if self._keeps:
            super()._settle_one(handle, promise, agreed)
        if not agreed.admit:
            return
        if not self._keeps:
            del self._open[handle]
            promise.settled, promise.first_page = agreed, agreed.first_page
            num_pages = max(0, agreed.end_page - agreed.first_page)
            nowhere = np.full(num_pages, _ANY_SLOT, np.int32)
            quality = np.full(num_pages, agreed.quality, np.uint8)
            rows = np.full(num_pages, -1, np.int64)
            promise.ticket = LoadTicket(promise.prefix.space, rows, nowhere, quality)
        self._agreed.append(promise)

    def tell_slots(self, min_reduce: MinReduce) -> None:
        """Tells all ranks where the pages lie that were agreed on in this step.

        All ranks call it behind `settle`; without such pages there is no reduction.

        Raises:
            RankDivergenceError: what comes back cannot be; a bug.
        """
        promises, self._agreed = self._agreed, []
        parts = [promise.ticket.slots for promise in promises]
        told = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if not len(told):
            return
        slots = told.copy()
        min_reduce(slots)
        is_wrong = slots != told if self._keeps else slots >= self._store.arena.num_slots
        if is_wrong.any() or (slots < 0).any():
            raise RankDivergenceError(
                "the ranks of hier-kv do not know where shared pages lie; restart the server and "
                "report this"
            )
        ends = np.cumsum([len(part) for part in parts])[:-1]
        for promise, part in zip(promises, np.split(slots, ends), strict=True):
            promise.ticket = replace(promise.ticket, slots=part)

    # ---- what was agreed ----

    def take(
        self, handle: Hashable, space: KeySpace, device_pages: int, hashes: Hashes
    ) -> LoadTicket | None:
        """See `CompositionBook`."""
        return self._read(handle, super().take(handle, space, device_pages, hashes))

    def take_last(self, handle: Hashable, page_hash: bytes) -> LoadTicket | None:
        """See `CompositionBook`."""
        return self._read(handle, super().take_last(handle, page_hash))

    def _read(self, handle: Hashable, ticket: LoadTicket | None) -> LoadTicket | None:
        """All ranks read a ticket's pages from now on."""
        if ticket is None:
            return None
        # Pins are counted by the order of loads, so ranks that load differently must not go on.
        self._note(f"<{handle}:{len(ticket.slots)}")
        return replace(ticket, reading=self.readings.begin(ticket.slots))
