"""Prefill and decode servers of a model with window layers in a pool of their own.

Of window layers SGLang sends the last window alone, to rows of which it takes some more than it
fills. What the pair answers is what one server answers that has all on its device; and each byte
that the two store is one that this server stores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.hybrids.window_model import WINDOW, write_window_model
from testkit.rank_requests import ENVIRONMENT, WAYS
from tests.e2e.hier_server import PAGE, ask, by_tier, real_prompts, settled, tokens_and_logprobs
from tests.e2e.remote.prefill_decode import (
    FIRST_TOKENS,
    PATIENCE_S,
    TURN_TOKENS,
    Pair,
    converse,
    counted,
    plain_turns,
    running_pair,
)
from tests.e2e.remote.test_disaggregation_drafts import (
    ATTENTION,
    DISK_GB,
    NUM_TURNS,
    RETRACTS,
    SetUp,
    both_answered,
    one_server,
    stored,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Of whole pages, where the windows of a prompt and of all but its last token are not the same, and
# SGLang takes a page of rows more than it fills; and of one token more and less.
LENGTHS = [640, 641, 639, 768, 64, 128]


def check_bytes(pair: Pair, folder: Path, one: Path) -> None:
    """What either of the two servers stored is what the one did, where that stored it, too."""
    for server in pair.servers:
        settled(server, PATIENCE_S)
    known = stored(one / "disk")
    for name in ("prefill", "decode"):
        found = stored(folder / name / "disk")
        common = found.keys() & known.keys()
        assert len(common) > 0.9 * len(found), (name, len(common), len(found))
        differ = [key for key in common if known[key] != found[key]]
        assert not differ, (name, len(differ), len(common))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_windows_are_handed_on_and_come_back(num_ranks: int, tmp_path: Path) -> None:
    assert WINDOW % PAGE == 0
    model = write_window_model(tmp_path / "model")
    made = SetUp(ATTENTION, model, {})
    if num_ranks > 1:
        made = SetUp([*ATTENTION, *WAYS["tp"]], model, ENVIRONMENT)
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    lone = list(real_prompts(LENGTHS, seed=9))
    with one_server(made, tmp_path / "one") as server:
        turns = plain_turns(server, parts)
        answers = [ask(server, prompt, 5) for prompt in lone]
        settled(server, PATIENCE_S)
    folder = tmp_path / "pair"
    how: dict[str, Any] = {"model": made.model, "env": made.env, "disk_gb": DISK_GB}
    with running_pair(folder, made.args, **how) as pair:
        converse(pair, turns[:-1], are_planned_again=True)
        for prompt, answer in zip(lone, answers, strict=True):
            assert tokens_and_logprobs(pair.ask(prompt, 5)[1]) == tokens_and_logprobs(answer)
        check_bytes(pair, folder, tmp_path / "one")
    with running_pair(folder, made.args, **how) as pair:  # after a kill -9 of both
        last = turns[-1]
        prefilled, decoded = pair.ask(last.prompt)
        # Among them the answer before, which the decode server alone wrote.
        assert sum(by_tier(prefilled).values()) == last.num_known * PAGE
        assert tokens_and_logprobs(decoded) == last.answer
        assert not any(counted(pair.decode, "received_foreign_requests"))
        check_bytes(pair, folder, tmp_path / "one")


def test_windows_that_a_retraction_brought_back_are_not_stored(tmp_path: Path) -> None:
    """SGLang takes rows for a whole window, of which some had been given away before.

    What is stored is compared with the rows of the same tokens on a server that retracts nothing,
    in float32, so that only rows of other tokens make other values.
    """
    made = SetUp([*ATTENTION, "--dtype", "float32"], write_window_model(tmp_path / "model"), {})
    folder, texts = tmp_path / "pair", []
    how: dict[str, Any] = {"model": made.model, "disk_gb": DISK_GB, "decode_env": RETRACTS}
    with running_pair(folder, made.args, **how) as pair:
        for seed in range(10, 15):
            texts += both_answered(pair, list(real_prompts([310, 330], seed=seed)))
            if counted(pair.decode, "unsaved_retracted_requests")[0]:
                break
        assert counted(pair.decode, "unsaved_retracted_requests")[0] > 0
        settled(pair.decode, PATIENCE_S)
    with one_server(made, tmp_path / "one") as server:
        for text in texts:
            ask(server, text[:-1], 1)  # the last token has no row
        settled(server, PATIENCE_S)
    known, found = (stored(at / "disk") for at in (tmp_path / "one", folder / "decode"))
    common = found.keys() & known.keys()
    assert common
    for key in common:
        values, wanted = (np.frombuffer(each[key], np.float32) for each in (found, known))
        np.testing.assert_allclose(values, wanted, atol=2e-3, rtol=0)
