"""Prompts of real text, and what plain SGLang answers to them.

Where KV comes from a cache the rounding differs in the last bits from where it is computed, in
plain SGLang too. So there is a reference for each number of cached pages that a fault leaves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.faults.tally import check
from testkit.requests import by_tier, flush_device
from testkit.server import Server
from testkit.workload import load_texts, load_tokenizer

PAGE_TOKENS = 64
PROMPT_PAGES = 10
PROMPT_TOKENS = PROMPT_PAGES * PAGE_TOKENS + 17
MAX_NEW_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities, and where the prompt's KV came from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    by_tier: dict[str, int] = field(default_factory=dict)

    def same_output(self, other: Answer) -> bool:
        """Whether tokens and log-probabilities are equal, bit for bit."""
        return (self.token_ids, self.logprobs) == (other.token_ids, other.logprobs)


class PromptSource:
    """Windows of the bundled documents, no two with the same first page."""

    def __init__(self, seed: int) -> None:
        texts = load_texts(load_tokenizer())
        self._tokens = [token for text in texts for token in text]
        self._starts = list(range(0, len(self._tokens) - PROMPT_TOKENS, 7))
        random.Random(seed).shuffle(self._starts)

    def take(self, count: int) -> list[list[int]]:
        """The next `count` prompts."""
        starts, self._starts = self._starts[:count], self._starts[count:]
        return [self._tokens[start : start + PROMPT_TOKENS] for start in starts]


def ask(server: Server, prompt: list[int], **fields: Any) -> Answer:
    """Sends one prompt.

    Raises:
        ServerError, OSError: the request failed.
    """
    answer = server.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
        **fields,
    )
    meta = answer["meta_info"]
    return Answer(
        token_ids=tuple(answer["output_ids"]),
        logprobs=tuple(float(entry[0]) for entry in meta["output_token_logprobs"]),
        cached_tokens=int(meta["cached_tokens"]),
        by_tier=by_tier(meta),
    )


class References:
    """Plain SGLang's answers. Not thread-safe.

    Args:
        server: plain SGLang with pages of the same size and room for every prompt.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answers: dict[tuple[tuple[int, ...], int], Answer] = {}

    def learn(
        self, prompts: Iterable[list[int]], other_tail: list[int], pages: Iterable[int] = ()
    ) -> None:
        """Asks for the answers with nothing, with all, and with `pages` pages cached.

        Args:
            prompts: the prompts.
            other_tail: a prompt whose end none of them shares.
            pages: numbers of leading pages; each is asked for with the cache emptied before.
        """
        for prompt in prompts:
            self._keep(prompt, 0)
            self._keep(prompt, PROMPT_PAGES)
            for count in pages:
                flush_device(self._server)
                at = count * PAGE_TOKENS
                ask(self._server, prompt[:at] + other_tail[at:])
                self._keep(prompt, count)

    def _keep(self, prompt: list[int], pages: int) -> None:
        answer = ask(self._server, prompt)
        expected = pages * PAGE_TOKENS
        check(answer.cached_tokens == expected, f"{answer.cached_tokens} cached, not {expected}")
        self._answers[tuple(prompt), pages] = answer

    def agree(self, prompt: list[int], answer: Answer) -> bool:
        """Whether an answer is plain SGLang's, bit for bit, given as many cached pages or fewer.

        Fewer, because pages that a fault lost are computed again behind those that were left, and
        saved: their KV is that of the answer that was given then.

        Raises:
            FaultCheckError: no reference has that number of pages.
        """
        pages = answer.cached_tokens // PAGE_TOKENS
        check(self.knows(prompt, pages), f"there is no reference with {pages} pages cached")
        return any(
            answer.same_output(self._answers[tuple(prompt), count])
            for count in range(pages + 1)
            if self.knows(prompt, count)
        )

    def knows(self, prompt: list[int], pages: int) -> bool:
        """Whether there is a reference with so many cached pages."""
        return (tuple(prompt), pages) in self._answers
