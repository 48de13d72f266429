"""Random queues over a slow disk: everybody is admitted, nothing is lost, nothing stays pinned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.property.queue_world import QueueWorld

STEPS = 1_200
Make = Callable[..., QueueWorld]

WORLDS: dict[str, dict[str, Any]] = {
    "write_through": {},
    "write_back": {"policy": "write_back"},
    "timeout": {"prefetch_policy": "timeout"},
    "no-disk": {"with_disk": False},
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    worlds: list[QueueWorld] = []

    def build(seed: int, **options: Any) -> QueueWorld:
        worlds.append(QueueWorld(tmp_path / str(len(worlds)), monkeypatch, seed, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


@pytest.mark.parametrize("name", WORLDS)
def test_every_request_is_admitted_and_the_books_balance(
    make: Make, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # reads fail on purpose
    world = make(sum(map(ord, name)), **WORLDS[name])
    for step in range(STEPS):
        world.step()
        if step % 250 == 249:
            world.drain()
        if step == STEPS // 2:  # too rare to be left to chance
            world.do("clear")
    stats = world.store.stats()
    print(name, world.counts, world.num_held, stats)
    for kind in ("arrive", "abort", "reorder", "retract", "clear"):
        assert world.counts.get(kind, 0) > 0, kind
    assert world.num_evictions > 0
    assert world.num_unknown_links < 0.02 * world.num_evictions
    assert stats["admitted_ready_requests"] > 0
    if name != "no-disk":
        assert world.num_held > 0
        for counter in ("promoted_pages", "deferred_plans"):
            assert stats.get(counter, 0) > 0, (counter, stats)
