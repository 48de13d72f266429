"""Who is held back, who has a plan, and who must wait for its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from sglang_ext.admission.request_plans import MAX_ATTEMPTS
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import LONGEST_PAUSE_S
from sglang_ext.tiers.store import Plan, TierCounts
from tests.unit.admission.waiting_rig import (
    Clock,
    Store,
    make_room,
    plan_of,
    prefix,
    step,
)


def test_only_the_head_of_the_queue_has_plans_in_its_order() -> None:
    store = Store()
    room, clock = make_room(store)
    for handle in "cab":
        room.enter(handle, prefix())
        assert plan_of(room, handle) is None
    step(room, clock, "abc")
    a, b = plan_of(room, "a"), plan_of(room, "b")
    assert a is not None
    assert b is not None
    assert (a.priority, b.priority) == (0, 1)
    assert plan_of(room, "c") is None
    assert [room.may_admit(handle) for handle in "abc"] == [False, False, False]
    store.arrive(a)
    assert not room.may_admit("a")  # seen once a step
    step(room, clock, "abc")
    assert [room.may_admit(handle) for handle in "abc"] == [True, False, False]
    room.leave("a", admitted=True)
    step(room, clock, "bc")
    assert b.priority == 0
    c = plan_of(room, "c")
    assert c is not None
    assert c.priority == 1


def test_of_many_that_come_at_once_a_step_plans_for_those_in_front() -> None:
    """The scheduler waits for it; the others have their turn in the next steps, in their order."""
    handles = [str(number) for number in range(150)]
    store = Store(fits=4 * len(handles), num_in_window=len(handles))
    room, clock = make_room(store)
    for handle in handles:
        room.enter(handle, prefix())
    planned: list[str] = []
    while len(planned) < len(handles):
        before = len(planned)
        clock.now_s += 0.001
        room.step(handles)
        planned = [handle for handle in handles if plan_of(room, handle) is not None]
        assert before < len(planned) <= before + len(handles) // 2
        assert planned == handles[: len(planned)]
    assert store.num_plans == len(handles)


def test_the_store_is_told_of_an_order_only_when_it_does_not_follow_from_who_came_and_left() -> (
    None
):
    store = Store()
    room, clock = make_room(store)

    def names() -> str:
        return "".join(str(room._by_number[number].handle) for number in store.requests)

    for handle in "abc":
        room.enter(handle, prefix())
    step(room, clock, "xabc")  # x has nothing to wait for; it was not named to the store
    step(room, clock, "abc")
    calls = store.num_orders
    room.leave("b")
    room.enter("d", prefix())
    step(room, clock, "acd")
    assert (names(), store.num_orders) == ("acd", calls)
    step(room, clock, "cad")
    assert (names(), store.num_orders) == ("cad", calls + 1)
    room.enter("c", prefix())  # again, in its place
    step(room, clock, "cad")
    assert names() == "cad"
    room.leave("a")
    room.enter("e", prefix())
    step(room, clock, "ecd")
    assert names() == "ecd"
    room.leave_all()
    step(room, clock, "")
    assert names() == ""


def test_a_request_that_comes_first_takes_the_room_of_the_last() -> None:
    store = Store()
    room, clock = make_room(store)
    for handle in "ab":
        room.enter(handle, prefix())
    step(room, clock, "ab")
    room.enter("u", prefix())
    step(room, clock, "uab")
    assert plan_of(room, "b") is None
    assert plan_of(room, "u") is not None
    assert store.counters.snapshot()["deferred_plans"] == 1
    assert not room.may_admit("b")


def test_those_behind_give_up_the_room_that_one_before_them_lacks() -> None:
    store = Store(fits=8)
    room, clock = make_room(store)
    for handle in "ab":
        room.enter(handle, prefix())
    step(room, clock, "ab")
    store.fits = 4  # saves took the rest of DRAM
    room.leave("a")
    room.enter("a", prefix())
    step(room, clock, "ab")
    a = plan_of(room, "a")
    assert a is not None
    assert not a.short
    b = plan_of(room, "b")
    assert b is None or b.starved
    assert not room.may_admit("b")


def test_a_plan_without_room_is_made_again_now_and_then_not_at_every_step() -> None:
    store = Store(fits=0)
    room, clock = make_room(store)
    room.enter("a", prefix())
    for _ in range(300):
        step(room, clock, "a")
        assert room.may_admit("a") is False
    # At the start, then after 1, 2, 4, 8, 16 and then every 32 ms.
    assert 5 <= store.num_plans <= 16
    store.fits = 8
    step(room, clock, "a", LONGEST_PAUSE_S)
    a = plan_of(room, "a")
    assert a is not None
    store.arrive(a)
    step(room, clock, "a")
    assert room.may_admit("a")


def test_a_plan_without_room_ends_when_its_pages_are_lost() -> None:
    store = Store(fits=0)
    room, clock = make_room(store)
    room.enter("a", prefix())
    step(room, clock, "a")
    assert not room.may_admit("a")
    store.found = TierCounts(0, 0, 0)  # the disk let them go
    store.changed = list(store.requests)
    for _ in range(2):
        step(room, clock, "a", LONGEST_PAUSE_S)
    assert room.may_admit("a")


def test_a_plan_that_never_gets_all_its_room_is_used_as_it_is() -> None:
    store = Store(fits=3)
    room, clock = make_room(store)
    room.enter("a", prefix())
    steps = 0
    while not room.may_admit("a"):
        for plan in store.plans:
            store.arrive(plan)
        step(room, clock, "a", LONGEST_PAUSE_S)
        steps += 1
        assert steps <= 2 * MAX_ATTEMPTS
    assert steps >= MAX_ATTEMPTS - 1


def held_short(store: Store, room: WaitingRoom, clock: Clock, order: str, num_steps: int) -> bool:
    """Whether the first one is held for so many steps, though all of its plan is there."""
    for _ in range(num_steps):
        for plan in store.plans:
            store.arrive(plan)
        step(room, clock, order, LONGEST_PAUSE_S)
        if room.may_admit(order[0]):
            return False
    return True


def test_a_plan_is_not_used_as_it_is_while_writes_make_room_for_the_rest() -> None:
    store = Store(fits=3, num_writing=5)
    room, clock = make_room(store)
    room.enter("a", prefix())
    assert held_short(store, room, clock, "a", 4 * MAX_ATTEMPTS)
    assert store.num_marks == 1  # what is queued behind those is not waited for
    store.num_writing, store.fits = 0, 4
    step(room, clock, "a", LONGEST_PAUSE_S)  # one more attempt, behind the last write
    for plan in store.plans:
        store.arrive(plan)
    step(room, clock, "a")
    assert room.may_admit("a")
    assert len(store.plans[0].rows) == 4


def test_room_that_writes_do_not_bring_is_waited_for_no_longer() -> None:
    store = Store(fits=3, num_writing=5)
    room, clock = make_room(store)
    room.enter("a", prefix())
    assert held_short(store, room, clock, "a", 4 * MAX_ATTEMPTS)
    store.num_writing = 0
    assert not held_short(store, room, clock, "a", 3)
    assert len(store.plans[0].rows) == 3


def test_writes_are_waited_for_as_long_as_the_flag_says_at_most() -> None:
    store = Store(fits=3, num_writing=5)
    room, clock = make_room(store, timeout_ms=500.0)
    room.enter("a", prefix())
    began_s = clock.now_s
    while held_short(store, room, clock, "a", 1):
        assert clock.now_s - began_s < 2.0
    assert clock.now_s - began_s >= 0.5


def test_only_the_head_of_the_queue_waits_for_writes() -> None:
    store = Store(fits=7, num_writing=5)
    room, clock = make_room(store)
    for handle in "ab":
        room.enter(handle, prefix())
    for _ in range(4 * MAX_ATTEMPTS):
        for plan in store.plans:
            store.arrive(plan)
        step(room, clock, "ab", LONGEST_PAUSE_S)
    assert room.may_admit("a")  # it has all that it wants
    assert not store.num_marks
    assert room.may_admit("b")  # three of four pages
    room.leave("a", admitted=True)


def test_each_time_at_the_head_the_writes_of_then_count() -> None:
    store = Store(fits=3, num_writing=5)
    room, clock = make_room(store)
    for handle in "ab":
        room.enter(handle, prefix())
    assert held_short(store, room, clock, "ab", 2 * MAX_ATTEMPTS)
    assert held_short(store, room, clock, "ba", 2 * MAX_ATTEMPTS)
    assert held_short(store, room, clock, "ab", 2 * MAX_ATTEMPTS)
    assert store.num_marks == 3


def test_the_deadline_runs_from_when_the_scheduler_would_have_run_it() -> None:
    store = Store()
    room, clock = make_room(store, "timeout", 50.0)
    for handle in "abc":
        room.enter(handle, prefix())
    step(room, clock, "abc", 10.0)  # a long time in the queue behind others
    assert [room.may_admit(handle) for handle in "abc"] == [False, False, False]
    step(room, clock, "abc", 0.04)
    assert not room.may_admit("a")
    step(room, clock, "abc", 0.02)
    assert room.may_admit("a")
    assert room.may_admit("c")  # whose turn never came
    assert plan_of(room, "a") is None
    assert store.counters.snapshot()["prefetch_timeouts"] == 2
    step(room, clock, "abc")
    assert plan_of(room, "a") is None  # it may run now; no more is done for it


def test_best_effort_never_holds_but_fetches() -> None:
    store = Store()
    room, clock = make_room(store, "best_effort")
    room.enter("a", prefix())
    step(room, clock, "a")
    assert plan_of(room, "a") is not None
    assert room.may_admit("a")


def test_a_request_whose_pages_are_in_dram_need_not_wait_for_its_turn() -> None:
    store = Store(found=TierCounts(4, 0, 0))
    room, clock = make_room(store)
    for handle in "abc":
        room.enter(handle, prefix())
    step(room, clock, "abc")
    assert plan_of(room, "c") is None
    for _ in range(100):
        assert room.may_admit("c")
    assert store.num_lookups == 0
    store.num_wanted_evicted += 1  # was it one of its pages?
    store.found = TierCounts(3, 1, 0)
    for _ in range(100):
        assert not room.may_admit("c")
    assert store.num_lookups == 1


def test_pages_that_become_known_meanwhile_are_found() -> None:
    store = Store(found=TierCounts(0, 0, 0))
    room, clock = make_room(store)
    for handle in "ab":
        room.enter(handle, prefix())
    step(room, clock, "ab")
    assert store.plans == []
    assert room.may_admit("b")
    store.found = TierCounts(2, 2, 0)
    step(room, clock, "ab")
    assert store.plans == []  # nobody said so
    store.changed = list(store.requests)
    step(room, clock, "ab")
    assert len(store.plans) == 2
    assert not room.may_admit("b")


def test_a_longer_prefix_is_planned_before_the_old_pins_go() -> None:
    store = Store(found=TierCounts(0, 2, 0))
    room, clock = make_room(store)
    room.enter("a", prefix())
    step(room, clock, "a")
    old = plan_of(room, "a")
    store.found = TierCounts(2, 2, 0)
    store.changed = list(store.requests)
    step(room, clock, "a", LONGEST_PAUSE_S)
    new = plan_of(room, "a")
    assert new is not None
    assert old is not None
    assert old.cancelled
    assert new.num_stored == 4


def arrive_all(store: Store) -> None:
    for plan in store.plans:
        store.arrive(plan)


def test_without_lookahead_a_request_whose_turn_comes_takes_the_room_of_who_came_last() -> None:
    store = Store(looks_ahead=False)
    room, clock = make_room(store)
    for handle in "abc":
        room.enter(handle, prefix())
    arrive_all(store)
    step(room, clock, "cab")
    assert [len(plan.rows) for plan in store.plans] == [4, 4, 0]
    assert not room.may_admit("c")  # it came last and found no room, but it comes first now
    assert plan_of(room, "b") is None
    assert plan_of(room, "a") is not None
    arrive_all(store)
    step(room, clock, "cab")
    assert room.may_admit("c")
    room.leave("c", admitted=True)
    step(room, clock, "ab")
    assert room.may_admit("a")
    assert not room.may_admit("b")
    arrive_all(store)
    step(room, clock, "ab")
    assert [room.may_admit(handle) for handle in "ab"] == [True, True]


def test_without_lookahead_room_of_requests_that_are_asked_for_is_waited_for() -> None:
    store = Store(looks_ahead=False)
    room, clock = make_room(store)
    for handle in "abc":
        room.enter(handle, prefix())
    for _ in range(100):
        step(room, clock, "abc")
        assert [room.may_admit(handle) for handle in "abc"] == [False, False, False]
    assert store.num_plans < 20  # c is tried again now and then
    arrive_all(store)
    step(room, clock, "abc")
    assert [room.may_admit(handle) for handle in "abc"] == [True, True, False]
    room.leave("a", admitted=True)
    step(room, clock, "bc", LONGEST_PAUSE_S)
    assert not room.may_admit("c")
    arrive_all(store)
    step(room, clock, "bc")
    assert room.may_admit("c")


def test_without_lookahead_two_that_lack_room_do_not_wait_for_each_other() -> None:
    store = Store(looks_ahead=False, fits=6)
    room, clock = make_room(store)
    room.enter("a", prefix())
    arrive_all(store)
    step(room, clock, "a")
    assert room.may_admit("a")
    store.found = TierCounts(0, 6, 0)
    room.enter("b", prefix())
    room.enter("c", prefix())
    arrive_all(store)
    step(room, clock, "abc")
    assert [room.may_admit(handle) for handle in "bc"] == [False, False]
    room.leave("a", admitted=True)
    step(room, clock, "bc", 2 * LONGEST_PAUSE_S)
    assert not room.may_admit("c")  # it comes to a's room first
    for _ in range(20):
        arrive_all(store)
        step(room, clock, "bc", 2 * LONGEST_PAUSE_S)
        for handle in [handle for handle in "bc" if handle in room._waiting]:
            if room.may_admit(handle):
                assert cast(Plan, plan_of(room, handle)).num_planned == 6
                room.leave(handle, admitted=True)
    assert not room._waiting


def test_without_lookahead_a_request_waits_once_in_its_turn_for_writes_that_make_room() -> None:
    store = Store(looks_ahead=False, fits=3, num_writing=5)
    room, clock = make_room(store)
    room.enter("a", prefix())
    arrive_all(store)
    step(room, clock, "a")
    assert room._waiting["a"].room_mark is None  # its turn has not come
    assert not room.may_admit("a")
    assert room._waiting["a"].awaits_room  # what decides of its deadline in this step reads it
    assert held_short(store, room, clock, "a", 4 * MAX_ATTEMPTS)
    store.num_writing, store.fits = 0, 4
    assert not held_short(store, room, clock, "a", 3)
    assert len(store.plans[0].rows) == 4
    assert store.num_marks == 1


def test_without_lookahead_room_that_writes_do_not_bring_is_waited_for_no_longer() -> None:
    store = Store(looks_ahead=False, fits=3, num_writing=5)
    room, clock = make_room(store, timeout_ms=500.0)
    for handle in "ab":
        room.enter(handle, prefix())
    assert held_short(store, room, clock, "a", 4)
    store.num_writing = 0
    assert not held_short(store, room, clock, "a", 2)
    assert len(store.plans[0].rows) == 3
    room.leave("a", admitted=True)
    store.num_writing = 5
    began_s = clock.now_s
    while held_short(store, room, clock, "b", 1):
        assert clock.now_s - began_s < 2.0
    assert clock.now_s - began_s >= 0.5


def test_without_lookahead_one_that_came_to_no_room_waits_in_its_turn_like_others() -> None:
    store = Store(looks_ahead=False, fits=0, num_writing=5)
    room, clock = make_room(store)
    room.enter("a", prefix())
    step(room, clock, "a")
    store.fits = 3
    assert not room.may_admit("a")
    step(room, clock, "a", LONGEST_PAUSE_S)
    assert not room.may_admit("a")  # three pages are on their way, and room for the fourth


def test_without_lookahead_no_more_room_than_one_plan_may_have_is_waited_for() -> None:
    store = Store(looks_ahead=False, fits=8, num_writing=5, found=TierCounts(0, 9, 0))
    room, clock = make_room(store)
    room.enter("a", prefix())
    assert not held_short(store, room, clock, "a", 2)
    assert not store.num_marks


def test_without_lookahead_who_is_asked_for_later_leaves_reads_of_those_before_alone() -> None:
    store = Store(looks_ahead=False, fits=4)
    room, clock = make_room(store)
    for handle in "ab":
        room.enter(handle, prefix())
    arrive_all(store)
    step(room, clock, "ba")
    assert not room.may_admit("b")  # it goes before a, which came first, and takes its room
    plan = plan_of(room, "b")
    assert plan is not None
    for _ in range(20):
        assert not room.may_admit("a")
        assert not room.may_admit("b")  # its pages are on their way
        step(room, clock, "ba", 2 * LONGEST_PAUSE_S)
    assert plan_of(room, "b") is plan


def test_without_lookahead_what_was_stored_while_a_request_waited_is_found_in_its_turn() -> None:
    store = Store(looks_ahead=False, found=TierCounts(0, 0, 0))
    room, clock = make_room(store)
    room.enter("a", prefix())
    assert store.plans == []
    store.found = TierCounts(0, 4, 0)
    step(room, clock, "a")
    assert not room.may_admit("a")
    arrive_all(store)
    step(room, clock, "a")
    assert room.may_admit("a")
    assert store.num_plans == 1


def test_without_lookahead_few_requests_are_looked_for_in_a_step_and_a_deadline_counts() -> None:
    store = Store(looks_ahead=False, found=TierCounts(0, 0, 0))
    room, clock = make_room(store, "timeout", 1000.0)
    handles = [str(number) for number in range(10)]
    for handle in handles:
        room.enter(handle, prefix())
    room.step(handles)
    before = store.num_lookups
    assert [room.may_admit(handle) for handle in handles] == [True] * 4 + [False] * 6
    assert store.num_lookups == before + 4
    clock.now_s += 1.0
    room.step(handles)
    assert all(room.may_admit(handle) for handle in handles)


def test_a_plan_whose_room_a_save_took_is_made_again() -> None:
    for looks_ahead in (True, False):
        store = Store(looks_ahead=looks_ahead)
        room, clock = make_room(store)
        room.enter("a", prefix())
        step(room, clock, "a")
        old = plan_of(room, "a")
        assert old is not None
        store.arrive(old)
        store.cancel_plan(old)  # as the store does for a save
        step(room, clock, "a")
        assert not room.may_admit("a")
        new = plan_of(room, "a")
        assert new is not None
        assert new is not old
        store.arrive(new)
        step(room, clock, "a")
        assert room.may_admit("a"), looks_ahead
        assert store.counters.snapshot()["deferred_plans"] == 1


def test_nothing_stays_of_requests_that_leave() -> None:
    ways: dict[str, Callable[[WaitingRoom, Clock], None]] = {
        "leaves": lambda room, clock: room.leave("a"),
        "is admitted": lambda room, clock: room.leave("a", admitted=True),
        "all leave": lambda room, clock: room.leave_all(),
        "vanishes": lambda room, clock: step(room, clock, "", 3.0),
    }
    for name, way in ways.items():
        store = Store()
        room, clock = make_room(store)
        room.enter("a", prefix())
        step(room, clock, "a", 3.0)
        assert len(store.plans) == 1
        room.leave("unknown")
        way(room, clock)
        if name == "vanishes":
            assert "a" in room._waiting  # a moment between two lists is no end
            way(room, clock)
        assert store.plans == []
        assert not store.requests
        assert not room._waiting
        assert not room._plans.planned


def test_admissions_are_counted_by_where_the_pages_lie() -> None:
    store = Store()
    room, clock = make_room(store)
    for handle, found in (("a", TierCounts(4, 0, 0)), ("b", TierCounts(1, 2, 1)), ("c", None)):
        room.enter(handle, prefix())
        store.found = found or TierCounts(0, 0, 0)
        room.leave(handle, admitted=True)
    step(room, clock, "")
    assert store.counters.snapshot() == {
        "admitted_host_pages": 5,
        "admitted_late_pages": 3,
        "admitted_ready_requests": 1,
        "admitted_late_requests": 1,
    }
