"""Which pages a full disk takes in the place of others."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.store.books.eviction.disk_order import DiskOrder

NEW, OLD = np.arange(4), np.arange(10, 14)


def _order(
    new_score: float, old_score: float, *, active: bool
) -> tuple[PlacementPolicy, DiskOrder]:
    """Old pages were used twice and new ones once, so they are of two classes."""
    policy = PlacementPolicy(64, PolicyConfig(pin_share=1.0))
    order = DiskOrder(PageIndex(64), policy, 32)
    for path in (OLD, OLD, NEW):
        policy.used(path, 1.0)
    (tier,) = policy.tiers
    tier.return_times.active = active
    for path, score in ((NEW, new_score), (OLD, old_score)):
        tier.return_times.scores[policy.pages.kind[path]] = score
    return policy, order


@pytest.mark.parametrize(
    ("new_score", "active", "takes"),
    [(0.9, True, True), (0.5, True, False), (0.5, False, True)],
)
def test_a_page_is_refused_for_an_older_one_that_is_clearly_worth_more(
    new_score: float, active: bool, takes: bool
) -> None:
    _, order = _order(new_score, 1.0, active=active)
    assert order.outweigh(NEW, OLD, 2.0, by_score=True).tolist() == [takes] * 4


@pytest.mark.parametrize("active", [False, True])
def test_a_page_that_nobody_spoke_of_is_not_refused_for_one_that_is_said_to_come_back(
    active: bool,
) -> None:
    """The order chose that one to leave before all of which nothing was said."""
    policy, order = _order(0.0, 0.0, active=active)
    assert len(policy.hint(OLD, 2.0, owner=0, returns_in_s=100.0)) == 4
    assert order.outweigh(NEW, OLD, 3.0, by_score=True).all()
    assert len(policy.hint(NEW, 3.0, owner=0)) == 4  # what is over is
    assert not order.outweigh(NEW, OLD, 4.0, by_score=True).any()


@pytest.mark.parametrize("active", [False, True])
def test_nothing_outweighs_a_pinned_page(active: bool) -> None:
    policy, order = _order(1.0, 0.0, active=active)
    assert policy.pin(OLD, 2.0, owner=0, seconds=100.0) == (4, 0)
    assert not order.outweigh(NEW, OLD, 3.0, by_score=True).any()
    assert order.are_needed_less(NEW, OLD).all()
    assert not order.are_needed_less(OLD, NEW).any()
