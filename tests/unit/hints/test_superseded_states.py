"""States that later ones made hardly worth their bytes leave first, but where paths part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import lookahead
from tests.unit.store.store_rig import Make, Rig, pages, rigs

PARTS = 3
CHAT, FIRST, LAST = pages("chat", 4), pages("first", PARTS), pages("last", PARTS)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _keep(rig: Rig, path: np.ndarray, state: np.ndarray) -> None:
    """Pages, and the parts of a state behind the last one."""
    assert rig.store.lookahead is not None
    rig.save(path)
    rig.save(state, path)
    rig.store.lookahead.used(rig.space, path, None)


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


def _superseded(make: Make, *, full: bool = True, **options: Any) -> Rig:
    """A state `first` behind the second of four pages that was let leave; the disk has nothing.

    Args:
        make: makes rigs.
        full: whether the disk was full then; it has room since.
        options: for the rig.
    """
    rig = make(slots=40, policy="write_back", lookahead=True, **options)
    _keep(rig, CHAT[:2], FIRST)
    _keep(rig, CHAT, LAST)
    if full:
        rig.books.writing.note_full()
    _let_leave(rig, CHAT[1:2], FIRST)
    rig.books.writing.note_cleared()
    return rig


def _written(rig: Rig) -> list[int]:
    assert rig.store.flush(300.0) == 0
    return [rig.on_disk(each) for each in (CHAT, FIRST, LAST)]


def test_on_a_full_disk_what_dram_alone_has_is_not_written(make: Make) -> None:
    assert _written(_superseded(make)) == [4, 0, PARTS]


def test_with_room_on_disk_all_is_written(make: Make) -> None:
    assert _written(_superseded(make, full=False)) == [4, PARTS, PARTS]


def test_what_is_pinned_after_that_is_written(make: Make) -> None:
    rig = _superseded(make, pin_share=0.5)
    assert rig.store.lookahead is not None
    meant = np.concatenate([CHAT[:2], FIRST])
    rig.store.lookahead.pin(rig.space, meant, owner=0, seconds=600.0)
    assert rig.count("pinned_pages") == 2 + PARTS
    assert _written(rig) == [4, PARTS, PARTS]


@pytest.mark.parametrize("returns", [True, False])
def test_what_is_said_to_be_needed_again_is_written(make: Make, returns: bool) -> None:
    rig = _superseded(make)
    assert rig.store.lookahead is not None
    meant = np.concatenate([CHAT[:2], FIRST])
    rig.store.lookahead.hint(rig.space, meant, owner=0, returns_in_s=60.0 if returns else None)
    assert rig.count("hinted_return_pages" if returns else "hinted_ends_pages")
    assert _written(rig) == [4, PARTS if returns else 0, PARTS]


def test_what_was_not_to_be_written_is_not_lost_at_shutdown(make: Make) -> None:
    rig = _superseded(make)
    rig.store.close(timeout_s=0.0)
    assert rig.count("shutdown_lost_pages") == 4 + PARTS


def test_what_the_disk_refused_after_it_was_offered_again_is_lost(make: Make) -> None:
    rig = _superseded(make, pin_share=0.5)
    assert rig.store.lookahead is not None
    meant = np.concatenate([CHAT[:2], FIRST])
    rig.store.lookahead.pin(rig.space, meant, owner=0, seconds=600.0)
    rig.io.fail_writes = True
    rig.store.close()
    assert rig.count("shutdown_lost_pages") == 4 + 2 * PARTS


def test_a_long_path_is_gone_through_in_pieces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in the order in which it would be gone through as a whole."""
    orders, index = [], PageIndex
    for most in (1024, 2):
        rig = make(slots=40, disk=False, lookahead=True)
        _keep(rig, CHAT, np.concatenate([FIRST, LAST]))
        sizes: list[int] = []
        real = index.lookup

        def lookup(self: PageIndex, hashes: np.ndarray, number: int) -> np.ndarray:
            sizes.append(len(hashes))  # noqa: B023
            return real(self, hashes, number)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(lookahead, "_MOST_PARTS", most)
            patch.setattr(index, "lookup", lookup)
            _let_leave(rig, CHAT[1:2], np.concatenate([FIRST, LAST]))
        assert max(sizes) == min(most, 2 * PARTS)
        assert rig.count("superseded_pages") == 2 * PARTS
        table = rig.books.table
        orders.append(table.index.keys(table.order.next_to_leave(2 * PARTS, 0.0))[0].tolist())
    assert orders[0] == orders[1]
