"""Probes: fetches a few pages that are being recomputed, to notice that a link has become fast.

While every context is sooner computed than fetched nothing is fetched, and what is known of the
link, or of the decoder, would never change again. Nobody waits for a probe, and what it brings is
thrown away: the pages are being computed, exactly.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from sglang_ext.coded_remote.lookup import FoundPage
from sglang_ext.coded_remote.publish import Publisher
from sglang_ext.coded_remote.run import FetchedSpan, parts_of
from sglang_ext.coded_remote.transfer import Part
from sglang_ext.streaming import LinkEstimator
from sglang_ext.tiers.policy.cost_model import PROBE_BYTES, PROBE_SHARE
from sglang_ext.tiers.records.record import RAW_CODEC, ByteArray

# After a probe there is none for so many times as long as it took.
_PAUSE_FACTOR = 4.0


class Probe(NamedTuple):
    """Neighbouring pages of one kind, to be fetched at the finest level and decoded.

    Coarser ones are decoded faster, and would make the decoder look better than it is.
    """

    pages: list[FoundPage]

    @property
    def step(self) -> int:
        """Its level, as a position in `FoundPage.sizes`."""
        return len(self.pages[0].sizes) - 1

    @property
    def parts(self) -> list[Part]:
        """What to read."""
        return parts_of(self.pages, self.step)


class Prober:
    """At most one probe at a time. `decode` needs no lock; the rest is guarded by its owner's."""

    def __init__(self, publisher: Publisher, slot_bytes: int) -> None:
        self._publisher = publisher
        self._slot_bytes = slot_bytes
        self._next: Probe | None = None
        self._started_s = 0.0
        self._not_before_s = 0.0  # infinite while a probe is under way

    def consider(
        self, run: FetchedSpan, link: LinkEstimator, decoding: LinkEstimator, now_s: float
    ) -> None:
        """Plans a probe of a stretch that is computed, if a faster link would have changed that.

        A probe takes at most `PROBE_SHARE` of the time that computing takes, but at least a page.
        """
        is_due = self._next is None and now_s >= self._not_before_s
        if not is_due or not run.would_load(now_s):
            return
        chunk = run.chunks[0]
        num_bytes = np.cumsum([page.sizes[-1] for page in chunk])
        raw_bytes = self._slot_bytes * np.arange(1, len(chunk) + 1)
        expected_s = num_bytes / (link.bytes_per_s or np.inf)
        expected_s += raw_bytes / (decoding.bytes_per_s or np.inf)
        fits = (expected_s <= PROBE_SHARE * run.text_s) & (num_bytes <= PROBE_BYTES)
        self._next = Probe(chunk[: max(1, int(fits.sum()))])

    def take(self, now_s: float) -> Probe | None:
        """The probe to run now; `done` has to follow."""
        probe, self._next = self._next, None
        if probe is not None:
            self._started_s, self._not_before_s = now_s, math.inf
        return probe

    def done(self, now_s: float) -> None:
        """It is over, well or not."""
        self._not_before_s = now_s + _PAUSE_FACTOR * (now_s - self._started_s)

    def decode(self, probe: Probe, good: list[ByteArray]) -> tuple[int, float]:
        """Decodes what came into memory that is thrown away.

        Returns:
            Raw bytes, and the seconds that they took; none where pages are raw.
        """
        if probe.pages[0].meta.codec == RAW_CODEC:
            return 0, 0.0
        room = np.empty(self._slot_bytes, np.uint8)
        started_s, num = time.monotonic(), 0
        for page, data in zip(probe.pages, good, strict=False):
            num += self._publisher.decode(page, data, probe.step, room)
        return num * self._slot_bytes, time.monotonic() - started_s
