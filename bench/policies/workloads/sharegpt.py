"""Conversations with the statistics that the paper states of ShareGPT (AttentionStore, 2.3, 4.2).

The data set itself is not used: the paper's facts about it are. Stated there, and met here for any
seed: 73 % of conversations have several turns, 5.75 turns on average, 47 % are over 2K and 30 %
over 4K tokens, none over 40 turns or 32K tokens (figure 2), one conversation starts a second
(Poisson).

Assumed, as the paper is silent: lengths are lognormal (the one through both quantiles), further
turns are geometric, longer conversations have more turns (rank correlation), two thirds of a turn
are the answer (vLLM's paper measured 161 tokens in and 338 out on ShareGPT), and a user returns
after an exponential time (mean 60 s) from the end of the last answer.

Draws are stratified: each of n equal parts of a distribution is drawn from once. So the shares and
means above hold to within 1/n and do not vary with the seed as those of independent draws would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_CONVERSATIONS = 9_000
CONVERSATIONS_PER_S = 1.0
THINK_S = 60.0
SINGLE_TURN = 0.27
MEAN_TURNS = 5.75
MAX_TURNS = 40
OVER_2K, OVER_4K = 0.47, 0.30
MAX_TOKENS = 32 * 1024
_RANK_CORRELATION = 0.7
_ANSWER_SHARE = 2 / 3
_MIN_TOKENS = 8  # of a question, and of an answer
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Conversations:
    """Conversations turn by turn; those of conversation c are `first[c] : first[c + 1]`.

    Attributes:
        start_s: when each conversation's first turn arrives, ascending.
        first: number of its first turn; one more entry than conversations.
        question_tokens: new tokens of each turn's prompt.
        answer_tokens: generated tokens of each turn.
        think_s: from the end of the turn before to this turn; 0 for first turns.
    """

    start_s: Floats
    first: Ints
    question_tokens: Ints
    answer_tokens: Ints
    think_s: Floats

    @property
    def num_turns(self) -> Ints:
        """Turns of each conversation."""
        return np.diff(self.first)

    @property
    def num_tokens(self) -> Ints:
        """Tokens of each conversation, questions and answers."""
        return np.add.reduceat(self.question_tokens + self.answer_tokens, self.first[:-1])


def sharegpt_like(
    seed: int,
    *,
    count: int = NUM_CONVERSATIONS,
    per_s: float = CONVERSATIONS_PER_S,
    think_s: float = THINK_S,
) -> Conversations:
    """Draws `count` conversations that start at `per_s` a second; users think for `think_s`."""
    random = np.random.default_rng(seed)
    turns, tokens = _turns_and_tokens(random, count)
    first = np.concatenate([[0], np.cumsum(turns)])
    total = int(first[-1])
    per_turn = _split(random, tokens, turns, first)
    answers = np.rint(per_turn * random.beta(4.0, 4.0 * (1 / _ANSWER_SHARE - 1), total))
    answers = np.clip(answers, _MIN_TOKENS, per_turn - _MIN_TOKENS).astype(np.int64)
    think = random.exponential(think_s, total)
    think[first[:-1]] = 0.0
    return Conversations(
        np.cumsum(random.exponential(1 / per_s, count)), first, per_turn - answers, answers, think
    )


def _turns_and_tokens(random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Turns and lengths of conversations, related by a Gaussian copula over their ranks."""
    base = random.standard_normal(count)
    rest = math.sqrt(1 - _RANK_CORRELATION**2)
    other = _RANK_CORRELATION * base + rest * random.standard_normal(count)
    turns = np.searchsorted(_turns_cdf(), _stratified(random, base), side="right") + 1
    mu, sigma, below_max = _length_law()
    parts = _stratified(random, other) * below_max
    tokens = np.exp(mu + sigma * np.array([_NORMAL.inv_cdf(part) for part in parts]))
    return turns, np.maximum(np.rint(tokens).astype(np.int64), 2 * _MIN_TOKENS * turns)


def _stratified(random: np.random.Generator, scores: Floats) -> Floats:
    """Uniform values in (0, 1), one from each of n equal parts, in the order of `scores`."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(len(scores))
    return (ranks + random.uniform(1e-6, 1 - 1e-6, len(scores))) / len(scores)


def _turns_cdf() -> Floats:
    """P(turns <= 1), P(turns <= 2), ... up to `MAX_TURNS`: a share of single turns, the rest
    geometric from two turns on, with the stated mean after the cut at `MAX_TURNS`."""
    more = np.arange(MAX_TURNS - 1)  # turns beyond the second
    wanted = (MEAN_TURNS - SINGLE_TURN) / (1 - SINGLE_TURN) - 2
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        weights = ratio**more
        low, high = (ratio, high) if weights @ more / weights.sum() < wanted else (low, ratio)
    probabilities = np.concatenate([[SINGLE_TURN], (1 - SINGLE_TURN) * weights / weights.sum()])
    cdf: Floats = np.cumsum(probabilities)
    cdf[-1] = 1.0
    return cdf


def _length_law() -> tuple[float, float, float]:
    """Lognormal mu, sigma and the share below `MAX_TOKENS`, cut there, with both stated shares."""
    below = 1.0
    for _ in range(200):
        low = _NORMAL.inv_cdf((1 - OVER_2K) * below)
        high = _NORMAL.inv_cdf((1 - OVER_4K) * below)
        sigma = math.log(2) / (high - low)
        mu = math.log(2048) - low * sigma
        below = _NORMAL.cdf((math.log(MAX_TOKENS) - mu) / sigma)
    return mu, sigma, below


def _split(random: np.random.Generator, tokens: Ints, turns: Ints, first: Ints) -> Ints:
    """Tokens of each turn: random parts that sum to the conversation's, each large enough."""
    shares = random.gamma(1.5, 1.0, int(first[-1])) + 1e-9
    shares /= np.repeat(np.add.reduceat(shares, first[:-1]), turns)
    spare = tokens - 2 * _MIN_TOKENS * turns
    sums = np.concatenate([[0.0], np.cumsum(shares)])
    ends = sums[1:] - np.repeat(sums[first[:-1]], turns)
    marks = np.rint(np.clip(ends, 0, 1) * np.repeat(spare, turns)).astype(np.int64)
    marks[first[1:] - 1] = spare
    before = np.concatenate([[0], marks[:-1]])
    before[first[:-1]] = 0
    parts: Ints = marks - before + 2 * _MIN_TOKENS
    return parts
