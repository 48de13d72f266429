"""A store ends in time whatever hangs below it, and loses nothing that was acknowledged."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.store.ending import Ending
from sglang_ext.tiers.store.types import StoreCounters
from tests.unit.store.store_rig import Make, Rig, check_content, on_disk_only, pages, rigs

PATIENCE_S = 300.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def ends_while_the_disk_hangs(rig: Rig) -> None:
    assert not rig.io.open_gate.is_set()
    closing = threading.Thread(target=rig.store.close, args=(0.2,), daemon=True)
    closing.start()
    closing.join(60.0)  # far below the 300 s for which the gate is closed
    assert not closing.is_alive()
    assert not rig.io.open_gate.is_set()


def found_in_a_copy(rig: Rig, folder: Path, hashes: np.ndarray) -> Rig:
    """Another server on what a killed process would have left of the rig's folder."""
    (folder / "after").mkdir()
    shutil.copytree(folder / "disk", folder / "after" / "disk")
    other = Rig(folder / "after", slots=rig.arena.num_slots)
    plan = other.store.plan(other.space, hashes)
    assert plan is not None
    other.wait(plan)
    check_content(other, hashes)
    other.store.cancel_plan(plan)
    return other


def test_a_write_that_hangs_is_left_behind(make: Make, tmp_path: Path) -> None:
    rig = make(slots=32)
    kept = pages("kept", 6)
    rig.save(kept)
    rig.settle()
    assert rig.on_disk(kept) == 6
    rig.io.open_gate.clear()
    rig.save(pages("hanging", 2))
    rig.until(lambda: rig.books.spills.num_spilling > 0)
    rig.save(pages("queued", 2))
    ends_while_the_disk_hangs(rig)
    assert rig.count("shutdown_lost_pages") == 4
    assert rig.count("shutdown_left_behind") > 0
    other = found_in_a_copy(rig, tmp_path, kept)
    try:
        assert other.found >= 6
    finally:
        other.store.close(5)


def test_a_flush_that_meets_a_hanging_disk_ends_too(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The pages are written by whoever flushes, and not by the thread that hangs already."""
    rig = make(policy="write_back", slots=32)
    rig.save(pages("a", 3))
    rig.io.open_gate.clear()
    with caplog.at_level(logging.INFO):
        ends_while_the_disk_hangs(rig)
    assert rig.count("shutdown_lost_pages") == 3
    assert "hier-kv: the server ends; 3 pages were in DRAM only and are lost" in caplog.text


def test_a_flush_waits_for_no_write_in_hand_beyond_its_time(make: Make) -> None:
    rig = make(slots=32)
    rig.io.open_gate.clear()
    rig.save(pages("hanging", 2))
    rig.until(lambda: rig.books.spills.num_spilling > 0)
    flushing = threading.Thread(target=rig.store.flush, args=(0.2,), daemon=True)
    flushing.start()
    flushing.join(60.0)
    assert not flushing.is_alive()
    rig.io.open_gate.set()


def test_a_read_that_hangs_is_left_behind(make: Make, tmp_path: Path) -> None:
    rig = make(slots=8)
    kept = pages("kept", 4)
    on_disk_only(rig, kept)
    rig.io.open_gate.clear()
    plan = rig.store.plan(rig.space, kept)
    assert plan is not None
    ends_while_the_disk_hangs(rig)
    assert rig.count("shutdown_left_behind") > 0
    found_in_a_copy(rig, tmp_path, kept).store.close(5)


def test_an_end_that_nothing_hinders_leaves_nothing_behind(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(slots=32)
    kept = pages("kept", 6)
    rig.save(kept)
    with caplog.at_level(logging.INFO):
        rig.store.close(60)
    assert "hier-kv: the server ends; no page in DRAM was left to write" in caplog.text
    assert rig.count("shutdown_left_behind") == 0
    assert rig.count("shutdown_lost_pages") == 0
    again = Rig(tmp_path, slots=32)
    assert again.found == 6
    again.store.close(5)


def test_parts_share_one_deadline_and_hang_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    counters, hangs = StoreCounters(), threading.Event()
    ending = Ending(counters, 0.0)
    with caplog.at_level(logging.WARNING):
        assert not ending.run("the first", hangs.wait)
        assert not ending.run("the second", hangs.wait)
        ended = threading.Event()
        assert Ending(counters, PATIENCE_S).run("the third", ended.set)
    hangs.set()
    assert ended.is_set()
    assert counters.snapshot() == {"shutdown_left_behind": 2}
    assert "the first" in caplog.text
    assert "the third" not in caplog.text


def test_what_a_part_raises_is_raised_behind_all_parts() -> None:
    def fails() -> None:
        raise ValueError("no such thing")

    ending, ended = Ending(StoreCounters(), PATIENCE_S), threading.Event()
    assert not ending.run("it", fails)
    assert ending.run("the next", ended.set)
    assert ended.is_set()
    with pytest.raises(ValueError, match="no such thing"):
        ending.raise_first()


def test_a_read_that_hangs_leaves_time_for_the_flush(make: Make, tmp_path: Path) -> None:
    """One slow sector, and writes that work."""
    rig = make(policy="write_back", slots=16)
    kept = pages("kept", 4)
    rig.save(kept)
    hangs = threading.Event()
    promoter = rig.store._promoter
    assert promoter is not None
    promoter.close = hangs.wait  # type: ignore[assignment, method-assign]
    rig.store.close(20.0)
    hangs.set()
    assert rig.count("shutdown_left_behind") == 1
    assert rig.count("shutdown_lost_pages") == 0
    again = Rig(tmp_path, slots=16)
    assert again.found == 4
    again.store.close(5)
