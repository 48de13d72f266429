"""Waiting requests with pages in a remote store: asked for, fetched in turn, never for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.admission.load_or_compute import LoadOrCompute
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.store import PageStore, PageStoreConfig, Plan
from sglang_ext.tiers.store.types import StoreCounters
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import WAIT_S, open_store, until
from tests.tiers.remote.test_pages import DIGEST, NONE, SLOT, fill, pages

pytestmark = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

KV = SLOT - 512
P = 64


class Server:
    """DRAM, a shared store, and the waiting requests of one server."""

    def __init__(
        self,
        redis: RedisServer,
        *,
        slots: int = 32,
        policy: str = "cost",
        lookahead: bool = True,
        timeout_ms: float = 200.0,
        call_s: float = WAIT_S,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.remote = open_store(f"redis://127.0.0.1:{redis.port}", timeout_s=call_s)
        self.cost = CostModel(unmeasured_wait_s=timeout_ms / 1e3)
        feeds = CostFeeds(self.cost, KV, StoreCounters())
        self.arena = HostArena(slots, SLOT)
        config = PageStoreConfig(placement=PolicyConfig() if lookahead else None)
        self.store = PageStore(
            self.arena,
            PageIndex(1024),
            DiskTier(DiskConfig(folder, 64 << 20, 0, segment_bytes=1 << 20)) if folder else None,
            config,
            remote=self.remote,
            on_fetch=feeds.on_fetch,
            counters=feeds.counters,
        )
        self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)
        judge = LoadOrCompute(self.store, self.cost, page_tokens=P, kv_bytes_per_page=KV)
        self.room = WaitingRoom(
            self.store,
            prefetch_policy=policy,
            prefetch_timeout_ms=timeout_ms,
            decider=judge if policy == "cost" else None,
            clock=clock,
        )
        assert self.remote.wait_usable(WAIT_S)

    def save(self, hashes: np.ndarray) -> None:
        ticket = self.store.begin_save(self.space, hashes, NONE)
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            fill(self.arena.slots[slot], hashes[page].tobytes(), self.space, 0)
        self.store.finish_save(ticket, ok=True)

    def teach_prefill(self, token_s: float) -> None:
        for tokens in (100, 1000, 5000) * 2:
            self.cost.note_prefill([(tokens, 0)], token_s * tokens)

    def teach_remote(self, mb_s: float) -> None:
        for power in (14, 16, 18, 20) * 2:
            self.cost.note_fetch(1 << power, (1 << power) / (1e6 * mb_s))

    def enter(self, name: str, count: int) -> None:
        tokens = count * P + 10
        self.room.enter(name, ReusablePrefix(self.space, pages(name, count), 0, 255, None, tokens))

    def admits(self, name: str, queue: str | None = None) -> bool:
        """One step of the scheduler; whether it would run a request."""
        self.room.step(list(queue if queue is not None else name))
        return self.room.may_admit(name)

    def time_to_admit(self, name: str, queue: str | None = None) -> float:
        start_s = time.monotonic()
        assert until(lambda: self.admits(name, queue))
        return time.monotonic() - start_s

    def ready(self, name: str, count: int) -> int:
        return self.store.ready_prefix(self.space, pages(name, count))

    def count(self, name: str) -> int:
        return self.store.stats().get(name, 0)


Make = Callable[..., Server]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Holds prefixes a to f of 12 pages each."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        first = Server(server, slots=96)
        for name in "abcdef":
            first.save(pages(name, 12))
        assert until(lambda: first.count("remote_written_pages") == 72)
        first.store.close(5)
        yield server


@pytest.fixture
def make(redis: RedisServer) -> Iterator[Make]:
    made: list[Server] = []

    def build(**settings: object) -> Server:
        made.append(Server(redis, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for server in made:
        server.room.leave_all()
        server.store.close(5)
        assert server.store.wait_idle(300)
        assert server.store.stats()["planned_pages"] == 0
        server.store.check()
        assert not server.arena._pins.any()


def test_pages_of_the_store_come_behind_pages_on_disk(make: Make, tmp_path: Path) -> None:
    """The plan for what is on disk is made before the store has answered."""
    server = make(folder=tmp_path)
    server.save(pages("a", 12)[:6])
    assert until(lambda: server.count("written_pages") == 6)
    assert until(lambda: server.count("remote_duplicate_pages") == 6)  # until then some are pinned
    with server.store._books.table.lock:
        server.store._books.room.evict(6)
    server.teach_prefill(1.0)  # minutes for a prefix: no machine is too busy to answer meanwhile
    server.teach_remote(100.0)
    server.enter("a", 12)
    server.time_to_admit("a")
    assert server.ready("a", 12) == 12
    assert server.count("remote_promoted_pages") == 6
    assert until(lambda: server.count("promoted_pages") == 6)  # counted after they are ready


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("policy", ["cost", "timeout", "wait_complete"])
def test_pages_of_the_store_are_there_at_admission(
    make: Make, policy: str, lookahead: bool
) -> None:
    server = make(policy=policy, lookahead=lookahead, timeout_ms=100_000)
    server.teach_prefill(1e-2)  # seconds, so that all of it is worth waiting for
    server.enter("a", 12)
    server.time_to_admit("a")
    assert server.ready("a", 12) == 12
    assert server.room.remote_pages("a") == (0, 12)
    # Pinned until the request leaves, whatever is saved meanwhile.
    server.save(pages("x", 40))
    assert server.ready("a", 12) == 12


def test_what_nobody_stored_costs_one_answer(make: Make, redis: RedisServer) -> None:
    server = make()
    server.teach_prefill(1.0)  # minutes for a prefix, so that the answer is not late
    redis.process.freeze()  # nor there at once
    try:
        server.enter("z", 12)
        assert not server.admits("z")
    finally:
        redis.process.thaw()
    server.time_to_admit("z")
    assert server.room.remote_pages("z") == (0, 0)
    assert server.count("remote_lookups") == 1
    assert server.count("remote_lookups_late") == 0
    assert server.remote.stats().get("get_records", 0) == 0
    server.room.leave("z", admitted=True)
    assert server.count("held_remote_us") > 0


def test_best_effort_never_waits(make: Make) -> None:
    server = make(policy="best_effort")
    server.enter("a", 12)
    assert server.admits("a")


def test_a_request_behind_holds_no_room_that_one_before_needs(make: Make) -> None:
    server = make(policy="wait_complete")  # plans may pin 16 pages
    for name in "ab":
        server.enter(name, 12)
    assert until(lambda: server.admits("a", "ab"))
    assert server.ready("a", 12) == 12
    assert server.store.stats()["planned_pages"] <= 16
    # The other way round: what b has by now is taken back for c, which overtakes it.
    server.room.leave("a", admitted=True)
    server.enter("c", 12)
    server.time_to_admit("c", "cb")
    assert server.ready("c", 12) == 12
    server.room.leave("c", admitted=True)
    server.time_to_admit("b")
    assert server.ready("b", 12) == 12


def test_a_prefix_larger_than_what_plans_may_pin_is_cut_and_admitted(make: Make) -> None:
    server = make(policy="wait_complete", slots=12)  # 10 for the only plan
    server.enter("a", 12)
    server.time_to_admit("a")
    assert server.ready("a", 12) == 10


@pytest.mark.parametrize("when", ["between", "meanwhile"])
def test_a_fetch_for_which_dram_has_no_slot_is_made_when_there_is_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It ends between two looks at its plan, or in the middle of one."""
    if when == "meanwhile":

        def done(plan: Plan) -> bool:
            return until(lambda: plan.remaining <= 0)

        monkeypatch.setattr(Plan, "done", property(done))
    now_s = [0.0]  # stands: after a few tries at other times it would do with what is there
    server = make(policy="wait_complete", clock=lambda: now_s[0])
    server.save(pages("x", 32))
    ticket = server.store.pin_ready(server.space, pages("x", 32))
    assert ticket is not None
    try:
        server.enter("a", 12)
        deadline_s = time.monotonic() + 300
        while server.count("save_dropped_pages") < 12:
            assert time.monotonic() < deadline_s
            assert not server.admits("a")
        assert not server.admits("a")
    finally:
        server.store.release(ticket.slots)

    def admits_later() -> bool:
        now_s[0] += 1.0
        return server.admits("a")

    assert until(admits_later)
    assert server.ready("a", 12) == 12


