"""Pages with a time: the wheel against a plain list, and what comes of it in the placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.policy.hints import lives, timers
from sglang_ext.tiers.policy.hints.hint_kernels import ENDS
from sglang_ext.tiers.policy.page_kernels import ENDED
from tests.unit.policy.test_hints import _chat, _chats, _order_of_leaving, _rows

ROWS = 24
_WEEK_S = 7 * 86_400.0

_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("set"),
            st.integers(0, ROWS - 1),
            st.one_of(st.floats(0.01, 300.0), st.floats(0.01, _WEEK_S), st.just(16_384.0)),
        ),
        st.tuples(st.just("clear"), st.integers(-1, ROWS), st.just(0.0)),
        st.tuples(
            st.just("wait"),
            st.integers(1, ROWS),  # rows taken in a call
            st.one_of(st.floats(0.0, 2.0), st.floats(0.0, 600.0), st.floats(0.0, 2 * _WEEK_S)),
        ),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(start_s=st.floats(0.0, 1e7), steps=_STEPS)
def test_rows_are_due_within_a_second_of_their_time(
    start_s: float, steps: list[tuple[str, int, float]]
) -> None:
    wheel, now_s = timers.new_timers(ROWS), start_s
    model: dict[int, float] = {}
    for what, row, seconds in steps:
        if what == "set":
            timers.set_time(wheel, row, now_s + seconds, row, now_s)
            model[row] = now_s + seconds
        elif what == "clear":
            assert timers.clear(wheel, _rows([row])) == (model.pop(row, None) is not None)
        else:
            now_s += seconds
            taken: list[int] = []
            for _ in range(10_000):
                out = np.empty(row, np.int64)
                most = 1 + row // 2  # each row is of another owner
                num = timers.take_due(wheel, now_s, most, out)
                assert num <= min(row, most)
                taken += out[:num].tolist()
                if not model.keys() - taken or wheel.counts[timers.NEXT] > now_s:
                    break
            assert len(set(taken)) == len(taken)
            for each in taken:
                assert model.pop(each) <= now_s
                assert wheel.owner[each] == each
            assert all(due_s > now_s - 1.0 for due_s in model.values())
        assert wheel.counts[timers.NUM_ROWS] == len(model)
        assert {each for each in range(ROWS) if wheel.slot[each]} == model.keys()


def test_one_call_takes_a_bounded_number_of_a_great_many_that_are_due_at_once() -> None:
    num = 10_000
    wheel = timers.new_timers(num)
    timers.set_times(wheel, np.arange(num), 70_000.0, 3, 0.0)
    taken, out = [], np.empty(999, np.int64)
    while wheel.counts[timers.NUM_ROWS]:
        taken += out[: timers.take_due(wheel, 70_001.0, len(out), out)].tolist()
    assert taken == list(range(num))


def test_a_conversation_lives_for_its_time_and_then_leaves_first() -> None:
    policy = _chats(3)
    assert policy.limit_life(_chat(2), 5.0, owner=0, ttl_s=60.0) == 10
    assert not len(policy.expire(64.0))
    assert not policy.has_due(64.0)
    assert policy.tiers[0].next_to_leave(1, 64.0).tolist() == [9]
    assert policy.has_due(66.0)
    assert sorted(policy.expire(66.0).tolist()) == _chat(2).tolist()
    assert not policy.has_due(67.0)
    assert _order_of_leaving(policy, 3, 67.0) == [2, 0, 1]


def test_until_its_time_a_page_is_what_it_was() -> None:
    policy, plain = _chats(4), _chats(4)
    policy.limit_life(_chat(3), 5.0, owner=0, ttl_s=600.0)
    assert _order_of_leaving(policy, 4, 6.0) == _order_of_leaving(plain, 4, 6.0)


def test_a_use_takes_the_time_back() -> None:
    policy = _chats(2)
    policy.limit_life(_chat(1), 5.0, owner=0, ttl_s=60.0)
    policy.used(_chat(1), 30.0)
    assert not len(policy.expire(100.0))
    assert _order_of_leaving(policy, 2, 101.0) == [0, 1]


def test_what_another_request_shares_is_not_touched() -> None:
    policy = PlacementPolicy(64)
    mine, other = _rows([0, 1, 2, 3]), _rows([0, 1, 10, 11])
    policy.used(mine, 1.0)
    policy.limit_life(mine, 1.0, owner=0, ttl_s=10.0)
    policy.used(other, 2.0)
    assert sorted(policy.expire(20.0).tolist()) == [2, 3]
    assert np.flatnonzero(policy.pages.kind == ENDED).tolist() == [2, 3]
    assert policy.limit_life(mine, 21.0, owner=0, ttl_s=10.0) == 2  # and not [0, 1]


def test_a_page_that_left_takes_its_time_with_it() -> None:
    policy = _chats(1)
    policy.limit_life(_chat(0), 5.0, owner=0, ttl_s=10.0)
    policy.forget(_chat(0))
    policy.used(_chat(0), 6.0)  # other pages, in the same rows
    assert not len(policy.expire(100.0))


def test_pages_that_are_waited_for_stay_though_their_time_is_over() -> None:
    policy = _chats(2)
    policy.enqueue("waits", _chat(1), 3.0)
    policy.limit_life(_chat(1), 5.0, owner=0, ttl_s=10.0)
    policy.expire(20.0)
    assert _order_of_leaving(policy, 1, 21.0) == [0]


@pytest.mark.parametrize(("after_s", "holds"), [(5.0, True), (15.0, False)])
def test_who_comes_back_after_its_time_is_not_believed_for_long(
    after_s: float, holds: bool
) -> None:
    policy = _chats(8)
    now_s = 1e4
    for _ in range(40):
        policy.used(_chat(5), now_s)
        policy.limit_life(_chat(5), now_s, owner=7, ttl_s=10.0)
        now_s += after_s
        policy.expire(now_s)
    assert policy.hints.trusted[7, ENDS] == holds
    assert policy.hints.ended[7, 0] == (0.0 if holds else 40.0)
    policy.used(_chat(5), now_s)
    policy.limit_life(_chat(5), now_s, owner=7, ttl_s=10.0)
    assert len(policy.expire(now_s + 20.0)) == (10 if holds else 0)


def test_two_conversations_that_are_due_at_once_are_judged_apart() -> None:
    policy = _chats(2)
    policy.limit_life(_chat(0), 5.0, owner=1, ttl_s=10.0)
    policy.limit_life(_chat(1), 5.0, owner=2, ttl_s=10.0)
    assert len(policy.expire(20.0)) == 20
    assert policy.hints.ended[:3, 0].tolist() == [0.0, 1.0, 1.0]


def test_one_look_ends_few_of_the_conversations_that_are_due_at_once() -> None:
    num, most = 60, lives._CONVERSATIONS_A_CALL
    policy, ended, looks = _chats(num), list[int](), 0
    for number in range(num):
        policy.limit_life(_chat(number), 100.0 + number * 1e-4, owner=number, ttl_s=10.0)
    while policy.has_due(112.0):
        ended += policy.expire(112.0).tolist()
        looks += 1
        assert policy.hints.ended[:, 0].sum() <= looks * most
    assert sorted(ended) == list(range(10 * num))
    assert looks >= num // most
    assert policy.hints.ended[:num, 0].tolist() == [1.0] * num  # each judged once, as a whole


def test_a_time_beyond_the_wheel_stops_nobody() -> None:
    """Nobody looked for six days, and then a week is asked for."""
    wheel, day_s = timers.new_timers(ROWS), 86_400.0
    timers.set_time(wheel, 0, _WEEK_S, 0, 0.0)
    timers.set_time(wheel, 1, 6 * day_s + _WEEK_S, 0, 6 * day_s)
    out = np.empty(ROWS, np.int64)
    for now_s, due in ((_WEEK_S - 2, []), (_WEEK_S + 1, [0]), (13 * day_s - 2, []),
                       (13 * day_s + 1, [1])):  # fmt: skip
        taken: list[int] = []
        for _ in range(100):
            taken += out[: timers.take_due(wheel, now_s, ROWS, out)].tolist()
        assert taken == due
