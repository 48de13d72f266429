"""What a cut conversation went on without: it leaves first, as long as nobody comes back for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.policy.page_kernels import LEFT_BEHIND
from tests.unit.store.store_rig import Make, pages, rigs


def _rows(rows: Sequence[int]) -> np.ndarray:
    return np.array(rows, np.int64)


def _two_chats(config: PolicyConfig | None = None) -> PlacementPolicy:
    """Pages 0 to 9 are a chat's; 20 to 25 one that was used before it, so colder."""
    policy = PlacementPolicy(64, config or PolicyConfig())
    tier = policy.add_tier(32)
    for now_s, path in ((1.0, _rows(range(20, 26))), (2.0, _rows(range(10)))):
        policy.used(path, now_s)
        tier.enter(path)
    return policy


def _left(policy: PlacementPolicy) -> list[int]:
    return np.flatnonzero(policy.pages.kind == LEFT_BEHIND).tolist()


def test_what_was_cut_leaves_before_what_is_colder() -> None:
    policy = _two_chats()
    policy.leave_behind(_rows([1, 2, 3, 4, 5]), 3.0)
    policy.enqueue("cut", _rows([0, 6, 7, 8, 9]), 3.0)
    assert _left(policy) == [1, 2, 3, 4, 5]
    assert policy.tiers[0].evict(7, 4.0).tolist() == [5, 4, 3, 2, 1, 25, 24]


def test_the_start_of_a_conversation_too() -> None:
    policy = _two_chats()
    tier = policy.tiers[0]
    policy.leave_behind(_rows(range(4)), 3.0)
    policy.enqueue("cut", _rows(range(4, 10)), 3.0)
    assert tier.evict(6, 4.0).tolist() == [3, 2, 1, 0, 25, 24]


def test_a_page_that_is_waited_for_stays() -> None:
    policy = PlacementPolicy(64)
    tier = policy.add_tier(32)
    policy.used(_rows(range(10)), 1.0)
    tier.enter(_rows(range(10)))
    policy.used(_rows([20]), 2.0)
    tier.enter(_rows([20]))
    policy.enqueue("whole", _rows(range(10)), 2.0)
    policy.leave_behind(_rows(range(4)), 3.0)
    policy.enqueue("cut", _rows(range(4, 10)), 3.0)
    assert tier.next_to_leave(1, 4.0).tolist() == [20]
    policy.leave("whole")
    assert tier.evict(5, 5.0).tolist() == [3, 2, 1, 0, 20]


def test_what_others_use_too_is_not_left() -> None:
    policy = PlacementPolicy(64)
    for chat in range(3):  # a shared start of two pages
        policy.used(_rows([0, 1, *range(10 * chat + 10, 10 * chat + 16)]), float(chat))
    left = policy.leave_behind(_rows([0, 1, 30, 31, 32]), 4.0)
    assert left.tolist() == [32, 31, 30]
    assert _left(policy) == [30, 31, 32]


def test_a_fork_in_a_later_turn_keeps_what_it_needs() -> None:
    policy = PlacementPolicy(64)
    for turn in range(1, 6):  # a chat that grows by two pages a turn
        policy.used(_rows(range(2 * turn)), float(turn))
    policy.used(_rows([*range(10), 30, 31]), 6.0)  # another one goes on from there,
    policy.used(_rows(range(14)), 7.0)  # and so does the first
    assert policy.leave_behind(_rows(range(12)), 8.0).tolist() == [11, 10]


def test_a_page_number_that_is_used_anew_is_nobody_elses() -> None:
    policy = PlacementPolicy(64)
    for chat in range(2):
        policy.used(_rows([0, 1, 10 * chat + 10, 10 * chat + 11]), float(chat))
    policy.forget(_rows([0, 1]))
    policy.used(_rows([0, 1, 2, 3]), 3.0)
    assert policy.leave_behind(_rows([0, 1]), 4.0).tolist() == [1, 0]


def test_in_first_in_first_out_order_it_comes_back_too() -> None:
    policy = PlacementPolicy(64, PolicyConfig(order="fifo"))
    tier = policy.add_tier(32)
    for path in (_rows(range(20, 26)), _rows(range(10))):
        policy.used(path, 1.0)
        tier.enter(path)
    policy.leave_behind(_rows(range(10)), 2.0)
    policy.used(_rows(range(10)), 3.0)
    assert tier.evict(3, 4.0).tolist() == [25, 24, 23]


def test_what_is_used_again_is_as_before() -> None:
    policy = _two_chats()
    policy.leave_behind(_rows(range(4)), 3.0)
    assert _left(policy) == [0, 1, 2, 3]
    policy.used(_rows(range(10)), 5.0)
    assert _left(policy) == []


def test_what_is_not_known_is_passed_over() -> None:
    policy = _two_chats()
    assert policy.leave_behind(_rows([-1, 63, 64, 5]), 3.0).tolist() == [5]
    assert policy.leave_behind(_rows([5]), 4.0).tolist() == []  # no news


def test_where_they_come_back_the_rule_is_given_up() -> None:
    """As with a client that asks for exact KV now and then, of conversations that are cut."""
    for share, holds in ((0.01, True), (0.5, False)):
        policy = PlacementPolicy(4096)
        tier = policy.add_tier(4096)
        for chat in range(200):
            path = _rows(range(20 * chat, 20 * chat + 20))
            policy.used(path, 10.0 * chat)
            policy.leave_behind(path[:10], 10.0 * chat + 2)
            if chat % round(1 / share) == 0:
                policy.used(path, 10.0 * chat + 4)
        assert tier.return_times.left_never_return == holds


def test_without_look_ahead_the_base_order_decides() -> None:
    policy = _two_chats(PolicyConfig(lookahead=False, return_times=False))
    policy.leave_behind(_rows([1, 2, 3, 4, 5]), 3.0)
    assert policy.tiers[0].evict(6, 4.0).tolist() == [25, 24, 23, 22, 21, 20]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def test_in_the_store_it_leaves_before_older_pages_and_keeps_nothing(make: Make) -> None:
    rig = make(slots=20, disk=False, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    older, chat = pages("older", 6), pages("chat", 10)
    for path in (older, chat):
        rig.save(path)
        lookahead.used(rig.space, path, None)
    lookahead.leave_behind(rig.space, chat, 1, 6)
    assert rig.count("left_behind_pages") == 5
    kept = np.ascontiguousarray(chat[[0, 6, 7, 8, 9]])
    assert lookahead.expect("cut", rig.space, kept, 0).total == 5
    lookahead.leave("cut")
    new = pages("new", 9)
    rig.save(new)  # there was room for four
    assert rig.ready(new) == 9
    assert rig.ready(older) == 6
    assert [rig.ready(chat[at : at + 1]) for at in range(10)] == [1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    lookahead.leave_behind(rig.space, chat, 1, 6)  # nothing of it is stored
    rig.settle()


def test_without_a_head_nothing_of_it_is_kept_young(make: Make) -> None:
    rig = make(slots=20, disk=False, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    chat = pages("chat", 10)
    rig.save(chat)
    lookahead.used(rig.space, chat, None)
    lookahead.leave_behind(rig.space, chat, 0, 6)
    lookahead.expect("cut", rig.space, np.ascontiguousarray(chat[6:]), 0)
    rows = rig.books.table.index.lookup(chat, rig.space.number)
    assert rig.books.table.index.lru_tail(6).tolist() == rows[:6][::-1].tolist()
    assert rig.books.table.parents.above(int(rows[9])).tolist() == rows[6:9][::-1].tolist()
    rig.store.check()
