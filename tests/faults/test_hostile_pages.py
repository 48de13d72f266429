"""Forged pages with right checksums: none is used, none reads another's, none stops the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.coded_remote.coded import coded_pages
from sglang_ext.device.copier import CopyError
from sglang_ext.device.layout import HEADER_BYTES, ROPE_BOUND, ROPE_DELTA, ROPE_PRE, U8, write_tail
from sglang_ext.kernels.rope import PagedView, gpu
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.record import RAW_CODEC, parse_header
from sglang_ext.tiers.remote import (
    PutItem,
    RemoteKey,
    level_name,
    open_engine,
    parse_remote_url,
)
from sglang_ext.tiers.remote.base import Deadline, Value, value_name
from sglang_ext.tiers.remote.record_values import split
from sglang_ext.tiers.remote.staged import stage
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.faults.hostile_pages import (
    DIM,
    LAYOUT,
    MAX_POSITION,
    PAGE,
    SPACE,
    Device,
    codec_of,
    forge_header,
    page,
    page_hash,
    ropes,
    rules,
)
from tests.faults.hostile_targets import forged_staged
from tests.faults.record_mutations import forged_page
from tests.tiers.remote.remote_cases import (
    KEPT,
    LONG_BYTES,
    OK,
    PART_BYTES,
    WAIT_S,
    make_item,
    make_items,
    open_store,
    read,
    until,
)
from tests.unit.remote.remote_world import no_prefill

NUM_PAGES = 6
CANARY = 0xC5


def far(number: int) -> U8:
    """A page that says it was saved where no rotary table reaches."""
    slot = page(number, 0)
    payload_bytes = write_tail(slot, LAYOUT, rope_state=ROPE_DELTA, position=1 << 33)
    forge_header(slot, payload_bytes, position=1 << 33, rope="delta")
    return slot


def short(number: int) -> U8:
    """A page of one byte; what follows is whatever the slot held before."""
    slot = page(number)
    forge_header(slot, 1)
    slot[HEADER_BYTES + 1 :] = 0
    return slot


def hidden(number: int) -> U8:
    """As `far`, with the header of an honest page."""
    slot = page(number, 0)
    write_tail(slot, LAYOUT, rope_state=ROPE_DELTA, position=1 << 33)
    return slot


def _tail(number: int, **changes: Any) -> U8:
    slot = page(number, 0)
    tail: dict[str, Any] = {"rope_state": ROPE_PRE, "position": number * PAGE, **changes}
    forge_header(slot, write_tail(slot, LAYOUT, **tail))
    return slot


def _header(number: int, **fields: Any) -> U8:
    slot = page(number)
    forge_header(slot, **fields)
    return slot


FORGERIES: dict[str, Callable[[int], U8]] = {
    "far": far,
    "short": short,
    "hidden": hidden,
    "no corrections": lambda n: _header(n, payload_bytes=LAYOUT.payload_bytes(0)),
    "too long": lambda n: _header(n, payload_bytes=LAYOUT.slot_bytes - HEADER_BYTES),
    "tokens": lambda n: _header(n, num_tokens=1),
    "level": lambda n: _header(n, level=3),
    "profile": lambda n: _header(n, profile=b"x"),
    "header's position": lambda n: _header(n, position=(n + 1) * PAGE),
    "part of a page": lambda n: _header(n, position=n * PAGE + 1),
    "header's rope": lambda n: _header(n, rope="bound"),
    "tail's position": lambda n: _tail(n, position=(n + 1) * PAGE),
    "tail's state": lambda n: _tail(n, rope_state=ROPE_BOUND),
    "sign": lambda n: _tail(n, position=(1 << 64) - PAGE),
}


def test_honest_pages_are_admitted_and_what_lies_behind_them_is_erased() -> None:
    for number in (0, 5, MAX_POSITION // PAGE - 1):
        slot = page(number)
        end = HEADER_BYTES + parse_header(slot)[1]
        wanted = slot[:end].copy()
        slot[end:] = CANARY
        assert rules().admits_page(slot)
        assert np.array_equal(slot[:end], wanted)
        assert not slot[end:].any()


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_page_is_none(name: str) -> None:
    assert not rules().admits_page(FORGERIES[name](3))


def test_pages_of_another_way_to_store_k_are_none() -> None:
    assert not rules("delta").admits_page(page(3))
    bound = ropes()
    bound[1].movable = False
    slot = page(3, 0)
    forge_header(slot, write_tail(slot, LAYOUT, rope_state=ROPE_DELTA, position=3 * PAGE))
    forge_header(slot, rope="delta")
    assert rules("delta").admits_page(slot)
    assert not rules().admits_page(slot)


@pytest.mark.parametrize(
    "position", [1 << 33, MAX_POSITION, (1 << 64) - 1, MAX_POSITION - PAGE + 1]
)
def test_no_load_looks_behind_the_end_of_a_rotary_table(position: int) -> None:
    """However a page came to DRAM: a bad one is found before it is promised, or is an error."""
    slots = np.stack([page(0), page(1), page(2)])
    device = Device(slots, mode="delta")
    for number in range(3):
        write_tail(slots[number], LAYOUT, rope_state=ROPE_DELTA, position=number * PAGE)
    assert device.load([0, 1, 2], 0) is not None
    write_tail(slots[1], LAYOUT, rope_state=ROPE_DELTA, position=position)
    where = np.arange(3)
    assert device.copier.unusable(where, 0).tolist() == [1]
    assert device.copier.damaged(where).tolist() == [1]
    with pytest.raises(CopyError):
        device.copier.prepare_load(where, np.arange(3 * PAGE), 0)
    assert device.load([0], 0) is not None


def test_the_device_kernels_are_not_launched_with_positions_outside_of_the_table() -> None:
    (spec,) = {rope.spec for rope in ropes() if rope.spec is not None}
    view = PagedView(page(0)[None], np.zeros(1, np.int64), LAYOUT.k_offsets[0], PAGE)
    pool = torch.zeros((PAGE, 1, DIM), dtype=torch.bfloat16)
    rows = np.arange(PAGE)
    for bad in (rows + (1 << 33), rows - 1, rows + MAX_POSITION - PAGE + 1):
        with pytest.raises(IndexError, match="positions must lie in"):
            gpu.move_k(view, bad, rows, spec, pool, rows)
        with pytest.raises(IndexError, match="positions must lie in"):
            gpu.move_k(view, rows, bad, spec, pool, rows)
        with pytest.raises(IndexError, match="positions must lie in"):
            gpu.load_k(view, bad, spec, pool, rows, None)


class World:
    """A server's page store over a store or a disk that somebody else wrote to."""

    def __init__(self, folder: Path, below: str, codec_id: str, url: str = "") -> None:
        self.arena = HostArena(64, LAYOUT.slot_bytes)
        self.arena.slots[:] = CANARY  # as if it had held another tenant's pages
        self.codec = codec_of(codec_id or "zstd")
        self.below = below
        disk = open_disk(folder) if below == "disk" else None
        url = url or f"file://{folder / 'store'}?size=1GB&free=1"
        remote = open_store(url) if disk is None else None
        assert remote is None or remote.wait_usable(WAIT_S)
        self.store = PageStore(
            self.arena,
            PageIndex(256),
            disk,
            PageStoreConfig(),
            self.codec if disk is not None else None,
            remote=remote,
            open_coded=coded_pages(self.codec, no_prefill) if codec_id else None,
            rules=rules(),
        )
        if disk is not None:
            self.store.connect(disk)
        self.store.open_namespace(SPACE.digest, {})
        self.space = self.store.space(SPACE.digest)

    def fetch(self) -> int:
        """Has a request wait for all pages; returns how many are there then."""
        return self.fetch_pages(range(NUM_PAGES))

    def fetch_pages(self, numbers: range) -> int:
        """The same for neighbouring pages."""
        hashes = hashes_of(numbers)
        sizes = np.full(len(numbers), LAYOUT.slot_bytes if self.below == "remote" else 0, np.int64)
        plan = self.store.plan(self.space, hashes, remote_sizes=sizes)
        if plan is not None:
            assert until(lambda: plan.done)
            self.store.cancel_plan(plan)
        assert self.store.wait_idle(300)
        return self.store.ready_prefix(self.space, hashes)

    def shown(self, number: int) -> bytes | None:
        """What a request gets of a page that is in DRAM; None where it is none."""
        ticket = self.store.pin_ready(self.space, hashes_of(range(number, number + 1)))
        if ticket is None:
            return None
        slots = ticket.slots.tolist()
        loaded = Device(self.arena.slots).load(slots, number * PAGE)
        rest = self.arena.slots[slots[0]].tobytes()
        self.store.release(ticket.slots)
        return None if loaded is None else loaded + rest

    def close(self) -> None:
        self.store.close(5)


