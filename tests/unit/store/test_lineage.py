"""Which page leads to which, and that no page leaves before one that it leads to."""

from __future__ import annotations

import numpy as np

from sglang_ext.tiers.store.books.orders.page_parents import PageParents


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_the_pages_above_one() -> None:
    lineage = PageParents(32)
    lineage.link(rows(3, 9, 4, 7))
    lineage.link(rows(3, 9, 5))
    assert lineage.above(7).tolist() == [4, 9, 3]
    assert lineage.above(5).tolist() == [9, 3]
    assert lineage.above(3).tolist() == []
    assert lineage.above(30).tolist() == []


def test_a_path_whose_head_is_not_known_hangs_on_what_is() -> None:
    lineage = PageParents(32)
    lineage.link(rows(-1, -1, 4, 7))
    assert lineage.above(7).tolist() == [4]
    lineage.link(rows(1, 2, 3))
    lineage.link(rows(3, 8, 9))  # from the middle of a path that is known
    assert lineage.above(9).tolist() == [8, 3, 2, 1]
    lineage.link(rows())
    lineage.link(rows(-1))


def test_rows_that_hold_other_pages_lead_nowhere_and_never_in_a_circle() -> None:
    lineage = PageParents(32)
    lineage.link(rows(1, 2, 3, 4))
    lineage.forget(rows(2))
    assert lineage.above(3).tolist() == [2]  # at the same depth still: a link to one page too many
    lineage.link(rows(4, 2))  # the row is a child of a child of its former self
    assert lineage.above(2).tolist() == [4, 3]
    assert lineage.above(3).tolist() == []


def test_children_leave_before_their_parents_in_the_wished_order_otherwise() -> None:
    lineage = PageParents(32)
    lineage.link(rows(1, 2, 3))
    lineage.link(rows(1, 2, 4))
    lineage.link(rows(10, 11))
    wished = rows(2, 20, 1, 3, 10, 4, 11)
    assert lineage.children_first(wished, 7).tolist() == [20, 3, 4, 11, 2, 1, 10]
    assert lineage.children_first(wished, 3).tolist() == [20, 3, 4]
    assert lineage.children_first(wished, 0).tolist() == []
    assert lineage.children_first(rows(), 5).tolist() == []
    # A child that may not leave is not among them, and holds nothing back.
    assert lineage.children_first(rows(2, 1), 2).tolist() == [2, 1]
    assert not lineage._children.any()


def test_random_forests_keep_the_rule() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        lineage, parents = PageParents(64), {}
        for row in range(1, 64):
            parent = int(rng.integers(0, row))
            parents[row] = parent
            path = [row]
            while path[-1] in parents:
                path.append(parents[path[-1]])
            lineage.link(np.array(path[::-1], np.int64))
        wished = rng.permutation(64)[: int(rng.integers(1, 64))]
        chosen = lineage.children_first(wished, int(rng.integers(0, 64))).tolist()
        assert len(set(chosen)) == len(chosen)
        gone: set[int] = set()
        for row in chosen:
            children = {child for child, parent in parents.items() if parent == row}
            assert not (children & set(wished.tolist())) - gone
            gone.add(row)
        assert not lineage._children.any()
