"""Compiled loops are kept, and never those of other sources."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from sglang_ext import compiling

ROOT = Path(__file__).parents[2]

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


# Compiles for one type, and stops on the way: before it names a file, or before it writes it.
STOPS = """
import sys, time
from pathlib import Path
import numpy, theirs
from numba.core.caching import IndexDataCacheFile

kind, step, others = sys.argv[1:]
original = getattr(IndexDataCacheFile, step)

def waits_for_a_lock():
    numbers = [f":{lock.stat().st_ino} " for lock in Path("__pycache__").glob("*.lock")]
    waiting = [line for line in open("/proc/locks") if "->" in line]
    return any(number in line for number in numbers for line in waiting)

def stopped(self, *args):
    Path(f"{kind}-{step}").touch()
    while not Path(others).exists() and not (step == "_save_index" and waits_for_a_lock()):
        time.sleep(0.01)
    original(self, *args)

setattr(IndexDataCacheFile, step, stopped)
theirs.twice(getattr(numpy, kind)(4))
Path(f"{kind}-done").touch()
"""
READS = """
import numpy, theirs
print(theirs.twice(numpy.int8(4)), theirs.twice(numpy.float32(4)))
print(*sorted(str(one) for one in theirs.twice.signatures))
"""


def test_processes_that_compile_at_once_keep_their_own_loops(tmp_path: Path) -> None:
    """The one names its file between the other's naming of the same file and its writing of it."""
    (tmp_path / "theirs.py").write_text(MODULE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", *arguments]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )

    one = start(STOPS, "int8", "_save_index", "float32-_save_data")
    while not (tmp_path / "int8-_save_index").exists():
        assert one.poll() is None
        time.sleep(0.01)
    other = start(STOPS, "float32", "_save_data", "int8-done")
    for each in (one, other):
        each.communicate()
        assert not each.returncode
    read = start(READS)
    assert read.communicate()[0] == "8 8.0\n(float32,) (int8,)\n"


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
