"""`hier-kv inspect`, `verify` and `prune` of real stores that a real server's store filled.

By default a cluster is asked about namespaces and some records; the long form has all questions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testkit.ports import free_port
from testkit.remote.redis_server import RedisCluster, RedisServer, redis_binary
from tests.tiers.protection_cases import KEY, OTHER_KEY
from tests.tiers.remote.remote_cases import (
    ADAPTER,
    LONG_BYTES,
    MISSING,
    NAMESPACE,
    OK,
    OTHER_NAMESPACE,
    WAIT_S,
    make_item,
    make_items,
    open_store,
    read,
)
from tests.unit.cli.disk_folder import listing, refusal, run, run_json, with_key

Capture = pytest.CaptureFixture[str]
ITEMS = [
    *make_items(range(10)),
    *make_items(range(10, 12), LONG_BYTES),
    make_item(20, lora=ADAPTER),
    make_item(21, codec="x", level=2, quality=1),
    make_item(22, 5000, codec="profile"),
]
OTHERS = make_items(range(3), namespace=OTHER_NAMESPACE)
needs_redis = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")


def redis(path: Path) -> Iterator[str]:
    with RedisServer(path / "redis") as server:
        yield f"redis://127.0.0.1:{server.port}"


def cluster(path: Path) -> Iterator[str]:
    with RedisCluster(path / "cluster") as nodes:
        yield f"redis://127.0.0.1:{nodes.nodes[1].port}?cluster=yes"


def folder(path: Path) -> Iterator[str]:
    (path / "store").mkdir()
    yield f"file://{path}/store?size=1GB&free=1"


KINDS: dict[str, Callable[[Path], Iterator[str]]] = {
    "redis": redis, "cluster": cluster, "file": folder
}  # fmt: skip
STORES = pytest.mark.parametrize(
    "url",
    [pytest.param(name, marks=[] if name == "file" else [needs_redis]) for name in KINDS],
    indirect=True,
)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield from KINDS[request.param](tmp_path)


def put(url: str, mode: str = "plain") -> None:
    """Stores the records of two namespaces, and one of another deployment."""
    store = open_store(url, protect=(mode,))
    assert store.wait_usable(WAIT_S)
    assert set(store.put([*ITEMS, *OTHERS])) == {OK}
    store.close()
    store = open_store(url, prefix="hkv-other")
    assert store.wait_usable(WAIT_S)
    assert store.put(make_items([0])) == [OK]
    store.close()


def outcomes(url: str, items: list, prefix: str = "hkv") -> set:  # type: ignore[type-arg]
    store = open_store(url, prefix=prefix)
    assert store.wait_usable(WAIT_S)
    found = set(read(store, items))
    store.close()
    return found


@STORES
def test_records_are_counted_by_namespace_and_kind(url: str, capsys: Capture) -> None:
    put(url)
    status, facts = run_json(capsys, "inspect", url)
    assert status == 0
    found = {each["namespace"]: each for each in facts["namespaces"]}
    own = found[NAMESPACE.hex()]
    assert {kind: each["records"] for kind, each in own["kinds"].items()} == {
        "raw": 13, "x.2": 1, "profile.0": 1
    }  # fmt: skip
    assert (own["records"], found[OTHER_NAMESPACE.hex()]["records"]) == (15, 3)
    stored = sum(each.record.size - 777 for each in ITEMS)
    assert stored <= own["bytes"] <= 1.5 * stored
    assert own["oldest_s"] is not None
    status, out, _ = run(capsys, "inspect", url)
    assert "18 records" in out
    assert "?" not in out.splitlines()[0], "options are not shown"


@pytest.mark.sampled("plain-redis", "*-file", "tag-cluster")
@STORES
@pytest.mark.parametrize("mode", ["plain", "tag"])
def test_sound_records_are_sound(url: str, tmp_path: Path, capsys: Capture, mode: str) -> None:
    put(url, mode)
    key = with_key(tmp_path, KEY)
    status, facts = run_json(capsys, "verify", url, *(key if mode == "tag" else []))
    assert (status, facts["sound"], facts["bad"], facts["left_out"]) == (0, 18, [], [])
    if mode == "tag":
        assert run_json(capsys, "verify", url)[1]["unreadable"] == 18
        status, facts = run_json(capsys, "verify", url, *with_key(tmp_path, OTHER_KEY))
        assert (status, facts["unauthentic"]) == (1, 18)
        assert {bad["reason"] for bad in facts["bad"]} == {"unknown_key"}


@pytest.mark.sampled("redis", "file")
@STORES
def test_encrypted_records_are_not_judged(url: str, tmp_path: Path, capsys: Capture) -> None:
    put(url, "encrypt")
    key = with_key(tmp_path, KEY)
    status, facts = run_json(capsys, "verify", url, *key)
    assert (status, facts["unreadable"]) == (1, 18)
    assert {bad["reason"] for bad in facts["bad"]} == {"encrypted"}
    _, facts = run_json(capsys, "prune", url, "--damaged", *key)
    assert facts["pages"] == 0


@pytest.mark.sampled("redis", "file", "cluster")
@STORES
def test_a_namespace_goes_and_all_others_stay(url: str, capsys: Capture) -> None:
    put(url)
    chosen = ["prune", url, "--namespace", NAMESPACE.hex()[:12]]
    assert run_json(capsys, *chosen, "--dry-run")[1]["pages"] == 15
    assert outcomes(url, ITEMS) == {OK}
    lines = run(capsys, *chosen, "--dry-run")[1].splitlines()
    page = f"{NAMESPACE.hex()[:16]}/{ITEMS[0].key.page_hash.hex()[:16]} raw, "
    assert len([line for line in lines if line.startswith(f"would remove {page}")]) == 1
    assert [line for line in lines[:-1] if len(line) > 100] == [], "the last names the store"
    assert len([line for line in lines if f" of adapter {ADAPTER.hex()[:16]}, " in line]) == 1
    status, facts = run_json(capsys, *chosen)
    assert len([text for text in facts["removed"] if ITEMS[0].key.page_hash.hex() in text]) == 1
    assert (status, facts["pages"]) == (0, 15)
    assert outcomes(url, ITEMS) == {MISSING}
    assert outcomes(url, OTHERS) == {OK}
    assert outcomes(url, make_items([0]), "hkv-other") == {OK}
    assert [each["namespace"] for each in run_json(capsys, "inspect", url)[1]["namespaces"]] == [
        OTHER_NAMESPACE.hex()
    ]
    assert run_json(capsys, "prune", url, "--all")[1]["pages"] == 3
    assert outcomes(url, OTHERS) == {MISSING}
    assert outcomes(url, make_items([0]), "hkv-other") == {OK}


def files_of(tmp_path: Path, number: int) -> list[Path]:
    page = next(item for item in ITEMS if item.key.page_hash == make_item(number).key.page_hash)
    place = tmp_path / "store" / "hkv-1" / NAMESPACE.hex()
    return sorted(place.rglob(f"{page.key.page_hash.hex()}*"), key=lambda path: len(path.name))


@pytest.mark.parametrize("url", ["file"], indirect=True)
@pytest.mark.parametrize("mode", ["plain", "tag"])
def test_damage_is_found_and_goes(url: str, tmp_path: Path, capsys: Capture, mode: str) -> None:
    put(url, mode)
    key = with_key(tmp_path, KEY) if mode == "tag" else []
    [short] = files_of(tmp_path, 1)
    data = bytearray(short.read_bytes())
    data[5000] ^= 1
    short.write_bytes(data)
    files_of(tmp_path, 10)[1].unlink()  # a part
    cut = files_of(tmp_path, 11)[0]
    os.truncate(cut, 100)
    before = listing(tmp_path / "store")
    status, facts = run_json(capsys, "verify", url, *key)
    assert (status, facts["sound"]) == (1, 15)
    assert facts["corrupt"] + facts["unauthentic"] == 3
    assert "incomplete" in {bad["reason"] for bad in facts["bad"]}
    assert listing(tmp_path / "store") == before
    status, facts = run_json(capsys, "prune", url, "--damaged", *key)
    assert (status, facts["pages"]) == (0, 3)
    status, facts = run_json(capsys, "verify", url, *key)
    assert (status, facts["sound"], facts["bad"]) == (0, 15, [])


@needs_redis
def test_damage_in_redis_is_found_and_goes(tmp_path: Path, capsys: Capture) -> None:
    with RedisServer(tmp_path / "redis") as server:
        url = f"redis://127.0.0.1:{server.port}"
        put(url)
        name = f"hkv:1:{NAMESPACE.hex()}:{ITEMS[2].key.page_hash.hex()}:-:raw"
        server.call("SETRANGE", name, 700, b"damage")
        server.call("RPUSH", "hkv:1:mine", "not a value")
        status, facts = run_json(capsys, "verify", url)
        assert (status, facts["sound"], facts["corrupt"]) == (1, 17, 1)
        assert facts["bad"][0]["where"] == name
        assert run_json(capsys, "prune", url, "--damaged")[1]["pages"] == 1
        assert run(capsys, "verify", url)[0] == 0
        run(capsys, "prune", url, "--all")
        assert server.call("EXISTS", "hkv:1:mine") == 1


@needs_redis
def test_redis_says_how_old_values_are_or_not(tmp_path: Path, capsys: Capture) -> None:
    with RedisServer(tmp_path / "redis") as server:
        url = f"redis://127.0.0.1:{server.port}"
        put(url)
        assert run_json(capsys, "prune", url, "--older-than", "1h")[1]["pages"] == 0
        server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
        assert "does not say" in refusal(capsys, "prune", url, "--older-than", "1h")
        assert "18 records" in run(capsys, "inspect", url)[1]


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_old_records_go_with_their_parts(url: str, tmp_path: Path, capsys: Capture) -> None:
    put(url)
    long_ago_s = time.time() - 10 * 86400
    os.utime(files_of(tmp_path, 10)[0], (long_ago_s, long_ago_s))
    os.utime(files_of(tmp_path, 3)[0], (long_ago_s, long_ago_s))
    status, facts = run_json(capsys, "prune", url, "--older-than", "9d")
    assert (status, facts["pages"]) == (0, 2)
    assert files_of(tmp_path, 10) == []
    assert run_json(capsys, "verify", url)[1]["sound"] == 16


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_links_and_others_files_stay(url: str, tmp_path: Path, capsys: Capture) -> None:
    put(url)
    outside = tmp_path / "outside"
    (outside / "ab" / "cd").mkdir(parents=True)
    top = tmp_path / "store" / "hkv-1"
    value = outside / "ab" / "cd" / f"abcd{'0' * 60}.-.raw.hkv"
    value.write_text("not theirs")
    (top / ("0" * 64)).symlink_to(outside)
    (top / "notes.txt").write_text("mine")
    target = files_of(tmp_path, 1)[0]
    link = target.with_name(target.name.replace(".raw.", ".x.1."))
    link.symlink_to(value)
    status, facts = run_json(capsys, "prune", url, "--all")
    assert (status, facts["pages"]) == (0, 18)
    assert value.read_text() == "not theirs"
    assert link.is_symlink()
    assert (top / "notes.txt").exists()


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, capsys: Capture) -> None:
    down = f"redis://127.0.0.1:{free_port()}"
    assert "is it up" in refusal(capsys, "inspect", down)
    assert "lists no names" in refusal(capsys, "verify", "mooncake://master:50051")
    assert refusal(capsys, "inspect", "ftp://x", status=2).startswith(
        "hier-kv: the URL must begin with"
    )
    assert "folder that is there" in refusal(capsys, "inspect", f"file://{tmp_path}/absent")
    assert "nothing is chosen" in refusal(capsys, "prune", down, status=2)
    assert run_json(capsys, "inspect", f"file://{tmp_path}")[1]["namespaces"] == []


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_length_that_is_stated_takes_no_memory(url: str, tmp_path: Path, capsys: Capture) -> None:
    put(url)
    os.truncate(files_of(tmp_path, 1)[0], 60 << 30)  # a few bytes on the disk
    status, facts = run_json(capsys, "verify", url)
    assert status == 1
    assert facts["sound"] == 17
    assert "too_long" in str(facts)
