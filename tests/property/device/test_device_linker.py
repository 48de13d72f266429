"""The linker's world, with its real threads, store and disk, on a simulated device.

As `test_linker_interleavings.py`; no two accesses to a row, a buffer or a slot race. The long form
has more rounds in more worlds, and all mistakes in the order that this world can meet: pages are
not restored in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.simulated.device import ConflictError, DeviceThreadError
from tests.long_form import count
from tests.property.device.linker_on_device import LinkerOnDevice
from tests.property.device.mistakes import MISTAKES, Mutation, may_end_a_thread
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.linker_world import Trap

ROUNDS = count(1, 20)  # of 500 operations, and on until all is seen
WORLDS: dict[str, dict[str, Any]] = {
    "write_through-pre": {"policy": "write_through", "mode": "pre"},
    "selective-delta": {"policy": "selective", "mode": "delta"},
    "write_back-pre": {"policy": "write_back", "mode": "pre"},
}
MUST_HAPPEN = (
    *("save", "load", "abort", "forward", "finish", "flush", "clear", "change_weights", "plan"),
    *("saved_pages", "loaded_pages", "evicted_pages", "save_failures", "load_failures"),
    *("written to disk", "read from disk", "failed launches"),
)
# Of a restored page: `test_device_truncation.py` meets these.
NOT_MET = {"pins_of_a_restored_page_given_back", "sent_before_it_was_restored"}


@pytest.mark.sampled("write_through-pre", "write_back-pre")
@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_read_or_written_out_of_order(name: str, tmp_path: Path) -> None:
    world = LinkerOnDevice(tmp_path, 1000, **WORLDS[name])

    def one_round() -> None:
        for _ in range(500):
            world.step()
        world.settle()

    def unseen() -> list[str]:
        seen = {**world.store.stats(), **world.counts, **world.device.counts}
        return missing(seen, MUST_HAPPEN)

    try:
        run_until_all_seen(one_round, unseen, num_rounds=ROUNDS)
        print(name, world.counts, world.device.counts, world.store.stats())
    finally:
        world.close()


@may_end_a_thread
@pytest.mark.sampled(
    "forward_stream_not_awaited", "layer_event_too_early", "pins_given_back_when_queued",
    "saves_not_awaited", "saved_before_it_was_written", "scheduler_waits",
)  # fmt: skip
@pytest.mark.parametrize("mutate", [each for each in MISTAKES if each.__name__ not in NOT_MET])
def test_a_mistake_in_the_order_is_found(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch)
    with pytest.raises(ConflictError):
        _run_worlds(tmp_path, 40)


def _run_worlds(folder: Path, num: int) -> None:
    for seed in range(num):
        world = LinkerOnDevice(folder / str(seed), seed, policy="write_through", mode="pre")
        try:
            for _ in range(1000):
                world.step()
            world.settle()
        except (DeviceThreadError, Trap):  # something else that the mistake breaks
            continue
        finally:
            world.close()
