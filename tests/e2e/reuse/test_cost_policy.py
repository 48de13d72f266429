"""Load or recompute in the real server, with a disk, or a link, that crawls and then does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit.remote.otlp import Span, TraceCollector
from testkit.requests import flush_device, timed
from testkit.server import Server
from testkit.slow import ENV_LOAD_SPEED_FILE, ENV_SPEED_FILE
from tests.e2e.hier_server import (
    PAGE,
    SLOT_BYTES,
    answers_as_computed,
    ask,
    by_tier,
    events,
    hier_args,
    missed,
    real_prompts,
    settled,
    state,
)

pytestmark = pytest.mark.e2e

LENGTH = 1500
NUM_CRAWLING, NUM_LIFTED = 3, 6
NUM_ALONE = 30  # at most
WAIT_S = 300.0


class Run(NamedTuple):
    """Answers to the same prompts: computed first, from a crawling disk, and from a fast one.

    `lifted` goes round its prompts until one was loaded.
    """

    fresh: list[dict[str, Any]]
    crawling: list[dict[str, Any]]
    crawling_traces: list[list[Span]]
    crawling_state: dict[str, Any]
    lifted: list[dict[str, Any]]
    end_state: dict[str, Any]
    log: list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cost")
    speed = folder / "speed"
    # The last prompts stay in DRAM; the others are on disk only.
    prompts = list(real_prompts([LENGTH] * (NUM_CRAWLING + NUM_LIFTED + 3), seed=7))
    collector = TraceCollector()
    server = Server(
        [*hier_args(folder, host_pages=64, policy="cost"), *collector.args()],
        env={**collector.environment(), ENV_SPEED_FILE: str(speed)},
        log_path=folder / "server.log",
        stop="kill",
    )
    with collector, server:
        fresh = [stored(server, prompt) for prompt in prompts]
        speed.write_text("0.01")  # ten minutes for a prompt's pages
        crawling = [
            again(server, prompt, rid=f"crawling-{at}")
            for at, prompt in enumerate(prompts[:NUM_CRAWLING])
        ]
        crawling_state = state(server)
        traces = [collector.trace_of(f"crawling-{at}") for at in range(NUM_CRAWLING)]
        speed.unlink()
        lifted = until_loaded(server, prompts[NUM_CRAWLING : NUM_CRAWLING + NUM_LIFTED])
        end_state = settled(server)
        log = events(Path(folder))
        return Run(fresh, crawling, traces, crawling_state, lifted, end_state, log)


def stored(server: Server, prompt: list[int]) -> dict[str, Any]:
    """An answer whose pages are on disk: else those of the next ones might find no room in DRAM."""
    answer = ask(server, prompt)
    settled(server)
    return answer


def until_loaded(server: Server, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Answers to prompts, again and again, until one came from disk as a whole.

    What is computed again does not come to DRAM by that.
    """
    answers: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + WAIT_S
    for prompt in cycle(prompts):
        answers.append(again(server, prompt))
        if by_tier(answers[-1]).get("disk", 0) == LENGTH // PAGE * PAGE:
            break
        if time.monotonic() > deadline_s:
            break
    return answers


def again(server: Server, prompt: list[int], **fields: Any) -> dict[str, Any]:
    flush_device(server)
    return ask(server, prompt, **fields)


def test_a_crawling_disk_is_not_waited_for(run: Run) -> None:
    assert [by_tier(answer).get("disk", 0) for answer in run.crawling] == [0] * NUM_CRAWLING
    host = run.crawling_state["host"]
    # The first could not know; it gave up when waiting was no longer worth it.
    assert host["cost_load"] + host["cost_recompute"] == NUM_CRAWLING
    assert host["cost_gave_up"] == host["cost_load"] >= 1
    assert host["cost_recompute"] >= 1


def test_a_trace_says_that_the_disk_was_too_slow_and_what_was_waited_for(run: Run) -> None:
    gave_up = []
    for trace in run.crawling_traces:
        told = {name: value for span in trace for name, value in span.attributes.items()}
        assert told["hier_kv.missed.first_reason"] == "too_slow"
        assert told["hier_kv.missed.too_slow_tokens"] == LENGTH // PAGE * PAGE
        assert told["hier_kv.reused.disk_tokens"] == 0
        waits = [span.attributes for span in trace if span.name == "hier_kv.wait"]
        gave_up += [wait for wait in waits if wait["hier_kv.wait.gave_up"]]
    host = run.crawling_state["host"]
    assert [wait["hier_kv.wait.of"] for wait in gave_up] == ["disk"] * host["cost_gave_up"]
    assert host["held_disk_us"] > 0


def test_a_fast_disk_is_loaded_from_again(run: Run) -> None:
    """After how many requests depends on how fast the machine computes just then.

    With a given speed of computing it is five: tests/unit/admission/test_load_or_compute.py. What
    was to be computed when it entered the queue, and counted so, may be judged again at its turn.
    """
    loaded = [by_tier(answer).get("disk", 0) for answer in run.lifted]
    assert loaded[-1] == LENGTH // PAGE * PAGE, (loaded, run.end_state)


