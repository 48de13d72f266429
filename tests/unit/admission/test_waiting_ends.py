"""Every request is admitted in the end, whatever was stored, lost or in the way meanwhile."""

from __future__ import annotations

import random

import pytest

from sglang_ext.admission.request_plans import MAX_ATTEMPTS
from sglang_ext.admission.waiting_request import LONGEST_PAUSE_S
from sglang_ext.tiers.store import TierCounts
from tests.unit.admission.waiting_rig import Store, make_room, prefix, step

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
