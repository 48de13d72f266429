"""`hier-kv prebuild`: behind it a store, copies, text and codecs compile nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_ext import compiling
from sglang_ext.cli import main
from testkit.server import ROOT
from tests.command_workers import start_with_workers

# In a process of its own, where nothing is compiled or loaded yet. What is found in the cache
# counts as well: it may be there because of another test.
USE = """
import gc
import sys
import tempfile
from pathlib import Path

import numpy as np
from numba.core.dispatcher import Dispatcher

from sglang_ext.cli import main


def loops():
    return {
        f"{each.py_func.__module__}.{each.py_func.__name__} {signature}"
        for each in gc.get_objects()
        if isinstance(each, Dispatcher) and each.py_func.__module__.startswith("sglang_ext.")
        for signature in each.signatures
    }


def use_store(folder):
    from tests.unit.store.store_rig import Rig

    rig = Rig(folder, slots=4, lookahead=True, pin_share=0.5, shares=(0.5,))
    pages = np.random.default_rng(0).integers(0, 256, (8, 32), np.uint8)
    for first in (0, 4):
        rig.save(pages[first : first + 4], pages[:first])
        rig.settle()
    assert rig.on_disk(pages) == 8
    plan = rig.store.plan(rig.space, pages[:3])
    rig.wait(plan)
    assert not plan.failed
    assert rig.ready(pages[:3]) == 3
    rig.store.close()


def use_copies():
    import torch

    from tests.unit.device import test_copier as copier

    for mode in ("pre", "delta"):
        copier.test_the_same_position_gives_the_same_bits(mode, torch.bfloat16, False)
    copier.test_moved_pages_are_rotated_to_their_new_position()
    copier.test_corrections_do_not_follow_a_page_that_moves()
    copier.test_a_page_with_too_many_corrections_is_kept_bound_and_the_others_are_not()


def use_text():
    from sglang_ext.truncation.quotes import StoredText

    text, tokens = StoredText(8, 16), np.arange(64, dtype=np.int32)
    text.add(0, tokens, np.arange(256, dtype=np.uint8).reshape(8, 32), 1)
    assert text.find(0, tokens[16:], 0, 1) is not None


def use_codecs(folder):
    from sglang_ext.codec.registry import codec_ids
    from tests.unit.codec import test_page_codec as codecs

    for codec_id in codec_ids():
        codec = codecs.learned(codec_id, folder)
        slots = [codecs.page(3), codecs.page(0)]
        slots[1][codecs.HEADER_BYTES : codecs.HEADER_BYTES + 4000 : 2] ^= 64  # outliers
        for slot in slots if codec.encodes else ():
            codecs.decoded(codec, codec.encode(slot))


before = loops()
assert not before
if sys.argv[1:]:
    assert main(["prebuild", *sys.argv[1:]]) == 0
built = loops()
with tempfile.TemporaryDirectory() as name:
    use_store(Path(name))
    use_copies()
    use_text()
    use_codecs(Path(name))
print("behind it:", *sorted(loops() - built), sep="\\n")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_behind_it_nothing_is_compiled() -> None:
    done = run("-c", USE, "--json", "--jobs", "1")  # here, where it is looked at what there is
    assert not done.returncode, done.stderr
    told, _, new = done.stdout.partition("behind it:\n")
    parts = json.loads(told)["parts"]
    assert {"page store", "quoted text", "copies of bf16"} < {part["part"] for part in parts}
    assert not new.split("\n")[:-1]
    # And what was compiled is kept: the next ones, two at a time, compile nothing.
    more = "from sglang_ext.cli import main; main(['prebuild', '--json', '--jobs', '2'])"
    again = run("-c", more)
    assert not again.returncode, again.stderr
    again_parts = json.loads(again.stdout)["parts"]
    assert [part["part"] for part in again_parts] == [part["part"] for part in parts]
    assert not any(part["num_compiled"] for part in again_parts)


def test_where_nothing_can_be_kept_it_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    done = run(
        *("-c", "import sys; from sglang_ext.cli import main; sys.exit(main(['prebuild']))"),
        NUMBA_CACHE_DIR=str(blocked / "cache"),
        NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator",
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("hier-kv: compiled loops of ")
    assert "set NUMBA_CACHE_DIR to a folder that this user may write to" in line
    assert not done.stdout


def test_ctrl_c_ends_it_with_the_processes_that_compile(tmp_path: Path) -> None:
    """They are stopped here, as whoever waited for them would wait for minutes."""
    nothing_kept = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    process, workers = start_with_workers(["prebuild", "--jobs", "2"], nothing_kept)
    with process:
        try:
            for worker in workers:
                worker.suspend()
            os.killpg(process.pid, signal.SIGINT)  # all that a terminal has in the foreground
            _, told = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, told) == (130, "")
    assert not psutil.wait_procs(workers, timeout=300)[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dtype", "int3"], "no KV dtype is called 'int3'; known are bf16, "),
        (["--codec", "gzip"], "gzip"),
        (["--jobs", "0"], "--jobs must be 1 or more, got 0"),
    ],
)
def test_what_is_not_known_is_refused_in_one_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prebuild", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hier-kv: ")
    assert told in line


def test_sources_have_times_that_an_image_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = tmp_path / "one.py", tmp_path / "data.bin"
    for path in (source, other):
        path.touch()
        os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    monkeypatch.setattr(compiling, "_PACKAGE", tmp_path)
    compiling.round_source_times()
    assert source.stat().st_mtime_ns == 1_700_000_000_000_000_000
    assert other.stat().st_mtime_ns == 1_700_000_000_123_456_789
