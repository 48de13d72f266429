"""The world of long prompts, with the real cache, tree, linker, store and disk, on a device.

As `test_truncation_mixes.py`, on the simulated device, of which copies fail; no two accesses to a
row, a buffer or a slot race. Here pages are restored, and replaced by better ones, and rows are
sent. The long form has more rounds in more worlds, and all mistakes in the order that this world
can meet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.long_form import count
from tests.property.device.cache_on_device import TruncationOnDevice, require_found
from tests.property.device.mistakes import MISTAKES, Mutation, may_end_a_thread
from tests.property.worlds.coverage import run_until_counted
from tests.property.worlds.truncation_world import world

ROUNDS = count(1, 10)  # of 500 operations, and on until all is seen
MUST_HAPPEN = (
    "saved_pages", "loaded_pages", "restored_pages", "aliased_pages", "device_replaced_pages",
    "load_failures", "save_failures",
)  # fmt: skip
# Seldom or never met here; the linker's world meets these.
NOT_MET = {
    "rows_not_awaited", "layers_not_awaited", "pins_given_back_with_the_first_copy",
    "indices_written_over_those_in_use", "laid_out_over_what_is_sent",
    "failed_copies_not_awaited", "pins_given_back_when_queued",
    "pins_of_a_failed_load_given_back",
}  # fmt: skip


def make(folder: Path, patch: pytest.MonkeyPatch, seed: int) -> Any:
    """A world with the options that a seed draws."""
    return world(folder, patch, seed, kind=TruncationOnDevice, core="python")


@pytest.mark.sampled("1")
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_read_or_written_out_of_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make(tmp_path, monkeypatch, seed)
    try:
        run_until_counted(served, MUST_HAPPEN, num_rounds=ROUNDS)
    finally:
        served.close()


@may_end_a_thread
@pytest.mark.sampled(
    "restored_page_not_awaited", "saved_before_it_was_written", "sent_before_it_was_restored",
    "pins_of_a_restored_page_given_back",
)  # fmt: skip
@pytest.mark.parametrize("mutate", [each for each in MISTAKES if each.__name__ not in NOT_MET])
def test_a_mistake_in_the_order_is_found(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch)
    require_found(lambda seed: make(tmp_path / str(seed), monkeypatch, seed))
