"""Random queues over a slow disk: everybody is admitted, nothing is lost, nothing stays pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.long_form import count
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.queue_world import QueueWorld

pytestmark = pytest.mark.usefixtures("scheduler_waits", "quiet")

ROUNDS = count(1, 5)  # and on until all is seen
SEEDS = count(1, 20)  # so many queues of each kind
Make = Callable[..., QueueWorld]

WORLDS: dict[str, dict[str, Any]] = {
    "write_through": {},
    "write_back": {"policy": "write_back"},
    "auto-full": {"policy": "auto", "disk_bytes": 256 << 10},
    "timeout": {"prefetch_policy": "timeout"},
    "cost": {"prefetch_policy": "cost", "policy": "auto", "disk_bytes": 256 << 10},
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


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", WORLDS)
def test_every_request_is_admitted_and_the_books_balance(make: Make, name: str, seed: int) -> None:
    world = make(1000 * seed + sum(map(ord, name)), **WORLDS[name])

    def one_round() -> None:
        for _ in range(250):
            world.step()
        world.drain()
        if "clear" not in world.counts:  # too rare to be left to chance
            world.do("clear")

    shown = [
        "arrive", "abort", "reorder", "retract", "clear", "evicted", "admitted_ready_requests",
        "reused",
    ]  # fmt: skip
    if name != "no-disk":
        shown += ["held", "promoted_pages", "deferred_plans"]

    if name == "cost":
        shown += ["cost_load", "cost_recompute", "cost_gave_up", "cost_dram_left_pages"]

    def unseen() -> list[str]:
        seen = {"evicted": world.num_evictions, "held": world.num_held, "reused": world.num_reused}
        return missing({**world.store.stats(), **world.counts, **seen}, tuple(shown))

    run_until_all_seen(one_round, unseen, num_rounds=ROUNDS)
    print(name, world.counts, world.num_held, world.store.stats())
    assert world.num_unknown_links < 0.02 * world.num_evictions
