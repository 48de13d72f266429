"""Pins: what leaves last, within a share, for a time, and for whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.policy.hints.hint_kernels import NUM_OWNERS
from sglang_ext.tiers.policy.page_kernels import PINNED
from tests.unit.policy.test_hints import Rows, _chat, _chats, _order_of_leaving, _rows


def _pinning(num: int, share: float = 0.5) -> PlacementPolicy:
    """Chats of ten pages in a tier for 256."""
    return _chats(num, PolicyConfig(pin_share=share))


def test_what_is_pinned_leaves_last_for_its_time() -> None:
    policy = _pinning(4)
    assert policy.pin(_chat(0), 5.0, owner=0, seconds=60.0) == (10, 0)
    assert _order_of_leaving(policy, 4, 6.0) == [1, 2, 3, 0]
    policy = _pinning(4)
    policy.pin(_chat(0), 5.0, owner=0, seconds=60.0)
    policy.expire(66.0)
    assert len(policy.pins) == policy.tiers[0].num_pinned == 0
    assert _order_of_leaving(policy, 4, 67.0) == [1, 2, 0, 3]  # as one that was used last
    assert policy.pin(_chat(0), 70.0, owner=0, seconds=60.0) == (10, 0)


def test_a_hint_a_use_and_a_time_that_is_over_do_not_unpin() -> None:
    policy = _pinning(3)
    policy.pin(_chat(0), 5.0, owner=0, seconds=600.0)
    policy.hint(_chat(0), 5.0, owner=0)
    policy.limit_life(_chat(0), 5.0, owner=0, ttl_s=1.0)
    policy.expire(10.0)
    policy.used(_chat(0), 11.0)
    assert _order_of_leaving(policy, 3, 12.0) == [1, 2, 0]


def test_what_somebody_waits_for_stays_before_what_is_pinned() -> None:
    policy = _pinning(2)
    policy.enqueue("waits", _chat(0), 3.0)
    policy.pin(_chat(1), 5.0, owner=0, seconds=60.0)
    assert _order_of_leaving(policy, 1, 6.0) == [1]


def test_an_end_leaves_before_a_pin_and_a_return_too() -> None:
    policy = _pinning(4)
    policy.pin(_chat(0), 5.0, owner=0, seconds=60.0)
    policy.hint(_chat(3), 5.0, owner=0, returns_in_s=1.0)
    policy.hint(_chat(2), 5.0, owner=0)
    assert _order_of_leaving(policy, 4, 6.0) == [2, 1, 3, 0]


def test_without_a_share_a_pin_does_nothing() -> None:
    policy = _pinning(2, share=0.0)
    assert policy.pin(_chat(0), 5.0, owner=0, seconds=60.0) == (0, 10)
    assert _order_of_leaving(policy, 2, 6.0) == [0, 1]


def test_what_is_pinned_begins_at_the_root() -> None:
    """A page keeps those before it from leaving: no more than the share may be kept."""
    policy = _pinning(4, share=0.05)  # 12 pages
    new, refused = policy.pin(_rows([*_chat(0), *range(100, 110)]), 5.0, owner=0, seconds=60.0)
    assert (new, refused) == (6, 4)
    assert np.flatnonzero(policy.pages.pinned).tolist() == list(range(6))


def test_one_owner_takes_half_of_the_room_and_leaves_the_next_some() -> None:
    policy = _pinning(24)  # room for 128
    path = _rows(range(240))
    assert policy.pin(path, 5.0, owner=1, seconds=60.0)[0] == 64
    assert policy.pin(path[64:], 5.0, owner=2, seconds=60.0)[0] == 32
    assert policy.pin(path[96:], 5.0, owner=3, seconds=60.0)[0] == 16
    assert policy.pin(path[112:], 5.0, owner=1, seconds=60.0)[0] == 0
    assert [policy.pins.held(owner) for owner in range(4)] == [0, 64, 32, 16]


@pytest.mark.parametrize("num_tenants", [1, 50])
def test_who_pins_all_it_can_keeps_others_from_no_more_than_the_share(num_tenants: int) -> None:
    """As many pages as the tier has room for are used in turns; somebody else pins what it can."""
    share, room = 0.1, 200
    hits = []
    for hostile in (False, True):
        policy = PlacementPolicy(2000, PolicyConfig(pin_share=share, return_times=False))
        tier = policy.add_tier(room)
        held = 0
        for turn in range(400):
            for path in (
                _chat(turn % 15),
                _chat(100 + turn % 50),
            ):  # an honest client, a hostile one
                there = tier.has(path)
                held += int(there.sum()) if path[0] < 1000 else 0
                policy.used(path, float(turn))
                tier.enter(path[~there])
                if hostile and path[0] >= 1000:
                    policy.pin(path, float(turn), owner=turn % num_tenants, seconds=1e5)
                policy.forget(tier.evict(len(tier) - room, float(turn)))
            assert len(policy.pins) <= share * room
        hits.append(held)
    fair = _pinned_room(room, share)
    assert hits[1] >= fair, hits


def _pinned_room(room: int, share: float) -> int:
    """The honest client's hits of the same turns in a tier that is smaller by the share."""
    policy = PlacementPolicy(2000, PolicyConfig(return_times=False))
    tier = policy.add_tier(room)
    held = 0
    for turn in range(400):
        for path in (_chat(turn % 15), _chat(100 + turn % 50)):
            there = tier.has(path)
            held += int(there.sum()) if path[0] < 1000 else 0
            policy.used(path, float(turn))
            tier.enter(path[~there])
            policy.forget(tier.evict(len(tier) - int(room * (1 - share)), float(turn)))
    return held


