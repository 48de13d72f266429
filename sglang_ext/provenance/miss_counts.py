"""Counts, once a request, which of its prompt's tokens were reused and why the others were not."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang_ext.admission.miss_reasons import BARRED, NEVER_STORED, missed_pages
from sglang_ext.admission.waiting_request import WaitingRequest
from sglang_ext.provenance.request_state import state_of
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import Hashes

logger = logging.getLogger(__name__)

# New text is no news to who sent it, and what may not be reused is in no tier.
_NOT_TOLD = (NEVER_STORED, BARRED)


@dataclass(frozen=True)
class Wanted:
    """What a waiting request could reuse at most.

    Attributes:
        path: u8 `[N, 32]`, the whole pages of its prompt that need not be computed.
        waiting: the request as it waits.
        resumable: pages behind which its prompt could go on as it entered the queue, of a model for
            which that takes a window or a state that is stored; None of others.
    """

    path: Hashes
    waiting: WaitingRequest
    resumable: int | None = None


def told(missed: dict[str, int]) -> dict[str, int]:
    """What a client is told of the tokens that its request missed, by reason."""
    return {name: num for name, num in missed.items() if name not in _NOT_TOLD}


def counts_of_tenant(number: int) -> str:
    """What the names of a tenant's own counts begin with; 0 is all who have no share."""
    return f"tenant_{number or 'others'}_"


class MissKeeper:
    """Looks at requests as they are about to run for the first time. Scheduler's thread only.

    Args:
        store: DRAM and disk.
        page_size: tokens in a page.
        by_tenant: count by tenant, too, of those that have a share and of all others.
    """

    def __init__(self, store: PageStore, page_size: int, *, by_tenant: bool = False) -> None:
        self._store = store
        self._page_size = page_size
        self._by_tenant = by_tenant

    def runs(self, req: Any, space: KeySpace | None) -> None:
        """A request is about to be computed; what it reuses is on the device, or on its way.

        Once a request. An error here is counted, and the request runs. Where another rank keeps
        the pages, that one alone counts it: here nothing is known of where they lie.

        Args:
            req: SGLang's request.
            space: where its pages belong, as of now; None where nothing may be reused for it.
        """
        if not self._store.keeps_pages:
            self.leave_out(req)
            return
        state_of(req).is_counted = True
        try:
            self._count(req, space)
        except Exception:
            self._store.counters.add("miss_report_failures")
            logger.exception("hier-kv: what a request reused, and what not, could not be counted")

    def leave_out(self, req: Any) -> None:
        """A request that nobody sent, or another rank counts, is about to be computed."""
        state = state_of(req)
        state.is_counted, state.wanted = True, None

    def _count(self, req: Any, space: KeySpace | None) -> None:
        state = state_of(req)
        wanted, state.wanted = state.wanted, None
        num_cached, counters = max(0, int(req.cached_tokens)), self._store.counters
        tenant = counts_of_tenant(space.tenant_number) if self._by_tenant and space else None
        for whose in ("",) if tenant is None else ("", tenant):
            counters.add(f"{whose}requested_tokens", len(req.origin_input_ids))
            for tier, num_tokens in state.by_tier(num_cached).items():
                counters.add(f"{whose}reused_{tier}_tokens", num_tokens)
        missed = self._missed(req, space, wanted, num_cached)
        for reason, num_tokens in missed.items():
            counters.add(f"missed_{reason}_tokens", num_tokens)
        if missed:
            counters.add(f"missed_{next(iter(missed))}_requests")
            state.missed = missed
            if self._store.events.on:
                self._store.events.note("missed", rid=req.rid, tokens=missed)

    def _missed(
        self, req: Any, space: KeySpace | None, wanted: Wanted | None, num_cached: int
    ) -> dict[str, int]:
        """Tokens that were not reused, by reason; in whole pages."""
        size = self._page_size
        first, end = -(-num_cached // size), (len(req.origin_input_ids) - 1) // size
        if wanted is None or space is None:
            return {BARRED: size * (end - first)} if first < end else {}
        pages = missed_pages(
            self._store, space, wanted.path[:end], first, wanted.waiting, wanted.resumable
        )
        return {reason: size * num for reason, num in pages.items()}
