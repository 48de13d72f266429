"""Mixed traffic for an hour: does anything grow? ``python -m bench.soak [--quick | --minutes N]``.

Chats and documents of three tenants, of which three requests in ten are aborted or hung up on;
hints, calls of the steering endpoint, a chat that outgrows its context, a reader of KV events; new
weights under traffic; flushes and clears; servers that end by SIGTERM and by SIGKILL over the same
folders, with DRAM, a disk and a shared folder that are full. After each round memory, open files,
threads and disk are read at rest, and answers are compared with plain SGLang's, bit for bit. Beside
the last server a plain one does the same rounds: memory that it grows by, too, is not the plugin's.
SGLang's own checks of its books are on, in every step and when idle; they end a server.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.core.case import Report, disk_folder
from bench.core.output import Progress
from bench.core.reporting import run_alone
from bench.soak.life import Soak
from bench.soak.probes import Probes
from bench.soak.report import make_report
from bench.soak.world import World

SHORT_LIFE, QUICK_LIFE = 6, 2  # rounds of a server that is ended soon


def main() -> int:
    """Runs the command line; returns the exit status: 0, 1 (something grew) or 2 (usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of traffic; default: 60")
    parser.add_argument("--quick", action="store_true", help="three servers of two rounds each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    args = parser.parse_args()

    def make(progress: Progress) -> Report:
        with disk_folder("soak-") as folder:
            return run_soak(folder, progress.stage, None if args.quick else args.minutes)

    return run_alone("soak", make, args.json)


def run_soak(folder: Path, tell: Callable[[str], None], minutes: float | None) -> Report:
    """Two short lives, ended both ways, and a long one.

    Args:
        folder: for everything written.
        tell: is given a line after each round.
        minutes: of all lives together; None for a few rounds.
    """
    tell("answers of plain SGLang")
    world = World.make(folder)
    soak = Soak(world, Probes.learn(world), tell)
    deadline_s = time.monotonic() + 60 * (minutes or 0)
    short = SHORT_LIFE if minutes else QUICK_LIFE

    def is_short(num_rounds: int) -> bool:
        return num_rounds < short

    def is_long(num_rounds: int) -> bool:
        return num_rounds < short or time.monotonic() < deadline_s

    soak.live("kill", is_short)
    soak.live("terminate", is_short)
    soak.live("terminate", is_long, beside_plain=True)
    return make_report(soak)


if __name__ == "__main__":
    sys.exit(main())
