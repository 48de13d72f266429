"""Searches the prompts of waiting requests for stored text, on a thread of its own.

A request that opted in, and whose exact prefix is stored no further than its head, is held for the
moment that the search takes. What is found makes it a request of a lineage before it is matched for
admission; nothing found, or found too late, leaves it an exact request.

But for the thread's two jobs everything runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.request_state import wants_exact
from sglang_ext.tiers.store import KeySpace
from sglang_ext.truncation.lineage import QuoteLineage, attach_lineage, lineage_of, quote_name
from sglang_ext.truncation.quotes import I32, StoredRun, StoredText
from sglang_ext.truncation.rolling import group_id

if TYPE_CHECKING:
    from sglang_ext.cache import HierKVRadixCache
    from sglang_ext.truncation_hooks import Truncator

logger = logging.getLogger(__name__)

_DEADLINE_S = 0.25
_MIN_RUN_PAGES = 2
# Jobs that may wait for the thread; conversations are not noted beyond, prompts not searched.
_MAX_JOBS = 256
# Pages whose text is kept: 4 bytes a token, and about 400 bytes a page beside it.
MAX_PAGES = 1 << 18


@dataclass(frozen=True)
class _Search:
    future: Future[StoredRun | None]
    req: Any
    space: KeySpace
    head: int
    deadline_s: float


class QuoteSearch:
    """The searches of one cache, and the text that they search.

    Nothing is kept before the first request asks for it (or the server's flag does).

    Args:
        cache: the cache.
        truncator: says who may, and where heads end.
        max_pages: pages whose text is kept.
    """

    def __init__(
        self, cache: HierKVRadixCache, truncator: Truncator, max_pages: int = MAX_PAGES
    ) -> None:
        self._cache = cache
        self._truncator = truncator
        self._max_pages = max_pages
        self._text: StoredText | None = None
        self._thread = ThreadPoolExecutor(1, "hier-kv-quotes")
        self._notes: list[Future[None]] = []
        self._searches: dict[Hashable, _Search] = {}
        if truncator.matches_by_default:
            self._start()

    def _start(self) -> StoredText:
        if self._text is None:
            self._text = StoredText(self._cache.page_size, self._max_pages)
            self._thread.submit(_warm_up, self._cache.page_size)
        return self._text

    # ---- what is stored ----

    def note(self, req: Any, space: KeySpace, num_tokens: int) -> None:
        """A request ended, and its pages are saved: they may be quoted from now on.

        Pages of a lineage are not: what they rest on is an approximation already.
        """
        if self._text is None or lineage_of(req) is not None or not self._truncator.may_quote(req):
            return
        size = self._cache.page_size
        tokens = array("q", req.full_untruncated_fill_ids[: num_tokens // size * size])
        self._notes = [note for note in self._notes if not note.done()]
        if len(tokens) < _MIN_RUN_PAGES * size or len(self._notes) >= _MAX_JOBS:
            return
        hashes = self._truncator.hash_of(tokens, req.extra_key, req.cache_salt)
        head = self._truncator.head_of(req.origin_input_ids)
        group = _group(space, req, tokens[:head])
        self._notes.append(
            self._thread.submit(self._text.add, group, _words(tokens), hashes, -(-head // size))
        )

    # ---- searches ----

    def begin(self, req: Any, space: KeySpace, num_found: int) -> None:
        """A request entered the queue; its prompt is searched where that can be of use.

        Args:
            req: SGLang's request.
            space: of its pages.
            num_found: tokens of its exact prefix that are stored or on the device.
        """
        if lineage_of(req) is not None or wants_exact(req) or not self._truncator.may_quote(req):
            return
        if not self._truncator.wants_match(req) or not self._cache.hier_linker.copier.movable:
            return
        text, size = self._start(), self._cache.page_size
        head, num = self._truncator.head_of(req.origin_input_ids), len(req.origin_input_ids)
        if num_found > head + size or num - head < _MIN_RUN_PAGES * size:
            return
        if len(self._searches) >= _MAX_JOBS:
            return
        tokens = req.origin_input_ids[:]
        group = _group(space, req, tokens[:head])
        self._cache.store.counters.add("quote_searches")
        future = self._thread.submit(text.find, group, _words(tokens), head, _MIN_RUN_PAGES * size)
        deadline_s = time.monotonic() + _DEADLINE_S
        self._searches[req.cache_request_handle] = _Search(future, req, space, head, deadline_s)

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request's prompt is searched. O(1), but for when a search has ended."""
        search = self._searches.get(handle)
        if search is None:
            return True
        if not search.future.done():
            if time.monotonic() < search.deadline_s:
                return False
            self._cache.store.counters.add("quote_search_timeouts")
            self.drop(handle)
            return True
        del self._searches[handle]
        try:
            run = search.future.result()
        except Exception:
            logger.exception("hier-kv: a prompt could not be searched for stored text")
            self._cache.store.counters.add("quote_search_failures")
            return True
        if run is not None:
            self._found(search, run)
        return True

    def drop(self, handle: Hashable) -> None:
        """A request leaves the queue, or is not searched any more."""
        search = self._searches.pop(handle, None)
        if search is not None:
            search.future.cancel()

    def drop_all(self) -> None:
        """Every request leaves."""
        for handle in list(self._searches):
            self.drop(handle)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _found(self, search: _Search, run: StoredRun) -> None:
        req, cache = search.req, self._cache
        name = quote_name(self._truncator.secret, run, req.extra_key, req.cache_salt)
        lineage = QuoteLineage(
            req.origin_input_ids[:], run, search.head, cache.page_size, name, req.extra_key
        )
        attach_lineage(req, lineage)
        cache.store.counters.add("quoting_requests")
        tail = self._truncator.hash_of(req.full_untruncated_fill_ids, req.extra_key, req.cache_salt)
        cache.truncated.enqueue(req, lineage, search.space, 0, tail)


def _warm_up(page_size: int) -> None:
    """Compiles, or loads from the cache, what a search runs."""
    text, tokens = StoredText(page_size, 4), np.arange(2 * page_size, dtype=np.int32)
    text.add(0, tokens, np.arange(64, dtype=np.uint8).reshape(2, 32), 1)
    text.find(0, tokens[page_size:], 0, 1)


def _group(space: KeySpace, req: Any, head: array[int]) -> int:
    """Who may quote whom: the same namespace, adapter, salt, extra key and head."""
    keys = repr((req.extra_key, req.cache_salt))
    return group_id(space.digest, space.lora, keys, head.tobytes())


def _words(tokens: array[int]) -> I32:
    return np.frombuffer(tokens, np.int64).astype(np.int32)
