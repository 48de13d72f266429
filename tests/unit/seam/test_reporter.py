"""What `/metrics` shows of counts and times: each in one metric, in base units."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY, generate_latest

from sglang_ext.seam.metrics.reporter import MetricsReporter
from sglang_ext.tiers.store.types import StoreCounters

Shown = dict[tuple[str, str], float]


@pytest.fixture
def counters() -> StoreCounters:
    return StoreCounters()


@pytest.fixture
def reporter(counters: StoreCounters) -> Iterator[MetricsReporter]:
    store = SimpleNamespace(
        counters=counters,
        stats=lambda: {**counters.snapshot(), "waiting_requests": 3, "host_pages": 5},
        remote_stats=lambda: {"upload_queue": 2, "get_ok": 7},
    )
    reporter = MetricsReporter(
        cast(Any, store), None, saves=lambda: (4, 9), enabled=True, labels={"tp_rank": "0"}
    )
    yield reporter
    for metric in reporter._metrics.values():
        REGISTRY.unregister(metric)


def shown() -> Shown:
    """The plugin's series, by their names and the label that says what of."""
    pattern = re.compile(
        r'^sglang:hier_kv_(\w+)\{(?:event|of)="(\w+)",tp_rank="0"\} (\S+)$', re.MULTILINE
    )
    text = generate_latest(REGISTRY).decode()
    return {(name, of): float(value) for name, of, value in pattern.findall(text)}


def test_a_time_is_in_one_metric_and_waits_and_estimates_are_no_work(
    reporter: MetricsReporter, counters: StoreCounters
) -> None:
    for what, seconds in {
        "read": 1.0,
        "held_disk": 0.5,
        "cost_read": 1.25,
        "cost_read_expected": 2.0,
    }.items():
        counters.time(what, seconds)
    reporter.maybe_publish()
    found = {key: value for key, value in shown().items() if "seconds" in key[0] and value}
    sums = {key: value for key, value in found.items() if key[0].endswith(("_sum", "_total"))}
    assert sums == {
        ("duration_seconds_sum", "read"): 1.0,
        ("busy_seconds_total", "read"): 1.0,
        ("wait_seconds_sum", "disk"): 0.5,
        ("cost_actual_seconds_sum", "read"): 1.25,
        ("cost_expected_seconds_sum", "read"): 2.0,
    }


def test_what_waits_is_told_of_by_its_unit(reporter: MetricsReporter) -> None:
    reporter.maybe_publish()
    found = shown()
    assert found["waiting_requests", "waiting_requests"] == 3
    assert found["waiting_nodes", "save_queue"] == 4
    assert found["waiting_jobs", "remote_upload_queue"] == 2
    assert found["nodes_total", "saves_ended"] == 9
    assert found["records_total", "remote_get_ok"] == 7
    assert found["requests_total", "cost_load"] == 0  # from the start
