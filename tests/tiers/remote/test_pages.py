"""Two page stores over one shared store: what one saved, the other finds."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import ANY, Quality
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.store import EVERY_PAGE, KeySpace, PageStore, PageStoreConfig, Plan, PutShare
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import WAIT_S, open_store, until

pytestmark = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

SLOT = 8192
DIGEST = hashlib.sha256(b"namespace").digest()
OTHER = hashlib.sha256(b"other").digest()
NONE = np.empty((0, 32), np.uint8)


class Host:
    """A server's page store, DRAM and perhaps a disk, with the shared store."""

    def __init__(
        self, url: str, *, slots: int = 96, digest: bytes = DIGEST, policy: str,
        share: PutShare = EVERY_PAGE, disk: Path | None = None,
    ) -> None:  # fmt: skip
        self.arena = HostArena(slots, SLOT)
        self.remote = open_store(url)
        tier = None if disk is None else DiskTier(DiskConfig(disk, 64 << 20, 0))
        config = PageStoreConfig("write_through", remote_policy=policy, put_share=share)
        self.store = PageStore(self.arena, PageIndex(256), tier, config, remote=self.remote)
        if tier is not None:
            self.store.connect(tier)
        self.store.open_namespace(digest, {})
        self.space = self.store.space(digest)
        assert self.remote.wait_usable(WAIT_S)

    def save(self, hashes: np.ndarray, quality: int = 0) -> None:
        qualities = np.full(len(hashes), quality, np.uint8)
        ticket = self.store.begin_save(self.space, hashes, NONE, qualities)
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            fill(self.arena.slots[slot], hashes[page].tobytes(), self.space, quality)
        self.store.finish_save(ticket, ok=True)

    def count(self, name: str) -> int:
        return self.store.stats().get(name, 0)

    def uploaded(self, num: int) -> bool:
        return until(lambda: self.count("remote_written_pages") >= num)

    def sizes(self, hashes: np.ndarray, max_quality: int = ANY) -> np.ndarray:
        """Bytes of the pages that the shared store says it has; 0 for those after a gap."""
        remote_lookup = RemoteLookup(self.space, hashes, 0, max_quality)
        found = np.zeros(len(hashes), np.int64)
        if self.store.ask_remote(remote_lookup):
            assert until(lambda: remote_lookup.done)
            found[: len(remote_lookup.sizes)] = remote_lookup.sizes
        return found

    def begin_plan(
        self, hashes: np.ndarray, max_quality: int = ANY, priority: int = 0
    ) -> Plan | None:
        """Asks for the pages that are not here, and begins to fetch them."""
        num_here = self.store.locate_prefix(self.space, hashes, max_quality).here
        sizes = np.zeros(len(hashes), np.int64)
        sizes[num_here:] = self.sizes(hashes[num_here:], max_quality)
        return self.store.plan(self.space, hashes, max_quality, priority, remote_sizes=sizes)

    def plan(self, hashes: np.ndarray, **how: Any) -> Plan | None:
        plan = self.begin_plan(hashes, **how)
        if plan is not None:
            assert until(lambda: plan.done)
            self.store.cancel_plan(plan)
        return plan

    def check(self, hashes: np.ndarray) -> None:
        """Fails unless the pages are ready and right."""
        ticket = self.store.pin_ready(self.space, hashes)
        assert ticket is not None
        for row, slot in zip(hashes, ticket.slots.tolist(), strict=True):
            assert self.arena.slots[slot][512:].tobytes() == content(row.tobytes(), self.space)
        self.store.release(ticket.slots)

    def ready(self, hashes: np.ndarray) -> int:
        return self.store.ready_prefix(self.space, hashes)


def content(page_hash: bytes, space: KeySpace) -> bytes:
    return hashlib.shake_128(page_hash + space.digest + space.lora).digest(SLOT - 512)


def fill(slot: np.ndarray, page_hash: bytes, space: KeySpace, quality: int) -> None:
    meta = RecordMeta(page_hash, space.digest, space.lora, 0, 64, "pre", quality=int(quality))
    write_meta(slot, meta, SLOT - 512)
    slot[512:] = np.frombuffer(content(page_hash, space), np.uint8)


def pages(name: str, count: int) -> np.ndarray:
    rows = [hashlib.sha256(f"{name}{n}".encode()).digest() for n in range(count)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)


Make = Callable[..., Host]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture
def make(server: RedisServer) -> Iterator[Make]:
    if not server.process.is_running:
        server.start()
    server.call("FLUSHALL")
    made: list[Host] = []

    def build(policy: str = "all", **settings: Any) -> Host:
        made.append(Host(f"redis://127.0.0.1:{server.port}", policy=policy, **settings))
        return made[-1]

    yield build
    for host in made:
        host.store.close(5)
        assert host.store.wait_idle(300)
        host.store.check()
        assert not host.arena._pins.any()


def test_what_one_saved_another_finds(make: Make) -> None:
    one, two = make(), make()
    hashes = pages("a", 40)
    one.save(hashes)
    assert one.uploaded(40)
    plan = two.plan(hashes)
    assert plan is not None
    assert (plan.first_remote, plan.num_remote) == (0, 40)
    assert two.ready(hashes) == 40
    two.check(hashes)
    assert two.count("remote_promoted_pages") == 40


