"""The table of states and steps: what it finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.store.books import page_states
from sglang_ext.tiers.store.books.page_states import LEGAL, QUEUE, Step
from sglang_ext.tiers.store.types import FILLING, ON_DISK, QUEUED, READY, SPILLING
from tests import strict_steps
from tests.unit.store.store_rig import Rig, pages

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
