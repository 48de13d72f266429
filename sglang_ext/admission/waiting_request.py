"""A waiting request as `waiting.py` sees it: what it could reuse, and how far that has come."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.load_or_compute import Candidate
from sglang_ext.tiers.store import KeySpace, Plan, TierCounts
from sglang_ext.tiers.store.shared.inquiry import RemoteInquiry
from sglang_ext.tiers.store.shared.pages import num_leading
from sglang_ext.tiers.store.types import Hashes

# Between two attempts to complete a plan for which DRAM had no free slot: the scheduler polls all
# the time, and an attempt looks up the whole prefix.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.032
UNKNOWN = -1


class Stand(enum.IntEnum):
    """What one rank thinks of a waiting request. Of several ranks the least counts."""

    LATE = 0  # waited long enough: go on with what is there
    WAITING = 1
    READY = 2  # nothing more will come


@dataclass(frozen=True)
class Wish:
    """What a waiting request could reuse.

    Attributes:
        space: namespace and adapter.
        hashes: u8 `[N, 32]`, its pages from the root on.
        num_above: leading pages that are on the device.
        max_quality: the worst that it may be given.
        above: what says whether those are still there; for `WaitingRoom`'s `num_held`.
        prompt_tokens: tokens of the whole prompt.
    """

    space: KeySpace
    hashes: Hashes
    num_above: int
    max_quality: int
    above: Any = None
    prompt_tokens: int = 0

    @property
    def below(self) -> Hashes:
        """The pages that are not on the device."""
        return self.hashes[self.num_above :]

    def candidate(
        self, page_tokens: int, remote_sizes: npt.NDArray[np.int64] | None = None
    ) -> Candidate:
        """The same for the cost model."""
        above = self.num_above * page_tokens
        return Candidate(
            self.space, self.below, self.max_quality, above, self.prompt_tokens, remote_sizes
        )


@dataclass
class Waiting:
    """A waiting request.

    Attributes:
        handle: SGLang's name of it.
        number: the store's; a number is cheaper to look up by.
        wish: what it could reuse.
        found: where its pages lay when they were last looked for.
        plan: keeps or brings them; None before its turn, or when nothing is stored.
        num_asked: leading pages that the plan was to bring.
        ready: the plan brought what it can, as of this step.
        held_since_s: when it was first held back.
        gave_up: its deadline is over, or DRAM has no room for it.
        asked: without look-ahead: its place among those that the scheduler would have run, by when
            it first would; None: it would not yet.
        had_turn: without look-ahead: its plan was made, or looked at, when the scheduler would
            have run it.
        evictions: `PageStore.num_wanted_evicted` when its pages were last looked for, or UNKNOWN
            when they have to be looked for again.
        inquiry: what the remote store was asked; None when it was not.
        answered: its answer was taken, or is not waited for.
        remote_failed: the store did not give what it had said it has; it is not asked again.
        arrived_s: when it entered the queue.
    """

    handle: Hashable
    number: int
    wish: Wish
    found: TierCounts
    evictions: int
    plan: Plan | None = None
    num_asked: int = 0
    ready: bool = False
    held_since_s: float | None = None
    gave_up: bool = False
    asked: int | None = None
    had_turn: bool = False
    attempts: int = 0
    pause_s: float = FIRST_PAUSE_S
    next_plan_s: float = 0.0
    inquiry: RemoteInquiry | None = None
    answered: bool = True
    remote_failed: bool = False
    arrived_s: float = 0.0

    def remote_sizes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of the pages below the device that the remote store has; 0 for the others."""
        inquiry = self.inquiry
        if inquiry is None or not self.answered or self.remote_failed or not len(inquiry.sizes):
            return None
        sizes = np.zeros(len(self.wish.below), np.int64)
        first = inquiry.first_page - self.wish.num_above
        sizes[first : first + len(inquiry.sizes)] = inquiry.sizes
        return sizes

    def with_remote(self, found: TierCounts) -> TierCounts:
        """What is here, with what the remote store has behind that."""
        sizes = self.remote_sizes()
        return found if sizes is None else found._replace(remote=num_leading(sizes[found.here :]))

    def may_plan_again(self, now_s: float) -> bool:
        """Whether the turn of a plan that is short has come; the pauses between turns grow."""
        if now_s < self.next_plan_s:
            return False
        self.next_plan_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        self.attempts += 1
        return True
