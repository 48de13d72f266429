"""Forged records and bad streams, in a process that any wrong step ends.

By default a few cases each, of both in one process, against the loops as they are shipped: what
they are given lies beside memory that ends the process when touched. The long form has many more,
and loops that check bounds besides, which take a minute to compile.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_form import count, either

ROOT = Path(__file__).parents[3]
NUM_CASES = count(300, 100000)


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What each fuzzer printed, by its name, as far as they came."""
    command = [sys.executable, "-m", "tests.faults.fuzz.fuzz_both", "--cases", str(NUM_CASES)]
    command += either(["--as-shipped"], [])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-4000:])
    _, store, codec = re.split(r"^\[fuzz_\w+\]$", done.stdout, flags=re.MULTILINE)
    return {"store": store.splitlines(), "codec": codec.splitlines()}


def lines_of(printed: list[str], marks: tuple[str, ...]) -> list[str]:
    """The lines of a fuzzer with one of some marks; all of its cases have passed."""
    assert f"all {NUM_CASES} cases passed" in printed
    return [line for line in printed if any(mark in line for mark in marks)]


@pytest.mark.slow
def test_what_is_forged_is_a_page_or_a_miss(printed: dict[str, list[str]]) -> None:
    lines = lines_of(printed["store"], (" served, ",))
    assert len(lines) == 9
    for line in lines:
        # Forgeries that never get past the first checks would show nothing.
        assert int(line.split(" served")[0].rsplit(" ", 1)[1]) > 0, line


@pytest.mark.slow
def test_bad_streams_are_refused_or_decode(printed: dict[str, list[str]]) -> None:
    guarded, *lines = lines_of(printed["codec"], (" cases, ", "guarded arrays"))
    assert "guarded arrays" in guarded
    assert len(lines) > 15
    for line in lines:
        decoder, figures = line.split(": ")
        decoded = int(figures.split(" decoded")[0].rsplit(" ", 1)[1])
        # Mutations that no decoder gets past its first checks would show nothing.
        assert decoded > 0 or decoder == "profile", line
