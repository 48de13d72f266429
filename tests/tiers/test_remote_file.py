"""What only a shared folder has: many writers, leftovers, its size, and system calls that hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.remote import RemoteStore
from sglang_ext.tiers.remote.file_engine import FileEngine
from tests.tiers.remote_cases import (
    FULL,
    KEPT,
    LONG_BYTES,
    MISSING,
    OK,
    PAGE_BYTES,
    REJECTED,
    TIMEOUT,
    UNAVAILABLE,
    WAIT_S,
    make_item,
    make_items,
    open_store,
    read,
)

Open = Callable[..., RemoteStore]

_WRITER = """
import sys
from tests.tiers.remote_cases import make_item, make_items, open_store
store = open_store(sys.argv[1])
assert store.wait_usable(30.0)
print("begins", flush=True)
for turn in range(10**6 if sys.argv[2] == "forever" else 3):
    store.put([*make_items(range(20)), make_item(20, 700_000, quality=turn % 2)])
    store.delete([item.key for item in make_items(range(10))])
store.put(make_items(range(20)))
store.close()
"""


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    opened: list[RemoteStore] = []

    def open_one(query: str = "size=1GB&free=1", **changes: Any) -> RemoteStore:
        opened.append(open_store(f"file://{tmp_path}?{query}", **changes))
        assert opened[-1].wait_usable(WAIT_S)
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def _reclaimer(store: RemoteStore) -> Any:
    engine = store._engine
    assert isinstance(engine, FileEngine)
    return engine.reclaimer


def _values(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.hkv"))


def _writer(folder: Path, turns: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, f"file://{folder}?size=1GB&free=1", turns]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_many_processes_write_the_same_pages(open_: Open, tmp_path: Path) -> None:
    writers = [_writer(tmp_path, "few") for _ in range(3)]
    store = open_()
    items = [*make_items(range(20)), make_item(20, LONG_BYTES)]
    while any(writer.poll() is None for writer in writers):
        assert set(read(store, items)) <= {OK, MISSING, REJECTED}
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert read(store, items) == [OK] * 21
    assert not list(tmp_path.rglob(".hkv-tmp-*"))
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_record(
    open_: Open, tmp_path: Path
) -> None:
    store = open_()
    items = [*make_items(range(20)), make_item(20, LONG_BYTES)]
    for _ in range(3):
        writer = _writer(tmp_path, "forever")
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begins\n"
        time.sleep(0.05)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert set(read(store, items)) <= {OK, MISSING, REJECTED}
    left = [tmp_path / f"hkv-1/{n}" for n in (".hkv-tmp-1", ".hkv-tmp-2")]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (1.0, 1.0))
    assert _reclaimer(store).wait_scanned(WAIT_S)
    assert not left[0].exists()
    assert left[1].exists()  # young: its writer may be at work
    assert set(store.put(items)) <= {OK, KEPT}
    assert read(store, items) == [OK] * 21


def test_the_oldest_go_when_the_folder_is_too_full(open_: Open, tmp_path: Path) -> None:
    store = open_(f"size={40 * PAGE_BYTES}&free=1")
    now = time.time()
    for number in range(36):
        item = make_item(number)
        known = set(_values(tmp_path))
        assert store.put([item]) == [OK]
        [path] = set(_values(tmp_path)) - known
        age_s = 120 * (100 - number)
        os.utime(path, (now - age_s, now - age_s))
    read(store, [make_item(0)])  # used: young again
    store.put(make_items(range(36, 44)))
    assert _reclaimer(store).wait_scanned(WAIT_S)
    left = [o is OK for o in read(store, make_items(range(44)))]
    assert len(_values(tmp_path)) <= 40
    assert left[0]
    assert not any(left[1:4])
    assert all(left[-20:])
    assert store.usage() == (PAGE_BYTES * len(_values(tmp_path)), 40 * PAGE_BYTES)


def test_other_files_are_left_alone(open_: Open, tmp_path: Path) -> None:
    mine = tmp_path / "notes.txt"
    mine.write_bytes(bytes(10**6))
    os.utime(mine, (1.0, 1.0))
    store = open_(f"size={4 * PAGE_BYTES}&free=1")
    store.put(make_items(range(4)))
    store.put(make_items(range(4, 8)))
    assert _reclaimer(store).wait_scanned(WAIT_S)
    assert mine.exists()


def test_nothing_is_written_where_space_is_short(open_: Open) -> None:
    store = open_("size=1GB&free=4000TB")
    assert store.put(make_items(range(3))) == [FULL] * 3
    assert store.stats()["error_full"] == 1
    assert store.stats()["breaker_state"] == 0


def test_values_are_forgotten_after_their_time(open_: Open, tmp_path: Path) -> None:
    store = open_("size=1GB&free=1&ttl=1h")
    items = make_items(range(3))
    store.put(items)
    old = time.time() - 3700
    for path in _values(tmp_path)[:2]:
        os.utime(path, (old, old))
    outcomes = read(store, items)
    assert sorted(outcome.value for outcome in outcomes) == ["missing", "missing", "ok"]
    assert store.exists([item.key for item in items]) == outcomes
    assert sorted(o.value for o in store.put(items)) == ["kept", "ok", "ok"]
    for path in _values(tmp_path):
        os.utime(path, (old, old))
    assert _reclaimer(store).wait_scanned(WAIT_S)
    assert not _values(tmp_path)


def test_what_was_read_is_young_again(open_: Open, tmp_path: Path) -> None:
    store = open_("size=1GB&free=1&ttl=1h")
    store.put([make_item(1, LONG_BYTES), make_item(2)])
    then = time.time() - 1800
    for path in _values(tmp_path):
        os.utime(path, (then, then))
    assert read(store, [make_item(1, LONG_BYTES)]) == [OK]
    young = [path.stat().st_mtime > then + 900 for path in _values(tmp_path)]
    assert sorted(young) == [False] + [True] * (len(young) - 1)


def test_a_folder_that_vanishes_and_comes_back(open_: Open, tmp_path: Path) -> None:
    folder, away = tmp_path / "mount", tmp_path / "away"
    folder.mkdir()
    store = open_store(f"file://{folder}?size=1GB&free=1")
    try:
        items = make_items(range(4))
        assert store.wait_usable(WAIT_S)
        assert store.put(items) == [OK] * 4
        folder.rename(away)
        assert read(store, items) == [MISSING] * 4
        for _ in range(3):
            assert store.put(make_items(range(4, 6))) == [UNAVAILABLE] * 2
        assert not store.usable
        assert not folder.exists()  # what was not mounted is not written to
        away.rename(folder)
        assert store.wait_usable(WAIT_S)
        assert read(store, items) == [OK] * 4
    finally:
        store.close()


def test_a_read_that_hangs_costs_its_time_and_no_more(open_: Open, tmp_path: Path) -> None:
    store = open_()
    items = make_items(range(3))
    store.put(items)
    [hung] = [p for p in _values(tmp_path) if items[1].key.page_hash.hex() in p.name]
    hung.unlink()
    os.mkfifo(hung)  # to open it for reading waits for a writer, as a dead mount waits for ever
    try:
        assert read(store, items, timeout_s=0.2) == [OK, TIMEOUT, TIMEOUT]
        for _ in range(2):
            read(store, items, timeout_s=0.1)
        assert not store.usable
        assert read(store, items) == [UNAVAILABLE] * 3
        assert store.wait_usable(WAIT_S)  # the folder as such answers
    finally:
        writer = os.open(hung, os.O_RDWR)
        hung.unlink()
    os.close(writer)
    assert read(store, items) == [OK, MISSING, OK]
