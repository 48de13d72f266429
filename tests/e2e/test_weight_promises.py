"""Requests that were promised stored pages, and weights that change before they get them.

A request is held while its pages crawl from a slow disk, or is in another state; generation is
paused, the weights are replaced, with a flush or without, and generation goes on. What is answered
and what is stored afterwards must be the new weights' own.

Here runs what found the fault, with one rank and with two, and a sample of the rest;
`HIER_KV_UPDATE_MATRIX=1` runs every way, state, pause mode and flush.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.ranks import ENVIRONMENT
from bench.requests import num_on_their_way
from bench.server import TINYLM, Server
from sglang_ext.tiers.disk.throttle import ENV_SPEED_FILE
from tests.e2e import weight_answers, weight_models
from tests.e2e.hier_server import PAGE, ask, by_tier, hier_args, real_prompts, state
from tests.e2e.weight_answers import NOISE, ROUNDING, Answer, distance
from tests.e2e.weight_ways import IPC_ENVIRONMENT, WAYS, call

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTH, HOST_PAGES = 330, 24
PROMPTS = list(real_prompts([LENGTH] * 3, seed=21))
LONG = next(iter(real_prompts([1700], seed=22)))
# Prompts that push those out of DRAM.
FILLERS = list(real_prompts([LENGTH] * 6, seed=23))
WAIT_S = 120.0
_fresh_tokens = itertools.count(100)
STATES = ("held", "waiting", "running", "chunked", "loading")
MODES = ("in_place", "retract", "abort")


class Case(NamedTuple):
    """One cell of the matrix."""

    way: str
    state: str
    mode: str
    flush: bool


ATTACK = Case("disk", "held", "in_place", False)
SAMPLE = [
    ATTACK,
    Case("disk", "chunked", "retract", True),
    Case("disk", "running", "retract", False),
]


def cases() -> list[Case]:
    """The matrix, or a sample of it."""
    if os.environ.get("HIER_KV_UPDATE_MATRIX") != "1":
        return SAMPLE
    everything = itertools.starmap(Case, itertools.product(WAYS, STATES, MODES, (False, True)))
    # SGLang asserts that nothing runs when memory is released.
    return [
        case
        for case in everything
        if case.way != "release-resume" or case.state == "held" or case.mode != "in_place"
    ]


class Rig(NamedTuple):
    """A server, the speed of its disk, the two models and what each answers, computed afresh."""

    num_ranks: int
    server: Server
    speed: Path
    models: dict[str, Path]
    fresh: dict[str, list[Answer]]


def name_of(value: int | Case) -> str:
    """Of a parameter of the tests."""
    if isinstance(value, Case):
        flush = "flush" if value.flush else "no-flush"
        return f"{value.way}-{value.state}-{value.mode}-{flush}"
    return f"tp{value}"


@pytest.fixture(scope="module", params=[1, 2], ids=name_of)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("promises")
    models = {
        "first": TINYLM,
        "other": weight_models.variant(folder / "other", weight_models.strange(1)),
    }
    args = hier_args(folder, host_pages=HOST_PAGES, policy="wait_complete")
    args += ["--max-total-tokens", "8192", "--page-size", str(PAGE)]
    args += ["--chunked-prefill-size", "256", "--max-running-requests", "2"]
    env = {**IPC_ENVIRONMENT, ENV_SPEED_FILE: str(folder / "speed")}
    if request.param == 2:
        args += ["--tp-size", "2"]
        env = {**ENVIRONMENT, **IPC_ENVIRONMENT, ENV_SPEED_FILE: str(folder / "speed")}
    with Server(
        args, env=env, log_path=folder / "server.log", stop="kill", start_timeout_s=300.0
    ) as server:
        fresh = {}
        for name in ("other", "first"):
            replace(server, models[name])
            fresh[name] = [computed(server, prompt) for prompt in PROMPTS]
        yield Rig(request.param, server, folder / "speed", models, fresh)


def replace(server: Server, model: Path) -> None:
    assert WAYS["disk"](server, model, True) == [(True, 200)]


def computed(server: Server, prompt: list[int]) -> Answer:
    answer, reply = weight_answers.request(server, prompt)
    assert reply["meta_info"]["cached_tokens"] == 0
    return answer


def test_the_models_are_told_apart(rig: Rig) -> None:
    for one, other in zip(rig.fresh["first"], rig.fresh["other"], strict=True):
        assert distance(one, other) > NOISE


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_promises_do_not_outlive_their_weights(rig: Rig, case: Case) -> None:
    """One cell, on a server with what the cells before it left behind."""
    old, new = ("first", "other") if cases().index(case) % 2 == 0 else ("other", "first")
    replies = run_case(rig, case, old, new)
    if case.state == "held" and case.mode != "abort":
        # Nothing was on the device: it is what the new weights answer, whatever was promised.
        assert distance(replies[0], rig.fresh[new][0]) < ROUNDING
    check_tiers(rig, new)


def test_what_was_stored_before_is_still_right(rig: Rig) -> None:
    """Pages of both models, from before all those changes and between them."""
    for name, model in rig.models.items():
        replace(rig.server, model)
        check_tiers(rig, name)


def run_case(rig: Rig, case: Case, old: str, new: str) -> list[Answer]:
    """Takes requests to a state, replaces the weights in a pause and lets them end."""
    server = rig.server
    replace(server, rig.models[old])
    if case.state in ("held", "waiting", "loading"):
        store_away(rig, hold=case.state == "held")
    with ThreadPoolExecutor(4) as pool:
        sent = BEGIN[case.state](rig, pool)
        assert call(server, "/pause_generation", {"mode": case.mode})[0], case
        answers = WAYS[case.way](server, rig.models[new], case.flush)
        # SGLang refuses to flush under what runs, and says so; the weights are new all the same.
        assert all(ok for ok, _ in answers) or (case.flush and case.mode == "in_place"), answers
        rig.speed.unlink(missing_ok=True)
        assert call(server, "/continue_generation")[0]
        if case.mode == "abort":  # some answers are cut short, and not looked at
            concurrent.futures.wait(sent, WAIT_S)
            return []
        return [future.result(WAIT_S) for future in sent]


def store_away(rig: Rig, *, hold: bool) -> None:
    """The prompts' pages are stored, and nothing is on the device; `hold`: on disk only."""
    for prompt in [*PROMPTS, *(FILLERS if hold else [])]:
        ask(rig.server, prompt)
    all_stored(rig.server)
    if hold:
        rig.speed.write_text("0.001")


