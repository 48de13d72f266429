"""Power cuts: of what was written since a file's last sync, any part is lost, in any order.

With `--hier-kv-disk-fsync always` a page is acknowledged after its sync, so none may be lost.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.faults.store.world import Client, acknowledged, count_lost, open_disk
from bench.faults.tally import Tallies
from sglang_ext.tiers.disk.segments.fileio import FileIO

_BLOCK_BYTES = 4096
_NUM_ACTIONS = 30


class VolatileDisk(FileIO):
    """A disk with a cache. At some of its calls the power goes: a copy of the folder shows how.

    The copy is made in the middle of the call, under a lock that every writing call takes, so it is
    of one instant. Names and lengths of files count as durable at once.

    Args:
        folder: of the disk tier.
        events: the store's log, copied with it.
        copies: where the copies are made.
        seed: when, and what is lost.
    """

    def __init__(self, folder: Path, events: Path, copies: Path, seed: int) -> None:
        self.cuts: list[Path] = []
        self.num_lost_writes = 0
        self.is_on = False
        self._folder, self._events, self._copies = folder, events, copies
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        # Offsets and former bytes of the blocks written since the last sync, by inode; guarded.
        self._unsynced: dict[int, list[tuple[int, bytes]]] = {}

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            num_bytes = sum(len(view) for view in buffers)
            self._unsynced.setdefault(os.fstat(fd).st_ino, []).append(
                (offset, _former(fd, offset, num_bytes))
            )
            done = super().pwritev(fd, buffers, offset)
            self._maybe_cut(0.2)
            return done

    def sync(self, fd: int) -> None:
        with self._lock:
            self._maybe_cut(0.2)
            super().sync(fd)
            self._unsynced.pop(os.fstat(fd).st_ino, None)

    def allocate(self, fd: int, num_bytes: int) -> None:
        with self._lock:
            super().allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        with self._lock:
            super().truncate(fd, num_bytes)
            self._maybe_cut(0.2)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            self._maybe_cut(0.2)

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)

    def _maybe_cut(self, probability: float) -> None:
        if self.is_on and self._random.random() < probability:
            self._cut()

    def _cut(self) -> None:
        copy = self._copies / f"cut-{len(self.cuts)}"
        shutil.copytree(self._folder, copy / "disk")
        shutil.copy(self._events, copy / "events.jsonl")
        by_inode = {path.stat().st_ino: path for path in self._folder.rglob("*") if path.is_file()}
        for inode, writes in self._unsynced.items():
            if inode in by_inode:
                where = copy / "disk" / by_inode[inode].relative_to(self._folder)
                self._lose_some(where, writes)
        self.cuts.append(copy)

    def _lose_some(self, path: Path, writes: list[tuple[int, bytes]]) -> None:
        """Puts back, for some writes or some blocks of them, what was there before."""
        size = path.stat().st_size
        with path.open("r+b") as file:
            for offset, former in reversed(writes):
                lost = self._random.choice((0.0, 0.5, 1.0))
                self.num_lost_writes += lost > 0
                for start in range(0, len(former), _BLOCK_BYTES):
                    if self._random.random() < lost and offset + start < size:
                        file.seek(offset + start)
                        file.write(former[start : start + _BLOCK_BYTES])
            file.truncate(size)


def _former(fd: int, offset: int, num_bytes: int) -> bytes:
    """What a file holds there now, zeros behind its end."""
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)  # `fd` may be for writing only
    try:
        return os.pread(reader, num_bytes, offset).ljust(num_bytes, b"\0")
    finally:
        os.close(reader)


def cut_power(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Cuts the power so often, at random calls; opens each copy and asks for what was promised."""
    tally, number = tallies["disk_power_cut"], 0
    reordered = tallies["disk_unsynced_writes_lost_or_reordered"]
    while tally.injected < wanted:
        place = folder / f"power-{number}"
        events = place.with_suffix(".jsonl")
        disk = VolatileDisk(place, events, folder / f"cuts-{number}", seed + number)
        client = Client(open_disk(place, disk, fsync="always"), events, 0, seed + number, tally)
        disk.is_on = True
        for _ in range(_NUM_ACTIONS):
            client.act()
        disk.is_on = False
        client.close()
        for cut in disk.cuts[: wanted - tally.injected]:
            promised = acknowledged(cut / "events.jsonl")
            lost = count_lost(cut / "disk", promised, tally, client.next_page)
            tally.lost_acknowledged_pages += lost
            tally.injected += 1
        reordered.injected += disk.num_lost_writes
        for used in (place, folder / f"cuts-{number}"):
            shutil.rmtree(used, ignore_errors=True)
        number += 1
