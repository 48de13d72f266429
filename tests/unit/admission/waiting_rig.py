"""A waiting room over a page store whose every answer the test gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.tiers.store import Epoch, KeySpace, Plan, TierCounts
from sglang_ext.tiers.store.types import StoreCounters

SPACE = KeySpace(0, bytes(32), b"", Epoch())


@dataclass
class Store:
    """A page store and its look-ahead, whose every answer the test gives.

    Prompts have four pages below the device; `fits` of them fit in DRAM for plans.
    """

    looks_ahead: bool = True
    fits: int = 8
    num_in_window: int = 2
    found: TierCounts = field(default_factory=lambda: TierCounts(0, 4, 0))
    num_wanted_evicted: int = 0
    changed: list[Any] = field(default_factory=list)  # requests to be looked for again
    counters: StoreCounters = field(default_factory=StoreCounters)
    plans: list[Plan] = field(default_factory=list)  # that are not cancelled
    requests: list[Any] = field(default_factory=list)  # in order
    num_writing: int = 0  # pages on their way to disk
    num_marks: int = 0
    num_orders: int = 0
    num_lookups: int = 0
    num_plans: int = 0

    @property
    def max_planned_pages(self) -> int:
        return 8

    max_lone_plan_pages = max_planned_pages

    @property
    def lookahead(self) -> Store | None:
        return self if self.looks_ahead else None

    def expect(self, request: Any, *_: object, **__: object) -> TierCounts:
        if request not in self.requests:
            self.requests.append(request)
        return self.found

    def leave(self, request: Any) -> None:
        self.requests.remove(request)

    def rested(self, space: KeySpace, hashes: Any) -> None:
        pass

    def take_changed(self, most: int) -> list[Any]:
        taken, self.changed = self.changed[:most], self.changed[most:]
        return taken

    def mark_of_room(self, num_pages: int) -> int:
        self.num_marks += 1
        return min(num_pages, self.num_writing)

    def bytes_until(self, mark: int) -> int:
        return min(mark, self.num_writing)

    def set_order(self, order: Sequence[Any]) -> None:
        self.num_orders += 1
        rest = [request for request in self.requests if request not in order]
        self.requests = [*(request for request in order if request in self.requests), *rest]

    def window(self) -> list[Any]:
        return self.requests[: self.num_in_window]

    def locate_prefix(self, *_: object) -> TierCounts:
        self.num_lookups += 1
        return self.found

    def ask_remote(self, *_: object) -> bool:
        return False

    def plan(
        self, space: KeySpace, hashes: Any, quality: int, priority: int,
        instead_of: Plan | None = None, **_: object,
    ) -> Plan | None:  # fmt: skip
        self.num_plans += 1
        if not self.found.total:
            return None
        room = self.fits - sum(len(p.rows) for p in self.plans if p is not instead_of)
        num = min(max(room, 0), self.found.total)
        plan = Plan(np.arange(num), remaining=num, num_stored=self.found.total)
        plan.priority = priority
        self.plans.append(plan)
        return plan

    def cancel_plan(self, plan: Plan) -> None:
        if not plan.cancelled:
            plan.cancelled = True
            self.plans.remove(plan)

    def arrive(self, plan: Plan) -> None:
        plan.remaining = 0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def prefix(num_on_device: int = 2) -> ReusablePrefix:
    return ReusablePrefix(SPACE, np.zeros((6, 32), np.uint8), num_on_device, 255)


def make_room(
    store: Store, policy: str = "wait_complete", timeout_ms: float = 2000.0
) -> tuple[WaitingRoom, Clock]:
    clock = Clock()
    room = WaitingRoom(
        cast(Any, store), prefetch_policy=policy, prefetch_timeout_ms=timeout_ms, clock=clock
    )
    return room, clock


def plan_of(room: WaitingRoom, handle: str) -> Plan | None:
    return room._waiting[handle].plan


def step(room: WaitingRoom, clock: Clock, order: str, seconds: float = 0.001) -> None:
    clock.now_s += seconds
    room.step(list(order))
