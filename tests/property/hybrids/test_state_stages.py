"""Pipeline stages of a model with states: pages and states of each stage's own layers.

Stages are in different steps at one time. Each is a world that looks into every row and state, with
other layers, and states of another number of parts, than the other ones have. By default worlds are
short, and what is rarely seen of them is left to the long form.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.transfers import hashes_from_hex
from sglang_ext.ranks.consensus import RankDivergenceError
from sglang_ext.ranks.resume_promises import ResumeBook
from sglang_ext.tiers.store.types import ON_DISK, READY
from tests.long_form import FACTOR, count
from tests.property.worlds.hybrid_ranks import (
    RemoteStateRank,
    StateRank,
    by_its_own_part,
    by_its_own_place,
    run_alike,
)
from tests.property.worlds.rank_of_many import run_until_found, run_worlds
from tests.property.worlds.state_world import StageLayers, stages_of
from tests.property.worlds.window_world import PAGE

pytestmark = pytest.mark.usefixtures("quiet")

LOADS = count(1, 40)  # in each world
REMOTE_LOADS = count(1, 15)  # where a store swaps parts, or does not answer, fewer are resumed
ROTTING_LOADS = count(1, 4)  # four ranks have to find each body whole
SEEDS = count(1, 3)
NUM_PROMPTS = count(12, 200)  # of each seed, of which a stage loses something

TWO = stages_of("SSFS", "SFS")
THREE = stages_of("SF", "SSF", "SSSF")
FEW: tuple[dict[str, Any], ...] = ({"host_pages": 64}, {"host_pages": 40}, {"host_pages": 56})


def own_of(stages: list[StageLayers], tp_size: int = 1, **more: Any) -> list[dict[str, Any]]:
    """What is each rank's own: its stage's layers, and DRAM of another size; in order of stages."""
    ranks = [layers for layers in stages for _ in range(tp_size)]
    return [
        {"layers": layers, **FEW[number % len(FEW)], **more} for number, layers in enumerate(ranks)
    ]


# Kind of the worlds, their options, and what is each rank's own.
CASES: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "two": (StateRank, {}, own_of(TWO)),
    "two, few states": (StateRank, {"num_states": 26}, own_of(TWO)),
    "two, all is waited for": (StateRank, {"prefetch_policy": "wait_complete"}, own_of(TWO)),
    "two, no look-ahead": (StateRank, {"lookahead": "off"}, own_of(TWO)),
    "two, write back": (StateRank, {"policy": "write_back"}, own_of(TWO)),
    "two, coded on disk": (StateRank, {"coded": "disk"}, own_of(TWO)),
    "two, coded in DRAM alone": (StateRank, {"coded": "host", "disk_bytes": 0}, own_of(TWO)),
    "three": (StateRank, {}, own_of(THREE)),
    "two of two ranks": (StateRank, {}, own_of(TWO, 2)),
    "stores": (RemoteStateRank, {"behaviour": {}}, own_of(TWO)),
    "stores that swap parts": (
        RemoteStateRank, {"behaviour": {"lies": 0.1, "dies": 0.03}}, own_of(TWO),
    ),
    "stores that do not answer": (
        RemoteStateRank, {"behaviour": {}, "silent": 0.1}, own_of(THREE),
    ),
    "bodies that are bad": (
        RemoteStateRank, {"behaviour": {"lies": 0.1, "rots": True}}, own_of(TWO, 2),
    ),
}  # fmt: skip


def num_loads_of(kind: Any, options: dict[str, Any]) -> int:
    """How many prompts are to be resumed in each world."""
    if kind is StateRank:
        return LOADS
    return ROTTING_LOADS if options["behaviour"].get("rots") else REMOTE_LOADS


def num_stages_of(own: list[dict[str, Any]]) -> int:
    """P."""
    layers: StageLayers = own[0]["layers"]
    return layers.num_stages


@pytest.mark.sampled("two-*", "two, few states-*", "three-*", "stores that swap parts-*")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", CASES)
def test_stages_decide_alike_in_steps_that_lie_apart(
    name: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, options, own = CASES[name]
    ranks = run_alike(
        kind, tmp_path, monkeypatch, seed=seed, own=own,
        num_loads=num_loads_of(kind, options), num_stages=num_stages_of(own), **options,
    )  # fmt: skip
    print(name, seed, ranks[0].counts, [rank.num_lost for rank in ranks])
    if "coded" not in options:  # whose pages are so large that any state is of one part
        assert len({rank.snapshots.num_parts for rank in ranks}) > 1
    if not FACTOR:
        return  # of a few loads chance decides what they come to
    assert all(rank.num_lost for rank in ranks)
    if kind is RemoteStateRank:
        assert all(rank.store.stats()["remote_promoted_pages"] for rank in ranks)


class _LosingStage(StateRank):
    """Saves prompts, loses some of what they take, and asks for them again.

    Attributes:
        had: of each prompt, the places of which this rank has all pages and the whole state.
        resumed_at: of each prompt, the place behind which it was resumed, in pages.
    """

    had: list[set[int]]
    resumed_at: list[int]

    def begin(self, number: int, seed: int) -> None:
        """See `RankOfMany`."""
        super().begin(number, seed)
        self.had, self.resumed_at = [], []

    def may_lose(self) -> None:
        """It loses what a prompt takes, between two of them."""

    def one_round(self) -> None:
        """See `RankOfMany`."""
        for _ in range(NUM_PROMPTS):
            tokens = self.tokens()
            self.run(tokens)
            if self.disk is not None and self.rng.random() < 0.3:
                self.only_on_disk()
            else:
                self.flush()
            self._lose_of(tokens)
            self.had.append(self._places(tokens))
            self.resumed_at.append(self.run(tokens).num_loaded // PAGE)
            self.flush()

    def _entries(self, tokens: list[int]) -> tuple[Any, Any]:
        """Keys of a prompt's pages, and for each those of the parts of the state behind it."""
        pages = hashes_from_hex(self.keys(tokens, None, None))
        return pages, [self.snapshots.entries(page[None]) for page in pages]

    def _lose_of(self, tokens: list[int]) -> None:
        """A part of a state, or a page, of some place, proves damaged; often nothing."""
        pages, states = self._entries(tokens)
        space = self.identity.space_of(None, self.store)
        for keys in ([pages, *states]) if len(pages) else ():
            for key in keys:
                ticket = self.store.pin_ready(space, key[None])
                if ticket is None:
                    continue
                if self.own.random() < 0.02:
                    self.store.drop_damaged(ticket, np.zeros(1, np.int64))
                    self.num_lost += 1
                self.store.release(ticket.slots)

    def _places(self, tokens: list[int]) -> set[int]:
        pages, states = self._entries(tokens)
        space = self.identity.space_of(None, self.store)
        most = (len(tokens) - 1) // PAGE
        return {
            end
            for end in range(1, most + 1)
            if self._has(space, pages[:end]) and self._has(space, states[end - 1])
        }

    def _has(self, space: Any, keys: Any) -> bool:
        flags, _ = self.store.page_states(space, keys)
        return bool((flags & (READY | ON_DISK)).all())


