"""What only a shared folder has: many writers, leftovers, its size, and system calls that hang."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote import RemoteStore
from sglang_ext.tiers.remote.base import Deadline, Usage
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.remote.engines import file_reclaim
from sglang_ext.tiers.remote.engines.file_engine import FileEngine
from sglang_ext.tiers.remote.engines.file_reclaim import LOCK_NAME
from sglang_ext.tiers.remote.engines.value_folders import ValueFolders
from tests.tiers import tier_pages
from tests.tiers.remote.remote_cases import (
    FULL,
    KEPT,
    LONG_BYTES,
    MISSING,
    NAMESPACE,
    OK,
    OTHER_NAMESPACE,
    PAGE_BYTES,
    REJECTED,
    TIMEOUT,
    UNAVAILABLE,
    WAIT_S,
    heads,
    make_item,
    make_items,
    open_store,
    opened_folder,
    read,
    until,
)

Open = Callable[..., RemoteStore]

_WRITER = """
import sys
from tests.tiers.remote.remote_cases import KEPT, OK, make_item, make_items, open_store, until
store = open_store(sys.argv[1])
assert store.wait_usable(300.0)
print("begins", flush=True)
for turn in range(10**6 if sys.argv[2] == "forever" else 3):
    store.put([*make_items(range(20)), make_item(20, 700_000, quality=turn % 2)])
    store.delete([item.key for item in make_items(range(10))])