def hashes_of(numbers: range) -> np.ndarray:
    rows = b"".join(page_hash(number) for number in numbers)
    return np.frombuffer(rows, np.uint8).reshape(-1, 32)


def open_disk(folder: Path) -> DiskTier:
    return DiskTier(DiskConfig(folder / "disk", 64 << 20, 0, segment_bytes=1 << 20))


def write(folder: Path, records: list[U8], codec_id: str) -> None:
    """As `put`, into the folder of a disk tier."""
    disk = open_disk(folder)
    try:
        disk.open_namespace(SPACE.digest, LAYOUT.slot_bytes, {}, packed=bool(codec_id))
        found = disk.write(SPACE.digest, [_on_disk(slot, codec_id) for slot in records])
        assert None not in found
    finally:
        disk.close()


def _on_disk(slot: U8, codec_id: str) -> U8:
    if not codec_id:
        return slot
    coded = codec_of(codec_id).encode(slot)
    assert coded is not None
    return np.concatenate([coded, np.zeros(-len(coded) % 4096, np.uint8)])


def put(folder: Path, records: list[U8], codec_id: str) -> None:
    """What the hostile writer stores, sealed."""
    (folder / "store").mkdir()
    store = open_store(f"file://{folder / 'store'}?size=1GB&free=1")
    try:
        assert store.wait_usable(WAIT_S)
        codec = codec_of(codec_id or "zstd")
        items = []
        for number, slot in enumerate(records):
            record, level = slot, level_name(RAW_CODEC, 0)
            if codec_id:
                coded = codec.encode(slot)
                assert coded is not None
                levels = codec.levels(coded)
                record, level = stage(coded, levels.first, levels.ends), level_name(codec_id, 0)
            items.append(PutItem(RemoteKey(SPACE.digest, page_hash(number), b"", level), record))
        outcomes = store.put(items)
        assert {outcome.value for outcome in outcomes} == {"ok"}
    finally:
        store.close()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if redis_binary() is None:
        pytest.skip("no redis-server is installed")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


