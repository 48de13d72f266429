"""Namespaces come and go with the weights: what is kept of them stays bounded."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.key_spaces import KEPT_NAMESPACES
from sglang_ext.tiers.store.openings import Opening, Openings
from sglang_ext.tiers.store.types import Epoch, KeySpace
from tests.unit.store.store_rig import (
    DIGEST,
    NONE,
    SLOT,
    Make,
    Rig,
    check_content,
    pages,
    rigs,
)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def digest_of(number: int) -> bytes:
    return hashlib.sha256(b"weights %d" % number).digest()


def update(rig: Rig, number: int) -> None:
    """Weights change as in a server: what was given out under those of before passes no more."""
    rig.store.end_epoch()
    rig.store.open_soon(digest_of(number), {})
    rig.space = rig.store.space(digest_of(number))


def opened(rig: Rig) -> None:
    rig.until(lambda: not rig.store.stats()["openings_pending"])


def left_by_a_former_run(make: Make) -> np.ndarray:
    """Eight pages of the first update's weights that are on disk; their hashes."""
    rig = make(slots=64)
    update(rig, 1)
    mine = pages("a", 8)
    rig.save(mine)
    rig.settle()
    rig.store.close(30)
    return mine


def with_a_write_that_hangs(make: Make) -> Rig:
    """Until `io.open_gate` is set: nothing else is done to the disk meanwhile."""
    rig = make(slots=64)
    rig.io.open_gate.clear()
    rig.save(pages("of before", 2))
    rig.until(lambda: rig.books.spills.num_spilling > 0)
    return rig


def num_segment_files_open(folder: Path) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found += ".hkv" in path and path.startswith(f"{folder}/")
    return found


def allocated_bytes(folder: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in folder.rglob("*.hkv"))


def test_three_hundred_updates_leave_no_more_than_one(make: Make, tmp_path: Path) -> None:
    """Each with pages that reach the disk, which is short of room for those of all."""
    segment_bytes, max_bytes = 1 << 20, 4 << 20
    rig = make(slots=8, max_bytes=max_bytes, segment_bytes=segment_bytes, index=1024)
    assert rig.disk is not None
    catalog = rig.disk._catalog
    most_open, most_allocated = 0, 0
    for number in range(300):
        update(rig, number)
        mine = pages(f"of {number} ", 6)
        rig.save(mine)
        rig.settle()
        assert rig.on_disk(mine) == 6
        check_content(rig, mine)
        most_open = max(most_open, len(rig.disk._writer.actives))
        most_allocated = max(most_allocated, allocated_bytes(tmp_path / "disk"))
    assert most_open <= 2
    assert most_allocated <= max_bytes
    # Each segment that is left may be of one namespace; those of before the last few have no more.
    most = len(catalog.segments()) + KEPT_NAMESPACES + 1
    assert most < 150
    assert rig.store.num_spaces <= most
    assert len(rig.store._spaces.all_and_asked_for()[1]) <= most
    assert len(catalog.namespaces()) <= most
    folders = [each for each in (tmp_path / "disk").iterdir() if each.is_dir()]
    assert len(folders) <= most


def test_updates_without_pages_leave_nothing(make: Make, tmp_path: Path) -> None:
    rig = make()
    for number in range(300):
        update(rig, number)
    opened(rig)
    assert rig.store.num_spaces <= KEPT_NAMESPACES + 1
    folders = [each for each in (tmp_path / "disk").iterdir() if each.is_dir()]
    assert len(folders) <= KEPT_NAMESPACES + 1
    mine = pages("last", 3)
    rig.save(mine)
    rig.settle()
    assert rig.on_disk(mine) == 3


def test_without_a_disk_key_spaces_are_bounded_too(make: Make) -> None:
    rig = make(disk=False)
    for number in range(300):
        update(rig, number)
        rig.save(pages(f"of {number} ", 3))
        rig.settle()
    assert rig.store.num_spaces <= rig.arena.num_slots + KEPT_NAMESPACES + 1


def test_an_update_gives_back_what_the_segment_of_before_preallocated(
    make: Make, tmp_path: Path
) -> None:
    rig = make(segment_bytes=8 << 20)
    rig.save(pages("a", 3))
    rig.settle()
    assert allocated_bytes(tmp_path / "disk") > 7 << 20
    assert num_segment_files_open(tmp_path) == 1
    update(rig, 1)
    opened(rig)
    rig.until(lambda: allocated_bytes(tmp_path / "disk") < 1 << 20)
    assert num_segment_files_open(tmp_path) == 0


