"""Estimators of time: right where they have seen, robust against outliers, quick to follow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sglang_ext.tiers.policy.speed_estimators import (
    PrefillEstimator,
    Row,
    StepEstimator,
    TimeEstimator,
    TransferEstimator,
    fit_non_negative,
)


def true_prefill_s(new: int, before: int, pace: float = 1.0) -> float:
    return pace * (2e-3 + 40e-6 * new + 4e-9 * new * (before + new / 2))


WORK = [(200, 0), (1500, 0), (6000, 0), (64, 8000), (700, 3000), (30, 400)]


def taught(pace: float = 1.0) -> PrefillEstimator:
    estimator = PrefillEstimator()
    for _ in range(4):
        for new, before in WORK:
            estimator.add([(new, before)], true_prefill_s(new, before, pace))
    return estimator


def test_nothing_is_known_before_the_first_measurement() -> None:
    assert PrefillEstimator().seconds(100, 0) is None
    assert PrefillEstimator().coefficients is None
    transfer = TransferEstimator()
    assert (transfer.seconds(1), transfer.latency_s, transfer.seconds_per_byte) == (None,) * 3
    assert transfer.seconds(0) == 0.0
    assert StepEstimator().seconds is None


def test_one_measurement_is_scaled_with_the_size() -> None:
    estimator = PrefillEstimator()
    estimator.add([(1000, 0)], 0.5)
    assert estimator.seconds(1000, 0) == pytest.approx(0.5, rel=0.01)
    assert estimator.seconds(500, 0) == pytest.approx(0.25, rel=0.05)


def test_learns_the_cost_of_tokens_and_of_attention() -> None:
    estimator = taught()
    for new, before in [(1000, 0), (4000, 2000), (128, 8000), (9000, 0)]:
        expected = true_prefill_s(new, before)
        assert estimator.seconds(new, before) == pytest.approx(expected, rel=0.1)


def test_prefill_is_superlinear_in_the_length() -> None:
    once, twice = taught().seconds(6000, 0), taught().seconds(12000, 0)
    assert once is not None
    assert twice is not None
    assert twice > 2.1 * once


def test_a_batch_costs_its_requests_and_the_batch_once() -> None:
    estimator = PrefillEstimator()
    rng = random.Random(3)
    for _ in range(60):
        work = [rng.choice(WORK) for _ in range(rng.randint(1, 4))]
        # The batch's own part of the time, 2 ms, is paid once.
        estimator.add(work, sum(true_prefill_s(*one) - 2e-3 for one in work) + 2e-3)
    two = [(1500, 0), (700, 3000)]
    expected = sum(true_prefill_s(*one) - 2e-3 for one in two) + 2e-3
    assert estimator.batch_seconds(two) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("factor", [0.05, 0.3, 0.7, 1.4, 3.0, 20.0])
def test_follows_a_change_of_speed_within_five_measurements(factor: float) -> None:
    estimator = taught()
    rng = random.Random(5)
    for _ in range(5):
        new, before = rng.choice(WORK)
        estimator.add([(new, before)], true_prefill_s(new, before, factor))
    for new, before in WORK:
        expected = true_prefill_s(new, before, factor)
        assert estimator.seconds(new, before) == pytest.approx(expected, rel=0.15)
    for _ in range(200):  # and does not drift away later
        new, before = rng.choice(WORK)
        estimator.add([(new, before)], true_prefill_s(new, before, factor))
        expected = true_prefill_s(new, before, factor)
        assert estimator.seconds(new, before) == pytest.approx(expected, rel=0.3)


def test_two_outliers_in_a_row_change_nothing() -> None:
    estimator = taught()
    for slow in (50.0, 8.0):
        estimator.add([(1500, 0)], true_prefill_s(1500, 0, slow))
    for new, before in WORK:
        assert estimator.seconds(new, before) == pytest.approx(true_prefill_s(new, before), rel=0.1)


def test_noise_with_outliers_leaves_the_estimate_where_it_should_be() -> None:
    rng = random.Random(11)
    estimator = TransferEstimator()
    for at in range(300):
        num_bytes = int(2 ** rng.uniform(18, 28))
        seconds = (1e-3 + num_bytes / 2e9) * rng.lognormvariate(0, 0.1)
        estimator.add(num_bytes, seconds * (10 if at % 5 == 4 else 1))
    for num_bytes in (1 << 20, 1 << 24, 1 << 27):
        expected = 1e-3 + num_bytes / 2e9
        assert estimator.seconds(num_bytes) == pytest.approx(expected, rel=0.25)


def test_latency_and_bandwidth_are_told_apart() -> None:
    estimator = TransferEstimator()
    for power in (18, 20, 22, 24, 26, 28) * 3:
        estimator.add(1 << power, 5e-3 + (1 << power) / 1e9)
    assert estimator.latency_s == pytest.approx(5e-3, rel=0.1)
    assert estimator.seconds_per_byte == pytest.approx(1e-9, rel=0.05)


def test_a_size_that_was_not_seen_for_long_is_not_forgotten() -> None:
    estimator = taught()
    for _ in range(500):
        estimator.add([(64, 8000)], true_prefill_s(64, 8000))
    assert estimator.seconds(6000, 0) == pytest.approx(true_prefill_s(6000, 0), rel=0.1)


def test_a_size_that_became_slow_alone_is_believed_after_a_while() -> None:
    estimator = TransferEstimator()
    sizes = (1 << 12, 1 << 20, 1 << 24, 1 << 28)
    for _ in range(5):
        for size in sizes:
            estimator.add(size, size / 1e9)
    for _ in range(30):  # a latency that was not there before: only small jobs show it
        for size in sizes:
            estimator.add(size, 1e-3 + size / 1e9)
    for size in sizes:
        assert estimator.seconds(size) == pytest.approx(1e-3 + size / 1e9, rel=0.3)


def test_durations_that_mean_nothing_are_ignored() -> None:
    estimator = taught()
    before = estimator.num_samples
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        estimator.add([(100, 0)], seconds)
    estimator.add([(0, 100)], 1.0)
    assert estimator.num_samples == before
    step = StepEstimator()
    for seconds in (0.01, 0.0, float("nan"), 0.03, 0.02):
        step.add(seconds)
    assert step.seconds == 0.02


def test_memory_is_bounded() -> None:
    estimator = TimeEstimator()
    rng = random.Random(1)
    for _ in range(2_000):
        estimator.add((1.0, 4 ** rng.uniform(0, 20), 4 ** rng.uniform(0, 40)), rng.random())
    assert len(estimator._strata) <= 32
    assert all(len(stratum.rows) <= 3 for stratum in estimator._strata.values())


def test_the_fit_is_the_best_of_all_non_negative_ones() -> None:
    rng = random.Random(2)
    for _ in range(40):
        rows: list[Row] = [
            ((1.0, rng.random(), rng.random()), 0.1 + rng.random()) for _ in range(6)
        ]
        found = fit_non_negative(rows, ridge=0.0)
        assert min(found) >= 0

        def loss(c: list[float], rows: Sequence[Row] = rows) -> float:
            return sum((sum(map(float.__mul__, c, x)) / y - 1) ** 2 for x, y in rows)

        best = loss(found)
        for _ in range(300):
            other = [max(0.0, value + rng.gauss(0, 0.2)) for value in found]
            assert loss(other) >= best - 1e-9


def test_equal_jobs_say_nothing_of_the_constant() -> None:
    a, b, c = fit_non_negative([((1.0, 1000.0, 5e5), 0.5)] * 4)
    assert b == pytest.approx(5e-4, rel=0.01)
    assert a < 0.01
    assert c * 5e5 < 0.01
