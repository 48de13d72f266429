"""Requests with images of which several go by one number, in random interleavings.

See `media_world`: at every forward and insert it compares the rows that a request attends to with
what its own tokens and images are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.long_form import FACTOR, count, either
from tests.property.media.media_world import MediaWorld
from tests.property.media.pairs_media_world import PairsMediaWorld
from tests.property.worlds.coverage import run_until_counted

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(2, 8)  # and on until all is seen
Make = Callable[..., MediaWorld]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    worlds: list[MediaWorld] = []

    def build(seed: int, kind: type[MediaWorld], **options: Any) -> MediaWorld:
        worlds.append(kind(tmp_path / str(len(worlds)), monkeypatch, seed, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


class WithoutAxes(MediaWorld):
    """Of a model whose tokens lie where the prompt has them."""

    has_axes = False


# By default one with axes, one without and one of pairs; each policy at least once.
SEEDS = either([0, 5, 10], list(range(20 * FACTOR)))
KINDS = (MediaWorld, WithoutAxes, PairsMediaWorld)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_request_attends_to_another_image(make: Make, seed: int) -> None:
    world = make(
        seed, kind=KINDS[seed // 5 % len(KINDS)], policy=("write_through", "write_back")[seed % 2]
    )

    shown = (
        "image_requests",
        "unnamed_image_requests",
        "loaded_pages",
        "image_name_conflicts",
    )
    run_until_counted(world, shown, num_rounds=ROUNDS)
