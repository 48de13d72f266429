from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.records.seals import CHECKSUMS

OpenTier = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    """Opens disk tiers on one folder; those left open are closed when the test ends."""
    opened: list[DiskTier] = []

    def open_one(
        *, seals: Any = CHECKSUMS, io: Any = None, failpoints: Any = None, **settings: Any
    ) -> DiskTier:
        defaults: dict[str, Any] = {
            "path": tmp_path / "disk",
            "max_bytes": 64 << 20,
            "min_free_bytes": 0,
            "segment_bytes": 256 << 10,
        }
        tier = DiskTier(
            DiskConfig(**(defaults | settings)), seals=seals, io=io, failpoints=failpoints
        )
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.close()
