"""The world of long prompts, with the real cache, tree, linker, store and disk, on a device.

As `test_truncation_mixes.py`, on the simulated device; no two accesses to a row, a buffer or a slot
race. Here pages are restored, and replaced by better ones. The long form has more rounds in more
worlds, and all mistakes in the order that this world can meet.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.simulated.device import ConflictError
from tests.long_form import count
from tests.property.device import mistakes
from tests.property.device.mistakes import Mutation
from tests.property.device.cache_on_device import TruncationOnDevice
from tests.property.worlds.coverage import run_until_counted
from tests.property.worlds.truncation_world import world

ROUNDS = count(1, 10)  # of 500 operations, and on until all is seen
MUST_HAPPEN = (
    "saved_pages", "loaded_pages", "restored_pages", "aliased_pages", "device_replaced_pages",
)  # fmt: skip
MET = (
    mistakes.forward_stream_not_awaited,
    mistakes.copies_not_awaited,
    mistakes.restored_page_not_awaited,
    mistakes.pins_given_back_when_queued,
    mistakes.saves_not_awaited,
    mistakes.saved_before_it_was_written,
    mistakes.forward_not_awaited_by_saves,
    mistakes.sent_before_it_was_laid_out,
    mistakes.scheduler_waits,
)


@pytest.mark.sampled("1")
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_read_or_written_out_of_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = world(tmp_path, monkeypatch, seed, kind=TruncationOnDevice, core="python")
    try:
        run_until_counted(served, MUST_HAPPEN, num_rounds=ROUNDS)
    finally:
        served.close()


@pytest.mark.sampled("restored_page_not_awaited", "saved_before_it_was_written")
@pytest.mark.parametrize("mutate", MET)
def test_a_mistake_in_the_order_is_found(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch)
    served = world(tmp_path, monkeypatch, 1, kind=TruncationOnDevice, core="python")
    try:
        with pytest.raises(ConflictError):
            run_until_counted(served, ("never",), num_rounds=1)
    finally:
        served.close()
