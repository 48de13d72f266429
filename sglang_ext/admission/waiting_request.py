"""The record of a waiting request: what it could reuse, what that costs, how far it has come."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.resume_points import PromptPoints
from sglang_ext.device.composition import Composition
from sglang_ext.tiers.policy.cost_model import DramDecision, LoadChoice, LoadDecision
from sglang_ext.tiers.store import KeySpace, Plan, TierCounts
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from sglang_ext.tiers.store.remote.remote_pages import num_leading
from sglang_ext.tiers.store.types import Hashes

# Between two attempts to complete a plan for which DRAM had no free slot: the scheduler polls all
# the time, and an attempt looks up the whole prefix.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.032
UNKNOWN = -1
NO_LIMIT = 0x7FFF_FFFF  # pages; more than any prompt has
_COMPUTES = (LoadChoice.PARTIAL, LoadChoice.RECOMPUTE)


class Readiness(enum.IntEnum):
    """Whether one rank would run a waiting request. Of several ranks the least counts."""

    LATE = 0  # waited long enough: go on with what is there
    WAITING = 1
    READY = 2  # nothing more will come


class Remote(enum.Enum):
    """What is known of a request's pages in the remote store: one of these at a time.

    Of NOT_ASKED comes ASKED, of this ANSWERED or UNANSWERED, of ANSWERED comes FAILED. Where its
    pages become others (`look_again`), NOT_ASKED follows once more, but on the last two nothing.
    """

    NOT_ASKED = "not_asked"  # nothing to ask for, or nobody to ask
    ASKED = "asked"  # its answer is waited for
    ANSWERED = "answered"
    UNANSWERED = "unanswered"  # it was too late, and counts no more
    FAILED = "failed"  # it did not give what it had said it has


class Awaited(enum.Enum):
    """What a request was held for, all the time taken together; the first that is true of it.

    The value is the name under which the wait is counted and told of.
    """

    BOTH = "disk_remote"
    DISK = "disk"
    REMOTE = "remote"
    UNDERWAY = "underway"
    ROOM = "room"
    STEP = "step"


# Of what a request was held for in some step; `Awaited` in the end.
_DISK, _REMOTE, _UNDERWAY, _ROOM = 1, 2, 4, 8
_AWAITED = {
    _DISK | _REMOTE: Awaited.BOTH,
    _DISK: Awaited.DISK,
    _REMOTE: Awaited.REMOTE,
    _UNDERWAY: Awaited.UNDERWAY,
    _ROOM: Awaited.ROOM,
    0: Awaited.STEP,
}


class Shortfall(enum.IntEnum):
    """Why a request did not get all that was stored for it."""

    TOO_SLOW = 0  # computing was, or was expected to be, quicker; or it was late
    NO_ROOM = 1  # DRAM had no room for it
    FAILED = 2  # a page was damaged, or could not be read or fetched
    NOT_RESUMABLE = 3  # no window or state is stored where the prompt could go on
    UNANSWERED = 4  # the remote store had not said in time what it has


@dataclass(frozen=True)
class CutPrompt:
    """What several ranks agreed on of a prompt that was cut, when it entered the queue.

    Attributes:
        composition: how pages of it are made of `ReusablePrefix.hashes`; None: these are its own.
        num_pages: whole pages of the prompt.
        again: what it could reuse behind so many pages on the device, as of now; asks all ranks.
    """

    composition: Composition | None
    num_pages: int
    again: Callable[[int], ReusablePrefix]


@dataclass(frozen=True)
class ReusablePrefix:
    """What a waiting request could reuse.

    Attributes:
        space: namespace and adapter.
        hashes: u8 `[N, 32]`, its pages from the root on.
        num_on_device: leading pages that are on the device.
        max_quality: the worst that it may be given.
        device_anchor: says which of those are still there; see `WaitingRoom`.
        prompt_tokens: tokens of the whole prompt.
        look_again: what `hashes` and `resumes_at` would be now, where that is more than whether
            those are stored; None where it is not.
        points: of a hybrid's prompt, where several ranks have to agree on one of them.
        resumes_at: of a hybrid: pages behind which the prompt goes on with `hashes`.
        path: u8 `[M, 32]`, of a hybrid: the prompt's pages that can be loaded at most, where more
            of them may become of use while it waits; None: it is not looked for.
        cut: of a prompt that was cut, where several ranks have to agree on it.
        tokens_before: tokens of a cut prompt that are on the device; `hashes` is of those behind.
    """

    space: KeySpace
    hashes: Hashes
    num_on_device: int
    max_quality: int
    device_anchor: Any = None
    prompt_tokens: int = 0
    look_again: Callable[[], tuple[Hashes, int]] | None = None
    points: PromptPoints | None = None
    resumes_at: int | None = None
    path: Hashes | None = None
    cut: CutPrompt | None = None
    tokens_before: int = 0

    @property
    def next_page(self) -> Hashes:
        """The first page of a hybrid's `path` that it could not reuse; u8 `[n, 32]`, n <= 1."""
        if self.path is None or self.resumes_at is None:
            return self.hashes[:0]
        return self.path[self.resumes_at : self.resumes_at + 1]

    @property
    def off_device(self) -> Hashes:
        """The pages that are not on the device."""
        return self.hashes[self.num_on_device :]


