"""Pages that may leave one tier first."""

from __future__ import annotations

import pytest

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from tests.unit.policy.test_hints import _chat, _chats, _order_of_leaving, _rows


@pytest.mark.parametrize("order", ["lru", "fifo", "tail_of_queue"])
def test_they_leave_that_tier_first_and_no_other(order: str) -> None:
    policy = PlacementPolicy(1024, PolicyConfig(order=order))
    dram, disk = policy.add_tier(64), policy.add_tier(256)
    for number in range(3):
        policy.used(_chat(number), 1.0 + number)
        dram.enter(_chat(number))
        disk.enter(_chat(number))
    before = disk.next_to_leave(30, 5.0).tolist()
    assert dram.demote(_chat(1)) == 10
    assert dram.demote(_chat(1)) == 0
    assert dram.next_to_leave(10, 6.0).tolist() == _chat(1)[::-1].tolist()
    assert disk.next_to_leave(30, 6.0).tolist() == before
    assert sorted(dram.evict(30, 6.0).tolist()) == list(range(30))


def test_a_use_a_wait_and_a_pin_undo_it() -> None:
    policy = _chats(4, PolicyConfig(pin_share=0.5))
    for number in (1, 2, 3):
        policy.tiers[0].demote(_chat(number))
    policy.used(_chat(1), 5.0)
    policy.enqueue("waits", _chat(2), 5.0)
    policy.pin(_chat(3), 5.0, owner=0, seconds=60.0)
    assert _order_of_leaving(policy, 3, 6.0) == [0, 1, 3]


def test_what_is_shared_pinned_or_elsewhere_stays() -> None:
    policy = PlacementPolicy(64, PolicyConfig(pin_share=0.5))
    tier = policy.add_tier(32)
    mine, other = _rows([0, 1, 2, 3]), _rows([0, 1, 10, 11])
    for path in (mine, other):
        policy.used(path, 1.0)
    tier.enter(_rows([0, 1, 2, 10, 11]))
    assert tier.demote(mine) == 1
    policy.pin(other, 2.0, owner=0, seconds=60.0)
    assert tier.demote(other) == 0


def test_without_look_ahead_nothing_is_demoted() -> None:
    policy = _chats(2, PolicyConfig(lookahead=False, return_times=False))
    assert policy.tiers[0].demote(_chat(1)) == 0


@pytest.mark.parametrize("num_at_once", [1, 7, 64, 1000])
def test_what_left_dram_young_does_not_leave_the_disk_before_what_was_used_earlier(
    num_at_once: int,
) -> None:
    num_rows = 1000  # 100 chats of ten pages, and those of the younger half leave DRAM first
    policy = PlacementPolicy(num_rows, PolicyConfig())
    dram, disk = policy.add_tier(num_rows), policy.add_tier(num_rows)
    for number in range(100):
        policy.used(_chat(number), 1.0 + number)
        dram.enter(_chat(number))
    for number in range(50, 100):
        dram.demote(_chat(number))
    while (gone := dram.evict(num_at_once, 200.0)).size:
        disk.enter(gone)
    first = disk.next_to_leave(num_rows // 2, 300.0) // 10
    assert (
        first >= 50
    ).mean() <= 0.02  # a chat's worth: one page that found no place keeps its parents
