"""What the plugin remembers of one request, on the request itself.

Where its prefix lay, and what the KV is worth that its tokens attended to.
"""

from __future__ import annotations

import enum
import time
from typing import Any

import numpy as np

from sglang_ext.tiers.records.quality import ANY, Qualities, Quality, worst

_ATTRIBUTE = "_hier_kv_state"
EXACT_PARAM = "hier_kv_exact"


class HitTier(enum.IntEnum):
    """Where a page lay when its request entered the queue."""

    NONE = 0
    DEVICE = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


class RequestState:
    """Attribution and provenance of one request's reused tokens.

    Attributes:
        page_size: tokens in a page.
        arrived_s: monotonic time at which it first entered the queue; None before.
        origin: tier of each page at enqueue.
        taint: worst quality of the KV that its tokens attended to since it was admitted. It only
            grows: overwriting that KV with better one does not better what was computed on it.
        reused: worst quality of the pages that were not computed, for the report.
        received: quality of the KV that a prefill server sent for it; None where none did.
        resume_pages: numbers of leading pages behind which a model with window layers went on with
            its prompt, or would have; of one with states, where it parted from what was stored.
        offered_states: hashes of pages behind which its states were offered to be saved, where
            several ranks have to offer the same.
        wanted: what it could reuse at most, until it runs; see `miss_counts.py`.
        missed: tokens of whole pages that were computed, by reason, that of the first page first.
        is_wait_told: what it waited for since it entered the queue is in its trace.
        is_counted: it ran, so that it is in the counts of tokens.
    """

    def __init__(self) -> None:
        self.page_size = 1
        self.arrived_s: float | None = None
        self.origin: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        self._loaded: list[tuple[int, int, HitTier]] = []
        self.taint = int(Quality.EXACT)
        self.reused = int(Quality.EXACT)
        self.received: int | None = None
        self.resume_pages: set[int] = set()
        self.offered_states: set[bytes] = set()
        self.wanted: Any = None
        self.missed: dict[str, int] = {}
        self.is_wait_told = False
        self.is_counted = False
        self._loaded_quality: list[tuple[int, Qualities]] = []  # (first page, quality)

    def note_enqueued(self, page_size: int, tiers: list[tuple[HitTier, int]]) -> None:
        """Records where the request's pages lie as it enters the queue.

        Args:
            page_size: tokens in a page.
            tiers: runs of pages from the start of the prompt, as (tier, number of pages).
        """
        self.page_size = page_size
        if self.arrived_s is None:  # one that was retracted enters again
            self.arrived_s = time.monotonic()
        self._loaded.clear()
        self.is_wait_told = False
        self.origin = np.repeat(
            np.array([tier for tier, _ in tiers], np.uint8), [num for _, num in tiers]
        )

    def note_remote(self, first_page: int, num_pages: int) -> None:
        """Records pages that were nowhere here at enqueue, but in the remote store."""
        origin = np.zeros(max(len(self.origin), first_page + num_pages), np.uint8)
        origin[: len(self.origin)] = self.origin
        found = origin[first_page : first_page + num_pages]
        found[found == HitTier.NONE] = HitTier.REMOTE
        self.origin = origin

    def note_loaded(self, start: int, num_tokens: int, tier: HitTier) -> None:
        """Records that tokens [start, start + num_tokens) were loaded from a tier at admission."""
        self._loaded.append((start, num_tokens, tier))

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens that were loaded for it since it last entered the queue."""
        return sum(num for _, num, _ in self._loaded)

    # ---- provenance ----

    def begin_admission(self) -> None:
        """It holds no KV: what it attended to before does not count for what comes.

        But for what it was sent, which a retraction keeps elsewhere and puts back.
        """
        self.taint = int(Quality.EXACT) if self.received is None else self.received
        self._loaded_quality.clear()

    def note_received(self, quality: int) -> None:
        """KV of this quality was sent for it; as it may be sent twice, the worse one counts."""
        self.received = max(quality, self.received or int(Quality.EXACT))
        self.reused = max(self.reused, self.received)
        self.taint = max(self.taint, self.received)

    def note_loaded_quality(self, first_page: int, quality: Qualities) -> None:
        """Records what pages are worth that are loaded into rows of its own."""
        if quality.any():
            self._loaded_quality.append((first_page, quality))

    def note_reused(self, on_device: int) -> None:
        """It is admitted, on a device prefix of this quality and on what was loaded for it."""
        loaded = [worst(quality) for _, quality in self._loaded_quality]
        self.reused = max(self.reused, on_device, *loaded)
        self.taint = max(self.taint, on_device, *loaded)

    def page_quality(self, num_pages: int) -> Qualities:
        """Quality of its own pages, u8 `[num_pages]`: of those loaded, and of those computed."""
        quality = np.full(num_pages, self.taint, np.uint8)
        for first, loaded in self._loaded_quality:
            end = min(num_pages, first + len(loaded))
            quality[first:end] = loaded[: max(0, end - first)]
        return quality

    def by_tier(self, num_cached_tokens: int) -> dict[str, int]:
        """Reused tokens by the tier they lay in at enqueue.

        A page that was nowhere then (another request computed it meanwhile) counts for the tier
        that it was taken from at admission.

        Args:
            num_cached_tokens: tokens of the prompt that were not computed.
        """
        num_pages = -(-num_cached_tokens // self.page_size)
        at_admission = np.full(num_pages, HitTier.DEVICE, np.uint8)
        for start, num, tier in self._loaded:
            at_admission[start // self.page_size : (start + num) // self.page_size] = tier
        known = min(num_pages, len(self.origin))
        origin = at_admission.copy()
        origin[:known] = np.where(
            self.origin[:known] == HitTier.NONE, at_admission[:known], self.origin[:known]
        )
        counts = np.bincount(origin, minlength=len(HitTier)) * self.page_size
        if num_pages:  # the last page may be cut short by the match limit
            counts[origin[-1]] -= num_pages * self.page_size - num_cached_tokens
        names = (HitTier.DEVICE, HitTier.HOST, HitTier.DISK, HitTier.REMOTE)
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


def wants_exact(req: Any) -> bool:
    """Whether a request asks to be answered from exact KV only.

    It says so in its sampling parameters: `{"custom_params": {"hier_kv_exact": true}}`.
    """
    custom = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    return isinstance(custom, dict) and bool(custom.get(EXACT_PARAM))


def max_quality_of(req: Any) -> int:
    """The worst quality that a request may be given."""
    return int(Quality.EXACT) if wants_exact(req) else ANY
