"""The table of states and steps: what it finds, and pages that do not fit a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.store import Plan
from sglang_ext.tiers.store.books import page_states
from sglang_ext.tiers.store.books.page_states import LEGAL, QUEUE, Step
from sglang_ext.tiers.store.types import FILLING, ON_DISK, QUEUED, READY, SPILLING
from tests import strict_steps
from tests.unit.store.store_rig import Make, Rig, check_content, fill, pages, rigs

STEPS = {step.name: step for step in vars(page_states).values() if isinstance(step, Step)}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_from_a_legal_state_ends_in_one_or_nowhere(step: Step) -> None:
    states = np.arange(256, dtype=np.uint8)
    states = states[LEGAL & step.fits(states)]
    assert len(states)
    after = (states & step.keeps) | step.sets
    nowhere = (after & (READY | FILLING | ON_DISK)) == 0  # the page is removed next
    # A record on disk may be found for a page that is queued to be written there.
    queued = (after & (QUEUED | ON_DISK)) == (QUEUED | ON_DISK)
    assert LEGAL[after[~nowhere & ~queued]].all()


@pytest.mark.parametrize(
    "state",
    [0, READY | FILLING, FILLING | QUEUED, READY | SPILLING, READY | ON_DISK | QUEUED],
)
def test_states_that_no_page_may_be_in(state: int) -> None:
    assert not LEGAL[state]


def test_a_wrong_state_and_a_wrong_step_are_found(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.save(pages("a", 2))
    rig.settle()
    table = rig.books.table
    rows = table.index.lookup(pages("a", 2), rig.space.number)
    with table.lock:
        table.take(QUEUE, rows[:1])
    assert strict_steps.misfits == [f"queue from {READY | ON_DISK:08b}"]
    strict_steps.misfits.clear()
    with pytest.raises(AssertionError):
        rig.books.check()
    table.index.flags[rows[0]] = READY | ON_DISK
    table.order.changed(rows[:1])
    rig.books.check()
    rig.store.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


@pytest.mark.parametrize("policy", ["write_through", "selective", "write_back", "auto"])
@pytest.mark.parametrize("step", ["went on", "queue"])
def test_a_page_that_is_half_filled_is_not_written(make: Make, policy: str, step: str) -> None:
    """Somebody goes on behind it, or asks for its write, while half of it is in its slot."""
    rig = make(policy=policy, slots=16, lookahead=True)
    lookahead, spills, index = rig.store.lookahead, rig.books.spills, rig.books.table.index
    assert lookahead is not None
    chat = pages("chat", 4)
    ticket = rig.store.begin_save(rig.space, chat, chat[:0])
    for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
        fill(rig.arena.slots[slot], chat[page].tobytes(), rig.space)
    rest = rig.arena.slots[ticket.slots, 4096:].copy()
    rig.arena.slots[ticket.slots, 4096:] = 0
    rows = index.lookup(chat, rig.space.number)
    if step == "went on":
        lookahead.went_on(rig.space, chat)
    else:
        with rig.books.table.lock:
            spills.queue(rig.space, rows)
            spills.queue_leaving(rows)
    assert index.flags[rows].tolist() == [FILLING] * 4
    assert spills.num_pages() == 0
    rig.arena.slots[ticket.slots, 4096:] = rest
    rig.store.finish_save(ticket, ok=True)
    assert rig.store.flush(300.0) == 0
    assert rig.on_disk(chat) == 4
    _evict(rig, chat)
    plan = _brought(rig, chat)
    check_content(rig, chat)
    rig.store.cancel_plan(plan)


def _brought(rig: Rig, hashes: np.ndarray) -> Plan:
    """A plan that has brought all of them: what lies in DRAM alone may have to make room first."""
    while True:
        plan = rig.store.plan(rig.space, hashes)
        assert plan is not None
        rig.wait(plan)
        if rig.ready(hashes) == len(hashes):
            return plan
        rig.store.cancel_plan(plan)
        rig.settle()


def _evict(rig: Rig, hashes: np.ndarray) -> None:
    """Until the disk alone has these pages."""
    number = 0
    while rig.ready(hashes):
        rig.save(pages(f"filler{number}-", rig.arena.num_slots // 2))
        rig.settle()
        number += 1
