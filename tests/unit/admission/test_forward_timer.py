"""Prefills and decode steps as SGLang runs them, with overlap and without, on our own clock."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_ext.admission.forward_timer import ForwardTimer
from sglang_ext.tiers.policy.cost_model import CostModel


class Mode:
    """SGLang's `ForwardMode`, as far as it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name in ("extend", "split")

    def is_split_prefill(self) -> bool:
        return self.name == "split"

    def is_decode(self) -> bool:
        return self.name == "decode"


class Rig:
    """A timer with a model that records what it is told."""

    def __init__(self, load_s: float = math.inf, runs_in_launch: bool = False) -> None:
        self.now_s = 100.0
        self.cost = CostModel(2.0)
        self.prefills: list[tuple[list[tuple[int, int]], float, float]] = []
        self.steps: list[float] = []
        self.notes: list[tuple[float, float]] = []
        recorder = cast(Any, self.cost)
        recorder.note_prefill = lambda work, s, load_s=0.0: self.prefills.append(
            (list(work), round(s, 6), load_s)
        )
        recorder.note_step = lambda s: self.steps.append(round(s, 6))
        self.timer = ForwardTimer(
            self.cost, lambda index: load_s, lambda *two: self.notes.append(two),
            lambda: self.now_s, runs_in_launch=runs_in_launch,
        )  # fmt: skip

    def launch(
        self, name: str, lens: Any = (), prefix: Any = (), load_index: int = -1, takes_s: float = 0
    ) -> Any:
        batch = SimpleNamespace(
            forward_mode=Mode(name), launch_ts=self.now_s, extend_lens=list(lens),
            prefix_lens=list(prefix), hicache_consumer_index=load_index,
        )  # fmt: skip
        result = SimpleNamespace()
        self.now_s += takes_s
        self.timer.launched(batch, result)
        return result

    def finish(self, result: Any, after_s: float) -> None:
        self.now_s += after_s
        self.timer.finished(result)


def test_a_prefill_lasts_from_its_launch_to_its_result() -> None:
    rig = Rig()
    rig.finish(rig.launch("extend", [100, 20], [0, 640]), 0.5)
    assert rig.prefills == [([(100, 0), (20, 640)], 0.5, 0.0)]


def test_an_idle_time_before_it_does_not_count() -> None:
    rig = Rig()
    rig.finish(rig.launch("extend", [100], [0]), 0.5)
    rig.now_s += 60
    rig.finish(rig.launch("extend", [200], [0]), 0.7)
    assert [seconds for _, seconds, _ in rig.prefills] == [0.5, 0.7]


def test_with_overlap_a_batch_begins_when_the_one_before_it_is_done() -> None:
    rig = Rig()
    first = rig.launch("extend", [100], [0])
    rig.now_s += 0.1
    second = rig.launch("decode")  # launched while the first still runs
    rig.finish(first, 0.4)
    third = rig.launch("extend", [300], [100])
    rig.finish(second, 0.05)
    rig.finish(third, 0.6)
    assert [seconds for _, seconds, _ in rig.prefills] == [0.5, 0.6]
    assert rig.steps == [0.05]


def test_where_the_launch_computes_a_batch_does_not_last_until_the_next_one_is_computed() -> None:
    rig = Rig(runs_in_launch=True)
    first = rig.launch("extend", [1000], [0], takes_s=0.5)
    second = rig.launch("extend", [100], [0], takes_s=0.05)  # before the first is handled
    rig.finish(first, 0.01)
    third = rig.launch("decode", takes_s=0.002)
    rig.finish(second, 0.01)
    rig.finish(third, 0.01)
    assert [seconds for _, seconds, _ in rig.prefills] == [0.5, 0.05]
    assert rig.steps == [0.002]


def test_where_the_launch_computes_a_batch_without_a_time_changes_nothing() -> None:
    rig = Rig(runs_in_launch=True)
    idle = rig.launch("idle", [5], [0])
    prefill = rig.launch("extend", [1000], [0], takes_s=0.5)
    rig.finish(idle, 0.01)
    rig.finish(prefill, 0.01)
    assert [seconds for _, seconds, _ in rig.prefills] == [0.5]


def test_loads_beside_a_prefill_are_told() -> None:
    rig = Rig(load_s=0.3)
    rig.finish(rig.launch("extend", [100], [64], load_index=7), 0.5)
    assert rig.prefills == [([(100, 64)], 0.5, 0.3)]


@pytest.mark.parametrize("name", ["idle", "split", "target_verify"])
def test_other_batches_only_move_the_clock(name: str) -> None:
    rig = Rig()
    other = rig.launch(name, [5], [0])
    after = rig.launch("extend", [100], [0])
    rig.finish(other, 0.2)
    rig.finish(after, 0.5)
    assert [seconds for _, seconds, _ in rig.prefills] == [0.5]
    assert rig.steps == []


def test_a_batch_without_a_result_is_nothing() -> None:
    rig = Rig()
    batch = SimpleNamespace(forward_mode=Mode("decode"), launch_ts=1.0)
    rig.timer.launched(batch, None)
    rig.timer.finished(None)
    assert rig.steps == []


def test_says_whether_others_decode() -> None:
    rig = Rig()
    assert not rig.timer.is_decoding
    rig.finish(rig.launch("decode"), 0.02)
    assert rig.timer.is_decoding
    rig.now_s += 0.1
    assert not rig.timer.is_decoding


def test_who_stops_decoding_for_a_prefill_decodes() -> None:
    rig = Rig()
    rig.finish(rig.launch("decode"), 0.02)
    for _ in range(3):  # one after the other, each longer than three steps
        rig.finish(rig.launch("extend", [1000], [0]), 0.5)
        assert rig.timer.is_decoding
    rig.now_s += 0.1
    assert not rig.timer.is_decoding
    rig.finish(rig.launch("extend", [1000], [0]), 0.5)
    assert not rig.timer.is_decoding  # they had ended before it


def test_who_stops_decoding_for_a_prefill_decodes_while_it_runs() -> None:
    rig = Rig()
    cast(Any, rig.cost).batch_s = lambda work: 0.5
    rig.finish(rig.launch("decode"), 0.02)
    prefill = rig.launch("extend", [1000], [0])
    rig.now_s += 0.4
    assert rig.timer.is_decoding
    rig.finish(prefill, 0.1)
    assert rig.timer.is_decoding
    rig.now_s += 0.1
    assert not rig.timer.is_decoding


def test_who_stops_decoding_for_a_prefill_decodes_where_forwards_run_in_launch() -> None:
    rig = Rig(runs_in_launch=True)
    rig.finish(rig.launch("decode", takes_s=0.02), 0.0)
    rig.finish(rig.launch("extend", [1000], [0], takes_s=0.5), 0.0)
    assert rig.timer.is_decoding


def test_what_was_foreseen_is_noted_beside_what_came() -> None:
    rig = Rig()
    rig.cost = CostModel(2.0)
    timer = ForwardTimer(
        rig.cost, lambda index: 0.0, lambda *two: rig.notes.append(two), lambda: rig.now_s
    )
    rig.timer = timer
    rig.finish(rig.launch("extend", [1000], [0]), 0.5)
    assert rig.notes == []
    rig.finish(rig.launch("extend", [1000], [0]), 0.6)
    [(expected, measured)] = rig.notes
    assert expected == pytest.approx(0.5, rel=0.01)
    assert measured == pytest.approx(0.6)
