"""Shares of tenants in a store: kept in a folder, a bound on uploads where the store decides."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.remote import PutItem, RemoteStore
from sglang_ext.tiers.remote.base import Outcome, Usage
from sglang_ext.tiers.remote.engines import file_marks
from sglang_ext.tiers.remote.engines.file_marks import FileMarks, renew
from sglang_ext.tiers.remote.engines.file_reclaim import LOCK_NAME
from sglang_ext.tiers.remote.shares.allowance import TURNOVER_S, UploadAllowance
from sglang_ext.tiers.remote.shares.division import Division
from testkit.remote.mooncake_server import MooncakeServer, mooncake_missing
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import (
    KEPT,
    LONG_BYTES,
    OK,
    PAGE_BYTES,
    WAIT_S,
    heads,
    make_item,
    make_items,
    open_store,
    opened_folder,
    read,
    until,
)

OVER = Outcome.OVER_SHARE
LABELS = tuple((hashlib.sha256(name).digest(),) for name in (b"acme", b"web"))
DIVISION = Division((0.5, 0.25), LABELS)  # and all others a quarter
OTHERS, ACME, WEB = range(3)
PAGES = 40  # fit in the folder
KEPT_PAGES = 36  # after a look that found more
Open = Callable[..., RemoteStore]


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    with opened_folder(
        tmp_path, f"size={PAGES * PAGE_BYTES}&free=1", division=DIVISION
    ) as open_one:
        yield open_one


def of_tenant(tenant: int, numbers: range) -> list[PutItem]:
    return [item._replace(tenant=tenant) for item in make_items(numbers)]


def look(store: RemoteStore) -> None:
    """Waits until the folder was looked through from begin to end, and not left to another."""
    reclaimer: Any = store._engine.reclaimer  # type: ignore[attr-defined]

    def num_whole() -> int:
        return int(reclaimer.num_scans - reclaimer.num_passed_over)

    with reclaimer._changed:
        target = num_whole() + 1 + reclaimer._is_scanning
        while num_whole() < target:
            reclaimer._is_due = True
            reclaimer._changed.notify_all()
            assert reclaimer._changed.wait(WAIT_S)


@contextlib.contextmanager
def unseen(folder: Path) -> Iterator[None]:
    """Nobody looks through the folder meanwhile: how much is removed hangs on no thread's pace."""
    lock = folder / "hkv-1" / LOCK_NAME

    def took_it() -> bool:
        with contextlib.suppress(FileExistsError):
            lock.touch(exist_ok=False)
            return True
        return False

    assert until(took_it)
    yield
    lock.unlink()


def age(folder: Path, by_s: int) -> None:
    """All files become older, by whole seconds."""
    for path in folder.rglob("*.hkv"):
        with contextlib.suppress(FileNotFoundError):  # a look may be at work
            at_ns = path.stat().st_mtime_ns - by_s * 10**9
            os.utime(path, ns=(at_ns, at_ns))


def num_there(store: RemoteStore, numbers: range) -> int:
    return heads(store, make_items(numbers)).count(OK)


