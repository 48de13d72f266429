"""What was cleared is found no more at once, and leaves the books bit by bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.store import clearing
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import Rows
from tests.unit.store.store_rig import DIGEST, Make, Rig, check_content, pages, rigs

MANY = 10_000


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a clear of a few pages is one of many."""
    monkeypatch.setattr(clearing, "AT_ONCE", 2)


def writing(rig: Rig) -> Any:
    """While it is held the writing thread does nothing."""
    assert rig.store._spiller is not None
    return rig.store._spiller._writing


def cleared(rig: Rig) -> None:
    rig.until(lambda: not rig.store.stats()["clears_pending"])


def found_again(make: Make, rig: Rig, **settings: Any) -> int:
    """How many pages a start behind the end of a rig finds."""
    rig.store.close(30)
    return int(make(**settings).found)


@pytest.mark.usefixtures("few_at_once")
def test_what_comes_after_a_clear_is_apart_from_what_it_cleared(make: Make) -> None:
    rig = make(slots=64)
    mine = pages("a", 20)
    rig.save(mine)
    rig.settle()
    with writing(rig):
        assert rig.store.clear() == 20
        assert rig.ready(mine) == 0
        assert rig.store.plan(rig.space, mine) is None
        assert not rig.store.page_states(rig.space, mine)[0].any()
        assert rig.save(mine[:8]) == 8
        assert rig.ready(mine) == 8
        check_content(rig, mine[:8])
        assert rig.store.clear() == 8
        assert rig.ready(mine) == 0
        assert rig.save(mine[5:12]) == 7
    cleared(rig)
    rig.settle()
    assert rig.store.num_known_pages == 7
    assert rig.arena.num_used == 7
    check_content(rig, mine[5:12])
    assert rig.on_disk(mine) == 7
    assert found_again(make, rig, slots=64) == 7


@pytest.mark.usefixtures("few_at_once")
def test_pages_that_were_cleared_leave_dram_for_others_at_once(make: Make) -> None:
    rig = make(slots=16)
    rig.save(pages("a", 12))
    rig.settle()
    told: list[object] = []
    rig.books.room.on_unsent = lambda *pages: told.append(pages)
    with writing(rig):
        rig.store.clear()
        # A remote store would get no more of them.
        assert rig.books.remote.take_unsent(16, 16) is None
        assert rig.save(pages("b", 12)) == 12
        assert not told
        check_content(rig, pages("b", 12))
    cleared(rig)
    rig.settle()
    assert rig.store.num_known_pages == 12
    check_content(rig, pages("b", 12))


@pytest.mark.usefixtures("few_at_once")
def test_pages_that_were_cleared_before_they_were_written_never_are(make: Make) -> None:
    rig = make(slots=16, policy="write_back")
    rig.save(pages("a", 8))
    with writing(rig):
        rig.store.clear()
        # Room is wanted: the pages of before are to be written, so that they may leave.
        rig.save(pages("b", 14))
    cleared(rig)
    assert rig.store.flush(300.0) == 0
    rig.settle()
    known = rig.store.num_known_pages
    assert rig.store.locate_prefix(rig.space, pages("b", 14)).total == known > 0
    assert found_again(make, rig, slots=16) == known


@pytest.mark.usefixtures("few_at_once")
def test_pages_that_were_cleared_leave_dram_while_the_disk_hangs(make: Make) -> None:
    """With write-back they would have to be written before."""
    rig = make(slots=16, policy="write_back")
    rig.save(pages("a", 8))
    with writing(rig):
        rig.store.clear()
        assert rig.books.spills.num_unwritten() == 0
        assert rig.save(pages("b", 14)) == 14
        check_content(rig, pages("b", 14))
    cleared(rig)
    rig.settle()
    check_content(rig, pages("b", 14))


