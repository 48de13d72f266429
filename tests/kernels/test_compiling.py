"""Compiled loops are kept, and never those of other sources."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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


def use(folder: Path, before: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + USE],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module that was compiled and kept, to be copied."""
    made = tmp_path_factory.mktemp("compiled")
    (made / "theirs.py").write_text(MODULE)
    assert use(made) == COMPILED
    return made


@pytest.fixture
def folder(tmp_path: Path, compiled: Path) -> Path:
    """Where a module lies that was compiled and kept."""
    return Path(shutil.copytree(compiled, tmp_path, dirs_exist_ok=True))  # with its files' times


def test_what_was_compiled_is_kept(folder: Path) -> None:
    assert use(folder) == KEPT


def test_that_loops_are_compiled_is_told_once_and_only_then(tmp_path: Path) -> None:
    """A server's log would be silent for a minute at its first start."""
    (tmp_path / "theirs.py").write_text(MODULE)
    logged = "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout)\n"
    told = use(tmp_path, logged)
    assert told.count("are being compiled") == 1
    assert "`hier-kv prebuild`" in told
    assert "are being compiled" not in use(tmp_path, logged)


def test_how_loops_are_compiled_is_no_part_of_a_log_on_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with SGLang's --log-level debug, which is set on the root of all logs."""
    with caplog.at_level(logging.DEBUG):
        assert numba.njit(lambda number: number + 1)(1) == 2
    assert [record.name for record in caplog.records if record.name.startswith("numba")] == []


def test_what_was_compiled_of_other_sources_is_compiled_anew(folder: Path) -> None:
    """Also where it cannot be read: a class that its types name may have another name now."""
    (stamp,) = (folder / "__pycache__").glob("*.sources")
    stamp.write_text("those of another release")
    for index in (folder / "__pycache__").glob("*.nbi"):
        index.write_bytes(b"not what numba expects")
    assert use(folder) == COMPILED
    assert use(folder) == KEPT
    assert [path.name for path in (folder / "__pycache__").glob("*.sources*")] == [stamp.name]


@pytest.mark.parametrize("pattern", ["twice*.nbi", "twice*.nbc", ".sources"])
def test_what_a_crash_left_half_written_is_compiled_anew(folder: Path, pattern: str) -> None:
    (broken,) = (folder / "__pycache__").glob(f"*{pattern}")
    broken.write_bytes(b"\xff" + broken.read_bytes()[:20])
    assert use(folder).splitlines()[:2] == COMPILED.splitlines()[:2]
    assert use(folder) == KEPT


# As on NFS, where who holds a lock alone has to be able to write the file.
NFS = """
import errno, fcntl, os
flock = fcntl.flock
def as_on_nfs(handle, how):
    can_write = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    if how & fcntl.LOCK_EX and not can_write:
        raise OSError(errno.EBADF, "Bad file descriptor")
    flock(handle, how)
fcntl.flock = as_on_nfs
"""
WITHOUT_LOCKS = """
import errno, fcntl
def refuse(handle, how):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
"""
ASKS = """
from sglang_ext import compiling
compiling._remove_outdated.cache_clear()
print(compiling.check_kept())
"""


