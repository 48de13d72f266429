"""SGLang without the plugin, its attention data parallel: what the CPU runtime adds for that.

The reference is the same model on one rank. Its MLP is in one piece there and summed of two here,
so log-probabilities are compared up to rounding.

Of the long form: the tests with the plugin notice it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testkit.server import Server
from tests.e2e.hier_server import PAGE, real_prompts
from tests.e2e.updates.weight_answers import ROUNDING, distance, request
from tests.e2e.updates.weight_models import qwen3

pytestmark = pytest.mark.e2e

# A core for each of four ranks, in turns.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
PROMPTS = list(real_prompts([70, 130, 333, 200, 512], seed=11))
COMMON = ["--max-total-tokens", "8192", "--page-size", str(PAGE), "--sleep-on-idle"]
# By the deprecated names; with the plugin it has the present one (`reuse`).
TWO_BY_TWO = ["--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("one-rank")
    model = qwen3(folder / "qwen3")
    with Server(COMMON, model=model, log_path=folder / "server.log", stop="kill") as server:
        yield server


@pytest.mark.long
def test_answers_are_those_of_one_rank(one_rank: Server, tmp_path: Path) -> None:
    wanted = [request(one_rank, prompt)[0] for prompt in PROMPTS]
    args = [*COMMON, *TWO_BY_TWO]
    model = qwen3(tmp_path / "qwen3")
    log = tmp_path / "server.log"
    with Server(args, model=model, log_path=log, env=CORES, stop="kill") as server:
        for rank in (0, 1):  # the other one takes part in every forward, and has no request
            found, reply = request(server, PROMPTS[0], routed_dp_rank=rank)
            assert reply["meta_info"]["dp_rank"] == rank
            assert distance(found, wanted[0]) < ROUNDING
        # Four requests on one rank and one on the other, whose batches are padded.
        ranks = (0, 0, 0, 0, 1)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(
                pool.map(
                    lambda prompt, rank: request(server, prompt, routed_dp_rank=rank)[0],
                    PROMPTS,
                    ranks,
                )
            )
        for found, expected in zip(answers, wanted, strict=True):
            assert distance(found, expected) < ROUNDING
