"""Exact, truncated, forked and quoting prompts at random: nobody meets KV that is not theirs.

See `truncation_world`. Every request is compared with the brute-force model at every forward,
insert and load. `HIER_KV_PROPERTY_CASES` sets the number of requests; CI runs fewer.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.property.truncation_world import TruncationWorld, world

CASES = int(os.environ.get("HIER_KV_PROPERTY_CASES", "1200"))
SEEDS = 3


@pytest.mark.parametrize("seed", range(SEEDS + 1))
def test_nobody_meets_kv_that_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    core = "rust" if seed == SEEDS else "python"
    cases = CASES // (SEEDS + 1)
    served: TruncationWorld = world(tmp_path, monkeypatch, seed, core=core)
    try:
        while served.num_served < cases:
            for _ in range(400):
                served.step()
            served.drain()
        stats = served.store.stats()
        print(
            served.num_quoting,
            served.num_served,
            served.num_cut,
            served.num_exact_cut,
            served.counts,
            stats,
        )
    finally:
        served.close()
    assert served.num_cut > cases // 8
    assert served.num_exact_cut > 0
    assert served.num_quoting > 0
    assert stats["moved_tokens"] > cases // 4, stats
    assert stats["aliased_pages"] > 0, stats