def test_what_was_compiled_is_kept_on_nfs(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(MODULE)
    assert use(tmp_path, NFS) == COMPILED
    assert use(tmp_path, NFS) == KEPT


def test_a_folder_in_which_nothing_can_be_kept_is_told(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    for before, is_kept in ((WITHOUT_LOCKS, False), ("", True), (WITHOUT_LOCKS, True)):
        done = subprocess.run(
            [sys.executable, "-c", before + ASKS],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (not done.returncode) == is_kept, done.stderr
        assert is_kept or "set NUMBA_CACHE_DIR to a folder on a disk" in done.stderr


def test_a_copy_of_a_process_does_not_go_on_holding_its_lock(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    with compiling._locked(str(tmp_path), fcntl.LOCK_EX):
        copy = os.fork()
        if not copy:
            os.read(ours, 1)
            os._exit(0)
    try:
        handle = os.open(next(tmp_path.iterdir()), os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    finally:
        os.write(theirs, b"!")
        os.waitpid(copy, 0)
        os.close(ours)
        os.close(theirs)


def test_a_lock_that_a_stopped_process_holds_is_not_waited_for_without_end(folder: Path) -> None:
    (lock,) = (folder / "__pycache__").glob("*.lock")
    hurry = "from sglang_ext import compiling\ncompiling._LOCK_PATIENCE_S = 0.1\n"
    handle = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert use(folder, hurry) == COMPILED
    finally:
        os.close(handle)
    assert use(folder) == KEPT


def test_such_a_lock_is_waited_for_once_and_not_once_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dozens of loops share a folder, and each is looked for and kept: two hours otherwise."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(compiling, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))

    def is_had(how: int) -> bool:
        try:
            with compiling._locked(str(tmp_path), how):
                return True
        except BlockingIOError:
            return False

    assert is_had(fcntl.LOCK_EX)
    handle = os.open(next(tmp_path.iterdir()), os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert not is_had(fcntl.LOCK_SH)
        assert now_s == pytest.approx(60.0, abs=1.0)
        assert not any(is_had(how) for how in (fcntl.LOCK_SH, fcntl.LOCK_EX) for _ in range(100))
        assert now_s == pytest.approx(60.0, abs=1.0)
        fcntl.flock(handle, fcntl.LOCK_UN)
        assert is_had(fcntl.LOCK_EX)  # who held it goes on, and who comes next is waited for again
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert not is_had(fcntl.LOCK_SH)
        assert now_s == pytest.approx(120.0, abs=2.0)
    finally:
        os.close(handle)


# Compiles for one type, and stops on the way: before one of the two files is written, until there
# is another one or somebody waits for a lock. Or ends there.
STOPS = """
import fcntl, os, sys, time
from pathlib import Path

kind, step, others, ends = sys.argv[1:]

def flock(handle, how, original=fcntl.flock):
    try:
        original(handle, how)
    except BlockingIOError:
        Path(f"{kind}-waits").touch()
        raise

fcntl.flock = flock
import numpy, theirs  # looks for what is kept of one of its loops
from numba.core.caching import IndexDataCacheFile

def waits_for_a_lock():
    return any(Path().glob("*-waits"))

def stop_before(step, others=None):
    original = getattr(IndexDataCacheFile, step)

    def stopped(self, *args):
        Path(f"{kind}-{step}").touch()
        if others is None:
            os._exit(9)
        while not Path(others).exists() and not waits_for_a_lock():
            time.sleep(0.01)
        original(self, *args)

    setattr(IndexDataCacheFile, step, stopped)

if step:
    stop_before(step, others)
if ends:
    stop_before(ends)
theirs.twice(getattr(numpy, kind)(4))
Path(f"{kind}-done").touch()
"""
READS = """
import numpy, theirs
print(theirs.twice(numpy.int8(4)), theirs.twice(numpy.float32(4)))
print(*sorted(str(one) for one in theirs.twice.signatures))
"""
BOTH = "8 8.0\n(float32,) (int8,)\n"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_at_once_keep_their_own_loops(tmp_path: Path) -> None:
    """The one names its file between the other's choice of the same file and its end."""
    (tmp_path / "theirs.py").write_text(MODULE)
    one = start(tmp_path, STOPS, "int8", "_save_index", "float32-_save_data", "")
    while not (tmp_path / "int8-_save_index").exists():
        assert one.poll() is None
        time.sleep(0.01)
    other = start(tmp_path, STOPS, "float32", "_save_data", "int8-done", "_save_index")
    one.communicate()
    other.communicate()
    assert (one.returncode, other.returncode) == (0, 9)
    assert start(tmp_path, READS).communicate()[0] == BOTH


def test_who_is_killed_leaves_no_code_under_the_name_of_another(tmp_path: Path) -> None:
    """Of a file that is left from before the sources were touched, which nothing names any more."""
    (tmp_path / "theirs.py").write_text(MODULE)
    for number, (kind, ends) in enumerate(
        [("int8", ""), ("float32", "_save_index"), ("float32", "_save_data")]
    ):
        os.utime(tmp_path / "theirs.py", (number, number))
        process = start(tmp_path, STOPS, kind, "", "", ends)
        process.communicate()
        assert process.returncode == (9 if ends else 0)
        assert start(tmp_path, READS).communicate()[0] == BOTH


def test_where_nothing_can_be_kept_each_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("no locator available")
        return found(**options)

    found = numba.njit
    monkeypatch.setattr(numba, "njit", refuses)
    monkeypatch.setattr(compiling, "_unkept", set())  # this process goes on to other tests
    assert compiling.jit("int64(int64)")(lambda x: x + 1)(1) == 2
    assert compiling._unkept == {str(Path(__file__).parent)}
