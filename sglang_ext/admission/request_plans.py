"""The plans of waiting requests: made, made anew, looked at and taken back, for `waiting.py`.

Scheduler thread only. Without look-ahead the store may cancel a plan of its own accord, when a save
needs the room; that is seen at the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sglang_ext.admission.load_or_compute import LoadOrCompute
from sglang_ext.admission.waiting_request import UNKNOWN, Remote, WaitingRequest
from sglang_ext.tiers.store import PageStore, Plan, TierCounts

MAX_ATTEMPTS: Final = 8
"""After so many attempts the pages that are there are used, unless room for more is coming.

The last of them is made when what was on its way to disk at the first one, as far as its room was
needed, is there; or the longest wait is over.
"""


class RequestPlans:
    """Who of the waiting requests has a plan.

    Args:
        store: DRAM and disk.
        decider: says how much of a prefix is worth its time; None: all of it.
        longest_room_s: for so long a request at the head waits for writes to make room, at most.

    Attributes:
        planned: the requests with a plan, by number.
    """

    def __init__(
        self, store: PageStore, decider: LoadOrCompute | None, longest_room_s: float
    ) -> None:
        self._store = store
        self._decider = decider
        self._longest_room_s = longest_room_s
        self.planned: dict[int, WaitingRequest] = {}

    def make(self, waiting: WaitingRequest, priority: int) -> None:
        """Makes a request's plan, or makes it anew, of what is stored and fits now."""
        prefix, old = waiting.prefix, waiting.plan
        num = waiting.num_asked = waiting.num_usable
        if self._decider is not None:
            num = self._decider.num_pages(waiting)
            waiting.num_asked = num
        sizes, plan = waiting.remote_sizes(), None
        if num:
            plan = self._store.plan(
                prefix.space,
                prefix.off_device[:num],
                prefix.max_quality,
                priority,
                remote_sizes=None if sizes is None else sizes[:num],
                instead_of=old,
                arrived_s=waiting.arrived_s,
            )
        if old is not None:
            self._store.cancel_plan(old)  # after the new one has taken over its pins
        waiting.plan, waiting.ready = plan, False
        if plan is None:
            self.planned.pop(waiting.number, None)
            if waiting.num_usable:  # else what is stored may be of use when others have more
                waiting.found = TierCounts(0, 0, 0)
        else:
            self.planned[waiting.number] = waiting
        if self._decider is not None:
            self._decider.planned(waiting)

    def make_in_place_of(
        self, waiting: WaitingRequest, priority: int, behind: Iterable[WaitingRequest]
    ) -> None:
        """Makes the plan of a request that is short of room, with that of others.

        Args:
            waiting: with or without a plan.
            priority: see `Plan`.
            behind: requests that give up their plans one by one until it has what it needs.
        """
        for other in behind:
            if waiting.plan is None or not waiting.plan.short:
                return
            if other.plan is not None:
                self.defer(other)
                self.make(waiting, priority)

    def note_room(self, waiting: WaitingRequest, now_s: float) -> None:
        """A request at the head lacks room: notes what is on its way to disk that will make it.

        Once, as others go on saving: what is queued behind is not waited for.
        """
        if waiting.room_mark is not None:
            return
        plan = waiting.plan
        num_lacking = self._store.max_lone_plan_pages
        if plan is not None:
            num_lacking = min(plan.num_stored, num_lacking) - plan.num_planned
        waiting.room_mark = self._store.mark_of_room(num_lacking)
        waiting.room_until_s = now_s + self._longest_room_s

    def waits_for_writes(self, waiting: WaitingRequest, plan: Plan, now_s: float) -> bool:
        """Whether a request whose turn it is, without look-ahead, waits for more room.

        Until what was on its way to disk when it first lacked room has left, or the longest wait is
        over.
        """
        if plan.num_planned < self._store.max_lone_plan_pages:
            self.note_room(waiting, now_s)
        comes = self._room_comes(waiting, now_s)
        waiting.was_first = waiting.awaits_room = comes
        return comes

    def is_its_turn(self, waiting: WaitingRequest, now_s: float) -> bool:
        """Whether a request that is short of room may try again; see `MAX_ATTEMPTS`."""
        comes = waiting.was_first and self._room_comes(waiting, now_s)
        return waiting.may_plan_again(now_s, MAX_ATTEMPTS - 1 if comes else None)

    def _room_comes(self, waiting: WaitingRequest, now_s: float) -> bool:
        mark = waiting.room_mark
        if not mark or now_s >= waiting.room_until_s:
            return False
        return self._store.bytes_until(mark) > 0

    def give_up(self, waiting: WaitingRequest) -> None:
        """Takes back a request's plan, if it has one: its pins, and reads that have not begun."""
        plan, waiting.plan = waiting.plan, None
        waiting.ready = waiting.awaits_room = False
        if plan is not None:
            del self.planned[waiting.number]
            self._store.cancel_plan(plan)
            waiting.evictions = UNKNOWN

    def defer(self, waiting: WaitingRequest) -> None:
        """Takes back the plan of a request whose turn has not come."""
        self.give_up(waiting)
        self._store.counters.add("deferred_plans")

    def take_back_yielded(self) -> list[WaitingRequest]:
        """Takes back the plans whose room the store gave to a save; returns whose they were."""
        yielded = [
            waiting
            for waiting in self.planned.values()
            if waiting.plan is not None and waiting.plan.cancelled
        ]
        for waiting in yielded:
            self.defer(waiting)
        return yielded

    def observe(self) -> float:
        """Notes which plans have brought what they can; nothing else looks at their progress.

        Returns:
            When the first of those that are short of room may be tried again; infinity for never.
        """
        next_try_s = float("inf")
        for waiting in self.planned.values():
            plan = waiting.plan
            assert plan is not None
            # First whether it is done: a fetch that ends meanwhile makes a plan short, then done.
            done = plan.done
            enough = self.is_enough(waiting, plan)
            waiting.ready = done and enough
            waiting.awaits_room = not enough and waiting.was_first
            if plan.lacked_room and not waiting.ready:
                next_try_s = min(next_try_s, waiting.next_plan_s)
            if plan.fetch_failed and waiting.remote is not Remote.FAILED:
                waiting.remote = Remote.FAILED
                waiting.found = waiting.with_remote(waiting.found._replace(remote=0))
        return next_try_s

    def is_enough(self, waiting: WaitingRequest, plan: Plan) -> bool:
        """Whether a request will do with what its plan covers."""
        if not plan.short or plan.failed:
            return True
        if self._store.lookahead is None:
            return waiting.had_turn or not waiting.was_first
        if plan.num_planned >= self._store.max_lone_plan_pages:
            return True  # more is not to be had
        return waiting.attempts >= MAX_ATTEMPTS and not plan.starved
