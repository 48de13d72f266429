"""Replays of an order meet what the run met whose order it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.policies.jobs import simulate
from bench.policies.order import ORDERS, RequestOrder, replay_order
from bench.policies.plan import QUICK, session_jobs


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_hits_nothing_that_is_saved_later(order: str) -> None:
    path = np.arange(3)
    # The second comes while the first runs; the third when both are saved.
    late = RequestOrder([path] * 3, [path] * 3, [1] * 3, [[], [], [0, 1]])

    assert replay_order(late, 10, order) == [0, 0, 3]
    assert replay_order(replace(late, saved=None), 10, order) == [0, 3, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_room_is_kept_where_pages_are_saved_late(order: str) -> None:
    paths = [np.arange(3), np.arange(3, 6), np.arange(3)]
    late = RequestOrder(paths, paths, [1] * 3, [[], [], [0, 1]])

    assert replay_order(late, 3, order)[2] <= 3
    assert sum(replay_order(late, 0, order)) == 0


def test_what_is_reusable_is_the_same_for_the_run_and_the_replays_of_its_order() -> None:
    sizes = replace(QUICK, agents=5, documents=2, shares=(0.2,))
    job = next(each for each in session_jobs(sizes) if each.name == "agents 3 0.2")

    figures = simulate(replace(job, policies=("lookahead", *ORDERS))).figures

    assert len({each["reusable_tokens"] for each in figures.values()}) == 1
    assert figures["belady"]["hit_rate"] >= figures["lru"]["hit_rate"]
