"""Every counter is in a document."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from sglang_ext.seam.metrics.names import TIMES, time_of
from sglang_ext.tiers.disk import DiskStats
from sglang_ext.tiers.policy.cost_model import CostModel

ROOT = Path(__file__).resolve().parents[2]
# Some of what the remote store counts is under its own name in its own document.
WHERE = ("metrics.md", "remote.md")


def documented() -> set[str]:
    text = "\n".join((ROOT / "docs" / name).read_text() for name in WHERE)
    return set(re.findall(r"`([a-z_A-Z]+)`", text))


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Where the code counts."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in ("sglang_ext", "tiers") and ".venv" not in path.parts:
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and is_count(call):
                    yield path, call


def counted() -> dict[str, str]:
    """Patterns of the names that the code counts under, and where."""
    found = {}
    for path, call in calls():
        end = "_us" if is_time(call) else ""
        names = (name + end for name in patterns(call.args[0]))
        found.update(dict.fromkeys(names, path.name))
    return found


def is_time(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith(".time")


def is_count(call: ast.Call) -> bool:
    """Whether it is `counters.add(name...)` or `counters.time(what...)` of some object."""
    what = ast.unparse(call.func)
    return bool(call.args) and re.search(r"counters?\.(add|time)$", what) is not None


def patterns(name: ast.expr) -> Iterator[str]:
    """Regular expressions of what a name can be."""
    if isinstance(name, ast.IfExp):
        yield from patterns(name.body)
        yield from patterns(name.orelse)
    elif isinstance(name, ast.JoinedStr):
        parts = (
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z_A-Z]+"
            for part in name.values
        )
        yield "".join(parts)
    elif isinstance(name, ast.Constant):
        yield re.escape(str(name.value))


def test_names_are_read_off_the_code() -> None:
    names = counted()
    assert len(names) > 100
    for name in ("saved_pages", "save_failed_pages", "rejected_[a-z_A-Z]+", "lost_pages"):
        assert name in names


def test_every_counter_is_in_a_document() -> None:
    known = documented()
    missing = {
        name: path
        for name, path in counted().items()
        if not any(re.fullmatch(f"((disk|remote|remote_error)_)?{name}", word) for word in known)
    }
    assert not missing


def test_every_time_is_in_the_table_of_metrics() -> None:
    """`names.TIMES` has what each histogram's label can be, and the code times nothing else."""
    times = {name for _, call in calls() if is_time(call) for name in patterns(call.args[0])}
    assert len(times) > 5
    known = {metric: set(values) for metric, values in TIMES.items()}
    for each in times:
        series = time_of(each)
        found = {value for value in known[series.metric] if re.fullmatch(series.value, value)}
        assert found, each
        known[series.metric] -= found
    assert not any(known.values()), "nothing is timed under these"


def test_no_count_has_the_name_of_another_one() -> None:
    """What a tier counts is published with the tier before its name, beside what others count."""
    names: dict[str, set[str]] = {"tiers/disk": set(), "tiers/remote": set(), "": set()}
    for path, call in calls():
        place = str(path.relative_to(ROOT).parent).removeprefix("sglang_ext/")
        [tier] = [each for each in ("tiers/disk", "tiers/remote", "") if place.startswith(each)][:1]
        names[tier].update(patterns(call.args[0]))
    assert "records_read" in names["tiers/disk"]
    assert "get_records" in names["tiers/remote"]
    assert not names[""] & {f"disk_{name}" for name in names["tiers/disk"]}
    assert not names[""] & {f"remote_{name}" for name in names["tiers/remote"]}


def test_every_estimate_is_in_the_document() -> None:
    text = (ROOT / "docs" / "cost-model.md").read_text()
    assert not {name for name in CostModel(1.0).state() if f"`{name}`" not in text}


def test_what_the_disk_reports_is_in_a_document() -> None:
    known = documented()
    names = {field.name for field in fields(DiskStats)}
    assert not {name for name in names if not {name, f"disk_{name}"} & known}
