"""Coded pages in a shared store: levels, profiles, quality and damage, over a real Redis."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.coded_remote import lookup
from sglang_ext.tiers.records.quality import ANY, Quality
from sglang_ext.tiers.records.record import parse_header
from sglang_ext.tiers.store import PutShare
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.remote import profiles
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import until
from tests.unit.codec.test_page_codec import page
from tests.unit.remote.remote_world import Host, body, codec_of, expected, hashes_of

pytestmark = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

Make = Callable[..., Host]
LOSSY = ("hier", "cachegen-paper", "cachegen-released")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture
def make(server: RedisServer) -> Iterator[Make]:
    server.call("FLUSHALL")
    made: list[Host] = []

    def build(
        codec_id: str = "hier", *, learns: bool = True, url: str = "", **settings: Any
    ) -> Host:
        url = url or f"redis://127.0.0.1:{server.port}"
        made.append(Host(url, codec_of(codec_id, learns=learns), **settings))
        return made[-1]

    yield build
    for host in made:
        host.close()


def keys(server: RedisServer, pattern: str) -> list[bytes]:
    found = server.call("KEYS", pattern)
    assert isinstance(found, list)
    return [bytes(key) for key in found]  # type: ignore[arg-type]


def num_calls(server: RedisServer, command: str) -> int:
    """How often a command was given since the last reset."""
    text = server.call("INFO", "commandstats")
    assert isinstance(text, bytes)
    found = [line for line in text.decode().splitlines() if line.startswith(f"cmdstat_{command}:")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in found)


@pytest.mark.parametrize("codec_id", LOSSY)
def test_what_one_coded_another_decodes_with_its_profile(make: Make, codec_id: str) -> None:
    one, two = make(codec_id), make(codec_id, learns=False)
    numbers = range(40)
    one.save(numbers)
    assert one.uploaded(40)
    two.fetch(numbers)
    assert two.ready(numbers) == 40
    assert two.ready(numbers, Quality.EXACT) == 0
    for number, slot in zip(numbers, two.slots(numbers), strict=True):
        assert parse_header(slot)[0].quality == Quality.LOSSY
        assert body(slot) == expected(one.codec, number)
    level = {"hier": 2}.get(codec_id, 1)
    assert two.count(f"remote_level_{level}_pages") == two.count("remote_promoted_pages") == 40
    assert 0 < two.count("remote_bytes_in") <= one.count("remote_bytes_out")
    assert one.count("remote_coded_pages") == 40


def test_headers_are_read_once(
    make: Make, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_REMEMBERED_S", 60.0)  # however busy the machine is
    one, two = make(), make()
    one.save(range(30))
    assert one.uploaded(30)
    server.call("CONFIG", "RESETSTAT")
    two.fetch(range(30))
    assert two.ready(range(30)) == 30
    # Of each page its coded and its raw name are asked for; then one range of it is read.
    assert num_calls(server, "getrange") == 3 * 30


def test_what_was_found_a_moment_ago_may_be_gone(make: Make, server: RedisServer) -> None:
    one, two = make(), make()
    one.save(range(12))
    assert one.uploaded(12)
    hashes = hashes_of(range(12))
    remote_lookup = RemoteLookup(two.space, hashes, 0, ANY)
    assert two.store.ask_remote(remote_lookup)
    assert until(lambda: remote_lookup.done)
    (gone,) = keys(server, f"*{hashes[7].tobytes().hex()}*")
    server.call("DEL", gone)
    plan = two.store.plan(two.space, hashes, remote_sizes=remote_lookup.sizes)
    assert plan is not None
    assert until(lambda: plan.done)
    two.store.cancel_plan(plan)
    assert two.ready(range(12)) == 7


@pytest.mark.parametrize("codec_id", ["zstd", "lossless"])
def test_lossless_pages_are_exact_there(make: Make, codec_id: str) -> None:
    one, two = make(codec_id), make(codec_id)
    one.save(range(8))
    assert one.uploaded(8)
    two.fetch(range(8), Quality.EXACT)
    assert two.ready(range(8), Quality.EXACT) == 8
    assert [body(slot) for slot in two.slots(range(8))] == [body(page(n)) for n in range(8)]


def test_a_lost_profile_is_a_miss_and_counted(make: Make, server: RedisServer) -> None:
    one, two = make(), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    (name,) = keys(server, "*:profile.0")
    server.call("DEL", name)
    two.fetch(range(8))
    assert two.ready(range(8)) == 0
    assert two.count("remote_missing_profile_pages") == 1
    assert one.codec.knows(parse_header(one.codec.encode(page(1)))[0])  # type: ignore[arg-type]


def test_pages_whose_profile_is_lost_are_stored_anew(make: Make, server: RedisServer) -> None:
    """Their maker is gone; who looks for them keeps their values young, and cannot use them."""
    one, two, three = make(), make(learns=False), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    (name,) = keys(server, "*:profile.0")
    server.call("DEL", name)
    two.save(range(8))  # it has learned nothing yet, and puts them as they are
    assert until(lambda: (two.store.remote_stats() or {}).get("upload_queue") == 0)
    three.fetch(range(8))
    assert three.ready(range(8)) == 8
    assert [body(slot) for slot in three.slots(range(8))] == [body(page(n)) for n in range(8)]


def test_who_knows_a_lost_profile_stores_it_anew(make: Make, server: RedisServer) -> None:
    one, two, three = make(), make(learns=False), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    two.fetch(range(8))
    (name,) = keys(server, "*:profile.0")
    server.call("DEL", name)
    two.store.clear()
    two.save(range(8))
    assert until(lambda: two.count("remote_duplicate_pages") == 8)
    assert keys(server, "*:profile.0") == [name]
    three.fetch(range(8))
    assert three.ready(range(8)) == 8
    assert three.count("remote_level_2_pages") == 8


def test_no_page_is_stored_without_its_profile(
    make: Make, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no file can be made of it, pages wait for their next save."""
    one, two = make(), make(learns=False)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nowhere")
        for _ in range(2):
            one.save(range(8))
            assert until(lambda: (one.store.remote_stats() or {}).get("upload_queue") == 0)
            one.store.clear()
        assert keys(server, "*") == []
        assert one.count("remote_upload_dropped_pages") == 16
    one.save(range(8))
    assert one.uploaded(8)
    two.fetch(range(8))
    assert two.ready(range(8)) == 8


