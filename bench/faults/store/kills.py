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
_MAX_LOG_BYTES = 40_000


def kill_stores(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Kills a process when its log has a random length; asks another store for all it promised."""
    tally, rng = tallies["store_kill_9"], random.Random(seed)
    log = Log()  # what a later store gave up is no longer promised by an earlier one
    for number in range(wanted):
        place = folder / f"killed-{number // _LIVES_A_FOLDER}"
        if number % _LIVES_A_FOLDER == 0:
            log = Log()
        events = folder / f"killed-{number}.jsonl"
        life = number % _LIVES_A_FOLDER
        _live_and_die(place, events, life * _PAGES_A_LIFE, seed + number, rng)
        tally.injected += 1
        log.follow(events)
        last = (life + 1) * _PAGES_A_LIFE
        tally.lost_acknowledged_pages += count_lost(place, log.acknowledged, tally, last)
        if life == _LIVES_A_FOLDER - 1:
            shutil.rmtree(place)


def _live_and_die(place: Path, events: Path, first: int, seed: int, rng: random.Random) -> None:
    command = [sys.executable, "-m", "bench.faults.store.child"]
    command += [str(place), str(events), str(first), str(seed)]
    last = rng.randrange(200, _MAX_LOG_BYTES)
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as child:
        try:
            wait_until(
                lambda: (
                    child.poll() is not None or (events.exists() and events.stat().st_size >= last)
                ),
                "a store wrote no log",
            )
        finally:
            child.send_signal(signal.SIGKILL)
        errors = child.communicate()[1].decode()
    check(child.returncode == -signal.SIGKILL, f"a store ended by itself: {errors}")
