"""Requests that wait in the scheduler's queue, and the plans that bring their pages to DRAM.

Where a request's pages lie is looked up when it enters the queue (`WaitingRoom.enter`, called by
`seam/cache.py`), and again when what is stored has changed.

A waiting request's prefetch is its `Plan` of the page store (`RequestPlans.make` begins it;
`WaitingRoom.prefetch` is of prompts that nobody has sent). It holds the request: its pages move
from disk, or from a remote store, to DRAM while others run, until they are there or the deadline is
over. What a remote store has of them is asked when the request enters the queue, and fetched by its
plan.

With look-ahead the leading requests of the queue have plans: as many as DRAM may be pinned for
together. A request further behind has none, so it never holds room that one before it needs; its
turn comes when one before it is admitted. Without look-ahead a plan is made when a request enters
the queue, for what DRAM has room for then, and when its turn comes (`turns.py`).

Whether to hold or to admit: with one rank `WaitingRoom.may_admit` decides; several decide together
on what `readiness` tells of each. Both read what `RequestPlans.observe` noted in this step of the
plans and of the clock. All of it runs on the scheduler's thread, and neither copies nor waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute
from sglang_ext.admission.request_plans import RequestPlans
from sglang_ext.admission.turns import Turns
from sglang_ext.admission.waiting_request import (
    LONGEST_PAUSE_S,
    NO_LIMIT,
    UNKNOWN,
    Readiness,
    Remote,
    ReusablePrefix,
    WaitingRequest,
)
from sglang_ext.tiers.store import PageStore, TierCounts
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup

# Most requests per step that are looked up again because pages were stored or lost, and most pages
# of these together. Many, as a stored page may be evicted before a request far back claims it.
_FIND_AT_ONCE, _FIND_PAGES_AT_ONCE = 64, 4096
# After so many plans, or plans of so many pages, others are left to the next step: when hundreds of
# requests come at once, or their order changes.
_PLANS_AT_ONCE, _PLAN_PAGES_AT_ONCE = 64, 8192
# Prefetches under way at a time, and how long one may take.
_MAX_PREFETCHES, _PREFETCH_S = 64, 60.0
# Between two looks for requests that left the queue without a word.
_SWEEP_S = 2.0


class Prefetch:
    """Stands for a request that nobody has sent yet: its pages are brought to DRAM ahead of it.

    Args:
        deadline_s: when it is given up.
        then: called when it has ended.
    """

    def __init__(self, deadline_s: float, then: Callable[[], None] | None) -> None:
        self.deadline_s = deadline_s
        self.then = then


class Progress(NamedTuple):
    """How far a request's plan has come. Ranks compare it whole, with what they saw before.

    Attributes:
        first_page: index of the first page that it covers.
        end_page: end of these pages.
        remaining: how many of them are to come.
    """

    first_page: int
    end_page: int
    remaining: int


class WaitingRoom:
    """The waiting requests and their plans, by the requests' handles.

    Args:
        store: DRAM and disk; looks ahead when it has a `lookahead`.
        prefetch_policy: `cost`, `timeout`, `best_effort` or `wait_complete`.
        prefetch_timeout_ms: the longest that one request is held back under `timeout`, from when
            the scheduler would have run it.
        num_still_on_device: how many leading pages of a `ReusablePrefix.device_anchor` still are;
            None where that cannot be told.
        decider: decides under `cost`; None for the other policies.
        dram: decides of pages in DRAM under `cost`; None: all of them are loaded.
        clock: seconds; monotonic.

    It has many methods because a request's way through the queue is one: each is a step of it.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        prefetch_policy: str,
        prefetch_timeout_ms: float,
        num_still_on_device: Callable[[Any], int] | None = None,
        decider: LoadOrCompute | None = None,
        dram: DramChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._policy = prefetch_policy
        self._timeout_s = prefetch_timeout_ms / 1e3
        self._num_still_on_device = num_still_on_device
        self._decider = decider
        self._dram = dram
        self._clock = clock
        self._waiting: dict[Hashable, WaitingRequest] = {}
        self._by_number: dict[int, WaitingRequest] = {}
        self._plans = RequestPlans(store, decider, self._timeout_s)
        self._turns = Turns(self._plans, self._look) if store.lookahead is None else None
        self._asking: dict[int, WaitingRequest] = {}  # those whose look-up is open, by number
        self._next_number = 0
        self._order: list[Hashable] = []  # of the last step
        self._came: list[Hashable] = []  # since then, in order
        self._left: set[Hashable] = set()  # since then
        self._changed = False  # the window may be another one
        self._now_s = clock()  # of this step
        self._next_try_s = float("inf")  # when a plan that is short may be tried again
        self._missing: set[Hashable] = set()  # not in the queue at the last sweep
        self._next_sweep_s = 0.0
        self._prefetches: list[Prefetch] = []  # they wait behind the queue

    # ---- coming and going ----

    def enter(self, handle: Hashable, prefix: ReusablePrefix) -> TierCounts:
        """A request enters the queue; returns where its pages lie that are not on the device."""
        self.leave(handle)
        number, self._next_number = self._next_number, self._next_number + 1
        found = self._find(number, prefix)
        evictions = self._store.num_wanted_evicted
        waiting = WaitingRequest(handle, number, prefix, found, evictions, arrived_s=self._clock())
        self._waiting[handle] = self._by_number[number] = waiting
        self._note_change(came=handle)
        if self._decider is not None and not isinstance(handle, Prefetch):
            self._decider.enter(waiting)
        self._ask(waiting)
        if self._turns is not None and found.total:
            self._turns.arrive(waiting)
        return found

    def find(self, handle: Hashable) -> WaitingRequest | None:
        """What is known of a waiting request; None where it does not wait."""
        return self._waiting.get(handle)

    def leave(self, handle: Hashable, *, admitted: bool = False) -> None:
        """A request leaves the queue: the pins that kept its pages are given back.

        Args:
            handle: the request; unknown ones are ignored.
            admitted: whether it runs now.
        """
        waiting = self._waiting.pop(handle, None)
        if waiting is None:
            return
        waiting.note_leaving()
        if admitted:
            self._count_admission(waiting.prefix)
            if self._dram is not None:
                self._dram.admitted(waiting)
            if waiting.held_since_s is not None:
                held_s = self._clock() - waiting.held_since_s
                self._store.counters.time(f"held_{waiting.awaited.value}", held_s)
        self._plans.give_up(waiting)
        self._stop_asking(waiting)
        del self._by_number[waiting.number]
        self._note_change(left=handle)
        if self._decider is not None:
            self._decider.leave(waiting, admitted=admitted)
        if self._store.lookahead is not None:
            self._store.lookahead.leave(waiting.number)
            if not admitted:
                self._store.lookahead.rested(waiting.prefix.space, waiting.prefix.hashes)

    def leave_all(self) -> None:
        """Every request leaves."""
        for handle in list(self._waiting):
            self.leave(handle)
        if self._decider is not None:
            self._decider.end_probe()

    def num_worth(self, handle: Hashable, device_tokens: int, num_pages: int) -> int:
        """How many pages of DRAM a request should load; all of them where nothing decides that.

        Args:
            handle: of the request.
            device_tokens: leading tokens that are on the device.
            num_pages: pages behind those that are in DRAM.
        """
        waiting = self._waiting.get(handle)
        if waiting is None or self._dram is None:
            return num_pages
        return self._dram.num_worth(waiting, device_tokens, num_pages)

    def note_match(self, handle: Hashable, device_tokens: int, num_pages: int) -> None:
        """Several ranks have agreed what a request loads, if it is admitted by this match.

        Args:
            handle: of the request.
            device_tokens: leading tokens that are on the device.
            num_pages: pages of DRAM that it loads behind those.
        """
        waiting = self._waiting.get(handle)
        if waiting is not None and waiting.in_dram is not None and self._dram is not None:
            waiting.in_dram = self._dram.as_agreed(waiting.in_dram, device_tokens, num_pages)

    def remote_pages(self, handle: Hashable) -> tuple[int, int]:
        """(first page of the prompt, number) of what the remote store had of a request's pages."""
        waiting = self._waiting.get(handle)
        answer = waiting.answer() if waiting is not None else None
        return (0, 0) if answer is None else (answer.first_page, len(answer.sizes))

    # ---- once a scheduler step ----

    def step(self, order: Sequence[Hashable]) -> None:
        """Follows the queue: gives plans to its head, takes them from those further behind.

        One comparison of the queue if nothing changed; else O(pages of the requests that changed).

        Args:
            order: handles of the waiting requests as the scheduler will take them.
        """
        self._now_s = self._clock()
        if self._decider is not None:
            self._decider.step()
        if self._prefetches:
            order = [*order, *self._prefetches]
        if self._asking:
            self._take_answers()
        if self._turns is not None:
            self._turns.step()
        else:
            self._follow_order(order)
            self._find_again()
            self._changed |= bool(self._plans.take_back_yielded())
            for waiting in self._plans.planned.values():
                self._follow_device(waiting)
            if self._changed or self._now_s >= self._next_try_s:
                self._follow_window()
        if self._now_s >= self._next_sweep_s:
            self._sweep(order)
        self._next_try_s = min(self._next_try_s, self._plans.observe())
        if self._prefetches:
            self._end_prefetches()

    def prefetch(self, prefix: ReusablePrefix, then: Callable[[], None] | None = None) -> bool:
        """Somebody wants a prompt's pages in DRAM before a request comes.

        It waits behind all requests, never runs, and leaves when all that is stored of it is in
        DRAM, or after a minute.

        Args:
            prefix: what to bring, none of it on the device.
            then: called when it has left, whatever it brought.

        Returns:
            False where too many are under way; then `then` is not called.
        """
        if len(self._prefetches) >= _MAX_PREFETCHES:
            self._store.counters.add("prefetches_refused")
            return False
        handle = Prefetch(self._clock() + _PREFETCH_S, then)
        self.enter(handle, prefix)
        self._prefetches.append(handle)
        self._store.counters.add("prefetches")
        return True

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request should wait for pages that are on their way.

        O(1); without look-ahead a few requests a step are looked for again in it.
        """
        waiting = self._waiting.get(handle)
        if waiting is None or self._policy == "best_effort":
            return True
        if self._turns is None or self._turns.take(waiting, self._now_s):
            if waiting.waits_no_more:
                return True
            if waiting.ready or (waiting.plan is None and not waiting.found.total):
                return not self._awaits_answer(waiting)
            if waiting.plan is None and self._is_resident(waiting):
                return not self._awaits_answer(waiting)
        self.hold(handle)
        if not self._is_late(waiting):
            return False
        if self._decider is None:
            self._store.counters.add("prefetch_timeouts")
        if waiting.plan is None or not waiting.plan.done:
            self._plans.give_up(waiting)  # what has not come is not waited for, nor read
        self._stop_asking(waiting)
        waiting.waits_no_more = waiting.had_turn = waiting.late = True
        return True

    # ---- with several ranks, which decide together (`ranks/promises.py`) ----

    def readiness(self, handle: Hashable) -> Readiness:
        """What this rank alone thinks of holding a request. O(1).

        Here a request without a plan waits for its turn even when its pages are in DRAM: only what
        a plan pins can be promised.
        """
        waiting = self._waiting.get(handle)
        if waiting is None or self._policy == "best_effort" or waiting.waits_no_more:
            return Readiness.READY
        if self._decider is not None and waiting.late:
            return Readiness.READY
        if waiting.ready or not min(waiting.found.total, waiting.num_usable):
            # Its time runs from when the scheduler would have run it, as with pages on their way.
            held = waiting.held_since_s is not None
            asks = waiting.remote is Remote.ASKED and (not held or self._awaits_answer(waiting))
            return Readiness.WAITING if asks else Readiness.READY
        if not self._is_late(waiting):
            return Readiness.WAITING
        if self._decider is not None:
            # It will do with what it has; others may go on up to there, see `most_pages`.
            waiting.late = True
            self._stop_asking(waiting)
            return Readiness.READY
        if not waiting.late:  # a hybrid may be told of again
            self._store.counters.add("prefetch_timeouts")
        waiting.late = True
        return Readiness.LATE

    def most_pages(self, handle: Hashable, end_page: int) -> int:
        """Leading pages of a request that this rank would use at most; under `cost`. O(1).

        The number of stored pages may grow from step to step. This number never does, so ranks
        that follow each other's stop changing it after finitely many steps.

        Args:
            handle: of the request.
            end_page: end of those that are pinned for it.
        """
        waiting = self._waiting.get(handle)
        if self._decider is None or waiting is None:
            return NO_LIMIT
        first, estimate = waiting.prefix.num_on_device, waiting.estimate
        if waiting.late or waiting.does_with_less:
            waiting.own_limit = min(waiting.own_limit, max(first, end_page))
        if estimate is not None and estimate.computes:
            waiting.own_limit = min(waiting.own_limit, first + estimate.verdict.pages)
        if waiting.remote is Remote.ASKED:
            return waiting.own_limit
        return min(waiting.own_limit, first + waiting.found.total)

    def limit(self, handle: Hashable, most_pages: int) -> None:
        """Not all ranks would use more leading pages of a request: its plan brings no more."""
        waiting = self._waiting.get(handle)
        if self._decider is None or waiting is None or most_pages == waiting.limit:
            return
        grows, waiting.limit = most_pages > waiting.limit, most_pages
        plan, stored = waiting.plan, waiting.prefix.num_on_device + waiting.found.total
        if most_pages < min(stored, waiting.own_limit) and not waiting.is_limited:
            waiting.is_limited = True
            self._store.counters.add("cost_limited")
        if grows:
            self._changed = True
            self._ask_for_more(waiting)
            if plan is None:
                waiting.found = waiting.with_remote(self._find(waiting.number, waiting.prefix))
        elif plan is not None and not plan.done and plan.num_planned > waiting.num_usable:
            self._plans.make(waiting, plan.priority)

    def hold(self, handle: Hashable) -> None:
        """The scheduler would have run a request that is held: its deadline runs from now on.

        Called in each step in which it would have. O(1).
        """
        waiting = self._waiting.get(handle)
        if waiting is not None:
            if waiting.held_since_s is None:
                waiting.held_since_s = self._now_s
            waiting.note_held()

    def let_go(self, handle: Hashable) -> None:
        """The scheduler may run a request from now on, whether it was held or not. O(1)."""
        waiting = self._waiting.get(handle)
        if waiting is not None and waiting.held_since_s is not None and waiting.let_go_s is None:
            waiting.let_go_s = self._clock()

    def progress(self, handle: Hashable) -> Progress:
        """Which pages a request's plan covers, and how many of them are to come. O(1)."""
        waiting = self._waiting.get(handle)
        first = waiting.prefix.num_on_device if waiting is not None else 0
        if waiting is None or waiting.plan is None:
            return Progress(first, first, 0)
        return Progress(first, first + waiting.plan.num_planned, waiting.plan.remaining)

    # ---- what the remote store has ----

    def _ask(self, waiting: WaitingRequest) -> None:
        """Asks the remote store for the pages that are not here."""
        prefix = waiting.prefix
        first = prefix.num_on_device + waiting.found.here
        if first == len(prefix.hashes):
            return
        remote_lookup = RemoteLookup(prefix.space, prefix.hashes[first:], first, prefix.max_quality)
        if self._store.ask_remote(remote_lookup):
            waiting.ask(remote_lookup)
            self._asking[waiting.number] = waiting

    def _take_answers(self) -> None:
        for waiting in list(self._asking.values()):
            assert waiting.remote_lookup is not None
            if not waiting.remote_lookup.done:
                continue
            del self._asking[waiting.number]
            waiting.remote = Remote.ANSWERED
            waiting.found = waiting.with_remote(waiting.found)
            if not waiting.found.remote:
                continue
            self._changed = True
            self._ask_for_more(waiting)
            if self._decider is not None:
                self._decider.learn(waiting)
            if self._turns is not None:
                self._turns.arrive(waiting)

    def _awaits_answer(self, waiting: WaitingRequest) -> bool:
        """Whether a request that could run should wait for what the remote store says."""
        if waiting.remote is not Remote.ASKED:
            return False
        self.hold(waiting.handle)
        assert waiting.held_since_s is not None
        if self._policy == "wait_complete":
            return True  # every call of the store has a deadline
        limit_s = self._timeout_s
        if self._decider is not None:
            limit_s = self._decider.answer_wait_s(waiting)
        # A store that does not answer one request is not waited for by the next.
        waited_s = max(self._now_s - waiting.held_since_s, self._store.remote_stalled_s)
        if waited_s < limit_s:
            return True
        self._store.counters.add("remote_lookups_late")
        self._stop_asking(waiting)
        return False

    def _stop_asking(self, waiting: WaitingRequest) -> None:
        if self._asking.pop(waiting.number, None) is not None:
            waiting.stop_asking()

    # ---- private ----

    def _note_change(self, *, came: Hashable = None, left: Hashable = None) -> None:
        """Notes for the next step who came or left; only `_follow_order` asks, and forgets them."""
        self._changed = True
        if self._turns is not None:
            return
        if came is not None:
            self._came.append(came)
        if left is not None:
            self._left.add(left)

    def _is_late(self, waiting: WaitingRequest) -> bool:
        if self._policy == "wait_complete" or waiting.held_since_s is None:
            return False
        if self._decider is not None:
            return not self._decider.should_hold(waiting)
        return self._now_s - waiting.held_since_s >= self._timeout_s

    def _follow_order(self, order: Sequence[Hashable]) -> None:
        """Tells the store the order, unless requests only left it or came in at its end."""
        assert self._store.lookahead is not None
        if self._came or self._left or order != self._order:
            if not self._is_as_expected(order):
                known = (self._waiting.get(handle) for handle in order)
                numbers = [waiting.number for waiting in known if waiting is not None]
                self._store.lookahead.set_order(numbers)
            self._order = list(order)
            self._changed = True
        self._came.clear()
        self._left.clear()

    def _is_as_expected(self, order: Sequence[Hashable]) -> bool:
        """Whether the queue is the former one without those that left, and then those that came.

        Nearly every change is of this kind, and this costs no look-up of those that stayed.
        """
        if not self._left.isdisjoint(self._came):
            return False  # a request left and came back: the store has it at the queue's end
        at, end = 0, len(order)
        for handle in self._order:
            if at < end and order[at] is handle:
                at += 1
            elif handle not in self._left:
                return False
        return list(order[at:]) == self._came

    def _follow_window(self) -> None:
        """Makes the plans of the window, in its order, and takes back those of all others."""
        assert self._store.lookahead is not None
        self._changed, self._next_try_s = False, float("inf")
        numbers: list[Any] = self._store.lookahead.window()
        inside = set(numbers)
        planned = self._plans.planned
        for waiting in [each for number, each in planned.items() if number not in inside]:
            self._plans.defer(waiting)
        window = [self._by_number[number] for number in numbers]
        for waiting in window[1:]:
            waiting.was_first = False
        num_plans = num_pages = 0
        for position, waiting in enumerate(window):
            if waiting.waits_no_more or (waiting.plan is None and not waiting.found.total):
                continue
            if num_plans >= _PLANS_AT_ONCE or num_pages >= _PLAN_PAGES_AT_ONCE:
                self._next_try_s = self._now_s  # at the next step
                return
            before = waiting.plan
            if before is not None:
                before.priority = position
            if not self._complete(waiting, position, window):
                return  # those behind must not take the room that this one needs
            if waiting.plan is not before:
                num_plans, num_pages = num_plans + 1, num_pages + waiting.num_asked

    def _complete(
        self, waiting: WaitingRequest, position: int, window: list[WaitingRequest]
    ) -> bool:
        """Sees to the plan of a request in the window; False when it lacks room for it."""
        if waiting.plan is None:
            waiting.is_first_for_once(position)
            self._follow_device(waiting)
            self._look_again(waiting)
            self._plans.make(waiting, position)
        elif not waiting.plan.short and waiting.plan.num_stored >= min(
            waiting.found.total, waiting.num_asked
        ):
            return True
        elif waiting.plan.num_remote_left:
            # What is fetched for it now would be lost with the plan.
            self._next_try_s = min(self._next_try_s, self._now_s + LONGEST_PAUSE_S)
            return self._plans.is_enough(waiting, waiting.plan)
        elif not (
            waiting.is_first_for_once(position) or self._plans.is_its_turn(waiting, self._now_s)
        ):
            self._next_try_s = min(self._next_try_s, waiting.next_plan_s)
            return not waiting.plan.short
        else:
            self._plans.make(waiting, position)
        self._plans.make_in_place_of(waiting, position, reversed(window[position + 1 :]))
        if waiting.plan is None or self._plans.is_enough(waiting, waiting.plan):
            return True
        if not position:
            self._plans.note_room(waiting, self._now_s)
        self._next_try_s = min(self._next_try_s, max(waiting.next_plan_s, self._now_s))
        return False

    def _is_resident(self, waiting: WaitingRequest) -> bool:
        """Whether all that is stored of a request without a plan is ready in DRAM."""
        evictions, found = self._store.num_wanted_evicted, waiting.found
        absent = bool(found.disk or found.pending)
        if waiting.evictions == UNKNOWN or (not absent and waiting.evictions != evictions):
            prefix = waiting.prefix
            found = self._store.locate_prefix(prefix.space, prefix.off_device, prefix.max_quality)
            waiting.found, waiting.evictions = waiting.with_remote(found), evictions
            absent = bool(found.disk or found.pending)
        return not absent and not waiting.found.remote

    def _find_again(self) -> None:
        """Looks for pages that became known, or were lost, while their requests wait."""
        assert self._store.lookahead is not None
        lookahead, num_pages = self._store.lookahead, 0
        for _ in range(_FIND_AT_ONCE):
            numbers: list[Any] = lookahead.take_changed(1 if num_pages < _FIND_PAGES_AT_ONCE else 0)
            if not numbers:
                break
            waiting = self._by_number.get(numbers[0])
            if waiting is None:
                continue
            path = waiting.prefix.path
            num_pages += len(waiting.prefix.hashes if path is None else path)
            if self._look_again(waiting):
                self._changed = True
                if waiting.plan is not None:  # it is for another place
                    self._plans.make(waiting, waiting.plan.priority)
                continue
            found = waiting.with_remote(self._find(waiting.number, waiting.prefix))
            if found.total != waiting.found.total:
                self._changed = True
                self._ask_for_more(waiting)
            waiting.found = found

    def _follow_device(self, waiting: WaitingRequest) -> None:
        """Also asks for pages that the device had when the request came and evicted since."""
        prefix = waiting.prefix
        if self._num_still_on_device is None or not prefix.num_on_device:
            return
        num_on_device = self._num_still_on_device(prefix.device_anchor)
        if num_on_device < prefix.num_on_device:
            waiting.prefix = replace(prefix, num_on_device=num_on_device)
            waiting.found = waiting.with_remote(self._find(waiting.number, waiting.prefix))
            self._changed = True
            self._ask_for_more(waiting)
            self._store.counters.add("device_lost_pages", prefix.num_on_device - num_on_device)

    def _look_again(self, waiting: WaitingRequest) -> bool:
        """What it could reuse may be more, or less, by now; returns whether it is."""
        prefix = waiting.prefix
        if prefix.look_again is None:
            return False
        hashes, resumes_at = prefix.look_again()
        if len(hashes) == len(prefix.hashes) and (hashes == prefix.hashes).all():
            return False
        waiting.prefix = replace(prefix, hashes=hashes, resumes_at=resumes_at)
        waiting.found = self._find(waiting.number, waiting.prefix)
        self._ask_for_more(waiting)
        waiting.forget_answer()
        self._asking.pop(waiting.number, None)
        if waiting.remote is Remote.NOT_ASKED:
            self._ask(waiting)
        return True

    def _ask_for_more(self, waiting: WaitingRequest) -> None:
        """More became known than its plan was made for: the next look makes it anew."""
        waiting.num_asked = waiting.num_usable

    def _find(self, number: int, prefix: ReusablePrefix) -> TierCounts:
        """Where a request's pages lie; the store expects it from now on where it looks ahead."""
        if self._store.lookahead is None:
            return self._store.locate_prefix(prefix.space, prefix.off_device, prefix.max_quality)
        return self._store.lookahead.expect(
            number,
            prefix.space,
            prefix.hashes,
            prefix.num_on_device,
            prefix.max_quality,
            next_page=prefix.next_page,
        )

    def _look(self, waiting: WaitingRequest) -> bool:
        """Looks for a request's pages again, without look-ahead; True if its pages changed."""
        self._follow_device(waiting)
        if self._look_again(waiting):
            return True
        waiting.found = waiting.with_remote(self._find(waiting.number, waiting.prefix))
        return False

    def _end_prefetches(self) -> None:
        """Lets go of prefetches that have brought what there is, or are late."""
        left = []
        for handle in self._prefetches:
            waiting = self._waiting.get(handle)
            if waiting is not None:  # else it was let go with all others
                nothing = waiting.plan is None and not waiting.found.total
                if self._now_s < handle.deadline_s and not (
                    waiting.remote is not Remote.ASKED and (waiting.ready or nothing)
                ):
                    left.append(handle)
                    continue
                if waiting.plan is not None:
                    num = waiting.plan.num_planned - waiting.plan.remaining
                    self._store.counters.add("prefetched_pages", num)
                self.leave(handle)
            if handle.then is not None:
                handle.then()
        self._prefetches = left

    def _sweep(self, order: Sequence[Hashable]) -> None:
        """Lets go of requests that were not in the queue twice in a row."""
        self._next_sweep_s = self._now_s + _SWEEP_S
        missing = self._waiting.keys() - set(order)
        for handle in missing & self._missing:
            self.leave(handle)
            self._store.counters.add("swept_requests")
        self._missing = missing

    def _count_admission(self, prefix: ReusablePrefix) -> None:
        """Counts where the pages of a request lie as it is admitted."""
        found = self._store.locate_prefix(prefix.space, prefix.off_device, prefix.max_quality)
        if found.total:
            late = found.disk + found.pending
            self._store.counters.add("admitted_host_pages", found.host)
            self._store.counters.add("admitted_late_pages", late)
            self._store.counters.add(
                "admitted_late_requests" if late else "admitted_ready_requests"
            )
