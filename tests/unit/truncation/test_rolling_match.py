"""The matcher's edges: groups, capacity, rows that are used again, wrong use."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ext.truncation.rolling import NO_ROW, MatchIndex, group_id


def test_pages_of_another_group_are_never_found() -> None:
    index = MatchIndex(4, 8)
    index.insert_chain(1, range(8))
    assert index.find(range(8), 2) is None
    found = index.find(range(8), 1)
    assert found is not None
    assert (found.start, found.length, found.offset, found.rows.tolist()) == (0, 8, 0, [0, 1])


def test_parts_of_a_group_cannot_run_into_each_other() -> None:
    parts = [("a", "bc"), ("ab", "c"), ("abc",), ("a", "bc", ""), ("a", "bc", None), ("a", b"bc")]
    ids = {group_id(b"secret", *each) for each in parts}
    assert len(ids) == len(parts)
    assert all(0 <= value < 1 << 63 for value in ids)
    assert group_id(b"another", "a", "bc") not in ids


def test_a_full_index_says_so_and_goes_on_after_a_removal() -> None:
    index = MatchIndex(2, 3)
    rows = index.insert_chain(1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert rows.tolist() == [0, 1, 2]
    assert index.insert(1, [9, 9]) == NO_ROW
    index.remove(1)
    assert index.insert(1, [9, 9], parent=2) == 1
    run = index.find([0, 5, 6, 9, 9, 0], 1)
    assert run is not None
    assert run.rows.tolist() == [2, 1]
    assert len(index) == 3


def test_a_run_does_not_cross_a_removed_page() -> None:
    index = MatchIndex(2, 8)
    rows = index.insert_chain(1, range(8))
    index.remove(int(rows[1]))
    run = index.find(range(8), 1)
    assert run is not None
    assert (run.start, run.length) == (4, 4)


def test_many_pages_come_and_go_without_a_trace() -> None:
    rng = np.random.default_rng(5)
    index = MatchIndex(4, 500)
    live: dict[int, np.ndarray] = {}
    for _ in range(6000):
        if len(live) == 500 or (live and rng.random() < 0.45):
            row = int(rng.choice(list(live)))
            index.remove(row)
            assert index.find(live.pop(row), 1) is None
        else:
            page = rng.integers(0, 1 << 20, 4, dtype=np.int32)
            live[index.insert(1, page)] = page
    assert len(index) == len(live)
    for row, page in live.items():
        run = index.find(page, 1)
        assert run is not None
        assert run.rows.tolist() == [row]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda index: index.insert(1, [1, 2, 3]), "whole pages"),
        (lambda index: index.insert(1, [1, 2], parent=5), "parent 5"),
        (lambda index: index.insert(2, [1, 2], parent=0), "group 2"),
        (lambda index: index.remove(7), "row 7"),
        (lambda index: MatchIndex(4, 9, window=5), "window"),
    ],
)
def test_wrong_use_is_refused(call, said: str) -> None:  # type: ignore[no-untyped-def]
    index = MatchIndex(2, 8)
    index.insert(1, [1, 2])
    with pytest.raises(ValueError, match=said):
        call(index)


def test_bytes_grow_with_pages_and_not_with_use() -> None:
    index = MatchIndex(16, 1000)
    empty = index.num_bytes
    for _ in range(50):
        row = index.insert(1, range(16))
        index.remove(row)
    assert empty < index.num_bytes <= empty + 200
