"""Forged records through every way into a server, in processes that any wrong step ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NUM_CASES = int(os.environ.get("HIER_KV_FUZZ_CASES", "1000"))


@pytest.mark.slow
def test_what_is_forged_is_a_page_or_a_miss() -> None:
    command = [sys.executable, "-m", "tests.faults.fuzz.fuzz_store", "--cases", str(NUM_CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-4000:])
    assert f"all {NUM_CASES} cases passed" in done.stdout
    lines = [line for line in done.stdout.splitlines() if " served, " in line]
    assert len(lines) == 9
    for line in lines:
        # Forgeries that never get past the first checks would show nothing.
        assert int(line.split(" served")[0].rsplit(" ", 1)[1]) > 0, line