def test_what_is_there_is_not_uploaded_twice(make: Make) -> None:
    one, two = make(), make()
    hashes = pages("a", 8)
    one.save(hashes)
    assert one.uploaded(8)
    two.save(hashes)
    assert until(lambda: two.count("remote_duplicate_pages") == 8)
    assert two.count("remote_written_pages") == 0


def test_only_what_dram_lacks_is_fetched(make: Make) -> None:
    one, two = make(), make()
    hashes = pages("a", 20)
    one.save(hashes)
    assert one.uploaded(20)
    two.save(hashes[:5])
    plan = two.plan(hashes)
    assert plan is not None
    assert (plan.first_remote, plan.num_remote) == (5, 15)
    assert two.count("remote_promoted_pages") == 15
    two.check(hashes)


def test_a_gap_ends_the_prefix(make: Make, server: RedisServer) -> None:
    one, two = make(), make()
    hashes = pages("a", 12)
    one.save(np.concatenate([hashes[:7], hashes[8:]]))
    assert one.uploaded(11)
    two.plan(hashes)
    assert two.ready(hashes) == 7


def test_damaged_pages_are_not_published(make: Make, server: RedisServer) -> None:
    one, two = make(), make()
    hashes = pages("a", 20)
    one.save(hashes)
    assert one.uploaded(20)
    keys = server.call("KEYS", f"*:{hashes[18].tobytes().hex()}:*")
    assert isinstance(keys, list)
    server.call("SETRANGE", keys[0], 3000, b"\0\0\0\0\0\0")  # type: ignore[arg-type]
    two.plan(hashes)
    assert two.ready(hashes) == 16  # whole groups of pages are published
    two.check(hashes[:16])
    assert two.count("remote_failed_pages") == 4


def test_another_model_finds_nothing(make: Make) -> None:
    one, two = make(), make(digest=OTHER)
    hashes = pages("a", 8)
    one.save(hashes)
    assert one.uploaded(8)
    two.plan(hashes)
    assert two.ready(hashes) == 0
    assert two.count("remote_promoted_pages") == 0


def test_lossy_pages_stay_lossy_and_exact_requests_do_not_get_them(make: Make) -> None:
    one, two = make(), make()
    hashes = pages("a", 6)
    one.save(hashes[:3])
    one.save(hashes[3:], quality=Quality.LOSSY)
    assert one.uploaded(6)
    two.plan(hashes, max_quality=Quality.EXACT)
    assert two.ready(hashes) == 3
    two.plan(hashes)
    assert two.ready(hashes) == 6
    assert two.store.ready_prefix(two.space, hashes, Quality.EXACT) == 3


def test_an_exact_request_fetches_over_what_is_here_and_lossy(make: Make) -> None:
    one, two = make(), make()
    hashes = pages("a", 20)
    one.save(hashes)
    assert one.uploaded(20)
    two.save(hashes[:8], quality=Quality.LOSSY)
    plan = two.plan(hashes, max_quality=Quality.EXACT)
    assert plan is not None
    assert plan.num_planned == 20
    assert two.store.ready_prefix(two.space, hashes, Quality.EXACT) == 20
    two.check(hashes)


def test_a_second_hit_is_what_uploads(make: Make) -> None:
    one = make("second_hit")
    hashes = pages("a", 4)
    one.save(hashes)
    time.sleep(0.05)
    assert one.count("remote_written_pages") == 0
    one.check(hashes)
    assert one.uploaded(4)
    asked = one.remote.stats()["put_records"]
    one.check(hashes)
    one.save(pages("b", 1))
    one.check(pages("b", 1))
    assert one.uploaded(5)
    assert (
        one.remote.stats()["put_records"] == asked + 1
    )  # what was uploaded is not asked for again


@pytest.mark.parametrize(("policy", "num_sent"), [("all", 1), ("second_hit", 5)])
def test_what_an_earlier_run_left_on_disk_is_sent_by_second_hit_alone(
    make: Make, server: RedisServer, tmp_path: Path, policy: str, num_sent: int
) -> None:
    """`all` are those that are saved, and what is reused is not saved again."""
    old, new = pages("a", 4), pages("b", 1)
    before = make(policy, disk=tmp_path)
    before.save(old)
    before.store.close(WAIT_S)
    server.call("FLUSHALL")
    after = make(policy, disk=tmp_path)
    after.plan(old)
    after.check(old)
    after.save(new)
    after.check(new)
    assert until(lambda: (after.store.remote_stats() or {})["upload_queue"] == 0)
    assert after.count("remote_written_pages") == num_sent
    assert after.sizes(old).any() == (policy == "second_hit")


def test_what_ranks_promised_is_a_second_hit_when_it_is_loaded(make: Make) -> None:
    one = make("second_hit")
    hashes = pages("a", 4)
    one.save(hashes)
    ticket = one.store.pin_leading(one.space, hashes)
    assert one.remote.stats().get("put_records", 0) == 0
    one.store.begin_load(one.space, ticket, hashes)
    one.store.release(ticket.slots)
    assert one.uploaded(4)