@pytest.mark.parametrize(
    ("below", "codec_id", "forgery"),
    [
        ("remote", "", short),
        ("remote", "", far),
        ("remote", "", hidden),
        ("remote", "zstd", far),
        ("remote", "zstd", hidden),
        ("disk", "", short),
        ("disk", "", hidden),
        ("disk", "zstd", hidden),
    ],
)
def test_a_forged_page_is_a_miss_once(
    tmp_path: Path, worlds: list[World], below: str, codec_id: str, forgery: Any
) -> None:
    """The pages before it come, it is not read again, and nothing of the slots is ever shown."""
    records = [page(number) for number in range(NUM_PAGES)]
    records[4] = forgery(4)
    (put if below == "remote" else write)(tmp_path, records, codec_id)
    world = World(tmp_path, below, codec_id)
    worlds.append(world)
    world.fetch()  # a page that proves bad may take along those that came with it
    assert world.fetch() == 4
    rejected = _num_rejected(world)
    assert rejected > 0
    assert world.fetch() == 4
    assert _num_rejected(world) == rejected


@pytest.mark.parametrize("codec_id", ["", "zstd"])
def test_a_page_of_another_place_is_not_fetched_twice(
    tmp_path: Path, worlds: list[World], codec_id: str
) -> None:
    """Only who knows the prompt can tell: the page is sound, and another's."""
    records = [page(number) for number in range(NUM_PAGES)]
    other = page(5)
    forge_header(other, page_hash=page_hash(4))
    records[4] = other
    put(tmp_path, records, codec_id)
    world = World(tmp_path, "remote", codec_id)
    worlds.append(world)
    assert world.fetch() == NUM_PAGES
    ticket = world.store.pin_ready(world.space, hashes_of(range(NUM_PAGES)))
    assert ticket is not None
    copier = Device(world.arena.slots).copier
    bad = copier.unusable(ticket.slots.astype(np.int64), 0)
    assert bad.tolist() == [4]
    world.store.drop_damaged(ticket, bad)
    world.store.release(ticket.slots)
    world.store.clear()
    world.fetch()
    assert world.fetch() == 4


