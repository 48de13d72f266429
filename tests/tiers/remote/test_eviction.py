"""The policy `on_eviction`: what leaves DRAM goes to the shared store, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import ANY, Quality
from sglang_ext.tiers.records.record import RAW_CODEC
from sglang_ext.tiers.remote.base import RemoteKey
from sglang_ext.tiers.store import EVERY_PAGE, PageStore, PageStoreConfig, PutShare
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import WAIT_S, open_store, until
from tests.tiers.remote.test_pages import DIGEST, NONE, SLOT, fill, pages

pytestmark = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

SLOTS = 32
LOW_WATER = SLOTS // 8


class Host:
    """A page store that uploads on eviction."""

    def __init__(
        self, redis: RedisServer, disk: Path | None, call_s: float, share: PutShare
    ) -> None:
        self.remote = open_store(f"redis://127.0.0.1:{redis.port}", timeout_s=call_s)
        self.arena = HostArena(SLOTS, SLOT)
        tier = None
        if disk is not None:
            config = DiskConfig(disk, 64 << 20, 0, segment_bytes=256 << 10, direct_io="off")
            tier = DiskTier(config)
        config_of_store = PageStoreConfig(remote_policy="on_eviction", put_share=share)
        self.store = PageStore(
            self.arena, PageIndex(1024), tier, config_of_store, remote=self.remote
        )
        if tier is not None:
            self.store.connect(tier)
        self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)
        assert self.remote.wait_usable(WAIT_S)

    def save(self, hashes: np.ndarray, quality: int = 0) -> int:
        """Saves a page after the other, as prefills do; returns how many found room."""
        saved = 0
        for row in hashes:
            ticket = self.store.begin_save(
                self.space, row[None], NONE, np.full(1, quality, np.uint8)
            )
            for slot in ticket.slots.tolist():
                fill(self.arena.slots[slot], row.tobytes(), self.space, quality)
            self.store.finish_save(ticket, ok=True)
            saved += len(ticket.slots)
        return saved

    def count(self, name: str) -> int:
        return self.store.stats().get(name, 0)

    def sent(self, num: int) -> bool:
        """Waits until so many pages were sent, and are not pinned any more."""
        return until(lambda: self.offered() >= num and not self.arena._pins.any())

    def offered(self) -> int:
        return self.count("remote_written_pages") + self.count("remote_duplicate_pages")

    def has(self, hashes: np.ndarray) -> int:
        """How many of the pages the shared store has, with the right content."""
        remote_lookups = [RemoteLookup(self.space, row[None], 0, ANY) for row in hashes]
        for remote_lookup in remote_lookups:
            assert self.store.ask_remote(remote_lookup)
        assert until(lambda: all(remote_lookup.done for remote_lookup in remote_lookups))
        return sum(len(remote_lookup.sizes) for remote_lookup in remote_lookups)


Make = Callable[..., Host]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def make(redis: RedisServer) -> Iterator[Make]:
    redis.call("FLUSHALL")
    made: list[Host] = []

    def build(
        disk: Path | None = None, call_s: float = WAIT_S, share: PutShare = EVERY_PAGE
    ) -> Host:
        made.append(Host(redis, disk, call_s, share))
        return made[-1]

    yield build
    for host in made:
        host.store.close(5)
        host.store.check()
        assert not host.arena._pins.any()


def test_nothing_is_uploaded_while_there_is_room(make: Make) -> None:
    host = make()
    host.save(pages("a", SLOTS - LOW_WATER))
    time.sleep(0.2)
    assert host.offered() == 0
    assert host.count("remote_upload_dropped_pages") == 0


def test_the_least_recent_pages_are_sent_before_they_leave(make: Make) -> None:
    host = make()
    first = pages("a", SLOTS)
    host.save(first)
    assert host.sent(LOW_WATER)
    assert host.has(first[:LOW_WATER]) == LOW_WATER
    assert host.count("evicted_pages") == 0
    for number in range(2 * SLOTS):  # slower than the thread sends
        host.save(pages(f"b{number}", 1))
        assert host.sent(LOW_WATER + number + 1)
    assert host.count("evicted_pages") == 2 * SLOTS
    assert host.count("remote_upload_dropped_pages") == 0
    assert host.has(first) == SLOTS
    again = make()
    sizes = np.full(SLOTS // 2, SLOT, np.int64)
    plan = again.store.plan(again.space, first[: SLOTS // 2], remote_sizes=sizes)
    assert plan is not None
    assert until(lambda: plan.done)
    ticket = again.store.pin_ready(again.space, first[: SLOTS // 2])
    assert ticket is not None
    again.store.release(ticket.slots)
    again.store.cancel_plan(plan)


def test_what_left_unsent_is_sent_from_disk(make: Make, redis: RedisServer, tmp_path: Path) -> None:
    host = make(tmp_path / "disk", call_s=300.0)
    hashes = pages("a", 3 * SLOTS)
    redis.process.freeze()
    try:
        for at in range(0, len(hashes), 8):
            host.save(hashes[at : at + 8])
            assert until(lambda: host.count("written_pages") == at + 8)  # noqa: B023
        # All found room though the store took nothing; that it may still take is remembered.
        assert host.count("saved_pages") == len(hashes)
        assert host.count("evicted_pages") >= 2 * SLOTS
    finally:
        redis.process.thaw()
    assert until(lambda: host.count("remote_sent_from_disk_pages") >= 2 * SLOTS - LOW_WATER)
    assert host.has(hashes[: 2 * SLOTS]) == 2 * SLOTS
    assert host.count("remote_upload_dropped_pages") == 0


def test_a_store_that_is_down_delays_no_save_and_pages_are_counted(
    make: Make, redis: RedisServer
) -> None:
    host = make()
    redis.kill()
    try:
        hashes = pages("a", 4 * SLOTS)
        while host.remote.usable:  # until the breaker is open
            host.remote.head([])
            assert host.save(pages(f"x{time.monotonic()}", 1)) == 1
        assert host.save(hashes) == len(hashes)
        assert host.offered() == 0
        assert host.count("remote_upload_dropped_pages") >= 3 * SLOTS
    finally:
        redis.start()


def test_a_better_page_is_sent_in_its_turn(make: Make) -> None:
    host = make()
    page = pages("a", 1)
    host.save(page, Quality.LOSSY)
    host.save(pages("b", SLOTS - 1))
    assert host.sent(LOW_WATER)
    assert host.has(page) == 1
    host.save(page)  # takes the other's place
    assert host.count("replaced_pages") == 1
    sent = LOW_WATER + 1  # or one more, if the slot of the other was still used at a look
    assert host.sent(sent)
    for number in range(2 * SLOTS):
        host.save(pages(f"d{number}", 1))
        assert host.sent(sent + number + 1)
    exact = RemoteLookup(host.space, page, 0, Quality.EXACT)
    assert host.store.ask_remote(exact)
    assert until(lambda: exact.done)
    assert len(exact.sizes) == 1


def test_pages_of_another_share_leave_unsent_and_nothing_is_dropped_of_them(make: Make) -> None:
    share = PutShare(1, 2)
    host = make(share=share)
    hashes = pages("a", 4 * SLOTS)
    mine = share.has(hashes)
    for number, row in enumerate(hashes):
        host.save(row[None])
        num_due = max(0, number + 1 - (SLOTS - LOW_WATER))
        due = mine[:num_due]
        assert until(lambda: host.offered() >= due.sum() and not host.arena._pins.any())  # noqa: B023
        assert until(lambda: host.count("remote_left_pages") >= (~due).sum())  # noqa: B023
    assert host.count("evicted_pages") >= 3 * SLOTS
    assert host.count("remote_upload_dropped_pages") == 0
    assert host.has(hashes[~mine]) == 0
    assert host.has(hashes[: 3 * SLOTS][mine[: 3 * SLOTS]]) == mine[: 3 * SLOTS].sum()


def test_a_store_that_is_down_costs_each_share_its_own_pages(
    make: Make, redis: RedisServer
) -> None:
    share = PutShare(0, 2)
    host = make(share=share)
    redis.kill()
    try:
        while host.remote.usable:
            host.remote.head([RemoteKey(DIGEST, bytes(32), b"", RAW_CODEC)])
        hashes = pages("a", 3 * SLOTS)
        host.save(hashes)
        left = hashes[: 2 * SLOTS]
        assert host.count("evicted_pages") == len(left)
        assert host.count("remote_upload_dropped_pages") == share.has(left).sum()
    finally:
        redis.start()
