"""Mixed requests with aborts, the same ones to any server, and what is compared of the answers.

A conversation's turns are growing excerpts of one text: what a turn asks does not depend on what
the server answered before, so that two servers can be compared request by request. A third of the
prompts are whole pages, whose last page SGLang computes again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from testkit.requests import by_tier, flush_device
from testkit.server import Server, ServerError
from testkit.workload import load_texts, load_tokenizer

# Two ranks of a server, and how late their stores may be.
WAYS: dict[str, list[str]] = {"tp": ["--tp-size", "2"], "dp": ["--dp-size", "2"]}
ENVIRONMENT = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}
JITTER_MS = 50
PAGE = 64
NUM_TURNS = 5
IN_FLIGHT = 8
ABORT_SHARE = 0.1
_FIRST_TOKENS, _TURN_TOKENS = (70, 200), (30, 110)
_MAX_ABORT_DELAY_S = 0.5
_NEW_TOKENS = 8

Answer = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class RankRequest:
    """One request.

    Attributes:
        rid: its name.
        prompt: token ids.
        abort_after_s: when it is aborted; None for never.
    """

    rid: str
    prompt: list[int]
    abort_after_s: float | None


@dataclass
class Served:
    """What one request came to.

    Attributes:
        answer: tokens and log-probabilities; None for a request that was to be aborted.
        by_tier: reused tokens by tier.
    """

    answer: Answer | None
    by_tier: dict[str, int]


def make_requests(num_requests: int, seed: int) -> list[RankRequest]:
    """Turns of conversations in rounds, in the order in which they are sent."""
    rng = random.Random(seed)
    texts = load_texts(load_tokenizer())
    rounds: list[list[RankRequest]] = [[] for _ in range(NUM_TURNS)]
    for chat in range(num_requests // NUM_TURNS):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 1000)
        length = rng.randint(*_FIRST_TOKENS)
        for turn in range(NUM_TURNS):
            length += rng.randint(*_TURN_TOKENS) if turn else 0
            whole = -(-length // PAGE) * PAGE if rng.random() < 1 / 3 else length
            length = max(length, whole)
            aborted = rng.random() < ABORT_SHARE
            delay_s = rng.uniform(0, _MAX_ABORT_DELAY_S) if aborted else None
            request = RankRequest(f"{chat}-{turn}", text[start : start + length], delay_s)
            rounds[turn].append(request)
    for one in rounds:
        rng.shuffle(one)
    return [request for one in rounds for request in one]


def send_all(
    server: Server, requests: Sequence[RankRequest], name: str, num_tokens: int = _NEW_TOKENS
) -> list[Served]:
    """Sends the requests in order, several at a time, and aborts those that are to be."""

    def send(request: RankRequest) -> Served:
        rid = f"{name}-{request.rid}"
        timer = None
        if request.abort_after_s is not None:
            timer = threading.Timer(request.abort_after_s, _abort, (server, rid))
            timer.start()
        try:
            body = ask(server, request.prompt, num_tokens, rid=rid)
        except ServerError:
            if timer is None:
                raise
            return Served(None, {})
        finally:
            if timer is not None:
                timer.join()
        answer = None if timer is not None else answer_of(body)
        return Served(answer, by_tier(body["meta_info"]))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(send, requests))


def send_in_halves(
    server: Server, requests: Sequence[RankRequest], name: str, num_tokens: int = _NEW_TOKENS
) -> list[Served]:
    """As `send_all`, with an empty device behind half of them.

    So the later turns come from the tiers, however the pool's size and the choice of a rank fell.
    """
    half = len(requests) // 2
    served = send_all(server, requests[:half], name, num_tokens)
    flush_device(server)
    return served + send_all(server, requests[half:], name, num_tokens)


def ask(
    server: Server, prompt: list[int], num_tokens: int = _NEW_TOKENS, **fields: Any
) -> dict[str, Any]:
    """One greedy request with log-probabilities."""
    return server.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": num_tokens, "ignore_eos": True},
        return_logprob=True,
        **fields,
    )


def answer_of(body: dict[str, Any]) -> Answer:
    """What must be equal, bit for bit where nothing else runs."""
    logprobs = body["meta_info"]["output_token_logprobs"]
    return tuple(body["output_ids"]), tuple(float(entry[0]) for entry in logprobs)


def token_differences(ours: Sequence[Served], theirs: Sequence[Served]) -> int:
    """How many answers have other tokens."""
    pairs = zip(ours, theirs, strict=True)
    return sum(a.answer[0] != b.answer[0] for a, b in pairs if a.answer and b.answer)


def bit_differences(ours: Sequence[Served], theirs: Sequence[Served]) -> int:
    """How many answers have other tokens or log-probabilities."""
    return sum(a.answer != b.answer for a, b in zip(ours, theirs, strict=True))


def _abort(server: Server, rid: str) -> None:
    with suppress(ServerError, OSError):
        server.post("/abort_request", {"rid": rid})
