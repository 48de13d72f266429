"""What the tests of models with window layers or states share: prompts, answers and checks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import ask, by_tier, real_prompts, settled, tokens_and_logprobs

NUM_TOKENS = 4  # of an answer; the last one is not computed
_CLIENTS = 6


def answers(server: Server, prompts: Sequence[Sequence[int]], num: int = NUM_TOKENS) -> list[Any]:
    """Asks for the prompts one after the other, for `num` tokens each."""
    return [ask(server, prompt, num) for prompt in prompts]


def values(found: Sequence[Any]) -> list[Any]:
    """Tokens and log-probabilities of answers."""
    return [tokens_and_logprobs(answer) for answer in found]


def cached(found: Sequence[Any]) -> list[int]:
    """How many prompt tokens of each answer were reused."""
    return [int(answer["meta_info"]["cached_tokens"]) for answer in found]


def drop_device(server: Server) -> None:
    """Leaves nothing on the device, and all that was computed in a tier."""
    settled(server)
    flush_device(server)


def check_hits(found: list[Any], wanted: list[Any], tier: str, *, above: int = 0) -> None:
    """Answers are those of device hits, and nearly all of what was reused lay in `tier`.

    Args:
        found: answers.
        wanted: those of device hits.
        tier: `host`, `disk` or `remote`.
        above: more tokens than these were reused, of all answers together.
    """
    assert cached(found) == cached(wanted), (cached(found), cached(wanted))
    assert sum(cached(found)) > above
    from_tier = [by_tier(answer).get(tier, 0) for answer in found]
    assert sum(from_tier) > 0.9 * sum(cached(found)), (tier, from_tier)
    assert values(found) == values(wanted)


def branching_prompts(rng: random.Random, num_trunks: int, count: int) -> list[list[int]]:
    """Prompts that begin alike and part anywhere."""
    trunks = list(real_prompts([700] * num_trunks, seed=8))
    prompts = []
    for _ in range(count):
        head = rng.choice(trunks)[: rng.randint(30, 700)]
        prompts.append([*head, *rng.choice(trunks)[: rng.randint(1, 150)]])
    return prompts


def answers_at_once(
    server: Server, prompts: Sequence[list[int]], rng: random.Random, longest: int
) -> list[Any]:
    """Asks for prompts, some at a time; most for a few tokens, some for `longest`."""

    def send(prompt: list[int]) -> Any:
        return ask(server, prompt, rng.choice((1, 5, 5, longest)))

    with ThreadPoolExecutor(_CLIENTS) as pool:
        return list(pool.map(send, prompts))
