"""A soak's verdict: what grows is told from noise, and ends the run with its table."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.core.case import CaseFailedError
from bench.soak.gauges import Gauges, folder_mib, num_fds, num_threads
from bench.soak.life import Life, Soak
from bench.soak.probes import Probes
from bench.soak.report import WARM_UP_ROUNDS, make_report
from bench.soak.trend import growth, slope
from bench.soak.world import DISK_MIB, REMOTE_MIB, World

AT_REST = Gauges(900.0, 400.0, 80, 60, 90.0, 120.0, None)


def soak_of(readings: list[Gauges]) -> Soak:
    life = Life("kill", [AT_REST] * WARM_UP_ROUNDS + readings)
    return Soak(World(Path(), {}), Probes([], {}), print, lives=[life])


def test_a_slope_is_found_under_noise_and_outliers() -> None:
    rng = random.Random(3)
    values = [100 + 0.5 * number + rng.uniform(-3, 3) for number in range(60)]
    values[20] += 500
    assert slope(values) == pytest.approx(0.5, abs=0.1)
    assert growth(values) == pytest.approx(0.5 * 45, abs=3)
    flat = [100 + rng.uniform(-3, 3) for _ in range(60)]
    assert abs(slope(flat)) < 0.1
    assert abs(growth(flat)) < 3
    assert slope([1.0]) == growth([1.0]) == 0.0


@pytest.mark.parametrize(
    ("leak", "what"),
    [({"rss_mib": 4.0}, "rss_mib"), ({"fds": 1}, "fds"), ({"threads": 1}, "threads")],
)
def test_what_grows_with_each_round_is_a_leak(leak: dict[str, Any], what: str) -> None:
    readings = [
        replace(AT_REST, **{name: getattr(AT_REST, name) + n * by for name, by in leak.items()})
        for n in range(40)
    ]
    with pytest.raises(CaseFailedError, match=f"{what} grew by"):
        make_report(soak_of(readings))


@pytest.mark.parametrize("plain_grows", [True, False])
def test_what_plain_sglang_grows_by_in_the_same_rounds_is_no_leak(plain_grows: bool) -> None:
    readings = [
        replace(
            AT_REST, rss_mib=900.0 + 4 * n, plain_rss_mib=800.0 + (3 * n if plain_grows else -n)
        )
        for n in range(40)
    ]
    if plain_grows:
        assert make_report(soak_of(readings)).results["lives"][0]["plain_rss_mib_growth"] == 90.0
        return
    with pytest.raises(CaseFailedError, match=r"grew by 120 in one server, at most 64 more"):
        make_report(soak_of(readings))


@pytest.mark.parametrize(
    ("over", "what"), [("disk_mib", "the disk folder"), ("remote_mib", "the shared folder")]
)
def test_a_folder_keeps_to_its_size_in_every_round(over: str, what: str) -> None:
    too_much: dict[str, Any] = {over: 2.0 * max(DISK_MIB, REMOTE_MIB)}
    once = replace(AT_REST, **too_much)
    with pytest.raises(CaseFailedError, match=what):
        make_report(soak_of([AT_REST, once, AT_REST]))


def test_what_stays_is_reported(tmp_path: Path) -> None:
    report = make_report(soak_of([AT_REST] * 20))
    assert report.results["lives"][0]["rss_mib_slope"] == 0.0
    assert report.tables[0].render().count("kill") == 1
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(1 << 20))
    assert folder_mib(tmp_path) == pytest.approx(1.0, abs=0.1)


def test_a_folder_may_lose_folders_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full store removes what it empties."""
    for name in ("goes", "stays"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1 << 20))
    scan = os.scandir

    def scan_late(path: Any) -> Any:
        if Path(path).name == "goes":
            monkeypatch.undo()  # of which rmtree makes use, too
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert folder_mib(tmp_path) == pytest.approx(1.0, abs=0.1)
    assert not (tmp_path / "goes").exists()


_ONE_MORE_OF_EACH = """
import os, sys, threading
print(flush=True)
sys.stdin.readline()
threading.Thread(target=threading.Event().wait, daemon=True).start()
kept = open(os.devnull)
print(flush=True)
sys.stdin.readline()
"""


def test_files_and_threads_of_a_process_are_counted() -> None:
    """Of one that does nothing else, as those of this one come and go with other tests."""
    command = [sys.executable, "-c", _ONE_MORE_OF_EACH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = num_fds(child.pid), num_threads(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert (num_fds(child.pid), num_threads(child.pid)) == (before[0] + 1, before[1] + 1)
        child.stdin.close()
