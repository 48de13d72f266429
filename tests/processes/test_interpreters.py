"""Which Pythons are claimed, and how one is found."""

from __future__ import annotations

import sys
from pathlib import Path

from testkit.pythons import interpreters

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_python_of_the_tests_is_claimed_and_the_oldest_is_the_least_that_is_required() -> None:
    versions = interpreters.supported()
    assert HERE in versions
    project = (interpreters.ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={versions[0]}"' in project


def test_one_that_stands_for_none_is_passed_over(tmp_path: Path) -> None:
    """As pyenv's are, of a version that is installed and not chosen."""
    script(tmp_path / "shims" / f"python{HERE}", "exit 127")
    environ = {"PATH": str(tmp_path / "shims"), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert interpreters.find(HERE, environ) is None
    wrong = tmp_path / "pyenv" / "versions" / f"{HERE}.1" / "bin" / "python"
    script(wrong, "echo 2.7")
    assert interpreters.find(HERE, environ) is None
    right = tmp_path / "pyenv" / "versions" / f"{HERE}.2" / "bin" / "python"
    script(right, f'exec {sys.executable} "$@"')
    assert interpreters.find(HERE, environ) == right
