"""Guesses that are rejected, in random interleavings: none of them is ever in a stored page.

A verification writes rows for all tokens that were guessed; those of the rejected ones stay in the
request's own rows, behind what is committed, until others are written there. A row says which
tokens are up to it (and, with keys of pairs, which one follows), so each page in DRAM is compared
with the tokens that its key is of, and each row that a request attends to with the request's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.tiers.records.record import parse_header
from tests.long_form import count
from tests.property.drafts.guesses import Guessing
from tests.property.test_pairs_interleavings import PairsWorld
from tests.property.worlds.coverage import run_until_counted
from tests.property.worlds.taint_world import (
    HEADS,
    PAGE,
    Request,
    TextScheduler,
    World,
    Wrong,
    page_prints,
    page_rows,
    ready_slots,
)

ROUNDS = count(1, 20)
SEEDS = count(1, 4)
MOST_NEW = 20
_NUM_PRINTS = 4


class _Drafting(Guessing, World):
    """Decodes by guesses.

    Attributes:
        made: of each page that was inserted, the tokens up to its end, by its key.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        self.made: dict[bytes, list[int]] = {}
        super().__init__(folder, patch, seed, lossy=False, **options)
        self.cache.bind_scheduler(TextScheduler())

    def arrive(
        self,
        tokens: list[int] | None = None,
        *,
        exact: bool | None = None,
        num_new: int = MOST_NEW,
    ) -> Request:
        """See `World`; answers are long."""
        return super().arrive(tokens, exact=exact, num_new=num_new)

    def insert(self, req: Request, up_to: int) -> None:
        """See `World`."""
        for page, key in enumerate(self.keys(req.tokens[:up_to])):
            self.made[bytes.fromhex(key)] = req.tokens[: (page + 1) * PAGE + self.of_pairs]
        super().insert(req, up_to)

    def check_store(self) -> None:
        """See `World`; and every page in DRAM is of the tokens that its key is of."""
        super().check_store()
        for slot in ready_slots(self.store):
            meta, _ = parse_header(slot)
            tokens, end = self.made[meta.page_hash], meta.position + PAGE
            wanted = self.row_values(tokens, end)[-PAGE:, None].expand(PAGE, HEADS, _NUM_PRINTS)
            for values in page_rows(slot, self.layout):
                found = page_prints(values, _NUM_PRINTS)
                if not torch.equal(found, wanted):
                    raise Wrong(f"a stored page has rows of other tokens than {tokens}")


class _DraftingPairs(_Drafting, PairsWorld):
    """With a draft whose KV of a token depends on the next one."""


WORLDS = {"tokens": _Drafting, "pairs": _DraftingPairs}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("keys", WORLDS)
def test_no_rejected_guess_is_in_a_stored_page(
    keys: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WORLDS[keys](tmp_path, monkeypatch, seed, of_pairs=keys == "pairs")
    try:
        shown = ("saved_pages", "loaded_pages", "promoted_pages", "evicted_pages")
        run_until_counted(world, shown, num_rounds=ROUNDS)
    finally:
        world.close()
    assert world.num_rejected > 100


@pytest.mark.parametrize("keys", WORLDS)
def test_a_rejected_guess_that_is_taken_for_committed_is_noticed(
    keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WORLDS[keys](tmp_path, monkeypatch, 0, of_pairs=keys == "pairs")
    world.keeps_rejected = True
    try:
        with pytest.raises(Wrong, match=r"another's|other tokens"):
            run_until_counted(world, ("saved_pages",), num_rounds=ROUNDS)
    finally:
        world.close()
