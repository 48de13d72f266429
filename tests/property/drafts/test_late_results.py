"""Guesses that are heard of one step late, in random interleavings: none is in a stored page.

See `late_world`, and of guesses that branch `branching_world`. What was put wrong on purpose has to
be noticed: what runs for a request that ends taken for verified, the token behind the last
committed row taken for one, rows saved that were given back, a result taken before its forward was
over, and the draft's rows left out where nothing is guessed. Of branches: the accepted one left
where it was verified, and the draft's rows left as it guessed them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.long_form import count
from tests.property.drafts.branching_world import BranchingWorld
from tests.property.drafts.late_world import (
    MOST_GUESSES,
    RESERVED,
    LateRequest,
    LateWorld,
    Step,
)
from tests.property.worlds.coverage import missing, run_until_all_seen, run_until_counted
from tests.property.worlds.taint_world import PAGE, Request, Wrong

from sglang.srt import runtime_context  # isort: skip
from sglang.srt.mem_cache import allocation_sizing  # isort: skip
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # isort: skip

from sglang_ext.device.transfers import Place, hashes_from_hex

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(1, 8)  # and on until all is seen
SEEDS = count(2, 6)
TREE_SEEDS = count(1, 6)
KEYS = {"tokens": False, "pairs": True}
TREE_KEYS = {**KEYS, "pairs-of-latent-rows": True}
STORED = ("saved_pages", "loaded_pages", "promoted_pages", "evicted_pages")
HAPPENED = (
    *("ends with wrong guesses in flight", "ends while the device is behind"),
    *("retracts in flight", "abort"),
)
HAPPENED_IN_CHAINS = ("no guesses", "guesses")


class _RunsOn(LateWorld):
    """What was guessed for a request that ends counts as verified."""

    def end(self, req: LateRequest) -> None:
        launch = self.in_flight(req)
        if launch is not None:
            at = next(at for at, each in enumerate(launch.reqs) if each is req)
            req.tokens, req.finished_len = launch.guessed[at], None
            req.kv.kv_committed_len = len(req.tokens)
        super().end(req)


class _OneMore(LateWorld):
    """The token behind the last committed row counts as committed."""

    def end(self, req: LateRequest) -> None:
        req.finished_len = None
        req.kv.kv_committed_len += 1
        super().end(req)


class _SavesWhatIsGivenBack(LateWorld):
    """The pages of a request that is retracted are saved, and not kept until they are."""

    def retract(self, req: Request) -> None:
        keys = self.keys(req.tokens[: req.kv.kv_committed_len])
        rows, linker = self.rows_of(req, 0, len(keys) * PAGE), self.cache.hier_linker
        super().retract(req)
        if keys:
            ancestors = hashes_from_hex([])
            place = Place(self.space, 0, ancestors, np.zeros(len(keys), np.uint8))
            with linker.placed(place):
                linker.offload([PoolTransfer(name=PoolName.KV, device_indices=rows, keys=keys)])


class _TooEarly(LateWorld):
    """A result is processed at once, whatever the device has done of it."""

    def await_result(self) -> None:
        pass

    def launch(self, *args: Any) -> None:
        super().launch(*args)
        while self.launched and not args[0].is_prompt:
            self.process()

    def process(self) -> None:
        if self.launched:
            super().process()


class _LeavesTheDraftOut(LateWorld):
    """Where nothing is guessed the draft's rows of what is answered are not written."""

    def guess(self, req: LateRequest) -> tuple[list[int], list[int], list[Step]]:
        num_known = len(req.known)
        new, guessed, steps = super().guess(req)
        if len(guessed) == num_known:
            steps[-1] = lambda: None
        return new, guessed, steps


class _TooEarlyInTrees(_TooEarly, BranchingWorld):
    """The same of guesses that branch: their rows may be moved later."""


