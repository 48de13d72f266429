"""Sessions as the lines of a trace: their requests in the order in which they come."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from sglang_ext.simulator.trace import BLOCK_TOKENS, Line
from sglang_ext.simulator.types import Conversation

_ANSWER_S = 5.0


def session_lines(sessions: Sequence[Conversation], *, limit: int | None = None) -> list[Line]:
    """The first `limit` requests, all by default.

    Each prompt is all that its session said before. An answer takes five seconds: who came when is
    not of interest where a trace is replayed in its order.
    """
    numbers: dict[tuple[str, int, int], int] = {}
    due = [(session.start_s, at, 0) for at, session in enumerate(sessions)]
    heapq.heapify(due)
    history = [session.prefix_tokens for session in sessions]
    lines: list[Line] = []
    while due and (limit is None or len(lines) < limit):
        now_s, at, number = heapq.heappop(due)
        session, turn = sessions[at], sessions[at].turns[number]
        tokens = history[at] + turn.new_tokens
        ids = [
            numbers.setdefault(key, len(numbers)) for key in _blocks(session, at, number, tokens)
        ]
        lines.append(Line(now_s, tokens, turn.output_tokens, np.array(ids, np.int64)))
        history[at] = tokens + turn.output_tokens
        if number + 1 < len(session.turns):
            heapq.heappush(due, (now_s + _ANSWER_S + turn.think_s, at, number + 1))
    return lines


def _blocks(session: Conversation, at: int, number: int, tokens: int) -> list[tuple[str, int, int]]:
    """What is in each block of a prompt: of a prefix, of the session alone, or of one request."""
    shared = session.prefix_tokens // BLOCK_TOKENS
    blocks = [
        ("prefix", session.prefix_id, block) if block < shared else ("session", at, block)
        for block in range(-(-tokens // BLOCK_TOKENS))
    ]
    if tokens % BLOCK_TOKENS:
        blocks[-1] = ("request", at, number)
    return blocks
