"""Compiled loops are kept, and never those of other sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from sglang_ext import compiling

MODULE = """
from sglang_ext.compiling import jit

@jit(nogil=True)
def twice(x):
    return 2 * x

@jit("int64(int64)", nogil=True)
def thrice(x):
    return 3 * x
"""
USE = """
import theirs
print(theirs.twice(4), theirs.thrice(5))
for loop in (theirs.twice, theirs.thrice):
    print(sum(loop.stats.cache_hits.values()), sum(loop.stats.cache_misses.values()))
"""
COMPILED, KEPT = "8 15\n0 1\n0 1\n", "8 15\n1 0\n1 0\n"


def use(folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a module lies that was compiled and kept."""
    (tmp_path / "theirs.py").write_text(MODULE)
    assert use(tmp_path) == COMPILED
    return tmp_path


def test_what_was_compiled_is_kept(folder: Path) -> None:
    assert use(folder) == KEPT


def test_what_was_compiled_of_other_sources_is_compiled_anew(folder: Path) -> None:
    """Also where it cannot be read: a class that its types name may have another name now."""
    (stamp,) = (folder / "__pycache__").glob("*.sources")
    stamp.write_text("those of another release")
    for index in (folder / "__pycache__").glob("*.nbi"):
        index.write_bytes(b"not what numba expects")
    assert use(folder) == COMPILED
    assert use(folder) == KEPT
    assert [path.name for path in (folder / "__pycache__").glob("*.sources*")] == [stamp.name]


def test_where_nothing_can_be_kept_each_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("no locator available")
        return found(**options)

    found = numba.njit
    monkeypatch.setattr(numba, "njit", refuses)
    assert compiling.jit("int64(int64)")(lambda x: x + 1)(1) == 2