def test_who_is_above_its_share_gives_first_however_young(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put(of_tenant(ACME, range(18)))  # half of what stays: its own
    age(tmp_path, 7200)
    with unseen(tmp_path):
        store.put(of_tenant(OTHERS, range(18, 38)))
        age(tmp_path, 600)
        store.put(of_tenant(WEB, range(38, 42)))
    look(store)
    assert num_there(store, range(18)) == 18
    assert num_there(store, range(38, 42)) == 4
    assert num_there(store, range(18, 38)) == KEPT_PAGES - 22
    assert store.used_by_tenant() == [14 * PAGE_BYTES, 18 * PAGE_BYTES, 4 * PAGE_BYTES]


def test_what_others_leave_free_is_lent(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put(of_tenant(WEB, range(38)))  # nearly all of it, by right a quarter
    look(store)
    assert num_there(store, range(38)) == 38
    age(tmp_path, 3600)
    with unseen(tmp_path):
        store.put(of_tenant(ACME, range(38, 43)))
    look(store)
    assert num_there(store, range(38, 43)) == 5
    assert num_there(store, range(38)) == KEPT_PAGES - 5


def test_the_oldest_of_all_above_their_shares_go(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put(of_tenant(WEB, range(12)))
    age(tmp_path, 600)
    with unseen(tmp_path):
        store.put(of_tenant(OTHERS, range(12, 40)))
        age(tmp_path, 600)
        store.put(of_tenant(WEB, range(40, 42)))
    look(store)
    # Of 42, 6 go: WEB has 5 above its share of 36, and all of them are the oldest.
    assert num_there(store, range(12)) == 7
    assert num_there(store, range(12, 40)) == 27
    assert num_there(store, range(40, 42)) == 2


def test_servers_see_each_others_marks_and_number_them_as_they_like(
    open_: Open, tmp_path: Path
) -> None:
    one = open_()
    one.put([*of_tenant(ACME, range(4)), make_item(4, LONG_BYTES)._replace(tenant=WEB)])
    other = open_(division=Division((0.3, 0.3, 0.3), (LABELS[1], (b"new" * 8,), LABELS[0])))
    look(other)
    assert other.used_by_tenant() == [0, LONG_BYTES, 0, 4 * PAGE_BYTES]
    rotated = open_(division=Division((0.5,), ((b"new key " * 4, *LABELS[0]),)))
    look(rotated)
    assert rotated.used_by_tenant() == [LONG_BYTES, 4 * PAGE_BYTES]
    plain = open_(division=None, ttl_s=3600.0)
    assert plain.used_by_tenant() == []
    age(tmp_path, 1200)
    assert read(plain, make_items(range(4))) == [OK] * 4  # young again by a server without shares
    assert plain.put([make_item(4, LONG_BYTES)]) == [KEPT]
    plain._renew()
    assert all(time.time() - path.stat().st_mtime < 600 for path in tmp_path.rglob("*.hkv"))
    look(one)
    assert one.used_by_tenant() == [0, 4 * PAGE_BYTES, LONG_BYTES]


def test_a_mark_says_nothing_to_who_reads_names_and_bytes(open_: Open, tmp_path: Path) -> None:
    open_().put(of_tenant(ACME, range(3)))
    open_(division=None, prefix="plain").put(make_items(range(3)))
    marked, plain = (
        sorted((p.name, p.read_bytes()) for p in (tmp_path / top).rglob("*.hkv"))
        for top in ("hkv-1", "plain-1")
    )
    assert marked == plain


def test_any_number_of_files_of_any_tenant(open_: Open, tmp_path: Path) -> None:
    """Against the rule itself: what is within its share stays, and what stays is in bounds."""
    rng = random.Random(5)
    store = open_()
    for turn in range(6):
        first = turn * 100
        for tenant in rng.sample(range(3), 3):
            num = rng.choice([0, 2, 9, 20, 44])
            store.put(of_tenant(tenant, range(first + 100 * tenant, first + 100 * tenant + num)))
            age(tmp_path, rng.choice([0, 90, 1000]))
        look(store)
        before = store.used_by_tenant()
        store.put(of_tenant(OTHERS, range(9000 + turn, 9001 + turn)))
        look(store)
        assert sum(store.used_by_tenant()) <= PAGES * PAGE_BYTES
        for tenant, (had, has) in enumerate(zip(before, store.used_by_tenant(), strict=True)):
            by_right = DIVISION.rights[tenant] * KEPT_PAGES * PAGE_BYTES
            assert has >= min(had, by_right - PAGE_BYTES), (turn, tenant)


def test_a_file_system_that_keeps_no_fractions_is_said_once(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_marks, "_set", lambda file, *_: os.utime(file, (1.0, 1.0)))
    store = open_()
    store.put(of_tenant(ACME, range(2)))
    look(store)
    look(store)
    assert caplog.text.count(f"the file system of {tmp_path} keeps no fractions of seconds") == 1
    assert read(store, make_items(range(2))) == [OK] * 2


def test_a_file_system_that_takes_no_times_keeps_its_bound(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    utime = os.utime

    def refuse(*args: Any, **how: Any) -> None:
        if how.get("ns") is not None:
            raise PermissionError
        utime(*args, **how)

    monkeypatch.setattr(os, "utime", refuse)
    store = open_()
    assert store.put(of_tenant(ACME, range(1))) == [OK]
    with unseen(tmp_path):
        assert store.put(of_tenant(ACME, range(1, PAGES))) == [OK] * (PAGES - 1)
        assert store.put(of_tenant(WEB, range(PAGES, PAGES + 3))) == [OK] * 3
    look(store)
    assert sum(store.used_by_tenant()) <= PAGES * PAGE_BYTES
    assert until(lambda: not list(tmp_path.rglob(LOCK_NAME)))
    assert "keeps no fractions of seconds" in caplog.text


def test_who_may_not_set_a_time_makes_a_file_young_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that a group shares only a file's owner says which time it is."""
    path = tmp_path / "value"
    path.write_bytes(b"kv")
    marks = FileMarks(DIVISION)
    with path.open("rb") as file:
        marks.write(file.fileno(), ACME)
    assert marks.tenant_of(path.stat()) == ACME
    utime = os.utime

    def refuse(*args: Any, **how: Any) -> None:
        if how.get("ns") is not None:
            raise PermissionError
        utime(*args, **how)

    old_s = time.time() - 5000
    age(tmp_path, 5000)
    os.rename(path, tmp_path / "value.hkv")
    age(tmp_path, 5000)
    monkeypatch.setattr(os, "utime", refuse)
    folder = os.open(tmp_path, os.O_RDONLY)
    renew("value.hkv", (tmp_path / "value.hkv").stat(), folder)
    os.close(folder)
    assert (tmp_path / "value.hkv").stat().st_mtime > old_s + 1000


# ---- where the store decides ----


class Clock:
    """A time that is set."""

    now_s = 1e5

    def __call__(self) -> float:
        return self.now_s


def test_a_full_store_takes_a_share_of_its_size_in_an_hour() -> None:
    clock = Clock()
    allowance = UploadAllowance(Division((0.5, 0.25), LABELS, num_putters=2), clock)
    assert all(allowance.admits(WEB, 10**9) for _ in range(100)), "nothing is known of it yet"
    allowance.told(Usage(899, 1000))
    assert all(allowance.admits(WEB, 10**9) for _ in range(100)), "it has room"
    allowance.told(Usage(900, 1000))
    # Of this process half of a quarter in an hour, and half of that at once; the last value may be
    # longer than what is left.
    assert [allowance.admits(WEB, 50) for _ in range(4)] == [True, True, False, False]
    assert [allowance.admits(ACME, 100) for _ in range(3)] == [True, True, False]
    clock.now_s += TURNOVER_S
    assert [allowance.admits(WEB, 50) for _ in range(2)] == [True, False]
    allowance.give_back(WEB, 50)
    assert [allowance.admits(WEB, 50) for _ in range(2)] == [True, False]
    clock.now_s += 100 * TURNOVER_S  # what was not used does not add up
    allowance.told(Usage(990, 1000))
    assert [allowance.admits(WEB, 50) for _ in range(4)] == [True, True, False, False]
    allowance.told(Usage(10, 1000))
    assert allowance.admits(WEB, 10**9)
    allowance.told(Usage(990, 1000))
    assert not allowance.admits(WEB, 1), "that there was room for a while fills nobody's share"
    allowance.told(Usage(990, 0))
    assert allowance.admits(WEB, 10**9), "without a bound it drops nothing"


def test_who_has_no_share_at_all_puts_nothing_into_a_full_store() -> None:
    allowance = UploadAllowance(Division((0.5, 0.5), LABELS), Clock())
    assert allowance.admits(OTHERS, 1)
    allowance.told(Usage(1000, 1000))
    assert not allowance.admits(OTHERS, 1)


@pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")
def test_a_flood_is_held_to_its_share_of_a_full_redis(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes = 100_000
    with RedisServer(tmp_path, max_memory="24mb", policy="allkeys-lru") as redis:
        store = open_store(f"redis://127.0.0.1:{redis.port}", division=DIVISION)
        try:
            assert store.wait_usable(WAIT_S)
            assert "at most its share of the store's size in an hour" in caplog.text
            mine = [item._replace(tenant=ACME) for item in make_items(range(60), num_bytes)]
            assert store.put(mine) == [OK] * 60
            clock = Clock()  # that stands still: nobody gets more by the time that this takes
            store._allowance._now_s = clock  # type: ignore[union-attr]
            flood = [item._replace(tenant=WEB) for item in make_items(range(100, 800), num_bytes)]
            outcomes: list[Outcome] = []
            for first in range(0, len(flood), 10):
                store._allowance._asked_s = clock.now_s - 100  # type: ignore[union-attr]
                outcomes += store.put(flood[first : first + 10])
            num_stored = outcomes.count(OK)
            # What the store had room for, and half of a quarter of it, of 24 MiB in all.
            assert 120 < num_stored < 210
            assert outcomes.count(OVER) == len(flood) - num_stored
            assert store.stats()["put_over_share"] == outcomes.count(OVER)
            again = make_items(range(900, 910), num_bytes)
            assert store.put([item._replace(tenant=ACME) for item in again]) == [OK] * 10
            assert set(store.put(flood)) == {KEPT, OVER}, "what is there costs nobody his share"
        finally:
            store.close()


@pytest.mark.skipif(bool(mooncake_missing()), reason=mooncake_missing())
def test_a_store_that_says_nothing_of_its_size_is_not_divided(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with MooncakeServer(tmp_path) as server:
        store = open_store(server.url, division=DIVISION)
        try:
            assert "does not say how full it is: shares of tenants do not hold" in caplog.text
            assert store.wait_usable(WAIT_S)
            assert store.put(of_tenant(WEB, range(10))) == [OK] * 10
        finally:
            store.close()


def test_names_are_hidden_and_shares_hold(open_: Open) -> None:
    store = open_(protect=("encrypt",))
    store.put(of_tenant(ACME, range(10)))
    assert until(lambda: store.used_by_tenant() == [0, 10 * PAGE_BYTES, 0])
