"""Agents with tools, and questions on documents (RAG): workloads of our own making.

No published statistics stand behind the numbers here; each is an assumption, chosen so that the two
differ from chat in what matters to a cache: prefixes that many sessions share, many short returns,
popularity that is far from uniform. Draws are seeded.

Agents: four kinds, each with one system prompt of tools (6K tokens) that all its tasks share. A
task is a geometric number of steps (mean 20, at most 60); a step adds a tool's output (lognormal,
median 400 tokens, sigma 1.2, at most 8K) and generates a call (lognormal, median 90 tokens). Most
tools return fast: 85 % after an exponential 2 s, 10 % after 30 s (tests, builds); 5 % wait for a
person (120 s).

RAG: 600 documents of 4K to 28K tokens (log-uniform; the paper's range in 4.3.8). A session takes
one by Zipf's law (exponent 1) and asks six questions of 256 tokens with answers of 64 (4.3.8), 30 s
apart (exponential).
"""

from __future__ import annotations

import numpy as np

from sglang_ext.simulator.engine import Conversation, Turn

AGENT_KINDS = 4
SYSTEM_TOKENS = 6 * 1024
MEAN_STEPS, MAX_STEPS = 20, 60
MAX_TOOL_TOKENS = 8 * 1024
TOOL_WAITS = ((0.85, 2.0), (0.10, 30.0), (0.05, 120.0))  # share, mean seconds

NUM_DOCUMENTS = 600
DOCUMENT_TOKENS = (4 * 1024, 28 * 1024)
NUM_QUESTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 6, 256, 64
QUESTION_GAP_S = 30.0


def agent_tasks(seed: int, count: int, per_s: float) -> list[Conversation]:
    """`count` tasks of agents that start at `per_s` a second (Poisson)."""
    random = np.random.default_rng(seed)
    starts = np.cumsum(random.exponential(1 / per_s, count))
    shares, means = zip(*TOOL_WAITS, strict=True)
    tasks = []
    for start in starts.tolist():
        steps = min(int(random.geometric(1 / MEAN_STEPS)), MAX_STEPS)
        tools = np.minimum(random.lognormal(np.log(400), 1.2, steps), MAX_TOOL_TOKENS)
        calls = np.minimum(random.lognormal(np.log(90), 0.7, steps), 1024)
        waits = random.exponential(np.array(means)[random.choice(len(means), steps, p=shares)])
        turns = tuple(
            Turn(max(int(tool), 8), max(int(call), 8), float(wait))
            for tool, call, wait in zip(tools, calls, waits, strict=True)
        )
        kind = int(random.integers(AGENT_KINDS))
        tasks.append(Conversation(start, turns, kind, SYSTEM_TOKENS))
    return tasks


def document_questions(seed: int, count: int, per_s: float) -> list[Conversation]:
    """`count` sessions of questions on a document each, starting at `per_s` a second (Poisson)."""
    random = np.random.default_rng(seed)
    starts = np.cumsum(random.exponential(1 / per_s, count))
    low, high = np.log(DOCUMENT_TOKENS)
    lengths = np.exp(random.uniform(low, high, NUM_DOCUMENTS)).astype(np.int64)
    popularity = 1 / np.arange(1, NUM_DOCUMENTS + 1)
    picks = random.choice(NUM_DOCUMENTS, count, p=popularity / popularity.sum())
    gaps = random.exponential(QUESTION_GAP_S, (count, NUM_QUESTIONS))
    return [
        Conversation(
            start,
            tuple(Turn(QUESTION_TOKENS, ANSWER_TOKENS, gap) for gap in gaps[at].tolist()),
            int(picks[at]),
            int(lengths[picks[at]]),
        )
        for at, start in enumerate(starts.tolist())
    ]


def long_document(tokens: int) -> list[Conversation]:
    """One session of 4.3.8: a document, then six tasks of 256 tokens in and 64 out."""
    turns = tuple(Turn(QUESTION_TOKENS, ANSWER_TOKENS, 1.0) for _ in range(NUM_QUESTIONS))
    return [Conversation(0.0, turns, 0, tokens)]


def footprint_tokens(sessions: list[Conversation]) -> int:
    """Distinct tokens of all sessions, shared prefixes once: what an unbounded cache would hold."""
    prefixes = {each.prefix_id: each.prefix_tokens for each in sessions if each.prefix_id >= 0}
    turns = (turn for each in sessions for turn in each.turns)
    return sum(prefixes.values()) + sum(turn.new_tokens + turn.output_tokens for turn in turns)
