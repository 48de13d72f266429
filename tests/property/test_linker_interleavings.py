"""Random interleavings of everything the scheduler may ask of the linker, with traps everywhere."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.device.transfers import Place
from sglang_ext.tiers.policy import PolicyConfig
from tests.long_form import count
from tests.property.worlds import linker_world
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.linker_world import PAGE, PAGES_PER_DOCUMENT, Node, World

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(1, 5)  # of 500 operations, and on until all is seen, in each of ten worlds

WORLDS: dict[str, dict[str, Any]] = {
    "write_through-pre": {"policy": "write_through", "mode": "pre", "disk": True},
    "write_through-delta": {"policy": "write_through", "mode": "delta", "disk": True},
    "selective-pre": {"policy": "selective", "mode": "pre", "disk": True},
    "write_back-pre": {"policy": "write_back", "mode": "pre", "disk": True},
    "lookahead-pre": {
        "policy": "write_through",
        "mode": "pre",
        "disk": True,
        "placement": PolicyConfig(),
    },
    "no-disk-pre": {"policy": "write_through", "mode": "pre", "disk": False},
}
CASES = [(name, seed) for name, world in WORLDS.items() for seed in (1, 2)[: 1 + world["disk"]]]
CASES.remove(("lookahead-pre", 2))


@pytest.mark.parametrize(("name", "seed"), CASES, ids=[f"{n}-{s}" for n, s in CASES])
@pytest.mark.usefixtures("quiet")
def test_no_page_is_read_before_it_is_written_or_written_after_it_is_freed(
    name: str, seed: int, tmp_path: Path
) -> None:
    world = World(tmp_path, 1000 * seed, **WORLDS[name])
    shown = [
        "save", "load", "abort", "forward", "finish", "flush", "clear", "change_weights",
        "saved_pages", "loaded_pages", "evicted_pages", "stale_load_pages",
    ]  # fmt: skip
    if "pre" in name:
        shown += ["saved_pre_pages", "saved_bound_pages"]
    if world.disk is not None:
        shown += ["written_pages", "promoted_pages", "plan"]

    def one_round() -> None:
        for _ in range(500):
            world.step()
        world.settle()

    def unseen() -> list[str]:
        return missing({**world.store.stats(), **world.counts}, tuple(shown))

    try:
        run_until_all_seen(one_round, unseen, num_rounds=ROUNDS)
        print(name, seed, world.counts, world.store.stats())
    finally:
        world.close()


def test_the_traps_catch(tmp_path: Path) -> None:
    """A copy into freed rows, a write to a free slot and a wrong page all fail the test."""
    world = World(tmp_path, 7, policy="write_through", mode="pre")
    try:
        world.save()
        world.linker.quiesce()
        world.collect()
        node = world.nodes[0]
        page = node.pages[0]
        world.expect(node.chain, node.start, page, [0])
        with pytest.raises(AssertionError, match="is not page"):
            world.expect(node.chain, (node.start + 1) % PAGES_PER_DOCUMENT, page, [0])
        world.evict(node)
        world.check_poison()
        world.write(node.chain, node.start, page)
        with pytest.raises(AssertionError, match="written after it was freed"):
            world.check_poison()
        world._poison(page)
        free = int(world.arena._stack[0])
        world.arena.slots[free, 4000] ^= 1
        with pytest.raises(AssertionError, match="written while it was free"):
            world.check_poison()
        world.arena.slots[free, 4000] ^= 1
        world.settle()
    finally:
        world.close()


def test_a_reset_that_overtakes_a_save_drops_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows change hands while the save copies them: it must not be published or reported."""
    world = World(tmp_path, 8, policy="write_through", mode="pre", disk=False)
    try:
        chain = world.chains[0]
        pages = world.take(2)
        assert pages is not None
        for offset, page in enumerate(pages):
            world.write(chain, offset, page)
        world.kernels.gate.clear()  # the copy hangs
        world.insert(Node(chain, 0, pages))
        with monkeypatch.context() as patch:  # what is waited for below may take its time
            patch.setattr(linker_world.linker_module, "_QUIESCE_TIMEOUT_S", 0.05)
            flush(world)
        world.kernels.gate.set()
        assert world.linker.quiesce()
        assert world.linker.num_completed_offloads() == 0
        assert world.store.ready_prefix(chain.space, chain.hashes) == 0
        assert world.store.counters.snapshot()["reset_overtook_saves"] >= 1
        world.save()
        world.settle()
        assert not world.saving
    finally:
        world.close()