class Moves(NamedTuple):
    """What would be moved for a request, on average."""

    page_bytes: float  # to be read, and to be decoded, for a page on disk
    decoded_bytes: float
    num_remote: int
    remote_page_bytes: float


@dataclass
class Estimate:
    """What the cost model thinks of a request; `load_or_compute.py` makes and uses it.

    Attributes:
        verdict: what to do about its pages elsewhere.
        moves: what that would move.
        turn_at_s: when the requests before it should be through, by their prefills alone.
        num_left_at_turn: how many requests will have left the queue then.
        compute_s: what its own prefill should take.
        judged_at_s: when the verdict was made.
        judged_pages: of how many leading pages off the device.
        held_since_s: when it was first asked whether to wait for its pages.
        budget_s: what all of its pages would have saved then; None where that is not known.
        asked_at_s: when it was last found worth waiting.
    """

    verdict: LoadDecision
    moves: Moves
    turn_at_s: float
    num_left_at_turn: int
    compute_s: float
    judged_at_s: float
    judged_pages: int
    held_since_s: float | None = None
    budget_s: float | None = None
    asked_at_s: float = -math.inf

    @property
    def computes(self) -> bool:
        """Whether some of what is stored for it is to be computed."""
        return self.verdict.choice in _COMPUTES


class DramShare(NamedTuple):
    """How many of the pages that a request has in DRAM are to be loaded.

    Attributes:
        device_tokens: tokens on the device, as of when that was decided.
        num_pages: pages behind those that were in DRAM.
        decision: the decision.
        num_needless: leading pages of these that the last match had no use for, as they were on
            the device by then.
        loads: whether several ranks agreed on loading any; true with one rank.
    """

    device_tokens: int
    num_pages: int
    decision: DramDecision
    num_needless: int = 0
    loads: bool = True

    @property
    def is_probe(self) -> bool:
        """Whether a few are loaded as a measurement."""
        return self.decision.is_probe and self.loads

    @property
    def num_left(self) -> int:
        """Pages that are computed though they are in DRAM, as that is quicker on this rank."""
        is_given_up = self.decision.is_probe and not self.loads
        num_wanted = 0 if is_given_up else self.decision.pages
        return max(0, self.num_pages - max(num_wanted, self.num_needless))


