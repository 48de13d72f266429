"""A full disk beside DRAM: which pages lie in both, what is written when, and what is not.

And in which order, and how far the room is that writes make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.policies.replay import Replay
from bench.policies.workloads.bundled import BUNDLED
from sglang_ext.simulator.trace import read_trace
from sglang_ext.simulator.virtual_store import (
    ServerStore,
    StoreSizes,
    page_hashes,
    virtual_store,
)
from sglang_ext.tiers.base import BLOCK_BYTES, Location
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.store.books.page_states import QUEUE, REFUSE
from sglang_ext.tiers.store.books.write_policy import AGAIN_SHARE
from sglang_ext.tiers.store.types import (
    GIVEN_UP,
    ON_DISK,
    QUEUED,
    READY,
    SPILLING,
    DiskCopies,
)
from tests.unit.store.store_rig import Make, Rig, check_content, pages, rigs

CHAT_PAGES = 4


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _full(make: Make, policy: str = "auto", size: int = 1) -> tuple[Rig, list[np.ndarray]]:
    """DRAM for 64 pages, a disk for some 120 times `size`, full; and what was saved."""
    rig = make(
        policy=policy, slots=64, lookahead=True, index=1024 * size, max_bytes=size << 20,
        segment_bytes=128 << 10,
    )  # fmt: skip
    chats = [pages(f"chat{number}-", CHAT_PAGES) for number in range(20 + 40 * size)]
    for chat in chats:
        _save(rig, chat)
    assert rig.books.writing.disk_is_full
    return rig, chats


def _on_disk_alone(rig: Rig, chats: list[np.ndarray]) -> np.ndarray:
    """The chat that stays longest of those which the disk alone has: the disk loses the first."""
    rig.settle()
    return [c for c in chats if (_flags(rig, c) == ON_DISK).all() and rig.on_disk(c)][-1]


def _expect(rig: Rig, name: str, hashes: np.ndarray) -> None:
    assert rig.store.lookahead is not None
    rig.store.lookahead.expect(name, rig.space, hashes, 0)


def _stored(rig: Rig, chats: list[np.ndarray]) -> int:
    return sum(rig.store.locate_prefix(rig.space, chat).total for chat in chats)


def _bring(rig: Rig, chat: np.ndarray) -> None:
    """Reads pages, again while what would leave for them is still to be written."""

    def is_there() -> bool:
        plan = rig.store.plan(rig.space, chat)
        if plan is not None:
            rig.wait(plan)
            rig.store.cancel_plan(plan)
        rig.settle()
        return rig.ready(chat) == len(chat)

    rig.until(is_there)


def _hold(rig: Rig, hashes: np.ndarray) -> np.ndarray:
    """Keeps pages in DRAM, where nothing writes them; `release` the slots."""
    ticket = rig.store.pin_ready(rig.space, hashes)
    assert ticket is not None
    return ticket.slots


def _save(rig: Rig, hashes: np.ndarray, *, settles: bool = True) -> None:
    """Saves pages; what leaves next is written first. It does not settle while pages are held."""
    rig.until(lambda: not rig.books.room.should_look)
    rig.save(hashes)
    while rig.ready(hashes) < len(hashes):  # what leaves is still to be written
        rig.until(lambda: rig.save(hashes) > 0)
    if settles:
        rig.settle()


def _flags(rig: Rig, hashes: np.ndarray) -> np.ndarray:
    index = rig.books.table.index
    return index.flags[index.lookup(hashes, rig.space.number)]


def test_what_is_saved_once_the_disk_is_full_is_written_as_it_leaves(make: Make) -> None:
    rig, _ = _full(make)
    written = rig.count("written_pages")
    new = pages("new", 2)
    rig.save(new)
    rig.settle()
    assert (_flags(rig, new) & (READY | ON_DISK)).tolist() == [READY] * 2
    later = 0
    while rig.ready(new):
        _save(rig, pages(f"later{later}-", CHAT_PAGES))
        later += 1
    assert rig.count("written_pages") > written
    assert rig.on_disk(new) == 2
    assert rig.count("lost_pages") == 0


def test_the_copy_of_what_came_back_to_dram_goes_first_and_is_written_again(make: Make) -> None:
    rig, chats = _full(make)
    old = _on_disk_alone(rig, chats)
    _bring(rig, old)
    held = _hold(rig, old)
    number = 0
    while not (_flags(rig, old) & GIVEN_UP).any():
        _save(rig, pages(f"new{number}-", CHAT_PAGES), settles=False)
        number += 1
    assert rig.count("given_up_pages") > 0
    check_content(rig, old)
    num_given_up = int((_flags(rig, old) & GIVEN_UP != 0).sum())
    assert rig.store.lookahead is not None
    again = rig.count("written_again_pages")
    _expect(rig, "late", old)  # so the disk keeps it, whatever is younger
    rig.store.release(held)
    sooner: list[str] = []
    while rig.ready(old):  # DRAM has others to keep
        sooner.append(f"sooner{len(sooner)}-")
        _save(rig, pages(sooner[-1], CHAT_PAGES))
        _expect(rig, sooner[-1], pages(sooner[-1], CHAT_PAGES))
        rig.store.lookahead.set_order([*sooner, "late"])
    assert rig.count("written_again_pages") >= again + num_given_up
    assert rig.on_disk(old) == CHAT_PAGES
    _bring(rig, old)
    check_content(rig, old)


def test_what_is_needed_later_than_all_on_disk_is_not_written(make: Make) -> None:
    """The queue's order decides over both tiers, not only whether somebody waits.

    But for pages that a save pushes out of DRAM before the spill thread had its turn: a few.
    """
    rig, chats = _full(make, size=4)
    kept = [chat for chat in chats if _stored(rig, [chat]) == CHAT_PAGES]
    for number, chat in enumerate(kept):
        _expect(rig, f"first{number}", chat)
    written = rig.count("written_pages")
    late = [pages(f"late{number}-", CHAT_PAGES) for number in range(40)]
    for number, chat in enumerate(late):
        _save(rig, chat)
        _expect(rig, f"late{number}", chat)
    assert rig.count("not_admitted_pages") > 0
    soon = kept[: len(kept) // 4]
    assert _stored(rig, soon) >= sum(map(len, soon)) - 4 * CHAT_PAGES
    assert rig.count("written_pages") - written < len(late) * CHAT_PAGES


@pytest.mark.parametrize("num_saves", [1, 2])
def test_of_a_path_for_which_the_disk_has_half_the_room_it_takes_the_start(
    make: Make, num_saves: int
) -> None:
    """What displaces nothing that is needed sooner, of all that is written at a time."""
    rig, chats = _full(make, "write_through")
    books = rig.books
    kept = [chat for chat in chats if rig.on_disk(chat) == CHAT_PAGES][2:]
    for number, chat in enumerate(kept):
        _expect(rig, f"soon{number}", chat)
    num_unneeded = sum(map(rig.on_disk, chats)) - CHAT_PAGES * len(kept)
    path = pages("path", 2 * num_unneeded)
    rig.io.open_gate.clear()
    rig.save(pages("first", 1))
    rig.until(lambda: books.spills.num_spilling == 1)  # the thread is busy
    for part in np.split(np.arange(len(path)), num_saves):
        rig.save(path[part], path[: part[0]])
    _expect(rig, "late", path)
    entry = books.spills.take(len(path))
    assert entry is not None
    rows = books.table.index.lookup(path, rig.space.number)
    assert entry.rows.tolist() == rows[:num_unneeded].tolist()
    nothing = np.zeros(num_unneeded, np.bool_)
    none = np.zeros(num_unneeded, np.uint32)
    copies = DiskCopies(none, none, none.astype(np.uint16), none.astype(np.uint8))
    books.spills.finish(entry, nothing, copies)
    rig.io.open_gate.set()
    rig.settle()


def test_shutdown_gives_no_copy_up_because_dram_has_the_page(make: Make) -> None:
    rig, chats = _full(make)
    old = _on_disk_alone(rig, chats)
    _bring(rig, old)
    rig.books.disk.begin_closing()  # as the first thing that closing does
    given_up = rig.count("given_up_pages")
    for number in range(20):
        _save(rig, pages(f"new{number}-", CHAT_PAGES))
    rig.store.close()
    assert rig.count("given_up_pages") == given_up


def test_no_more_is_queued_behind_a_slow_disk_than_is_to_be_able_to_leave(make: Make) -> None:
    rig, _ = _full(make)
    books = rig.books
    rig.io.open_gate.clear()
    for number in range(4):  # in parts: one save of all would ask for as much to be written ahead
        rig.save(pages(f"new{number}-", 2))
    # As saves want, or as many as those queued that met no page that could leave at once.
    wanted = max(8, int(books.room._burst_pages), books.spills.num_pages())
    for _ in range(20):
        books.room._look_at = 0
        books.room.queue_leaving(8)
        with books.table.lock:
            assert books.spills.num_queued <= wanted
    rig.io.open_gate.set()
    rig.settle()


def test_capacity_adds_up_and_writes_stay_bounded() -> None:
    """DRAM is two fifths of the disk, so what lies twice is worth as much."""
    paths = [line.hash_ids for line in read_trace(BUNDLED, limit=250)]
    sizes = StoreSizes(1 << 20, host_pages=240, disk_pages=600)
    hits, per_hit = {}, {}
    for policy in ("write_through", "auto"):
        with virtual_store(sizes, PolicyConfig(), policy) as server:
            done = Replay(paths, 100, [1.0] * len(paths)).run(server)
            server.store.check()
        hits[policy], per_hit[policy] = done.hit_share, done.written_per_hit
    assert hits["auto"] >= hits["write_through"] + 0.01, hits
    assert per_hit["auto"] <= 1.3 * per_hit["write_through"], per_hit


@pytest.mark.sampled("on")
@pytest.mark.parametrize("placement", [PolicyConfig(), None], ids=["on", "off"])
def test_prompts_that_come_back_often_are_not_written_at_every_turn(
    placement: PolicyConfig | None,
) -> None:
    """DRAM is a quarter of the disk; to have each page once would be a write for each that hits."""
    random = np.random.default_rng(5)
    picks = np.minimum(random.zipf(1.2, 600), 60)
    paths = [np.append(np.arange(8) + 8 * pick, 1000 + at) for at, pick in enumerate(picks)]
    sizes = StoreSizes(1 << 20, host_pages=64, disk_pages=256)
    done = {}
    for policy in ("write_through", "auto"):
        with virtual_store(sizes, placement, policy) as server:
            done[policy] = Replay(paths, 10, [1.0] * len(paths)).run(server)
            server.store.check()
    again = done["auto"].counters["written_again_pages"]
    first = done["auto"].counters["written_pages"] - again
    assert 0 < again <= AGAIN_SHARE * first + sizes.host_pages
    assert done["auto"].hit_share >= done["write_through"].hit_share - 0.01


@pytest.mark.parametrize("placement", [PolicyConfig(), None], ids=["on", "off"])
def test_beside_a_disk_smaller_than_dram_each_page_counts_once_as_new(
    placement: PolicyConfig | None,
) -> None:
    """What is used in DRAM after the disk lost it is written again, and counts as that."""
    paths = [np.arange(8) + 8 * (at % 20) for at in range(400)]
    sizes = StoreSizes(1 << 20, host_pages=128, disk_pages=48)
    with virtual_store(sizes, placement, "auto") as server:
        done = Replay(paths, 4, [1.0] * len(paths)).run(server)
        server.store.check()
    again = done.counters["written_again_pages"]
    assert again > 0
    assert done.counters["written_pages"] - again <= done.new


def _end_on_disk(rig: Rig, length: int, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Has the last pages of a path on a full disk, the others in DRAM; the path, rows and slots."""
    books = rig.books
    for attempt in itertools.count():
        path = pages(f"path{attempt}-", length)
        _save(rig, path, settles=False)
        slots, rows = _hold(rig, path), books.table.index.lookup(path, rig.space.number)
        with books.table.lock:
            # The writer may have met a page as one of the next to leave, before it was held.
            if not (_flags(rig, path) & (ON_DISK | QUEUED | SPILLING)).any():
                books.spills.queue(rig.space, rows[-num:])
                break
        rig.store.release(slots)
        _expect(rig, f"attempt{attempt}", path)  # so that it is in nobody's way
    rig.until(lambda: bool((_flags(rig, path)[-num:] & ON_DISK).all()))
    assert not (_flags(rig, path)[:-num] & ON_DISK).any()
    return path, rows, slots


