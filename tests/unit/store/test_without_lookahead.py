"""A store that does not look ahead: room for saves beside the plans of those that wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.tiers.store import Plan
from tests.unit.store.store_rig import Make, Rig, pages, rigs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _planned(rig: Rig, name: str, count: int, place: int) -> Plan:
    plan = rig.store.plan(rig.space, pages(name, count), priority=place)
    assert plan is not None
    rig.wait(plan)
    return plan


def test_requests_of_which_nothing_is_stored_leave_nothing_behind(make: Make) -> None:
    rig = make(slots=16)
    for number in range(20):
        assert rig.store.plan(rig.space, pages(f"unknown{number}", 4)) is None
    assert len(rig.books.pins._plans) == 0


def test_plans_yield_to_saves_where_there_is_no_disk(make: Make) -> None:
    rig = make(slots=16, disk=False)
    for name in "abc":
        rig.save(pages(name, 2))
    plans = [_planned(rig, name, 2, place) for place, name in enumerate("abc")]
    assert rig.save(pages("d", 12)) == 12
    assert [plan.cancelled for plan in plans] == [False, False, True]


def test_plans_that_would_give_nothing_stay(make: Make) -> None:
    rig = make(slots=16)
    shared, own = pages("shared", 4), pages("own", 2)
    for each in (shared, own):
        rig.save(each)
    rig.settle()
    plans = [_planned(rig, "shared", 4, place) for place in range(4)]
    plans.append(_planned(rig, "own", 2, 4))
    assert rig.save(pages("new", 16)) == 12
    assert [plan.cancelled for plan in plans] == [False] * 4 + [True]


def test_pages_that_two_plans_pin_are_given_up_by_both(make: Make) -> None:
    rig = make(slots=16)
    for name in ("first", "shared"):
        rig.save(pages(name, 4))
    rig.settle()
    plans = [_planned(rig, "first", 4, 0)]
    plans += [_planned(rig, "shared", 4, place) for place in (1, 2)]
    assert rig.save(pages("new", 12)) == 12
    assert [plan.cancelled for plan in plans] == [False, True, True]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_pinned_pages_hide_nothing_however_old_they_are(make: Make, policy: str) -> None:
    rig = make(slots=200, index=1024, policy=policy)
    cold = pages("cold", 90)
    rig.save(cold)
    assert rig.store.flush(60) == 0
    plan = _planned(rig, "cold", 90, 0)
    rig.save(pages("warm", 110))
    # The coldest are pinned; of the others one is enough, once the disk has it.
    rig.until(lambda: rig.save(pages("new", 1)) == 1)
    assert rig.ready(cold) == 90
    rig.store.cancel_plan(plan)
    rig.settle()


def test_what_leads_to_pinned_pages_stays_as_long_as_they(make: Make) -> None:
    rig = make(slots=200, index=1024)
    path, other = pages("path", 90), pages("other", 90)
    rig.save(path)
    rig.save(other)
    rig.settle()
    ticket = rig.store.pin_ready(rig.space, path)
    assert ticket is not None
    rig.store.release(ticket.slots)
    table, pins = rig.books.table, ticket.slots[10:]
    with table.lock:
        table.touch(table.index.lookup(other, rig.space.number))
        table.pin(pins)
    rig.save(pages("new", 60))  # 20 are free
    assert rig.ready(path) == 90, "what leads to pinned pages left before others"
    rig.store.release(pins)
    rig.settle()
