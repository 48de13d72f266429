"""Brings measurements to the cost model, and counts how well it had foreseen them.

The threads that read from disk and copy to the device call in, and the scheduler's thread with
prefills. Sums of expected and measured times are counters, so their ratio says how good the
estimates are.
"""

from __future__ import annotations

from collections import Counter

from sglang_ext.tiers.coded_host import RecordTier
from sglang_ext.tiers.policy.cost_model import CostModel, TransferBacklog
from sglang_ext.tiers.store.types import StoreCounters

# The first estimates of each kind rest on next to nothing, and are not held against the model.
_UNCOUNTED = 5
# A disk that is fuller than this is short of room, and room is what coding makes.
_ROOMY_SHARE = 0.5


class CostFeeds:
    """Where measurements go. Thread-safe.

    Args:
        cost: the model.
        kv_bytes_per_page: raw bytes of a page's KV.
        counters: of the page store.
    """

    def __init__(self, cost: CostModel, kv_bytes_per_page: int, counters: StoreCounters) -> None:
        self.cost = cost
        self._kv_bytes = kv_bytes_per_page
        self.counters = counters
        # Prefills come from the scheduler's thread, all others from one thread at a time.
        self._seen: Counter[str] = Counter()

    def on_read(self, num_bytes: int, read_s: float, decode_bytes: int, decode_s: float) -> None:
        """The disk was busy; see `CostModel.note_read`."""
        expected_s = self.cost.read_s(TransferBacklog(num_bytes, decode_bytes))
        if expected_s is not None:
            self._count("read", expected_s, read_s + decode_s)
        self.cost.note_read(num_bytes, read_s, decode_bytes, decode_s)
        self.counters.time("read", read_s)
        if decode_bytes:
            self.counters.time("decode", decode_s)

    def on_write(self, num_bytes: int, write_s: float, _decoded: int, _decode_s: float) -> None:
        """The disk was written to; see `CostModel.note_write`."""
        self.cost.note_write(num_bytes, write_s)

    def on_fetch(self, num_bytes: int, fetch_s: float, _decoded: int, _decode_s: float) -> None:
        """The remote store was busy; see `CostModel.note_fetch`."""
        expected_s = self.cost.fetch_s(TransferBacklog(num_bytes))
        if expected_s is not None:
            self._count("fetch", expected_s, fetch_s)
        self.cost.note_fetch(num_bytes, fetch_s)
        self.counters.time("fetch", fetch_s)

    def keep_raw(self, disk: RecordTier, coded_share: float) -> bool:
        """Whether pages should go to disk as they are; see `CostModel.prefers_raw`."""
        if not self.cost.prefers_raw(coded_share):
            return False
        stats = disk.stats()
        return stats.used_bytes < _ROOMY_SHARE * stats.max_bytes

    def on_load(self, num_pages: int, seconds: float) -> None:
        """Pages were copied from DRAM to the device."""
        expected_s = self.cost.load_s(num_pages * self._kv_bytes)
        if expected_s is not None:
            self._count("device_load", expected_s, seconds)
        self.cost.note_load(num_pages * self._kv_bytes, seconds)

    def on_prefill(self, expected_s: float, seconds: float) -> None:
        """A prefill is done whose time had been foreseen."""
        self._count("prefill", expected_s, seconds)

    def _count(self, what: str, expected_s: float, seconds: float) -> None:
        self._seen[what] += 1
        if self._seen[what] > _UNCOUNTED:
            self.counters.time(f"cost_{what}_expected", expected_s)
            self.counters.time(f"cost_{what}", seconds)
