"""Keeps the ranks of several pipeline stages in step, none of which may wait for a later one.

Every stage runs the same scheduler on the same requests, but a later one is behind: its step begins
when an earlier one hands the step's requests on, and in the middle of a step a stage waits for what
the one before it sends in *its* next step. So when the last of P stages comes to a step, the first
may have to be in a step up to P - 1 behind that: a reduction that all enter in one step and wait
for in it would never end.

A round is therefore begun in one step and taken P - 1 steps later, on all ranks in the same step of
each, and the next one begins in that step. What a rank tells stays true until it is taken: pages
that it told of are pinned, and saves that ended have ended. Requests and saves that were given up
in between, as in a flush, are so on all ranks alike, and what a round says of them is passed over.

A load that does not land ends the server: what comes of it must not leave the rank in the proxies
that go to the next stage, and to tell all ranks takes too many steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from sglang_ext.ranks.consensus import MAX_SAVES, Report, Vector
from sglang_ext.ranks.lockstep import Lockstep

# Begins a reduction of `Consensus`; what it returns waits for it.
BeginReduce = Callable[[Vector], Callable[[], None]]


class StageError(RuntimeError):
    """Something failed on this rank that the ranks of other stages would not hear of in time."""


@dataclass
class _Round:
    """A round that was begun.

    Attributes:
        vector: what this rank told, and what was agreed when `wait` has returned.
        wait: waits for the reduction.
        num_requests: how many requests were told of.
        has_saves: whether the saves that were told of are still the oldest pending ones.
        age: steps since it began.
    """

    vector: Vector
    wait: Callable[[], None]
    num_requests: int
    has_saves: bool = True
    age: int = 0


class StagedLockstep(Lockstep):
    """As `Lockstep`, of all ranks of all stages. Scheduler thread only.

    Args:
        num_stages: P, at least 2.
        begin_reduce: begins a reduction over all these ranks.
        others: see `Lockstep`; `gather` is of this stage's ranks.
    """

    def __init__(
        self, *args: Any, num_stages: int, begin_reduce: BeginReduce, **others: Any
    ) -> None:
        super().__init__(*args, min_reduce=_no_reduction, **others)
        self._begin_reduce = begin_reduce
        self._steps_a_round = num_stages - 1
        self._round: _Round | None = None

    def step(self) -> list[Any]:
        """Takes the round that is due and begins the next one; see `Lockstep.step`."""
        self._room.step(self._queue())
        if self._round is not None:
            self._round.age += 1
            if self._round.age == self._steps_a_round:
                self._take(self._round)
                self._round = None
        if self._round is None:
            self._round = self._begin()
        return []

    def _begin(self) -> _Round:
        saves = self._transfers.ended_saves(MAX_SAVES)
        requests = self.promises.report(self._queue())
        vector = self._consensus.begin(Report(saves, requests))
        return _Round(vector, self._begin_reduce(vector), len(requests))

    def _take(self, this: _Round) -> None:
        this.wait()
        agreed = self._consensus.end(this.vector, this.num_requests)
        if this.has_saves:
            self._transfers.take_completed_offloads(len(agreed.saves))
            self._transfers.commit_completed_offloads(agreed.saves)
        self.promises.settle(agreed.requests)

    def drain_saves(self) -> None:
        """Gives up all pending saves, which have ended on this rank, as not stored.

        Whether they are on all ranks cannot be known here. What is stored is found when SGLang
        offers a node again.

        Raises:
            StageError: some have not ended.
        """
        self._forget_round()
        num_saves = self._transfers.num_pending_saves()
        if len(self._transfers.ended_saves(num_saves)) < num_saves:
            raise StageError("hier-kv: saves take too long under a flush; restart the server")
        self._transfers.take_completed_offloads(num_saves)
        self._transfers.commit_completed_offloads([False] * num_saves)

    def leave_all(self) -> None:
        """See `Admission`; pending saves may be given up next."""
        self._forget_round()
        super().leave_all()

    def _forget_round(self) -> None:
        """The saves that a round has told of are told of again, if they still are."""
        if self._round is not None:
            self._round.has_saves = False

    def end_loads(self, reqs: list[Any]) -> list[Any]:
        """Waits for this rank's loads, before anything of their forward leaves the rank.

        Raises:
            StageError: they did not land.
        """
        _, landed = self._transfers.end_loads()
        if not landed:
            raise StageError(
                "hier-kv: KV could not be loaded for a batch, and the other pipeline stages would "
                "compute with it; the server ends, see the error before this one"
            )
        return []

    def settle_loads(self, reqs: list[Any]) -> list[Any]:
        """Nothing is left open; see `end_loads`."""
        return []


def begin_min_reduce(group: Any, vector: Vector) -> Callable[[], None]:
    """Begins to replace a vector by the element-wise minimum over a group.

    Returns:
        What waits until it has been.
    """
    tensor = torch.from_numpy(vector)
    work = distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN, group=group, async_op=True)

    def wait() -> None:
        work.wait()

    return wait


def _no_reduction(vector: Vector) -> None:
    raise AssertionError("stages begin their rounds and take them later")
