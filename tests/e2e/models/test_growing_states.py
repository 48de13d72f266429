"""A chat that grows, of a model with states: as much is reused, of fewer stored states.

A turn's answer ends behind a state, near that behind its prompt, which is not worth its bytes then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.server import Server
from tests.e2e.hier_server import ask, real_prompts, settled, state, tokens_and_logprobs
from tests.e2e.models.hybrid_answers import cached, drop_device
from tests.e2e.models.test_states import PAGE, Case, server_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

NUM_TURNS = 4
FIRST_TOKENS, LATER_TOKENS, ANSWER_TOKENS = 200, PAGE, 2 * PAGE + 2
INTERVAL = ["--mamba-track-interval", str(PAGE)]


def talk(server: Server, parts: list[list[int]], *, drops: bool) -> list[Any]:
    """The answers of a chat, each behind a device that has nothing if it drops what it had."""
    told: list[int] = []
    found = []
    for part in parts:
        if drops:
            drop_device(server)
        told += part
        found.append(ask(server, told, ANSWER_TOKENS))
        told += found[-1]["output_ids"]
    return found


def test_a_chat_stores_a_state_a_turn_and_reuses_what_the_device_would(tmp_path: Path) -> None:
    case = Case(STATE_MODELS["qwen3_next"], write_state_model(tmp_path / "model", "qwen3_next"))
    lengths = [FIRST_TOKENS, *[LATER_TOKENS] * (NUM_TURNS - 1)]
    parts = list(real_prompts(lengths, seed=4))
    for name in ("plain", "tiers"):
        (tmp_path / name).mkdir()
    with server_of(case, tmp_path / "plain", *INTERVAL, pool=8192) as server:
        plain = talk(server, parts, drops=False)
    with server_of(case, tmp_path / "tiers", *INTERVAL, pool=8192, host_pages=200) as server:
        found = talk(server, parts, drops=True)
        settled(server)
        counted = state(server)["host"]
    assert cached(found) == cached(plain)
    assert all(cached(found)[1:])
    assert [tokens_and_logprobs(a) for a in found] == [tokens_and_logprobs(a) for a in plain]
    # Behind the first prompt, and behind each answer; not behind the other prompts.
    assert counted["saved_states"] == 1 + NUM_TURNS, counted
    assert counted["unsaved_states"] == NUM_TURNS - 1, counted
