"""What of a round of pipeline stages is taken, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.ranks.consensus import Vector
from sglang_ext.ranks.stages import StagedLockstep, StageError


class Stage:
    """A rank whose saves end when they are told to; the others agree to all that it tells."""

    def __init__(self, num_stages: int) -> None:
        self.pending, self.ended = 0, 0
        self.landed = True
        self.committed: list[bool] = []
        self.num_begun = self.num_waits = 0
        room: Any = SimpleNamespace(step=lambda queue: None, leave_all=lambda: None)
        store: Any = None
        self.lockstep = StagedLockstep(
            store,
            room,
            list,
            self,
            num_stages=num_stages,
            begin_reduce=self.begin_reduce,
            page_size=64,
            find_damaged=lambda slots, position: np.empty(0, np.int64),
            num_on_device=lambda key: 0,
            gather=lambda content: [content],
        )

    def begin_reduce(self, vector: Vector) -> Callable[[], None]:
        self.num_begun += 1

        def wait() -> None:
            self.num_waits += 1

        return wait

    def save(self, *, ends: bool = True) -> None:
        self.pending += 1
        self.ended += ends

    def num_pending_saves(self) -> int:
        return self.pending

    def ended_saves(self, most: int) -> list[bool]:
        return [True] * min(most, self.ended)

    def take_completed_offloads(self, count: int) -> None:
        self.ended -= count

    def commit_completed_offloads(self, successes: list[bool]) -> None:
        self.pending -= len(successes)
        self.committed += successes

    def end_loads(self) -> tuple[list[str], bool]:
        return ["a"], self.landed

    def steps(self, num: int) -> None:
        for _ in range(num):
            assert self.lockstep.step() == []


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_a_round_is_taken_as_many_steps_later_as_stages_lie_apart(num_stages: int) -> None:
    stage = Stage(num_stages)
    stage.save()
    stage.steps(num_stages - 1)
    assert (stage.num_begun, stage.num_waits, stage.committed) == (1, 0, [])
    stage.steps(1)
    assert (stage.num_begun, stage.num_waits, stage.committed) == (2, 1, [True])
    assert stage.lockstep.num_rounds == 1


def test_saves_under_a_flush_are_given_up_and_those_behind_it_are_not_taken_for_them() -> None:
    stage = Stage(2)
    stage.save()
    stage.save()
    stage.steps(1)  # they are told of
    stage.lockstep.drain_saves()
    assert (stage.pending, stage.committed) == (0, [False, False])
    stage.save(ends=False)  # as many others
    stage.save(ends=False)
    stage.steps(1)
    assert (stage.pending, stage.committed) == (2, [False, False])
    stage.ended = 2
    stage.steps(2)
    assert (stage.pending, stage.committed) == (0, [False, False, True, True])


def test_a_reset_of_the_device_voids_what_a_round_says_of_saves() -> None:
    stage = Stage(2)
    stage.save()
    stage.steps(1)
    stage.lockstep.leave_all()
    stage.pending = stage.ended = 0  # as SGLang's wrapper and the save thread do
    stage.save(ends=False)
    stage.steps(1)
    assert (stage.pending, stage.committed) == (1, [])


def test_a_save_that_has_not_ended_under_a_flush_ends_the_server() -> None:
    stage = Stage(2)
    stage.save(ends=False)
    with pytest.raises(StageError, match="restart the server"):
        stage.lockstep.drain_saves()
    assert stage.committed == []


def test_a_load_that_does_not_land_ends_the_server_at_once() -> None:
    stage = Stage(2)
    assert stage.lockstep.end_loads([]) == []
    stage.landed = False
    with pytest.raises(StageError, match="the server ends"):
        stage.lockstep.end_loads([])
