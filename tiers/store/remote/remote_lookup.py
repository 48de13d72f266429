"""Asks a remote store what it has of waiting requests' pages, before anything is fetched.

One thread asks, for one request after the other, and reads headers only. The queue is bounded, and
the scheduler's thread does nothing but put a question there and look whether it was answered.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.store.types import Hashes, KeySpace, StoreCounters

logger = logging.getLogger(__name__)

_QUEUED = 256  # requests; more are not asked for, and counted
_PAGES_AT_ONCE = 64

# (key space, page hashes, max quality) -> bytes of each leading page that the store has.
FindSizes = Callable[[KeySpace, Hashes, int], list[int]]
# The same -> index of the first page that the store has; None where it has none of them.
FindFirst = Callable[[KeySpace, Hashes, int], int | None]


class RemoteLookup:
    """A question, and its answer.

    Attributes:
        space: where the pages belong.
        hashes: u8 `[N, 32]`, the pages asked for.
        first_page: index in the prompt of the first of them; the asker's own.
        max_quality: no page from the first worse one on.
        seeks: whether the first of these that the store has is asked for, and not all of them.
        sizes: i64 `[n]`, bytes of the leading pages that the store has; complete when `done`.
        first: index of the page that was sought; None where there is none; complete when `done`.
        done: the answer is there, or there will be none.
        cancelled: nobody waits for the answer any more.
    """

    def __init__(
        self,
        space: KeySpace,
        hashes: Hashes,
        first_page: int,
        max_quality: int,
        *,
        seeks: bool = False,
    ) -> None:
        self.seeks = seeks
        self.first: int | None = None
        self.space = space
        self.hashes = hashes
        self.first_page = first_page
        self.max_quality = max_quality
        self.sizes: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.done = False
        self.cancelled = False


class RemoteLookupThread:
    """The thread that asks. Thread-safe.

    Args:
        find_sizes: asks the store; may block, must not raise for what the store does.
        find_first: the same, of a page that is sought.
        counters: where questions are counted.
    """

    def __init__(
        self, find_sizes: FindSizes, find_first: FindFirst, counters: StoreCounters
    ) -> None:
        self._find_sizes = find_sizes
        self._find_first = find_first
        self._counters = counters
        self._queue: queue.Queue[RemoteLookup | None] = queue.Queue(_QUEUED)
        self._began_s: float | None = None  # when the call in the thread's hands began
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hier-kv-remote-ask", daemon=True)
        self._thread.start()

    def ask(self, remote_lookup: RemoteLookup) -> bool:
        """Puts a question; returns whether it will be answered. Does not block."""
        if self._closing.is_set():
            return False
        try:
            self._queue.put_nowait(remote_lookup)
        except queue.Full:
            self._counters.add("remote_lookups_dropped")
            return False
        self._counters.add("remote_lookups")
        return True

    @property
    def stalled_s(self) -> float:
        """For how long the store has not answered the question in the thread's hands."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def num_waiting(self) -> int:
        """Questions that the store was not asked yet."""
        return self._queue.qsize()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the call in its hands; what is left is never answered."""
        self._closing.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            remote_lookup = self._queue.get()
            if remote_lookup is None:
                break
            try:
                if not self._closing.is_set():
                    answer = self._seek if remote_lookup.seeks else self._answer
                    answer(remote_lookup)
            except Exception:
                self._counters.add("remote_failures")
                logger.exception("hier-kv: the remote store could not be asked for pages")
            finally:
                remote_lookup.done = True
        while not self._queue.empty():
            rest = self._queue.get()
            if rest is not None:
                rest.done = True

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a call of the store: `stalled_s` counts from its begin."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._began_s = None

    def _answer(self, remote_lookup: RemoteLookup) -> None:
        sizes: list[int] = []
        while not remote_lookup.cancelled and len(sizes) < len(remote_lookup.hashes):
            batch = remote_lookup.hashes[len(sizes) : len(sizes) + _PAGES_AT_ONCE]
            with self._calling():
                found = self._find_sizes(remote_lookup.space, batch, remote_lookup.max_quality)
            sizes += found
            if len(found) < len(batch):
                break
        remote_lookup.sizes = np.array(sizes, np.int64)
        self._counters.add("remote_found_pages", len(sizes))

    def _seek(self, remote_lookup: RemoteLookup) -> None:
        hashes, at = remote_lookup.hashes, 0
        while not remote_lookup.cancelled and at < len(hashes):
            batch = hashes[at : at + _PAGES_AT_ONCE]
            with self._calling():
                found = self._find_first(remote_lookup.space, batch, remote_lookup.max_quality)
            if found is not None:
                remote_lookup.first = at + found
                self._counters.add("remote_found_pages")
                return
            at += _PAGES_AT_ONCE
