"""What a request left in DRAM is counted as of its last match, through the real tree and linker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.tiers.policy.cost_model import CostModel
from tests.property.worlds.taint_world import PAGE, Request, World

NUM_PAGES = 8
PROMPT = [1 + at % 90 for at in range(NUM_PAGES * PAGE)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Computing is fast there, and loading is slow."""
    cost = CostModel(unmeasured_wait_s=0.2)
    world = World(
        tmp_path, monkeypatch, 1, lossy=False, with_disk=False, prefetch_policy="cost", cost=cost
    )
    for num in (1, 4, 16, 4, 1) * 2:
        cost.note_prefill([(num * PAGE, 0)], num * PAGE * 1e-3)
        cost.note_load(num * world.layout.kv_bytes, num * 1.0)
    yield world
    world.close()


def run(world: World, req: Request) -> None:
    assert world.admit(req)
    while req in world.running:
        world.go_on(req)


@pytest.mark.parametrize("num_more", [1, 3])
def test_what_others_computed_meanwhile_was_not_left(world: World, num_more: int) -> None:
    """The last match finds every page on the device, with a part of a page behind them or none."""
    world.run([*PROMPT, 91])
    world.cache.reset()
    world.allocator.clear()
    first, second = (
        world.arrive([*PROMPT, *range(91, 91 + num_more)], exact=False, num_new=0) for _ in range(2)
    )
    world.match(first)
    run(world, second)
    counts = world.store.counters.snapshot()
    assert counts["cost_dram_left_requests"] == 1
    num_left = counts["cost_dram_left_pages"]
    assert num_left > 0
    run(world, first)
    assert first.prefix_len == len(first.tokens)
    counts = world.store.counters.snapshot()
    assert (counts["cost_dram_left_requests"], counts["cost_dram_left_pages"]) == (1, num_left)
