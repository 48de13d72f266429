"""Replays of an order meet what the run met whose order it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.policies.jobs import simulate
from bench.policies.order import ORDERS, RequestOrder, known_ahead, order_figures, replay_order
from bench.policies.plan import QUICK, session_jobs
from sglang_ext.simulator.engine import Recorded, Request, System


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_hits_nothing_that_is_saved_later(order: str) -> None:
    path = np.arange(3)
    # The second comes while the first runs; the third when both are saved.
    late = RequestOrder([path] * 3, [path] * 3, known_ahead(3, 1), [[], [], [0, 1]])

    assert replay_order(late, 10, order) == [0, 0, 3]
    assert replay_order(replace(late, saved=None), 10, order) == [0, 3, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_room_is_kept_where_pages_are_saved_late(order: str) -> None:
    paths = [np.arange(3), np.arange(3, 6), np.arange(3)]
    late = RequestOrder(paths, paths, known_ahead(3, 1), [[], [], [0, 1]])

    assert replay_order(late, 3, order)[2] <= 3
    assert sum(replay_order(late, 0, order)) == 0


def test_the_rule_knows_a_request_from_when_it_waits_and_not_from_its_place() -> None:
    paths = [np.array([page]) for page in (0, 1, 2, 0)]

    assert replay_order(RequestOrder(paths, paths, [0, 1, 2, 1]), 2, "waiting") == [0, 0, 0, 1]
    assert replay_order(RequestOrder(paths, paths, [0, 1, 2, 3]), 2, "waiting") == [0, 0, 0, 0]


def test_an_order_is_that_of_admission_and_who_was_passed_over_waited() -> None:
    paths = [np.array([page]) for page in (0, 0, 1, 2)]
    requests = [Request(at, float(at), path, path, 11, 1) for at, path in enumerate(paths)]
    # The second waits from the first's turn on, and is passed over twice.
    done = Recorded(requests, 3, [0, 2, 3, 1], [2, 2, 2, 1], [[], [0], [2], [3]])
    system = System(10, 1.0, 20.0, 0.0, 1.0, 1.0)  # room for two pages

    reused = {
        order: order_figures(done, system, order, warmup=3, measured=None)["reused_tokens"]
        for order in ORDERS
    }

    assert reused == {"lru": 0, "fifo": 0, "waiting": 10, "belady": 10}


def test_what_is_reusable_is_the_same_for_the_run_and_the_replays_of_its_order() -> None:
    sizes = replace(QUICK, agents=5, documents=2, shares=(0.2,))
    job = next(each for each in session_jobs(sizes) if each.name == "agents 3 0.2")

    figures = simulate(replace(job, policies=("lookahead", *ORDERS))).figures

    assert len({each["reusable_tokens"] for each in figures.values()}) == 1
    assert figures["belady"]["hit_rate"] >= figures["lru"]["hit_rate"]