def _num_rejected(world: World) -> int:
    counts = [*world.store.stats().items(), *(world.store.remote_stats() or {}).items()]
    return sum(num for name, num in counts if "rejected" in name)


@pytest.mark.parametrize("kind", ["redis", "file"])
@pytest.mark.parametrize("codec_id", ["", "hier"])
def test_a_real_store_whose_writer_forges_any_field(
    tmp_path: Path, worlds: list[World], redis: RedisServer, kind: str, codec_id: str
) -> None:
    """Each page is a request's only one; what is not refused is loaded, and is its record's."""
    url = f"redis://127.0.0.1:{redis.port}"
    if kind == "file":
        (tmp_path / "store").mkdir()
        url = f"file://{tmp_path / 'store'}?size=1GB&free=1"
    engine = open_engine(parse_remote_url(url))
    random, canary = Random(5), bytes([CANARY]) * 8
    values, numbers = [], range(1, 49)
    for number in numbers:
        value = forged_page(page(number), random, LAYOUT)
        level = level_name(RAW_CODEC, 0)
        if codec_id:
            coded = codec_of(codec_id).encode(page(number))
            assert coded is not None
            value = forged_staged(codec_of(codec_id), coded, random)
            level = level_name(codec_id, codec_of(codec_id).level)
        name = value_name("hkv", RemoteKey(SPACE.digest, page_hash(number), b"", level))
        values.append(Value(name, (np.frombuffer(value, np.uint8),), replaces=True))
    engine.put(values, lambda *_: None, Deadline.after(WAIT_S))
    engine.close()
    world = World(tmp_path, "remote", codec_id, url)
    worlds.append(world)
    num_ready = num_shown = 0
    for number in numbers:
        num_ready += world.fetch_pages(range(number, number + 1))
        shown = world.shown(number)
        num_shown += shown is not None
        assert shown is None or canary not in shown
    assert num_shown <= num_ready < len(numbers)
    assert world.store.stats().get("remote_failures", 0) == 0


def test_a_value_of_another_type_is_bad_alone_and_is_stored_anew(redis: RedisServer) -> None:
    """A list in a value's place, which the server refuses to read."""
    store = open_store(f"redis://127.0.0.1:{redis.port}", prefix="types")
    try:
        assert store.wait_usable(WAIT_S)
        items = [*make_items(range(3)), make_item(3, LONG_BYTES), *make_items(range(4, 6))]
        assert store.put(items) == [OK] * 6
        lists = [value_name("types", item.key) for item in items[:3]]
        lists.append(split(value_name("types", items[3].key), items[3].record, PART_BYTES)[1].name)
        for name in lists:
            assert redis.call("DEL", name) == 1
            redis.call("RPUSH", name, "x")
        for _ in range(5):
            outcomes = read(store, items)
            assert (OK in outcomes[:4], outcomes[4:]) == (False, [OK, OK])
        assert store.usable
        assert store.stats().get("breaker_opened", 0) == 0
        assert store.put(items) == [OK] * 4 + [KEPT] * 2
        assert read(store, items) == [OK] * 6
    finally:
        store.close()