def test_weights_that_come_back_have_their_pages(make: Make) -> None:
    rig = make(slots=64)
    update(rig, 0)
    first, mine = rig.space, pages("a", 4)
    rig.save(mine)
    rig.settle()
    for number in range(1, 3 * KEPT_NAMESPACES):
        update(rig, number)
        opened(rig)
    update(rig, 0)
    assert rig.space.number == first.number, "something is stored of it"
    check_content(rig, mine)
    assert rig.on_disk(mine) == 4


def test_weights_that_come_back_after_they_were_forgotten(make: Make, tmp_path: Path) -> None:
    """Nothing was stored of them: they are opened again, and pages go to disk as before."""
    rig = make(slots=64)
    update(rig, 0)
    first = rig.space
    for number in range(1, 3 * KEPT_NAMESPACES):
        update(rig, number)
        opened(rig)
    assert not (tmp_path / "disk" / digest_of(0).hex()[:16]).exists()
    assert not rig.store.is_open(first.number)
    update(rig, 0)
    assert rig.space.number != first.number, "no number is given out twice"
    mine = pages("a", 4)
    rig.save(mine)
    rig.settle()
    assert rig.on_disk(mine) == 4
    check_content(rig, mine)


def test_a_start_removes_folders_in_which_nothing_lies(tmp_path: Path) -> None:
    config = DiskConfig(tmp_path, 64 << 20, 0, segment_bytes=256 << 10, direct_io="off")
    with DiskTier(config) as tier:
        for number in range(5):
            tier.open_namespace(digest_of(number), SLOT, {})
    other = tmp_path / digest_of(0).hex()[:16] / "notes.txt"
    other.write_text("not ours")
    DiskTier(config).close()
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == [other.parent.name]
    assert other.read_text() == "not ours"


def check_loaded(rig: Rig, mine: np.ndarray) -> None:
    """A request's plan brings all of these pages to DRAM, as they were saved."""
    plan = rig.store.plan(rig.space, mine)
    assert plan is not None
    rig.wait(plan)
    check_content(rig, mine)
    rig.store.cancel_plan(plan)
    rig.store.check()


def test_a_namespace_that_opens_late_finds_what_a_former_run_left(make: Make) -> None:
    """Pages that were stored since are those of now; the others come from the disk."""
    mine = left_by_a_former_run(make)
    rig = with_a_write_that_hangs(make)
    update(rig, 1)
    assert rig.store.locate_prefix(rig.space, mine).here == 0
    rig.save(mine[:3])
    assert rig.ready(mine) == 3
    rig.io.open_gate.set()
    opened(rig)
    rig.settle()
    assert rig.on_disk(mine) == 8
    check_loaded(rig, mine)


def test_a_clear_before_a_namespace_is_open_leaves_nothing_of_it(make: Make) -> None:
    mine = left_by_a_former_run(make)
    rig = with_a_write_that_hangs(make)
    update(rig, 1)
    rig.store.clear()
    rig.space = rig.store.space(digest_of(1))
    rig.io.open_gate.set()
    rig.until(lambda: not rig.store.stats()["clears_pending"])
    opened(rig)
    rig.settle()
    assert rig.store.locate_prefix(rig.space, mine).here == 0
    rig.save(mine)
    rig.settle()
    assert rig.on_disk(mine) == 8
    check_content(rig, mine)


def test_a_clear_while_a_namespace_is_being_opened_leaves_nothing_of_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = left_by_a_former_run(make)
    rig = make(slots=64)
    assert rig.disk is not None
    open_namespace, entered = rig.disk.open_namespace, threading.Event()
    may_go_on = threading.Event()

    def slowly(*args: Any, enter: Any, **kwargs: Any) -> Any:
        def wait(found: Any) -> None:
            entered.set()
            assert may_go_on.wait(300)
            enter(found)

        return open_namespace(*args, enter=wait, **kwargs)

    monkeypatch.setattr(rig.disk, "open_namespace", slowly)
    update(rig, 1)
    assert entered.wait(300)
    rig.store.clear()
    rig.space = rig.store.space(digest_of(1))
    may_go_on.set()
    opened(rig)
    assert rig.store.locate_prefix(rig.space, mine).here == 0
    rig.until(lambda: not rig.store.stats()["clears_pending"])
    rig.settle()
    assert rig.store.locate_prefix(rig.space, mine).here == 0


def test_an_index_says_which_namespaces_have_rows() -> None:
    index = PageIndex(64)
    assert index.namespaces_in_use() == []
    for number in (7, 3, 40_000):
        index.insert(pages(f"{number}", 2), number)
    assert index.namespaces_in_use() == [3, 7, 40_000]
    index.remove(index.lookup(pages("7", 2), 7))
    assert index.namespaces_in_use() == [3, 40_000]