def test_more_pins_in_a_tier_than_its_share_are_as_if_there_were_none() -> None:
    """DRAM is the smaller tier: pins of a share of both may be all that it has."""
    config = PolicyConfig(pin_share=0.25)
    pinned, plain = PlacementPolicy(1024, config), PlacementPolicy(1024, config)
    for policy in (pinned, plain):
        dram = policy.add_tier(40)
        policy.add_tier(400)
        for number in range(4):
            policy.used(_chat(number), float(number))
            dram.enter(_chat(number))
    for number in (0, 1, 2):
        assert pinned.pin(_chat(number), 5.0, owner=number, seconds=60.0) == (10, 0)
    assert pinned.tiers[0].num_pinned == 30
    assert pinned.tiers[0].evict(10, 6.0).tolist() == plain.tiers[0].evict(10, 6.0).tolist()
    # Of the 30 that are left a quarter stays to the end.
    left = pinned.tiers[0].evict(30, 6.0)
    assert set(left[-7:].tolist()) <= set(_chat(2).tolist())


def test_of_a_tier_with_more_pages_than_it_is_sure_to_hold_the_share_is_of_these() -> None:
    """Coded pages are shorter than the room of a page."""
    policy = PlacementPolicy(1024, PolicyConfig(pin_share=0.1))
    disk = policy.add_tier(400, 40)
    room = []
    for number in range(12):
        policy.used(_chat(number), float(number))
        disk.enter(_chat(number))
        policy.unpin(_rows(range(120)))
        for owner in range(12):
            policy.pin(_chat(number), 20.0, owner=owner, seconds=60.0)
        room.append(len(policy.pins))
    assert room == [4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10]


def test_worth_says_the_same_as_the_order() -> None:
    policy = _pinning(3)
    policy.pin(_chat(0), 5.0, owner=0, seconds=60.0)
    scores = policy.tiers[0].worth(_rows([20, 0, 10]), 6.0).score
    assert np.isinf(scores).tolist() == [False, True, False]
    policy = _pinning(3, share=0.05)
    policy.pins.pin(policy.pages, _chat(0), 60.0, 0, 1000, 5.0)
    policy.tiers[0].reclassified(_chat(0))
    assert not np.isinf(policy.tiers[0].worth(_chat(0), 6.0).score).any()