def test_what_leads_to_pages_on_disk_is_written_whatever_it_is_worth(make: Make) -> None:
    """Refused, it would be lost with DRAM, and nobody could find what the disk has behind it."""
    rig, _ = _full(make)
    books, lookahead, other = rig.books, rig.store.lookahead, pages("a", 3)
    assert lookahead is not None
    path, rows, slots = _end_on_disk(rig, 6, 3)
    _save(rig, other, settles=False)
    others = _hold(rig, other)
    for each in (path[:3], other):  # worth less than all on disk
        lookahead.used(rig.space, each, None)
        lookahead.hint(rig.space, each, owner=0, returns_in_s=None)
    with books.table.lock:
        alone = books.disk.admits(books.table.index.lookup(other, rig.space.number))
        leading = books.disk.admits(rows[:3])
    assert alone is not None
    assert leading is not None
    assert not alone.any()
    assert leading.all()
    rig.store.release(np.concatenate([slots, others]))


def test_what_leads_to_pages_on_disk_takes_no_place_of_what_is_needed_sooner(make: Make) -> None:
    """It has the places of what it leads to, and no others."""
    rig, chats = _full(make)
    books = rig.books
    _, rows, slots = _end_on_disk(rig, 6, 1)
    for number, chat in enumerate(chats):
        _expect(rig, f"soon{number}", chat)
    order = books.table.disk_order
    assert order is not None
    with books.table.lock:
        next_rows = order.next_to_leave(5, books.table.now_s())
        assert books.table.policy.wanted(next_rows).tolist() == [False] + [True] * 4
        admitted = books.disk.admits(rows[:5])
    assert admitted is not None
    assert admitted.tolist() == [True] + [False] * 4
    rig.store.release(slots)


