"""Tests of what the wheel holds and needs neither torch nor SGLang, in a bare environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

from testkit.pythons.interpreters import ROOT

# One or two of each kind: what a Python may do otherwise (command lines, entry points, pickled and
# packed bytes, files, threads, HTTP) and compiled loops. Some 16 s of processor time a Python, with
# what is installed for them.
TESTS = (
    "tests/tiers/disk/test_format.py",
    "tests/tiers/test_protection.py",
    "tests/tiers/test_record.py",
    "tests/unit/cli/test_help.py",
    "tests/unit/cli/test_inspect_folder.py",
    "tests/unit/cli/test_prune_folder.py",
    "tests/unit/cli/test_server_stats.py",
    "tests/unit/cli/test_verify_folder.py",
    "tests/unit/hints/test_request_hints.py",
    "tests/unit/remote/test_flags.py",
    "tests/unit/settings/test_quotas.py",
    "tests/unit/store/test_index.py",
    "tests/unit/test_event_log.py",
    "tests/unit/test_registry.py",
)
# A fifth of the processor time of all, for what is no Python's business: bytes of arrays.
_LEFT_OUT = "tests/unit/store/test_index.py::test_memory_stays_within_132_bytes_a_page"
_RUNNERS = ("hypothesis", "pytest")  # at the versions of the extra `dev`


def requirements() -> list[str]:
    """What the tests need besides the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev = project["optional-dependencies"]["dev"]
    return [each for each in dev if each.partition("==")[0] in _RUNNERS]


def run(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tests on what is installed, with warnings as errors.

    Args:
        python: an interpreter with the wheel and `requirements`.
        folder: for a copy of the tests and of what starts their servers, without the package: what
            is installed is found.
    """
    for name in ("tests", "testkit", "runtime_cpu"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "assets")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "--deselect", _LEFT_OUT],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
