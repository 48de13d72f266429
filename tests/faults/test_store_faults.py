"""Faults under the page store, without a server."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from bench.faults.store.damage import damage_store
from bench.faults.store.kills import kill_stores
from bench.faults.store.open_time import measure_open
from bench.faults.tally import Tallies
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, PageStoreConfig

SLOT_BYTES = 65536
NAMESPACE = hashlib.sha256(b"tests.faults").digest()
MIN_FREE_GB = 31


def test_500_damaged_records_are_misses_and_counted(tmp_path: Path) -> None:
    tallies = Tallies()
    damage_store(tmp_path / "disk", 12, tallies)
    injected = {k: t.injected for k, t in tallies.by_kind.items() if "undamaged" not in k}
    assert sum(injected.values()) >= 500
    assert min(injected.values()) >= 30
    assert len(injected) == 7
    assert {k: t for k, t in tallies.by_kind.items() if not t.harmless} == {}


def test_kill_9_under_auto_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Full disk: copies give their places up to others, and are written again as they leave."""
    tallies = Tallies()
    kill_stores(tmp_path, 2, 5, tallies, "auto")
    tally = tallies["store_kill_9_auto"]
    assert tally.injected == 2
    assert tally.harmless, tally
    events = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in whole_lines(file)]
    assert any(event["e"] == "reclaimed" for event in events), "the disk was never full"


def whole_lines(log: Path) -> list[str]:
    """The lines of a log of which the last may be cut short."""
    return log.read_text().split("\n")[:-1]


@pytest.mark.slow
def test_10_gb_of_segments_are_not_read_at_the_start(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < MIN_FREE_GB << 30:
        pytest.skip(f"needs {MIN_FREE_GB} GB free, most of it left alone")
    found = measure_open(tmp_path / "open", 10.0, 5)
    assert found["gb"] >= 10.0
    assert found["pages"] > 40_000
    file_bytes = found["gb"] * (1 << 30)
    assert found["read_bytes"] < file_bytes / 100
    assert found["read_bytes_after_kill"] < file_bytes / 20, "one segment is read as a whole"


def page_hash(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def row_of(number: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(page_hash(number), np.uint8).reshape(1, 32)


def save(store: PageStore, number: int) -> int:
    """Saves one page; returns how many found room."""
    page = page_hash(number)
    ticket = store.begin_save(store.space(NAMESPACE), row_of(number), np.empty((0, 32), np.uint8))
    for slot in ticket.slots.tolist():
        write_meta(store.arena.slots[slot], RecordMeta(page, NAMESPACE, b"", 0, 64, "pre"), 40_000)
    store.finish_save(ticket, ok=True)
    return len(ticket.slots)


def test_pages_whose_segment_was_reclaimed_can_leave_dram(tmp_path: Path) -> None:
    """A disk smaller than DRAM: what it let go must not fill DRAM for good."""
    log = tmp_path / "events"
    disk = DiskTier(DiskConfig(tmp_path / "disk", max_bytes=2 << 20, min_free_bytes=0))
    store = PageStore(
        HostArena(64, SLOT_BYTES), PageIndex(1024), disk, PageStoreConfig("write_through", str(log))
    )
    store.connect(disk)
    store.open_namespace(NAMESPACE, {})
    for number in range(400):
        assert save(store, number) == 1, f"no room for {number}"
        deadline = time.monotonic() + 300.0
        while store.stats().get("written_pages", 0) <= number:
            assert time.monotonic() < deadline, f"page {number} was not written"
            time.sleep(0.001)
    space = store.space(NAMESPACE)
    in_dram = [number for number in range(400) if store.ready_prefix(space, row_of(number))]
    youngest = list(range(400 - 64 + 64 // 32, 400))  # saves leave a part free for promotions
    assert in_dram == youngest, "DRAM holds other pages than the youngest"
    store.check()
    store.close()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    gone: set[str] = set()
    written: set[str] = set()
    for event in events:
        if event["e"] == "written":
            written.update(event["pages"])
        elif event["e"] in ("reclaimed", "lost"):
            gone.update(event["pages"])
    assert any(event["e"] == "reclaimed" for event in events)
    with DiskTier(DiskConfig(tmp_path / "disk", max_bytes=2 << 20, min_free_bytes=0)) as again:
        pages = again.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert {row.tobytes().hex() for row in pages.hashes} == written - gone
