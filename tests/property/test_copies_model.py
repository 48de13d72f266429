"""What leaves coded DRAM beside a disk, against a list of pages, under random calls."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext.tiers.base import Location
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.store.books.eviction.copy_order import CopyOrder
from sglang_ext.tiers.store.types import ON_DISK, READY
from tests.long_form import count

NUM_PAGES = 12
MAX_BYTES = 400
numbers = st.integers(0, NUM_PAGES - 1)


class CopiesModel(RuleBasedStateMachine):
    """Pages lie on disk, each a path of its own; `copies` has those with a record in DRAM."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex(64, seed=1)
        self.policy = PlacementPolicy(64, PolicyConfig(return_times=False))
        self.order = CopyOrder(self.index, self.policy, MAX_BYTES, MAX_BYTES * 64)
        hashes = [hashlib.sha256(bytes([number])).digest() for number in range(NUM_PAGES)]
        self.rows = self.index.insert(
            np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32), 0
        ).rows
        self.index.flags[self.rows] = ON_DISK
        self.copies: dict[int, tuple[Location, int]] = {}
        self.gone: list[Location] = []
        self.queue: list[int] = []  # pages that requests wait for
        self.in_dram: set[int] = set()
        self.last_use: dict[int, int] = {}
        self.was_needed: set[int] = set()
        self.now = 0

    def _use(self, number: int) -> None:
        self.now += 1
        self.last_use[number] = self.now
        self.policy.used(self.rows[number : number + 1], float(self.now))

    def _needed(self, number: int) -> bool:
        return number in self.queue and number not in self.in_dram

    @rule(number=numbers)
    def use(self, number: int) -> None:
        self._use(number)

    @rule(which=st.lists(numbers, min_size=1, max_size=4, unique=True), size=st.integers(40, 130))
    def keep(self, which: list[int], size: int) -> None:
        rows = self.rows[which]
        before = dict(self.copies)
        places = []
        for number in which:
            self.now += 1
            self._use(number)
            places.append(Location(self.now, number))
            if number in self.copies:
                self.gone.append(self.copies.pop(number)[0])
            self.copies[number] = places[-1], size
            self.index.segment[self.rows[number]], self.index.block[self.rows[number]] = places[-1]
        self.order.enter(rows, np.array(places, np.uint32), np.full(len(which), size, np.uint32))
        self.order.make_room(float(self.now))
        there = self.order.has(self.rows)
        left = [number for number in self.copies if not there[number]]
        stay = [number for number in self.copies if there[number]]
        self._check_order(left, stay)
        assert not left or sum(s for _, s in {**before, **self.copies}.values()) > MAX_BYTES
        for number in left:
            self.gone.append(self.copies.pop(number)[0])

    def _check_order(self, left: list[int], stay: list[int]) -> None:
        needed_left = [number for number in left if self._needed(number)]
        if needed_left:
            assert all(self._needed(number) for number in stay)
            soonest = min(map(self.queue.index, needed_left))
            assert all(self.queue.index(number) < soonest for number in stay)
        # One that was needed for a while comes back to the end that it was met at.
        simple = [number for number in stay if number not in self.was_needed]
        for number in left:
            if number not in self.was_needed and not self._needed(number):
                assert all(
                    self.last_use[number] < self.last_use[other] or self._needed(other)
                    for other in simple
                )

    @rule(number=numbers)
    def wait(self, number: int) -> None:
        if number not in self.queue:
            self.queue.append(number)
            self.was_needed.add(number)
            self.policy.enqueue(number, self.rows[number : number + 1], float(self.now))

    @rule(number=numbers)
    def wait_no_more(self, number: int) -> None:
        if number in self.queue:
            self.queue.remove(number)
            self.policy.leave(number)

    @rule(number=numbers)
    def come_to_dram(self, number: int) -> None:
        self.in_dram.add(number)
        self.index.flags[self.rows[number]] |= READY
        self.order.changed(self.rows[number : number + 1])

    @rule(number=numbers)
    def leave_dram(self, number: int) -> None:
        self.in_dram.discard(number)
        self.index.flags[self.rows[number]] &= ~np.uint8(READY)
        self.order.changed(self.rows[number : number + 1])

    @rule(which=st.lists(numbers, max_size=4))
    def leave_the_disk(self, which: list[int]) -> None:
        self.order.leave(self.rows[which])
        for number in set(which) & set(self.copies):
            self.gone.append(self.copies.pop(number)[0])

    @rule()
    def forget(self) -> None:
        assert sorted(self.order.take_gone()) == sorted(self.gone)
        self.gone = []

    @invariant()
    def is_whole(self) -> None:
        self.order.check()
        assert set(np.flatnonzero(self.order.has(self.rows)).tolist()) == set(self.copies)


CopiesModel.TestCase.settings = settings(
    max_examples=count(60, 1000), stateful_step_count=40, deadline=None
)
TestCopies = CopiesModel.TestCase
