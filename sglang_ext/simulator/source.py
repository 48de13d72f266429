"""Where the simulator's requests come from: conversations and traces."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import numpy as np

from sglang_ext.simulator.types import (
    Conversation,
    Ids,
    Request,
    System,
    TraceRequest,
)


class Source(abc.ABC):
    """Gives requests; page ids are below `num_pages`.

    Attributes:
        num_pages: bound of the page ids.
        num_requests: how many requests it gives in all.
    """

    num_pages: int
    num_requests: int

    @abc.abstractmethod
    def starts(self) -> list[tuple[float, int]]:
        """(time, key) of what arrives without waiting for anything."""

    @abc.abstractmethod
    def arrive(self, key: int, number: int, now_s: float) -> Request:
        """The request behind a key, at its arrival."""

    @abc.abstractmethod
    def done(self, request: Request, now_s: float) -> tuple[float, int] | None:
        """(time, key) of the arrival that follows from this answer."""


class TraceSource(Source):
    """Open loop."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self.num_requests = len(trace)
        self._trace = trace
        lengths = np.array([len(request.page_ids) for request in trace])
        flat = np.concatenate([request.page_ids for request in trace])
        known, dense = np.unique(flat, return_inverse=True)
        self.num_pages = len(known)
        self._paths = np.split(dense.astype(np.int64), np.cumsum(lengths)[:-1])

    def starts(self) -> list[tuple[float, int]]:
        """See `Source.starts`."""
        return [(request.arrival_s, key) for key, request in enumerate(self._trace)]

    def arrive(self, key: int, number: int, now_s: float) -> Request:
        """See `Source.arrive`."""
        request, path = self._trace[key], self._paths[key]
        return Request(number, now_s, path, path, request.input_tokens, request.output_tokens)

    def done(self, request: Request, now_s: float) -> None:
        """See `Source.done`."""
        return


class _State:
    """Where a conversation stands: next turn, whole pages of its context, tokens of its context."""

    __slots__ = ("context", "head_pages", "pages", "turn")

    def __init__(self) -> None:
        self.turn = 0
        self.pages = np.zeros(0, np.int64)
        self.context = 0
        self.head_pages = 0


class ConversationSource(Source):
    """Closed loops. Pages are numbered as they come to be."""

    def __init__(self, conversations: Sequence[Conversation], system: System) -> None:
        self._conversations = conversations
        self._system = system
        self._states = [_State() for _ in conversations]
        self._prefixes: dict[int, Ids] = {}
        self._next_page = 0
        self.num_requests = sum(len(each.turns) for each in conversations)
        self.num_pages = self._page_bound()

    def starts(self) -> list[tuple[float, int]]:
        """See `Source.starts`."""
        return [(each.start_s, key) for key, each in enumerate(self._conversations) if each.turns]

    def arrive(self, key: int, number: int, now_s: float) -> Request:
        """See `Source.arrive`."""
        system, state = self._system, self._states[key]
        conversation = self._conversations[key]
        turn = conversation.turns[state.turn]
        prefix = self._begin(state, conversation) if state.turn == 0 else 0
        window = system.context_window
        output = min(turn.output_tokens, window // 2)
        new = min(turn.new_tokens, window - output - state.head_pages * system.page_tokens)
        new = max(new, 1)
        lost, left = self._truncate(state, new + prefix + output)
        history = 0 if prefix else state.context
        prompt = state.context + prefix + new  # one of the two is 0
        known = state.pages
        whole = (prompt + output) // system.page_tokens
        stored = np.concatenate([known, self._new_pages(whole - len(known))])
        reusable = len(known) + lost if not prefix else 0
        prompt_ids = known[: min(len(known), prompt // system.page_tokens)]
        state.turn += 1
        state.pages, state.context = stored, prompt + output
        return Request(
            number,
            now_s,
            prompt_ids,
            stored,
            prompt,
            output,
            history,
            reusable,
            key,
            left,
            left_at=state.head_pages if len(left) else 0,
        )

    def done(self, request: Request, now_s: float) -> tuple[float, int] | None:
        """See `Source.done`."""
        turns = self._conversations[request.source].turns
        turn = self._states[request.source].turn
        return (now_s + turns[turn - 1].think_s, request.source) if turn < len(turns) else None

    def _begin(self, state: _State, conversation: Conversation) -> int:
        """Gives a new conversation the pages of its shared prefix; returns the prefix's length."""
        if conversation.prefix_id < 0:
            return 0
        pages = conversation.prefix_tokens // self._system.page_tokens
        if conversation.prefix_id not in self._prefixes:
            self._prefixes[conversation.prefix_id] = self._new_pages(pages)
        state.pages = self._prefixes[conversation.prefix_id]
        state.head_pages = pages
        return conversation.prefix_tokens

    def _truncate(self, state: _State, coming: int) -> tuple[int, Ids]:
        """Drops the oldest behind the head until what comes fits.

        Returns:
            Pages of the kept tail that are not reused, because their KV is bound to its position;
            and the pages that the conversation goes on without.
        """
        system, size, head = self._system, self._system.page_tokens, state.head_pages
        dropped = 0
        step = max(math.ceil(system.truncation_ratio * system.context_window / size), 1)
        while state.context - dropped * size + coming > system.context_window:
            if head + dropped >= len(state.pages):
                break
            dropped = min(dropped + step, len(state.pages) - head)
        if not dropped:
            return 0, state.pages[:0]
        left, tail = state.pages[head : head + dropped], state.pages[head + dropped :]
        state.context -= dropped * size
        if state.context + coming > system.context_window:  # nothing left to drop but a part page
            state.context = head * size
        if system.truncation:
            state.pages = np.concatenate([state.pages[:head], tail])
            return 0, left
        left, state.pages = state.pages[head:], state.pages[:head]
        return len(tail), left

    def _new_pages(self, count: int) -> Ids:
        first = self._next_page
        self._next_page += max(count, 0)
        return np.arange(first, self._next_page)

    def _page_bound(self) -> int:
        """Pages that can come to be at most."""
        size, window = self._system.page_tokens, self._system.context_window
        bound = 1
        for each in self._conversations:
            context = each.prefix_tokens
            for turn in each.turns:
                added = turn.new_tokens + turn.output_tokens
                context += added
                overflows = not self._system.truncation and context > window
                bound += (window if overflows else min(added, 2 * window)) // size + 2
            bound += each.prefix_tokens // size
        return bound
