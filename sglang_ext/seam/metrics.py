"""Prometheus metrics and the state dump: what the tiers hold, move, reject and drop.

Every count of the page store is one series of `sglang:hier_kv_events_total{event=...}`; docs/
operations.md explains each. Published once a second from the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_ext.codec.page_codec import PageCodec
from sglang_ext.tiers.coded_host import CachedDiskTier, RecordTier
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.store import PageStore

_INTERVAL_S = 1.0
# Values of the page store that are gauges: they can fall.
_GAUGES = {
    "host_pages",
    "host_capacity_pages",
    "planned_pages",
    "spill_queue_pages",
    "clears_pending",
    "save_queue",
    "waiting_requests",
    "window_requests",
}
# What the disk tier reports that can fall, and so is no count of events.
_DISK_SIZES = ("segments", "used_bytes", "max_bytes", "open_fds")


class MetricsReporter:
    """Turns counters into metrics.

    Args:
        store: the page store.
        disk: what keeps its records, a disk or coded DRAM, or None.
        page_codec: what codes its pages, or None.
        cost: what is known of speeds, or None.
        num_saves: how many nodes are on their way to DRAM.
        enabled: whether SGLang runs with `--enable-metrics`.
        labels: label values common to all series.
    """

    def __init__(
        self,
        store: PageStore,
        disk: RecordTier | None,
        page_codec: PageCodec | None = None,
        cost: CostModel | None = None,
        *,
        num_saves: Callable[[], int] = lambda: 0,
        enabled: bool,
        labels: dict[str, str],
    ) -> None:
        self._store = store
        self._disk = disk
        self._page_codec = page_codec
        self._cost = cost
        self._labels = labels
        self._published: dict[str, float] = {}
        self._next_s = 0.0
        self._info: dict[str, Any] = {}
        self._num_saves = num_saves
        self._events: Any = None
        self._gauges: Any = None
        self._estimates: Any = None
        if enabled:
            self._make_metrics()

    def set_info(self, **info: Any) -> None:
        """Adds facts about the set-up to the state dump."""
        self._info.update(info)

    def state(self) -> dict[str, Any]:
        """All counters and sizes as plain values, for `/server_info`."""
        return {
            **self._info,
            "host": self._host_stats(),
            "disk": self._disk_stats(),
            "cost": self._cost.state() if self._cost is not None else {},
            "remote": self._store.remote_stats(),
        }

    def maybe_publish(self) -> None:
        """Publishes at most once a second; costs one clock read otherwise."""
        if self._events is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _INTERVAL_S
        stats = self._host_stats()
        for name in _GAUGES & stats.keys():
            self._gauges.labels(**self._labels, of=name).set(stats.pop(name))
        for name, value in (self._cost.state() if self._cost is not None else {}).items():
            if value is not None:
                self._estimates.labels(**self._labels, of=name).set(value)
        remote = {f"remote_{n}": v for n, v in (self._store.remote_stats() or {}).items()}
        for name in ("breaker_state", "upload_queue", "lookup_queue", "fetch_queue"):
            level = remote.pop(f"remote_{name}", None)
            if level is not None:
                self._gauges.labels(**self._labels, of=f"remote_{name}").set(level)
        for name, value in {**stats, **self._disk_counts(), **remote}.items():
            step = value - self._published.get(name, 0)
            if step > 0:
                self._events.labels(**self._labels, event=name).inc(step)
                self._published[name] = value

    def _make_metrics(self) -> None:
        # Imported late: prometheus_client reads its multi-process folder when it is imported.
        from prometheus_client import Counter, Gauge

        names = list(self._labels)
        self._events = Counter(
            "sglang:hier_kv_events",
            "Pages and events of the hierarchical KV cache since start, by kind.",
            [*names, "event"],
        )
        self._gauges = Gauge(
            "sglang:hier_kv_pages",
            "Pages in the tiers of the hierarchical KV cache now, and requests that wait for them.",
            [*names, "of"],
            multiprocess_mode="mostrecent",
        )
        self._estimates = Gauge(
            "sglang:hier_kv_estimate",
            "Speeds of this server as the cost model of the hierarchical KV cache sees them now.",
            [*names, "of"],
            multiprocess_mode="mostrecent",
        )

    def _host_stats(self) -> dict[str, int]:
        # Asked for first: with no save under way the counters hold all of them.
        num_saves = self._num_saves()
        return {**self._store.stats(), "save_queue": num_saves}

    def _disk_counts(self) -> dict[str, float]:
        counts: dict[str, float] = {}
        for name, value in self._disk_stats().items():
            if isinstance(value, dict):
                counts.update({f"disk_{name}_{kind}": n for kind, n in value.items()})
            elif isinstance(value, int) and name not in _DISK_SIZES:
                counts[f"disk_{name}"] = value
        return counts

    def _disk_stats(self) -> dict[str, Any]:
        if self._disk is None:
            return {}
        stats = self._disk.stats()
        values = {name: getattr(stats, name) for name in stats.__slots__}
        stats_by_name = {n: dict(v) if hasattr(v, "items") else v for n, v in values.items()}
        if isinstance(self._disk, CachedDiskTier):
            stats_by_name["coded_host"] = self._disk.memory_stats()
        if self._page_codec is not None:
            stats_by_name["codec"] = self._page_codec.counts()
        return stats_by_name
