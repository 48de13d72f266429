"""What a default run leaves out: nothing that the documents name as proof is left out whole."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import long_form

ROOT = Path(__file__).parents[2]
NAMED_IN = ("docs/compatibility.md", "sglang_ext/settings/model_kinds.py")

SAMPLED = """
import pytest
from tests.long_form import count

@pytest.mark.sampled({pattern!r})
@pytest.mark.parametrize("number", [1, 22, 23])
def test_sampled(number):
    print("number", number)

@pytest.mark.long
def test_long():
    print("rounds", count(2, 40))
"""


def named_files() -> list[str]:
    texts = [(ROOT / name).read_text() for name in NAMED_IN]
    return sorted({path for text in texts for path in re.findall(r"tests/[\w/]+\.py", text)})


def is_long(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) == "pytest.mark.long" for mark in function.decorator_list)


@pytest.mark.parametrize("path", named_files())
def test_a_default_run_keeps_some_of_what_is_named_as_proof(path: str) -> None:
    """Of a test with the mark `sampled` it keeps a case, or ends with an error."""
    tree = ast.parse((ROOT / path).read_text())
    tests = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    ]
    is_state_machine = "RuleBasedStateMachine" in ast.dump(tree)
    assert is_state_machine or any(not is_long(test) for test in tests)


def run(
    folder: Path,
    pattern: str,
    *args: str,
    switch: str = "",
    what: str = "test_it.py",
    text: str = SAMPLED,
) -> subprocess.CompletedProcess[str]:
    """A run of a file with this repository's conftest."""
    path = ROOT / "tests" / "conftest.py"
    (folder / "conftest.py").write_text(path.read_text())
    (folder / "test_it.py").write_text(text.format(pattern=pattern))
    options = ["-q", "-s", "-o", "addopts=", "--rootdir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *args, str(folder / what)],
        cwd=folder,
        env={**os.environ, "HIER_KV_LONG": switch, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "switch", "numbers", "rounds"),
    [
        ((), "", ["22", "23"], []),
        ((), "0", ["22", "23"], []),
        (("--long",), "", ["1", "22", "23"], ["40"]),
        ((), "10", ["1", "22", "23"], ["400"]),
    ],
)
def test_the_switch_decides(
    args: tuple[str, ...], switch: str, numbers: list[str], rounds: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, "2*", *args, switch=switch)
    assert not done.returncode, done.stdout + done.stderr
    assert re.findall(r"number (\d+)", done.stdout) == numbers
    assert re.findall(r"rounds (\d+)", done.stdout) == rounds


def test_a_sample_of_nothing_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "3*")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected a case '3*' among ['1', '22', '23']" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ((), "test_it.py::test_sampled[1]"),
        ((), "test_it.py::test_long"),
        (("-m", "long"), "test_it.py"),
        (("-k", "test_long", "-n1"), "test_it.py"),
    ],
)
def test_who_asks_for_what_is_left_out_is_told_the_switch(
    args: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "2*", *args, what=what)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "need --long, or LONG=1" in done.stdout
    assert "need --long" not in run(tmp_path, "2*", "--long", *args, what=what).stdout


def test_those_that_failed_run_again_without_their_sample(tmp_path: Path) -> None:
    """pytest then collects them alone, of which some pattern is none."""
    failing = SAMPLED.replace('print("number", number)', 'assert number != int("22")')
    two = failing.replace("({pattern!r})", "({pattern!r}, '23')")
    assert run(tmp_path, "22", what=".", text=two).returncode == pytest.ExitCode.TESTS_FAILED
    again = run(tmp_path, "22", "--lf", what=".", text=two)
    assert again.returncode == pytest.ExitCode.TESTS_FAILED, again.stdout + again.stderr
    assert "1 failed" in again.stdout


def test_a_default_run_takes_the_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_form, "FACTOR", 0)
    assert (long_form.count(2, 40), long_form.either("a", "b")) == (2, "a")
    monkeypatch.setattr(long_form, "FACTOR", 3)
    assert (long_form.count(2, 40), long_form.either("a", "b")) == (120, "b")


def test_a_file_that_takes_longest_runs_first(tmp_path: Path) -> None:
    """Whole, and in its order: whoever comes last else ends alone."""
    first = "\nimport pytest\npytestmark = pytest.mark.longest\n"
    first += "".join(f'def test_{name}():\n    print("number", {name})\n' for name in (7, 6))
    (tmp_path / "test_z.py").write_text(first)
    done = run(tmp_path, "2*", what=".")
    assert not done.returncode, done.stdout + done.stderr
    assert re.findall(r"number (\d+)", done.stdout) == ["7", "6", "22", "23"]
