"""Writes pages as fast as it can until it is killed, logging each page that was acknowledged.

Each line of its input, a list in JSON, makes it fork a writer, which so need not import anything:
it prints the writer's pid, and the exit code once it has ended.

Of a line: folder, log file, first page number, direct_io, layout ("slots" or "packed", and "-tag"
or "-encrypt" where a key is set), step, count. `step` is where the writer kills itself at the
`count`-th time: a failpoint of the tier, "record" (half-way through writing records) or "footer"
(half-way through a footer); "none" leaves it to the test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.disk import DiskConfig, DiskTier, disk_context
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.protection import KeyedSeals, Mode, Protection
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals

HERE = Path(__file__).parent


def load(name: str, folder: Path = HERE) -> Any:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Countdown:
    """Kills this process at the `count`-th call."""

    def __init__(self, step: str, count: int) -> None:
        self.step = step
        self.left = count

    def is_due(self, step: str) -> bool:
        if step != self.step:
            return False
        self.left -= 1
        return self.left <= 0

    def reach(self, step: str) -> None:
        if self.is_due(step):
            os.kill(os.getpid(), signal.SIGKILL)


class TearingDisk(FileIO):
    """Writes half of what it is given, then kills the process, when the countdown ends."""

    def __init__(self, countdown: Countdown, unit: int) -> None:
        self.countdown = countdown
        self.unit = unit

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        magic = bytes(buffers[0][:4])
        step = {b"HKVR": "record", b"HKVF": "footer"}.get(magic, "")
        if step and self.countdown.is_due(step):
            half = sum(len(view) for view in buffers) // 2
            half -= half % self.unit
            torn = []
            for view in buffers:
                torn.append(view[: max(0, half)])
                half -= len(view)
            super().pwritev(fd, [view for view in torn if len(view)], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(fd, buffers, offset)


PAGES = load("tier_pages")
BOOKS = load("page_books", HERE.parent.parent / "testkit")


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                write(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def write(
    folder: str, log_path: str, first: str, direct_io: str, layout: str, step: str, count: str
) -> None:
    """Ends only with the process."""
    layout, *modes = layout.split("-")
    reused, mode = "reused" in modes, "".join(each for each in modes if each != "reused")
    packed = layout == "packed"
    make = PAGES.make_record if packed else PAGES.make_slot
    disk_context.MIN_RUN_BYTES = (
        2 * PAGES.PACKED_SLOT_BYTES
    )  # several runs in each write, on two threads
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    countdown = Countdown(step, int(count))
    config = DiskConfig(
        Path(folder),
        max_bytes=8 << 20,
        min_free_bytes=0,
        direct_io=direct_io,  # type: ignore[arg-type]
    )
    io = TearingDisk(countdown, 4096 if direct_io == "auto" else 1)
    seals: RecordSeals = CHECKSUMS
    if mode:
        seals = KeyedSeals(Protection([bytes(range(32))], Mode[mode.upper()]))
    tier = DiskTier(config, seals=seals, io=io, failpoints=countdown.reach)

    def on_drop(digest: bytes, segment_id: int) -> None:
        os.write(log, f"drop {segment_id}\n".encode())

    def on_moved(digest: bytes, old: int, moved: RecoveredPages) -> None:
        lines = [
            f"move {old} {page_hash.tobytes().hex()} {segment} {block}\n"
            for page_hash, segment, block in zip(
                moved.hashes, moved.segment, moved.block, strict=True
            )
        ]
        os.write(log, "".join(lines).encode())

    tier.on_drop = on_drop
    tier.on_moved = on_moved
    tier.is_hot = lambda digest, hashes, lora: hashes[:, 0] % 2 == 0
    found = tier.open_namespace(PAGES.NAMESPACE, PAGES.PACKED_SLOT_BYTES, {}, packed=packed)
    books = None
    if reused:
        books = BOOKS.PageBooks(
            int(first), lambda at: os.write(log, f"gone {at.segment} {at.block}\n".encode())
        )
        books.connect(tier)
        books.add_recovered(found)
    rng = np.random.default_rng(int(first))
    number = int(first)
    while True:
        batch = range(number, number + int(rng.integers(1, 13)))
        number = batch.stop
        records = [make(n, slot_bytes=PAGES.PACKED_SLOT_BYTES) for n in batch]
        locations = tier.write(PAGES.NAMESPACE, records)
        if books is not None:
            hashes = [PAGES.key(n) for n in batch]
            books.add(hashes, locations, [record.size // 4096 for record in records])
        lines = [
            f"page {PAGES.key(n).hex()} {at.segment} {at.block}\n"
            for n, at in zip(batch, locations, strict=True)
            if at is not None
        ]
        os.write(log, "".join(lines).encode())


if __name__ == "__main__":
    main()
