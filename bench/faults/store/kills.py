"""kill -9 of processes that work with one page store after another in one folder."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bench.faults.store.audit import Log
from bench.faults.store.world import count_lost, wait_until
from bench.faults.tally import Tallies, check
from testkit.server import ROOT

_PAGES_A_LIFE = 20_000
_LIVES_A_FOLDER = 10
_LOG_BYTES, _FULL_LOG_BYTES = (200, 40_000), (60_000, 120_000)


def kill_stores(
    folder: Path, wanted: int, seed: int, tallies: Tallies, write_policy: str = "write_through"
) -> None:
    """Kills a process when its log has a random length; asks another store for all it promised.

    Under `auto` the disk is full by then, and pages are written as they leave DRAM.
    """
    auto = write_policy == "auto"
    kind = "store_kill_9_auto" if auto else "store_kill_9"
    tally, rng = tallies[kind], random.Random(seed)
    log = Log()  # what a later store gave up is no longer promised by an earlier one
    for number in range(wanted):
        place = folder / f"{kind}-{number // _LIVES_A_FOLDER}"
        if number % _LIVES_A_FOLDER == 0:
            log = Log()
        events = folder / f"{kind}-{number}.jsonl"
        life = number % _LIVES_A_FOLDER
        log_bytes = rng.randrange(*(_FULL_LOG_BYTES if auto else _LOG_BYTES))
        numbers = (str(life * _PAGES_A_LIFE), str(seed + number))
        _live_and_die([str(place), str(events), *numbers, write_policy], events, log_bytes)
        tally.injected += 1
        log.follow(events)
        last = (life + 1) * _PAGES_A_LIFE
        tally.lost_acknowledged_pages += count_lost(place, log.acknowledged, tally, last)
        if life == _LIVES_A_FOLDER - 1:
            shutil.rmtree(place)


def _live_and_die(arguments: list[str], events: Path, log_bytes: int) -> None:
    command = [sys.executable, "-m", "bench.faults.store.child", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as child:
        try:
            wait_until(
                lambda: (
                    child.poll() is not None
                    or (events.exists() and events.stat().st_size >= log_bytes)
                ),
                "a store wrote no log",
            )
        finally:
            child.send_signal(signal.SIGKILL)
        errors = child.communicate()[1].decode()
    check(child.returncode == -signal.SIGKILL, f"a store ended by itself: {errors}")
