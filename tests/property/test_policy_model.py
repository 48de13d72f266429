"""The placement policy against plain dicts and lists, over random histories of calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from tests.long_form import count

NUM_PAGES = 31  # a binary tree: page i hangs on page (i - 1) // 2
NUM_REQUESTS = 6

pages = st.integers(0, NUM_PAGES - 1)
requests = st.integers(0, NUM_REQUESTS - 1)


def path_to(page: int) -> list[int]:
    path = [page]
    while path[0]:
        path.insert(0, (path[0] - 1) // 2)
    return path


def below(page: int) -> list[int]:
    return [other for other in range(NUM_PAGES) if page in path_to(other)]


def rows(of: list[int]) -> npt.NDArray[np.int64]:
    return np.array(of, np.int64)


class PolicyMachine(RuleBasedStateMachine):
    """`queue` is who waits in order; `needs` their pages; `last` when pages were used."""

    @initialize(return_times=st.booleans(), order=st.sampled_from(["lru", "fifo"]))
    def start(self, return_times: bool, order: str) -> None:
        config = PolicyConfig(order=order, return_times=return_times)
        self.policy = PlacementPolicy(NUM_PAGES, config)
        self.tier = self.policy.add_tier(8)
        self.lru = order == "lru"
        self.queue: list[int] = []
        self.needs: dict[int, set[int]] = {}
        self.last: dict[int, int] = {}
        self.stored: set[int] = set()
        self.held: list[list[int]] = []
        self.now = 0

    # ---- calls ----

    @rule(request=requests, page=pages)
    def enqueue(self, request: int, page: int) -> None:
        self.policy.enqueue(request, rows(path_to(page)), self.now)
        if request not in self.queue:
            self.queue.append(request)
        self.needs[request] = set(path_to(page))

    @rule(request=requests)
    def leave(self, request: int) -> None:
        self.policy.leave(request)
        if request in self.queue:
            self.queue.remove(request)
            del self.needs[request]

    @rule(order=st.permutations(range(NUM_REQUESTS)), named=st.integers(0, NUM_REQUESTS))
    def set_order(self, order: list[int], named: int) -> None:
        self.policy.set_order(order[:named])
        rest = [request for request in self.queue if request not in order[:named]]
        self.queue = [request for request in order[:named] if request in self.queue] + rest

    @rule(page=pages, store=st.booleans(), wait_s=st.integers(1, 100))
    def use(self, page: int, store: bool, wait_s: int) -> None:
        path = path_to(page)
        self.now += wait_s
        self.policy.used(rows(path), self.now)
        for each in path:
            self.last[each] = self.now
        if store:
            self.tier.enter(rows(path))
            self.stored.update(path)

    @rule(page=pages)
    def forget(self, page: int) -> None:
        gone = below(page)
        if any(set(held) & set(gone) for held in self.held):
            return
        self.policy.forget(rows([*gone, -1, NUM_PAGES]))
        for each in gone:
            self.last.pop(each, None)
            self.stored.discard(each)
            for needed in self.needs.values():
                needed.discard(each)

    @rule(page=pages)
    def hold(self, page: int) -> None:
        self.held.append(path_to(page))
        self._say_held(path_to(page))

    @rule()
    def release(self) -> None:
        if self.held:
            self._say_held(self.held.pop())

    def _say_held(self, path: list[int]) -> None:
        stay = [any(page in held for held in self.held) for page in path]
        self.tier.hold_where(rows(path), np.array(stay))

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        lru = self.lru and not self.tier.return_times.active
        coldest = sorted(self.stored, key=lambda page: (self.last[page], -len(path_to(page))))
        gone = self.tier.evict(count, self.now).tolist()
        assert len(gone) == len(set(gone)) <= count
        left = set(self.stored)
        for page in gone:
            assert page in left
            left.discard(page)
            assert not left & set(below(page)), "a page left before its child"
            assert page not in {each for held in self.held for each in held}
        places = [self.place(page) for page in gone]
        needed = [place for place in places if place is not None]
        assert places == [None] * (len(gone) - len(needed)) + needed, "a wanted page left first"
        assert needed == sorted(needed, reverse=True), "the tail of the queue leaves first"
        unwanted = gone[: len(gone) - len(needed)]
        if lru and not self.held:
            order = [page for page in coldest if self.place(page) is None]
            assert unwanted == order[: len(unwanted)]
        # It gives up only when no leaf of what is stored may leave.
        self.stored = left
        if len(gone) < count:
            for page in left - {each for held in self.held for each in held}:
                assert left & set(below(page)) - {page}

    # ---- what must hold ----

    def place(self, page: int) -> int | None:
        return next((i for i, r in enumerate(self.queue) if page in self.needs[r]), None)

    @invariant()
    def wanted(self) -> None:
        everything = list(range(NUM_PAGES))
        expected = [self.place(page) is not None for page in everything]
        assert self.policy.wanted(rows(everything)).tolist() == expected

    @invariant()
    def windows(self) -> None:
        seen: set[int] = set()
        sizes = []
        for request in self.queue:
            seen |= self.needs[request]
            sizes.append(len(seen))
        for budget in (0, 4, 9, 100):
            num = max(sum(size <= budget for size in sizes), 1)
            assert self.policy.window(budget) == self.queue[:num]

    @invariant()
    def accounting(self) -> None:
        everything = rows(list(range(NUM_PAGES)))
        assert len(self.tier) == len(self.stored)
        assert set(np.flatnonzero(self.tier.has(everything)).tolist()) == self.stored
        assert len(self.policy.queue) == len(self.queue)


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(
    max_examples=count(8, 600),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
