"""Searches for stored text on several ranks: what all of them have found alike is taken.

Each rank keeps the text of the conversations that it served and searches it on a thread of its own.
Notes and searches come in the same order on all ranks, so in general all find the same; but a rank
may be late, may have been too busy to note a conversation, or may have failed. So in each step a
rank tells of its searches whether they have ended, and a digest of what they found. Nobody takes
anything from another: where digests differ, or one rank waits no longer, nothing was found, on all
ranks alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

from sglang_ext.admission.searches import DIGEST_BITS, AgreedSearch, SearchReport
from sglang_ext.admission.waiting_request import Readiness
from sglang_ext.tiers.store import KeySpace
from sglang_ext.truncation.keyed_names import encode_parts
from sglang_ext.truncation.quote_search import QuoteSearch, Search
from sglang_ext.truncation.quotes import StoredRun


class AgreedQuotes(QuoteSearch):
    """As `QuoteSearch`, on one of several ranks; see `Searches`.

    A request is held until its search was agreed on, so a rank that has an exact prefix where
    another has none searches, too, a step later.
    """

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        # What was found here and is not agreed on, with its digest.
        self._results: dict[Hashable, tuple[StoredRun | None, int]] = {}
        # Of the report that is being agreed on.
        self._told: list[tuple[Hashable, Search]] = []

    def begin(self, req: Any, space: KeySpace, num_on_device: int, num_stored: int) -> None:
        """See `QuoteSearch`; what is on the device is so on all ranks."""
        search = self._search_of(req, space, num_on_device, num_stored)
        if search is None:
            return
        self._searches[req.cache_request_handle] = search
        if not search.needless:
            self._start(search)

    def _start(self, search: Search) -> None:
        """A rank that cannot move K finds nothing."""
        if self._reuse.is_movable():
            super()._start(search)

    def may_admit(self, handle: Hashable) -> bool:
        """False until it was agreed on. O(1)."""
        return handle not in self._searches

    def drop(self, handle: Hashable) -> None:
        """See `QuoteSearch`."""
        self._results.pop(handle, None)
        super().drop(handle)

    def report(self, most: int) -> list[SearchReport]:
        """See `Searches`."""
        self._told = list(islice(self._searches.items(), most))
        return [self._report_of(handle, search) for handle, search in self._told]

    def _report_of(self, handle: Hashable, search: Search) -> SearchReport:
        # A rank whose pages another one keeps knows of none, so it leaves that to the other.
        needless = search.needless or not self._keeps_pages
        if not self._reuse.is_movable():
            self._results[handle] = None, 0
            return SearchReport(Readiness.READY, needless, 0)
        readiness = self._readiness(search)
        if readiness != Readiness.READY:
            return SearchReport(readiness, needless, 0)
        if handle not in self._results:
            run = self._result(search)
            self._results[handle] = run, 0 if run is None else self._digest_of(search, run)
        return SearchReport(readiness, needless, self._results[handle][1])

    def settle(self, agreed: Sequence[AgreedSearch]) -> None:
        """See `Searches`; requests of which something was found enter the queue anew."""
        told, self._told = self._told, []
        for (handle, search), one in zip(told, agreed, strict=True):
            if self._searches.get(handle) is search:
                self._settle_one(handle, search, one)

    def _settle_one(self, handle: Hashable, search: Search, agreed: AgreedSearch) -> None:
        if agreed.is_needless:
            self.drop(handle)
        elif agreed.readiness == Readiness.LATE:
            self._give_up(handle)
        elif agreed.readiness == Readiness.WAITING:
            if search.future is None:
                self._start(search)
        else:
            run, _ = self._results[handle]
            self.drop(handle)
            if agreed.digest is None:
                self._counters.add("quote_search_disagreements")
            elif run is not None:
                self._found(search, run)

    def _digest_of(self, search: Search, run: StoredRun) -> int:
        """Stands for what was found, and for whom; the same on all ranks, never 0.

        Keyed, so that no client can look for text of which ranks find other parts alike.
        """
        place = (search.whose, run.start, run.length, run.position)
        parts = encode_parts(*place, run.hashes.tobytes(), run.head_hashes.tobytes())
        digest = hashlib.blake2b(parts, digest_size=8, key=self._truncator.secret).digest()
        return int.from_bytes(digest, "little") >> (64 - DIGEST_BITS) or 1
