"""Conversations that overflow on two ranks of a model with MLA, one of which keeps all pages.

Answers are compared with those that one rank gives to the same prompts, cut and moved alike.

Of the long form: by default `test_truncated_ranks.py` has two ranks that each keep their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.hier_server import real_prompts
from tests.e2e.ranks.test_truncated_ranks import (
    LENGTHS,
    NUM_CHATS,
    PAGE,
    ROUNDING,
    differences,
    server_of,
    talk,
)
from tests.e2e.remote.latent_model import write_latent_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.long
def test_two_ranks_move_the_keepers_pages_as_one_moves_its_own(tmp_path: Path) -> None:
    model = write_latent_model(tmp_path / "model")
    texts = list(real_prompts([max(LENGTHS)] * NUM_CHATS, seed=31))
    found = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        with server_of(folder, num_ranks, model) as server:
            found.append(talk(server, texts))
            log = server.log()
    alone, two = found
    for name in ("dropped", "moved", "quality", "host"):
        assert two.told(name) == alone.told(name)
    assert all(num >= PAGE for turn in two.told("moved")[1:] for num in turn), two.told("moved")
    for ours, theirs in zip(two.turns, alone.turns, strict=True):
        assert max(differences(ours, theirs)) < ROUNDING
    keeper, reader = (rank["host"] for rank in two.counts["tp_ranks"])
    told = sum(num for turn in two.told("moved") for num in turn)
    assert keeper["moved_tokens"] == reader["moved_tokens"] == told
    assert reader["host_pages"] == 0
    assert "Found rank divergence" not in log
