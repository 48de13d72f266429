"""Streaming from a real Redis over a slow link: levels, deadlines, text, and sharing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from testkit.remote.proxy import Network, Proxy
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import until
from tests.unit.codec.test_page_codec import LAYOUT, page
from tests.unit.remote.remote_world import Host, body, codec_of, expected, hashes_of

pytestmark = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

LEVEL, NUM_PAGES = 4, 92  # four chunks of 23 pages
FAST = 50e6


class World:
    """One server that has uploaded a context of levels 0 to 4, and others behind a proxy."""

    def __init__(self, redis: RedisServer, proxy: Proxy) -> None:
        self.redis, self.proxy = redis, proxy
        self.hosts: list[Host] = []
        self.one = self.add(redis.port, slots=2 * NUM_PAGES + 8)
        self._sizes: list[int] = []
        for start in (0, 200):
            self.one.save(range(start, start + NUM_PAGES))
        assert self.one.uploaded(2 * NUM_PAGES)

    def add(self, port: int = 0, slots: int = 4 * NUM_PAGES + 8, **settings: Any) -> Host:
        """A server, behind the proxy unless a port is given."""
        url = f"redis://127.0.0.1:{port or self.proxy.port}?timeout=30s"
        self.hosts.append(Host(url, codec_of("hier", LEVEL), slots=slots, **settings))
        return self.hosts[-1]

    def sizes(self) -> list[int]:
        """Bytes of the context up to each level, and the finest."""
        if not self._sizes:
            ends = []
            for number in range(NUM_PAGES):
                record = self.one.codec.encode(page(number))
                assert record is not None
                ends.append(self.one.codec.levels(record).ends)
            self._sizes = [sum(column) for column in zip(*ends, strict=True)]
        return self._sizes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
        Proxy(redis.port, Network(bytes_per_s=FAST)) as proxy,
    ):
        made = World(redis, proxy)
        yield made
        for host in made.hosts:
            host.close()


@pytest.fixture
def world(shared: World) -> World:
    shared.proxy.set(bytes_per_s=FAST)
    return shared


def levels(host: Host) -> dict[int, int]:
    counts = {n: host.count(f"remote_level_{n}_pages") for n in range(LEVEL + 1)}
    return {n: count for n, count in counts.items() if count}


def slow_prefill(num_new: int, num_before: int) -> float:
    """No request computes what it can fetch."""
    return 0.01 * num_new


def test_without_a_deadline_all_comes_at_the_finest_level(world: World) -> None:
    """However slow the link is; `bench stream` measures how busy it is meanwhile."""
    host = world.add()
    world.proxy.set(bytes_per_s=world.sizes()[LEVEL])  # the context takes a second
    host.fetch(range(NUM_PAGES))
    assert host.ready(range(NUM_PAGES)) == NUM_PAGES
    assert levels(host) == {LEVEL: NUM_PAGES}
    assert host.count("remote_link_busy_us") > 0
    assert host.count("remote_link_needed_us") > 0


def seconds_to_decode(world: World) -> float:
    """How long this machine takes just now for a context that comes over a fast link."""
    host = world.add()
    begin_s = time.monotonic()
    host.fetch(range(200, 200 + NUM_PAGES))
    return time.monotonic() - begin_s


def test_with_a_deadline_the_level_is_what_fits(world: World) -> None:
    """Whatever else has the cores meanwhile makes it coarser: then it is tried again."""
    found = [mean_levels(world)]
    while (means := found[-1]) is None or not means[0] < means[1] < LEVEL:
        assert len(found) < 24, found
        found.append(mean_levels(world))


def mean_levels(world: World) -> list[float] | None:
    """Of what comes over links that suit level 1, and level 2; None if not all comes."""
    sizes = world.sizes()
    coarsest: list[float] = []
    # With time for decoding, so that the link is what decides.
    slo_s = max(1.5, 8 * seconds_to_decode(world))
    for level in (1, 2):
        host = world.add(slo_s=slo_s, prefill_s=slow_prefill)
        host.fetch(range(200, 200 + NUM_PAGES))  # the link is known, and the decoder warm
        before = levels(host)
        # All at this level take half of the time.
        world.proxy.set(bytes_per_s=2 * sizes[level] / slo_s)
        host.fetch(range(NUM_PAGES))
        starts = (0, 200)
        if any(host.ready(range(at, at + NUM_PAGES)) < NUM_PAGES for at in starts):
            world.proxy.set(bytes_per_s=FAST)
            return None
        got = {n: c - before.get(n, 0) for n, c in levels(host).items() if c > before.get(n, 0)}
        coarsest.append(sum(n * count for n, count in got.items()) / NUM_PAGES)
        world.proxy.set(bytes_per_s=FAST)
    return coarsest


def test_what_is_sooner_computed_is_not_fetched(world: World) -> None:
    world.proxy.set(bytes_per_s=world.sizes()[LEVEL] / 8.0)
    tokens_per_s = NUM_PAGES * 64 / 4.0

    def prefill_s(num_new: int, num_before: int) -> float:
        return num_new / tokens_per_s

    host = world.add(prefill_s=prefill_s)
    host.fetch(range(12))  # one chunk; the link is known from then on
    assert host.ready(range(12)) == 12
    host.fetch(range(200, 200 + NUM_PAGES))
    num_ready = host.ready(range(200, 200 + NUM_PAGES))
    assert num_ready < NUM_PAGES
    assert host.count("remote_text_pages") == NUM_PAGES - num_ready > 0


def test_a_link_that_has_become_fast_is_noticed_though_all_is_computed(world: World) -> None:
    compute_s = max(1.0, 8 * seconds_to_decode(world))  # of the context: longer than decoding it

    def prefill_s(num_new: int, num_before: int) -> float:
        return num_new / (NUM_PAGES * 64) * compute_s

    host = world.add(prefill_s=prefill_s)
    world.proxy.set(bytes_per_s=world.sizes()[LEVEL] / (10 * compute_s))
    host.fetch(range(200, 203))  # nothing is known of the link yet
    assert host.ready(range(200, 203)) == 3
    host.fetch(range(NUM_PAGES))
    assert host.ready(range(NUM_PAGES)) == 0
    assert until(lambda: host.count("remote_probe_fetches") >= 1)
    world.proxy.set(bytes_per_s=FAST)

    def fetched() -> bool:
        host.fetch(range(NUM_PAGES))
        return host.ready(range(NUM_PAGES)) == NUM_PAGES

    assert until(fetched), host.store.stats()
    assert host.count("remote_probe_fetches") >= 2


def test_what_would_be_computed_on_any_link_is_not_measured(world: World) -> None:
    host = world.add(prefill_s=lambda num_new, num_before: 1e-6 * num_new, slo_s=60.0)
    host.fetch(range(NUM_PAGES))
    assert host.count("remote_text_pages") == NUM_PAGES
    assert host.count("remote_probe_fetches") == host.ready(range(NUM_PAGES)) == 0


def test_two_contexts_share_the_link(world: World) -> None:
    host = world.add()
    starts = (0, 200)
    contexts = [hashes_of(range(at, at + NUM_PAGES)) for at in starts]
    sizes = [host.found(hashes) for hashes in contexts]  # before the link is slow: neither is ahead
    world.proxy.set(bytes_per_s=world.sizes()[LEVEL], stalls=True)
    one, other = (host.plan(*each) for each in zip(contexts, sizes, strict=True))
    world.proxy.set(stalls=False)  # nothing came before both were asked for
    assert one is not None
    assert other is not None
    assert until(lambda: one.done or other.done)
    # One after the other it would be none of the later one's.
    assert max(one.remaining, other.remaining) <= NUM_PAGES / 2
    for plan in (one, other):
        assert until(lambda: plan.done)  # noqa: B023
        host.store.cancel_plan(plan)
    assert [host.ready(range(at, at + NUM_PAGES)) for at in starts] == [NUM_PAGES] * 2


def test_a_given_up_plan_stops_its_stream(world: World) -> None:
    host = world.add()
    world.proxy.set(bytes_per_s=world.sizes()[LEVEL] / 4.0)
    plan = host.plan(hashes_of(range(NUM_PAGES)))
    assert plan is not None
    assert until(lambda: host.count("remote_level_4_pages") > 0)
    host.store.cancel_plan(plan)
    assert until(lambda: plan.done)
    num_ready = host.ready(range(NUM_PAGES))
    assert 0 < num_ready < NUM_PAGES
    world.proxy.set(bytes_per_s=FAST)
    host.fetch(range(NUM_PAGES))
    assert host.ready(range(NUM_PAGES)) == NUM_PAGES


def test_a_connection_lost_in_the_middle_leaves_what_came(world: World) -> None:
    host = world.add()
    world.proxy.set(bytes_per_s=world.sizes()[LEVEL] / 4.0)
    plan = host.plan(hashes_of(range(NUM_PAGES)))
    assert plan is not None
    assert until(lambda: host.count("remote_level_4_pages") > 0)
    world.proxy.drop_all()
    assert until(lambda: plan.done)
    host.store.cancel_plan(plan)
    num_ready = host.ready(range(NUM_PAGES))
    assert 0 < num_ready < NUM_PAGES
    copies = host.slots(range(num_ready))
    assert all(len(body(slot)) <= LAYOUT.slot_bytes for slot in copies)
    assert host.count("remote_failures") == 0


def test_a_link_that_garbles_bytes_brings_no_wrong_page(world: World) -> None:
    right = {n: expected(world.one.codec, n) for n in range(NUM_PAGES)}
    num_ready = num_spoilt = 0
    for _ in range(6):
        host = world.add(timeout_s=2.0)  # a garbled length is waited for so long
        before = world.proxy.num_spoilt
        world.proxy.set(garbage_share=0.03)
        host.fetch(range(NUM_PAGES))
        world.proxy.set(garbage_share=0.0)
        num_spoilt += world.proxy.num_spoilt - before
        ready = host.ready(range(NUM_PAGES))
        num_ready += ready
        for number, slot in zip(range(ready), host.slots(range(ready)), strict=True):
            assert body(slot) == right[number]
        assert host.count("remote_failures") == 0
    assert num_spoilt > 0
    assert 0 < num_ready < 6 * NUM_PAGES


def fetches_nothing(host: Host) -> bool:
    """Whether no fetch is on its way, which no counter says."""
    remote: Any = host.store._remote
    return bool(remote._coded._streams._link.is_idle)


def test_a_deadline_in_the_middle_takes_what_is_there(world: World) -> None:
    """Refinements that are on their way when the forward begins come too late, and harm nothing."""
    host = world.add(slo_s=1.5, prefill_s=slow_prefill)
    for at, share in ((0, 0.5), (200, 0.2)):
        world.proxy.set(bytes_per_s=world.sizes()[LEVEL] * share)
        host.fetch(range(at, at + NUM_PAGES))
        assert host.ready(range(at, at + NUM_PAGES)) == NUM_PAGES
    assert until(partial(fetches_nothing, host))  # what was late has come
    world.proxy.set(bytes_per_s=FAST)
    assert host.count("remote_failures") == 0
    host.store.clear()
    host.fetch(range(NUM_PAGES))
    assert host.ready(range(NUM_PAGES)) == NUM_PAGES
