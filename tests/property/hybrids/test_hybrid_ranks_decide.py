"""Several ranks of a hybrid decide alike, and go on from one place that all of them have.

By default worlds are short, and what is rarely seen of them is left to the long form.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.ranks.consensus import RankDivergenceError
from sglang_ext.ranks.resume_promises import ResumeBook
from tests.long_form import FACTOR, count
from tests.property.worlds.hybrid_ranks import (
    RemoteStateRank,
    RemoteWindowRank,
    StateRank,
    WindowRank,
    by_its_own_part,
    by_its_own_place,
    by_its_own_time,
    run_alike,
)
from tests.property.worlds.rank_of_many import run_until_found

pytestmark = pytest.mark.usefixtures("quiet")

LOADS = count(1, 40)  # in each world
SEEDS = count(1, 3)

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
    "bodies that are bad": ({"window": 6, "behaviour": {"lies": 0.1, "rots": True}}, _SMALL),
    "stores of two shapes": (
        {"window": 6, "two_shapes": True, "behaviour": {"lies": 0.05}}, [*_SMALL, {}],
    ),
}  # fmt: skip
STATES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "few states, other sizes": ({"num_states": 26}, [{"host_pages": 64}, {"host_pages": 40}]),
    "all is waited for": ({"prefetch_policy": "wait_complete"}, [{}, {}, {}]),
}
_FEW: list[dict[str, Any]] = [{"host_pages": 48}, {"host_pages": 40}]
REMOTE_STATES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "honest stores": ({"behaviour": {}}, [*_FEW, {}]),
    "stores that swap parts": ({"behaviour": {"lies": 0.1, "dies": 0.03}}, _FEW),
    "stores that do not answer": ({"behaviour": {}, "silent": 0.1}, _FEW),
    "bodies that are bad": ({"behaviour": {"lies": 0.1, "rots": True}}, _FEW),
    "stores that swap coded parts": (
        {"coded": "remote", "behaviour": {"lies": 0.1, "dies": 0.03}}, _FEW,
    ),
}  # fmt: skip
CASES: list[tuple[Any, ...]] = [(WindowRank, name, *case) for name, case in WINDOWS.items()]
CASES += [(RemoteWindowRank, name, *case) for name, case in REMOTE.items()]
CASES += [(StateRank, name, *case) for name, case in STATES.items()]
CASES += [(RemoteStateRank, name, *case) for name, case in REMOTE_STATES.items()]


@pytest.mark.sampled(
    "WindowRank-two shapes-*",
    "RemoteWindowRank-stores that swap parts-*",
    "RemoteWindowRank-stores that do not answer-*",
    "StateRank-few*",
    "RemoteStateRank-bodies that are bad-*",
)
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
) -> None:
    ranks = run_alike(kind, tmp_path, monkeypatch, seed=seed, own=own, num_loads=LOADS, **options)
    print(name, seed, ranks[0].counts, [rank.num_lost for rank in ranks])
    if not FACTOR:
        return  # of a few loads chance decides what they come to
    assert all(rank.num_lost for rank in ranks)
    if kind in (RemoteWindowRank, RemoteStateRank):
        assert all(rank.store.stats()["remote_promoted_pages"] for rank in ranks)
        assert not options.get("silent") or all(rank.num_unanswered for rank in ranks)


@pytest.mark.sampled("by_its_own_place")
@pytest.mark.parametrize("mistaken", [by_its_own_part, by_its_own_place, by_its_own_time])
def test_a_rank_that_goes_by_its_own_store_is_found_out(
    mistaken: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ResumeBook, "_settle_one", mistaken)
    options, own = REMOTE_STATES["stores that swap parts"]

    def one(folder: Path, seed: int) -> None:
        run_alike(
            RemoteStateRank, folder, monkeypatch, seed=seed, own=own, num_loads=1000, **options
        )

    found = AssertionError, RankDivergenceError, threading.BrokenBarrierError
    with pytest.raises(found) as caught:
        run_until_found(one, tmp_path, monkeypatch, hangs=True)
    print(repr(caught.value)[:300])
