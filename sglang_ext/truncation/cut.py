"""Which tokens of a prompt that is too long are kept: its head, and its end from a message on.

A cut keeps `[0, head)` and `[tail_start, num_tokens)` (AttentionStore, section 3.4: the oldest are
dropped by a ratio). The next turn brings the whole history again, and must be cut at the same
place, or nothing stored for the last turn is of use. The rule has no memory; it is stable because
the places are a function of the content alone:

    start_0 = head
    start_k+1 = a place in (start_k, start_k + upper], from the message boundaries in there
    the cut is the first start_k from which the prompt fits

`upper` is less than what the window holds, so that when the prompt no longer fits behind start_k,
everything that decides start_k+1 is part of it already. A longer prompt with the same beginning
therefore goes through the same places, then perhaps further ones.

Two things differ from turn to turn without the content: where the turn ends, which only says how
many of the places are passed, and the room that its output wants. So that a little more or less of
`max_new_tokens` does not move the places, room counts in classes: the places are those of a window
of `(context - head) * q^j`, for the largest j that leaves it no smaller than the window of this
turn, with q = (3 + ratio) / 4, which is 7/8 for a ratio of a half. Within a class more room may
pass one place more, earlier in the conversation, and moves none. Another class has other places;
a conversation that asks for its old room again comes back to those of before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sglang_ext.settings.config import TRUNCATION_RATIOS

I64 = npt.NDArray[np.int64]
_T = TypeVar("_T")

DEFAULT_RATIO = 0.5
DEFAULT_HEAD_TOKENS = 4  # attention sinks: the first tokens take what attention has to spare
_DEFAULT_ROOM_SHARE = 16  # of the context, kept free for an output of no stated length
_MOST_ROOM_SHARE = 2
_LEAST_TAIL_SHARE = 8  # of the limit: less than that behind the head is refused
_LEAST_KEPT = 16  # tokens that a cut leaves at least


class CutRefusedError(ValueError):
    """A prompt that cannot be cut; the message is one sentence for the client."""


def _nowhere() -> I64:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Messages:
    """Where messages begin in a prompt.

    Attributes:
        all: int64, ascending: the first token of each message but the system prompt.
        turns: int64, ascending: those of the user's messages; a cut prefers them.
    """

    all: I64 = field(default_factory=_nowhere)
    turns: I64 = field(default_factory=_nowhere)

    @property
    def first(self) -> int | None:
        """Where the first message begins, which is where the system prompt ends."""
        return int(self.all[0]) if self.all.size else None


NO_MESSAGES = Messages()


@dataclass(frozen=True)
class Cut:
    """What is kept of a prompt: `[0, head)` and `[tail_start, num_tokens)`.

    Attributes:
        num_tokens: of the whole prompt.
        head: tokens kept at its beginning.
        starts: where the tail began after the first cut, the second, ...; empty: all is kept.
    """

    num_tokens: int
    head: int
    starts: tuple[int, ...] = ()

    @property
    def tail_start(self) -> int:
        """Where the tail begins in the whole prompt."""
        return self.starts[-1] if self.starts else self.head

    @property
    def is_cut(self) -> bool:
        """Whether anything is dropped."""
        return bool(self.starts)

    @property
    def num_dropped(self) -> int:
        """Tokens between head and tail."""
        return self.tail_start - self.head

    @property
    def num_kept(self) -> int:
        """Tokens of head and tail."""
        return self.num_tokens - self.num_dropped

    def keep(self, tokens: Sequence[_T]) -> list[_T]:
        """The kept ones of `tokens` [num_tokens], as a new list.

        Raises:
            ValueError: another number of tokens than was cut.
        """
        if len(tokens) != self.num_tokens:
            raise ValueError(f"the cut is of {self.num_tokens} tokens, not of {len(tokens)}")
        return [*tokens[: self.head], *tokens[self.tail_start :]]

    def ancestors(self) -> list[int]:
        """Tail starts of the lineages that hold this one's text, newest first.

        The last is `head`: the prompt before any cut. A token at i of the whole prompt stands at
        `head + i - a` in the lineage whose tail starts at a. An ancestor may never have been
        computed, where one turn was long enough to skip it.
        """
        return [*reversed(self.starts[:-1]), self.head] if self.starts else []


@dataclass(frozen=True)
class CutRule:
    """The rule of the module's description.

    Attributes:
        context_len: tokens that prompt and output may have together; the same for all requests.
        ratio: share of the window behind the head that a cut should drop. The cut is at the message
            boundary nearest to that; it drops at least half of that share, unless one message
            fills the rest.
        head_tokens: kept at the beginning even without a system prompt.
        align: where no boundary serves, the number of dropped tokens is a multiple of this.

    Raises:
        ValueError: values with which no prompt can be cut.
    """

    context_len: int
    ratio: float = DEFAULT_RATIO
    head_tokens: int = DEFAULT_HEAD_TOKENS
    align: int = 1

    def __post_init__(self) -> None:
        least, most = TRUNCATION_RATIOS
        if not least <= self.ratio <= most:
            raise ValueError(
                f"the truncation ratio lies between {least:g} and {most:g}, got {self.ratio}"
            )
        if self.head_tokens < 0 or self.align < 1:
            raise ValueError(
                f"head tokens must not be negative and the alignment at least 1, got "
                f"{self.head_tokens} and {self.align}"
            )
        most = self.context_len - self.context_len // _MOST_ROOM_SHARE - self._least_tail(0)
        if self.head_tokens > most:
            raise ValueError(
                f"a head of {self.head_tokens} tokens leaves too little of a context of "
                f"{self.context_len} to truncate to; take at most {max(0, most)}"
            )

    def room(self, max_new_tokens: int | None) -> int:
        """Tokens to keep free for an output.

        Args:
            max_new_tokens: what the client asked for; None for as much as there is.
        """
        if max_new_tokens is None:
            return max(1, self.context_len // _DEFAULT_ROOM_SHARE)
        return max(1, min(max_new_tokens, self.context_len // _MOST_ROOM_SHARE))

    def head_len(self, first_message: int | None) -> int:
        """Tokens of the head, from where the first message after a system prompt begins."""
        return max(self.head_tokens, first_message or 0)

    def cut(self, num_tokens: int, limit: int, head: int, messages: Messages = NO_MESSAGES) -> Cut:
        """Where to cut a prompt.

        A prompt that fits is not cut. The last message is cut in the middle only if head and
        message together exceed the limit.

        Args:
            num_tokens: of the whole prompt, as the client sent it.
            limit: tokens that may be kept; `context_len - room(...)`.
            head: tokens kept at the beginning.
            messages: where messages begin.

        Raises:
            CutRefusedError: the head leaves too little of the limit.
        """
        limit = min(limit, self.context_len)
        if num_tokens <= limit:
            return Cut(num_tokens, head)
        if limit - head < self._least_tail(limit):
            raise CutRefusedError(
                f"The prompt of {num_tokens} tokens is over the limit of {limit}, and its first "
                f"{head} tokens (system prompt), which truncation keeps, leave too little room "
                f"for the rest; shorten them or ask for fewer new tokens."
            )
        window = self._window(limit - head, head)
        starts: list[int] = []
        start = head
        while head + num_tokens - start > limit:
            start = self._next(start, head, window, messages)
            starts.append(start)
        return Cut(num_tokens, head, tuple(starts))

    def _ratio(self) -> Fraction:
        return Fraction(self.ratio).limit_denominator(1 << 16)  # whole numbers on every machine

    def _least_tail(self, limit: int) -> int:
        # Enough that a quarter of what a cut keeps holds the marks of a message.
        least = -(-_LEAST_KEPT // (1 - self._ratio()))
        return max(limit // _LEAST_TAIL_SHARE, int(least))

    def _window(self, available: int, head: int) -> int:
        """The nominal window of the class that `available` tokens behind the head fall in."""
        q = (3 + self._ratio()) / 4
        window = self.context_len - head
        while int(window * q) >= available:
            window = int(window * q)
        return window

    def _next(self, start: int, head: int, window: int, messages: Messages) -> int:
        """Where the tail starts after the cut that follows one at `start`."""
        ratio = self._ratio()
        target = start + -int(-ratio * window // 1)
        upper = max(target, start + int((1 + ratio) / 2 * window))
        lower = (start + target) // 2
        for places in (messages.turns, messages.all):
            near = _between(places, lower, upper)
            if near.size:
                return int(near[np.argmin(np.abs(near - target))])
        # One message fills all that. The cut comes before it: if it is the last it may fit.
        before = _between(messages.all, start, lower)
        if before.size:
            return int(before[-1])
        aligned = head + -(-(target - head) // self.align) * self.align
        return aligned if aligned <= upper else target


def _between(places: I64, above: int, most: int) -> I64:
    """Those of some ascending places that are above one and at most another."""
    first, end = np.searchsorted(places, (above, most), side="right")
    return places[first:end]
