"""SGLang's speculative decoding on a CPU: greedy answers are those of a server without it.

By default trees; the long form has every way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from testkit.drafts.eagle import DRAFTS, write_eagle_draft
from testkit.server import TINYLM, Server
from tests.e2e.hier_server import ask, real_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# In float32 rounding does not decide between two tokens.
BASE = ["--attention-backend", "cpu_extend", "--dtype", "float32", "--max-total-tokens", "8192"]
PROMPTS = list(real_prompts([40, 128, 192, 333], seed=3))
ANSWER = 40


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle_draft(tmp_path_factory.mktemp("draft") / "model")


def answers(args: Sequence[str], log: Path) -> list[dict[str, Any]]:
    with Server([*BASE, *args], log_path=log, stop="kill", start_timeout_s=400) as server:
        return [ask(server, prompt, ANSWER) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    found = answers(["--page-size", "16"], tmp_path_factory.mktemp("plain") / "server.log")
    return [answer["output_ids"] for answer in found]


# Each with the least share of guesses that must be right: a draft of the target's own weights
# guesses nearly all, and a repetition is seen by a table of what was said.
@pytest.mark.sampled("ngram-trees")
@pytest.mark.parametrize(
    ("args", "model", "least"),
    [
        ([*DRAFTS, "--speculative-algorithm", "STANDALONE"], TINYLM, 0.8),
        ([*DRAFTS, "--speculative-algorithm", "EAGLE"], None, 0.8),
        (["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"], "", 0.0),
        # Trees need pages of one token here.
        (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"], "", 0.0),
    ],
    ids=["standalone", "eagle", "ngram", "ngram-trees"],
)
def test_answers_are_those_without_speculation(
    args: list[str],
    model: Path | str | None,
    least: float,
    plain: list[list[int]],
    draft: Path,
    tmp_path: Path,
) -> None:
    trees = "--speculative-num-draft-tokens" in args and "NGRAM" in args
    args = [*args, "--page-size", "1" if trees else "16"]
    if model != "":
        args += ["--speculative-draft-model-path", str(model or draft)]
    found = answers(args, tmp_path / "server.log")
    assert [answer["output_ids"] for answer in found] == plain
    facts = [answer["meta_info"] for answer in found]
    correct = sum(fact["spec_num_correct_drafts"] for fact in facts)
    assert correct > least * sum(fact["spec_num_proposed_drafts"] for fact in facts)