def test_what_leads_to_needed_pages_on_disk_takes_their_place_at_the_latest(make: Make) -> None:
    """The same request needs both; what it leads to is of no use without it."""
    rig, chats = _full(make)
    books = rig.books
    path, rows, slots = _end_on_disk(rig, 6, 2)
    for number, chat in enumerate(chats):
        _expect(rig, f"soon{number}", chat)
    _expect(rig, "last", path)
    with books.table.lock:
        admitted = books.disk.admits(rows[:4])
    assert admitted is not None
    assert admitted.tolist() == [True, True, False, False]
    rig.store.release(slots)


@pytest.mark.parametrize("policy", ["write_through", "write_back", "auto"])
def test_a_cleared_disk_takes_what_comes(make: Make, policy: str) -> None:
    """It chose while it was full of pages that somebody waited for; it has room now."""
    rig, _ = _full(make, policy)
    rig.store.clear()
    rig.until(lambda: not rig.store.stats()["clears_pending"])
    before = rig.count("not_admitted_pages"), rig.count("lost_pages")
    waited = [pages(f"waited-{number}-", CHAT_PAGES) for number in range(5)]
    for chat in waited:
        _save(rig, chat)
    others: list[np.ndarray] = []
    while sum(map(rig.on_disk, waited)) < 5 * CHAT_PAGES:
        others.append(pages(f"other-{len(others)}-", CHAT_PAGES))
        _save(rig, others[-1])
        assert (rig.count("not_admitted_pages"), rig.count("lost_pages")) == before
    for number, chat in enumerate(waited):
        _expect(rig, f"waits-{number}", chat)
    while len(others) < 24:
        others.append(pages(f"other-{len(others)}-", CHAT_PAGES))
        _save(rig, others[-1])
    assert (rig.count("not_admitted_pages"), rig.count("lost_pages")) == before
    assert _stored(rig, [*waited, *others]) == (len(waited) + len(others)) * CHAT_PAGES
    assert rig.books.writing.through == (policy == "write_through")  # it does not go back to that


