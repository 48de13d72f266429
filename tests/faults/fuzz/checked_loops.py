"""Loops with numba's bounds checks, for a process that fuzzes: it starts itself again with them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds how loops are compiled."""
    text = "compile in two thirds of the time what then is slow: for a few thousand cases"
    parser.add_argument("--unoptimised", action="store_true", help=text)


def run_checked(module: str, *, unoptimised: bool, **more: str) -> None:
    """Starts this program again in an environment where all loops check bounds, unless it is there.

    Their folder is their own: numba does not tell loops with checks, or of another optimisation,
    from others.

    Args:
        module: what runs, as for ``python -m``.
        unoptimised: whether LLVM is to spend no time on them.
        more: other variables.
    """
    folder = "numba-boundscheck-unoptimised" if unoptimised else "numba-boundscheck"
    wanted = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(_ROOT / "build" / folder), **more}
    if unoptimised:
        wanted["NUMBA_OPT"] = "0"
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **wanted})