def test_a_slow_store_is_computed_around_and_probed(make: Make) -> None:
    server = make()
    server.teach_prefill(0.1)  # 80 s for a prefix: no machine is too busy to answer meanwhile
    server.teach_remote(1e-4)  # a quarter of an hour
    server.enter("a", 12)
    server.time_to_admit("a")
    assert server.count("cost_recompute") == 1
    assert server.count("cost_probes") == 1
    server.room.leave("a", admitted=True)
    # The probes show that it is fast after all.
    for name in "bcdef":
        server.enter(name, 12)
        server.time_to_admit(name)
        assert until(lambda: not server.store.fetch_queue().bytes_ahead)
        server.room.leave(name, admitted=True)
    assert server.ready("f", 12) == 12
    assert server.cost.state()["remote_read_mb_s"] > 1e-3


def test_a_store_that_does_not_answer_holds_up_one_request(make: Make, redis: RedisServer) -> None:
    server = make(call_s=600.0)  # longer than anything here waits
    server.teach_prefill(5e-3)  # 4 s for a prefix: a second's wait for the answer
    redis.process.freeze()
    try:
        server.enter("a", 12)
        assert server.time_to_admit("a") > 0.5
        assert server.count("remote_lookups_late") == 1
        server.room.leave("a", admitted=True)
        # The call began after "a" did, so it has not gone on for as long yet.
        assert until(lambda: server.store.remote_stalled_s > 1.1)
        server.enter("b", 12)
        assert server.admits("b")
    finally:
        redis.process.thaw()


def test_a_store_that_stops_during_a_fetch_is_given_up(make: Make, redis: RedisServer) -> None:
    server = make(call_s=600.0, lookahead=False)  # longer than anything here waits
    server.teach_prefill(1e-3)  # 0.8 s for a prefix
    server.teach_remote(100)
    server.enter("a", 12)
    assert until(lambda: server.room._waiting["a"].remote_lookup.done)  # type: ignore[union-attr]
    redis.process.freeze()
    try:
        server.time_to_admit("a")
        assert server.count("cost_gave_up") == 1
    finally:
        redis.process.thaw()


def test_a_store_that_is_down_costs_nothing(make: Make, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as other:
        server = Server(other)
        server.teach_prefill(1e-2)
        other.kill()
        while server.remote.usable:  # refused connections open the breaker
            server.enter("a", 12)
            server.time_to_admit("a")
            server.room.leave("a")
        server.enter("a", 12)
        assert server.admits("a")
        server.room.leave_all()
        server.store.close(5)
