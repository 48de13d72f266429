"""Asks a remote store where a prompt of a model with window layers can be resumed.

First the full layers' pages, up to the first gap; then, from their end backwards, the pages of the
window layers in the last window; where one lacks, in the window that ends before it, a few times.
What is found becomes what the waiting request could reuse. Scheduler's thread only; never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.transfers import Hashes
from sglang_ext.device.windows.layers import WindowLayers
from sglang_ext.tiers.store import PageStore
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup

# So many windows of a request are asked for, from the furthest backwards.
_MOST_WINDOWS = 4


Enter = Callable[[Hashable, ReusablePrefix, Any], Any]
"""Puts a request into the waiting room anew: its handle, what it could reuse, and its key."""


@dataclass
class _Asked:
    """A request whose question is open.

    Attributes:
        prefix: what it could reuse of what is here.
        key: SGLang's, of its pages.
        tail: u8 `[N, 32]`, the pages behind its device prefix that could be loaded.
        last: u8 `[0 or 1, 32]`, a prompt's last page, which is computed and then replaced.
        num_local: leading pages of these that are here.
        least: pages of these that it can reuse without the remote store.
        inquiry: the question.
        since_s: when it was first asked.
        end: pages behind which the window is asked for; None while pages are.
        pages: pages whose window layers are asked for, from the last one on.
        num_windows: windows asked for.
    """

    prefix: ReusablePrefix
    key: Any
    tail: Hashes
    last: Hashes
    num_local: int
    least: int
    inquiry: RemoteLookup
    since_s: float
    end: int | None = None
    pages: tuple[int, ...] = ()
    num_windows: int = 0


class WindowInquiries:
    """The open questions, by the requests' handles.

    Args:
        layers: how window layers are stored.
        store: DRAM, disk and the remote store.
        enter: puts a request into the waiting room anew, with another prefix.
        longest_s: for how long a request waits for its answer; 0: not at all.
        clock: seconds; monotonic.
    """

    def __init__(
        self,
        layers: WindowLayers,
        store: PageStore,
        enter: Enter,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = layers
        self._store = store
        self._enter = enter
        self._longest_s = longest_s
        self._clock = clock
        self._open: dict[Hashable, _Asked] = {}

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
            limit: pages from the root on that can be there at most; see `WindowPages.wish`.
            least: pages of these that it can reuse without the remote store.
        """
        self.drop(handle)
        limit = max(0, limit - prefix.num_on_device)
        tail, last = tail[:limit], tail[limit : limit + 1]
        if least == len(tail):
            return
        num_local = self._store.locate_prefix(prefix.space, tail, prefix.max_quality).total
        inquiry = RemoteLookup(prefix.space, tail[num_local:], 0, prefix.max_quality)
        if self._store.ask_remote(inquiry):
            now_s = self._clock()
            self._open[handle] = _Asked(prefix, key, tail, last, num_local, least, inquiry, now_s)

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request should wait for the answer."""
        asked = self._open.get(handle)
        if asked is None:
            return True
        if max(self._clock() - asked.since_s, self._store.remote_stalled_s) < self._longest_s:
            return False
        if self._longest_s:
            self._store.counters.add("remote_lookups_late")
        self.drop(handle)
        return True

    def drop(self, handle: Hashable) -> None:
        """Nobody waits for the answer any more; unknown handles are ignored."""
        asked = self._open.pop(handle, None)
        if asked is not None:
            asked.inquiry.cancelled = True

    def drop_all(self) -> None:
        """As `drop`, for all requests."""
        for handle in list(self._open):
            self.drop(handle)

    def step(self) -> None:
        """Once a scheduler step: takes answers, and asks on."""
        for handle, asked in list(self._open.items()):
            if asked.inquiry.done:
                end = self._next_end(asked)
                self._ask_window(handle, asked, end)

    def _next_end(self, asked: _Asked) -> int:
        """Pages behind which the window is asked for next, or is known to be there."""
        if asked.end is None:
            return asked.num_local + len(asked.inquiry.sizes)
        num_whole = len(asked.inquiry.sizes) // self._layers.num_groups
        return asked.end if num_whole == len(asked.pages) else asked.pages[num_whole]

    def _ask_window(self, handle: Hashable, asked: _Asked, end: int) -> None:
        """Asks for the window before `end`; ends the question where nothing is left to ask."""
        if end <= asked.least or asked.num_windows == _MOST_WINDOWS:
            self.drop(handle)
            return
        window = self._layers.window_of(end)
        entries = self._layers.entries(asked.tail[window])
        if end != asked.end:
            here = self._store.page_states(asked.prefix.space, entries)[0] != 0
            whole = here.reshape(self._layers.num_groups, -1).all(axis=0)
            pages = tuple(window.start + i for i in np.flatnonzero(~whole)[::-1].tolist())
            if pages:
                keys = [self._layers.entries(asked.tail[page : page + 1]) for page in pages]
                space, limit = asked.prefix.space, asked.prefix.max_quality
                asked.inquiry = RemoteLookup(space, np.concatenate(keys), 0, limit)
                asked.end, asked.pages, asked.num_windows = end, pages, asked.num_windows + 1
                if not self._store.ask_remote(asked.inquiry):
                    self.drop(handle)
                return
        self.drop(handle)
        above = asked.prefix.hashes[: asked.prefix.num_on_device]
        wanted = [above, asked.tail[:end], entries]
        if end == len(asked.tail):
            wanted += [asked.last, self._layers.entries(asked.last)]
        resumes_at = asked.prefix.num_on_device + end
        prefix = replace(
            asked.prefix, hashes=np.concatenate(wanted), look_again=None, resumes_at=resumes_at
        )
        self._enter(handle, prefix, asked.key)
