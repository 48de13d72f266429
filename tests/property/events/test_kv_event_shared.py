"""KV events of a store that servers share: told is what this server found out last."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.disaggregation.kv_events import StorageMedium  # noqa: E402
from sglang.srt.mem_cache.events import KVCacheEventRecorder  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from sglang_ext.seam import kv_events  # noqa: E402
from sglang_ext.seam.kv_events import TierEventRecorder  # noqa: E402
from sglang_ext.seam.page_hash import hashes_of  # noqa: E402
from sglang_ext.tiers.remote.base import Outcome, RemoteKey  # noqa: E402
from sglang_ext.tiers.store.remote import sightings  # noqa: E402
from testkit.kv_reader import KvIndex  # noqa: E402
from testkit.remote.redis_server import RedisServer, redis_binary  # noqa: E402
from tests.tiers.remote.remote_cases import until  # noqa: E402
from tests.tiers.remote.test_pages import OTHER, Host  # noqa: E402

pytestmark = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

PAGE, PAGES = 4, 6
EXTERNAL = {"EXTERNAL"}


class Server:
    """A page store, a device that has some prompts, and who reads the events."""

    def __init__(self, url: str, *, slots: int = 96) -> None:
        self.host = Host(url, slots=slots, policy="all")
        self.root = SimpleNamespace(
            parent=None, hash_value=[], event_hash_value=None, key=RadixKey(array("q"))
        )
        self.recorder = TierEventRecorder(
            KVCacheEventRecorder(enabled=True, page_size=PAGE),
            self.host.store,
            record_medium=StorageMedium.CPU,
            max_seen_pages=10 * PAGES,
        )
        self.reader = KvIndex()

    def compute(self, prompt: int) -> np.ndarray:
        """The device has a prompt; returns its hashes."""
        key = RadixKey(array("q", tokens_of(prompt)))
        node = SimpleNamespace(parent=self.root, key=key, hash_value=None, event_hash_value=None)
        self.recorder.record_store(node)
        return hashes_of(key, PAGE)

    def store(self, prompt: int) -> np.ndarray:
        """Computes a prompt and has it uploaded."""
        hashes = self.compute(prompt)
        done = self.host.count("remote_written_pages") + self.host.count("remote_duplicate_pages")
        self.host.save(hashes)
        assert until(
            lambda: (
                self.host.count("remote_written_pages") + self.host.count("remote_duplicate_pages")
                >= done + len(hashes)
            )
        )
        return hashes

    def told(self, prompt: int, media: set[str] = EXTERNAL) -> int:
        """Leading pages of a prompt that a reader knows to be there, once all is told."""
        while True:
            self.reader.apply(self.recorder.take())
            if not self.recorder._pending and not self.recorder._gone:
                return self.reader.prefix(tokens_of(prompt), PAGE, media) // PAGE

    def update(self, digest: bytes) -> None:
        """Weights change."""
        self.host.store.end_epoch()
        self.host.store.open_namespace(digest, {})
        self.host.space = self.host.store.space(digest)


def tokens_of(prompt: int) -> list[int]:
    return [100 * prompt + at for at in range(PAGES * PAGE)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def make(redis: RedisServer) -> Iterator[Any]:
    redis.call("FLUSHALL")
    made: list[Server] = []

    def build(**how: Any) -> Server:
        made.append(Server(f"redis://127.0.0.1:{redis.port}", **how))
        return made[-1]

    yield build
    for each in made:
        each.host.store.close(5)


def test_what_was_uploaded_is_told_and_outlives_dram(make: Any) -> None:
    one = make(slots=2 * PAGES)
    one.store(0)
    assert one.told(0) == one.told(0, {"CPU_PINNED"}) == PAGES
    for prompt in range(1, 4):
        one.store(prompt)
    assert one.told(0, {"CPU_PINNED"}) == 0
    assert [one.told(prompt) for prompt in range(4)] == [PAGES] * 4


def test_what_the_store_dropped_is_taken_back_when_it_is_looked_for(
    make: Any, redis: RedisServer
) -> None:
    one = make()
    hashes = one.store(0)
    one.store(1)
    redis.call("FLUSHALL")  # as an eviction: nobody is told
    assert one.told(0) == PAGES
    assert not one.host.sizes(hashes).any()
    assert one.told(0) == 0
    assert one.told(0, {"CPU_PINNED"}) == PAGES
    assert one.told(1) == PAGES


def test_another_servers_pages_are_told_once_they_were_found(make: Any) -> None:
    one, two = make(), make()
    hashes = one.store(0)
    two.compute(0)
    assert two.told(0) == 0
    two.host.sizes(hashes)
    assert two.told(0) == PAGES
    assert two.told(0, {"CPU_PINNED"}) == 0


def test_a_damaged_value_is_not_there(make: Any, redis: RedisServer) -> None:
    one, two = make(), make()
    hashes = one.store(0)
    two.compute(0)
    two.host.sizes(hashes)
    assert two.told(0) == PAGES
    names: Any = redis.call("KEYS", "*")
    for name in names:
        redis.call("SETRANGE", name, "600", "damage")
    two.host.plan(hashes)
    assert two.told(0) == 0
    assert two.host.ready(hashes) == 0


def test_a_store_that_is_down_says_nothing_of_its_pages(make: Any, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as own:
        one = Server(f"redis://127.0.0.1:{own.port}")
        try:
            hashes = one.store(0)
            assert one.told(0) == PAGES
            own.kill()
            one.host.sizes(hashes)
            assert one.told(0) == PAGES
        finally:
            one.host.store.close(5)


def test_other_weights_take_all_back_and_their_pages_are_others(make: Any) -> None:
    one = make()
    digest = one.host.space.digest
    hashes = one.store(0)
    assert one.told(0) == PAGES
    old = one.host.space
    one.update(OTHER)
    assert one.told(0) == 0
    # What still comes in of the weights before says nothing of these.
    one.host.remote.head([RemoteKey(old.digest, row.tobytes()) for row in hashes])
    assert one.told(0) == 0
    one.update(digest)
    one.host.sizes(hashes)
    one.compute(0)
    assert one.told(0) == PAGES


def test_a_reader_that_lost_everything_is_told_again(make: Any) -> None:
    one = make()
    one.store(0)
    assert one.told(0) == PAGES
    one.recorder.record_all_cleared()
    assert one.told(0) == PAGES
    one.reader = KvIndex(heard_all=False)  # joins late: told as the pages come to the device again
    one.compute(0)
    assert one.told(0) == PAGES


def test_the_oldest_are_taken_back_where_the_store_has_more_than_is_followed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MAX_SHARED", 2 * PAGES)
    one = make()
    for prompt in range(3):
        one.store(prompt)
        one.told(prompt)
    assert [one.told(prompt) for prompt in range(3)] == [0, PAGES, PAGES]
    assert one.told(0, {"CPU_PINNED"}) == PAGES


def test_nothing_is_believed_when_more_happened_than_was_kept(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make()
    hashes = one.store(0)
    assert one.told(0) == PAGES
    monkeypatch.setattr(sightings, "_MAX_HEARD", PAGES)
    one.store(1)
    one.store(2)
    assert [one.told(prompt) for prompt in range(3)] == [0, 0, 0]
    assert one.host.count("kv_events_overrun") == 1
    one.host.sizes(hashes)
    assert one.told(0) == PAGES


def test_a_page_is_there_at_any_of_its_levels_and_silence_says_nothing() -> None:
    heard = sightings.Sightings()
    page, other = bytes(32), bytes([1]) * 32
    keys = [RemoteKey(OTHER, page, b"", level) for level in ("hier.2", "raw")]
    keys += [RemoteKey(OTHER, other, b"", level) for level in ("hier.2", "raw")]
    heard.hear(keys, [Outcome.OK, Outcome.MISSING, Outcome.MISSING, Outcome.REJECTED])
    heard.hear(keys[:2], [Outcome.TIMEOUT, Outcome.UNAVAILABLE])
    heard.hear(keys[1:2], [Outcome.KEPT])
    taken = heard.take()
    assert taken is not None
    assert [(each.page_hash, each.is_there) for each in taken] == [
        (page, True), (other, False), (page, True),
    ]  # fmt: skip
    assert not heard.take()
