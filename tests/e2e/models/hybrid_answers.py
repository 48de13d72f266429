"""What the tests of models with window layers or states share: prompts, answers and checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    ask,
    by_tier,
    real_prompts,
    send_in_halves,
    settled,
    tokens_and_logprobs,
)

NUM_TOKENS = 4  # of an answer; the last one is not computed


def answers(server: Server, prompts: Sequence[Sequence[int]], num: int = NUM_TOKENS) -> list[Any]:
    """Asks for the prompts one after the other, for `num` tokens each."""
    return [ask(server, prompt, num) for prompt in prompts]


def values(found: Sequence[Any]) -> list[Any]:
    """Tokens and log-probabilities of answers."""
    return [tokens_and_logprobs(answer) for answer in found]


def cached(found: Sequence[Any]) -> list[int]:
    """How many prompt tokens of each answer were reused."""
    return [int(answer["meta_info"]["cached_tokens"]) for answer in found]


def two_chats(shared: int, told: int, num_turns: int = 3) -> list[list[list[int]]]:
    """What is said in each turn of two chats.

    Args:
        shared: tokens that both begin with.
        told: tokens of each turn.
        num_turns: of each chat.
    """
    (head,) = real_prompts([shared], seed=5)
    texts = list(real_prompts([told] * 2 * num_turns, seed=6))
    turns = [texts[chat * num_turns : (chat + 1) * num_turns] for chat in range(2)]
    return [[[*head, *first], *others] for first, *others in turns]


def talk(
    server: Server,
    chats: Sequence[Sequence[Sequence[int]]],
    after_turn: Callable[[], None],
    num_tokens: int,
    **fields: Any,
) -> list[Any]:
    """A turn of each chat at a time; a prompt is what was said before, and more.

    Args:
        server: who answers.
        chats: what is said in each turn.
        after_turn: called behind each turn.
        num_tokens: of an answer.
        fields: of all requests.
    """
    told: list[list[int]] = [[] for _ in chats]
    out = []
    for turn in zip(*chats, strict=True):
        for prompt, text in zip(told, turn, strict=True):
            prompt += text
            answer = ask(server, prompt, num_tokens, **fields)
            prompt += answer["output_ids"]
            out.append(answer)
        after_turn()
    return out


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

    return send_in_halves(server, send, prompts)


class Computed:
    """What the same weights give without SGLang for the tokens of answers.

    Most prompts are asked for again and answered alike, or with fewer tokens, and computing without
    SGLang takes longer than with it, so what is known of a prompt is kept.

    Args:
        logits_of: for tokens, `[num_tokens, vocabulary]`.
    """

    def __init__(self, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits_of = logits_of
        self._known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}
        torch.set_num_threads(1)  # several spin at their barriers where others want the cores

    def furthest(self, prompts: Sequence[Sequence[int]], found: Sequence[Any]) -> float:
        """The largest difference of the answers' log-probabilities; NaN where one is."""
        differences = []
        for prompt, tokens, logprobs in longest_first(prompts, found):
            wanted = self.rows(prompt, tokens)[torch.arange(len(tokens)), torch.tensor(tokens)]
            differences.append((wanted - torch.tensor(logprobs)).abs().max())
        return float(torch.stack(differences).max())

    def rows(self, prompt: Sequence[int], tokens: list[int]) -> torch.Tensor:
        """Log-probabilities in the place of each token of an answer."""
        known, rows = self._known.get(tuple(prompt), ([], torch.empty(0)))
        if known[: len(tokens)] != tokens:
            with torch.no_grad():
                logits = self._logits_of(torch.tensor([[*prompt, *tokens]]))
            rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
            self._known[tuple(prompt)] = tokens, rows
        return rows[: len(tokens)]


def longest_first(
    prompts: Sequence[Sequence[int]], found: Sequence[Any]
) -> list[tuple[Sequence[int], list[int], list[float]]]:
    """Prompts, tokens and log-probabilities: what one answer needs is then there for others."""
    told = zip(prompts, map(tokens_and_logprobs, found), strict=True)
    each = [(prompt, tokens, logprobs) for prompt, (tokens, logprobs) in told]
    return sorted(each, key=lambda one: -len(one[1]))
