"""Two requests of one id, which several tokenizer workers let through: each has its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.property.worlds.taint_world import PAGE, Request, World

NUM_PAGES = 4


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Exact pages, in DRAM."""
    world = World(tmp_path, monkeypatch, 1, lossy=False, with_disk=False)
    yield world
    world.close()


def prompt(first: int) -> list[int]:
    """Whole pages, and a token behind them."""
    return [first + at % 30 for at in range(NUM_PAGES * PAGE + 1)]


def test_one_of_them_loads_in_a_batch(world: World) -> None:
    """Both are admitted to one batch, and both prompts are in DRAM; rows go by the id."""
    for first in (1, 60):
        world.run(prompt(first))
    world.cache.reset()
    world.allocator.clear()
    both = [Request("same", prompt(first), 0, exact=False) for first in (1, 60)]
    for req in both:
        world.enqueue(req)
    for req in both:
        world.match(req)
        req.lock = world.cache.lock(req.last_node)
        if world.cache.linker.has_hit(req.rid):
            loaded, req.last_node = world.cache.linker.load_back(req)
            req.prefix_len += loaded
    prefixes = [world.cache.prefix_device_indices(req) for req in both]
    index = world.cache.ready_to_load_host_cache()
    world.cache.hier_linker.layer_done_counter.set_consumer(index)
    assert not world.cache.finish_external_linker_loads(both)
    world.cache.hier_linker.layer_done_counter.set_consumer(-1)
    assert [len(prefix) for prefix in prefixes] == [NUM_PAGES * PAGE, 0]
    again = both[1]
    world.match(again)  # in the next batch
    assert again.host_hit_length == NUM_PAGES * PAGE
