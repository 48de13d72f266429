"""Prompts that somebody wants in DRAM before a request comes."""

from __future__ import annotations

from dataclasses import replace

from sglang_ext.admission.waiting import _MAX_PREFETCHES, _PREFETCH_S
from sglang_ext.tiers.store import Plan, TierCounts
from tests.unit.admission.waiting_rig import Store, make_room, plan_of, prefix, step

PROMPT = replace(prefix(), num_on_device=0)


def _count(store: Store, name: str) -> int:
    return store.counters.snapshot().get(name, 0)


def _plan(store: Store) -> Plan:
    (plan,) = store.plans
    return plan


def test_it_is_planned_and_leaves_when_all_is_there() -> None:
    store = Store()
    room, clock = make_room(store)
    assert room.prefetch(PROMPT)
    step(room, clock, "")
    assert len(room._prefetches) == len(store.requests) == 1
    store.arrive(_plan(store))
    step(room, clock, "")
    assert len(room._prefetches) == len(store.requests) == len(store.plans) == 0
    assert (_count(store, "prefetches"), _count(store, "prefetched_pages")) == (1, 4)


def test_it_waits_behind_all_requests() -> None:
    store = Store(fits=4)
    room, clock = make_room(store)
    room.prefetch(PROMPT)
    step(room, clock, "")
    room.enter("a", prefix())
    step(room, clock, "a")
    plan = plan_of(room, "a")
    assert plan is not None
    assert not plan.short
    assert room._by_number[store.requests[0]].handle == "a"
    store.arrive(plan)
    step(room, clock, "a")
    room.leave("a", admitted=True)
    step(room, clock, "")
    assert len(room._prefetches) == 1
    store.arrive(_plan(store))
    step(room, clock, "")
    assert len(room._prefetches) == 0


def test_of_what_is_stored_nowhere_nothing_is_left() -> None:
    store = Store(found=TierCounts(0, 0, 0))
    room, clock = make_room(store)
    room.prefetch(PROMPT)
    step(room, clock, "")
    assert len(room._prefetches) == len(store.requests) == 0
    assert _count(store, "prefetched_pages") == 0


def test_it_is_given_up_after_its_time_however_long_its_pages_take() -> None:
    store = Store()
    room, clock = make_room(store)
    room.prefetch(PROMPT)
    for _ in range(3):  # a sweep, which lets go of what is in no queue
        clock.now_s += _PREFETCH_S / 4
        step(room, clock, "")
        assert len(room._prefetches) == 1
    clock.now_s += _PREFETCH_S / 4
    step(room, clock, "")
    assert len(room._prefetches) == len(store.plans) == 0
    assert _count(store, "swept_requests") == 0


def test_there_are_no_more_than_so_many() -> None:
    store = Store()
    room, clock = make_room(store)
    assert [room.prefetch(PROMPT) for _ in range(_MAX_PREFETCHES + 2)].count(False) == 2
    assert _count(store, "prefetches_refused") == 2
    room.leave_all()  # weights change
    step(room, clock, "")
    assert len(room._prefetches) == 0
    assert room.prefetch(PROMPT)


def test_what_is_to_follow_does_when_all_is_there_or_it_was_let_go() -> None:
    store, done = Store(), list[str]()
    room, clock = make_room(store)
    room.prefetch(PROMPT, lambda: done.append("there"))
    step(room, clock, "")
    assert not done
    store.arrive(_plan(store))
    step(room, clock, "")
    assert done == ["there"]
    room.prefetch(PROMPT, lambda: done.append("let go"))
    room.leave_all()
    step(room, clock, "")
    step(room, clock, "")
    assert done == ["there", "let go"]


def test_without_look_ahead_too() -> None:
    store = Store(looks_ahead=False)
    room, clock = make_room(store)
    room.prefetch(PROMPT)
    step(room, clock, "")
    store.arrive(_plan(store))
    step(room, clock, "")
    assert len(room._prefetches) == len(store.plans) == 0
