"""Ports of test servers are given to nobody twice, and are none of those that SGLang draws."""

from __future__ import annotations

import inspect
from itertools import combinations

from sglang.srt.utils.network import get_free_port_below_ephemeral

from testkit.ports import FIRST_PORT, NUM_PORTS, free_port, port_of_ranks


def test_no_port_is_one_that_sglang_may_draw() -> None:
    """It listens there seconds later, as a test server does."""
    first_drawn = inspect.signature(get_free_port_below_ephemeral).parameters["low"].default
    last = FIRST_PORT + NUM_PORTS - 1
    assert last < first_drawn


def test_ports_that_are_given_one_after_the_other_lie_apart() -> None:
    given = [free_port() for _ in range(20)]
    assert all(FIRST_PORT <= port < FIRST_PORT + NUM_PORTS for port in given)
    assert min(abs(one - other) for one, other in combinations(given, 2)) > 16


def test_each_server_has_a_port_of_its_own_for_its_ranks() -> None:
    options = [port_of_ranks(["--tp-size", "2"]) for _ in range(20)]
    assert {name for name, _ in options} == {"--nccl-port"}
    assert len({port for _, port in options}) == 20
    for chosen in ("--nccl-port=7", "--dist-init-addr", "--dp-size=2"):
        assert port_of_ranks([chosen]) == []