def test_what_follows_saves_is_on_its_way_until_it_is_done(tmp_path: Path) -> None:
    """Whoever waits until nothing is finds the pins and hints of a request noted."""
    world = World(tmp_path, 9, policy="write_through", mode="pre", disk=False)
    may_end = threading.Event()

    def note() -> None:
        may_end.wait()

    try:
        assert world.linker.numbers_of_saves() == (0, 0)
        world.linker.after_saves(note)
        assert world.linker.numbers_of_saves() == (1, 0)
    finally:
        may_end.set()
        world.close()
    assert world.linker.numbers_of_saves() == (0, 1)


def flush(world: World) -> None:
    """Flushes; `World.flush` leaves it to chance."""
    while world.flush() is False:
        pass


def test_a_failed_load_is_reported_and_its_slots_come_back(tmp_path: Path) -> None:
    world = World(tmp_path, 9, policy="write_through", mode="pre", disk=False)
    try:
        while not world.queued:
            world.save()
            world.linker.quiesce()
            world.collect()
            world.load()
        world.kernels.failure = 1.0
        world.kernels.delay = 0.0
        index = world.linker.start_layer_wise_loading()
        counter = world.linker.layer_done_counter
        counter.set_consumer(index)
        counter.wait_until(2)  # a failure must not hang the forward
        assert world.linker.finish_layer_wise_loading(index) is False
        for request in world.queued:
            world.give_back(request.pages)
        world.queued = []
        world.settle()
    finally:
        world.close()


def test_a_page_that_went_bad_in_dram_is_recomputed_and_dropped(tmp_path: Path) -> None:
    """Nothing is aborted: the load is refused, once, and the page before it stays."""
    world = World(tmp_path, 10, policy="write_through", mode="pre", disk=False)
    try:
        chain = world.chains[0]
        pages = world.take(3)
        assert pages is not None
        for offset, page in enumerate(pages):
            world.write(chain, offset, page)
        world.insert(Node(chain, 0, pages))
        assert world.linker.quiesce()
        ticket = world.store.pin_ready(chain.space, chain.hashes[:3])
        assert ticket is not None
        world.store.release(ticket.slots)
        slot, at = int(ticket.slots[1]), world.linker.copier.layout.tail_offset
        world.arena.slots[slot, at : at + 4] ^= 0xFF

        with world.linker.placed(Place(chain.space, 0, chain.hashes[:0])):
            rows = world.slots_of(pages)
            transfer = SimpleNamespace(device_indices=rows, keys=chain.keys(0, 3))
            assert world.linker.load("r", [transfer]) is False
            assert world.store.stats()["damaged_pages"] == 1
            assert "load_failures" not in world.store.stats()
            assert world.linker.lookup("r", [transfer]) == [1]
            transfer = SimpleNamespace(device_indices=rows[:PAGE], keys=chain.keys(0, 1))
            assert world.linker.load("r", [transfer]) is True
        assert world.linker.cancel_queued_load("r")
        world.settle()
    finally:
        world.close()


def test_close_with_everything_in_flight(tmp_path: Path) -> None:
    """Shutdown in the middle of saves, queued loads, plans and spills ends every thread."""
    before = set(threading.enumerate())
    world = World(tmp_path, 10, policy="write_back", mode="pre")
    for _ in range(300):
        world.step()
    while world.batches:
        world.finish()
    world.save()
    world.load()
    world.plan()
    world.close()
    assert set(threading.enumerate()) <= before
    world.check_poison()