everything = [*make_items(range(20)), make_item(20, 700_000)]
assert until(lambda: set(store.put(everything)) <= {OK, KEPT})
store.close()
"""


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    with opened_folder(tmp_path, "size=1GB&free=1") as open_one:
        yield open_one


def _reclaimer(store: RemoteStore) -> Any:
    engine = store._engine
    assert isinstance(engine, FileEngine)
    return engine.reclaimer


def _usage(store: RemoteStore) -> Usage:
    return store._engine.usage(Deadline.after(WAIT_S))


def _scans(reclaimer: Any) -> bool:
    """Waits until a scan that began after this call has ended."""
    with reclaimer._changed:
        target = reclaimer.num_scans + 1 + reclaimer._is_scanning  # that one began before
        reclaimer._is_due = True
        reclaimer._changed.notify_all()
        while reclaimer.num_scans < target:
            reclaimer._is_due = True
            reclaimer._changed.notify_all()
            if not reclaimer._changed.wait(WAIT_S):
                return False
        return True


def _values(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.hkv"))


def _writer(folder: Path, turns: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, f"file://{folder}?size=1GB&free=1", turns]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_many_processes_write_the_same_pages(open_: Open, tmp_path: Path) -> None:
    store = open_()
    items = [*make_items(range(20)), make_item(20, LONG_BYTES)]
    with ExitStack() as stack:
        writers = [stack.enter_context(_writer(tmp_path, "few")) for _ in range(3)]
        while any(writer.poll() is None for writer in writers):
            assert set(read(store, items)) <= {OK, MISSING, REJECTED}
        assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert read(store, items) == [OK] * 21
    assert not list(tmp_path.rglob(".hkv-tmp-*"))


def test_all_that_is_deleted_is_gone_when_the_call_ends(open_: Open, tmp_path: Path) -> None:
    store = open_()
    items = make_items(range(20))
    assert store.put(items) == [OK] * 20
    assert store.delete([item.key for item in items[:12]]) == 12
    assert len(_values(tmp_path)) == 8
    assert read(store, items) == [MISSING] * 12 + [OK] * 8


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_record(
    open_: Open, tmp_path: Path
) -> None:
    store = open_()
    items = [*make_items(range(20)), make_item(20, LONG_BYTES)]
    for _ in range(3):
        writer = _writer(tmp_path, "forever")
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begins\n"
        assert until(lambda: bool(_values(tmp_path)))
        time.sleep(0.05)  # anywhere in what it does
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert set(read(store, items)) <= {OK, MISSING, REJECTED}
    folder = _values(tmp_path)[0].parent
    left = [folder / f".hkv-tmp-77-0123abcd-{number}" for number in range(2)]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (1.0, 1.0))
    assert _scans(_reclaimer(store))
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
    assert _scans(_reclaimer(store))
    left = [o is OK for o in read(store, make_items(range(44)))]
    assert len(_values(tmp_path)) <= 40
    assert left[0]
    assert not any(left[1:4])
    assert all(left[-20:])
    assert _usage(store) == (PAGE_BYTES * len(_values(tmp_path)), 40 * PAGE_BYTES)


def test_folders_without_a_file_go(open_: Open, tmp_path: Path) -> None:
    store = open_()
    items = make_items(range(4))
    assert store.put(items) == [OK] * 4
    *gone, _, kept = _values(tmp_path)
    for path in gone:
        path.unlink()
    young = gone.pop().parent
    old = time.time() - 3600
    for folder in (folder for path in (*gone, kept) for folder in path.parents):
        if folder.is_relative_to(tmp_path) and folder != tmp_path:
            os.utime(folder, (old, old))
    assert _scans(_reclaimer(store))
    assert not any(path.parent.exists() for path in gone)
    assert young.is_dir()  # a writer may have just made it
    assert kept.is_file()
    assert sum(outcome is OK for outcome in read(store, items)) == 2


def test_a_folder_that_is_removed_under_a_put_is_made_again(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, removed = open_(), list[str]()
    make_file = ValueFolders.make_file

    def remove_first(self: ValueFolders, folder: int, name: str) -> int:
        if len(removed) < 2:
            path = os.readlink(f"/proc/self/fd/{folder}")
            os.rmdir(path)
            removed.append(path)
        return make_file(self, folder, name)

    monkeypatch.setattr(ValueFolders, "make_file", remove_first)
    item = make_item(0)
    assert store.put([item]) == [OK]
    assert len(removed) == 2
    assert read(store, [item]) == [OK]


def test_who_finds_another_at_work_looks_again_soon(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next regular look, which is an hour later."""
    monkeypatch.setattr(file_reclaim, "_SCAN_AGAIN_S", 0.01)
    store = open_()
    store.put([make_item(0)])
    reclaimer = _reclaimer(store)
    assert _scans(reclaimer)
    (top,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (top / LOCK_NAME).touch()
    with reclaimer._changed:
        num_whole = reclaimer.num_scans - reclaimer.num_passed_over
    assert _scans(reclaimer)
    with reclaimer._changed:
        assert reclaimer.num_passed_over
        assert reclaimer.num_scans - reclaimer.num_passed_over == num_whole
    (top / LOCK_NAME).unlink()
    with reclaimer._changed:  # nobody asks for it
        assert reclaimer._changed.wait_for(
            lambda: reclaimer.num_scans - reclaimer.num_passed_over > num_whole, WAIT_S
        )


def test_a_lock_from_the_future_holds_nobody_off(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put([make_item(0)])
    (top,) = (path for path in tmp_path.iterdir() if path.is_dir())
    lock = top / LOCK_NAME
    reclaimer = _reclaimer(store)
    assert _scans(reclaimer)
    lock.touch()
    next_year_s = time.time() + 365 * 86400
    os.utime(lock, (next_year_s, next_year_s))
    assert _scans(reclaimer)
    assert not lock.exists()


def test_a_hole_takes_no_room(open_: Open, tmp_path: Path) -> None:
    """Somebody makes a value of a terabyte that has no content; no other goes for it."""
    store = open_(f"size={40 * PAGE_BYTES}&free=1")
    assert set(store.put(make_items(range(20)))) == {OK}
    assert _scans(_reclaimer(store))
    sparse, *others = _values(tmp_path)
    os.truncate(sparse, 1 << 40)
    for path in others:  # it is the youngest
        os.utime(path, (time.time() - 600, time.time() - 600))
    assert sparse.stat().st_blocks * 512 <= 2 * PAGE_BYTES, "this file system makes no holes"
    assert _scans(_reclaimer(store))
    assert len(_values(tmp_path)) == 20
    sparse_bytes = sparse.stat().st_blocks * 512
    assert _usage(store) == (19 * PAGE_BYTES + sparse_bytes, 40 * PAGE_BYTES)


@contextlib.contextmanager
def _bound_by_permissions() -> Iterator[None]:
    """Files' permissions hold for this thread, and for those that it starts, if root runs them."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    fewer = type(before).from_buffer_copy(before)
    fewer[0] &= ~0b0110  # of those in effect: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def _shut_oldest(store: RemoteStore, folder: Path, num: int, mode: int) -> list[Path]:
    """Stores so many pages, which fit; the eight oldest lie in folders of a mode."""
    store.put(make_items(range(num)))
    assert _scans(_reclaimer(store))
    shut = [path.parent for path in _values(folder)[:8]]
    for number, path in enumerate(_values(folder)):
        at_s = time.time() - (7200 if number < 8 else 600)
        os.utime(path, (at_s, at_s))
    for each in shut:
        each.chmod(mode)
    return shut


def _wait_for_usage(store: RemoteStore, expected: Callable[[], tuple[int, int]]) -> None:
    """Looks again until it is; a put that was late notes what a look has counted already.

    A look that room is made behind may still remove something, so what is expected is asked anew.
    """
    for _ in range(20):
        if _usage(store) == expected():
            return
        assert _scans(_reclaimer(store))
    assert _usage(store) == expected()


@contextlib.contextmanager
def _with_shut(store: RemoteStore, folder: Path, num: int, mode: int) -> Iterator[list[Path]]:
    """`_shut_oldest`; their mode is as before at the end."""
    shut = _shut_oldest(store, folder, num, mode)
    try:
        yield shut
    finally:
        for each in shut:
            each.chmod(0o700)


@pytest.mark.parametrize("num_that_fit", [30, 60])
def test_what_cannot_be_removed_counts_and_the_rest_goes(
    open_: Open, tmp_path: Path, num_that_fit: int
) -> None:
    """Else a folder would grow by as much at each look, or take nothing more."""
    size = num_that_fit * PAGE_BYTES
    with _bound_by_permissions():
        store = open_(f"size={size}&free=1")
        with _with_shut(store, tmp_path, num_that_fit - 4, 0o500) as shut:
            for number in range(num_that_fit - 4, num_that_fit + 20):
                store.put(make_items(range(number, number + 1)))
                assert _scans(_reclaimer(store))
            assert set(store.put(make_items(range(100, 102)))) == {OK}
            assert all(list(each.iterdir()) for each in shut)
            assert _scans(_reclaimer(store))
            assert len(_values(tmp_path)) <= num_that_fit
            _wait_for_usage(store, lambda: (PAGE_BYTES * len(_values(tmp_path)), size))


@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_what_cannot_be_looked_at_is_passed_over_and_told_of_once(
    open_: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """One folder that fails keeps nobody from removing what is in the others."""
    size = 32 * PAGE_BYTES
    with _bound_by_permissions(), caplog.at_level(logging.WARNING):
        store = open_(f"size={size}&free=1")
        with _with_shut(store, tmp_path, 28, mode) as shut:
            assert _scans(_reclaimer(store))
            store.put(make_items(range(28, 52)))
            for _ in range(3):
                assert _scans(_reclaimer(store))

            def num_seen() -> int:
                return sum(path.parent not in shut for path in _values(tmp_path))

            _wait_for_usage(store, lambda: (PAGE_BYTES * num_seen(), size))
            assert 0 < num_seen() <= 32
    assert sum("looked through" in record.message for record in caplog.records) == 1


def test_a_system_out_of_threads_costs_the_calls_of_that_time_alone(open_: Open) -> None:
    store = open_(breaker=BreakerConfig(max_failures=1000))
    items = make_items(range(2))
    store.put(items)
    size = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        for _ in range(40):
            assert read(store, items) == [UNAVAILABLE] * 2
    finally:
        threading.stack_size(size)
    assert read(store, items) == [OK] * 2


def test_other_files_are_left_alone(open_: Open, tmp_path: Path) -> None:
    mine = tmp_path / "notes.txt"
    mine.write_bytes(bytes(10**6))
    os.utime(mine, (1.0, 1.0))
    store = open_(f"size={4 * PAGE_BYTES}&free=1")
    store.put(make_items(range(4)))
    store.put(make_items(range(4, 8)))
    assert _scans(_reclaimer(store))
    assert mine.exists()


def test_a_disk_tier_in_the_folder_keeps_every_page(open_: Open, tmp_path: Path) -> None:
    """It is refused at start; where two servers do it all the same, nothing is lost."""
    config = DiskConfig(tmp_path / "kv", 64 << 20, 0, segment_bytes=256 << 10)
    disk = DiskTier(config)
    disk.open_namespace(tier_pages.NAMESPACE, tier_pages.SLOT_BYTES, {})
    tier_pages.store(disk, range(8))
    segments = _values(tmp_path)
    assert segments
    store = open_(f"size={4 * PAGE_BYTES}&free=1")
    for path in segments:
        os.utime(path, (1.0, 1.0))
    strangers = [
        tmp_path / "hkv-1" / "notes.hkv",
        tmp_path / "hkv-1" / NAMESPACE.hex() / "ab" / "cd" / "notes.hkv",
        tmp_path / "other-1" / NAMESPACE.hex() / "ab" / "cd" / f"{'ab' * 32}.-.raw.hkv",
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10**6))
        os.utime(path, (1.0, 1.0))
    store.put(make_items(range(8)))
    assert _scans(_reclaimer(store))
    assert _reclaimer(store).num_removed > 0
    assert [path for path in [*segments, *strangers] if not path.exists()] == []
    disk.close()


def test_no_link_leads_out_of_the_folder(open_: Open, tmp_path: Path) -> None:
    away = tmp_path.parent / f"{tmp_path.name}-away"
    store = open_(f"size={4 * PAGE_BYTES}&free=1")
    items = make_items(range(6))
    store.put(items[:1])
    [known] = _values(tmp_path)
    # The folder of another page is a link, the file of the first one too, and their targets have
    # files that are named as ours are.
    page = items[1].key.page_hash.hex()
    there = away / page[2:4]
    there.mkdir(parents=True)
    bait = there / known.name.replace(items[0].key.page_hash.hex(), page)
    bait.write_bytes(known.read_bytes())
    os.utime(bait, (1.0, 1.0))
    (known.parents[2] / page[:2]).symlink_to(away)
    victim = away / "victim"
    victim.write_bytes(known.read_bytes())
    os.utime(victim, (1.0, 1.0))
    known.unlink()
    known.symlink_to(victim)
    assert OK not in read(store, items[:2])
    assert OK not in store.put(items[:2])
    store.delete([items[1].key])
    store.put(items[2:])
    assert _scans(_reclaimer(store))
    assert bait.read_bytes() == victim.read_bytes()
    assert (bait.stat().st_mtime, victim.stat().st_mtime) == (1.0, 1.0)
    assert sorted(path.name for path in there.iterdir()) == [bait.name]


def _modes(folder: Path) -> set[str]:
    kinds = {True: "folder", False: "file"}
    return {
        f"{kinds[path.is_dir()]} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in folder.rglob("*")
    }


def test_what_is_stored_is_for_one_user_or_a_group(open_: Open, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        open_("size=1GB&free=1").put([make_item(1), make_item(2, LONG_BYTES)])
        assert _modes(tmp_path) == {"folder 700", "file 600"}
        group = grp.getgrgid(os.getegid()).gr_name
        open_(f"size=1GB&free=1&prefix=team&group={group}").put([make_item(1)])
        assert _modes(tmp_path / "team-1") == {"folder 2770", "file 660"}
    finally:
        os.umask(old)


def test_what_an_earlier_release_left_open_is_closed(open_: Open, tmp_path: Path) -> None:
    (tmp_path / "hkv-1").mkdir()
    (tmp_path / "hkv-1").chmod(0o755)
    open_()
    assert stat.S_IMODE((tmp_path / "hkv-1").stat().st_mode) == 0o700


def test_a_folder_in_which_everybody_writes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hkv-1").symlink_to(tmp_path)
    with pytest.raises(TierConfigError, match="hkv-1 must be a folder"):
        open_store(f"file://{tmp_path}?size=1GB")
    (tmp_path / "hkv-1").unlink()
    tmp_path.chmod(0o777)
    with pytest.raises(TierConfigError, match=r"every user.*chmod o-w.*group=NAME"):
        open_store(f"file://{tmp_path}?size=1GB")
    tmp_path.chmod(0o1777)  # as /tmp, which has to stay so
    with pytest.raises(TierConfigError, match="name a folder in it") as caught:
        open_store(f"file://{tmp_path}?size=1GB")
    assert "chmod" not in str(caught.value)
    tmp_path.chmod(0o700)
    with pytest.raises(TierConfigError, match="group must be the name of a group"):
        open_store(f"file://{tmp_path}?size=1GB&group=no-such-group-here")


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
    assert heads(store, items) == outcomes
    assert sorted(o.value for o in store.put(items)) == ["kept", "ok", "ok"]
    for path in _values(tmp_path):
        os.utime(path, (old, old))
    assert _scans(_reclaimer(store))
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


def test_what_others_put_in_a_values_place_is_a_miss_alone(
    open_: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither hangs a thread, nor speaks against the folder, nor passes for what is stored."""
    store = open_()
    items, places = make_items(range(5)), []
    store.put(items)
    for item, make in zip(items[:3], (os.mkfifo, os.mkdir, _make_socket), strict=True):
        [path] = [p for p in _values(tmp_path) if item.key.page_hash.hex() in p.name]
        path.unlink()
        make(path)
        places.append(path)
    for _ in range(20):
        assert read(store, items) == [MISSING] * 3 + [OK] * 2
    assert heads(store, items) == [MISSING] * 3 + [OK] * 2
    assert store.usable
    assert store.put(items) == [UNAVAILABLE] * 3 + [KEPT] * 2
    assert store.usable
    (said,) = (record.message for record in caplog.records if "in the way" in record.message)
    assert f"{places[0].parent}/" in said


def _make_shut_folder(path: Path) -> None:
    path.mkdir(0o000)


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("/"), Path.touch, os.mkfifo, _make_shut_folder],
    ids=["link", "file", "pipe", "shut"],
)
@pytest.mark.parametrize("up", [1, 2, 3])
def test_what_others_put_in_a_folders_place_is_a_miss_alone(
    open_: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    up: int,
) -> None:
    """Else whoever may write there could have the store taken for one that fails."""
    blocked, other = make_item(1), make_item(2, namespace=OTHER_NAMESPACE)
    with _bound_by_permissions():
        store = open_()
        assert store.put([blocked]) == [OK]
        [value] = _values(tmp_path)
        place = value.parents[up - 1]
        place.rename(tmp_path / "away")
        make(place)
        for number in range(5):
            more = make_item(10 + number, namespace=OTHER_NAMESPACE)
            assert store.put([blocked, more]) == [UNAVAILABLE, OK]
            assert store.put([blocked]) == [UNAVAILABLE]
            assert read(store, [blocked]) == [MISSING]
            assert heads(store, [blocked]) == [MISSING]
            assert store.delete([blocked.key]) == 0
        assert store.usable
        assert store.put([other]) == [OK]
    said = [record.message for record in caplog.records if "in the way" in record.message]
    assert len(said) == 1
    assert f"{place} " in said[0]
    if make is _make_shut_folder:
        place.chmod(0o700)


