"""Guesses that are rejected where layers have windows: none is in a stored page of either part.

A verification writes rows of both pools for all tokens that were guessed, and of the draft's, which
are the full layers'. Keys are of pairs, so where a prompt is resumed is a token further on than
without a draft. See `test_rejected_drafts.py` of what is compared. Several ranks, each with stores
of its own, go on from one place, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.long_form import FACTOR, count
from tests.property.drafts.guesses import Guessing
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.hybrid_ranks import RemoteWindowRank, WindowRank, run_alike
from tests.property.worlds.window_world import Request, WindowWorld, WrongKVError

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(1, 20)  # of 400 steps, in each world, and on until all is seen
SEEDS = count(1, 3)
SHOWN = ("loaded_pages", "saved_windows", "evicted_pages", "restored_pages", "promoted_pages")

WORLDS: dict[str, dict[str, Any]] = {
    "no multiple of the page": {"window": 6},
}


class DraftingWindows(Guessing, WindowWorld):
    """Decodes by guesses, with a draft's layers."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        super().__init__(folder, patch, seed, drafts=True, **options)

    def slide(self, req: Request) -> None:
        """As `maybe_evict_swa` does before a verification, behind which a token is known."""
        if req.num_decoded:
            self.cache.evict_sliding_windows(req, req.prefix_len)
        if req.num_decoded >= self.window:
            self.cache.release_swa_prefix_lock(req)
        req.num_decoded += 1


class DraftingRank(DraftingWindows, WindowRank):
    """One of several ranks, with a disk."""


class RemoteDraftingRank(DraftingWindows, RemoteWindowRank):
    """One of several ranks, with a remote store."""


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., DraftingWindows]:
    def one(seed: int, kind: type[DraftingWindows] = DraftingWindows, **options: Any) -> Any:
        world = kind(tmp_path, monkeypatch, seed, **options)
        request.addfinalizer(world.close)
        return world

    return one


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", WORLDS)
def test_no_rejected_guess_is_in_a_stored_page_of_either_part(
    make: Callable[..., DraftingWindows], name: str, seed: int
) -> None:
    world = make(seed, **WORLDS[name])

    def unseen() -> list[str]:
        few = ["rejected guesses"] if world.num_rejected < 50 else []
        return few + missing(world.store.stats(), SHOWN)

    run_until_all_seen(world.one_round, unseen, num_rounds=ROUNDS)
    print(name, seed, world.num_rejected, world.counts, world.store.stats())


class _KeepsRejected(DraftingWindows):
    keeps_rejected = True


def test_a_rejected_guess_that_is_taken_for_verified_is_noticed(
    make: Callable[..., DraftingWindows],
) -> None:
    world = make(0, _KeepsRejected)
    with pytest.raises(WrongKVError):
        run_until_all_seen(world.one_round, lambda: ["a mistake"], num_rounds=10)


RANKS: list[tuple[Any, dict[str, Any]]] = [
    (DraftingRank, {"window": 6}),
    (RemoteDraftingRank, {"window": 7, "behaviour": {"lies": 0.1, "dies": 0.03}}),
]


@pytest.mark.sampled("RemoteDraftingRank-*")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(("kind", "options"), RANKS)
@pytest.mark.usefixtures("quiet")
def test_ranks_that_guess_go_on_from_one_place(
    kind: Any,
    options: dict[str, Any],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each loses pages of its own: all rows that a request attends to are its own."""
    own: list[dict[str, Any]] = [{"host_pages": 30}, {"host_pages": 22}]
    ranks = run_alike(
        kind, tmp_path, monkeypatch, seed=seed, own=own, num_loads=count(2, 40), **options
    )
    print(seed, [(rank.counts, rank.num_lost, rank.num_rejected) for rank in ranks])
    assert ranks[0].num_rejected == ranks[1].num_rejected
    if FACTOR:  # of a few loads chance decides what they come to
        assert all(rank.num_lost and rank.num_rejected for rank in ranks)
