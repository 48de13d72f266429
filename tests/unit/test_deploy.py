"""The dashboard and the alert rules ask for metrics and values that the server publishes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.seam.metrics import names as metric_names
from sglang_ext.tiers.records.record import VerifyResult
from tests.unit.test_counters import documented

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "hier-kv.dashboard.json"
RULES = ROOT / "deploy" / "hier-kv.rules.yml"
# SGLang's own, that shares are taken of.
OF_SGLANG = {"sglang:cached_tokens_total", "sglang:prompt_tokens_total"}
LABELS = {"model_name", "instance", "event", "of", "le", "cache_source"}
# Of `/server_info`, and of what the cost model remembers; the rest is in the tables.
DURATIONS = {"save", "load", "read", "decode", "fetch", "held"}


def expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def selections() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Metrics that are asked for, each with its labels' operators and values."""
    for expression in expressions():
        for name, labels in re.findall(r"(sglang:\w+)(?:\{([^}]*)\})?", expression):
            asked = re.findall(r'(\w+)(=~|=)"([^"]*)"', labels)
            yield name, {label: (operator, value) for label, operator, value in asked}


def published() -> dict[str, metric_names.Metric]:
    """What `/metrics` calls the plugin's metrics."""
    names = {f"{count.name}_total": count for count in metric_names.COUNTS}
    names |= {gauge.name: gauge for gauge in metric_names.GAUGES}
    return names | {f"{metric_names.DURATIONS.name}_bucket": metric_names.DURATIONS}


def known_values(metric: metric_names.Metric) -> set[str]:
    """What a metric's label can be, as far as the documents name it."""
    if metric is metric_names.DURATIONS:
        return DURATIONS
    names = documented()
    names |= {f"disk_{name}" for name in names} | {f"remote_{name}" for name in names}
    names |= {f"rejected_{result.value}" for result in VerifyResult}
    names |= {f"disk_dropped_{reason}" for reason in ("full", "io", "malformed", "closed")}
    found = (metric_names.gauge_of(name) or metric_names.count_of(name) for name in names)
    return {series.value for series in found if series.metric is metric}


def test_there_is_something_to_look_at() -> None:
    assert len(list(selections())) > 40


@pytest.mark.parametrize(("name", "labels"), list(selections()))
def test_what_is_asked_for_is_published(name: str, labels: dict[str, tuple[str, str]]) -> None:
    assert labels.keys() <= LABELS
    if name in OF_SGLANG:
        return
    metric = published()[name]
    operator, value = labels.get(metric.label, ("=~", ".*"))
    others = {"event", "of"} - {metric.label}
    assert not others & labels.keys()
    known = known_values(metric)
    asked = [value] if operator == "=" else alternatives(value)
    for one in asked:
        assert metric.label not in labels or any(re.fullmatch(one, name) for name in known), one


def alternatives(pattern: str) -> list[str]:
    """The parts of `a|b(c|d)`, split where no bracket is open."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_a_value_has_one_metric_in_base_units() -> None:
    def at(series: metric_names.Series | None) -> Any:
        return series and (series.metric.name.removeprefix("sglang:hier_kv_"), *series[1:])

    assert at(metric_names.count_of("saved_pages")) == ("pages", "saved_pages", 1.0)
    assert at(metric_names.count_of("load_us")) == ("busy_seconds", "load", 1e-6)
    assert at(metric_names.count_of("disk_bytes_moved")) == ("bytes", "disk_bytes_moved", 1.0)
    assert at(metric_names.count_of("rejected_foreign")) == ("records", "rejected_foreign", 1.0)
    assert at(metric_names.count_of("cost_load")) == ("events", "cost_load", 1.0)
    assert at(metric_names.gauge_of("host_pages")) == ("held_pages", "host_pages", 1.0)
    assert metric_names.gauge_of("saved_pages") is None
    assert at(metric_names.estimate_of("disk_read_mb_s")) == (
        "speed_bytes_per_second",
        "disk_read",
        1e6,
    )
    assert at(metric_names.estimate_of("decode_step_ms")) == (
        "estimated_seconds",
        "decode_step",
        1e-3,
    )
    assert metric_names.estimate_of("disk_samples") is None


def test_every_metric_is_in_the_document() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name in published():
        assert f"`{name.removesuffix('_bucket')}`" in text, name
    for name in DURATIONS:
        assert f"`{name}`" in text, name


def test_panels_have_titles_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert panel["title"]
        assert not cells & covered
        assert max(x for x, _ in cells) < 24
        covered |= cells
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool is installed")
def test_promtool_takes_all_of_it(tmp_path: Path) -> None:
    rules = [
        {"record": f"test:panel:{number}", "expr": re.sub(r"\$__rate_interval", "1m", expression)}
        for number, expression in enumerate(expressions())
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for path in (RULES, panels):
        done = subprocess.run(
            ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
