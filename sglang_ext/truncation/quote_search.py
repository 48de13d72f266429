"""Searches the prompts of waiting requests for stored text, on a thread of its own.

Stored text attended to what came before it in *its* conversation, so who finds it learns of that.
Only conversations that opted in are noted (the server's flag says `match` or `all`, and the request
did not decline), only under a named tenant, and only for requests of the same tenant, owner and
session.

A request whose exact prefix is stored no further than its head is held for the moment that the
search takes. What is found makes it a request of a lineage before it is matched for admission;
nothing found, or found too late, leaves it an exact request. Of several ranks each searches:
`agreed_quotes.py`.

But for the thread's two jobs everything runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_ext.admission.waiting_request import Readiness
from sglang_ext.identity.tenancy import Tenant, tenant_of
from sglang_ext.provenance.request_state import wants_exact
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.truncation.lineage import QuoteLineage, attach_lineage, lineage_of, quote_name
from sglang_ext.truncation.quotes import I32, StoredRun, StoredText
from sglang_ext.truncation.reuse import TruncatedReuse
from sglang_ext.truncation.rolling import group_id
from sglang_ext.truncation.truncator import Truncator

logger = logging.getLogger(__name__)

_DEADLINE_S = 0.25
_MIN_RUN_PAGES = 2
# Jobs that may wait for the thread; conversations are not noted beyond, prompts not searched.
_MAX_JOBS = 256
# Pages whose text is kept: 4 bytes a token, and about 400 bytes a page beside it.
MAX_PAGES = 1 << 18


@dataclass(eq=False)
class Search:
    """Of one waiting request.

    Attributes:
        req: SGLang's request.
        space: of its pages.
        group: see `rolling.group_id`; of this process.
        whose: the part of that which all ranks have alike.
        head: tokens that are not searched.
        needless: its exact prefix is stored beyond its head, as far as this process knows.
        future: what is found; None before the thread was asked.
        deadline_s: when it is waited for no longer.
    """

    req: Any
    space: KeySpace
    group: int
    whose: int
    head: int
    needless: bool
    future: Future[StoredRun | None] | None = None
    deadline_s: float = math.inf


class QuoteSearch:
    """The searches of one cache, and the text that they search.

    Args:
        store: DRAM and disk.
        reuse: finds the KV of what a prompt quotes.
        truncator: says who may, and where heads end; its mode is `match` or `all`.
        page_size: P.
        key_of: SGLang's key of a request's pages; needed where several ranks decide.
        max_pages: pages whose text is kept.
        on_found: told of a request that goes on with what was found, before it waits for that.
    """

    def __init__(
        self,
        store: PageStore,
        reuse: TruncatedReuse,
        truncator: Truncator,
        *,
        page_size: int,
        key_of: Callable[[Any], Any] = lambda req: None,
        max_pages: int = MAX_PAGES,
        on_found: Callable[[Hashable], None] | None = None,
    ) -> None:
        self._counters = store.counters
        self._keeps_pages = store.keeps_pages
        self._key_of = key_of
        self._reuse = reuse
        self._page_size = page_size
        self._truncator = truncator
        self._max_pages = max_pages
        self._text = StoredText(page_size, max_pages)
        self._thread = ThreadPoolExecutor(1, "hier-kv-quotes")
        self._notes: list[Future[None]] = []
        self._searches: dict[Hashable, Search] = {}
        self._on_found = on_found or (lambda handle: None)
        self._thread.submit(warm_up, page_size)

    def _tenant_of(self, req: Any) -> Tenant | None:
        """The tenant of a request that opted in; None for who neither quotes nor is quoted.

        A truncated request does neither: what its pages rest on is an approximation already.
        """
        if lineage_of(req) is not None or not self._truncator.may_quote(req):
            return None
        return tenant_of(req) if self._truncator.wants_match(req) else None

    # ---- what is stored ----

    def note(self, req: Any, space: KeySpace, num_tokens: int) -> None:
        """A request ended, and its pages are saved: its tenant may quote them from now on."""
        tenant = self._tenant_of(req)
        if tenant is None or not tenant.is_named:
            return
        size = self._page_size
        tokens = array("q", req.full_untruncated_fill_ids[: num_tokens // size * size])
        self._notes = [note for note in self._notes if not note.done()]
        if len(tokens) < _MIN_RUN_PAGES * size or len(self._notes) >= _MAX_JOBS:
            return
        hashes = self._truncator.hash_of(tokens, req.extra_key, req.cache_salt)
        head = self._truncator.head_of(req.origin_input_ids)
        group = self._group(space, self._whose(tenant, tokens[:head]))
        self._notes.append(
            self._thread.submit(self._text.add, group, _words(tokens), hashes, -(-head // size))
        )

    def forget(self) -> None:
        """The storage was cleared: no text of it is kept. Jobs under way end on the old text."""
        self.drop_all()
        self._text = StoredText(self._page_size, self._max_pages)

    # ---- searches ----

    def begin(self, req: Any, space: KeySpace, num_on_device: int, num_stored: int) -> None:
        """A request entered the queue; its prompt is searched where that can be of use.

        Args:
            req: SGLang's request.
            space: of its pages.
            num_on_device: tokens of its exact prefix that are on the device.
            num_stored: tokens behind these that are stored, as far as this process knows.
        """
        if not self._reuse.is_movable():
            return
        search = self._search_of(req, space, num_on_device, num_stored)
        if search is not None and not search.needless:
            self._searches[req.cache_request_handle] = search
            self._start(search)

    def _search_of(
        self, req: Any, space: KeySpace, num_on_device: int, num_stored: int
    ) -> Search | None:
        """A search that may be of use; of several ranks all have it, or none has."""
        tenant = None if wants_exact(req) else self._tenant_of(req)
        if tenant is None:
            return None
        if not tenant.is_named:
            self._counters.add("quote_unnamed_requests")
            return None
        size = self._page_size
        head, num = self._truncator.head_of(req.origin_input_ids), len(req.origin_input_ids)
        if num_on_device > head + size or num - head < _MIN_RUN_PAGES * size:
            return None
        if len(self._searches) >= _MAX_JOBS:
            return None
        whose = self._whose(tenant, req.origin_input_ids[:head])
        needless = num_on_device + num_stored > head + size
        return Search(req, space, self._group(space, whose), whose, head, needless)

    def _start(self, search: Search) -> None:
        """The thread is asked."""
        words, least = _words(search.req.origin_input_ids[:]), _MIN_RUN_PAGES * self._page_size
        self._counters.add("quote_searches")
        search.future = self._thread.submit(
            self._text.find, search.group, words, search.head, least
        )
        search.deadline_s = time.monotonic() + _DEADLINE_S

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request's prompt is searched. O(1), but for when a search has ended."""
        search = self._searches.get(handle)
        if search is None:
            return True
        readiness = self._readiness(search)
        if readiness == Readiness.WAITING:
            return False
        if readiness == Readiness.LATE:
            self._give_up(handle)
            return True
        del self._searches[handle]
        run = self._result(search)
        if run is not None:
            self._found(search, run)
        return True

    @staticmethod
    def _readiness(search: Search) -> Readiness:
        """READY when it has ended, however late."""
        if search.future is not None and search.future.done():
            return Readiness.READY
        return Readiness.WAITING if time.monotonic() < search.deadline_s else Readiness.LATE

    def _give_up(self, handle: Hashable) -> None:
        """A search takes too long."""
        self._counters.add("quote_search_timeouts")
        self.drop(handle)

    def _result(self, search: Search) -> StoredRun | None:
        """What a search that has ended found; nothing where it failed."""
        assert search.future is not None
        try:
            return search.future.result()
        except Exception:
            logger.exception("hier-kv: a prompt could not be searched for stored text")
            self._counters.add("quote_search_failures")
            return None

    def drop(self, handle: Hashable) -> None:
        """A request leaves the queue, or is not searched any more."""
        search = self._searches.pop(handle, None)
        if search is not None and search.future is not None:
            search.future.cancel()

    def drop_all(self) -> None:
        """Every request leaves."""
        for handle in list(self._searches):
            self.drop(handle)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _whose(self, tenant: Tenant, head: array[int]) -> int:
        """A tenant, an owner, a session and a head. Ranks have namespaces of their own."""
        whose = (tenant.extra_key, tenant.salt, tenant.owner, tenant.session)
        return group_id(self._truncator.secret, *whose, head.tobytes())

    def _group(self, space: KeySpace, whose: int) -> int:
        """Who may quote whom: the same namespace and adapter, and what `whose` stands for."""
        return group_id(self._truncator.secret, space.digest, space.lora, whose)

    def _found(self, search: Search, run: StoredRun) -> None:
        req = search.req
        name = quote_name(self._truncator.secret, search.whose, run)
        lineage = QuoteLineage(
            req.origin_input_ids[:], run, search.head, self._page_size, name, req.extra_key
        )
        attach_lineage(req, lineage)
        self._counters.add("quoting_requests")
        self._on_found(req.cache_request_handle)
        tail = self._truncator.hash_of(req.full_untruncated_fill_ids, req.extra_key, req.cache_salt)
        self._reuse.enqueue(req, lineage, search.space, 0, tail, self._key_of(req))


def warm_up(page_size: int) -> None:
    """Compiles, or loads from the cache, what a search runs; the same for every page size."""
    text, tokens = StoredText(page_size, 4), np.arange(2 * page_size, dtype=np.int32)
    text.add(0, tokens, np.arange(64, dtype=np.uint8).reshape(2, 32), 1)
    text.find(0, tokens[page_size:], 0, 1)


def _words(tokens: array[int]) -> I32:
    return np.frombuffer(tokens, np.int64).astype(np.int32)
