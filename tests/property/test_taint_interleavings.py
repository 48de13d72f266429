"""Lossy and exact requests in random interleavings: what is said to be exact is exact.

See `taint_world`. The checks are in the world: at every forward, insert and load it compares what
the plugin says of a page with the page.

By default two worlds; the long form has all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.long_form import count
from tests.property.worlds.coverage import run_until_counted
from tests.property.worlds.taint_world import World

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(2, 8)  # and on until all is seen
Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    worlds: list[World] = []

    def build(seed: int = 1, **options: Any) -> World:
        worlds.append(World(tmp_path / str(len(worlds)), monkeypatch, seed, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


@pytest.mark.sampled("python-1", "rust-4")
@pytest.mark.parametrize(
    ("core", "seed"), [("python", 0), ("python", 1), ("python", 2), ("python", 3), ("rust", 4)]
)
def test_what_is_said_to_be_exact_is(make: Make, core: str, seed: int) -> None:
    policy = ("write_through", "write_back")[seed % 2]
    world = make(seed, core=core, policy=policy, raw_share=(0.0, 0.3)[seed // 2 % 2])

    shown = (
        "saved_lossy_pages", "loaded_lossy_pages", "replaced_pages", "device_replaced_pages",
    )  # fmt: skip
    run_until_counted(world, shown, num_rounds=ROUNDS)
