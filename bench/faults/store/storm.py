"""Random faults under the page store itself, many in little time: disk, coded DRAM.

Each round opens a store, lets a client work while calls below fail, lag and lie as a seed says,
then closes it and looks on a sound disk for every page that was acknowledged.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.faults.store.schedule import (
    HONEST,
    LYING_READS,
    LYING_WRITES,
    Schedule,
    ScheduledDisk,
)
from bench.faults.store.world import (
    Client,
    acknowledged,
    count_lost,
    open_disk,
)
from bench.faults.tally import Tallies, Tally
from sglang_ext.tiers.base import Location, ReadRequest
from sglang_ext.tiers.coded_host import MemoryTier
from sglang_ext.tiers.records.record import ByteArray, VerifyResult

_NUM_ACTIONS = 60
_SHARE = 0.12
_LIARS = (*LYING_READS, *LYING_WRITES)


def storm_disk(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Rounds over the disk tier until so many faults were injected.

    Every third round the disk lies; what it lost of what it said it wrote is not asked for then.
    """
    total = number = 0
    while total < wanted:
        lies = number % 3 == 2
        schedule = Schedule(seed + number, _SHARE, _LIARS if lies else HONEST, is_on=False)
        place = folder / f"disk-{number}"
        events = place.with_suffix(".jsonl")
        tally = Tally()
        client = Client(open_disk(place, ScheduledDisk(schedule)), events, 0, seed + number, tally)
        schedule.is_on = True
        for _ in range(_NUM_ACTIONS):
            client.act()
        schedule.is_on = False
        client.close()
        wanted_pages = set() if lies else acknowledged(events)
        tally.lost_acknowledged_pages += count_lost(place, wanted_pages, tally, client.next_page)
        total += sum(schedule.injected.values())
        _book(tallies, "disk", schedule, tally)
        shutil.rmtree(place)
        number += 1


def _book(tallies: Tallies, tier: str, schedule: Schedule, harm: Tally) -> None:
    """Notes a round's faults by kind. Harm is noted under each kind that may have done it."""
    for kind, count in schedule.injected.items():
        tally = tallies[f"{tier}_{kind}"]
        tally.injected += count
        tally.wrong_tokens += harm.wrong_tokens
        tally.failed_requests += harm.failed_requests
        tally.lost_acknowledged_pages += harm.lost_acknowledged_pages


# ---- coded DRAM ----------------------------------------------------------------------------------


class ScheduledMemory(MemoryTier):
    """Records in DRAM that fail and rot as a schedule says."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(64 << 20)
        self._schedule = schedule
        self._rng = random.Random(schedule.seed)

    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        kind = self._schedule.draw("write")
        if kind == "write_full":
            self._schedule.met(kind)
            return [None] * len(slots)
        if kind == "write_error":
            self._schedule.met(kind)
            raise RuntimeError("injected into coded DRAM")
        return super().write(digest, slots)

    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        kind = self._schedule.draw("read")
        if kind == "read_error":
            self._schedule.met(kind)
            raise RuntimeError("injected into coded DRAM")
        if kind == "read_corrupted":
            self._schedule.met(kind)
            self._rot(requests[0].location)
        return super().read(digest, requests)

    def _rot(self, at: Location) -> None:
        """Flips a bit of a record where it lies."""
        with self._lock:
            segment = self._segments.get(at.segment)
            record = None if segment is None else segment.records.get(at.block)
            if record is not None:
                record[self._rng.randrange(record.size)] ^= 1 << self._rng.randrange(8)


_MEMORY_KINDS = ("write_full", "write_error", "read_error", "read_corrupted")


def storm_memory(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Rounds over coded DRAM, with free slots of the arena full of other pages' bytes."""
    total = number = 0
    while total < wanted:
        schedule = Schedule(seed + number, 2 * _SHARE, _MEMORY_KINDS)
        tally = Tally()
        events = folder / f"memory-{number}.jsonl"
        client = Client(ScheduledMemory(schedule), events, 0, seed + number, tally)
        for _ in range(_NUM_ACTIONS):
            client.act()
            if schedule.draw("write"):
                tallies["arena_free_slots_overwritten"].injected += client.spoil_free_slots()
        schedule.is_on = False
        client.close()
        total += sum(schedule.injected.values())
        _book(tallies, "coded_dram", schedule, tally)
        number += 1
