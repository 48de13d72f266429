"""One of two whole schedulers (`--dp-size 2`) stands still, and is killed; the other one goes on.

They agree on nothing, so neither waits for the other one. SGLang does not look for the end of a
scheduler of several whole ones: what was sent to it has no answer as long as the server runs. The
others go on until a request is sent to the dead one: SGLang's controller then waits for good for
somebody to take it. What both have on disk is there for the next start.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from testkit.rank_requests import ENVIRONMENT, WAYS, answer_of
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    check_agreed,
    every_rank,
    hier_args,
    real_prompts,
    settled,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = {
    0: list(real_prompts([150, 280, 210], seed=3)),
    1: list(real_prompts([330, 140], seed=4)),
}
PATIENCE_S = 300.0


class Rig(NamedTuple):
    """A server of two schedulers, and what each answered behind its device's pages."""

    server: Server
    folder: Path
    hits: dict[int, list[dict[str, Any]]]
    pool: ThreadPoolExecutor


def server_on(folder: Path) -> Server:
    args = [*hier_args(folder, policy="wait_complete"), *WAYS["dp"], "--page-size", str(PAGE)]
    args += ["--max-total-tokens", "4096", "--hier-kv-write-policy", "write_through"]
    log = folder / "server.log"
    return Server(args, log_path=log, env=ENVIRONMENT, stop="kill", start_timeout_s=PATIENCE_S)


def answers(server: Server, rank: int) -> list[dict[str, Any]]:
    found = [ask(server, prompt, routed_dp_rank=rank) for prompt in PROMPTS[rank]]
    assert [answer["meta_info"]["dp_rank"] for answer in found] == [rank] * len(found)
    return found


def check_hits(found: list[dict[str, Any]], hits: list[dict[str, Any]], tier: str) -> None:
    """All that a device hit reused came from a tier, and answers are the same to the bit."""
    for answer, hit in zip(found, hits, strict=True):
        assert by_tier(answer)[tier] == by_tier(hit)["device"] > 0
        assert answer_of(answer) == answer_of(hit)


def scheduler(server: Server, rank: int) -> psutil.Process:
    """The process of one of the schedulers."""
    (found,) = (
        process
        for process in server.tree()
        if f"sglang::scheduler_DP{rank}" in " ".join(process.cmdline())
    )
    return found


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """With nothing on the device, and all pages of `PROMPTS` in DRAM and on disk."""
    folder = tmp_path_factory.mktemp("schedulers")
    with server_on(folder) as server, ThreadPoolExecutor(1) as pool:
        for rank in PROMPTS:
            answers(server, rank)
        hits = {rank: answers(server, rank) for rank in PROMPTS}
        settled(server)
        for rank, state in enumerate(every_rank(server)):
            num_pages = sum(len(prompt) // PAGE for prompt in PROMPTS[rank])
            assert state["disk"]["records_written"] >= num_pages
        flush_device(server)
        try:
            yield Rig(server, folder, hits, pool)
        finally:
            server.kill()  # ends what waits for a scheduler that is gone


def test_a_scheduler_that_stands_still_holds_up_no_other(rig: Rig) -> None:
    second = scheduler(rig.server, 1)
    second.send_signal(signal.SIGSTOP)
    try:
        waiting = rig.pool.submit(ask, rig.server, PROMPTS[1][0], 3, routed_dp_rank=1)
        check_hits(answers(rig.server, 0), rig.hits[0], "host")
        assert not waiting.done()
    finally:
        second.send_signal(signal.SIGCONT)
    check_hits([waiting.result(PATIENCE_S)], rig.hits[1][:1], "host")


def answering(rig: Rig) -> Future[None]:
    """A long answer of the second scheduler, of which a part has come."""
    begun = threading.Event()

    def read() -> None:
        sampling = {"max_new_tokens": 1024, "ignore_eos": True}
        events = rig.server.stream(
            input_ids=PROMPTS[1][0], sampling_params=sampling, routed_dp_rank=1
        )
        for _ in events:
            begun.set()

    reading = rig.pool.submit(read)
    assert begun.wait(PATIENCE_S)
    return reading


def _await_end(server: Server, process: psutil.Process) -> None:
    """Its parent, SGLang's controller, does not reap it: it stays a zombie."""
    deadline_s = time.monotonic() + PATIENCE_S
    while process in server.tree():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_other_one_of_a_killed_scheduler_goes_on(rig: Rig) -> None:
    flush_device(rig.server)
    second = scheduler(rig.server, 1)
    reading = answering(rig)
    second.kill()
    _await_end(rig.server, second)
    check_hits(answers(rig.server, 0), rig.hits[0], "host")
    check_hits(answers(rig.server, 0), rig.hits[0], "device")
    assert rig.server.alive()
    assert not reading.done()
    rig.server.kill()
    wait([reading], PATIENCE_S)


def test_what_both_have_stored_is_read_by_the_next_start(rig: Rig) -> None:
    assert not rig.server.alive()
    with server_on(rig.folder) as server:
        for rank, hits in rig.hits.items():
            check_hits(answers(server, rank), hits, "disk")
        check_agreed(server.log(), len(PROMPTS))
