"""Which page leads to which."""

from __future__ import annotations

import numpy as np

from sglang_ext.tiers.store.books.eviction.page_parents import PageParents


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
