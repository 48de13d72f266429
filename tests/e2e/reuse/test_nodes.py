"""Two nodes on loopback, a tensor parallel rank on each, the second one's store late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from testkit.rank_requests import ENVIRONMENT, JITTER_MS, answer_of, ask
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import PAGE, by_tier, check_agreed, host_gb, real_prompts, settled, state
from tests.e2e.nodes import Nodes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# A node's DRAM is its only rank's, whose pages have half of the heads: 20 slots hold 40 of these.
HOST_PAGES = 20
LENGTHS = (128, 200, 300, 384)
NUM_FILLERS = 12
END_S = 300.0


ARGS = [
    *("--page-size", str(PAGE), "--max-total-tokens", "3072"),
    *("--enable-hier-kv", "--hier-kv-host-size", host_gb(HOST_PAGES)),
    *("--hier-kv-disk-size", "1", "--hier-kv-disk-segment-size", "0.03"),
    *("--hier-kv-prefetch-policy", "wait_complete"),
]


def test_nodes_that_differ_do_not_start_and_say_in_what(tmp_path: Path) -> None:
    nodes = Nodes(ARGS, tmp_path, env=ENVIRONMENT, other_args=["--hier-kv-rope", "delta"])
    try:
        for node in nodes.nodes:
            node.start()
        _await_ends(nodes.nodes, "nodes that differ run on")
    finally:
        nodes.kill()
    for node in nodes.nodes:
        assert (
            "--enable-hier-kv needs the same --hier-kv-rope on every node, got 'pre' on node 0 and "
            "'delta' on node 1; start all nodes alike." in node.log()
        )


def test_what_two_nodes_loaded_answers_as_what_the_device_held(tmp_path: Path) -> None:
    prompts = list(real_prompts(LENGTHS, seed=3))
    fillers = list(real_prompts([384] * NUM_FILLERS, seed=4))
    late = {ENV_JITTER: str(JITTER_MS)}
    with Nodes(ARGS, tmp_path, env=ENVIRONMENT, late=late) as nodes:
        head = nodes.head
        for prompt in prompts:
            ask(head, prompt)
        from_device = [ask(head, prompt) for prompt in prompts]
        settled(head, END_S)
        flush_device(head)
        from_host = [ask(head, prompt) for prompt in prompts]
        for prompt in fillers:
            ask(head, prompt)
        settled(head, END_S)
        flush_device(head)
        from_disk = [ask(head, prompt) for prompt in prompts]
        ranks = state(head)["tp_ranks"]
        capacities = [rank["host"]["host_capacity_pages"] for rank in ranks]
        _end_a_node(nodes)
        log = nodes.log()
    expected = [answer_of(answer) for answer in from_device]
    assert all(by_tier(answer)["device"] > 0 for answer in from_device)
    assert [answer_of(answer) for answer in from_host] == expected
    assert [answer_of(answer) for answer in from_disk] == expected
    assert all(by_tier(answer)["host"] > 0 for answer in from_host)
    assert all(by_tier(answer)["disk"] > 0 for answer in from_disk)
    assert [rank["tp_rank"] for rank in ranks] == [0, 1]
    assert all(2 * HOST_PAGES - 1 <= capacity <= 2 * HOST_PAGES + 1 for capacity in capacities)
    for node in range(2):
        assert list(nodes.disk(node).glob(f"dp0-tp{node}-of-2/*/seg-*.hkv"))
        assert not list(nodes.disk(node).glob(f"dp0-tp{1 - node}-of-2"))
    check_agreed(log, 2)


def _end_a_node(nodes: Nodes) -> None:
    """Kills the second node: the first one ends by itself, as SGLang's does."""
    nodes.other.kill()
    _await_ends([nodes.head], "a node hangs without the other one")


def _await_ends(nodes: Sequence[Server], otherwise: str) -> None:
    deadline_s = time.monotonic() + END_S
    while any(node.alive() for node in nodes):
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.1)
