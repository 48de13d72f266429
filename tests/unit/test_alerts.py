"""Each alert of `deploy/hier-kv.rules.yml` fires at what it is about, and at nothing else.

Prometheus' own `promtool` plays series to the rules. What an alert counts is published as 0 from a
server's start (`metrics/names.py`), as here: `increase` sees no step from no series to the first
value, and a page that went bad once would be told of to nobody.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_ext.seam.metrics import names
from sglang_ext.tiers.records.record import VerifyResult
from tests.unit.test_counters import documented
from tests.unit.test_deploy import DASHBOARD, RULES, alternatives, needs_promtool, run_promtool

INSTANCE = 'instance="a:30000"'


class Trouble(NamedTuple):
    """What has to be seen for an alert, and for how long.

    Attributes:
        series: values by metric and label, as promtool writes them.
        minutes: after which it fires.
    """

    series: dict[tuple[str, str], str]
    minutes: int


def once(metric: str, event: str) -> Trouble:
    """One of it, in the fifth minute."""
    return Trouble({(metric, f'event="{event}"'): "0x5 1x60"}, 7)


PAGES, REQUESTS = "sglang:hier_kv_pages_total", "sglang:hier_kv_requests_total"
RECORDS, EVENTS = "sglang:hier_kv_records_total", "sglang:hier_kv_events_total"
TOKENS, STATE = "sglang:hier_kv_tokens_total", "sglang:hier_kv_state"
TROUBLES = {
    "HierKVDamagedPages": [once(PAGES, "damaged_pages")],
    "HierKVForgedRecords": [
        once(RECORDS, "rejected_unauthentic"),
        once(RECORDS, "remote_error_rejected_unauthentic"),
    ],
    "HierKVRejectedRecords": [
        once(RECORDS, "rejected_bad_checksum"),
        once(RECORDS, "rejected_foreign"),
    ],
    "HierKVUnexpectedErrors": [
        once(EVENTS, "save_failures"),
        once(EVENTS, "encode_failures"),
        once(EVENTS, "remote_failures"),
    ],
    "HierKVDiskNotWritten": [
        Trouble({(RECORDS, 'event="disk_dropped_full"'): "0x5 1+1x60"}, 25),
        Trouble({(RECORDS, 'event="disk_dropped_io"'): "0x5 1+1x60"}, 25),
    ],
    "HierKVDiskNotRead": [once(EVENTS, "disk_errors_io_read")],
    "HierKVSavesDropped": [
        Trouble(
            {
                (PAGES, 'event="save_dropped_pages"'): "0+20x60",
                (PAGES, 'event="saved_pages"'): "0+100x60",
            },
            20,
        )
    ],
    "HierKVPagesLate": [
        Trouble(
            {
                (REQUESTS, 'event="admitted_late_requests"'): "0+6x90",
                (REQUESTS, 'event="admitted_ready_requests"'): "0+5x90",
            },
            40,
        )
    ],
    "HierKVTooSmall": [
        Trouble(
            {
                (TOKENS, 'event="missed_evicted_disk_tokens"'): "0+20x90",
                (TOKENS, 'event="requested_tokens"'): "0+100x90",
            },
            70,
        )
    ],
    "HierKVRemoteDown": [Trouble({(STATE, 'of="remote_breaker_state"'): "0x5 2x60"}, 12)],
}
# A server that does much and suffers nothing.
HEALTHY = {
    (PAGES, 'event="saved_pages"'): "0+100x90",
    (PAGES, 'event="save_dropped_pages"'): "0+9x90",
    (PAGES, 'event="damaged_pages"'): "0x90",
    (RECORDS, 'event="rejected_unauthentic"'): "0x90",
    (RECORDS, 'event="rejected_missing"'): "0+1x90",
    (RECORDS, 'event="disk_dropped_full"'): "0x10 1x80",  # once is not for a quarter of an hour
    (EVENTS, 'event="save_failures"'): "0x90",
    (EVENTS, 'event="disk_errors_io_read"'): "0x90",
    (REQUESTS, 'event="cost_load"'): "0+10x90",
    (REQUESTS, 'event="admitted_ready_requests"'): "0+6x90",
    (REQUESTS, 'event="admitted_late_requests"'): "0+5x90",
    (TOKENS, 'event="missed_evicted_disk_tokens"'): "0+9x90",
    (TOKENS, 'event="missed_never_stored_tokens"'): "0+50x90",
    (TOKENS, 'event="requested_tokens"'): "0+100x90",
    (STATE, 'of="remote_breaker_state"'): "0x10 2x3 0x77",
    (STATE, 'of="clears_pending"'): "0 1x89",
}


def alerts() -> dict[str, str]:
    """The rules' expressions by the alert's name."""
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def fired(alert: str, series: dict[tuple[str, str], str], minutes: int) -> dict[str, Any]:
    """A case of promtool's: the alert, or none where it is empty, is all that fires then."""
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    return {
        "interval": "1m",
        "input_series": [
            {"series": f'{name}{{{label},model_name="m",{INSTANCE}}}', "values": values}
            for (name, label), values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minutes}m",
                "exp_samples": samples,
            }
        ],
    }


