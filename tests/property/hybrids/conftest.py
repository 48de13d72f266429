"""Worlds of hybrids, closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.property.worlds.window_world import WindowWorld

Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Makes a world of a kind, by its seed and options."""
    worlds: list[WindowWorld] = []

    def one(kind: type[WindowWorld], seed: int = 1, **options: Any) -> WindowWorld:
        worlds.append(kind(tmp_path / str(len(worlds)), monkeypatch, seed, **options))
        return worlds[-1]

    yield one
    for world in worlds:
        world.close()