@pytest.mark.usefixtures("few_at_once")
def test_a_load_that_began_before_a_clear_has_nothing_written(make: Make) -> None:
    """Its pages are used, and this policy writes those."""
    rig = make(slots=16, policy="selective")
    mine = pages("a", 8)
    rig.save(mine)
    ticket = rig.store.pin_leading(rig.space, mine)
    with writing(rig):
        rig.store.clear()
        rig.store.begin_load(rig.space, ticket, mine)
        rig.store.end_load(ticket)
        assert rig.store.stats()["spill_queue_pages"] == 0
        assert rig.save(pages("b", 14)) == 14
    cleared(rig)
    rig.settle()
    assert found_again(make, rig, slots=16) == 14


def test_key_spaces_that_come_while_a_clear_begins_are_cleared_or_void(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of adapters whose pages a namespace that is being opened has."""
    rig = make(slots=16)
    lora = bytes([7]) * 32
    found = RecoveredPages(
        pages("former", 3),
        np.full((3, 32), 7, np.uint8),
        np.full(3, 7, np.uint32),
        np.arange(1, 4, dtype=np.uint32),
        np.ones(3, np.uint16),
        np.zeros(3, np.uint8),
    )
    assert rig.store.locate_prefix(rig.space, found.hashes).total == 0
    spaces, lock = rig.store._spaces, rig.books.table.lock
    all_and_asked_for = spaces.all_and_asked_for

    def and_others_come() -> Any:
        result = all_and_asked_for()
        if not lock.locked():  # so it may be entered now
            rig.books.disk.add_recovered(spaces.known(DIGEST, lora), found)
        return result

    monkeypatch.setattr(spaces, "all_and_asked_for", and_others_come)
    with writing(rig):
        rig.store.clear()
        assert rig.store.locate_prefix(rig.store.space(DIGEST, lora), found.hashes).total == 0


@pytest.mark.usefixtures("few_at_once")
def test_a_load_and_a_write_under_way_outlast_a_clear(make: Make) -> None:
    rig = make(slots=64)
    mine = pages("a", 12)
    rig.save(mine)
    rig.settle()
    ticket = rig.store.pin_ready(rig.space, mine)
    assert ticket is not None
    rig.io.open_gate.clear()
    rig.save(pages("b", 12))
    rig.until(lambda: rig.books.spills.num_spilling > 0)
    before = [rig.arena.slots[slot].tobytes() for slot in ticket.slots]
    assert rig.store.clear() == 24
    rig.save(pages("c", 12))
    rig.io.open_gate.set()
    cleared(rig)
    assert [rig.arena.slots[slot].tobytes() for slot in ticket.slots] == before
    rig.store.release(ticket.slots)
    rig.settle()
    assert rig.store.num_known_pages == 12
    assert found_again(make, rig, slots=64) == 12


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_saves_and_clears_brings_a_cleared_page_back(
    make: Make, policy: str, seed: int
) -> None:
    """Beside the thread that writes and takes out what was cleared; and behind a restart."""
    rng = random.Random(seed)
    rig = make(slots=24, policy=policy)
    adapters = (b"", bytes([1]) * 32, bytes([2]) * 32)
    spaces = [rig.store.space(DIGEST, adapter) for adapter in adapters]
    held = False
    since: set[tuple[bytes, bytes]] = set()
    for _ in range(150):
        space = rng.choice(spaces)
        path = pages(f"path {rng.randrange(4)} ", 8)[: rng.randrange(1, 9)]
        step = rng.random()
        if step < 0.5:
            rig.save(path, space=space)
            since |= {(space.lora, row.tobytes()) for row in path}
        elif step < 0.6:
            rig.store.clear()
            since.clear()
        elif step < 0.7:
            held = not held
            (writing(rig).acquire if held else writing(rig).release)()
        elif not held:
            plan = rig.store.plan(space, path)
            if plan is not None:
                rig.wait(plan)
                rig.store.cancel_plan(plan)
        num = rig.ready(path, space)
        assert {(space.lora, row.tobytes()) for row in path[:num]} <= since
        if num:
            check_content(rig, path[:num], space)
    if held:
        writing(rig).release()
    cleared(rig)
    rig.settle()
    assert rig.store.num_known_pages <= len(since)
    rig.store.close(30)
    again = make(slots=24)
    assert again.found <= len(since)
    for number in range(4):
        path = pages(f"path {number} ", 8)
        for adapter in adapters:
            num = again.store.locate_prefix(again.store.space(DIGEST, adapter), path).total
            assert {(adapter, row.tobytes()) for row in path[:num]} <= since


def test_a_clear_while_the_disk_is_gone_is_pending_until_it_is_back(
    make: Make, tmp_path: Path
) -> None:
    """What lies on it was cleared, and is found neither then nor by the next start."""
    rig = make(slots=64)
    mine = pages("a", 8)
    rig.save(mine)
    rig.settle()
    (tmp_path / "disk").rename(tmp_path / "away")
    rig.store.clear()
    assert rig.ready(mine) == 0
    rig.until(lambda: rig.count("clear_failures") == 1)
    rig.until(lambda: not rig.books.spills.pending_clears())
    assert rig.store.stats()["clears_pending"] == 1
    rig.save(pages("b", 8))  # the disk takes them not, and DRAM goes on
    rig.settle()
    assert rig.ready(pages("b", 8)) == 8
    (tmp_path / "away").rename(tmp_path / "disk")
    rig.save(pages("c", 8))
    rig.settle()
    cleared(rig)
    assert rig.on_disk(pages("c", 8)) == 8
    assert not rig.store.locate_prefix(rig.space, mine).total
    rig.store.close(30)
    again = make(slots=64)
    assert not again.store.locate_prefix(again.space, mine).total
    assert again.on_disk(pages("c", 8)) == 8


# ---- short holds ---------------------------------------------------------------------------------


class _Holds:
    """The table's lock, and how many rows left the index under each hold of it."""

    def __init__(self, table: PageTable, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock, self._remove = table.lock, table.remove
        self.num, self.gone = 0, Counter[int]()
        monkeypatch.setattr(table, "lock", self)
        monkeypatch.setattr(table, "remove", self._counted)

    def __enter__(self) -> None:
        self._lock.acquire()
        self.num += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _counted(self, rows: Rows, why: Absence | None) -> int:
        num = self._remove(rows, why)
        self.gone[self.num] += num
        return num


def with_many_on_disk(make: Make) -> Rig:
    rig = make(slots=64, index=2 * MANY)
    found = RecoveredPages(
        pages("former", MANY),
        np.zeros((MANY, 32), np.uint8),
        np.full(MANY, 7, np.uint32),
        np.arange(1, MANY + 1, dtype=np.uint32),
        np.ones(MANY, np.uint16),
        np.zeros(MANY, np.uint8),
    )
    assert rig.books.disk.add_recovered(rig.space, found) == MANY
    return rig


def clear(rig: Rig) -> None:
    rig.store.clear()
    assert not rig.store.locate_prefix(rig.space, pages("former", 1)).total
    cleared(rig)


@pytest.mark.parametrize(
    "forget",
    [
        lambda rig: rig.books.disk.drop_segment(7),
        lambda rig: rig.books.disk.give_up(MANY),
        clear,
    ],
    ids=["drop a segment", "give up", "clear"],
)
def test_many_pages_are_forgotten_bit_by_bit(
    make: Make, monkeypatch: pytest.MonkeyPatch, forget: Callable[[Rig], object]
) -> None:
    """The scheduler wants the lock meanwhile."""
    rig = with_many_on_disk(make)
    holds = _Holds(rig.books.table, monkeypatch)
    forget(rig)
    assert holds.gone.total() == MANY
    assert max(holds.gone.values()) < MANY / 4
    assert not len(rig.books.table.index)
    rig.store.check()


def test_so_many_blocks_are_given_up_and_no_more(make: Make) -> None:
    rig = with_many_on_disk(make)
    assert rig.books.disk.give_up(MANY // 2 + 1) == MANY // 2 + 1
    assert len(rig.books.table.index) == MANY // 2 - 1
    rig.store.check()
    assert rig.books.disk.give_up(MANY) == MANY // 2 - 1
    assert rig.books.disk.give_up(1) == 0
