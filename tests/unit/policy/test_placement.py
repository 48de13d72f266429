"""What leaves DRAM and the disk is what the queue needs least, over all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.store.store_rig import Make, Rig, check_content, pages, rigs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _expect(rig: Rig, name: str, hashes: np.ndarray) -> None:
    assert rig.store.lookahead is not None
    rig.store.lookahead.expect(name, rig.space, hashes, 0)


def test_what_nobody_waits_for_leaves_first_however_young(make: Make) -> None:
    """More wanted pages are older than any window over the oldest would show."""
    rig = make(slots=6000, disk=False, lookahead=True, index=8192)
    chats = [pages(f"chat{n}-", 100) for n in range(50)]
    for chat in chats:
        rig.save(chat)
    young = pages("young", 1000)
    rig.save(young)
    for number, chat in enumerate(chats):
        _expect(rig, str(number), chat)
    rig.save(pages("new", 400))
    assert [rig.ready(chat) for chat in chats] == [100] * 50
    assert rig.ready(young) == 600
    assert rig.store.num_wanted_evicted == 0
    rig.settle()


def test_pages_that_are_used_again_and_again_outlive_younger_ones(make: Make) -> None:
    rig = make(slots=40, disk=False, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    chat, other = pages("chat", 10), pages("other", 10)
    rig.save(chat)
    lookahead.used(rig.space, chat, None)
    rig.save(other)
    lookahead.used(rig.space, other, None)
    lookahead.used(rig.space, chat, None)
    rig.save(pages("new", 30))
    assert (rig.ready(chat), rig.ready(other)) == (10, 0)


def test_pages_that_were_never_used_leave_children_first_too(make: Make) -> None:
    """Their paths are known from saving them."""
    rig = make(slots=12, disk=False, lookahead=True)
    chat = pages("chat", 8)
    rig.save(np.ascontiguousarray(chat[:4]))
    rig.save(np.ascontiguousarray(chat[4:]), ancestors=np.ascontiguousarray(chat[:4]))
    rig.save(pages("new", 8))
    assert rig.ready(chat) == 4


def test_what_is_pinned_or_not_on_disk_yet_stays_and_may_leave_afterwards(make: Make) -> None:
    rig = make(slots=16, lookahead=True)
    old = pages("old", 8)
    rig.save(old)
    rig.settle()
    ticket = rig.store.pin_ready(rig.space, old)
    assert ticket is not None
    rig.io.open_gate.clear()
    young = pages("young", 8)
    rig.save(young)
    assert rig.save(pages("none", 1)) == 0, "all that could make room is pinned or not written"
    rig.store.release(ticket.slots)
    assert rig.save(pages("new", 4)) == 4
    assert rig.ready(old) == 4
    rig.io.open_gate.set()
    rig.settle()
    assert rig.save(pages("more", 10)) == 10
    rig.settle()


def test_the_order_survives_clearing_and_saving_again(make: Make) -> None:
    rig = make(slots=8, lookahead=True, index=32)
    for turn in range(6):
        chat = pages(f"chat{turn}-", 6)
        rig.save(chat)
        _expect(rig, str(turn), chat)
        rig.settle()
        if turn % 2:
            rig.store.clear()
        rig.settle()


CHATS, CHAT_PAGES = 90, 4


def _small_disk(make: Make) -> Rig:
    """DRAM for 16 pages, a disk for some 120."""
    return make(slots=16, lookahead=True, index=1024, max_bytes=1 << 20, segment_bytes=128 << 10)


def _stored(rig: Rig, chat: np.ndarray) -> int:
    return rig.store.locate_prefix(rig.space, chat).total


def test_the_disk_keeps_what_waits_wherever_it_lies(make: Make) -> None:
    """Every fourth chat waits: some pages of every segment, so no segment is of no use."""
    rig = _small_disk(make)
    waiting = []
    for number in range(CHATS):
        chat = pages(f"chat{number}-", CHAT_PAGES)
        rig.save(chat)
        rig.settle()
        if number % 4 == 0 and number < 80:
            waiting.append(chat)
            _expect(rig, str(number), chat)
    assert [_stored(rig, chat) for chat in waiting] == [CHAT_PAGES] * 20
    assert rig.count("lost_wanted_pages") == 0
    assert rig.disk is not None
    stats = rig.disk.stats()
    assert stats.segments_reused > 0
    assert stats.bytes_moved == stats.segments_dropped == 0
    assert stats.used_bytes <= 1 << 20


def test_of_what_waits_the_tail_of_the_queue_leaves_the_disk_first(make: Make) -> None:
    rig = _small_disk(make)
    chats = [pages(f"chat{number}-", CHAT_PAGES) for number in range(60)]
    for number, chat in enumerate(chats):
        rig.save(chat)
        rig.settle()
        _expect(rig, str(number), chat)
    stored = [_stored(rig, chat) for chat in chats]
    assert stored[:25] == [CHAT_PAGES] * 25
    assert sum(stored) < 60 * CHAT_PAGES
    assert rig.count("lost_wanted_pages") > 0


def test_pages_on_disk_survive_a_restart_and_go_on_being_placed(make: Make, tmp_path: Path) -> None:
    rig = _small_disk(make)
    for number in range(CHATS):
        rig.save(pages(f"chat{number}-", CHAT_PAGES))
        rig.settle()
    rig.store.close()
    again = _small_disk(make)
    assert again.found > 80
    old = [pages(f"chat{number}-", CHAT_PAGES) for number in range(CHATS)]
    waiting = [chat for chat in old if _stored(again, chat) == CHAT_PAGES][::2]
    for number, chat in enumerate(waiting):
        _expect(again, str(number), chat)
    for number in range(CHATS):
        again.save(pages(f"new{number}-", CHAT_PAGES))
        again.settle()
    assert [_stored(again, chat) for chat in waiting] == [CHAT_PAGES] * len(waiting)
    plan = again.store.plan(again.space, waiting[0])
    assert plan is not None
    again.wait(plan)
    assert plan.done
    assert not plan.failed
    check_content(again, waiting[0])
    again.store.cancel_plan(plan)
    again.settle()


def test_what_nobody_waits_for_pushes_nothing_off_the_disk_that_somebody_does(make: Make) -> None:
    """And is written after all when somebody comes to wait for it in time."""
    rig = _small_disk(make)
    waiting: list[np.ndarray] = []
    while not rig.books.writing.disk_is_full:
        waiting.append(pages(f"chat{len(waiting)}-", CHAT_PAGES))
        rig.save(waiting[-1])
        _expect(rig, str(len(waiting)), waiting[-1])
        rig.settle()
    kept = [_stored(rig, chat) for chat in waiting]
    for number in range(12):
        rig.save(pages(f"idle{number}-", CHAT_PAGES))
        rig.settle()
    assert [_stored(rig, chat) for chat in waiting] == kept
    assert rig.count("not_admitted_pages") >= 10 * CHAT_PAGES
    assert rig.store.lookahead is not None
    late = pages("idle11-", CHAT_PAGES)
    assert rig.on_disk(late) == 0
    for number in range(8):
        rig.store.lookahead.leave(str(number + 1))
    _expect(rig, "late", late)
    rig.settle()
    assert rig.on_disk(late) == CHAT_PAGES