def test_another_profile_under_the_digest_is_a_miss(make: Make, server: RedisServer) -> None:
    one, two = make(), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    (name,) = keys(server, "*:profile.0")
    server.call("SETRANGE", name, 4000, b"\0\1\2\3\4\5\6\7")
    two.fetch(range(8))
    assert two.ready(range(8)) == 0
    assert keys(server, "*:profile.0") == [], "nobody can use it"
    three, four = make(), make(learns=False)  # one that has it stores it again
    three.save(range(8, 12))
    assert three.uploaded(4)
    four.fetch(range(12))
    assert four.ready(range(12)) == 12


def test_a_profile_whose_header_is_bad_is_a_miss_and_counted(
    make: Make, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make(), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    monkeypatch.setattr(profiles, "_TRY_AGAIN_S", 0.0)
    (name,) = keys(server, "*:profile.0")
    whole = server.call("GET", name)
    assert isinstance(whole, bytes)
    meta, _ = parse_header(one.codec.encode(page(1)))  # type: ignore[arg-type]
    most = two.codec.max_profile_bytes(meta.codec)
    for value, kind in (
        (b"?" * len(whole), "bad_magic"),
        (whole[:100], "bad_header"),
        (profiles._record(meta, bytes(most + 1)).tobytes(), "profile"),
    ):
        server.call("SET", name, value)
        two.fetch(range(8))
        assert two.ready(range(8)) == 0
        stats = two.store.remote_stats()
        assert stats is not None
        assert stats[f"error_rejected_{kind}"] == 1
    server.call("SET", name, whole)
    two.fetch(range(8))
    assert two.ready(range(8)) == 8


def test_pages_of_a_codec_that_has_learned_nothing_travel_raw(make: Make) -> None:
    one, two = make(learns=False), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    assert one.count("remote_coded_pages") == 0
    two.fetch(range(8), Quality.EXACT)
    assert two.ready(range(8), Quality.EXACT) == 8
    assert two.count("remote_raw_pages") == 8
    assert [body(slot) for slot in two.slots(range(8))] == [body(page(n)) for n in range(8)]


def test_raw_and_coded_stretches_of_a_prefix_both_come(make: Make) -> None:
    raw, coded, two = make(learns=False), make(), make(learns=False)
    raw.save(range(5))
    assert raw.uploaded(5)
    coded.save(range(5, 20))
    assert coded.uploaded(15)
    raw.save(range(20, 23))
    assert raw.uploaded(8)
    two.fetch(range(30))
    assert two.ready(range(30)) == 23
    assert two.ready(range(30), Quality.EXACT) == 5
    assert (two.count("remote_raw_pages"), two.count("remote_level_2_pages")) == (8, 15)


def test_an_exact_request_takes_raw_pages_and_no_lossy_ones(make: Make) -> None:
    raw, coded, two = make(learns=False), make(), make(learns=False)
    raw.save(range(4))
    assert raw.uploaded(4)
    coded.save(range(8))
    assert coded.uploaded(8)
    two.fetch(range(8), Quality.EXACT)
    assert two.ready(range(8)) == two.ready(range(8), Quality.EXACT) == 4
    two.fetch(range(8))
    assert (two.ready(range(8)), two.ready(range(8), Quality.EXACT)) == (8, 4)


def test_no_page_is_coded_twice(make: Make, server: RedisServer) -> None:
    one, two, three = make(), make(), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    two.fetch(range(8))
    copies = dict(zip(range(8), two.slots(range(8)), strict=True))
    server.call("FLUSHALL")
    # The device had them from here, DRAM lost them, and they are saved again.
    two.store.clear()
    two.save(range(8), Quality.LOSSY, copies)
    two.save(range(8, 12), Quality.LOSSY)  # computed over them: their values are the model's own
    assert two.uploaded(12)
    assert two.count("remote_kept_raw_pages") == 8
    three.fetch(range(12))
    assert three.ready(range(12)) == 12
    assert three.ready(range(12), Quality.EXACT) == 0
    slots = three.slots(range(12))
    assert [body(slot) for slot in slots[:8]] == [body(copies[n]) for n in range(8)]
    assert (three.count("remote_raw_pages"), three.count("remote_level_2_pages")) == (8, 4)


def test_what_came_lossy_goes_to_disk_as_it_is(make: Make, tmp_path: Path) -> None:
    one = make()
    one.save(range(8))
    assert one.uploaded(8)
    two = make(folder=tmp_path, transcoder=codec_of("hier"))
    two.fetch(range(8))
    two.save(range(8, 12), Quality.LOSSY)  # computed here, over them
    assert until(lambda: two.count("written_pages") == 12)
    assert (two.count("uncoded_pages"), two.count("coded_pages")) == (8, 4)


def test_a_folder_serves_levels_too(make: Make, tmp_path: Path) -> None:
    url = f"file://{tmp_path}?size=1GB&free=1"
    one, two = make(url=url), make(learns=False, url=url)
    one.save(range(30))
    assert one.uploaded(30)
    two.fetch(range(30))
    assert two.ready(range(30)) == two.count("remote_level_2_pages") == 30
    for number, slot in zip(range(30), two.slots(range(30)), strict=True):
        assert body(slot) == expected(one.codec, number)


def test_records_longer_than_a_part_come_whole(make: Make, server: RedisServer) -> None:
    one = make("zstd")
    one.save(range(6))  # of some 60 KB, in parts of 64 KB at most
    assert one.uploaded(6)
    two = make("zstd")
    two.remote._part_bytes = 16 << 10  # a reader need not know the writer's
    two.fetch(range(6))
    assert two.ready(range(6), Quality.EXACT) == 6
    assert [body(slot) for slot in two.slots(range(6))] == [body(page(n)) for n in range(6)]


def test_too_many_pages_to_remember_count_as_decoded() -> None:
    decoded = DecodedPages(max_pages=3)
    metas = [parse_header(page(number))[0] for number in range(6)]
    lossy = [replace(meta, quality=1) for meta in metas]
    for meta in (*metas, *lossy[:2]):
        decoded.note(meta)
    assert [decoded.may_lose(meta) for meta in lossy] == [False, False, True, True, True, True]
    for meta in lossy[2:4]:
        decoded.note(meta)
    assert not any(decoded.may_lose(meta) for meta in lossy)
    assert all(decoded.may_lose(meta) for meta in metas)


def test_an_exact_page_takes_the_place_of_a_fetched_one(make: Make) -> None:
    one, two = make(), make(learns=False)
    one.save(range(4))
    assert one.uploaded(4)
    two.fetch(range(4))
    assert two.ready(range(4), Quality.EXACT) == 0
    two.save(range(4))
    assert two.ready(range(4), Quality.EXACT) == 4
    two.fetch(range(4))
    assert two.ready(range(4), Quality.EXACT) == 4


@pytest.mark.parametrize("at", [100, 520, 600, 900])
def test_damage_ends_the_prefix_in_front_of_it(make: Make, server: RedisServer, at: int) -> None:
    one, two = make(), make(learns=False)
    one.save(range(40))
    assert one.uploaded(40)
    (name,) = keys(server, f"*:{hashes_of(range(30, 31))[0].tobytes().hex()}:*")
    old = server.call("GETRANGE", name, at, at)
    assert isinstance(old, bytes | bytearray)
    server.call("SETRANGE", name, at, bytes([old[0] ^ 0x55]))
    two.fetch(range(40))
    assert two.ready(range(40)) == 30
    rejected = [n for n in two.remote.stats() if n.startswith("error_rejected_")]
    assert rejected
    slots = two.slots(range(30))
    assert [body(slot) for slot in slots] == [expected(one.codec, n) for n in range(30)]


def test_ranks_that_hold_the_same_share_coded_pages(make: Make, server: RedisServer) -> None:
    """Each has learned a profile of its own; the one's share is all pages here."""
    numbers, damaged = range(8), range(3, 4)
    shares = PutShare(0, 2), PutShare(1, 2)
    assert shares[0].has(hashes_of(numbers)).all()
    one, two = (make(share=share) for share in shares)
    two.save(numbers)
    one.save(numbers)
    assert one.uploaded(8)
    assert until(lambda: two.count("remote_left_pages") == 8)
    assert two.count("remote_coded_pages") == 0
    two.store.clear()
    two.fetch(numbers)
    assert two.ready(numbers) == 8

    (name,) = keys(server, f"*:{hashes_of(damaged)[0].tobytes().hex()}:*")
    server.call("SETRANGE", name, 900, bytes(16))
    two.store.clear()
    two.fetch(numbers)
    assert two.ready(numbers) < 8
    two.save(damaged)  # it knows that the store's is bad; the other one does not
    assert two.uploaded(1)
    two.store.clear()
    two.fetch(numbers)
    assert two.ready(numbers) == 8


def test_what_is_stored_is_not_coded_or_sent_again(make: Make) -> None:
    one, two = make(), make()
    one.save(range(8))
    assert one.uploaded(8)
    coded = two.codec.counts().get("pages_coded", 0)
    two.save(range(8))
    assert until(lambda: two.count("remote_duplicate_pages") == 8)
    assert two.codec.counts().get("pages_coded", 0) == coded


def test_two_requests_for_the_same_pages_fetch_them_once(make: Make) -> None:
    one, two = make(), make(learns=False, slots=512)  # half of it may be planned
    numbers = range(60)
    one.save(numbers)
    assert one.uploaded(60)
    plans = [two.plan(hashes_of(numbers)) for _ in range(4)]
    for plan in plans:
        assert plan is not None
        assert until(lambda: plan.done)  # noqa: B023
        two.store.cancel_plan(plan)
        assert plan.num_stored == 60
        assert not plan.fetch_failed
    assert two.count("remote_promoted_pages") == 60
    assert two.count("remote_bytes_in") <= one.count("remote_bytes_out")


def test_dram_that_is_too_small_takes_what_it_can(make: Make) -> None:
    one, two = make(), make(learns=False, slots=30)
    one.save(range(100))
    assert one.uploaded(100)
    two.fetch(range(100))
    num = two.ready(range(100))
    assert num <= 30
    for number, slot in zip(range(num), two.slots(range(num)), strict=True):
        assert body(slot) == expected(one.codec, number)


def test_store_that_dies_ends_the_wait(make: Make, server: RedisServer) -> None:
    one, two = make(), make(learns=False)
    one.save(range(8))
    assert one.uploaded(8)
    server.kill()
    try:
        two.fetch(range(8))
        assert two.ready(range(8)) == 0
    finally:
        server.start()


def test_levels_arrays_are_sorted() -> None:
    codec = codec_of("hier", level=4)
    record = codec.encode(page(7))
    assert record is not None
    levels = codec.levels(record)
    assert (levels.first, len(levels.ends)) == (0, 5)
    assert list(levels.ends) == sorted(set(levels.ends))
    assert levels.ends[-1] == record.size
    assert np.diff(levels.ends).min() > 0
