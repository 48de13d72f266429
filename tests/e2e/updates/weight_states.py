"""Requests that are brought to a state in which weights or adapters may change under them."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from testkit.rank_requests import ENVIRONMENT
from testkit.requests import flush_device, num_on_their_way
from testkit.server import Server
from testkit.slow import ENV_SPEED_FILE
from tests.e2e.hier_server import PAGE, ask, by_tier, hier_args, real_prompts, state
from tests.e2e.updates import weight_answers
from tests.e2e.updates.weight_answers import ROUNDING, Answer, distance
from tests.e2e.updates.weight_ways import call

LENGTH, HOST_PAGES = 330, 24
PROMPTS = list(real_prompts([LENGTH] * 3, seed=21))
LONG = next(iter(real_prompts([1700], seed=22)))
# Prompts that push those out of DRAM.
FILLERS = list(real_prompts([LENGTH] * 6, seed=23))
WAIT_S = 300.0
MODES = ("in_place", "retract", "abort")
_fresh_tokens = itertools.count(100)


class Case(NamedTuple):
    """One cell of a matrix."""

    way: str
    state: str
    mode: str
    flush: bool


def name_of(value: int | Case) -> str:
    """Of a parameter of the tests: a number of ranks, or a cell."""
    if isinstance(value, Case):
        flush = "flush" if value.flush else "no-flush"
        return f"{value.way}-{value.state}-{value.mode}-{flush}"
    return f"tp{value}"


class Rig(NamedTuple):
    """A server, the speed of its disk, and what it answers to `PROMPTS`, computed afresh.

    Attributes:
        num_ranks: tensor parallel ranks.
        server: the server.
        speed: file that says how fast its disk is.
        models: folders of models or adapters, by name.
        fresh: answers by name of the weights.
        fields: what each request brings besides, such as the name of an adapter.
    """

    num_ranks: int
    server: Server
    speed: Path
    models: dict[str, Path]
    fresh: dict[str, list[Answer]]
    fields: dict[str, Any]


def slow_server(folder: Path, num_ranks: int, *more: str, env: Mapping[str, str]) -> Server:
    """Little DRAM, prompts in chunks, and a disk as fast as `speed_file` says."""
    args = hier_args(folder, host_pages=HOST_PAGES, policy="wait_complete")
    args += ["--max-total-tokens", "8192", "--page-size", str(PAGE), *more]
    args += ["--chunked-prefill-size", "256", "--max-running-requests", "2"]
    env = {**env, ENV_SPEED_FILE: str(speed_file(folder))}
    if num_ranks > 1:
        args += ["--tp-size", str(num_ranks)]
        env = {**ENVIRONMENT, **env}
    return Server(args, env=env, log_path=folder / "server.log", stop="kill", start_timeout_s=300.0)


def speed_file(folder: Path) -> Path:
    """Says how fast the disk of a `slow_server` is."""
    return folder / "speed"


def paused(
    rig: Rig, case: Case, update: Callable[[], None], after: Callable[[], None] | None = None
) -> list[Answer]:
    """Takes requests to a state, changes something in a pause and lets them end.

    Args:
        rig: the server.
        case: the state, and how generation is paused.
        update: called in the pause.
        after: called when generation goes on, while the requests end.

    Returns:
        What was answered; nothing where the pause may have cut it short.
    """
    if case.state in ("held", "waiting", "loading"):
        store_away(rig, hold=case.state == "held")
    with ThreadPoolExecutor(4) as pool:
        sent = BEGIN[case.state](rig, pool)
        assert call(rig.server, "/pause_generation", {"mode": case.mode})[0], case
        update()
        rig.speed.unlink(missing_ok=True)
        assert call(rig.server, "/continue_generation")[0]
        if after is not None:
            after()
        concurrent.futures.wait(sent, WAIT_S)
        return [] if case.mode == "abort" else [future.result(0) for future in sent]


def store_away(rig: Rig, *, hold: bool) -> None:
    """The prompts' pages are stored, and nothing is on the device; `hold`: on disk only."""
    for prompt in [*PROMPTS, *(FILLERS if hold else [])]:
        ask(rig.server, prompt, **rig.fields)
    all_stored(rig.server)
    if hold:
        rig.speed.write_text("0.001")


def all_stored(server: Server) -> None:
    """Waits until nothing is on its way to DRAM or disk, and empties the device."""
    # Twice, as a save counts for the disk a moment after it ended.
    for _ in range(2):
        wait_for(server, lambda host: not num_on_their_way(host))
    flush_device(server)


def begin_held(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """A request that waits for its pages, once other pages have pushed them out of DRAM."""
    for attempt in range(10):
        sent = pool.submit(short_answer, rig, PROMPTS[0])
        wait_for(rig.server, lambda host: host["planned_pages"] > 0 or sent.done())  # noqa: B023
        if not sent.done():
            return [sent]
        rig.speed.unlink()
        for prompt in real_prompts([LENGTH] * 6, seed=1000 * next(_fresh_tokens) + attempt):
            ask(rig.server, prompt, **rig.fields)
        all_stored(rig.server)
        rig.speed.write_text("0.001")
    raise AssertionError("the prompt's pages do not leave DRAM")


def begin_waiting(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """Two requests run, so that a third has to wait with its pages in DRAM."""
    sent = begin_running(rig, pool) + begin_running(rig, pool)
    sent.append(pool.submit(short_answer, rig, PROMPTS[0]))
    wait_for(rig.server, lambda host: host["waiting_requests"] > 0)
    return sent


def begin_running(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = counter(rig.server, "saved_pages")
    prompt = [*LONG[:200], next(_fresh_tokens), *LONG[200:400]]
    sent = pool.submit(long_answer, rig, prompt)
    wait_for(rig.server, lambda host: host.get("saved_pages", 0) > before)
    return [sent]


def begin_chunked(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = counter(rig.server, "saved_pages")
    prompt = [next(_fresh_tokens), *LONG]
    sent = pool.submit(long_answer, rig, prompt)
    wait_for(rig.server, lambda host: host.get("saved_pages", 0) > before)
    return [sent]


def begin_loading(rig: Rig, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = counter(rig.server, "loaded_pages")
    sent = [pool.submit(short_answer, rig, prompt) for prompt in PROMPTS]
    wait_for(rig.server, lambda host: host.get("loaded_pages", 0) > before)
    return sent


BEGIN: dict[str, Callable[[Rig, ThreadPoolExecutor], list[Future[Answer]]]] = {
    "held": begin_held,
    "waiting": begin_waiting,
    "running": begin_running,
    "chunked": begin_chunked,
    "loading": begin_loading,
}


def short_answer(rig: Rig, prompt: list[int]) -> Answer:
    return weight_answers.request(rig.server, prompt, **rig.fields)[0]


def long_answer(rig: Rig, prompt: list[int]) -> Answer:
    return Answer(ask(rig.server, prompt, 150, **rig.fields)["output_ids"], [])


def computed(server: Server, prompt: list[int], **fields: Any) -> Answer:
    """An answer that reuses nothing."""
    answer, reply = weight_answers.request(server, prompt, **fields)
    assert reply["meta_info"]["cached_tokens"] == 0
    return answer


def check_tiers(rig: Rig, name: str, **fields: Any) -> None:
    """Whatever the tiers have of the prompts is what these weights compute of them."""
    from_tiers = 0
    for _ in range(2):  # computed and stored at the latest in the first round
        for prompt, right in zip(PROMPTS, rig.fresh[name], strict=True):
            flush_device(rig.server)
            answer, reply = weight_answers.request(rig.server, prompt, **fields)
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