class _StaysInItsBranch(BranchingWorld):
    """What was accepted is not moved."""

    def move_accepted(self, rows: torch.Tensor, path: list[int]) -> None:
        pass


class _StaysGuessed(BranchingWorld):
    """The draft's rows are not computed anew from what was accepted."""

    def extend(self, rows: torch.Tensor, known: list[int], start: int) -> None:
        pass


MISTAKES = {
    "runs-on": _RunsOn,
    "one-more": _OneMore,
    "given-back": _SavesWhatIsGivenBack,
    "too-early": _TooEarly,
}
MISTAKES_IN_STEPS = {"leaves-the-draft-out": _LeavesTheDraftOut}
MISTAKES_IN_TREES = {
    "too-early-in-trees": _TooEarlyInTrees,
    "stays-in-its-branch": _StaysInItsBranch,
    "stays-guessed": _StaysGuessed,
}
# A row of a draft knows the token behind it, so with keys of pairs one more has no page of its own.
NOT_WITH_PAIRS = "one-more"
CASES = [
    (mistake, keys)
    for mistake in MISTAKES
    for keys in KEYS
    if (mistake, keys) != (NOT_WITH_PAIRS, "pairs")
]
CASES += [(mistake, "pairs") for mistake in (*MISTAKES_IN_STEPS, *MISTAKES_IN_TREES)]


@pytest.mark.parametrize("num_steps", [0, 1, MOST_GUESSES])
def test_rows_are_reserved_for_the_longest_chain_whatever_the_next_one_is(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `LateWorld` reserves is what SGLang does, which adapts the length behind that."""
    spec = SimpleNamespace(
        speculative_algorithm="EAGLE",
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_steps + 1,
        max_speculative_num_draft_tokens=MOST_GUESSES + 1,
        speculative_eagle_topk=1,
    )
    schedule = SimpleNamespace(page_size=PAGE)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_schedule", lambda: schedule)
    monkeypatch.setattr(allocation_sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    assert allocation_sizing.get_alloc_reserve_per_decode() == RESERVED


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("keys", KEYS)
def test_no_guess_that_was_not_heard_of_is_in_a_stored_page(
    keys: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(LateWorld(tmp_path, monkeypatch, seed, of_pairs=KEYS[keys]), *HAPPENED_IN_CHAINS)


@pytest.mark.sampled("pairs-?", "pairs-of-latent-rows-0")
@pytest.mark.parametrize("seed", range(TREE_SEEDS))
@pytest.mark.parametrize("keys", TREE_KEYS)
def test_of_guesses_that_branch_only_the_accepted_ones_are_in_stored_pages(
    keys: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = BranchingWorld(tmp_path, monkeypatch, seed, of_pairs=TREE_KEYS[keys])
    world.moves_latent_rows = keys not in KEYS
    run(world, "moves")


def run(world: LateWorld, *more: str) -> None:
    """Rounds until all was seen, `more` among it."""

    def one_round() -> None:
        for _ in range(500):
            world.step()
        world.drain()

    def unseen() -> list[str]:
        few = ["rejected guesses"] if world.num_rejected <= 100 else []
        return few + missing({**world.store.stats(), **world.counts}, (*STORED, *HAPPENED, *more))

    try:
        run_until_all_seen(one_round, unseen, num_rounds=ROUNDS)
        print(world.num_rejected, world.counts, world.store.stats())
    finally:
        world.close()
    assert world.num_rejected > 100


@pytest.mark.parametrize(("mistake", "keys"), CASES, ids=["-".join(case) for case in CASES])
def test_a_mistake_is_noticed(
    mistake: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {**MISTAKES, **MISTAKES_IN_STEPS, **MISTAKES_IN_TREES}
    world = kinds[mistake](tmp_path, monkeypatch, 0, of_pairs=KEYS[keys])
    try:
        with pytest.raises(Wrong):
            run_until_counted(world, ("saved_pages",), num_rounds=10)
    finally:
        world.close()
