"""Ranks of one server whose prompts have images that go by one number decide alike.

Each rank frees its requests at moments of its own, as interpreters do, and has a page store that is
late by its own chance and loses pages; what a row says of itself is checked as in `media_world`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.identity.media import Media, Naming, images_of
from sglang_ext.ranks.consensus import RankDivergenceError
from tests.long_form import FACTOR, count
from tests.property.media.media_world import MediaWorld
from tests.property.media.state_media_world import StateMediaWorld
from tests.property.worlds.hybrid_ranks import StateRank
from tests.property.worlds.rank_of_many import run_until_found, run_worlds
from tests.property.worlds.taint_world import Request
from tests.property.worlds.world_ranks import WorldRank

pytestmark = pytest.mark.usefixtures("quiet")

NUM_LOADS = 12
MOST_KEPT = 8
SEEDS = count(1, 10)
CASES = {
    "two": [{"host_pages": 24}, {"host_pages": 16}],
    "three": [{}, {"host_pages": 18}, {"host_pages": 36}],
}


class MediaRank(WorldRank, MediaWorld):
    """One rank."""

    num_steps = 400

    def begin(self, number: int, seed: int) -> None:
        super().begin(number, seed)
        self.number = number
        self._kept: list[Any] = []  # requests that ended, and which nobody but this rank has

    def step(self) -> None:
        """As the world's; now and then a request is given up."""
        if self.rng.random() < 0.01 and self.waiting:
            self.give_up_one()
        else:
            super().step()
        self.note()
        self.may_lose()
        if self._kept and self.own.random() < 0.3:
            del self._kept[self.own.randrange(len(self._kept))]

    def note(self) -> None:
        """What has to be alike: what was decided, and what SGLang's tree and pool came to."""
        counters = self.store.counters.snapshot()
        self.trace.append((
            dict(self.counts),
            [(req.rid, req.extra_key, images_of(req)) for req in self.waiting],
            [(req.rid, req.prefix_len, req.skip_radix_cache_insert) for req in self.running],
            [counters.get(f"{name}_requests", 0) for name in ("image", "unnamed_image")],
            counters.get("image_name_conflicts", 0),
            *self.of_sglang(),
        ))  # fmt: skip

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        admitted = super().admit(req, chunk)
        self.trace.append((admitted, req.rid, req.prefix_len))
        self.counts["loaded"] += bool(admitted and req.host_hit_length and images_of(req))
        return admitted

    def finish(self, req: Request) -> None:
        super().finish(req)
        if len(self._kept) < MOST_KEPT and self.own.random() < 0.5:
            self._kept.append(req)

    def retract(self, req: Request) -> None:
        """As the world's; SGLang puts it in the queue anew."""
        super().retract(req)
        self.waiting.remove(req)
        self.enqueue(req)


class StateMediaRank(StateRank, StateMediaWorld):
    """One rank of a model with states."""

    def note(self, kind: str) -> None:
        super().note(kind)
        counters = self.store.counters.snapshot()
        self.trace.append((
            [(req.rid, req.extra_key, images_of(req)) for req in (*self.waiting, *self.running)],
            [counters.get(f"{name}_requests", 0) for name in ("image", "unnamed_image")],
            counters.get("image_name_conflicts", 0),
        ))  # fmt: skip


@pytest.mark.sampled("two-*")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("own", CASES.values(), ids=list(CASES))
def test_ranks_decide_alike(
    own: list[dict[str, Any]], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = run_worlds(
        MediaRank, tmp_path, monkeypatch, seed=seed, num_loads=NUM_LOADS, own=own,
    )  # fmt: skip
    for rank in ranks[1:]:
        pairs = zip(ranks[0].trace, rank.trace, strict=True)
        assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
    counts = ranks[0].store.stats()
    print(ranks[0].counts, counts, [rank.num_lost for rank in ranks])
    assert not FACTOR or all(rank.num_lost for rank in ranks)  # of few steps chance decides
    for name in ("image_requests", "unnamed_image_requests", "image_name_conflicts"):
        assert counts[name], name


@pytest.mark.parametrize("seed", range(SEEDS))
def test_ranks_of_a_model_with_states_decide_alike(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [{"host_pages": 64}, {"host_pages": 40}]
    ranks = run_worlds(StateMediaRank, tmp_path, monkeypatch, seed=seed, num_loads=6, own=own)
    pairs = zip(*(rank.trace for rank in ranks), strict=True)
    assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
    counts = ranks[0].store.stats()
    print(ranks[0].counts, counts, [rank.num_lost for rank in ranks])
    assert not FACTOR or all(rank.num_lost for rank in ranks)  # of few steps chance decides
    for name in ("image_requests", "unnamed_image_requests", "saved_states"):
        assert counts[name], name


def test_ranks_that_forget_images_at_moments_of_their_own_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they would, if images were forgotten with the last request that is there."""
    first: list[threading.Thread] = []
    num_asked = 0

    def images(self: Naming) -> tuple[Media, ...]:
        nonlocal num_asked
        num_asked += threading.current_thread() in first
        forgets = threading.current_thread() in first and num_asked % 20 == 0
        return () if forgets else images_of(self._req) or ()

    class Forgetful(MediaRank):
        """One of two."""

        def one_round(self) -> None:
            if not self.number:
                first.append(threading.current_thread())
            super().one_round()

    monkeypatch.setattr(Naming, "images", property(images))

    def one(folder: Path, seed: int) -> None:
        own = CASES["two"]
        run_worlds(Forgetful, folder, monkeypatch, seed=seed, num_loads=NUM_LOADS, own=own)

    with pytest.raises(RankDivergenceError):
        run_until_found(one, tmp_path, monkeypatch)
