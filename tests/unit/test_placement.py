"""What leaves DRAM is what the queue needs least, over all of it; what must stay does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.store_rig import Make, Rig, pages, rigs


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