def test_a_namespace_that_ended_comes_back_empty(tmp_path: Path) -> None:
    """Its records were nobody's: a clear would not have reached them any more."""
    rig = Rig(tmp_path)
    mine = pages("a", 3)
    rig.save(mine)
    rig.settle()
    assert rig.disk is not None
    rig.disk.end_namespace(DIGEST)
    assert not (tmp_path / "disk" / DIGEST.hex()[:16]).exists()
    assert rig.on_disk(mine) == 0
    assert not len(rig.disk.open_namespace(DIGEST, SLOT, {}))
    rig.store.close(5)


def test_namespaces_that_a_failing_disk_could_not_open_are_all_opened_in_the_end(
    make: Make,
) -> None:
    rig = make()
    rig.io.fail_writes = True
    for number in range(2 * KEPT_NAMESPACES):
        update(rig, number)
    rig.until(lambda: rig.count("namespace_open_failures") >= 2 * KEPT_NAMESPACES)
    rig.io.fail_writes = False
    opened(rig)
    mine = pages("a", 3)
    rig.save(mine)
    rig.settle()
    assert rig.on_disk(mine) == 3


def test_live_weights_that_come_back_are_opened_before_those_between(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages reach the disk; nobody waits for what those of before have there."""
    rig = with_a_write_that_hangs(make)
    assert rig.disk is not None
    open_namespace, opened_digests = rig.disk.open_namespace, list[bytes]()

    def noted(digest: bytes, *args: Any, **kwargs: Any) -> Any:
        opened_digests.append(digest)
        return open_namespace(digest, *args, **kwargs)

    monkeypatch.setattr(rig.disk, "open_namespace", noted)
    for number in (1, 2, 1):
        update(rig, number)
    rig.io.open_gate.set()
    opened(rig)
    assert opened_digests == [digest_of(1), digest_of(2)]


def test_live_weights_that_come_back_do_not_wait_out_an_earlier_failure() -> None:
    """With each failure the next try is twice as far away; a disk may be sound again by then."""
    openings = Openings()
    openings.add(Opening(digest_of(1), {}, 0.0, Epoch()))
    now_s = 0.0
    for _ in range(8):
        now_s += openings.wait_s(now_s) or 0.0
        tried = openings.take(now_s)
        assert tried is not None
        openings.end()
        openings.add_failed(tried, now_s)
    openings.add(Opening(digest_of(2), {}, now_s, Epoch()))
    assert openings.wait_s(now_s) == 0.0
    epoch = Epoch()
    openings.ask_again(digest_of(1), now_s, epoch)
    first = openings.take(now_s)
    assert first is not None
    assert (first.digest, first.epoch) == (digest_of(1), epoch)


def test_what_is_open_is_not_opened_again_when_its_weights_come_back() -> None:
    openings = Openings()
    openings.ask_again(digest_of(1), 0.0, Epoch())
    assert not len(openings)


@pytest.mark.parametrize("clears", [False, True])
def test_what_waits_for_a_failing_disk_is_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch, clears: bool
) -> None:
    """What the disk has of weights that are forgotten stays there until these, or a clear, come."""
    mine = left_by_a_former_run(make)
    rig = make(slots=64)
    assert rig.disk is not None
    open_namespace, fails = rig.disk.open_namespace, True

    def failing(*args: Any, **kwargs: Any) -> Any:
        if fails:
            raise OSError("no answer")
        return open_namespace(*args, **kwargs)

    monkeypatch.setattr(rig.disk, "open_namespace", failing)

    def failed_since(before: int) -> bool:
        return rig.count("namespace_open_failures") > before

    for number in range(1, 100):
        before = rig.count("namespace_open_failures")
        update(rig, number)
        rig.until(partial(failed_since, before))
    # Those that are kept in any case, and the one that was tried last.
    assert rig.store.stats()["openings_pending"] <= KEPT_NAMESPACES + 1
    assert rig.store.num_spaces <= KEPT_NAMESPACES + 2
    # Of those that are forgotten the one that the disk has something of.
    most = KEPT_NAMESPACES + 2 + 1
    assert len(rig.store._spaces.all_and_asked_for()[1]) <= most
    if clears:
        rig.store.clear()
        rig.until(lambda: not rig.store.stats()["clears_pending"])
    fails = False
    update(rig, 1)
    opened(rig)
    if clears:
        assert rig.store.locate_prefix(rig.space, mine).here == 0
        return
    assert rig.store.locate_prefix(rig.space, mine).disk == len(mine)
    check_loaded(rig, mine)


class _CountingLock:
    """The table's lock, and how many rows came to the index under each hold of it."""

    def __init__(self, table: PageTable) -> None:
        self._lock, self._index = table.lock, table.index
        self.grown: list[int] = []
        self._before = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._before = len(self._index)

    def __exit__(self, *_: object) -> None:
        self.grown.append(len(self._index) - self._before)
        self._lock.release()


def test_what_a_disk_has_is_entered_bit_by_bit_and_the_last_of_equal_pages_counts(
    make: Make,
) -> None:
    """Former weights come back to a running server, whose scheduler wants the lock meanwhile."""
    num = 10_000
    rig = make(slots=64, index=2 * num)
    table = rig.books.table
    hashes = pages("former", num).copy()
    hashes[num - 1] = hashes[5]
    found = RecoveredPages(
        hashes,
        np.zeros((num, 32), np.uint8),
        np.full(num, 7, np.uint32),
        np.arange(1, num + 1, dtype=np.uint32),
        np.ones(num, np.uint16),
        np.zeros(num, np.uint8),
    )
    lock = _CountingLock(table)
    table.lock = lock  # type: ignore[assignment]
    assert rig.books.disk.add_recovered(rig.space, found) == num - 1
    table.lock = lock._lock
    assert sum(lock.grown) == num - 1
    assert max(lock.grown) < num / 4
    (row,) = table.index.lookup(hashes[5:6], rig.space.number)
    assert int(table.index.block[row]) == num
    rig.store.check()


def test_key_spaces_of_adapters_that_came_and_went_are_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of which pages are stored stays, and so does one that is in use."""
    monkeypatch.setattr("sglang_ext.tiers.store.key_spaces.KEPT_SPACES", 8)
    rig = make(slots=64)
    mine = pages("a", 3)
    stored = rig.store.space(DIGEST, digest_of(0))
    rig.save(mine, space=stored)
    rig.settle()
    for number in range(1, 200):
        rig.store.end_epoch()
        space = rig.store.space(DIGEST, digest_of(number))
        assert rig.store.space(DIGEST, digest_of(number)) is space
        assert rig.store.num_spaces <= 8 + 1
    again = rig.store.space(DIGEST, digest_of(0))
    assert again.number == stored.number
    check_content(rig, mine, again)
    others = pages("b", 3)
    space = rig.store.space(DIGEST, digest_of(1))
    assert rig.save(others, space=space) == 3
    rig.settle()
    check_content(rig, others, space)
    rig.store.check()


def test_a_namespace_that_is_being_opened_keeps_the_adapters_that_it_finds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages are entered after they got their numbers."""
    monkeypatch.setattr("sglang_ext.tiers.store.key_spaces.KEPT_SPACES", 0)
    rig = make(slots=64)
    update(rig, 1)
    mine = pages("a", 3)
    rig.save(mine, space=rig.store.space(digest_of(1), digest_of(7)))
    rig.settle()
    rig.store.close(30)
    rig = make(slots=64)
    add_recovered = rig.books.disk.add_recovered

    def late(*args: Any) -> int:
        rig.store.end_epoch()
        return add_recovered(*args)

    monkeypatch.setattr(rig.books.disk, "add_recovered", late)
    update(rig, 1)
    opened(rig)
    assert rig.store.locate_prefix(rig.store.space(digest_of(1), digest_of(7)), mine).disk == 3


def long_gone(rig: Rig) -> KeySpace:
    """A key space of weights that were replaced so often that it was retired."""
    update(rig, 0)
    of_before = rig.space
    for number in range(1, 2 * KEPT_NAMESPACES):
        update(rig, number)
    opened(rig)
    assert rig.store._spaces.find(of_before.number) is None
    return of_before


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_pages_that_are_fetched_for_weights_long_gone_hold_nothing_up(
    make: Make, policy: str
) -> None:
    """A fetch passes no gate; what it brings is found by nobody, and must not stay for ever."""
    rig = make(policy=policy)
    of_before = long_gone(rig)
    saves = rig.books.saves
    saves.finish(saves.begin(of_before, pages("late", 4), NONE), ok=True)
    mine = pages("a", 7)

    def all_came() -> bool:
        rig.save(mine)
        return rig.ready(mine) == 7

    rig.until(all_came)
    assert rig.store.flush(300.0) == 0
    rig.settle()
    assert rig.on_disk(mine) == 7
    assert rig.count("worker_failures") == 0


def test_pages_of_weights_long_gone_that_were_queued_outlast_no_clear(make: Make) -> None:
    """A clear empties the queue, and names only key spaces that there are."""
    rig = make(slots=16)
    of_before = long_gone(rig)
    saves = rig.books.saves
    assert rig.store._spiller is not None
    with rig.store._spiller.alone():
        saves.finish(saves.begin(of_before, pages("late", 4), NONE), ok=True)
        assert rig.store.stats()["spill_queue_pages"] == 4
        rig.store.clear()
    mine = pages("a", 15)

    def all_came() -> bool:
        rig.save(mine)
        rig.settle()
        return rig.ready(mine) == 15

    rig.until(all_came)
    check_content(rig, mine)
