"""States that later ones made hardly worth their bytes leave first, but where paths part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.store.store_rig import Make, Rig, pages, rigs

PARTS = 3


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _keep(rig: Rig, path: np.ndarray, state: np.ndarray) -> None:
    """Pages, and the parts of a state behind the last one."""
    lookahead = rig.store.lookahead
    assert lookahead is not None
    rig.save(path)
    rig.save(state, path)
    lookahead.used(rig.space, path, None)


def _num_there(rig: Rig, state: np.ndarray) -> int:
    return int((rig.store.page_states(rig.space, state)[0] != 0).sum())


def _let_leave(rig: Rig, page: np.ndarray, state: np.ndarray) -> None:
    assert rig.store.lookahead is not None
    rig.store.lookahead.let_leave(rig.space, np.repeat(page, len(state), axis=0), state)


def test_a_state_that_a_later_one_followed_leaves_before_what_is_older(make: Make) -> None:
    rig = make(slots=4 + 4 + 3 * PARTS, disk=False, lookahead=True)
    old, chat = pages("old", 4), pages("chat", 4)
    of_old, first, last = (pages(name, PARTS) for name in ("of old", "first", "last"))
    _keep(rig, old, of_old)
    _keep(rig, chat[:2], first)
    _keep(rig, chat, last)
    _let_leave(rig, chat[1:2], first)
    assert rig.count("superseded_pages") == PARTS
    _let_leave(rig, chat[1:2], first)
    assert rig.count("superseded_pages") == PARTS
    rig.save(pages("new", PARTS))
    assert [_num_there(rig, state) for state in (first, of_old, last)] == [0, PARTS, PARTS]


def test_a_state_behind_a_page_that_paths_share_stays(make: Make) -> None:
    rig = make(slots=60, disk=False, lookahead=True)
    shared, state = pages("shared", 2), pages("state", PARTS)
    _keep(rig, shared, state)
    assert rig.store.lookahead is not None
    for number in range(3):
        path = np.concatenate([shared, pages(f"chat-{number}", 2)])
        rig.save(path)
        rig.store.lookahead.used(rig.space, path, None)
    _let_leave(rig, shared[1:2], state)
    assert rig.count("superseded_pages") == 0


def test_both_tiers_are_told(make: Make) -> None:
    rig = make(slots=40, lookahead=True)
    chat, state = pages("chat", 2), pages("state", PARTS)
    _keep(rig, chat, state)
    rig.settle()
    _let_leave(rig, chat[1:2], state)
    assert rig.count("superseded_pages") == 2 * PARTS
    order = rig.books.table.disk_order
    assert order is not None
    leaving = rig.books.table.index.keys(order.next_to_leave(PARTS, rig.books.table.now_s()))[0]
    assert {key.tobytes() for key in leaving} == {key.tobytes() for key in state}


def test_what_dram_alone_has_is_written_only_once_somebody_went_on_behind_it(make: Make) -> None:
    rig = make(slots=40, policy="write_back", lookahead=True)
    chat, first, last = pages("chat", 4), pages("first", PARTS), pages("last", PARTS)
    _keep(rig, chat[:2], first)
    _keep(rig, chat, last)
    _let_leave(rig, chat[1:2], first)
    assert rig.store.flush(300.0) == 0
    assert [rig.on_disk(state) for state in (first, last)] == [0, PARTS]
    assert rig.store.lookahead is not None
    rig.store.lookahead.went_on(rig.space, first)
    assert rig.store.flush(300.0) == 0
    assert rig.on_disk(first) == PARTS
    order = rig.books.table.order
    assert not set(rig.books.table.index.lookup(first, rig.space.number)) & set(
        order.next_to_leave(PARTS, rig.books.table.now_s())
    )
