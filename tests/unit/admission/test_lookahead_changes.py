"""Waiting requests are looked for again when pages that they need become known, or are lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.store.lookahead import LookAhead
from sglang_ext.tiers.store.types import Rows
from tests.unit.store.store_rig import NONE, Make, Rig, pages, rigs

MANY = 100


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def lookahead(rig: Rig) -> LookAhead:
    assert rig.store.lookahead is not None
    return rig.store.lookahead


def expect(rig: Rig, request: int, hashes: np.ndarray) -> int:
    """How many of its pages are stored."""
    return lookahead(rig).expect(request, rig.space, hashes, 0).total


def changed(rig: Rig, most: int = MANY) -> list[object]:
    return lookahead(rig).take_changed(most)


def test_whoever_misses_a_page_hears_of_it(make: Make) -> None:
    rig = make(slots=16, lookahead=True)
    path = pages("document", 4)
    rig.save(path[:2])
    assert [expect(rig, request, path[: 3 + request]) for request in range(2)] == [2, 2]
    assert expect(rig, 2, path[:2]) == 2  # it misses nothing
    assert expect(rig, 3, pages("another", 3)) == 0
    assert changed(rig) == []
    rig.save(path[2:3], path[:2])
    assert changed(rig, 1) == [0]
    assert changed(rig) == [1]
    assert changed(rig) == []
    assert [expect(rig, request, path[: 3 + request]) for request in range(2)] == [3, 3]
    rig.save(path[3:], path[:3])
    assert changed(rig) == [1]  # the other one has all of its own


def test_a_save_that_fails_tells_nobody(make: Make) -> None:
    rig = make(slots=16, lookahead=True)
    path = pages("document", 2)
    expect(rig, 0, path)
    rig.save(path, ok=False)
    assert changed(rig) == []


def test_whoever_left_is_not_named(make: Make) -> None:
    rig = make(slots=16, lookahead=True)
    path = pages("document", 2)
    for request in range(2):
        expect(rig, request, path)
    lookahead(rig).leave(0)
    rig.save(path)
    lookahead(rig).leave(1)
    assert changed(rig) == []
    assert not lookahead(rig)._missing
    assert not lookahead(rig)._behind


def test_what_is_saved_behind_a_page_that_is_looked_out_for_wakes(make: Make) -> None:
    """As the windows or the state of a hybrid are, which come behind its pages."""
    rig = make(slots=16, lookahead=True)
    path, other = pages("document", 4), pages("other", 2)
    for request, first in enumerate((0, 2, 4)):
        lookahead(rig).expect(request, rig.space, path[:0], 0, next_page=path[first : first + 1])
    rig.save(path[:2])
    assert changed(rig) == [0]
    rig.save(other)
    assert changed(rig) == []
    rig.save(pages("state", 1), path[:2])
    assert changed(rig) == [0]
    rig.save(path[2:], path[:2])
    assert changed(rig) == [0, 1]
    for request in range(3):
        lookahead(rig).leave(request)
    rig.save(pages("another state", 1), path)
    assert changed(rig) == []
    assert not lookahead(rig)._behind


def test_a_save_goes_through_what_is_looked_out_for_and_not_through_its_path(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of a long prompt is saved with all the pages before it, under the store's lock."""
    rig = make(slots=64, lookahead=True)
    path = pages("document", 48)
    lookahead(rig).expect(0, rig.space, path[:0], 0, next_page=path[:1])
    index, num_keys = lookahead(rig)._table.index, 0
    keys = index.keys

    def counted(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        nonlocal num_keys
        num_keys += len(rows)
        return keys(rows)

    monkeypatch.setattr(index, "keys", counted)
    for end in range(1, 49):
        rig.save(path[end - 1 : end], path[: end - 1])
        assert changed(rig) == [0]
    assert num_keys <= 2 * len(path), "of what is saved alone"


def test_lost_pages_are_waited_for_again(make: Make) -> None:
    rig = make(slots=6, disk=False, lookahead=True)
    path = pages("document", 4)
    rig.save(path)
    for request in range(2):
        assert expect(rig, request, path) == 4
    rig.save(pages("much", 6))  # there is room for two more; the document gives way, its end first
    assert changed(rig) == [0, 1]
    left = [expect(rig, request, path) for request in range(2)]
    assert left[0] == left[1] < 4
    assert changed(rig) == []
    rig.save(path[left[0] :], path[: left[0]])
    assert changed(rig)[:2] == [0, 1]
    assert expect(rig, 0, path) > left[0]


def test_a_page_of_another_key_space_is_another_page(make: Make) -> None:
    rig = make(slots=16, lookahead=True)
    path = pages("document", 2)
    expect(rig, 0, path)
    rig.save(path, NONE, rig.store.space(rig.space.digest, b"a" * 32))
    assert changed(rig) == []
