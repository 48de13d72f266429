"""Tests of what the wheel holds and needs neither torch nor SGLang, in a bare environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testkit.pythons import pins
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
    return [each for each in pins.extras("dev") if each.partition("==")[0] in _RUNNERS]


def run(
    python: Path,
    folder: Path,
    tests: Sequence[str] = (*TESTS, "--deselect", _LEFT_OUT),
    *,
    has_assets: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs tests on what is installed, with warnings as errors.

    Args:
        python: an interpreter with the wheel and `requirements`.
        folder: for a copy of the tests and of what starts their servers, without the package: what
            is installed is found.
        tests: files, and what else pytest takes.
        has_assets: whether they need the bundled model and texts.
    """
    left_out = ["__pycache__", *([] if has_assets else ["assets"])]
    for name in ("tests", "testkit", "runtime_cpu"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*left_out))
    shutil.copy(ROOT / "pyproject.toml", folder)
    # What the tests start has to find the same packages.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
