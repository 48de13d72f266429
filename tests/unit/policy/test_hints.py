"""Hints of clients: they decide what leaves first while they come true, and only then."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.policy.hints.hint_kernels import ENDS, NUM_OWNERS, RETURNS
from sglang_ext.tiers.policy.page_kernels import ENDED, HINTED, IN_USE, PINNED

Rows = npt.NDArray[np.int64]


def _rows(rows: Iterable[int]) -> Rows:
    return np.fromiter(rows, np.int64)


def _chat(number: int) -> Rows:
    return _rows(range(10 * number, 10 * number + 10))


def _chats(num: int, config: PolicyConfig | None = None) -> PlacementPolicy:
    """Chats of ten pages, used one a second from second 1 on."""
    policy = PlacementPolicy(1024, config or PolicyConfig())
    tier = policy.add_tier(256)
    for number in range(num):
        policy.used(_chat(number), 1.0 + number)
        tier.enter(_chat(number))
    return policy


def _order_of_leaving(policy: PlacementPolicy, num: int, now_s: float) -> list[int]:
    """Numbers of the chats in the order in which their last page leaves."""
    gone = policy.tiers[0].evict(num * 10, now_s)
    first_pages = gone[gone % 10 == 0]  # the root is the last to leave
    return [int(page) // 10 for page in first_pages]


def test_what_comes_back_last_leaves_first_and_before_it_what_nobody_spoke_of() -> None:
    policy = _chats(4)
    for number, returns_in_s in ((1, 10.0), (0, 1000.0), (3, 100.0)):
        moved = policy.hint(_chat(number), 5.0, owner=0, returns_in_s=returns_in_s)
        assert sorted(moved.tolist()) == _chat(number).tolist()
    assert _order_of_leaving(policy, 4, 6.0) == [2, 0, 3, 1]


def test_of_two_that_were_hinted_alike_the_one_hinted_first_comes_back_first() -> None:
    policy = _chats(2)
    policy.hint(_chat(1), 5.0, owner=0, returns_in_s=100.0)
    policy.hint(_chat(0), 60.0, owner=0, returns_in_s=100.0)
    assert _order_of_leaving(policy, 2, 61.0) == [0, 1]


def test_one_whose_time_is_long_over_leaves_before_one_that_is_yet_to_come() -> None:
    policy = _chats(2)
    policy.hint(_chat(1), 5.0, owner=0, returns_in_s=20.0)
    policy.hint(_chat(0), 300.0, owner=0, returns_in_s=20.0)
    policy.hint(_chat(0), 300.0, owner=0, returns_in_s=500.0)
    assert _order_of_leaving(policy, 2, 301.0) == [1, 0]


def test_a_page_leaves_before_the_one_in_front_of_it() -> None:
    policy = _chats(2)
    policy.hint(_chat(0), 5.0, owner=0, returns_in_s=30.0)
    gone = policy.tiers[0].evict(20, 6.0).tolist()
    assert gone == [*_chat(1)[::-1].tolist(), *_chat(0)[::-1].tolist()]


def test_what_ended_leaves_first_however_young() -> None:
    policy = _chats(3)
    policy.hint(_chat(2), 5.0, owner=0)
    assert policy.tiers[0].evict(12, 6.0).tolist() == [*_chat(2)[::-1].tolist(), 9, 8]


def test_what_other_paths_share_does_not_end_with_one_of_them() -> None:
    policy = PlacementPolicy(64)
    for chat in range(3):
        policy.used(_rows([0, 1, *range(10 * chat + 10, 10 * chat + 16)]), float(chat))
    moved = policy.hint(_rows([0, 1, 30, 31, 32]), 4.0, owner=0)
    assert moved.tolist() == [32, 31, 30]
    assert np.flatnonzero(policy.pages.kind == ENDED).tolist() == [30, 31, 32]


def test_a_prompt_that_many_share_does_not_end_with_a_short_question_behind_it() -> None:
    """One page behind it looks like a conversation that goes on, until it is seen again."""
    policy = PlacementPolicy(64)
    for chat in range(20):
        path = _rows([0, 1, 2, 10 + chat])
        policy.used(path, float(chat), arrived_s=float(chat))
        moved = policy.hint(path, chat + 0.5, owner=0)
        assert chat < 2 or set(moved.tolist()) <= {10 + chat}
    assert np.flatnonzero(policy.pages.shared).tolist() == [0, 1, 2]
    assert policy.hints.trusted[0, ENDS]  # which is true of all of them but the first two
    assert moved.tolist() == [29]


def test_a_conversation_whose_last_page_is_written_anew_is_not_shared() -> None:
    policy = PlacementPolicy(64)
    for turn in range(8):
        policy.used(_rows([*range(turn + 2), 20 + turn]), float(turn))
    assert not policy.pages.shared.any()


def test_what_many_requests_at_once_say_of_one_conversation_is_said_once() -> None:
    policy = _chats(0)
    for number in range(40):  # samples of one prompt: each was on its way when the last one ended
        policy.used(_chat(1), 2.0 + number, arrived_s=1.0)
        policy.hint(_chat(1), 2.0 + number, owner=7)
    assert policy.hints.ended[7].tolist() == [1.0, 0.0]


def test_a_page_that_is_waited_for_stays_whatever_was_said() -> None:
    policy = _chats(2)
    policy.enqueue("waits", _chat(1), 3.0)
    policy.hint(_chat(1), 5.0, owner=0)
    assert _order_of_leaving(policy, 1, 6.0) == [0]


def test_a_use_takes_the_hint_back() -> None:
    policy = _chats(2)
    policy.hint(_chat(1), 5.0, owner=0)
    policy.used(_chat(1), 7.0)
    assert (policy.pages.kind < ENDED).all()
    assert _order_of_leaving(policy, 2, 8.0) == [0, 1]


def test_in_first_in_first_out_order_too() -> None:
    policy = _chats(2, PolicyConfig(order="fifo"))
    policy.hint(_chat(1), 5.0, owner=0)
    policy.hint(_chat(0), 5.0, owner=0, returns_in_s=9.0)
    policy.used(_chat(1), 7.0)
    assert _order_of_leaving(policy, 2, 8.0) == [1, 0]


@pytest.mark.parametrize("order", ["lru", "fifo", "tail_of_queue"])
def test_touched_pages_stay_and_putting_back_undoes(order: str) -> None:
    policy = _chats(3, PolicyConfig(order=order))
    tier = policy.tiers[0]
    for number in range(3):
        policy.hint(_chat(number), 5.0, owner=0, returns_in_s=100.0)
    policy.touched(_chat(2), 5.5)
    first = tier.next_to_leave(30, 6.0)
    assert tier.next_to_leave(30, 6.0).tolist() == first.tolist()
    assert sorted(tier.evict(30, 6.0).tolist()) == list(range(30))
    assert len(tier) == 0


def test_without_look_ahead_hints_do_nothing() -> None:
    policy = _chats(2, PolicyConfig(lookahead=False, return_times=False))
    assert not len(policy.hint(_chat(1), 5.0, owner=0))
    assert _order_of_leaving(policy, 2, 6.0) == [0, 1]


def test_pages_that_do_not_exist_are_passed_over() -> None:
    policy = _chats(1)
    moved = policy.hint(_rows([-1, 5000, 3, 700]), 5.0, owner=0, returns_in_s=2.0)
    assert moved.tolist() == [3]


def _follow(policy: PlacementPolicy, owner: int, said_s: float, true_s: float, num: int) -> None:
    """Chats one after another, each with a hint, each back once."""
    now_s = 1e6
    for _ in range(num):
        path = _chat(owner)
        policy.used(path, now_s)
        policy.hint(path, now_s, owner=owner, returns_in_s=said_s)
        now_s += true_s


@pytest.mark.parametrize("true_s", [1.0, 10.0, 40.0, 400.0])
def test_who_is_wrong_is_not_followed_until_it_is_right_again(true_s: float) -> None:
    policy = _chats(8)
    _follow(policy, 5, said_s=100.0, true_s=true_s, num=40)
    assert policy.hints.trusted[:, RETURNS].tolist() == [n != 5 for n in range(NUM_OWNERS)]
    assert not len(policy.hint(_chat(5), 2e6, owner=5, returns_in_s=100.0))
    assert len(policy.hint(_chat(6), 2e6, owner=6, returns_in_s=100.0))
    _follow(policy, 5, said_s=100.0, true_s=100.0, num=200)
    assert policy.hints.trusted[5, RETURNS]


@pytest.mark.parametrize("true_s", [67.0, 100.0, 190.0])
def test_who_is_half_off_is_followed(true_s: float) -> None:
    policy = _chats(8)
    _follow(policy, 5, said_s=100.0, true_s=true_s, num=200)
    assert policy.hints.trusted[5, RETURNS]


def test_what_never_returns_is_noticed_by_itself() -> None:
    policy = PlacementPolicy(20_000)
    for number in range(1000):
        now_s = 10.0 * number
        policy.used(_chat(number), now_s)
        policy.hint(_chat(number), now_s, owner=1, returns_in_s=5.0)
    assert not policy.hints.trusted[1, RETURNS]


def test_ends_that_come_back_are_not_followed() -> None:
    for share, holds in ((0.01, True), (0.5, False)):
        policy = PlacementPolicy(4096)
        for number in range(200):
            policy.used(_chat(number), 10.0 * number)
            policy.hint(_chat(number), 10.0 * number, owner=3)
            if number % round(1 / share) == 0:
                policy.used(_chat(number), 10.0 * number + 4)
        assert policy.hints.trusted[3, ENDS] == holds
        assert policy.hints.trusted[4, ENDS]


@pytest.mark.parametrize(
    ("num_said_to_return", "returned", "followed"),
    [
        (0, 0, (True, True)),  # only ends are said: four of sixty is few
        (4, 0, (True, True)),  # as good as only ends
        (20, 1, (False, False)),  # what is said to be over comes back as often as the rest
        (20, 16, (True, True)),  # much more of what was said to return did
    ],
)
def test_what_comes_back_tells_whether_an_owner_knows(
    num_said_to_return: int, returned: int, followed: tuple[bool, bool]
) -> None:
    policy = PlacementPolicy(4096)
    for number in range(60 + num_said_to_return):
        policy.used(_chat(number), 10.0 * number)
        returns_in_s = None if number < 60 else 1e5
        policy.hint(_chat(number), 10.0 * number, owner=3, returns_in_s=returns_in_s)
    for number in [*range(4), *range(60, 60 + returned)]:
        policy.used(_chat(number), 1e5 + number)
    assert tuple(policy.hints.trusted[3, [RETURNS, ENDS]].tolist()) == followed


def test_right_returns_are_followed_though_ends_come_back() -> None:
    policy = PlacementPolicy(4096)
    for number in range(60):
        policy.used(_chat(number), 10.0 * number)
        policy.hint(_chat(number), 10.0 * number, owner=5)
        policy.used(_chat(number), 10.0 * number + 4)
    _follow(policy, 5, said_s=100.0, true_s=100.0, num=60)
    assert policy.hints.trusted[5].tolist() == [True, False]


def test_pages_moved_before_the_owner_was_found_wrong_leave_like_others() -> None:
    policy = _chats(3)
    policy.hint(_chat(2), 5.0, owner=3)
    policy.hint(_chat(1), 5.0, owner=3, returns_in_s=1e4)
    policy.hints.trusted[3] = False
    assert _order_of_leaving(policy, 3, 6.0) == [0, 1, 2]


def test_a_pause_of_a_day_does_not_keep_what_others_need_within_a_minute() -> None:
    """A page with a hint is worth what it is expected to return for its room, and no more."""
    policy = PlacementPolicy(4096)
    tier = policy.add_tier(1024)
    now_s = 0.0
    for _ in range(60):  # what these are seen to do is learned
        for number in range(20):
            policy.used(_chat(number), now_s, names=_chat(number).astype(np.uint64) + np.uint64(1))
            now_s += 1.0
    for number in range(20):
        tier.enter(_chat(number))
    policy.used(_chat(40), now_s)
    policy.hint(_chat(40), now_s, owner=0, returns_in_s=86_400.0)
    tier.enter(_chat(40))
    assert set(tier.evict(10, now_s).tolist()) == set(_chat(40).tolist())
    policy.used(_chat(41), now_s)
    policy.hint(_chat(41), now_s, owner=0, returns_in_s=1.0)
    tier.enter(_chat(41))
    assert not set(tier.evict(150, now_s).tolist()) & set(_chat(41).tolist())


def test_the_two_worths_say_the_same_as_the_order() -> None:
    policy = _chats(4)
    tier = policy.tiers[0]
    policy.hint(_chat(1), 5.0, owner=0, returns_in_s=10.0)
    policy.hint(_chat(2), 5.0, owner=0, returns_in_s=100.0)
    policy.hint(_chat(3), 5.0, owner=0)
    scores = tier.worth(_rows([30, 0, 20, 10]), 6.0).score
    assert scores.tolist() == sorted(scores.tolist())
    assert scores[0] == -1.0
    assert len(set(scores.tolist())) == 4


def _replay(paths: list[Rows], hints: list[float] | None) -> int:
    """Hits of a tier of 40 pages over a sequence of paths, one each second."""
    policy = PlacementPolicy(int(max(path.max() for path in paths)) + 1)
    tier = policy.add_tier(40)
    hits = 0
    for number, path in enumerate(paths):
        now_s = float(number)
        there = tier.has(path)
        hits += int(there.argmin()) if not there.all() else len(path)
        policy.used(path, now_s, names=path.astype(np.uint64))
        tier.enter(path[~there])
        if hints is not None:
            returns = hints[number] if np.isfinite(hints[number]) else None
            policy.hint(path, now_s, owner=0, returns_in_s=returns)
        policy.forget(tier.evict(len(tier) - 40, now_s))
    return hits


def test_right_hints_come_near_the_optimum_and_wrong_ones_cost_nothing() -> None:
    rng = np.random.default_rng(5)
    numbers = rng.zipf(1.2, 4000) % 60  # 60 chats of four pages, room for ten
    paths = [_rows(range(4 * number, 4 * number + 4)) for number in numbers.tolist()]
    exact = [np.inf] * len(paths)
    last: dict[int, int] = {}
    for at in range(len(paths) - 1, -1, -1):
        number = int(numbers[at])
        if number in last:
            exact[at] = float(last[number] - at)
        last[number] = at
    none = _replay(paths, None)
    right = _replay(paths, exact)
    noisy = _replay(paths, (np.array(exact) * rng.uniform(0.5, 1.5, len(exact))).tolist())
    wrong = _replay(paths, rng.permutation(exact).tolist())
    total = 4 * len(paths)
    print(f"of {total}: none {none}, exact {right}, noisy {noisy}, shuffled {wrong}")
    assert right > none + 0.05 * total
    assert noisy > none + 0.03 * total
    assert wrong >= none - 0.01 * total


def test_pages_without_a_hint_are_of_no_class_of_hints() -> None:
    assert HINTED > PINNED > ENDED
    policy = _chats(3)
    assert (policy.pages.kind < ENDED).all()


def test_what_nobody_used_yet_is_not_judged_by_a_page_that_had_its_row() -> None:
    policy = PlacementPolicy(64)
    tier = policy.add_tier(64)
    former = np.arange(4)
    policy.used(former, 1.0, names=np.arange(100, 104, dtype=np.uint64))
    policy.forget(former)
    policy.link(former, 2.0)  # others, recovered from the disk
    tier.enter(former)
    assert not len(policy.hint(former, 3.0, owner=0))
    policy.used(np.arange(10, 14), 4.0, names=np.arange(100, 104, dtype=np.uint64))
    assert policy.hints.ended[0].tolist() == [0.0, 0.0]


def test_pages_that_rest_have_the_classes_of_their_last_use() -> None:
    policy = PlacementPolicy(128)
    for turn in range(1, 4):
        policy.used(np.arange(30 * turn), float(turn))
    before = policy.pages.kind.copy()
    policy.touched(np.arange(90), 4.0)
    assert set(policy.pages.kind[:90].tolist()) == {IN_USE}
    policy.rested(np.arange(-1, 100))
    assert policy.pages.kind.tolist() == before.tolist()


def test_rows_that_do_not_exist_are_no_other_rows() -> None:
    policy = PlacementPolicy(8)
    tier = policy.add_tier(8)
    path = np.arange(4, 8)
    policy.used(path, 1.0)
    tier.enter(path)
    policy.enqueue("waits", np.array([5, -1, 4, -1]), 2.0)  # 4 has another parent now
    policy.leave("waits")
    policy.used(path, 3.0)
    assert tier.evict(8, 4.0).tolist() == [7, 6, 5, 4]
