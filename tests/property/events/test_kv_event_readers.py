"""KV events of the tiers: a reader that believes them knows where every page is."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
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
from sglang_ext.seam.kv_events import TierEventRecorder, record_medium  # noqa: E402
from sglang_ext.seam.page_hash import hashes_of  # noqa: E402
from sglang_ext.settings.config import HierKVConfig  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.store.types import ON_DISK, READY  # noqa: E402
from testkit.kv_reader import KvIndex  # noqa: E402
from tests.unit.store.store_rig import DIGEST, OTHER, Rig  # noqa: E402

PAGE = 4
CPU, DISK, GPU = "CPU_PINNED", "DISK", "GPU"


class World:
    """A page store, a device that has some prompts, and who reads the events."""

    def __init__(
        self, folder: Path, seed: int, *, record_medium: StorageMedium = StorageMedium.DISK
    ) -> None:
        self.random = random.Random(seed)
        self.record_medium = record_medium
        self.rig = Rig(
            folder, slots=24, index=512, max_bytes=1 << 20, segment_bytes=128 << 10,
            policy=self.random.choice(["write_through", "write_back"]),
        )  # fmt: skip
        self.root = SimpleNamespace(
            parent=None, hash_value=[], event_hash_value=None, key=RadixKey(array("q"))
        )
        self.heads: dict[int, Any] = {}  # nodes of the first halves
        self.on_device: dict[int, Any] = {}  # of the second ones
        self.recorder = TierEventRecorder(
            KVCacheEventRecorder(enabled=True, page_size=PAGE),
            self.rig.store,
            record_medium=record_medium,
            max_seen_pages=60,
            home_now=lambda: self.rig.space.number if seed % 2 else -1,
        )
        self.reader = KvIndex()

    def close(self) -> None:
        self.rig.store.close(0)
        assert self.rig.disk is not None
        self.rig.disk.close()

    def key(self, prompt: int) -> Any:
        """Four prompts have one first half; those of every third four have a salt."""
        tokens = [prompt // 4] * (2 * PAGE) + [100 + prompt] * (2 * PAGE)
        return RadixKey(array("q", tokens), cache_salt="salt" if prompt // 4 % 3 == 2 else None)

    def node(self, parent: Any, key: Any) -> Any:
        """A new node of the device's tree."""
        node = SimpleNamespace(parent=parent, key=key, hash_value=None, event_hash_value=None)
        self.recorder.record_store(node)
        return node

    def step(self) -> None:
        actions = [self.compute, self.compute, self.leave, self.save, self.save, self.promote]
        actions += [self.take, self.take]
        self.random.choice(actions)()
        if self.random.random() < 0.01:
            self.random.choice([self.flush, self.clear, self.update])()

    def compute(self, prompt: int | None = None) -> None:
        prompt = self.random.randrange(24) if prompt is None else prompt
        if prompt in self.on_device:
            return
        key, half = self.key(prompt), 2 * PAGE
        if prompt // 4 not in self.heads:
            head = RadixKey(key.token_ids[:half], cache_salt=key.cache_salt)
            self.heads[prompt // 4] = self.node(self.root, head)
        tail = RadixKey(key.token_ids[half:], cache_salt=key.cache_salt)
        self.on_device[prompt] = self.node(self.heads[prompt // 4], tail)

    def leave(self) -> None:
        if self.on_device:
            prompt = self.random.choice(list(self.on_device))
            self.recorder.record_remove(self.on_device.pop(prompt))
            if all(other // 4 != prompt // 4 for other in self.on_device):
                self.recorder.record_remove(self.heads.pop(prompt // 4))

    def save(self) -> None:
        if self.on_device:
            self.rig.save(hashes_of(self.key(self.random.choice(list(self.on_device))), PAGE))

    def promote(self) -> None:
        hashes = hashes_of(self.key(self.random.randrange(24)), PAGE)
        plan = self.rig.store.plan(self.rig.space, hashes)
        if plan is not None:
            self.rig.wait(plan)
            self.rig.store.cancel_plan(plan)

    def flush(self) -> None:
        self.on_device.clear()
        self.heads.clear()
        self.recorder.record_all_cleared()

    def clear(self) -> None:
        self.rig.store.end_epoch()
        self.rig.store.clear()
        self.rig.space = self.rig.store.space(self.rig.space.digest)

    def update(self) -> None:
        """Other weights, or those of before again."""
        self.rig.store.end_epoch()
        digest = self.random.choice([DIGEST, OTHER])
        self.rig.store.open_namespace(digest, {})
        self.rig.space = self.rig.store.space(digest)
        self.flush()

    def take(self) -> None:
        self.reader.apply(self.recorder.take())

    def drain(self) -> None:
        """Takes all there is to be told."""
        self.take()
        while self.recorder._pending or self.recorder._gone:
            self.take()

    def check(self) -> None:
        """All moves ended: what the reader believes is so, page by page."""
        self.rig.settle()
        self.rig.until(self.is_right)  # write-back goes on writing what nobody uses
        assert self.placed() <= set(self.reader.media)

    def is_right(self) -> bool:
        self.drain()
        return all(self.is_right_about(prompt) for prompt in range(24))

    def is_right_about(self, prompt: int) -> bool:
        """Nothing is said that is not so; and of what the device has, all that is so."""
        key = self.key(prompt)
        tiers = self.rig.store.tiers_of(hashes_of(key, PAGE)).tolist()
        blocks = self.reader.blocks(list(key.token_ids), PAGE, key.cache_salt or "")
        told = [self.reader.media.get(block, set()) - {GPU} for block in blocks]
        told += [set[str]()] * (len(tiers) - len(told))
        have = [self.media_of(bits) for bits in tiers]
        if prompt in self.on_device:
            return told == have
        return all(said <= is_so for said, is_so in zip(told, have, strict=True))

    def placed(self) -> set[int]:
        """Blocks of the pages that are in the tiers, behind nothing but such and what is known."""
        pages = {page.block: page for page in self.recorder._told.values()}
        known = set(self.reader.media)

        def is_placed(block: int | None) -> bool:
            if block is None or block in known:
                return True
            return block in pages and is_placed(pages[block].parent)

        return {block for block in pages if is_placed(block)}

    def media_of(self, bits: int) -> set[str]:
        media = ((READY, CPU), (ON_DISK, self.record_medium.value))
        return {medium for bit, medium in media if bits & bit}

    @property
    def sees_disk(self) -> bool:
        return any(DISK in media for media in self.reader.media.values())


@pytest.mark.parametrize(
    ("seed", "medium"),
    [*((seed, StorageMedium.DISK) for seed in range(12)),
     *((seed, StorageMedium.CPU) for seed in range(3))],
)  # fmt: skip
def test_a_reader_knows_where_every_page_is(
    tmp_path: Path, seed: int, medium: StorageMedium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_PAGES_A_TURN", 8)
    if seed % 3 == 2:
        monkeypatch.setattr(kv_events, "_MAX_MOVED", 12)  # pages move faster than one looks
    world = World(tmp_path, seed, record_medium=medium)
    told_of_disk = False
    try:
        for _ in range(8):
            for _ in range(60):
                world.step()
            world.check()
            told_of_disk |= world.sees_disk
        assert told_of_disk == (medium is StorageMedium.DISK)
        assert world.rig.count("evicted_pages")
        assert bool(world.rig.count("kv_events_overrun")) == (seed % 3 == 2)
    finally:
        world.close()


def test_pages_that_the_device_never_had_are_told_when_it_has_them(tmp_path: Path) -> None:
    """After a restart the disk has pages whose tokens nobody knows."""
    world = World(tmp_path, 0)
    try:
        hashes = hashes_of(world.key(5), PAGE)
        world.rig.save(hashes)
        world.rig.settle()
        world.take()
        assert not world.reader.media
        world.compute(5)
        world.check()
        assert all(media >= {GPU, CPU} for media in world.reader.media.values())
        assert len(world.reader.media) == len(hashes)
    finally:
        world.close()


def test_what_is_told_again_can_be_placed_where_a_path_lies_in_two_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device had it again, and dropped it before events were taken: only the tiers hold it."""
    world = World(tmp_path, 0)
    key = world.key(5)
    hashes = hashes_of(key, PAGE)
    bits = {row.tobytes(): ON_DISK if place < 2 else READY for place, row in enumerate(hashes)}
    monkeypatch.setattr(
        world.rig.store, "tiers_of",
        lambda rows, _: np.array([bits[row.tobytes()] for row in rows], np.uint8),
    )  # fmt: skip
    try:
        for _ in range(2):
            world.compute(5)
            world.leave()
            world.drain()
            found = world.reader.prefix(list(key.token_ids), PAGE, {CPU, DISK})
            assert found == len(hashes) * PAGE
    finally:
        world.close()


@pytest.mark.parametrize("again", [0, 8])
def test_of_a_long_path_a_turn_tells_a_part_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """As pages leave DRAM, leaves first; beside it the first ones may move in each turn."""
    monkeypatch.setattr(kv_events, "_PAGES_A_TURN", 8)
    monkeypatch.setattr(kv_events, "_STEPS_A_TURN", 16)
    world = World(tmp_path, 0)
    monkeypatch.setattr(
        world.rig.store, "tiers_of", lambda rows, _: np.full(len(rows), READY, np.uint8)
    )
    try:
        key = RadixKey(array("q", range(50 * PAGE)))
        world.recorder.record_remove(world.node(world.root, key))
        world.reader.apply(KVCacheEventRecorder.take(world.recorder))  # of the device alone
        names = [row.tobytes() for row in hashes_of(key, PAGE)]
        world.recorder._pending.clear()
        world.recorder._pending.update(dict.fromkeys(reversed(names)))
        for _ in range(50 // 16 + 1 + 50 // 8 + 1 if not again else 30):
            before = len(world.reader.media)
            world.take()
            assert len(world.reader.media) - before <= 8
            world.recorder._pending.update(dict.fromkeys(names[:again]))
        assert world.reader.prefix(list(key.token_ids), PAGE, {CPU}) == 50 * PAGE
    finally:
        world.close()


def test_records_in_coded_dram_are_in_dram(tmp_path: Path) -> None:
    world = World(tmp_path, 0, record_medium=StorageMedium.CPU)
    try:
        for _ in range(300):
            world.step()
        world.rig.settle()
        world.compute(5)
        hashes = hashes_of(world.key(5), PAGE)
        world.rig.save(hashes)  # all has settled, so room can be made for them
        world.rig.settle()
        world.drain()
        assert world.rig.count("written_pages")
        assert not world.sees_disk
        assert sum(CPU in media for media in world.reader.media.values()) >= len(hashes)
    finally:
        world.close()


def test_pages_on_disk_are_told_of_as_the_flag_says() -> None:
    config = HierKVConfig(disk_dir="/d")
    assert record_medium(config) is StorageMedium.DISK
    assert record_medium(replace(config, kv_events_disk="host")) is StorageMedium.CPU
    assert record_medium(HierKVConfig()) is StorageMedium.CPU  # coded, in DRAM


def test_more_pages_than_are_followed_stay_untold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MAX_TOLD", 5)
    world = World(tmp_path, 1)
    try:
        for prompt in range(0, 24, 4):
            world.compute(prompt)
            world.rig.save(hashes_of(world.key(prompt), PAGE))
        world.rig.settle()
        world.take()
        in_dram = [media for media in world.reader.media.values() if CPU in media]
        assert len(in_dram) == 5
        assert world.rig.count("kv_events_untold_pages")
    finally:
        world.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each look-up in one key space was of."""
    counted: list[int] = []
    lookup = PageIndex.lookup

    def counting(index: PageIndex, hashes: np.ndarray, namespace: int) -> np.ndarray:
        counted.append(len(hashes))
        return lookup(index, hashes, namespace)

    monkeypatch.setattr(PageIndex, "lookup", counting)
    return counted


@pytest.mark.parametrize("moves", [False, True])
def test_pages_of_a_known_adapter_are_looked_for_in_it_alone(
    tmp_path: Path, looks: list[int], *, moves: bool
) -> None:
    """It is known of what enters the tree for a request, and of what moved since."""
    world = World(tmp_path, 0 if moves else 1)
    adapters = [world.rig.store.space(DIGEST, bytes([number]) * 32) for number in range(1, 200)]
    world.rig.space = adapters[77]
    try:
        world.compute(5)
        world.rig.save(hashes_of(world.key(5), PAGE), space=world.rig.space)
        world.rig.settle()
        looks.clear()
        world.drain()
        assert world.reader.prefix(list(world.key(5).token_ids), PAGE, {CPU}) == 4 * PAGE
        assert not looks
    finally:
        world.close()


def test_a_move_under_other_weights_says_nothing_of_where_a_page_is(tmp_path: Path) -> None:
    """Nor where the page lies under the weights of now, and did not move since."""
    world = World(tmp_path, 0)
    hashes = hashes_of(world.key(5), PAGE)

    def save_under(digest: bytes) -> None:
        world.rig.store.end_epoch()
        world.rig.store.open_namespace(digest, {})
        world.rig.space = world.rig.store.space(digest)
        world.rig.save(hashes, space=world.rig.space)
        world.rig.settle()

    try:
        save_under(DIGEST)
        world.take()
        save_under(OTHER)
        world.rig.store.end_epoch()
        world.rig.space = world.rig.store.space(DIGEST)
        world.compute(5)
        world.check()
        assert world.reader.prefix(list(world.key(5).token_ids), PAGE, {CPU}) == 4 * PAGE
    finally:
        world.close()


def test_a_turn_takes_a_tenth_of_the_time_at_most(tmp_path: Path) -> None:
    """Steps that decode are short; what a turn leaves over is told in the next ones."""
    world, now_s, told = World(tmp_path, 1), 0.0, []
    world.recorder._turns = kv_events._Turns(lambda: now_s)
    key = RadixKey(array("q", range(4096 * PAGE)))
    tiers_of = world.rig.store.tiers_of

    def counting(hashes: np.ndarray, homes: np.ndarray) -> np.ndarray:
        told.append(len(hashes))
        return tiers_of(hashes, homes)

    world.rig.store.tiers_of = counting  # type: ignore[method-assign, assignment]
    try:
        world.recorder._max_seen_pages = 4096
        world.node(world.root, key)
        for passed_s in (0.0, 1 / 64, 1 / 16, 60.0):
            now_s += passed_s
            world.take()
        assert told == [256, 256, 512, 2048]
        assert len(world.recorder._pending) == 4096 - sum(told)
    finally:
        world.close()


def test_for_pages_of_an_unknown_adapter_a_turn_looks_a_little_and_the_next_one_goes_on(
    tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_LOOKS_A_TURN", 400)
    world = World(tmp_path, 0)
    for number in range(1, 200):
        space = world.rig.store.space(DIGEST, bytes([number]) * 32)
    key = RadixKey(array("q", range(10 * PAGE)))
    try:
        world.rig.save(hashes_of(key, PAGE), space=space)
        world.rig.settle()
        world.take()
        looks.clear()
        world.node(world.root, key)
        for turn in range(1, 6):
            world.take()
            assert sum(looks) == 400 * turn
            assert world.reader.prefix(list(key.token_ids), PAGE, {CPU}) == 2 * turn * PAGE
        assert not world.recorder._pending
    finally:
        world.close()


def test_nothing_is_followed_where_nothing_is_published(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    device = KVCacheEventRecorder(enabled=False, page_size=PAGE)
    recorder = TierEventRecorder(
        device, rig.store, record_medium=StorageMedium.DISK, max_seen_pages=4
    )
    rig.save(np.zeros((1, 32), np.uint8))
    assert recorder.take() == []
    assert rig.books.table.on_moved is None
    rig.store.close(0)
    assert rig.disk is not None
    rig.disk.close()