class _Model:
    """Pins as a dictionary: row -> (owner, when it is over)."""

    def __init__(self, most: int) -> None:
        self.most, self.pins = most, dict[int, tuple[int, float]]()

    def held(self, owner: int) -> int:
        return sum(who == owner for who, _ in self.pins.values())

    def pin(self, path: list[int], owner: int, due_s: float) -> None:
        stopped = False
        for row in path:
            who, until_s = self.pins.get(row, (-1, -1.0))
            if until_s >= due_s:
                continue
            if who != owner and (stopped or self.held(owner) >= self.most - len(self.pins)):
                stopped |= who == -1
                continue
            self.pins[row] = owner, due_s


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pin"), st.integers(0, 5), st.integers(0, 2), st.floats(0.5, 500.0)),
        st.tuples(st.just("use"), st.integers(0, 5), st.just(0), st.just(0.0)),
        st.tuples(st.just("forget"), st.integers(0, 59), st.just(0), st.just(0.0)),
        st.tuples(st.just("unpin"), st.integers(0, 59), st.just(0), st.just(0.0)),
        st.tuples(st.just("evict"), st.integers(0, 12), st.just(0), st.just(0.0)),
        st.tuples(st.just("wait"), st.just(0), st.just(0), st.floats(0.0, 300.0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(share=st.sampled_from([0.05, 0.2, 0.5]), steps=_STEPS)
def test_pins_are_those_of_a_plain_dictionary(
    share: float, steps: list[tuple[str, int, int, float]]
) -> None:
    policy = _pinning(6, share)
    tier, model, now_s = policy.tiers[0], _Model(int(share * 256)), 10.0
    for what, number, owner, seconds in steps:
        if what == "pin":
            known = [row for row in _chat(number).tolist() if policy.pages.known[row]]
            model.pin(known, owner, now_s + seconds)
            policy.pin(_chat(number), now_s, owner=owner, seconds=seconds)
        elif what == "use":
            policy.used(_chat(number), now_s)
            tier.enter(_chat(number))
        elif what in ("forget", "unpin"):
            model.pins.pop(number, None)
            getattr(policy, what)(_rows([number]))
        elif what == "evict":
            gone = _evicted(policy, number, now_s)
            for row in gone.tolist():
                model.pins.pop(row, None)
        else:
            now_s += seconds
            policy.expire(now_s)
            model.pins = {row: pin for row, pin in model.pins.items() if np.ceil(pin[1]) > now_s}
        rows = np.flatnonzero(policy.pages.pinned).tolist()
        assert rows == sorted(model.pins)
        assert [policy.pins.held(owner) for owner in range(3)] == [
            model.held(owner) for owner in range(3)
        ]
        assert len(policy.pins) == len(model.pins)
        inside = [row for row in rows if tier.has(_rows([row]))[0]]
        assert tier.num_pinned == len(inside)
        assert (tier._lists.home[inside] == PINNED).all()


def _evicted(policy: PlacementPolicy, count: int, now_s: float) -> Rows:
    """Evicts, and checks that no pinned page left while another could; undone once before that."""
    tier = policy.tiers[0]
    most = int(policy.config.pin_share * len(tier))
    protected = tier.num_pinned <= most
    assert tier.next_to_leave(count, now_s).tolist() == tier.next_to_leave(count, now_s).tolist()
    gone = tier.evict(count, now_s)
    pinned = policy.pages.pinned[gone] != 0
    if protected and pinned.any():
        rest = np.flatnonzero(tier.has(np.arange(policy.num_rows)))
        assert pinned[int(np.argmax(pinned)) :].all()
        assert policy.pages.pinned[rest].all()
    policy.forget(gone)
    return gone


def test_owners_are_those_of_hints() -> None:
    policy = _pinning(1)
    policy.pin(_chat(0), 5.0, owner=NUM_OWNERS - 1, seconds=60.0)
    assert policy.pins.held(NUM_OWNERS - 1) == 10


def _by_request(policy: PlacementPolicy, chat: int, now_s: float, **how: float) -> tuple[int, int]:
    """A request has its chat of ten pages pinned for a minute."""
    owner, seconds = int(how.get("owner", 0)), how.get("seconds", 60.0)
    return policy.pin(_chat(chat), now_s, owner=owner, seconds=seconds, gives_way=True)


def _pinned_chats(policy: PlacementPolicy) -> list[int]:
    """Of how many pages of each chat the pins are: of an owner alone 26 may be."""
    num = len(np.flatnonzero(policy.pages.known)) // 10
    return [int((policy.pages.pinned[_chat(chat)] != 0).sum()) for chat in range(num)]


def test_who_pins_everything_has_its_latest_pinned() -> None:
    policy = _pinning(6, share=0.2)
    for chat in range(6):
        assert _by_request(policy, chat, 5.0 + chat) == (10, 0)
        policy.expire(5.0 + chat)
    assert _pinned_chats(policy) == [0, 0, 0, 6, 10, 10]
    assert (policy.pages.pinned[_chat(3)] != 0).tolist() == [True] * 6 + [False] * 4
    assert policy.pins.held(0) == len(policy.pins) == policy.tiers[0].num_pinned == 26
    assert _by_request(policy, 3, 20.0) == (4, 0)
    assert _pinned_chats(policy) == [0, 0, 0, 10, 6, 10]


@pytest.mark.parametrize("seconds", [20.0, 300.0, 7_000.0, 80_000.0])
@pytest.mark.parametrize("now_s", [5.0, 250.0, 16_380.0, 1e6 + 0.5])
def test_the_pins_that_end_first_give_way_however_far_off(seconds: float, now_s: float) -> None:
    policy = _pinning(4, share=0.2)
    _by_request(policy, 0, now_s, seconds=seconds * 2.2)
    _by_request(policy, 1, now_s, seconds=seconds)
    assert _by_request(policy, 2, now_s, seconds=seconds / 3) == (6, 4)  # ends before the others
    assert _by_request(policy, 3, now_s, seconds=seconds * 4) == (10, 0)
    assert _pinned_chats(policy) == [10, 6, 0, 10]


def test_an_operators_pins_neither_give_way_nor_take() -> None:
    policy = _pinning(5, share=0.2)
    assert policy.pin(_chat(0), 5.0, owner=0, seconds=600.0) == (10, 0)
    _by_request(policy, 0, 6.0, seconds=6000.0)  # of a request that repeats it, too
    assert _by_request(policy, 1, 6.0) == (10, 0)
    assert _by_request(policy, 2, 7.0) == (10, 0)
    assert _pinned_chats(policy)[0] == 10
    assert policy.pin(_chat(3), 8.0, owner=0, seconds=6000.0) == (0, 10)
    assert _by_request(policy, 4, 9.0, owner=1) == (10, 0)
    assert _by_request(policy, 3, 10.0) == (10, 0)
    assert _pinned_chats(policy)[0] == _pinned_chats(policy)[4] == 10


def test_pins_give_way_in_bounded_time() -> None:
    """Pins of others are passed over, so many a call; then it is as if there was no room."""
    policy = PlacementPolicy(20_000, PolicyConfig(pin_share=1.0))
    policy.add_tier(20_000)
    path = _rows(range(20_000))
    policy.used(path, 1.0)
    policy.pin(path[:9_900], 5.0, owner=1, seconds=60.0)
    policy.pin(path[9_900:14_950], 5.0, owner=0, seconds=61.0, gives_way=True)
    assert policy.pin(path[15_000:15_010], 5.0, owner=0, seconds=600.0, gives_way=True) == (0, 10)


_REQUESTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.floats(0.5, 500.0), st.booleans()),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(share=st.sampled_from([0.05, 0.2, 0.5]), steps=_REQUESTS)
def test_an_owner_has_no_more_for_what_gave_way(
    share: float, steps: list[tuple[int, int, float, bool]]
) -> None:
    policy, now_s = _pinning(6, share), 10.0
    for chat, owner, seconds, gives_way in steps:
        stays = set(np.flatnonzero(policy.pages.pinned == 1).tolist())
        policy.pin(_chat(chat), now_s, owner=owner, seconds=seconds, gives_way=gives_way)
        rows = np.flatnonzero(policy.pages.pinned)
        assert stays <= set(rows.tolist())
        assert len(rows) == len(policy.pins) == policy.tiers[0].num_pinned <= int(share * 256)
        assert sum(policy.pins.held(each) for each in range(3)) == len(rows)
        now_s += 1.0
        policy.expire(now_s)
    policy.expire(now_s + 600.0)
    assert len(policy.pins) == 0