def test_dram_that_is_too_small_takes_what_it_can(make: Make) -> None:
    one, two = make(), make(slots=24)
    hashes = pages("a", 60)
    one.save(hashes)
    assert one.uploaded(60)
    two.plan(hashes)
    num = two.ready(hashes)
    assert 0 < num <= 21  # the only plan may pin seven eighths of it
    two.check(hashes[:num])


def test_a_store_that_is_down_costs_no_plan(make: Make, server: RedisServer) -> None:
    one = make()
    one.save(pages("a", 4))
    assert one.uploaded(4)
    server.kill()
    assert until(lambda: one.plan(pages("b", 4)) is None)
    one.save(pages("c", 4))
    assert until(lambda: one.count("remote_upload_dropped_pages") >= 4)
    one.check(pages("c", 4))
    server.start()
    assert one.remote.wait_usable(WAIT_S)
    one.save(pages("d", 4))
    assert one.uploaded(8)


def test_what_is_fetched_stays_until_the_plan_ends(make: Make) -> None:
    one, two = make(), make(slots=32)
    hashes = pages("a", 12)
    one.save(hashes)
    assert one.uploaded(12)
    plan = two.begin_plan(hashes)
    assert plan is not None
    assert until(lambda: plan.done)
    two.save(pages("b", 60))
    two.save(pages("c", 20))
    assert two.ready(hashes) == 12
    two.check(hashes)
    two.store.cancel_plan(plan)
    two.save(pages("d", 32))
    assert two.ready(hashes) < 12


def test_plans_share_the_room_that_may_be_pinned(make: Make) -> None:
    one, two = make(), make(slots=32)  # of which plans may pin 16
    names = ("a", "b")
    for name in names:
        one.save(pages(name, 12))
    assert one.uploaded(24)
    first, second = (two.begin_plan(pages(name, 12)) for name in names)
    assert first is not None
    assert second is not None
    assert until(lambda: first.done and second.done)
    assert (first.num_planned, first.num_stored) == (12, 12)
    assert (second.num_planned, second.num_stored) == (4, 12)
    assert two.store.stats()["planned_pages"] == 16
    two.store.cancel_plan(first)
    longer = two.begin_plan(pages("b", 12))
    assert longer is not None
    assert until(lambda: longer.done)
    assert two.ready(pages("b", 12)) == longer.num_planned == 12
    for plan in (second, longer):
        two.store.cancel_plan(plan)
    assert two.store.stats()["planned_pages"] == 0


def test_a_plan_made_anew_takes_over_the_room_of_the_old_one(make: Make) -> None:
    one, two = make(), make(slots=32)
    hashes = pages("a", 16)
    one.save(hashes)
    assert one.uploaded(16)
    sizes = two.sizes(hashes)
    assert sizes.all()
    old = two.store.plan(two.space, hashes, remote_sizes=sizes)
    assert old is not None
    new = two.store.plan(two.space, hashes, remote_sizes=sizes, instead_of=old)
    assert new is not None
    two.store.cancel_plan(old)
    assert new.num_planned == 16
    assert until(lambda: new.done)
    assert until(lambda: two.store.stats()["planned_pages"] == 16)
    assert two.ready(hashes) == 16
    two.store.cancel_plan(new)
    assert two.store.stats()["planned_pages"] == 0


def test_a_page_that_left_the_store_ends_the_plan(make: Make, server: RedisServer) -> None:
    one, two = make(), make()
    hashes = pages("a", 40)
    one.save(hashes)
    assert one.uploaded(40)
    sizes = two.sizes(hashes)
    keys = server.call("KEYS", f"*:{hashes[20].tobytes().hex()}:*")
    assert isinstance(keys, list)
    server.call("DEL", keys[0])  # type: ignore[arg-type]
    plan = two.store.plan(two.space, hashes, remote_sizes=sizes)
    assert plan is not None
    assert until(lambda: plan.done)
    assert plan.fetch_failed
    assert plan.num_planned == plan.num_stored == two.ready(hashes) == 20
    two.check(hashes[:20])
    two.store.cancel_plan(plan)
    assert two.store.stats()["planned_pages"] == 0


def test_an_unknown_policy_is_refused(make: Make) -> None:
    with pytest.raises(TierConfigError, match="second_hit"):
        make("sometimes")


def test_what_is_being_put_counts_as_queued(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who waits for an empty queue goes on before the last pages are there."""
    host, begun, may_go = make(), threading.Event(), threading.Event()
    put = host.remote.put

    def num_queued() -> int:
        return (host.store.remote_stats() or {})["upload_queue"]

    def late(items: Any) -> Any:
        begun.set()
        assert may_go.wait(WAIT_S)
        return put(items)

    monkeypatch.setattr(host.remote, "put", late)
    host.save(pages("late", 3))
    assert begun.wait(WAIT_S)
    assert num_queued() == 1
    may_go.set()
    assert until(lambda: num_queued() == 0)
    assert host.count("remote_written_pages") == 3
