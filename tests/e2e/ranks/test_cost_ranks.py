"""Load or recompute on two tensor parallel ranks, the disk of one of which crawls.

SGLang's rank consensus checker is on: it ends the server when ranks decide differently. How fast a
rank's disk is it finds out for itself.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any, NamedTuple

import pytest

from testkit.rank_requests import ENVIRONMENT
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_SPEED_FILE
from tests.e2e.hier_server import (
    PAGE,
    answers_as_computed,
    ask,
    by_tier,
    check_agreed,
    hier_args,
    real_prompts,
    settled,
    state,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTH = 1000
NUM_PROMPTS = 3
HOST_PAGES = 40  # of both ranks together as many, of half the size each
WAIT_S = 300.0


class Run(NamedTuple):
    """Answers to the same prompts: computed first, while one disk crawls, and when none does."""

    fresh: list[dict[str, Any]]
    crawling: list[dict[str, Any]]
    crawling_ranks: list[dict[str, int]]
    lifted: list[dict[str, Any]]
    ranks: list[dict[str, int]]
    log: str


def counts(server: Server) -> list[dict[str, int]]:
    return [rank["host"] for rank in state(server)["tp_ranks"]]


def again(server: Server, prompt: list[int]) -> dict[str, Any]:
    flush_device(server)
    return ask(server, prompt)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cost-ranks")
    speeds = folder / "speeds"
    speeds.mkdir()
    # The last prompts fill DRAM; the others are on disk only.
    prompts = list(real_prompts([LENGTH] * (NUM_PROMPTS + 4), seed=11))
    args = [*hier_args(folder, host_pages=HOST_PAGES, policy="cost"), "--tp-size", "2"]
    env = {**ENVIRONMENT, ENV_SPEED_FILE: str(speeds)}
    with Server(
        args, env=env, log_path=folder / "server.log", stop="kill", start_timeout_s=300.0
    ) as server:
        fresh = []
        for prompt in prompts:
            fresh.append(ask(server, prompt))
            settled(server)  # or what comes next might find no room in DRAM
        crawls = speeds / "dp0-tp1-of-2"
        crawls.write_text("0.001")  # two minutes for a page of half of the heads
        crawling = [again(server, prompt) for prompt in prompts[:NUM_PROMPTS]]
        crawling_ranks = counts(server)
        crawls.unlink()
        lifted: list[dict[str, Any]] = []
        end_s = time.monotonic() + WAIT_S
        for prompt in cycle(prompts[:NUM_PROMPTS]):
            lifted.append(again(server, prompt))
            if by_tier(lifted[-1]).get("disk", 0) or time.monotonic() > end_s:
                break
        ranks = counts(server)
        return Run(fresh[:NUM_PROMPTS], crawling, crawling_ranks, lifted, ranks, server.log())


def test_no_rank_waits_for_the_disk_that_crawls(run: Run) -> None:
    assert [by_tier(answer).get("disk", 0) for answer in run.crawling] == [0] * NUM_PROMPTS
    _, slow = run.crawling_ranks
    # The first could not know. It gave up when waiting was no longer worth it, which may be seen
    # for more than one step before all agree; or it was judged again, with what was known by then.
    assert slow["cost_load"] + slow.get("cost_recompute", 0) == NUM_PROMPTS
    assert slow["cost_load"] >= 1
    assert {rank.get("loaded_pages", 0) for rank in run.crawling_ranks} == {0}


def test_both_load_when_it_is_fast_again(run: Run) -> None:
    tokens = by_tier(run.lifted[-1]).get("disk", 0)
    assert 0 < tokens <= LENGTH // PAGE * PAGE, run.ranks
    # Some pages of a prompt may have come to DRAM to measure the disk.
    loaded = {rank["loaded_pages"] for rank in run.ranks}
    assert len(loaded) == 1
    assert loaded.pop() >= tokens // PAGE


def test_answers_do_not_depend_on_the_choice(run: Run) -> None:
    assert all(map(answers_as_computed, (*run.crawling, *run.lifted), cycle(run.fresh)))
    check_agreed(run.log, 2)
