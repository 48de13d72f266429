"""The gate between the device and the tiers: it stops transfers that began under other weights.

KV on the device was computed with the present weights, while a page's namespace is a digest of the
weights that computed it. Weights may change between planning a transfer and doing it. So each key
space carries the epoch in which it was given out, a load needs `LivePages`, and only `Gate` makes
these, of a ticket whose epoch lasts. A ticket of another epoch, or of another key space than the
request's, ends as a miss. Saves pass the same comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sglang_ext.tiers.store.types import Epoch, KeySpace, LoadTicket, StoreCounters

_KEY: Final = object()


class LivePages:
    """Pinned pages that may be copied to the device; ends with `PageStore.end_load`.

    Only `Gate.load` makes one.

    Attributes:
        ticket: the pages.
    """

    __slots__ = ("ticket",)

    def __init__(self, ticket: LoadTicket, key: object) -> None:
        if key is not _KEY:
            raise TypeError("LivePages are made by Gate.load alone, of a ticket that it compared")
        self.ticket: Final = ticket


class Gate:
    """Says what may pass between the device and the tiers, and counts what may not.

    Threads: the scheduler's thread ends epochs and loads; saves ask from their own thread.

    Args:
        counters: of the store.
        end_load: gives the pins of a ticket back.
    """

    def __init__(self, counters: StoreCounters, end_load: Callable[[LoadTicket], None]) -> None:
        self._counters = counters
        self._end_load = end_load
        self._epoch = Epoch()

    @property
    def epoch(self) -> Epoch:
        """The present epoch."""
        return self._epoch

    def end_epoch(self) -> None:
        """Weights or adapters change: no key space that was given out so far passes any more."""
        self._epoch = Epoch()

    def is_open(self, space: KeySpace) -> bool:
        """Whether a key space is of the present epoch."""
        return self.lasts(space.epoch)

    def lasts(self, epoch: Epoch) -> bool:
        """Whether an epoch is the present one. The only comparison of epochs there is."""
        return epoch is self._epoch

    def load(self, ticket: LoadTicket, space: KeySpace) -> LivePages | None:
        """Lets pages through to the device, or gives their pins back and counts them (None).

        Args:
            ticket: the pages, pinned.
            space: the request's, as of now.
        """
        if ticket.space == space and self.is_open(space):
            return LivePages(ticket, _KEY)
        self._end_load(ticket)
        self._counters.add("stale_load_pages", len(ticket.slots))
        return None

    def is_live(self, pages: LivePages) -> bool:
        """Whether pages that were let through before may still be copied."""
        if self.is_open(pages.ticket.space):
            return True
        self._counters.add("stale_load_pages", len(pages.ticket.slots))
        return False

    def save(self, space: KeySpace, num_pages: int) -> bool:
        """Whether pages from the device may be stored in a key space; counts those that may not."""
        if self.is_open(space):
            return True
        self._counters.add("stale_save_pages", num_pages)
        return False
