"""Worlds of requests with images, closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.property.media.media_world import MediaWorld

Make = Callable[..., MediaWorld]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a world, by its options."""
    worlds: list[MediaWorld] = []

    def build(**options: Any) -> MediaWorld:
        options = {"timeout_ms": 300_000.0, **options}  # what is on disk is waited for
        worlds.append(MediaWorld(tmp_path / str(len(worlds)), monkeypatch, 1, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()
