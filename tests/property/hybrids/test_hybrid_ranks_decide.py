"""Several ranks of a hybrid decide alike, and go on from one place that all of them have."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.property.worlds.hybrid_ranks import RemoteWindowRank, StateRank, WindowRank
from tests.property.worlds.rank_of_many import run_worlds

LOADS = int(os.environ.get("HIER_KV_HYBRID_RANK_LOADS", "4"))  # in each world
SEEDS = int(os.environ.get("HIER_KV_HYBRID_RANK_SEEDS", "1"))

WINDOWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "other sizes": ({"window": 6}, [{"host_pages": 48}, {"host_pages": 28}]),
    "three, no look-ahead": ({"window": 5, "lookahead": "off"}, [{}, {"host_pages": 32}, {}]),
    "all is waited for": ({"window": 7, "prefetch_policy": "wait_complete"}, [{}, {}]),
    "two shapes": ({"window": 6, "two_shapes": True}, [{"host_pages": 56}, {"host_pages": 32}]),
}
# With a remote store for each.
_SMALL: list[dict[str, Any]] = [{"host_pages": 30}, {"host_pages": 22}]
REMOTE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "honest stores": ({"window": 6, "behaviour": {}}, _SMALL),
    "stores that swap parts": ({"window": 7, "behaviour": {"lies": 0.1, "dies": 0.03}}, _SMALL),
    "stores that do not answer": ({"window": 6, "behaviour": {}, "silent": 0.1}, _SMALL),
    "stores of two shapes": (
        {"window": 6, "two_shapes": True, "behaviour": {"lies": 0.05}}, [*_SMALL, {}],
    ),
}  # fmt: skip
STATES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "few states, other sizes": ({"num_states": 26}, [{"host_pages": 64}, {"host_pages": 40}]),
    "all is waited for": ({"prefetch_policy": "wait_complete"}, [{}, {}, {}]),
}
CASES: list[tuple[Any, ...]] = [(WindowRank, name, *case) for name, case in WINDOWS.items()]
CASES += [(RemoteWindowRank, name, *case) for name, case in REMOTE.items()]
CASES += [(StateRank, name, *case) for name, case in STATES.items()]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(("kind", "name", "options", "own"), CASES)
def test_ranks_decide_alike(
    kind: Any,
    name: str,
    options: dict[str, Any],
    own: list[dict[str, Any]],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # pages that are made to be lost
    ranks = run_worlds(kind, tmp_path, monkeypatch, seed=seed, num_loads=LOADS, own=own, **options)
    for rank in ranks[1:]:
        pairs = zip(ranks[0].trace, rank.trace, strict=True)
        assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
    print(name, seed, ranks[0].counts, [rank.num_lost for rank in ranks])
    assert all(rank.num_lost for rank in ranks)
    if kind is RemoteWindowRank:
        assert all(rank.store.stats()["remote_promoted_pages"] for rank in ranks)
        assert not options.get("silent") or all(rank.num_unanswered for rank in ranks)