PLACES = {
    "two": (own_of(TWO, host_pages=400), {"disk_bytes": 0}),
    "two, from disk": (own_of(TWO, host_pages=400), {}),
    "three": (own_of(THREE, host_pages=400), {"disk_bytes": 0}),
    "two of two ranks": (own_of(TWO, 2, host_pages=400), {}),
}


@pytest.mark.sampled("two-*", "two of two ranks-*")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", PLACES)
def test_a_prompt_is_resumed_at_the_furthest_place_that_all_stages_have_whole(
    name: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which one that is is counted out from all that each stage has, page by page."""
    own, options = PLACES[name]
    ranks = run_worlds(
        _LosingStage, tmp_path, monkeypatch, seed=seed, own=own, num_loads=1,
        num_stages=num_stages_of(own), prefetch_policy="wait_complete", **options,
    )  # fmt: skip
    had = list(zip(*(rank.had for rank in ranks), strict=True))
    expected = [max(set.intersection(*places), default=0) for places in had]
    assert [rank.resumed_at for rank in ranks] == [expected] * len(ranks)
    furthest_apart = sum(len({max(places, default=0) for places in each}) > 1 for each in had)
    print(name, seed, expected, furthest_apart, [rank.num_lost for rank in ranks])
    assert sum(map(bool, expected)) > len(expected) // 4
    assert furthest_apart > 1


@pytest.mark.sampled("by_its_own_place")
@pytest.mark.parametrize("mistaken", [by_its_own_part, by_its_own_place])
def test_a_stage_that_goes_by_its_own_store_is_found_out(
    mistaken: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ResumeBook, "_settle_one", mistaken)
    kind, options, own = CASES["stores that swap parts"]

    def one(folder: Path, seed: int) -> None:
        run_alike(
            kind, folder, monkeypatch, seed=seed, own=own, num_loads=1000, num_stages=2, **options
        )

    found = AssertionError, RankDivergenceError, threading.BrokenBarrierError
    with pytest.raises(found) as caught:
        run_until_found(one, tmp_path, monkeypatch, hangs=True)
    print(repr(caught.value)[:300])
