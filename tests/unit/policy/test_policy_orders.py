"""Every base order: what it promises, and what the eviction lists make of it."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ext.tiers.policy import (
    PlacementPolicy,
    PolicyConfig,
    order_ids,
    register_order,
)

# Pages are used in this order, page 0 once more at the end.
USES = (0, 1, 2, 3, 0)
EXPECTED = {"lru": [1, 2, 3, 0], "fifo": [0, 1, 2, 3], "tail_of_queue": [0, 3, 2, 1]}


def _used(order_id: str) -> PlacementPolicy:
    policy = PlacementPolicy(8, PolicyConfig(order=order_id, return_times=False))
    policy.add_tier(4)
    for now_s, page in enumerate(USES):
        row = np.array([page])
        policy.used(row, float(now_s))
        policy.tiers[0].enter(row)
    return policy


@pytest.mark.parametrize("order_id", order_ids())
def test_pages_leave_in_this_order(order_id: str) -> None:
    policy = _used(order_id)
    assert policy.tiers[0].evict(4, 9.0).tolist() == EXPECTED[order_id]


@pytest.mark.parametrize("order_id", order_ids())
@pytest.mark.parametrize("left_dram", [[3, 2, 1, 0], [2, 0, 3, 1], [0, 1, 2, 3]])
def test_the_next_tier_has_the_same_order_whatever_left_the_first_one_first(
    order_id: str, left_dram: list[int]
) -> None:
    """Return times, hints and pins may have DRAM give up pages in another order."""
    policy = _used(order_id)
    disk = policy.add_tier(4)
    for page in left_dram:
        policy.tiers[0].exit(np.array([page]))
        disk.enter(np.array([page]))
    assert disk.evict(4, 9.0).tolist() == EXPECTED[order_id]


@pytest.mark.parametrize("order_id", order_ids())
def test_a_child_leaves_before_its_parent(order_id: str) -> None:
    policy = PlacementPolicy(16, PolicyConfig(order=order_id, return_times=False))
    tier = policy.add_tier(16)
    for now_s, path in enumerate(([0, 1, 2], [0, 1, 3, 4], [5, 6])):
        policy.used(np.array(path), float(now_s))
        tier.enter(np.array(path))
    parents = {1: 0, 2: 1, 3: 1, 4: 3, 6: 5}
    leaving = tier.evict(7, 9.0).tolist()
    assert sorted(leaving) == list(range(7))
    for child, parent in parents.items():
        assert leaving.index(child) < leaving.index(parent)


def test_unknown_and_taken_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="no base order is called 'random'; known are fifo, lru"):
        PolicyConfig(order="random")
    with pytest.raises(ValueError, match="already registered"):
        register_order("lru", "somewhere:Else")
    with pytest.raises(ValueError, match="letters, digits and _"):
        register_order("new order", "somewhere:Else")


def test_pages_that_a_waiting_request_goes_on_without_leave_before_those_it_needs() -> None:
    """A cut conversation: pages 0 and 1 led to 2 and 3 when they were stored, and never will."""
    policy = PlacementPolicy(8, PolicyConfig(return_times=False))
    tier = policy.add_tier(8)
    policy.used(np.arange(4), 0.0)
    tier.enter(np.arange(4))
    policy.enqueue("cut", np.array([2, 3]), 1.0)
    assert tier.evict(2, 2.0).tolist() == [1, 0]
    policy.used(np.array([2, 3, 4]), 3.0)
    tier.enter(np.array([4]))
    policy.leave("cut")
    assert tier.evict(8, 4.0).tolist() == [4, 3, 2]
