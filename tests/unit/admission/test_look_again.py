"""What a request could reuse is looked for again: earlier answers of the remote store are void."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from sglang_ext.admission.waiting_request import Remote
from sglang_ext.tiers.store import TierCounts
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from tests.unit.admission.waiting_rig import Store, make_room, plan_of, prefix, step

NUM_FULL, NUM_LAST = 6, 2  # what a prompt can be resumed with, and its last page behind that


@dataclass
class RemoteStore(Store):
    """Every question to the remote store is open until the test answers it."""

    asked: list[RemoteLookup] = field(default_factory=list)

    def ask_remote(self, *args: object) -> bool:
        (lookup,) = args
        assert isinstance(lookup, RemoteLookup)
        self.asked.append(lookup)
        return True


def _pages(num: int) -> Any:
    return np.arange(num * 32, dtype=np.uint8).reshape(num, 32)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("num_now", [3, NUM_FULL])
def test_an_answer_for_other_pages_is_dropped(answered: bool, num_now: int) -> None:
    store = RemoteStore(found=TierCounts(0, 4, 0))
    room, clock = make_room(store)
    now = _pages(num_now)
    request = replace(prefix(), hashes=_pages(NUM_FULL + NUM_LAST), look_again=lambda: (now, 0))
    room.enter("a", request)
    (first,) = store.asked
    assert (first.first_page, len(first.hashes)) == (NUM_FULL, NUM_LAST)

    def answer() -> None:
        first.sizes, first.done = np.full(NUM_LAST, 100, np.int64), True

    if answered:
        answer()
    store.found = TierCounts(0, num_now - 2, 0)  # windows left the disk
    step(room, clock, "a")
    answer()
    store.changed = list(store.requests)
    step(room, clock, "a")
    waiting = room.find("a")
    assert waiting is not None
    assert first.cancelled
    assert waiting.remote is Remote.NOT_ASKED
    assert (len(waiting.prefix.hashes), waiting.found) == (num_now, TierCounts(0, num_now - 2, 0))
    plan = plan_of(room, "a")
    assert plan is not None
    store.arrive(plan)
    step(room, clock, "a")
    assert room.may_admit("a")
    assert room.remote_pages("a") == (0, 0)


def test_what_lacks_of_other_pages_is_asked_for() -> None:
    store = RemoteStore()
    room, clock = make_room(store)
    now = [_pages(NUM_FULL + NUM_LAST)]
    room.enter("a", replace(prefix(), hashes=_pages(NUM_FULL), look_again=lambda: (now[0], 0)))
    assert not store.asked, "all of it is here"
    step(room, clock, "a")
    (lookup,) = store.asked
    assert (lookup.first_page, len(lookup.hashes)) == (NUM_FULL, NUM_LAST)
    lookup.sizes, lookup.done = np.full(NUM_LAST, 100, np.int64), True
    step(room, clock, "a")
    waiting = room.find("a")
    assert waiting is not None
    assert waiting.found.remote == NUM_LAST
