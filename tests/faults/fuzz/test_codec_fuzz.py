"""Bad streams into every decoder, in a process of its own that any wrong step ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NUM_CASES = int(os.environ.get("HIER_KV_FUZZ_CASES", "1000"))


@pytest.mark.slow
def test_bad_streams_are_refused_or_decode() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.fuzz.fuzz_codec", "--cases", str(NUM_CASES)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-4000:])
    assert f"all {NUM_CASES} cases passed" in done.stdout
    lines = [line for line in done.stdout.splitlines() if " cases, " in line]
    assert len(lines) > 15
    for line in lines:
        decoder, figures = line.split(": ")
        decoded = int(figures.split(" decoded")[0].rsplit(" ", 1)[1])
        # Mutations that no decoder gets past its first checks would show nothing.
        assert decoded > 0 or decoder == "profile", line
    assert "guarded arrays" in done.stdout
