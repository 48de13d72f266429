"""Ranks whose conversations are cut, or quoted, decide alike, and move the same KV alike.

By default two worlds, of few loads; the long form has more of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.admission.searches import AgreedSearch
from sglang_ext.device.copier import PageCopier
from sglang_ext.ranks.consensus import Consensus, RankDivergenceError
from sglang_ext.truncation.agreed_quotes import AgreedQuotes
from tests.long_form import FACTOR, count
from tests.property.worlds.rank_of_many import run_until_found, run_worlds
from tests.property.worlds.taint_world import Wrong
from tests.property.worlds.truncation_ranks import TruncationRank

pytestmark = pytest.mark.usefixtures("quiet")

LOADS = count(2, 60)  # with moved tokens
QUOTES = count(1, 20)  # among these
SEEDS = count(1, 3)

SMALL = {"device_pages": 100}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "other sizes": ({"lossy": False}, [{"host_pages": 300}, {"host_pages": 90}]),
    "three, lossy": ({"lossy": True}, [{}, {"host_pages": 120}, {}]),
    "all is waited for": ({"prefetch_policy": "wait_complete", "lossy": False}, [{}, {}]),
}


def run(
    folder: Path, patch: pytest.MonkeyPatch, name: str, seed: int, num_loads: int = LOADS
) -> list[TruncationRank]:
    options, own = CASES[name]
    options = {"host_pages": 200, "device_pages": 100, **options}
    own = [{**options, **each} for each in own]
    return run_worlds(
        TruncationRank, folder, patch, seed=seed, num_loads=num_loads, num_quotes=QUOTES, own=own
    )


def run_mistaken(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """See `run_until_found`."""

    def one(folder: Path, seed: int) -> None:
        run(folder, patch, "other sizes", seed, num_loads=1000)

    run_until_found(one, folder, patch)


def searched(rank: TruncationRank) -> dict[str, int]:
    """What became of a rank's searches; the same on all."""
    names = ("quoting_requests", "quote_search_disagreements", "quote_search_timeouts")
    return {name: rank.store.stats().get(name, 0) for name in names}


@pytest.mark.sampled("three, lossy-0")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", list(CASES))
def test_ranks_cut_alike_and_move_the_same(
    name: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = run(tmp_path, monkeypatch, name, seed)
    for rank in ranks[1:]:
        pairs = zip(ranks[0].trace, rank.trace, strict=True)
        assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
    moved = {rank.store.stats()["moved_tokens"] for rank in ranks}
    searches = [searched(rank) for rank in ranks]
    print(name, seed, ranks[0].counts, moved, [rank.num_lost for rank in ranks], searches)
    assert all(each == searches[0] for each in searches)
    assert searches[0]["quoting_requests"] >= QUOTES
    assert len(moved) == 1
    assert moved.pop() > 0
    assert not FACTOR or all(rank.num_lost for rank in ranks)  # of few steps chance decides


def test_ranks_that_compose_of_what_they_have_themselves_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reduction ranks make a prompt of other pages; none loads what others do not."""

    def alone(self: Consensus, flags: np.ndarray) -> np.ndarray:
        return flags

    monkeypatch.setattr(Consensus, "everywhere", alone)
    with pytest.raises(RankDivergenceError, match="do not hold the same"):
        run_mistaken(tmp_path, monkeypatch)


def test_ranks_that_take_what_they_find_themselves_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that one rank alone lacks: without the digests the others go on without it."""
    settle = AgreedQuotes.settle

    def alone(self: AgreedQuotes, agreed: Sequence[AgreedSearch]) -> None:
        settle(self, [one._replace(digest=one.digest or 1) for one in agreed])

    monkeypatch.setattr(AgreedQuotes, "settle", alone)
    with pytest.raises(RankDivergenceError, match="do not hold the same"):
        run_mistaken(tmp_path, monkeypatch)


def test_k_that_was_moved_to_another_place_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepares = PageCopier.prepare_runs

    def elsewhere(self: PageCopier, runs: Any, rows: Any, position: int) -> Any:
        return prepares(self, runs, rows, position + 1)

    monkeypatch.setattr(PageCopier, "prepare_runs", elsewhere)
    with pytest.raises(Wrong, match="is not that of its positions"):
        run_mistaken(tmp_path, monkeypatch)
