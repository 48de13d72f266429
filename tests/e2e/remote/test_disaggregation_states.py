"""Prefill and decode servers of a model with a state a sequence.

SGLang sends the state behind the prompt alone, and none of those that the prefill server keeps in
its tree. A decode server keeps those that its own decode comes to. What the pair answers is what
one server answers that has all on its device; and each byte that the two store, states among them,
is one that this server stores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.states.snapshots import part_hashes
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
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
    Stored,
    both_answered,
    one_server,
    stored,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KIND = STATE_MODELS["qwen3_next"]
# An answer is as long as a third of a page: a state at each page of it.
ARGS = [*ATTENTION, "--dtype", KIND.dtype_name, "--mamba-track-interval", str(PAGE)]
ARGS += ["--max-running-requests", "6", "--max-mamba-cache-size", "60"]
ENV = {"SGLANG_MAMBA_CONV_DTYPE": KIND.dtype_name}
# The long form has two ranks, too, and retractions.
IS_LONG = "HIER_KV_STATE_HANDOVERS" in os.environ
LENGTHS = [640, 641, 639, 64, 100]


def set_up(folder: Path, num_ranks: int) -> SetUp:
    model = write_state_model(folder / "model", "qwen3_next")
    if num_ranks > 1:
        return SetUp([*ARGS, *WAYS["tp"]], model, {**ENV, **ENVIRONMENT})
    return SetUp(ARGS, model, ENV)


def num_states(found: Stored) -> int:
    """Of how many states the first two parts are among what is stored."""
    num = 0
    for rank, key in found:
        page = np.frombuffer(key, np.uint8).reshape(1, 32)
        num += all((rank, part_hashes(page, at).tobytes()) in found for at in (0, 1))
    return num


def check_bytes(pair: Pair, folder: Path, one: Path) -> None:
    """What either of the two servers stored is what the one did, where that stored it, too."""
    for server in pair.servers:
        settled(server, PATIENCE_S)
    known = stored(one / "disk")
    for name in ("prefill", "decode"):
        found = stored(folder / name / "disk")
        common = {key: content for key, content in found.items() if key in known}
        assert len(common) > 0.9 * len(found), (name, len(common), len(found))
        differ = [key for key in common if known[key] != found[key]]
        assert not differ, (name, len(differ), len(common))
        assert num_states(common) >= 3, name


@pytest.mark.parametrize("num_ranks", [1, 2] if IS_LONG else [1])
def test_states_of_answers_are_those_of_one_server(num_ranks: int, tmp_path: Path) -> None:
    made = set_up(tmp_path, num_ranks)
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    lone = list(real_prompts(LENGTHS, seed=9))
    with one_server(made, tmp_path / "one") as server:
        turns = plain_turns(server, parts)
        answers = [ask(server, prompt, 80) for prompt in lone]
        settled(server, PATIENCE_S)
    folder = tmp_path / "pair"
    how: dict[str, Any] = {"model": made.model, "env": made.env, "disk_gb": DISK_GB}
    with running_pair(folder, made.args, **how) as pair:
        converse(pair, turns[:-1], are_planned_again=True)
        for prompt, answer in zip(lone, answers, strict=True):
            assert tokens_and_logprobs(pair.ask(prompt, 80)[1]) == tokens_and_logprobs(answer)
        check_bytes(pair, folder, tmp_path / "one")
    with running_pair(folder, made.args, **how) as pair:  # after a kill -9 of both
        last = turns[-1]
        prefilled, decoded = pair.ask(last.prompt)
        # Among them the answer before, which the decode server alone wrote.
        assert sum(by_tier(prefilled).values()) == last.num_known * PAGE
        assert tokens_and_logprobs(decoded) == last.answer
        assert not any(counted(pair.decode, "received_foreign_requests"))
        check_bytes(pair, folder, tmp_path / "one")


@pytest.mark.skipif(not IS_LONG, reason="the long form: see CONTRIBUTING.md")
def test_states_behind_a_retraction_are_not_stored(tmp_path: Path) -> None:
    """SGLang takes the state aside, and not what it tracks beside it.

    What is stored is compared with what a server stores that retracts nothing, in float32, so that
    only rows and states of other tokens have other values.
    """
    made = set_up(tmp_path, 1)
    folder, texts = tmp_path / "pair", []
    how: dict[str, Any] = {"model": made.model, "disk_gb": DISK_GB}
    how |= {"env": made.env, "decode_env": RETRACTS}
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
