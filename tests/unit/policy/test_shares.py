"""Shares of tenants: what is theirs by right stays, what they leave free is lent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.policy.config import MAX_TENANTS
from sglang_ext.tiers.policy.tier_lists import TierLists
from tests.unit.policy.test_hints import Rows, _rows

ROWS = 4096


def _policy(*shares: float, return_times: bool = False) -> tuple[PlacementPolicy, TierLists]:
    policy = PlacementPolicy(ROWS, PolicyConfig(shares=shares, return_times=return_times))
    return policy, policy.add_tier(256)


def _use(policy: PlacementPolicy, path: Rows, tenant: int, now_s: float) -> int:
    """A request of a tenant; returns its leading pages that lie in the tier."""
    tier = policy.tiers[0]
    there = tier.has(path)
    policy.assign(path, tenant)
    policy.used(path, now_s)
    tier.enter(path[~there])
    return len(path) if there.all() else int(there.argmin())


def _pages(first: int, num: int) -> Rows:
    return np.arange(first, first + num)


def test_who_has_more_than_its_share_gives_first_though_its_pages_are_younger() -> None:
    policy, tier = _policy(0.5)
    _use(policy, _pages(0, 40), 1, 1.0)
    _use(policy, _pages(100, 60), 0, 2.0)
    assert set(tier.evict(20, 3.0).tolist()) == set(range(140, 160))
    assert tier.num_by_tenant == [40, 40]
    gone = tier.evict(20, 3.0)  # both have their share: the oldest page leaves, of both by turns
    assert tier.num_by_tenant == [30, 30]
    assert set(gone.tolist()) == {*range(30, 40), *range(130, 140)}


def test_for_whom_room_is_made_counts() -> None:
    """A burst of one that has just its share pushes its own pages out, and nobody else's."""
    policy, tier = _policy(0.5)
    _use(policy, _pages(0, 30), 1, 1.0)
    _use(policy, _pages(100, 34), 0, 2.0)
    assert set(tier.next_to_leave(20, 3.0).tolist()) & set(range(30))
    assert set(tier.evict(20, 3.0, 0).tolist()) <= set(range(100, 134))
    assert set(tier.evict(2, 3.0, 1).tolist()) <= set(range(30))


def test_while_nobody_else_is_there_a_tenant_has_all_of_it() -> None:
    policy, tier = _policy(0.25, 0.25)
    for number in range(10):
        _use(policy, _pages(100 * number, 10), 1, float(number))
        policy.forget(tier.evict(len(tier) - 50, float(number)))
    assert tier.num_by_tenant == [0, 50, 0]
    _use(policy, _pages(2000, 10), 2, 20.0)
    policy.forget(tier.evict(len(tier) - 50, 21.0))
    assert tier.num_by_tenant == [0, 40, 10]


def test_a_flood_of_one_tenant_leaves_the_others_what_is_theirs() -> None:
    for shares, expected in (((0.5,), 30), ((), 0)):
        policy, tier = _policy(*shares)
        _use(policy, _pages(0, 30), 1, 0.0)
        for number in range(50):
            _use(policy, _pages(100 + 20 * number, 20), 0, 1.0 + number)
            policy.forget(tier.evict(len(tier) - 64, 1.0 + number))
        assert int(tier.has(_pages(0, 30)).sum()) == expected


def test_what_one_tenant_waits_for_does_not_take_what_is_anothers() -> None:
    policy, tier = _policy(0.5)
    _use(policy, _pages(0, 30), 1, 0.0)
    for number in range(5):
        _use(policy, _pages(100 + 20 * number, 20), 0, 1.0)
        policy.enqueue(number, _pages(100 + 20 * number, 20), 2.0)
    gone = tier.evict(70, 3.0)
    assert tier.num_by_tenant == [30, 30]
    assert gone.tolist()[:20] == _pages(180, 20)[::-1].tolist()  # needed last
    assert not policy.wanted(_pages(0, 30)).any()


def test_a_held_page_of_one_above_its_share_does_not_keep_the_tier_from_giving_room() -> None:
    policy, tier = _policy(0.5)
    _use(policy, _pages(0, 10), 1, 0.0)
    _use(policy, _pages(100, 50), 0, 1.0)
    tier.hold_where(_pages(100, 50), np.ones(50, np.bool_))
    assert sorted(tier.evict(60, 2.0).tolist()) == list(range(10))
    tier.hold_where(_pages(100, 50), np.zeros(50, np.bool_))
    assert len(tier.evict(60, 2.0)) == 50


def test_whose_a_page_is_becomes_known_later() -> None:
    """Pages that a former run left on disk are nobody's until somebody asks for them."""
    policy, tier = _policy(0.5)
    tier.enter(_pages(0, 20))
    assert tier.num_by_tenant == [20, 0]
    policy.assign(_pages(0, 5), 1)
    assert tier.num_by_tenant == [15, 5]
    assert set(tier.evict(5, 1.0).tolist()) <= set(range(5, 20))
    policy.forget(_pages(0, 5))
    tier.enter(_pages(0, 5))
    assert tier.num_by_tenant == [15, 0]