def all_stored(server: Server) -> None:
    """Waits until nothing is on its way to DRAM or disk, and empties the device."""
    # Twice, as a save counts for the disk a moment after it ended.
    for _ in range(2):
        wait_for(server, lambda host: not num_on_their_way(host))
    server.post("/flush_cache")


def begin_held(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """A request that waits for its pages, once other pages have pushed them out of DRAM."""
    for attempt in range(10):
        sent = pool.submit(lambda: weight_answers.request(rig.server, PROMPTS[0])[0])
        wait_for(rig.server, lambda host: host["planned_pages"] > 0 or sent.done())  # noqa: B023
        if not sent.done():
            return [sent]
        rig.speed.unlink()
        for prompt in real_prompts([LENGTH] * 6, seed=1000 * next(_fresh_tokens) + attempt):
            ask(rig.server, prompt)
        all_stored(rig.server)
        rig.speed.write_text("0.001")
    raise AssertionError("the prompt's pages do not leave DRAM")


def begin_waiting(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """Two requests run, so that a third has to wait with its pages in DRAM."""
    sent = begin_running(rig, pool) + begin_running(rig, pool)
    sent.append(pool.submit(lambda: weight_answers.request(rig.server, PROMPTS[0])[0]))
    wait_for(rig.server, lambda host: host["waiting_requests"] > 0)
    return sent


def begin_running(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = counter(rig.server, "saved_pages")
    prompt = [*LONG[:200], next(_fresh_tokens), *LONG[200:400]]
    sent = pool.submit(lambda: long_answer(rig.server, prompt))
    wait_for(rig.server, lambda host: host.get("saved_pages", 0) > before)
    return [sent]


def begin_chunked(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = counter(rig.server, "saved_pages")
    prompt = [next(_fresh_tokens), *LONG]
    sent = pool.submit(lambda: long_answer(rig.server, prompt))
    wait_for(rig.server, lambda host: host.get("saved_pages", 0) > before)
    return [sent]


def begin_loading(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = counter(rig.server, "loaded_pages")
    sent = [pool.submit(lambda p=p: weight_answers.request(rig.server, p)[0]) for p in PROMPTS]  # type: ignore[misc]
    wait_for(rig.server, lambda host: host.get("loaded_pages", 0) > before)
    return sent


BEGIN: dict[str, Callable[[Rig, ThreadPoolExecutor], list[Future[Answer]]]] = {
    "held": begin_held,
    "waiting": begin_waiting,
    "running": begin_running,
    "chunked": begin_chunked,
    "loading": begin_loading,
}


def long_answer(server: Server, prompt: list[int]) -> Answer:
    return Answer(ask(server, prompt, 150)["output_ids"], [])


def check_tiers(rig: Rig, name: str) -> None:
    """Whatever the tiers have of the prompts is what the model computes of them."""
    from_tiers = 0
    for _ in range(2):  # computed and stored at the latest in the first round
        for prompt, right in zip(PROMPTS, rig.fresh[name], strict=True):
            rig.server.post("/flush_cache")
            answer, reply = weight_answers.request(rig.server, prompt)
            assert distance(answer, right) < ROUNDING, (name, reply["meta_info"])
            from_tiers += sum(by_tier(reply).values()) > 0
    assert from_tiers >= len(PROMPTS)


def counter(server: Server, name: str) -> int:
    return int(state(server)["host"].get(name, 0))


def wait_for(server: Server, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Waits until the store's counters, of rank 0, say something."""
    end_s = time.monotonic() + WAIT_S
    while not reached(state(server)["host"]):
        assert time.monotonic() < end_s, state(server)
        time.sleep(0.01)