def test_answers_do_not_depend_on_the_choice(run: Run) -> None:
    lifted = cycle(run.fresh[NUM_CRAWLING : NUM_CRAWLING + NUM_LIFTED])
    before = [*run.fresh[:NUM_CRAWLING], *islice(lifted, len(run.lifted))]
    assert all(map(answers_as_computed, [*run.crawling, *run.lifted], before))


def test_the_speeds_are_reported(run: Run) -> None:
    cost = run.end_state["cost"]
    assert cost["prefill_samples"] >= len(run.fresh)
    assert cost["disk_samples"] >= 1
    assert cost["decode_step_ms"] > 0
    assert 0 < cost["prefill_1024_tokens_ms"] < cost["prefill_8192_tokens_ms"]
    judged = [line for line in run.log if line["e"] == "judged"]
    assert len(judged) == NUM_CRAWLING + len(run.lifted)
    assert {line["choice"] for line in judged} >= {"load", "recompute"}


def test_prefills_are_timed_one_by_one_while_several_are_in_flight(tmp_path: Path) -> None:
    prompts = list(real_prompts([300, 1500, 700, 1100] * 6, seed=8))
    alone = real_prompts([1024] * NUM_ALONE, seed=9)
    with (
        Server(hier_args(tmp_path), log_path=tmp_path / "server.log", stop="kill") as server,
        ThreadPoolExecutor(3) as clients,
    ):
        list(clients.map(lambda prompt: ask(server, prompt), prompts))
        expected_ms = state(server)["cost"]["prefill_1024_tokens_ms"]
        alone_ms = [timed(server, prompt).ttft_ms for prompt in islice(alone, 3)]
        # Of a busy machine either side is some times longer: more that are alone are as busy.
        while not _are_alike(expected_ms, alone_ms) and len(alone_ms) < NUM_ALONE:
            alone_ms.append(timed(server, next(alone)).ttft_ms)
    assert _are_alike(expected_ms, alone_ms), (expected_ms, alone_ms)


def _are_alike(expected_ms: float, alone_ms: list[float]) -> bool:
    """A prefill that is timed by its neighbours is taken for 0.09 to 0.16 of what it is."""
    return min(alone_ms) / 4 < expected_ms < 5 * max(alone_ms)


def test_dram_behind_a_crawling_link_is_computed_until_the_link_is_fast_again(
    tmp_path: Path,
) -> None:
    """Without a disk: what decides is how fast copies to the device were, and computing."""
    speed, prompts = tmp_path / "speed", list(real_prompts([LENGTH] * 6, seed=10))
    prompt_bytes = LENGTH // PAGE * SLOT_BYTES
    with Server(
        hier_args(tmp_path, disk_gb=0, policy="cost"),
        env={ENV_LOAD_SPEED_FILE: str(speed)},
        log_path=tmp_path / "server.log",
        stop="kill",
    ) as server:
        fresh = [ask(server, prompt) for prompt in prompts]
        settled(server)
        # Ten times what computing takes, and more on a busy machine.
        compute_s = 1e-3 * state(server)["cost"]["prefill_1024_tokens_ms"]
        speed.write_text(f"{1e-6 * prompt_bytes / (10 * compute_s):.9f}")
        crawling = until(server, prompts, lambda host: host < LENGTH // PAGE * PAGE)
        crawled = state(server)
        speed.unlink()
        lifted = until(server, prompts, lambda host: host == LENGTH // PAGE * PAGE)
        end = state(server)
    assert crawled["host"]["cost_dram_left_requests"] == 1
    left = LENGTH // PAGE * PAGE - by_tier(crawling[-1]).get("host", 0)
    assert crawled["host"]["cost_dram_left_pages"] == left // PAGE > 0
    assert missed(crawling[-1]) == {"too_slow": left}
    assert len(crawling) > 5  # as much as that is loaded before it is believed
    assert end["host"]["cost_device_load_us"] > 0
    assert end["host"]["cost_device_load_expected_us"] > 0
    for answers in (crawling, lifted):
        before = islice(cycle(fresh), len(answers))
        assert all(map(answers_as_computed, answers, before))


def until(
    server: Server, prompts: Sequence[list[int]], is_so: Callable[[int], bool]
) -> list[dict[str, Any]]:
    """Answers to prompts, again and again, until the tokens that one took from DRAM are such."""
    answers: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + WAIT_S
    for prompt in cycle(prompts):
        answers.append(again(server, prompt))
        if is_so(by_tier(answers[-1]).get("host", 0)):
            return answers
        assert time.monotonic() < deadline_s, (list(map(by_tier, answers)), state(server))
    raise AssertionError
