"""The table of threads is what the sources start."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sglang_ext.assembly.threads import THREADS

ROOT = Path(__file__).resolve().parents[3]
PREFIX = "hier-kv-"
# What makes threads, and where the call has their name: a keyword, or the number of an argument.
MAKERS: dict[str, str | int] = {
    "Thread": "name",
    "ThreadPoolExecutor": 1,
    "DeadlineExecutor": 1,
    "Workers": 2,
}


def _named(node: ast.expr) -> str | None:
    """A name with `*` for what is put in; None for what is no text of the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
        )
    return None


def _started(path: Path) -> Iterator[tuple[str, int, str | None]]:
    """Makers of threads in a file: which, the line, and the name that the call has."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        maker = ast.unparse(node.func).rpartition(".")[2]
        if maker == "start" and ast.unparse(node.func) == "executor.start":
            name = _named(node.args[0])
            assert name is not None
            several = ast.unparse(node.args[2]) != "1"
            yield "executor", node.lineno, PREFIX + name + ("-*" if several else "")
        if maker in MAKERS:
            place = MAKERS[maker]
            if isinstance(place, str):
                found = [each.value for each in node.keywords if each.arg == place]
            else:
                found = node.args[place : place + 1]
            name = _named(found[0]) if found else None
            yield maker, node.lineno, name + "-*" if maker == "Workers" and name else name


def _sources() -> list[Path]:
    folders = [ROOT / "tiers", ROOT / "sglang_ext"]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in files if not {"cli"} & set(path.relative_to(ROOT).parts)]


@pytest.fixture(scope="module")
def started() -> set[tuple[str, str]]:
    """Files and names of all threads that the sources start, executors' among them."""
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in _sources()
        for maker, _, name in _started(path)
        if name is not None
    }
    return {(path.removeprefix("sglang_ext/"), name) for path, name in found}


def test_every_thread_that_is_started_is_in_the_table(started: set[tuple[str, str]]) -> None:
    known = [name for thread in THREADS for name in thread.names]
    unknown = [
        (path, name)
        for path, name in started
        if not any(name == each or fnmatchcase(name, each) or name + "*" == each for each in known)
        and not name.startswith("*")  # of a class that is given the name
    ]
    assert not unknown


def test_every_thread_of_the_table_is_started(started: set[tuple[str, str]]) -> None:
    names = {name for _, name in started}
    for thread in THREADS:
        for name in thread.names:
            assert {name, name.removesuffix("*")} & names, name
        where = ROOT / thread.runs_in
        assert where.is_file() or (ROOT / "sglang_ext" / thread.runs_in).is_file(), thread.runs_in


def test_no_thread_is_without_a_name() -> None:
    """But those whose name is given to what starts them, which are in the table by that."""
    given = {"tiers/store/executor.py", "tiers/remote/deadline_executor.py"}
    nameless = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in _sources()
        for maker, line, name in _started(path)
        if name is None and str(path.relative_to(ROOT)).removeprefix("sglang_ext/") not in given
    ]
    assert not nameless


def test_daemons_are_those_that_the_table_says() -> None:
    executors = {
        name
        for path in _sources()
        for maker, _, name in _started(path)
        if maker == "ThreadPoolExecutor" and name is not None
    }
    waited_for = {name.removesuffix("*") for t in THREADS if not t.is_daemon for name in t.names}
    assert waited_for == executors
