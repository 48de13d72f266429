"""Loads and saves on a simulated device: in no order that it runs them do two accesses race.

The long form makes it 100,000 steps of each kind of model, in 666 worlds of 150. Hybrids are in
`test_device_hybrids.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device import load_path  # noqa: E402
from sglang_ext.device.load_pages import IndexMemory  # noqa: E402
from sglang_ext.device.save_path import SavePath  # noqa: E402
from testkit.simulated.device import ConflictError  # noqa: E402
from tests.property.device.device_world import (  # noqa: E402
    MUST_HAPPEN,
    DeviceWorld,
    run_seeds,
    run_worlds,
)
from tests.property.device.mistakes import MISTAKES, Mutation  # noqa: E402


def save_one(world: DeviceWorld) -> None:
    while not world.running:
        world.load()
        world.begin()
        world.forward()
    world.offer()
    world.save()


def test_a_save_without_device_memory_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none")

    world = DeviceWorld(3)
    monkeypatch.setattr(SavePath, "_batches", save)
    try:
        save_one(world)
        world.settle()  # all slots are free again
    finally:
        world.close()
    counts = world.store.counters.snapshot()
    assert counts["save_no_device_memory"] == 1
    assert world.counts["failed saves"] == 1
    assert "save_failures" not in counts


def test_nothing_is_read_or_written_out_of_order() -> None:
    run_worlds(DeviceWorld, (*MUST_HAPPEN, "sent at once", "sent behind an event"))


def test_indices_that_come_part_by_part_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more tokens than the device's memory for them was taken for."""
    monkeypatch.setattr(load_path, "_VALUES_A_ROW", 0)
    monkeypatch.setattr(IndexMemory, "has_room", lambda self, parts: len(parts) == 1)
    run_worlds(DeviceWorld, ("load", "forward", "restore", "reuse", "loads at once"))


class UnpinnedWorld(DeviceWorld):
    """DRAM could not be page-locked: whoever queues a copy of it waits for the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device.copies_wait = True


def test_no_page_is_restored_where_the_scheduler_would_have_to_wait_for_the_copy() -> None:
    world = UnpinnedWorld(1)
    try:
        while world.counts.get("restore", 0) < 5 or world.counts.get("forward", 0) < 5:
            world.step()
        world.settle()  # no pin and no row is left
    finally:
        world.close()
    assert world.counts["failed restores"] == world.counts["restore"]
    assert world.store.counters.snapshot()["unrestored_pages"] == world.counts["restore"]


@pytest.mark.parametrize("mutate", MISTAKES)
def test_a_mistake_in_the_order_is_found(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(ConflictError):
        run_seeds(DeviceWorld, 20)