@dataclass
class WaitingRequest:
    """A waiting request.

    Whether it has a `plan`, had its turn, is `ready`, `waits_no_more` or is `late` are asked one by
    one, as any of them may hold with any other: a plan that gave way to a save (`waits_no_more`) is
    made again at the turn, one that is `ready` may be of a request that is `late`. Only these are
    tied: who is late was held first (`held_since_s`), and who is `ready` has a plan.

    Attributes:
        handle: SGLang's name of it.
        number: the store's; a number is cheaper to look up by.
        prefix: what it could reuse.
        found: where its pages lay when they were last looked for.
        plan: keeps or brings them; None before its turn, or when nothing is stored.
        num_asked: leading pages that the plan was to bring.
        ready: the plan brought what it can, as of this step.
        held_since_s: when it was first held back.
        let_go_s: when it was first not held back any more; None while it is, or if it never was.
        waits_no_more: its deadline is over, or DRAM has no room for it.
        asked: without look-ahead: its place among those that the scheduler would have run, by when
            it first would; None: it would not yet.
        had_turn: without look-ahead: its plan was made, or looked at, when the scheduler would
            have run it.
        was_first: it stood at the head of the queue when its plan was last made or looked at for
            want of room; without look-ahead: its turn has come, and it waits for room.
        attempts: to complete a plan that is short, since it came to the head.
        room_mark: how far the writing to disk has to come for the room that it lacked there at
            first, see `PageStore.mark_of_room`; None until it lacks room at the head.
        room_until_s: until when it waits for that at most.
        awaits_room: it is at the head, and its plan may become longer, as of this step.
        evictions: `PageStore.num_wanted_evicted` when its pages were last looked for, or UNKNOWN
            when they have to be looked for again.
        remote: how far the remote store was asked.
        remote_lookup: what it was asked for, and said; None where nothing of that counts.
        arrived_s: when it entered the queue.
        estimate: what loading and computing it cost; None under other policies than `cost`.
        in_dram: how many of its pages in DRAM are worth loading, as last asked; None before.
        late: its deadline is over, or waiting on is not worth it.
        limit: leading pages of `prefix.hashes` that all of several ranks would use.
        is_limited: this one would have used more.
        own_limit: those that are worth their time on this one; never more than before.
        after: the record that took the place of this one, for another place of a hybrid's prompt.
    """

    handle: Hashable
    number: int
    prefix: ReusablePrefix
    found: TierCounts
    evictions: int
    plan: Plan | None = None
    num_asked: int = 0
    ready: bool = False
    held_since_s: float | None = None
    let_go_s: float | None = None
    waits_no_more: bool = False
    asked: int | None = None
    had_turn: bool = False
    was_first: bool = False
    attempts: int = 0
    room_mark: int | None = None
    room_until_s: float = 0.0
    awaits_room: bool = False
    pause_s: float = FIRST_PAUSE_S
    next_plan_s: float = 0.0
    remote: Remote = Remote.NOT_ASKED
    remote_lookup: RemoteLookup | None = None
    arrived_s: float = 0.0
    estimate: Estimate | None = None
    in_dram: DramShare | None = None
    late: bool = False
    limit: int = NO_LIMIT
    is_limited: bool = False
    own_limit: int = NO_LIMIT
    after: WaitingRequest | None = field(default=None, repr=False, compare=False)
    _held_for: int = 0  # in any step so far
    _shortfall: Shortfall | None = None  # as of when it left the queue

    def shortfall(self) -> Shortfall:
        """Why what was stored for it is not all reused."""
        return self._shortfall if self._shortfall is not None else self._shortfall_now()

    def is_held_as(self, before: WaitingRequest) -> None:
        """Its deadline goes on from a record of it that this one takes the place of."""
        self.held_since_s, self.late = before.held_since_s, before.late
        self._held_for = before._held_for
        before.after = self

    def note_held(self) -> None:
        """It is held in this step: notes what for. O(1)."""
        plan = self.plan
        if self.remote is Remote.ASKED:
            self._held_for |= _REMOTE
        if plan is None:
            # In this step: it has no turn yet, or its pages no room.
            self._held_for |= _ROOM if self.found.total else 0
        elif not plan.done:
            if plan.num_here_left:
                self._held_for |= _DISK if plan.reads_disk else _UNDERWAY
            if plan.num_remote_left:
                self._held_for |= _REMOTE
        elif plan.short:
            self._held_for |= _ROOM

    @property
    def awaited(self) -> Awaited:
        """What it was held for so far."""
        return next(each for bits, each in _AWAITED.items() if self._held_for & bits == bits)

    def records(self) -> list[WaitingRequest]:
        """This one, and those that took its place; the last one is as the request waits now."""
        found = [self]
        while found[-1].after is not None:
            found.append(found[-1].after)
        return found

    def ask(self, lookup: RemoteLookup) -> None:
        """The remote store is being asked."""
        self.remote, self.remote_lookup = Remote.ASKED, lookup

    def answer(self) -> RemoteLookup | None:
        """What the remote store said that it has, also if it then failed to give it."""
        return None if self.remote is Remote.ASKED else self.remote_lookup

    def forget_answer(self) -> None:
        """What the remote store was asked, and said, is of other pages than the request's."""
        if self.remote_lookup is not None:
            self.remote_lookup.cancelled = True
        self.remote_lookup = None
        if self.remote in (Remote.ASKED, Remote.ANSWERED):
            self.remote = Remote.NOT_ASKED

    def stop_asking(self) -> None:
        """The answer is not waited for any more."""
        self.forget_answer()
        self.remote = Remote.UNANSWERED

    def note_unanswered(self) -> None:
        """As `stop_asking`, of what was asked on behalf of it: where a prompt can be resumed.

        What the store had said before, and did not give, stays known.
        """
        if self.remote is Remote.NOT_ASKED:
            self.remote = Remote.UNANSWERED

    def note_leaving(self) -> None:
        """It leaves the queue, and is about to lose its plan and its estimate."""
        self._shortfall = self.shortfall()

    def _shortfall_now(self) -> Shortfall:
        plan, estimate = self.plan, self.estimate
        if self.remote is Remote.FAILED or (plan is not None and plan.failed):
            return Shortfall.FAILED
        computes = estimate is not None and estimate.computes
        computes |= self.in_dram is not None and self.in_dram.num_left > 0
        if self.late or computes or self.is_limited:
            return Shortfall.TOO_SLOW
        if plan is None or plan.short or plan.lacked_room:
            return Shortfall.NO_ROOM
        return Shortfall.TOO_SLOW

    @property
    def num_usable(self) -> int:
        """Leading pages off the device that all of several ranks would use, if they are stored."""
        prefix = self.prefix
        return max(0, min(len(prefix.hashes), self.limit) - prefix.num_on_device)

    @property
    def does_with_less(self) -> bool:
        """Whether it waits for no more though more is stored: no room for it, or it is damaged."""
        if self.remote is Remote.ASKED:
            return False
        plan = self.plan
        lacks = plan is not None and (plan.short or plan.failed)
        return self.waits_no_more or (self.ready and lacks)

    def remote_sizes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of the pages below the device that the remote store has; 0 for the others."""
        lookup = self.answer() if self.remote is Remote.ANSWERED else None
        if lookup is None or not len(lookup.sizes):
            return None
        sizes = np.zeros(len(self.prefix.off_device), np.int64)
        first = lookup.first_page - self.prefix.num_on_device
        sizes[first : first + len(lookup.sizes)] = lookup.sizes
        return sizes

    def with_remote(self, found: TierCounts) -> TierCounts:
        """What is here, with what the remote store has behind that."""
        sizes = self.remote_sizes()
        return found if sizes is None else found._replace(remote=num_leading(sizes[found.here :]))

    def is_first_for_once(self, position: int) -> bool:
        """Whether it has come to the head of the queue since the last call.

        It may take the room of all others then, so its attempts begin anew.
        """
        came = position == 0 and not self.was_first
        self.was_first = position == 0
        if came:
            self.attempts, self.pause_s, self.room_mark = 0, FIRST_PAUSE_S, None
        return came

    def may_plan_again(self, now_s: float, most_attempts: int | None = None) -> bool:
        """Whether the turn of a plan that is short has come; the pauses between turns grow.

        Args:
            now_s: the time.
            most_attempts: they are not counted above that; None: all are.
        """
        if now_s < self.next_plan_s:
            return False
        self.next_plan_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        if most_attempts is None or self.attempts < most_attempts:
            self.attempts += 1
        return True