def test_a_cleared_disk_chooses_again_once_it_is_full(make: Make) -> None:
    rig, _ = _full(make)
    rig.store.clear()
    rig.until(lambda: not rig.store.stats()["clears_pending"])
    assert not rig.books.writing.disk_is_full
    number = 0
    while not rig.books.writing.disk_is_full:
        _save(rig, pages(f"again{number}-", CHAT_PAGES))
        number += 1
    kept = [pages(f"again{n}-", CHAT_PAGES) for n in range(number)]
    kept = [chat for chat in kept if _stored(rig, [chat]) == CHAT_PAGES]
    for place, chat in enumerate(kept):
        _expect(rig, f"soon{place}", chat)
    refused = rig.count("not_admitted_pages")
    for late in range(20):
        _save(rig, pages(f"late{late}-", CHAT_PAGES))
    assert rig.count("not_admitted_pages") > refused


def _given_up(make: Make) -> tuple[Rig, np.ndarray, int, int]:
    """A chat, held in DRAM, that gave its place on disk up.

    With how many could have given theirs up before, and how many were written again by then.
    """
    rig, chats = _full(make)
    books, num_blocks = rig.books, CHAT_PAGES * rig.arena.slot_bytes // BLOCK_BYTES
    for _ in range(50):  # what is written to make room for a chat may take its place already
        old = _on_disk_alone(rig, chats)
        _bring(rig, old)
        slots, again = _hold(rig, old), rig.count("written_again_pages")
        with books.table.lock:  # what else is on its way is owed, too
            before = books.writing.num_to_give_up
            if books.disk._give_up_duplicates(num_blocks) == num_blocks and not rig.on_disk(old):
                assert books.writing.num_to_give_up == before - CHAT_PAGES
                return rig, old, before, again
        rig.store.release(slots)
    raise AssertionError("no chat's copy on disk was there to be given up")


