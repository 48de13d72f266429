"""Prometheus metrics and `/server_info`'s values: what the tiers hold, move, reject and drop.

`MetricsReporter.state` is a rank's part of `/server_info`; `seam/hooks/scheduler.py` puts it there.
`names.py` says under which metric a value goes; docs/metrics.md explains each. Published
once a second from the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_ext.codec.page_codec import PageCodec
from sglang_ext.seam.metrics import names
from sglang_ext.tiers.coded_host import CachedDiskTier, RecordTier
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.store import PageStore

_INTERVAL_S = 1.0


class MetricsReporter:
    """Turns counters into metrics.

    Args:
        store: the page store.
        disk: what keeps its records, a disk or coded DRAM, or None.
        page_codec: what codes its pages, or None.
        cost: what is known of speeds, or None.
        saves: how many nodes are on their way to DRAM, and how many no longer are.
        enabled: whether SGLang runs with `--enable-metrics`.
        num_tenants: how many have a share of their own.
        labels: label values common to all series.
    """

    def __init__(
        self,
        store: PageStore,
        disk: RecordTier | None,
        page_codec: PageCodec | None = None,
        cost: CostModel | None = None,
        *,
        saves: Callable[[], tuple[int, int]] = lambda: (0, 0),
        enabled: bool,
        num_tenants: int = 0,
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
        self._saves = saves
        self._metrics: dict[names.Metric, Any] = {}  # none where SGLang publishes none
        if enabled:
            self._make_metrics(num_tenants)

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
        if not self._metrics or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _INTERVAL_S
        for name, value in self._values().items():
            gauge = names.gauge_of(name)
            if gauge is not None:
                self._child(gauge).set(value)
                continue
            series = names.count_of(name)
            if series is not None and value > self._published.get(name, 0):
                self._child(series).inc(series.scale * (value - self._published.get(name, 0)))
                self._published[name] = value
        for name, value in (self._cost.state() if self._cost is not None else {}).items():
            estimate = names.estimate_of(name)
            if estimate is not None and value is not None:
                self._child(estimate).set(estimate.scale * value)
        for what, seconds in self._store.counters.take_durations().items():
            histogram = self._child(names.time_of(what))
            for one_s in seconds:
                histogram.observe(one_s)

    def _child(self, series: names.Series) -> Any:
        """prometheus_client's object of one series; it makes it at the first call."""
        labels = {**self._labels, series.metric.label: series.value}
        return self._metrics[series.metric].labels(**labels)

    def _make_metrics(self, num_tenants: int) -> None:
        # Imported late: prometheus_client reads its multi-process folder when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        for count in names.COUNTS:
            self._metrics[count] = Counter(count.name, count.help, [*self._labels, count.label])
        for gauge in names.GAUGES:
            self._metrics[gauge] = Gauge(
                gauge.name,
                gauge.help,
                [*self._labels, gauge.label],
                multiprocess_mode="mostrecent",
            )
        for of in names.HISTOGRAMS:
            self._metrics[of] = Histogram(
                of.name, of.help, [*self._labels, of.label], buckets=names.BUCKETS_S
            )
        for name in names.from_start(num_tenants):
            series = names.count_of(name)
            assert series is not None, name
            self._child(series)
        self._store.counters.keep_durations()

    def _values(self) -> dict[str, float]:
        """All counts and sizes by the name under which they are published."""
        remote = self._store.remote_stats() or {}
        return {
            **self._host_stats(),
            **self._disk_values(),
            **{f"remote_{name}": value for name, value in remote.items()},
        }

    def _host_stats(self) -> dict[str, int]:
        # Asked for first: with no save under way the counters hold all of them.
        num_queued, num_ended = self._saves()
        return {**self._store.stats(), "save_queue": num_queued, "saves_ended": num_ended}

    def _disk_values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in self._disk_stats().items():
            if isinstance(value, dict):
                values.update({f"disk_{name}_{kind}": n for kind, n in value.items()})
            elif isinstance(value, int):
                values[f"disk_{name}"] = value
        return values

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
