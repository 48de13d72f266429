"""Greedy tokens and log-probabilities, bit for bit those of plain SGLang.

The reference is a plain server whose pool holds everything: its answer to the repeat of a prompt,
which hits on the device. A cached prefix changes the rounding against no cache at all even there,
so a repeat is compared with a repeat.

By default several at a time is tried with one position of K; the long form has both, and the Triton
kernels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.updates.weight_answers import ROUNDING, distance, request
from tests.e2e.updates.weight_answers import Answer as Listened

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AT_BOUNDARIES = [pages * PAGE + step for pages in (1, 2, 4, 8, 12) for step in (-1, 0, 1)]
BETWEEN = [3, 100, 333, 777, 1357, 1800]
LENGTHS = [*AT_BOUNDARIES, *BETWEEN]

NUM_CONCURRENT = 16
IN_FLIGHT = 8
NUM_RUNS = 2
MAX_DELAY_S = 0.1
POOL = ["--max-total-tokens", "65536", "--page-size", str(PAGE)]

Answer = tuple[list[int], list[float]]


class Reference(NamedTuple):
    """Answers of the plain server.

    Attributes:
        first: to each prompt the first time, with nothing cached.
        repeat: to its repeat, which hits on the device.
        cached_tokens: what the repeat reused.
        concurrent: to other prompts, repeated several at a time.
    """

    first: list[Answer]
    repeat: list[Answer]
    cached_tokens: list[int]
    concurrent: list[Listened]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return list(real_prompts(LENGTHS))


@pytest.fixture(scope="module")
def concurrent_prompts() -> list[list[int]]:
    return list(real_prompts([300 + 40 * (n % 20) for n in range(NUM_CONCURRENT)], seed=1))


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    concurrent_prompts: list[list[int]],
) -> Reference:
    log = tmp_path_factory.mktemp("reference") / "server.log"
    with Server(POOL, log_path=log, stop="kill") as server:
        first = [tokens_and_logprobs(ask(server, prompt, 3)) for prompt in prompts]
        answers = [ask(server, prompt, 3) for prompt in prompts]
        # Filled one at a time: the prefix is then the same KV in every server.
        for prompt in concurrent_prompts:
            ask(server, prompt, 3)
        concurrent = ask_all(server, concurrent_prompts, seed=0)
    cached = [int(answer["meta_info"]["cached_tokens"]) for answer in answers]
    assert cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
    return Reference(first, [tokens_and_logprobs(answer) for answer in answers], cached, concurrent)


@pytest.fixture(scope="module", params=["pre", "delta"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    # DRAM for about a quarter of the prompts' pages: the others come back from disk.
    args = [*hier_args(folder, host_pages=70), *POOL, "--hier-kv-rope", request.param]
    with Server(args, log_path=folder / "server.log", stop="kill") as running:
        yield running


def ask_all(server: Server, prompts: Sequence[list[int]], seed: int) -> list[Listened]:
    """Sends prompts, several at a time, and returns their answers in order.

    Each waits a little first, another time in each run: which requests share a batch decides the
    rounding, and without it two runs of one server would fall into nearly the same batches.
    """
    rng = random.Random(seed)
    delays_s = [rng.uniform(0.0, MAX_DELAY_S) for _ in prompts]

    def send(delay_s: float, prompt: list[int]) -> Listened:
        time.sleep(delay_s)
        return request(server, prompt)[0]

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(send, delays_s, prompts))


def test_one_at_a_time_all_answers_are_bit_equal(
    server: Server, reference: Reference, prompts: list[list[int]]
) -> None:
    firsts, from_host = [], []
    for prompt in prompts:
        firsts.append(tokens_and_logprobs(ask(server, prompt, 3)))
        settled(server)  # or the next one's pages might find no room in DRAM
        flush_device(server)
        from_host.append(ask(server, prompt, 3))
    settled(server)
    flush_device(server)
    from_disk = [ask(server, prompt, 3) for prompt in prompts]

    assert firsts == reference.first
    for answers, tier in ((from_host, "host"), (from_disk, "disk")):
        cached = [int(answer["meta_info"]["cached_tokens"]) for answer in answers]
        assert cached == reference.cached_tokens
        from_tier = [by_tier(answer).get(tier, 0) for answer in answers]
        assert sum(from_tier) > 0.9 * sum(cached), (tier, from_tier)
        assert _differences([tokens_and_logprobs(a) for a in answers], reference.repeat) == []
    found = state(server)
    assert found["host"]["corrections" if found["rope"] == "pre" else "saved_delta_pages"] > 0


@pytest.mark.sampled("pre")
def test_with_concurrency_answers_differ_by_rounding_alone(
    server: Server,
    reference: Reference,
    concurrent_prompts: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """How requests fall into batches is chance; KV of other tokens is off by many times that."""
    for prompt in concurrent_prompts:
        ask(server, prompt, 3)
        settled(server)
    distances: list[float] = []
    for seed in range(1, NUM_RUNS + 1):
        flush_device(server)
        loaded = state(server)["host"].get("loaded_pages", 0)
        found = ask_all(server, concurrent_prompts, seed)
        assert state(server)["host"]["loaded_pages"] - loaded > NUM_CONCURRENT
        pairs = zip(found, reference.concurrent, strict=True)
        distances += [distance(ours, plain) for ours, plain in pairs]
    with capsys.disabled():
        print(f"\n{IN_FLIGHT} in flight: up to {max(distances):.3f} from a plain server's answers")
    assert max(distances) < ROUNDING, distances


def _differences(ours: list[Answer], theirs: list[Answer]) -> list[int]:
    """Which answers are not bit-equal, in tokens or log-probabilities."""
    return [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]


def wait_for_saves(server: Server, num_pages: int, timeout_s: float = 300.0) -> None:
    """Waits for slow saves: SGLang's flush refuses while one is pending for too long."""
    deadline = time.monotonic() + timeout_s
    while state(server)["host"].get("saved_pages", 0) < num_pages:
        assert time.monotonic() < deadline, state(server)["host"]
        time.sleep(0.2)


@pytest.mark.long
def test_triton_kernels_in_the_real_linker_are_bit_equal(tmp_path: Path) -> None:
    """The interpreter takes a fraction of a second a row, so pages and prompts are tiny.

    The reference is this server's own device hit, which the tests above hold equal to plain's.
    """
    page = 4
    args = [*hier_args(tmp_path, host_pages=2000), "--max-total-tokens", "4096"]
    args += ["--page-size", str(page), "--hier-kv-kernels", "triton"]
    args += ["--json-model-override-args", '{"num_hidden_layers": 2}']
    env = {"TRITON_INTERPRET": "1"}
    with Server(args, log_path=tmp_path / "server.log", env=env, stop="kill") as server:
        prompt = next(real_prompts([2 * page + 1], seed=9))
        ask(server, prompt, 2)
        on_device = ask(server, prompt, 2)
        assert by_tier(on_device)["device"] == 2 * page
        wait_for_saves(server, 2)
        flush_device(server)
        from_host = ask(server, prompt, 2)
        assert by_tier(from_host)["host"] == 2 * page
        assert tokens_and_logprobs(from_host) == tokens_and_logprobs(on_device)
        found: dict[str, Any] = state(server)
    assert found["kernels"] == "triton"
    assert found["host"]["saved_pre_pages"] == found["host"]["loaded_pages"] == 2