def test_a_rewrite_that_never_comes_costs_nothing_of_what_may_be_written_again(make: Make) -> None:
    rig, _, before, again = _given_up(make)
    rig.store.clear()
    rig.until(lambda: not rig.store.stats()["clears_pending"])  # nor is anything being written
    assert rig.books.table.num_owed == 0
    came = rig.count("written_again_pages") - again  # others
    assert rig.books.writing.num_to_give_up >= before - came


def test_a_rewrite_that_the_disk_refused_costs_nothing_until_it_is_offered_again(
    make: Make,
) -> None:
    rig, old, _, _ = _given_up(make)
    books = rig.books
    with books.table.lock:
        rows = books.table.index.lookup(old, rig.space.number)
        owing = books.writing.num_to_give_up
        books.table.take(QUEUE, rows)
        books.table.take(REFUSE, rows)
        assert books.writing.num_to_give_up == owing + CHAT_PAGES
        books.spills.offer(rows)
        assert books.writing.num_to_give_up == owing


def test_a_rewrite_is_owed_until_it_is_written(make: Make) -> None:
    rig, old, _, again = _given_up(make)
    assert rig.books.table.num_owed >= CHAT_PAGES
    assert rig.store.flush(300.0) == 0
    assert rig.books.table.num_owed == 0
    assert rig.on_disk(old) == CHAT_PAGES
    assert rig.count("written_again_pages") - again >= CHAT_PAGES


@pytest.mark.parametrize("slots", [16, 64])
def test_little_dram_is_not_looked_at_again_and_again(make: Make, slots: int) -> None:
    """Once for each time that enough moved: the thread that looks would take a core otherwise."""
    rig = make(policy="write_back", slots=slots, lookahead=True, index=1024)
    rig.save(pages("chat", 2))
    rig.until(lambda: not rig.books.room.should_look)
    rig.settle()


