"""What both benches of routers say: how much is reused, by which events the router knows.

`bench.serve.routing` and `bench.serve.gateway` measure it, each with a router of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.core.case import Report, disk_folder
from bench.core.output import Progress, Table
from bench.core.reporting import run_alone

LEAST_RATIO: Final = 1.5  # of what is reused by the tiers' events, over that by the device's
WHERE: Final = {
    "random": "at random",
    "device": "to whose device has most of it",
    "tiers": "to whose device, DRAM or disk has most of it",
}
"""Modes, in the order of the table, and where a chat's turn is sent in each."""

Measure = Callable[[Path, int, int, Progress], dict[str, Any]]


def table(found: dict[str, Any], place: str, column: str) -> Table:
    """What a person reads.

    Args:
        found: what was measured.
        place: behind the number of chats and turns in the title.
        column: of what was reused.
    """
    rows: list[Sequence[Any]] = []
    for mode, said in WHERE.items():
        reused = found[f"reused_{mode}"]
        rows.append([said, reused, f"{reused / found['reused_device']:.2f}"])
    title = f"{found['chats']} chats of {found['turns']} turns {place}"
    return Table(title, ["a turn is sent", column, "over the device's events"], rows)


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of `bench.serve.<name>`."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.serve.{name}", description=doc)
    parser.add_argument("--quick", action="store_true", help="20 chats instead of 60")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    return parser


def run(
    name: str,
    args: argparse.Namespace,
    measure: Measure,
    place: str,
    column: str,
    turns: int = 4,
) -> int:
    """Runs one of the two benches; returns the exit status: 0 or 1 (check failed).

    Args:
        name: of the module in `bench.serve`.
        args: of its command line.
        measure: given a folder, chats, turns and where to say how far it is.
        place: see `table`.
        column: see `table`.
        turns: of each chat.
    """
    ratio = 0.0

    def make(progress: Progress) -> Report:
        nonlocal ratio
        with disk_folder(f"bench-{name}-") as folder:
            found = measure(folder, 20 if args.quick else 60, turns, progress)
        n = {"turns": found["chats"] * found["turns"]}
        ratio = found["tiers_over_device"]
        note = (
            f"With the tiers' events {ratio:.2f} times as much is reused (target, in full: at "
            f"least {LEAST_RATIO})."
        )
        return Report(found, {}, n, [table(found, place, column)], [note])

    status = run_alone(f"serve_{name}", make, args.json)
    if not status and not args.quick and ratio < LEAST_RATIO:
        print(
            f"bench: expected {LEAST_RATIO} times as much by the tiers' events, got {ratio:.2f}",
            file=sys.stderr,
        )
        return 1
    return status
