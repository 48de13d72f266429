"""What goes first from a remote store: what is over, and what nobody used; and who decides that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.remote import RemoteStore
from sglang_ext.tiers.remote.keeping.retention import last_use_s, over_age_s, over_life_s
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from sglang_ext.tiers.store.remote.upload_queue import remote_key
from sglang_ext.tiers.store.types import SENT
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.protection_cases import KEY, OTHER_KEY
from tests.tiers.remote.remote_cases import (
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
from tests.tiers.remote.test_pages import DIGEST, NONE, SLOT, fill, pages
from tests.tiers.remote.test_tenant_shares import (
    ACME,
    DIVISION,
    KEPT_PAGES,
    PAGES,
    WEB,
    age,
    look,
    num_there,
    of_tenant,
    unseen,
)

Open = Callable[..., RemoteStore]
SLOTS = 32
SIZE = f"size={PAGES * PAGE_BYTES}&free=1"


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    with opened_folder(tmp_path, SIZE) as open_one:
        yield open_one


def let_go(store: RemoteStore, numbers: range) -> None:
    store.let_go([item.key for item in make_items(numbers)], PAGE_BYTES)


def test_what_is_over_goes_before_what_is_older(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put(make_items(range(20)))
    with unseen(tmp_path):
        age(tmp_path, 3600)
        store.put(make_items(range(20, 42)))
        let_go(store, range(30, 40))
        assert num_there(store, range(36, 40)) == 4, "until room is needed"
        assert read(store, make_items(range(36, 40))) == [OK] * 4, "and a use makes them young"
    look(store)
    assert num_there(store, range(30)) == 30
    assert num_there(store, range(30, 36)) == 6 - (42 - KEPT_PAGES)
    assert num_there(store, range(36, 42)) == 6


def test_a_tenant_within_its_share_keeps_what_is_over(open_: Open, tmp_path: Path) -> None:
    store = open_(division=DIVISION)
    store.put(of_tenant(ACME, range(18)))  # its own half
    with unseen(tmp_path):
        let_go(store, range(18))
        store.put(of_tenant(WEB, range(18, 42)))
    look(store)
    assert num_there(store, range(18)) == 18
    assert store.used_by_tenant() == [0, 18 * PAGE_BYTES, 18 * PAGE_BYTES]


def test_all_parts_of_what_is_over_go_first_and_within_their_life(
    open_: Open, tmp_path: Path
) -> None:
    store = open_(f"{SIZE}&ttl=1h", max_calls=8)
    long, other = make_item(1, LONG_BYTES), make_item(2)
    store.put([long, other])
    store.let_go([long.key], LONG_BYTES)
    ages = sorted(time.time() - path.stat().st_mtime for path in tmp_path.rglob("*.hkv"))
    assert ages[0] < 600
    assert all(1800 <= each < 2400 for each in ages[1:])
    assert heads(store, [long, other]) == [OK, OK]


def test_a_time_of_the_future_keeps_nothing(open_: Open, tmp_path: Path) -> None:
    """A peer that sets its files' times ahead had them for good, against everybody's."""
    store = open_(f"{SIZE}&ttl=7d")
    store.put(make_items(range(10)))
    with unseen(tmp_path):
        for path in tmp_path.rglob("*.hkv"):
            os.utime(path, (4e9, 4e9))
        store.put(make_items(range(10, 42)))
        assert read(store, make_items(range(4))) == [OK] * 4
    look(store)
    assert num_there(store, range(4, 10)) == 0
    assert num_there(store, range(4)) == 4, "what somebody found is young"
    assert num_there(store, range(10, 42)) == 42 - 10


def test_a_server_whose_clock_is_behind_ends_no_lives(open_: Open, tmp_path: Path) -> None:
    """To it all is of the future: its `ttl` would remove the whole store at the first look."""
    store = open_(f"{SIZE}&ttl=7d")
    store.put(make_items(range(10)))
    age(tmp_path, -86_400)
    look(store)
    assert len(list(tmp_path.rglob("*.hkv"))) == 10


def test_a_read_makes_no_file_older(open_: Open, tmp_path: Path) -> None:
    store = open_()
    store.put(make_items(range(1)))
    age(tmp_path, -1800)  # by a clock that is behind by half an hour
    (path,) = tmp_path.rglob("*.hkv")
    before = path.stat().st_mtime
    assert read(store, make_items(range(1))) == [OK]
    assert path.stat().st_mtime == before


def test_hidden_names_are_let_go_under_every_key(open_: Open, tmp_path: Path) -> None:
    for key, number in ((KEY, 0), (OTHER_KEY, 1)):
        open_(protect=("encrypt", key)).put(make_items(range(number, number + 1)))
    store = open_(protect=("encrypt", KEY, OTHER_KEY))
    assert store.let_go([item.key for item in make_items(range(2))], PAGE_BYTES)
    ages = [time.time() - path.stat().st_mtime for path in tmp_path.rglob("*.hkv")]
    assert [each > 80_000 for each in ages] == [True] * 2


def test_a_store_that_is_away_has_let_nothing_go(open_: Open) -> None:
    store = open_()
    keys = [item.key for item in make_items(range(1))]
    assert store.let_go(keys, PAGE_BYTES)
    store.close()
    assert not store.let_go(keys, PAGE_BYTES)


def test_times_are_taken_as_they_can_be_true() -> None:
    assert last_use_s(500.0, 1000.0) == 500.0
    assert last_use_s(1300.0, 1000.0) == 1000.0, "clocks differ by some minutes"
    assert last_use_s(1e9, 1000.0) == 0.0
    assert over_age_s(0.0) == 86_400.0
    assert over_age_s(100.0) == 50.0, "not over its life at once"
    assert (over_life_s(60.0), over_life_s(1e6)) == (30.0, 3600.0), "no short life anew"


# ---- page stores ----


class Host:
    """A page store that looks ahead, beside a shared one."""

    def __init__(self, url: str, policy: str) -> None:
        self.remote = open_store(url)
        self.arena = HostArena(SLOTS, SLOT)
        config = PageStoreConfig(placement=PolicyConfig(), remote_policy=policy)
        self.store = PageStore(self.arena, PageIndex(1024), None, config, remote=self.remote)
        self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)
        assert self.remote.wait_usable(WAIT_S)

    def serve(self, hashes: np.ndarray, *, ends: bool = False) -> None:
        """A request computes pages behind what is there, and says whether more follow."""
        ticket = self.store.begin_save(self.space, hashes, NONE)
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            fill(self.arena.slots[slot], hashes[page].tobytes(), self.space, 0)
        self.store.finish_save(ticket, ok=True)
        assert self.store.lookahead is not None
        self.store.lookahead.used(self.space, hashes, None)
        if ends:
            self.store.lookahead.hint(self.space, hashes, owner=1, returns_in_s=None)

    def count(self, name: str) -> int:
        return self.store.stats().get(name, 0)

    def rests(self) -> bool:
        """Whether what would leave next was sent, or is not to be."""
        table, room = self.store._books.table, self.store._books.room
        with table.lock:
            rows = room.next_to_leave(max(0, SLOTS // 8 - self.arena.num_free))
            done = (table.index.flags[rows] & SENT) != 0
            done |= table.order.are_over(rows)
            return bool(done.all()) and not self.arena._pins.any()

    def has(self, hashes: np.ndarray) -> int:
        keys = [remote_key(self.space, row.tobytes()) for row in hashes]
        return sum(head.outcome is OK for head in self.remote.head(keys))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def build(url: str = f"file://{tmp_path}?size=1GB&free=1", policy: str = "all") -> Host:
        made.append(Host(url, policy))
        return made[-1]

    yield build
    for each in made:
        each.store.close(5)
        each.store.check()


def test_what_is_over_is_not_sent_as_it_leaves(host: Callable[..., Host]) -> None:
    one = host(policy="on_eviction")
    over, wanted = pages("over", 8), pages("wanted", 8)
    one.serve(over, ends=True)
    one.serve(wanted)
    for number in range(16):
        one.serve(pages(f"more{number}", 4))
        # Room is made of pages that were sent: what still has to be is on its way.
        assert until(one.rests)
    assert until(lambda: one.has(wanted) == 8)
    assert one.has(over) == 0
    assert one.count("remote_spared_pages") == 8
    assert one.count("remote_upload_dropped_pages") == 0


def test_what_is_used_after_it_was_over_is_sent(host: Callable[..., Host]) -> None:
    one = host(policy="on_eviction")
    back = pages("over", 8)
    one.serve(back, ends=True)
    one.serve(back)  # the client was wrong
    for number in range(16):
        one.serve(pages(f"more{number}", 4))
        assert until(one.rests)
    assert one.has(back) == 8
    assert one.count("remote_spared_pages") == 0


def test_what_is_over_takes_no_room_of_uploads(host: Callable[..., Host]) -> None:
    one = host()
    uploads: Any = one.store._remote.uploads  # type: ignore[union-attr]
    with one.store._books.table.lock:  # the thread that uploads waits for it
        for _ in range(2000):
            uploads.over(one.space, pages("over", 1))
        for _ in range(256):
            uploads.saved(one.space, pages("saved", 1))
    assert until(lambda: uploads.num_open == 0)
    assert one.count("remote_let_go_pages") < 2000
    assert one.count("remote_upload_dropped_pages") == 0


def test_what_was_sent_goes_first_once_it_is_over(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    one, two = host(), host()
    one.serve(pages("goes on", 4))
    one.serve(pages("over", 8), ends=True)
    assert until(lambda: one.count("remote_let_go_pages") == 8)
    ages = sorted(time.time() - path.stat().st_mtime for path in tmp_path.rglob("*.hkv"))
    assert [each > 80_000 for each in ages] == [False] * 4 + [True] * 8
    assert two.has(pages("over", 8)) == 8
    ages = [time.time() - path.stat().st_mtime for path in tmp_path.rglob("*.hkv")]
    assert max(ages) < 600, "another server asked for it"


@pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")
def test_in_redis_what_is_over_lives_shorter_where_values_have_a_life(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        url = f"redis://127.0.0.1:{redis.port}"
        one, plain = host(f"{url}?ttl=7d"), host(f"{url}?prefix=plain")
        for each in (one, plain):
            each.serve(pages("goes on", 4))
            each.serve(pages("over", 8), ends=True)
            assert until(lambda: each.count("remote_written_pages") == 12)  # noqa: B023
        assert until(lambda: one.count("remote_let_go_pages") == 8)

        def lives(pattern: str) -> list[int]:
            keys = redis.call("KEYS", pattern)
            assert isinstance(keys, list)
            return sorted(int(redis.call("PTTL", key)) for key in keys)  # type: ignore[arg-type]

        assert [each <= 3_600_000 for each in lives("hkv:*")] == [True] * 8 + [False] * 4
        assert lives("plain:*") == [-1] * 12, "nothing would renew them"