# ---- room ----

PAGE_S = 0.01
SIZES = StoreSizes(
    32 << 20, host_pages=32, disk_pages=64, read_bytes_per_s=math.inf,
    write_bytes_per_s=(32 << 20) / PAGE_S,
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[ServerStore]:
    """Its disk is full; DRAM has a prompt of 30 pages that is not on disk, used long ago."""
    with virtual_store(SIZES, PolicyConfig(), "write_back") as made:
        made.save(page_hashes(np.arange(30)), 0)
        yield made
        made.store.check()


def flags(server: ServerStore, ids: np.ndarray) -> np.ndarray:
    index = server.store._books.table.index
    return index.flags[index.lookup(page_hashes(ids), server.space.number)]


def run_for(server: ServerStore, seconds: float) -> None:
    end_s = server.clock.now_s + seconds
    while server.executor.next_s() <= end_s:
        server.clock.now_s = server.executor.next_s()
        server.executor.run_due()
    server.clock.now_s = end_s


def ask_for_room(server: ServerStore, num_pages: int) -> int:
    """Slots that a plan would get now; they are given back."""
    books = server.store._books
    with books.table.lock:
        slots = books.room.alloc(num_pages)
        server.store.arena.free(slots)
    return len(slots)


def test_room_comes_page_by_page_from_the_prompts_end(server: ServerStore) -> None:
    free = ask_for_room(server, 20)
    assert free < 20
    came = [free]
    while came[-1] < 20:
        run_for(server, 4 * PAGE_S)
        came.append(ask_for_room(server, 20))
        assert len(came) < 20
    assert len(set(came)) > 3  # not all at once, behind the last write
    on_disk = np.flatnonzero(flags(server, np.arange(30)) & ON_DISK)
    assert on_disk.max() == 29
    assert (np.diff(on_disk) == 1).all()


def test_a_burst_that_finds_nothing_written_has_no_page_written_twice() -> None:
    """It queues more than it asked for, as it looks for pages that can go now: those are next."""
    sizes = replace(SIZES, host_pages=320, disk_pages=640)
    with virtual_store(sizes, PolicyConfig(), "write_back") as server:
        ids = np.arange(300).reshape(30, 10)
        for chat in ids:
            server.save(page_hashes(chat), 0)
        store = server.store
        free = ask_for_room(server, 30)
        num_queued = store.stats()["spill_queue_pages"]
        assert 30 - free < num_queued <= 16 * 30
        run_for(server, 2 * num_queued * PAGE_S)
        num_left = 0
        while num_left < 150:  # they leave one after another
            with store._books.table.lock:
                assert len(store._books.room.alloc(10)) == 10
            num_left += 10
            run_for(server, PAGE_S)
        run_for(server, 10.0)
        stats = store.stats()
        assert stats["written_pages"] <= ids.size
        assert not stats.get("written_again_pages")
        assert not stats.get("lost_pages")


def test_who_asks_knows_how_far_the_room_is(server: ServerStore) -> None:
    store = server.store
    assert store.mark_of_room(5) == 0  # nothing is on its way
    free = ask_for_room(server, 20)
    mark = store.mark_of_room(20 - free)
    slot_bytes = store.arena.slot_bytes
    # The first batch is cut when a thread takes it, so no page of it counts yet.
    assert store.bytes_until(mark) == (20 - free) * slot_bytes
    while store.bytes_until(mark):
        run_for(server, PAGE_S)
        assert server.clock.now_s < 1.0
    assert ask_for_room(server, 20) == 20
    assert store.bytes_until(0) == 0


def test_what_is_saved_is_written_from_its_beginning_and_all_of_it_counts() -> None:
    with virtual_store(SIZES, PolicyConfig(), "write_through") as server:
        server.save(page_hashes(np.arange(20)), 0)
        server.save(page_hashes(np.arange(100, 110)), 0)
        store = server.store
        for wanted, first in ((1, 20), (20, 20), (21, 30), (99, 30)):
            assert store.bytes_until(store.mark_of_room(wanted)) == first * store.arena.slot_bytes
        server.executor.next_s()  # a batch is taken
        run_for(server, 5 * PAGE_S)
        on_disk = np.flatnonzero(flags(server, np.arange(20)) & ON_DISK)
        assert 0 < len(on_disk) < 20
        assert on_disk.tolist() == list(range(len(on_disk)))
        left = store.bytes_until(store.mark_of_room(1)) // store.arena.slot_bytes
        assert left == 20 - len(on_disk)  # the beginning leaves behind the end only


def test_a_flush_that_runs_out_of_time_leaves_what_can_be_used(
    server: ServerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was queued to make room, from its end, is written from its beginning then."""
    ask_for_room(server, 20)
    disk = server.disk
    assert disk is not None
    write = disk.write

    def late(digest: bytes, records: list[np.ndarray]) -> list[Location | None]:
        server.clock.now_s += PAGE_S
        return write(digest, records)

    monkeypatch.setattr(disk, "write", late)
    left = server.store.flush(2 * PAGE_S)
    on_disk = np.flatnonzero(flags(server, np.arange(30)) & ON_DISK)
    assert len(on_disk) == 30 - left < 30
    assert on_disk.tolist() == list(range(len(on_disk)))


def test_what_is_queued_for_room_while_a_server_ends_is_written_from_its_beginning(
    server: ServerStore,
) -> None:
    server.store._books.disk.begin_closing()
    ask_for_room(server, 20)
    assert not any(entry.from_end for entry in server.store._books.spills.entries)


def test_a_batch_that_fails_in_the_books_is_not_waited_for(
    server: ServerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spills = server.store._books.spills
    ask_for_room(server, 20)
    entry = spills.take(4)
    assert entry is not None
    mark = server.store.mark_of_room(4)
    assert spills.num_until(mark) == 4

    def fail(*_: object) -> None:
        raise RuntimeError("books")

    with monkeypatch.context() as patch:
        patch.setattr(spills, "_enter_written", fail)
        with pytest.raises(RuntimeError):
            spills.finish(entry, np.zeros(4, np.bool_), DiskCopies(*np.zeros((4, 4), np.uint32)))
    assert spills.num_until(mark) == 0
    copies = DiskCopies(
        np.zeros(4, np.uint32),
        np.zeros(4, np.uint32),
        np.zeros(4, np.uint16),
        np.zeros(4, np.uint8),
    )
    spills.finish(entry, np.zeros(4, np.bool_), copies)  # the pins are given back
    assert (flags(server, np.arange(26, 30)) & READY).all()


def test_what_a_plan_takes_over_from_another_is_read_before_its_own() -> None:
    """Pages that two paths share are the beginning of both."""
    sizes = replace(SIZES, read_bytes_per_s=(32 << 20) / PAGE_S)
    shared, first = np.arange(6), np.arange(6, 8)
    second = np.arange(100, 104)
    with virtual_store(sizes, PolicyConfig(), "write_through") as server:
        paths = [page_hashes(np.concatenate([shared, own])) for own in (first, second)]
        others = [page_hashes(1000 + 10 * number + np.arange(10)) for number in range(4)]
        for path in (*paths, *others):
            server.save(path, 0)
            run_for(server, 1.0)
        store, space = server.store, server.space
        assert not any(store.ready_prefix(space, path) for path in paths)
        plans = [store.plan(space, path, priority=priority) for priority, path in enumerate(paths)]
        assert plans[0] is not None
        assert plans[1] is not None
        store.cancel_plan(plans[0])
        there = []
        while not plans[1].done:
            run_for(server, PAGE_S)
            there.append((store.ready_prefix(space, paths[1]), 10 - plans[1].remaining))
            assert len(there) < 50
        assert all(leading == num for leading, num in there)
        store.cancel_plan(plans[1])
