"""A long queue whose prefixes are all on a slow disk, and DRAM for a few of them.

What the look-ahead promises and can be told without a clock: each request finds its pages in DRAM
when it is admitted, in the queue's order, and answers as on a device hit. `python -m
bench.serve.lookahead` has the times. Then one of a high priority waits for its pages beside one
that runs, and would give way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_SPEED_FILE
from testkit.workload import reply_of
from tests.e2e.hier_server import (
    PAGE,
    SLOT_BYTES,
    ask,
    events,
    hier_args,
    real_prompts,
    settled,
    tokens_and_logprobs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS, PREFIX_PAGES, HOST_PREFIXES = 24, 5, 8
READ_S, SLOW_READ_S = 0.05, 1.0  # of one prefix
LOW, HIGH, LONG_ANSWER = 0, 99, 150


class Run(NamedTuple):
    """What came of the queue.

    Attributes:
        expected: tokens and log-probabilities on a device hit, by request.
        answers: by request.
        before: the plugin's counters before the queue came.
        after: and after it.
        log: the event log.
        overtaken: the answer of a low priority that another one came to, of a high one.
        overtaking: that one's.
        overtaking_expected: as `expected`.
    """

    expected: list[Any]
    answers: list[dict[str, Any]]
    before: dict[str, Any]
    after: dict[str, Any]
    log: list[dict[str, Any]]
    overtaken: dict[str, Any]
    overtaking: dict[str, Any]
    overtaking_expected: Any


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("lookahead")
    speed = folder / "disk-mb-s"
    args = [
        *hier_args(folder, host_pages=HOST_PREFIXES * PREFIX_PAGES),
        *("--hier-kv-prefetch-policy", "wait_complete"),
        # One at a time, so that an answer's bits do not depend on who else is in its batch.
        *("--max-total-tokens", str(3 * (PREFIX_PAGES + 2) * PAGE), "--max-running-requests", "1"),
        "--enable-priority-scheduling",
    ]
    prompts = list(real_prompts([PREFIX_PAGES * PAGE + 20] * (NUM_REQUESTS + HOST_PREFIXES)))
    env = {ENV_SPEED_FILE: str(speed)}
    with Server(args, log_path=folder / "server.log", env=env, stop="kill") as server:
        expected = [_on_device(server, prompt) for prompt in prompts]  # the last fill DRAM
        before = settled(server)
        flush_device(server)
        speed.write_text(_speed(READ_S))
        answers = _all_at_once(server, prompts[:NUM_REQUESTS])
        after = settled(server)
        flush_device(server)
        speed.write_text(_speed(SLOW_READ_S))
        overtaken, overtaking = _one_behind(server, prompts[NUM_REQUESTS - 1], prompts[0])
    return Run(
        expected[:NUM_REQUESTS], answers, before["host"], after["host"], events(folder),
        overtaken, overtaking, expected[0],
    )  # fmt: skip


def _speed(read_s: float) -> str:
    return f"{PREFIX_PAGES * SLOT_BYTES / 1e6 / read_s:.3f}"


def _on_device(server: Server, prompt: Sequence[int]) -> Any:
    ask(server, prompt, 4)
    answer = ask(server, prompt, 4)
    assert reply_of(answer).by_tier["device"] == PREFIX_PAGES * PAGE
    settled(server)  # or the next ones' pages might find no room in DRAM
    return tokens_and_logprobs(answer)


def _all_at_once(server: Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = []
        for number, prompt in enumerate(prompts):
            futures.append(pool.submit(ask, server, prompt, 4, rid=f"queued-{number}"))
            time.sleep(0.01)  # so that they come in order
        return [future.result() for future in futures]


def _one_behind(
    server: Server, first: list[int], second: list[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A long answer, and a short one of a higher priority that is asked for while it is given."""
    running = server.stream(
        input_ids=first,
        sampling_params={"max_new_tokens": LONG_ANSWER, "ignore_eos": True},
        priority=LOW,
    )
    next(running)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, server, second, 4, priority=HIGH)
        *_, last = running
        return last, other.result()


def test_all_were_on_disk_and_nothing_was_computed_again(run: Run) -> None:
    for answer in run.answers:
        tiers = reply_of(answer).by_tier
        assert tiers == {"device": 0, "host": 0, "disk": PREFIX_PAGES * PAGE, "remote": 0}


def test_they_are_in_dram_when_they_are_admitted(run: Run) -> None:
    ready, late = (_grown(run, f"admitted_{kind}_requests") for kind in ("ready", "late"))
    assert ready + late == NUM_REQUESTS
    assert ready >= 0.95 * NUM_REQUESTS, run.after


def test_answers_are_those_of_a_device_hit(run: Run) -> None:
    for expected, answer in zip(run.expected, run.answers, strict=True):
        assert tokens_and_logprobs(answer) == expected


def test_the_queue_is_served_in_its_order_and_each_page_is_read_once(run: Run) -> None:
    came, admitted = (_queued(run, event) for event in ("enqueued", "admitted"))
    assert sorted(admitted) == sorted(came)
    assert len(set(admitted)) == len(admitted) == NUM_REQUESTS
    # Two threads read, and one may lie idle in the middle while the other goes on: a request's last
    # pages and those of the next ones may arrive in any order. By chance alone it would be eight.
    moved_by = [abs(admitted.index(rid) - place) for place, rid in enumerate(came)]
    assert sum(moved_by) <= NUM_REQUESTS, admitted
    assert _grown(run, "promoted_pages") == NUM_REQUESTS * PREFIX_PAGES
    assert _grown(run, "prefetch_timeouts") == 0


def test_who_waits_for_pages_makes_nobody_give_way(run: Run) -> None:
    """It does when they are there: once."""
    assert reply_of(run.overtaking).by_tier["disk"] > 0  # so it waited
    assert tokens_and_logprobs(run.overtaking) == run.overtaking_expected
    assert len(run.overtaken["output_ids"]) == LONG_ANSWER
    assert run.overtaken["meta_info"]["num_retractions"] <= 1


def test_nothing_stays_pinned(run: Run) -> None:
    assert run.after["planned_pages"] == 0


def _queued(run: Run, event: str) -> list[str]:
    """The queue's requests in the order in which they came to this point."""
    rids = [line["rid"] for line in run.log if line["e"] == event]
    return [rid for rid in rids if rid.startswith("queued-")]


def _grown(run: Run, name: str) -> int:
    return int(run.after.get(name, 0)) - int(run.before.get(name, 0))
