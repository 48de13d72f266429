"""Every request is admitted in the end, whatever was stored, lost or in the way meanwhile.

And then what it was held for is counted.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.admission.request_plans import MAX_ATTEMPTS
from sglang_ext.admission.waiting_request import (
    LONGEST_PAUSE_S,
    Awaited,
    Remote,
    WaitingRequest,
)
from sglang_ext.tiers.store import Plan, TierCounts
from tests.unit.admission.test_miss_reasons import Waits
from tests.unit.admission.waiting_rig import Store, make_room, prefix, step
from tests.unit.store.store_rig import Make, Rig, fill, on_disk_only, pages, rigs

NUM_SEEDS, NUM_STEPS = 300, 60
FOUND = [(0, 0, 0), (0, 0, 0), (0, 4, 0), (4, 0, 0), (0, 0, 4), (1, 2, 0), (2, 1, 1)]


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_whoever_waits_runs_once_all_is_at_rest(looks_ahead: bool) -> None:
    for seed in range(NUM_SEEDS):
        wait_and_rest(random.Random(seed), Store(looks_ahead=looks_ahead), str(seed))


def wait_and_rest(rng: random.Random, store: Store, what: str) -> None:
    room, clock = make_room(store)
    queue: list[str] = []

    def admit() -> None:
        for handle in list(queue):
            if room.may_admit(handle):
                room.leave(handle, admitted=True)
                queue.remove(handle)

    def advance() -> None:
        step(room, clock, "".join(queue), rng.choice([0.001, LONGEST_PAUSE_S]))
        admit()

    for number in range(NUM_STEPS):
        if rng.random() < 0.3 and len(queue) < 6:
            handle = chr(ord("A") + number)
            queue.insert(rng.randrange(len(queue) + 1), handle)
            room.enter(handle, prefix())
        if rng.random() < 0.3:
            store.found = TierCounts(*rng.choice(FOUND))
            store.changed = list(store.requests)
            store.num_wanted_evicted += 1
        if rng.random() < 0.3:
            store.fits = rng.randrange(9)
        for plan in store.plans:
            if rng.random() < 0.2:
                store.arrive(plan)
            elif rng.random() < 0.05:
                plan.failed = True
        advance()
    store.fits = 8
    for _ in range(4 * MAX_ATTEMPTS * (len(queue) + 1)):
        for plan in store.plans:
            store.arrive(plan)
        clock.now_s += LONGEST_PAUSE_S
        advance()
    assert not queue, (what, [room._waiting[handle] for handle in queue])


class Handle:
    pass


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_a_request_that_left_is_forgotten(looks_ahead: bool) -> None:
    store = Store(looks_ahead=looks_ahead)
    room, _ = make_room(store)
    seen: list[weakref.ref[Handle]] = []
    for admitted in (False, True, False, True):
        handle = Handle()
        seen.append(weakref.ref(handle))
        room.enter(handle, prefix())
        room.step([handle])
        room.leave(handle, admitted=admitted)
        del handle
        room.step([])
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4


# What it was held for.


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def is_held(request: Waits) -> bool:
    request.now_s += 0.01
    request.room.step(["a"])
    return not request.room.may_admit("a")


def held_us(rig: Rig, request: Waits) -> dict[str, int]:
    """How long the request was held, by what for, once it runs."""
    request.until_admitted()
    plan = request.waiting.plan
    assert plan is not None
    assert plan.num_here_left == plan.num_remote_left == 0  # all of it has come
    request.room.leave("a", admitted=True)
    counts = rig.store.counters.snapshot().items()
    return {name: us for name, us in counts if name.startswith("held_")}


def test_pages_on_disk(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 3))
    rig.io.open_gate.clear()
    request = Waits(rig, pages("a", 3))
    assert is_held(request)
    rig.io.open_gate.set()
    assert held_us(rig, request).keys() == {"held_disk_us"}


def test_pages_that_are_being_saved_for_another_request(make: Make) -> None:
    rig = make()
    save = rig.store.begin_save(rig.space, pages("a", 3), pages("none", 0))
    request = Waits(rig, pages("a", 3))
    assert is_held(request)
    for page, slot in zip(save.pages.tolist(), save.slots.tolist(), strict=True):
        fill(rig.arena.slots[slot], pages("a", 3)[page].tobytes(), rig.space)
    rig.store.finish_save(save, ok=True)
    assert held_us(rig, request).keys() == {"held_underway_us"}


def test_room_in_dram() -> None:
    store = Store(fits=0)
    room, clock = make_room(store)
    room.enter("r", prefix())
    step(room, clock, "r")
    assert not room.may_admit("r")
    store.found, store.changed = TierCounts(0, 0, 0), [0]  # its pages are lost meanwhile
    end_s = clock.now_s + 10.0
    while not room.may_admit("r"):
        step(room, clock, "r", 0.1)
        assert clock.now_s < end_s
    room.leave("r", admitted=True)
    assert store.counters.snapshot()["held_room_us"] > 50_000


def waiting(plan: Plan | None = None, num_here: int = 0) -> WaitingRequest:
    found = TierCounts(num_here, 0, 0)
    return WaitingRequest("a", 0, prefix(), found, 0, plan=plan)


def awaited(request: WaitingRequest) -> Awaited:
    request.note_held()
    return request.awaited


def test_the_remote_store_is_awaited_for_its_answer_and_its_pages() -> None:
    asks = waiting()
    asks.remote = Remote.ASKED
    assert awaited(asks) is Awaited.REMOTE
    plan = Plan(np.arange(0), remaining=0)
    plan.remaining = plan.num_remote_left = 2
    assert awaited(waiting(plan)) is Awaited.REMOTE


def test_all_that_it_was_held_for_counts() -> None:
    plan = Plan(np.arange(4), remaining=2)
    plan.reads_disk = True
    request = waiting(plan)
    assert awaited(request) is Awaited.DISK
    # Its pages of the disk are there, others come from a remote store.
    plan.num_here_left, plan.remaining, plan.num_remote_left = 0, 3, 3
    assert awaited(request) is Awaited.BOTH
    plan.num_remote_left = plan.remaining = 0
    plan.num_planned, plan.num_stored = 4, 5
    assert awaited(request) is Awaited.BOTH  # room is told of where it was waited for alone
    assert awaited(waiting(plan)) is Awaited.ROOM


def test_a_request_that_is_the_same_in_another_place_goes_on_waiting() -> None:
    plan = Plan(np.arange(4), remaining=2)
    plan.reads_disk = True
    before, after = waiting(plan), waiting()
    before.note_held()
    after.is_held_as(before)
    assert after.awaited is Awaited.DISK


def test_one_that_has_all_waits_for_other_ranks() -> None:
    assert awaited(waiting(Plan(np.arange(4), remaining=0))) is Awaited.STEP
    assert awaited(waiting(num_here=4)) is Awaited.ROOM  # its turn has not come: none is pinned
