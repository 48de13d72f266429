"""The server's page store in virtual time, and the optima that it is compared with."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from bench.policies_oracle import belady_tokens, lru_tokens
from bench.policies_replay import Replay, num_reusable, order_share
from bench.policies_store import ServerStore, StoreSizes, page_hashes
from bench.policies_trace import BLOCK_TOKENS, BUNDLED, Line, read_trace
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.waiting_request import Wish

SIZES = StoreSizes(1 << 20, host_pages=64, disk_pages=256)


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return read_trace(BUNDLED, limit=250)


def test_a_replay_is_deterministic_and_below_the_optimum(lines: list[Line]) -> None:
    paths = [line.hash_ids for line in lines]
    done = [Replay(paths, SIZES, PolicyConfig(), 60, [1.0] * len(paths)).run() for _ in range(2)]
    assert done[0] == done[1]
    assert done[0].reusable == num_reusable(paths)
    assert (
        0 < done[0].hit_share <= order_share(paths, SIZES.host_pages + SIZES.disk_pages, "belady")
    )
    assert done[0].hits + done[0].new == sum(map(len, paths))


def test_what_is_known_orders_the_optima(lines: list[Line]) -> None:
    paths = [line.hash_ids for line in lines]
    rates = [
        order_share(paths, 300, "lru"),
        *(order_share(paths, 300, "waiting", known) for known in (20, 100, 250)),
        order_share(paths, 300, "belady"),
    ]
    assert all(low <= high + 0.01 for low, high in itertools.pairwise(rates))
    assert rates[0] < rates[-1] - 0.1
    assert order_share(paths, 300, "waiting", 0) == rates[0]
    assert order_share(paths, 300, "waiting", len(paths)) == rates[-1]


def test_two_oracles_of_one_order_agree(lines: list[Line]) -> None:
    whole = [
        Line(each.arrival_s, len(each.hash_ids) * BLOCK_TOKENS, 1, each.hash_ids) for each in lines
    ]
    paths = [line.hash_ids for line in whole]
    for order, theirs in (("lru", lru_tokens), ("belady", belady_tokens)):
        share = theirs(whole, 300) / BLOCK_TOKENS / num_reusable(paths)
        assert order_share(paths, 300, order) == pytest.approx(share)


def test_pages_move_in_virtual_time_without_threads() -> None:
    sizes = StoreSizes(1 << 20, 8, 64, read_bytes_per_s=1 << 20, write_bytes_per_s=1 << 20)
    with ServerStore(sizes, PolicyConfig()) as server:
        first, second = page_hashes(np.arange(6)), page_hashes(np.arange(10, 16))
        for hashes in (first, second):  # the second finds room only once the first is written
            server.save(hashes, 0)
            while (due_s := server.executor.next_s()) < np.inf:
                server.clock.now_s = due_s
                server.executor.run_due()
        assert server.clock.now_s == pytest.approx(12, rel=0.05)
        missing = 6 - server.store.ready_prefix(server.space, first)
        assert missing
        server.room.enter("r", Wish(server.space, first[:4], 0, 255))
        began_s = server.clock.now_s
        server.room.step(["r"])
        while not server.room.may_admit("r"):
            due_s = server.executor.next_s()
            server.clock.now_s = due_s if due_s < np.inf else server.clock.now_s + 0.01
            server.executor.run_due()
            server.room.step(["r"])
        assert server.store.ready_prefix(server.space, first) >= 4
        assert server.clock.now_s > began_s
        server.store.check()
        folder = Path(server._folder)
    assert not folder.exists()
