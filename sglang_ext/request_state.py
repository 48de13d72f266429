"""What the plugin remembers of one request, on the request itself: where its prefix lay."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

_ATTRIBUTE = "_hier_kv_state"


class Tier(enum.IntEnum):
    """Where a page lay when its request entered the queue."""

    NONE = 0
    DEVICE = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


class RequestState:
    """Attribution of one request's reused tokens.

    Attributes:
        page_size: tokens in a page.
        origin: tier of each page at enqueue.
        epoch: weight epoch in which the request's first tokens were computed.
    """

    def __init__(self) -> None:
        self.page_size = 1
        self.origin: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        self._loaded: list[tuple[int, int, Tier]] = []

    def note_enqueued(self, page_size: int, tiers: list[tuple[Tier, int]]) -> None:
        """Records where the request's pages lie as it enters the queue.

        Args:
            page_size: tokens in a page.
            tiers: runs of pages from the start of the prompt, as (tier, number of pages).
        """
        self.page_size = page_size
        self._loaded.clear()
        self.origin = np.repeat(
            np.array([tier for tier, _ in tiers], np.uint8), [num for _, num in tiers]
        )

    def note_loaded(self, start: int, num_tokens: int, tier: Tier) -> None:
        """Records that tokens [start, start + num_tokens) were loaded from a tier at admission."""
        self._loaded.append((start, num_tokens, tier))

    def by_tier(self, num_cached_tokens: int) -> dict[str, int]:
        """Reused tokens by the tier they lay in at enqueue.

        A page that was nowhere then (another request computed it meanwhile) counts for the tier
        that it was taken from at admission.

        Args:
            num_cached_tokens: tokens of the prompt that were not computed.
        """
        num_pages = -(-num_cached_tokens // self.page_size)
        at_admission = np.full(num_pages, Tier.DEVICE, np.uint8)
        for start, num, tier in self._loaded:
            at_admission[start // self.page_size : (start + num) // self.page_size] = tier
        known = min(num_pages, len(self.origin))
        origin = at_admission.copy()
        origin[:known] = np.where(
            self.origin[:known] == Tier.NONE, at_admission[:known], self.origin[:known]
        )
        counts = np.bincount(origin, minlength=len(Tier)) * self.page_size
        if num_pages:  # the last page may be cut short by the match limit
            counts[origin[-1]] -= num_pages * self.page_size - num_cached_tokens
        names = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE)
        return {tier.name.lower(): int(counts[tier]) for tier in names}


def state_of(req: Any) -> RequestState:
    """The state of an SGLang request, made on first use."""
    state = getattr(req, _ATTRIBUTE, None)
    if state is None:
        state = RequestState()
        setattr(req, _ATTRIBUTE, state)
    return state


def find_state(req: Any) -> RequestState | None:
    """The state of a request, or None when it never met the plugin."""
    return getattr(req, _ATTRIBUTE, None)
