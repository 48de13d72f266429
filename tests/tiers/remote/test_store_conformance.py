"""What every remote store does; run against the real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.remote import GetRequest, GetResult, PutItem, RemoteStore
from sglang_ext.tiers.remote.base import Deadline
from sglang_ext.tiers.remote.ranges import RangeRequest
from testkit.remote.mooncake_server import MooncakeServer, mooncake_missing
from testkit.remote.redis_server import RedisCluster, RedisServer, TlsFiles, redis_binary
from tests.tiers.remote.remote_cases import (
    ADAPTER,
    KEPT,
    LONG_BYTES,
    MALFORMED,
    MISSING,
    OK,
    OTHER_NAMESPACE,
    PAGE_BYTES,
    PART_BYTES,
    REJECTED,
    UNAVAILABLE,
    WAIT_S,
    assert_right,
    heads,
    make_item,
    make_items,
    open_store,
    read,
)

needs_redis = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")
needs_mooncake = pytest.mark.skipif(bool(mooncake_missing()), reason=mooncake_missing())


def _plain(path: Path) -> Iterator[str]:
    with RedisServer(path) as server:
        yield f"redis://127.0.0.1:{server.port}"


def _password(path: Path) -> Iterator[str]:
    secret = path / "password"
    secret.write_text("hunter2 /?#&%\n")
    with RedisServer(path, password="hunter2 /?#&%") as server:
        yield f"redis://127.0.0.1:{server.port}/3?password-file={secret}&ttl=1h"


def _tls(path: Path) -> Iterator[str]:
    files = TlsFiles(path)
    secret = path / "password"
    secret.write_text("hunter2")
    with RedisServer(path, tls=files, password="hunter2") as server:
        query = f"ca-file={files.ca}&password-file={secret}"
        yield f"rediss://default@localhost:{server.port}?{query}"


def _cluster(path: Path) -> Iterator[str]:
    with RedisCluster(path) as cluster:
        members = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes[1:])
        yield f"redis://{members}?cluster=yes"


def _mooncake(path: Path) -> Iterator[str]:
    with MooncakeServer(path) as server:
        yield server.url


def _folder(path: Path) -> Iterator[str]:
    yield f"file://{path}?size=1GB&free=1&ttl=1h"


def _folder_synced(path: Path) -> Iterator[str]:
    yield f"file://{path}?size=1GB&free=1&fsync=always"


SERVERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "redis": _plain,
    "redis-password": _password,
    "rediss": _tls,
    "redis-cluster": _cluster,
    "mooncake": _mooncake,
    "file": _folder,
    "file-synced": _folder_synced,
    "redis encrypt": _plain,
    "mooncake tag": _mooncake,
    "file tag": _folder,
    "file encrypt": _folder,
}
_MARKS = {"file": [], "file-synced": [], "mooncake": [needs_mooncake]}
PARAMS = [pytest.param(name, marks=_MARKS.get(name.split()[0], [needs_redis])) for name in SERVERS]


@pytest.fixture(scope="module", params=PARAMS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from SERVERS[request.param](tmp_path_factory.mktemp(request.param.split()[0]))


_PREFIXES = iter(range(10**6))


@pytest.fixture
def reopen(request: pytest.FixtureRequest, url: str) -> Iterator[Callable[[], RemoteStore]]:
    """Opens the store as another server would; each test has a prefix of its own."""
    opened: list[RemoteStore] = []
    mode = [*request.node.callspec.params["url"].split(), "plain"][1]
    prefix = f"test-{next(_PREFIXES)}"

    def another() -> RemoteStore:
        store = open_store(url, prefix=prefix, protect=(mode,))
        opened.append(store)
        assert store.wait_usable(WAIT_S), store.stats()
        return store

    yield another
    for store in opened:
        store.close()


@pytest.fixture
def store(reopen: Callable[[], RemoteStore]) -> RemoteStore:
    return reopen()


def test_what_one_server_stores_another_reads(reopen: Callable[[], RemoteStore]) -> None:
    items = [*make_items(range(40)), *make_items(range(40, 43), LONG_BYTES)]
    assert reopen().put(items) == [OK] * 43
    assert read(reopen(), items) == [OK] * 43


@pytest.mark.parametrize(
    "num_bytes", [512, 513, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES]
)
def test_a_record_of_any_length_comes_back(store: RemoteStore, num_bytes: int) -> None:
    item = make_item(1, num_bytes)
    assert store.put([item]) == [OK]
    assert read(store, [item]) == [OK]


def test_neither_the_array_nor_what_lies_behind_it_is_changed(store: RemoteStore) -> None:
    item = make_item(1)
    before = item.record.copy()
    store.put([item])
    assert (item.record == before).all()
    out = np.full(PAGE_BYTES + 5000, 0xEE, np.uint8)
    [result] = store.get([GetRequest(item.key, out)])
    assert result == GetResult(OK, PAGE_BYTES)
    assert (out[PAGE_BYTES:] == 0xEE).all()


def test_results_come_in_the_order_of_the_call(store: RemoteStore) -> None:
    items = make_items(range(60))
    store.put([item for number, item in enumerate(items) if number % 3])
    seen: list[int] = []
    outcomes = read(store, items, on_result=lambda index, _: seen.append(index))
    assert outcomes == [OK if number % 3 else MISSING for number in range(60)]
    assert seen == list(range(60))


def test_a_record_is_whole_when_it_is_reported(store: RemoteStore) -> None:
    items = make_items(range(4), LONG_BYTES)
    store.put(items)
    outs = [np.zeros(item.record.size, np.uint8) for item in items]
    seen: list[int] = []

    def on_result(index: int, result: GetResult) -> None:
        assert result.outcome is OK
        assert_right(items[index].key, outs[index][: result.num_bytes])
        seen.append(index)

    store.get([GetRequest(i.key, out) for i, out in zip(items, outs, strict=True)], on_result)
    assert seen == [0, 1, 2, 3]


def test_what_is_stored_is_not_stored_twice(reopen: Callable[[], RemoteStore]) -> None:
    items = [make_item(1), make_item(2, LONG_BYTES)]
    assert reopen().put(items) == [OK, OK]
    store = reopen()
    assert store.put([*items, make_item(3)]) == [KEPT, KEPT, OK]
    stats = store.stats()
    assert stats["put_kept"] == 2
    assert stats["put_bytes"] == PAGE_BYTES


def test_an_exact_record_replaces_a_lossy_one_and_never_the_reverse(store: RemoteStore) -> None:
    exact, lossy, worse = (make_item(1, quality=quality) for quality in (0, 1, 2))
    assert store.put([lossy]) == [OK]
    assert store.put([worse]) == [KEPT]
    assert store.put([exact]) == [OK]
    assert store.put([lossy]) == [KEPT]
    [head] = store.head([exact.key])
    assert head.meta is not None
    assert head.meta.quality == 0


def test_levels_of_a_page_lie_side_by_side(store: RemoteStore) -> None:
    items = [
        make_item(1),
        make_item(1, codec="hier", level=1, quality=1),
        make_item(1, codec="hier", level=2, quality=1),
        make_item(1, codec="cachegen-paper", level=2, quality=1),
    ]
    assert store.put(items[:3]) == [OK] * 3
    assert read(store, items) == [OK, OK, OK, MISSING]


def test_namespaces_and_adapters_never_cross(store: RemoteStore) -> None:
    items = [make_item(1), make_item(1, namespace=OTHER_NAMESPACE), make_item(1, lora=ADAPTER)]
    for number, item in enumerate(items):
        assert read(store, items) == [OK] * number + [MISSING] * (3 - number)
        assert store.put([item]) == [OK]
    assert read(store, items) == [OK] * 3


def test_prefixes_do_not_see_each_other(url: str, store: RemoteStore) -> None:
    store.put([make_item(1)])
    other = open_store(url, prefix="somebody-else")
    try:
        assert other.wait_usable(WAIT_S)
        assert read(other, [make_item(1)]) == [MISSING]
    finally:
        other.close()


def test_heads_tell_length_and_quality_without_the_bytes(store: RemoteStore) -> None:
    items = [make_item(1), make_item(2, LONG_BYTES, codec="hier", level=3, quality=1)]
    store.put(items)
    found = store.head([*(item.key for item in items), make_item(3).key])
    assert [head.outcome for head in found] == [OK, OK, MISSING]
    assert [head.num_bytes for head in found] == [PAGE_BYTES, LONG_BYTES, 0]
    assert found[1].meta is not None
    assert (found[1].meta.codec, found[1].meta.level, found[1].meta.quality) == ("hier", 3, 1)
    assert found[1].meta.position == 128


def test_ranges_come_as_they_are(request: pytest.FixtureRequest, store: RemoteStore) -> None:
    way = request.node.name
    items = make_items(range(3))
    assert store.put(items) == [OK] * 3
    wanted = [(0, 600), (600, 1), (512, 10_000), (PAGE_BYTES - 5, 100), (PAGE_BYTES + 50, 10)]
    requests = [
        RangeRequest(item.key, np.full(num, 0xEE, np.uint8), offset)
        for item in items
        for offset, num in wanted
    ]
    missing = RangeRequest(make_item(7).key, np.zeros(64, np.uint8))
    results = store.read_ranges([*requests, missing])
    assert [result.outcome for result in results] == [OK, OK, OK, OK, MISSING] * 3 + [MISSING]
    for number, asked in enumerate(requests):
        record = items[number // len(wanted)].record[:PAGE_BYTES]
        part = record[asked.offset : asked.offset + asked.out.size]
        assert results[number].num_bytes == part.size
        if asked.offset >= 512 and "encrypt" not in way:  # `put` fills the header in
            assert np.array_equal(asked.out[: part.size], part)


def test_what_was_rejected_is_stored_anew(store: RemoteStore) -> None:
    item = make_item(1)
    assert store.put([item]) == [OK]
    store.reject(item.key, "bad_checksum")
    request = RangeRequest(item.key, np.zeros(64, np.uint8))
    assert store.read_ranges([request])[0].outcome == MISSING
    assert store.stats()["error_rejected_bad_checksum"] == 1
    assert store.put([item]) == [OK]
    assert store.read_ranges([request])[0].outcome == OK


def test_a_record_that_does_not_fit_is_a_miss(store: RemoteStore) -> None:
    items = [make_item(1), make_item(2, LONG_BYTES)]
    store.put(items)
    for room in (600, PAGE_BYTES - 1):
        assert read(store, items, room=room) == [REJECTED, REJECTED]


def test_what_is_no_record_or_no_room_stops_nothing(store: RemoteStore) -> None:
    good = make_item(1)
    frozen = np.zeros(PAGE_BYTES, np.uint8)
    frozen.flags.writeable = False
    foreign = PutItem(make_item(2).key, make_item(3).record)
    empty = PutItem(make_item(4).key, np.zeros(5000, np.uint8))
    short = PutItem(good.key._replace(page_hash=b"short"), good.record)
    cut = PutItem(make_item(5).key, make_item(5).record[:3000])
    assert store.put([foreign, empty, short, cut, good]) == [MALFORMED] * 4 + [OK]
    outs = [np.zeros(512, np.uint8), np.zeros((2, 9000), np.uint8), frozen, np.zeros(50000, "u1")]
    results = store.get([GetRequest(good.key, out) for out in outs])
    assert [result.outcome for result in results] == [MALFORMED] * 3 + [OK]


def test_empty_calls_do_nothing(store: RemoteStore) -> None:
    assert store.put([]) == []
    assert store.get([]) == []
    assert store.head([]) == []
    assert store.delete([]) == 0


def test_what_is_deleted_is_gone_and_nothing_else(store: RemoteStore) -> None:
    items, never_there = make_items(range(40)), make_item(99).key
    assert store.put(items) == [OK] * 40
    keys = [item.key for item in items]
    assert store.delete([*keys[:25], never_there]) == 25
    assert heads(store, items) == [MISSING] * 25 + [OK] * 15
    assert store.delete(keys[:25]) == 0
    assert store.put(items[:25]) == [OK] * 25
    assert heads(store, items) == [OK] * 40


def test_usage_is_told_or_zero(store: RemoteStore) -> None:
    store.put(make_items(range(10)))
    usage = store._engine.usage(Deadline.after(WAIT_S))
    assert usage.used_bytes >= 0


def test_many_threads_at_once(store: RemoteStore) -> None:
    items = make_items(range(24))
    wrong: list[object] = []

    def work(first: int) -> None:
        mine = items[first::4]
        for _ in range(3):
            put = store.put(mine)
            got = read(store, mine)
            if not set(put) <= {OK, KEPT} or got != [OK] * len(mine):
                wrong.append((put, got))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_writers_of_one_page_leave_one_whole_record(
    reopen: Callable[[], RemoteStore],
) -> None:
    # The same page with other bytes, as two servers at different positions may have it.
    versions = [make_item(1, LONG_BYTES, filler=bytes([v]) * (LONG_BYTES - 512)) for v in range(4)]
    stores = [reopen() for _ in versions]
    threads = [
        threading.Thread(target=store.put, args=([item],))
        for store, item in zip(stores, versions, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = np.zeros(LONG_BYTES, np.uint8)
    [result] = stores[0].get([GetRequest(versions[0].key, out)])
    assert result == GetResult(OK, LONG_BYTES)
    assert len(set(out[512:].tolist())) == 1


def test_after_close_everything_is_a_miss_and_no_thread_is_left(
    reopen: Callable[[], RemoteStore],
) -> None:
    before = set(threading.enumerate())
    store = reopen()
    item = make_item(1)
    store.put([item])
    store.close()
    store.close()
    assert read(store, [item]) == [UNAVAILABLE]
    assert store.put([item]) == [UNAVAILABLE]
    assert heads(store, [item]) == [UNAVAILABLE]
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.is_alive()], left


def test_what_is_let_go_can_be_had_until_it_went(reopen: Callable[[], RemoteStore]) -> None:
    store = reopen()
    items = [*make_items(range(4)), make_item(4, LONG_BYTES)]
    assert store.put(items) == [OK] * 5
    store.let_go([item.key for item in [*items, make_item(9)]], LONG_BYTES)
    store.let_go([], LONG_BYTES)
    assert store.stats().get("error_unavailable", 0) == 0
    assert read(reopen(), items) == [OK] * 5