def test_a_folder_in_a_values_place_can_be_deleted_as_little_as_stored(
    open_: Open, tmp_path: Path
) -> None:
    """A folder in the place of a record's later part: its first is not stored without it."""
    store = open_()
    whole, items = make_item(1, LONG_BYTES), make_items(range(2, 4))
    assert store.put([whole, *items]) == [OK] * 3
    for path in _values(tmp_path):
        if whole.key.page_hash.hex() in path.name:
            path.unlink()
            if "+" in path.name:
                path.mkdir()
    [path] = [path for path in _values(tmp_path) if items[0].key.page_hash.hex() in path.name]
    path.unlink()
    path.mkdir()
    more = make_item(9)
    for _ in range(5):
        assert store.put([whole, more])[0] is UNAVAILABLE
        assert store.delete([items[0].key]) == 0
        assert read(store, [whole, *items, more]) == [MISSING, MISSING, OK, OK]
    assert store.usable


def test_a_folder_in_the_locks_place_keeps_nobody_from_looking(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put([make_item(0)])
    reclaimer = _reclaimer(store)
    assert _scans(reclaimer)
    (top,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (top / LOCK_NAME / "more").mkdir(parents=True)
    with reclaimer._changed:
        num_whole = reclaimer.num_scans - reclaimer.num_passed_over
    assert _scans(reclaimer)
    with reclaimer._changed:
        assert reclaimer.num_scans - reclaimer.num_passed_over > num_whole


def _make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def test_a_read_that_hangs_costs_its_time_and_no_more(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_()
    items = make_items(range(3))
    store.put(items)
    [value] = [p for p in _values(tmp_path) if items[1].key.page_hash.hex() in p.name]
    value.unlink()
    hung = tmp_path / "hung"
    os.mkfifo(hung)  # to open it for reading waits for a writer, as a dead mount waits for ever
    read_value = FileEngine._read

    def read_slowly(self: FileEngine, name: str, offset: int, num_bytes: int) -> Any:
        if items[1].key.page_hash.hex() in name:
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(hung, os.O_RDONLY))
        return read_value(self, name, offset, num_bytes)

    ping, may_answer = FileEngine.ping, threading.Event()

    def ping_later(self: FileEngine, deadline: Any) -> None:
        assert may_answer.wait(WAIT_S)
        ping(self, deadline)

    monkeypatch.setattr(FileEngine, "_read", read_slowly)
    monkeypatch.setattr(FileEngine, "ping", ping_later)  # else the breaker closes at any moment
    try:
        assert read(store, items, timeout_s=5.0) == [OK, TIMEOUT, TIMEOUT]
        for _ in range(2):
            read(store, items, timeout_s=0.1)
        assert not store.usable
        assert read(store, items) == [UNAVAILABLE] * 3
        may_answer.set()
        assert store.wait_usable(WAIT_S)  # the folder as such answers
    finally:
        may_answer.set()
        writer = os.open(hung, os.O_RDWR)
        hung.unlink()
    os.close(writer)
    assert read(store, items) == [OK, MISSING, OK]