def test_within_a_tenant_the_order_is_what_it_is_without_shares() -> None:
    shared, tier = _policy(0.5, return_times=True)
    plain, other = _policy(return_times=True)
    for policy in (shared, plain):
        for number in range(4):
            _use(policy, _pages(10 * number, 10), 0, float(number))
        policy.hint(_pages(10, 10), 5.0, owner=0)
        policy.hint(_pages(0, 10), 5.0, owner=0, returns_in_s=10.0)
        policy.enqueue("waits", _pages(20, 10), 5.0)
    assert tier.evict(40, 6.0).tolist() == other.evict(40, 6.0).tolist()


def test_pins_hold_within_a_tenants_share_only() -> None:
    policy = PlacementPolicy(ROWS, PolicyConfig(pin_share=0.5, shares=(0.5,), return_times=False))
    tier = policy.add_tier(128)
    _use(policy, _pages(0, 20), 1, 0.0)
    _use(policy, _pages(100, 60), 0, 1.0)
    policy.pin(_pages(100, 60), 2.0, owner=0, seconds=60.0)
    assert tier.num_pinned == 32
    assert set(tier.evict(40, 3.0).tolist()) == set(range(120, 160))


def test_bad_shares_are_refused() -> None:
    for shares in ((0.0,), (-0.1,), (0.6, 0.6), (0.01,) * (MAX_TENANTS + 1), (math.nan,)):
        with pytest.raises(ValueError, match="shares are"):
            PolicyConfig(shares=shares)


class _Model:
    """One tier with shares, page by page: least recent first, of those who may give."""

    def __init__(self, shares: list[float]) -> None:
        self.shares = [1.0 - sum(shares), *shares]
        self.pages: list[tuple[int, int]] = []  # (page, tenant), least recent first

    def use(self, page: int, tenant: int) -> None:
        self.pages = [each for each in self.pages if each[0] != page] + [(page, tenant)]

    def evict(self, count: int, tenant: int | None) -> list[int]:
        sizes = self._sizes()
        if tenant is not None:
            sizes[tenant] += count
        gone = self._leave(count, sizes, len(self.pages))
        rest = count - len(gone)
        if tenant is None:
            return gone + self._leave(rest, self._sizes(), len(self.pages) - rest)
        own = [page for page, who in self.pages if who == tenant][:rest]
        self.pages = [each for each in self.pages if each[0] not in own]
        return gone + own

    def _sizes(self) -> list[int]:
        return [sum(who == each for _, who in self.pages) for each in range(len(self.shares))]

    def _leave(self, count: int, sizes: list[int], total: int) -> list[int]:
        above = [
            size - math.floor(share * max(total, 0))
            for size, share in zip(sizes, self.shares, strict=True)
        ]
        gone: list[int] = []
        for page, who in list(self.pages):
            if len(gone) < count and above[who] > 0:
                above[who] -= 1
                self.pages.remove((page, who))
                gone.append(page)
        return gone


@settings(max_examples=200, deadline=None)
@given(
    shares=st.sampled_from([[0.5], [0.25, 0.25], [0.125] * 4, [0.5, 0.5]]),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.integers(0, 99), st.integers(0, 4)),
            st.tuples(st.just("evict"), st.integers(1, 30), st.integers(0, 4)),
        ),
        max_size=80,
    ),
)
def test_pages_leave_as_in_a_plain_list(
    shares: list[float], steps: list[tuple[str, int, int]]
) -> None:
    policy, tier = _policy(*shares)
    model = _Model(shares)
    for now, (what, number, tenant) in enumerate(steps):
        if what == "use":
            who = (number + tenant) % (len(shares) + 1) if tenant < 2 else number % 2
            _use(policy, _rows([number]), who, float(now))
            model.use(number, who)
        else:
            before = tier.num_by_tenant
            looked = tier.next_to_leave(number, float(now)).tolist()
            assert looked == tier.next_to_leave(number, float(now)).tolist()
            for_whom = None if tenant == 4 else tenant % (len(shares) + 1)
            gone = tier.evict(number, float(now), for_whom).tolist()
            # Nobody has less than its right of what stays, with what it brings, unless it had less;
            # and where it is known for whom room is made, of what there was.
            total = sum(before)
            stays = max(total - number, 0) if for_whom is None else total
            for who, old in enumerate(before):
                num = tier.num_by_tenant[who] + (number if who == for_whom else 0)
                assert num >= min(old, math.floor(model.shares[who] * stays))
            assert gone == model.evict(number, for_whom)
            policy.forget(np.array(gone, np.int64))
        assert sum(tier.num_by_tenant) == len(tier) == len(model.pages)
