"""Answers under one set of weights, compared with those under another."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

from testkit.server import Server
from tests.e2e.hier_server import PAGE, ask

# Mean difference of log-probabilities: what another batch makes (0.03 seen) and what KV of other
# weights makes (over 0.45 seen), with room on both sides.
ROUNDING, NOISE = 0.08, 0.3
LISTENED = list(range(64, 4096, 63))  # tokens whose log-probabilities are compared
NUM_NEW_TOKENS = 3


@dataclass
class Answer:
    """Tokens of an answer, and for each place in it the log-probabilities of `LISTENED`."""

    tokens: list[int]
    logprobs: list[list[float]]


def request(server: Server, prompt: list[int], **fields: Any) -> tuple[Answer, dict[str, Any]]:
    reply = ask(server, prompt, NUM_NEW_TOKENS, token_ids_logprob=LISTENED, **fields)
    places = reply["meta_info"]["output_token_ids_logprobs"]
    return Answer(reply["output_ids"], [[entry[0] for entry in place] for place in places]), reply


def distance(found: Answer, wanted: Answer) -> float:
    """Largest mean difference of log-probabilities of a place, up to where the tokens part."""
    worst = 0.0
    for place, (token, other) in enumerate(zip(found.tokens, wanted.tokens, strict=True)):
        pairs = zip(found.logprobs[place], wanted.logprobs[place], strict=True)
        worst = max(worst, mean(abs(a - b) for a, b in pairs))
        if token != other:
            break
    return worst


def hit(server: Server, prompt: list[int]) -> Answer:
    ask(server, prompt, 1)
    answer, reply = request(server, prompt)
    assert reply["meta_info"]["cached_tokens"] >= len(prompt) // PAGE * PAGE - PAGE
    return answer
