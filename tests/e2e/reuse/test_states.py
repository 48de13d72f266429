"""A model with state-space layers on the real server.

Answers are compared with what transformers computes for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.hybrids.state_model import write_state_model
from testkit.server import Server
from tests.e2e.hier_server import ask, real_prompts, tokens_and_logprobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
LENGTHS = [40, 130, 200, 333, 700, 1000, 1290]
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", "--dtype", "float32"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# How far rounding takes a log-probability in float32; another state takes it to 1 and more.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_state_model(tmp_path_factory.mktemp("states") / "model")


def server_of(model: Path, folder: Path, *, pool: int, num_states: int = 100) -> Server:
    """A plain server.

    Args:
        model: the model's folder.
        folder: for the log.
        pool: tokens that the full layers have room for.
        num_states: states that there is room for.
    """
    args = [*BASE, "--max-total-tokens", str(pool), "--max-mamba-cache-size", str(num_states)]
    return Server(
        args, model=model, log_path=folder / "server.log", stop="kill", start_timeout_s=300, env=ENV
    )


def answers(server: Server, prompts: Sequence[Sequence[int]], num: int = 12) -> list[Any]:
    return [ask(server, prompt, num) for prompt in prompts]


def cached(found: Sequence[Any]) -> list[int]:
    return [int(answer["meta_info"]["cached_tokens"]) for answer in found]


class Transformers:
    """The same weights without SGLang."""

    def __init__(self, model: Path) -> None:
        from transformers import GraniteMoeHybridForCausalLM

        self._model = GraniteMoeHybridForCausalLM.from_pretrained(model, dtype=torch.float32)
        torch.set_num_threads(1)  # several spin at their barriers where others want the cores

    def furthest(self, prompt: Sequence[int], answer: Any) -> float:
        """The largest difference of an answer's log-probabilities."""
        tokens, found = tokens_and_logprobs(answer)
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert rows.argmax(-1).tolist() == tokens
        wanted = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        return float((wanted - torch.tensor(found)).abs().max())


@pytest.fixture(scope="module")
def by_transformers(model: Path) -> Transformers:
    return Transformers(model)


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plain SGLang's answers, with pools that hold everything."""
    prompts = list(real_prompts(LENGTHS, seed=3))
    with server_of(model, tmp_path_factory.mktemp("plain"), pool=32768) as server:
        first, repeat = answers(server, prompts), answers(server, prompts)
    return {"prompts": prompts, "first": first, "repeat": repeat}


def test_the_engine_computes_states_as_transformers_does(
    plain: dict[str, Any], by_transformers: Transformers
) -> None:
    assert cached(plain["first"]) == [0] * len(LENGTHS)
    assert cached(plain["repeat"]) == [length // PAGE * PAGE for length in LENGTHS]
    for kind in ("first", "repeat"):
        for prompt, answer in zip(plain["prompts"], plain[kind], strict=True):
            assert by_transformers.furthest(prompt, answer) < TOLERANCE