def play(folder: Path, cases: list[dict[str, Any]]) -> None:
    path = folder / "alerts.test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": cases}))
    run_promtool("test", path)


@needs_promtool
def test_each_alert_fires_at_its_trouble_and_alone(tmp_path: Path) -> None:
    play(
        tmp_path,
        [
            fired(alert, {**HEALTHY, **trouble.series}, trouble.minutes)
            for alert, troubles in TROUBLES.items()
            for trouble in troubles
        ],
    )


@needs_promtool
def test_none_fires_at_a_healthy_server(tmp_path: Path) -> None:
    play(tmp_path, [fired("", HEALTHY, minutes) for minutes in (5, 12, 30, 80)])


def test_each_alert_has_a_trouble() -> None:
    assert TROUBLES.keys() == alerts().keys()


def asked(expression: str) -> Iterator[tuple[str, str]]:
    """The counters of which an alert takes the increase, each with one of its label's values."""
    found = re.findall(r'(?:increase|rate)\((sglang:\w+)_total\{event=~?"([^"]*)"\}', expression)
    for name, pattern in found:
        for one in alternatives(pattern):
            yield name, one


def counted() -> set[tuple[str, str]]:
    """What is counted, as far as documents and code name it: the metric, and the label's value."""
    found = documented()
    rejected = {f"rejected_{result.value}" for result in VerifyResult if result.value != "ok"}
    found |= rejected | {f"remote_error_{name}" for name in rejected}
    found |= {f"disk_dropped_{reason}" for reason in ("full", "io")}
    series = (names.count_of(name) for name in found if names.gauge_of(name) is None)
    return {(each.metric.name, each.value) for each in series if each is not None}


@pytest.mark.parametrize("alert", TROUBLES)
def test_what_an_alert_counts_is_there_before_it_is_counted(alert: str) -> None:
    series = (names.count_of(name) for name in names.from_start(0))
    there = {(each.metric.name, each.value) for each in series if each is not None}
    for metric, pattern in asked(alerts()[alert]):
        meant = {each for each in counted() if each[0] == metric and re.fullmatch(pattern, each[1])}
        assert meant, f"{pattern} of {metric} stands for nothing"
        assert meant <= there, f"no rate sees the first of {meant - there}"


def shown(title: str) -> Iterator[tuple[str, str]]:
    """What a panel of the dashboard has of each metric: a pattern of the label's values."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["title"] == title:
            for target in panel["targets"]:
                yield from re.findall(
                    r'(sglang:\w+)\{[^}]*?,(?:event|of)=~?"([^"]*)"', target["expr"]
                )


@pytest.mark.parametrize(
    "alert", [name for name, each in alerts().items() if re.search(r"increase\(.* > 0$", each)]
)
def test_what_an_alert_wants_to_be_0_is_on_the_dashboard(alert: str) -> None:
    panel = list(shown("What should be 0"))
    for metric, pattern in asked(alerts()[alert]):
        meant = {name for of, name in counted() if of == metric and re.fullmatch(pattern, name)}
        drawn = "|".join(each for of, each in panel if of == f"{metric}_total")
        assert [name for name in meant if not re.fullmatch(drawn, name)] == []


def test_the_dashboard_compares_all_that_the_cost_model_foretells() -> None:
    found = list(shown("Estimates: what was taken over what was expected"))
    for metric in (names.COST_ACTUAL, names.COST_EXPECTED):
        drawn = {value for of, value in found if of == f"{metric.name}_sum"}
        assert drawn == set(names.TIMES[metric])


@needs_promtool
def test_promtool_finds_the_names_good_but_for_sglangs_prefix() -> None:
    registry = CollectorRegistry()
    for count in names.COUNTS:
        Counter(count.name, count.help, [count.label], registry=registry).labels("a").inc()
    for gauge in names.GAUGES:
        Gauge(gauge.name, gauge.help, [gauge.label], registry=registry).labels("a").set(1)
    for of in names.HISTOGRAMS:
        Histogram(of.name, of.help, [of.label], registry=registry).labels("a").observe(1)
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(registry).decode(),
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stdout + done.stderr).splitlines()
    assert len(said) >= len(names.COUNTS) + len(names.GAUGES) + len(names.HISTOGRAMS)
    assert not [line for line in said if not line.endswith("names should not contain ':'")]
