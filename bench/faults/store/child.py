"""A process with a page store that works until it is killed: `faults/store/kills.py` starts it.

Arguments: folder of the disk tier, the store's log, number of the first page, seed, write policy;
with `auto` the disk is soon full.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.faults.store.schedule import HONEST, Schedule, ScheduledDisk
from bench.faults.store.world import FULL_BYTES, ROOMY_BYTES, Client, open_disk
from bench.faults.tally import Tally

_SHARE = 0.03


def main() -> None:
    """Works; its disk fails now and then besides."""
    folder, events, first, seed, policy = sys.argv[1:]
    schedule = Schedule(int(seed), _SHARE, HONEST, is_on=False)
    tally = Tally()
    max_bytes = FULL_BYTES if policy == "auto" else ROOMY_BYTES
    disk = open_disk(Path(folder), ScheduledDisk(schedule), max_bytes=max_bytes)
    client = Client(disk, Path(events), int(first), int(seed), tally, policy)
    schedule.is_on = True
    while not (tally.wrong_tokens or tally.failed_requests):
        client.act()
    sys.exit(f"{tally}")


if __name__ == "__main__":
    main()
