"""Plans without look-ahead: one when a request enters the queue, and one when its turn comes.

The first plan covers what DRAM has room for at that time, so that its reads overlap with the wait.
Until the turn comes, more pages may be stored and others evicted. So the pages are looked up again
then, and the new plan may take the room of the plans of later requests. What it still lacks while
pages are written that then leave is waited for, once. A request can thus use every page that is
stored when it runs, as in any LRU cache, however long the queue is.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.admission.request_plans import RequestPlans
from sglang_ext.admission.waiting_request import WaitingRequest

# Look-ups per step. A scheduler that is told to hold a request asks for the next one, so without a
# bound it could look up the whole queue in one step; requests beyond the bound are held.
_TURNS_AT_ONCE = 4


class Turns:
    """Gives a plan to who comes, and to whom the scheduler would run. Scheduler thread only.

    Args:
        plans: the plans of all waiting requests.
        look: looks for a request's pages again, and sets `WaitingRequest.found`; True if the
            request's list of pages changed.
    """

    def __init__(self, plans: RequestPlans, look: Callable[[WaitingRequest], bool]) -> None:
        self._plans = plans
        self._look = look
        self._left = _TURNS_AT_ONCE
        self._num_asked = 0

    def step(self) -> None:
        """A scheduler step begins. A request whose plan gave way to a save waits for its turn."""
        self._left = _TURNS_AT_ONCE
        for waiting in self._plans.take_back_yielded():
            waiting.had_turn, waiting.waits_no_more = False, True

    def arrive(self, waiting: WaitingRequest) -> None:
        """A request came, or the remote store answered: plans what DRAM has room for now."""
        self._plans.make(waiting, priority=waiting.number)
        waiting.waits_no_more = waiting.plan is None or waiting.plan.starved

    def take(self, waiting: WaitingRequest, now_s: float) -> bool:
        """The scheduler would run a request; False when its plan should be improved first."""
        if waiting.asked is None:
            waiting.asked, self._num_asked = self._num_asked, self._num_asked + 1
        plan = waiting.plan
        if waiting.had_turn or (plan is not None and not plan.done):
            return True
        if not self._left or not waiting.may_plan_again(now_s):
            return False
        self._left -= 1
        anew = self._look(waiting) or plan is None or waiting.found.total > plan.num_planned
        if anew and not self._plan(waiting, now_s):
            waiting.waits_no_more = False
            return False
        plan = waiting.plan
        waiting.had_turn = True
        waiting.waits_no_more = plan is not None and plan.starved
        waiting.ready = plan is not None and plan.done
        return True

    def _plan(self, waiting: WaitingRequest, now_s: float) -> bool:
        """Makes the plan of the request whose turn it is; False to wait for room.

        It waits for that of other plans, and then for what is on its way to disk. Only for requests
        that do not wait for it: those that had their turn, or were asked for before. Two that each
        hold what the other lacks would wait for ever.
        """
        self._plans.make(waiting, priority=waiting.number)
        others = [other for other in self._plans.planned.values() if other is not waiting]
        behind = [other for other in others if _yields(other, waiting)]
        behind.sort(key=_place, reverse=True)
        self._plans.make_in_place_of(waiting, waiting.number, behind)
        plan = waiting.plan
        if plan is None or not plan.short:
            return True
        if not all(_yields(each, waiting) for each in others):
            return False
        return not self._plans.waits_for_writes(waiting, plan, now_s)


def _yields(other: WaitingRequest, waiting: WaitingRequest) -> bool:
    """Whether a request gives up its plan for one whose turn it is."""
    assert waiting.asked is not None
    return not other.had_turn and (other.asked is None or other.asked > waiting.asked)


def _place(waiting: WaitingRequest) -> tuple[bool, int]:
    """A place among those that wait: in the order of their turns, then as they came."""
    return waiting.asked is None, waiting.number if waiting.asked is None else waiting.asked
