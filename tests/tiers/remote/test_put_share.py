"""Processes that hold the same pages: each page is put by one of them, and found by all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiers.records.record import RAW_CODEC
from sglang_ext.tiers.remote.base import RemoteKey
from sglang_ext.tiers.store import PutShare
from testkit.remote.redis_server import RedisServer, redis_binary
from tests.tiers.remote.remote_cases import until
from tests.tiers.remote.test_pages import Host, Make, make, pages, server

__all__ = ["make", "server"]  # fixtures

needs_redis = pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")

NUM_PAGES = 40
SHARES = (PutShare(0, 2), PutShare(1, 2))


@given(st.integers(1, 64), st.lists(st.binary(min_size=32, max_size=32), max_size=50))
def test_every_page_is_in_one_share(num_shares: int, hashes: list[bytes]) -> None:
    rows = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    found = [PutShare(number, num_shares).has(rows) for number in range(num_shares)]
    assert (np.sum(found, axis=0) == 1).all()
    assert [share.dtype for share in found] == [np.bool_] * num_shares


@pytest.mark.parametrize("num_shares", [2, 3, 8, 16])
def test_shares_are_about_equal(num_shares: int) -> None:
    hashes = pages("a", 4096)
    # The same for pages that lie in a table next to each other, or that another rule picked.
    some = hashes[hashes[:, 0] % 8 == 0]
    for rows in (hashes, some):
        expected = len(rows) / num_shares
        for number in range(num_shares):
            num = int(PutShare(number, num_shares).has(rows).sum())
            assert abs(num - expected) < 5 * expected**0.5


@pytest.fixture
def ranks(make: Make) -> tuple[Host, Host]:
    return make(share=SHARES[0]), make(share=SHARES[1])


def mine(hashes: np.ndarray, number: int) -> np.ndarray:
    return hashes[SHARES[number].has(hashes)]


def put(host: Host, num: int) -> bool:
    return until(lambda: host.count("remote_written_pages") == num)


@needs_redis
def test_each_page_is_stored_once_and_found_by_all(
    ranks: tuple[Host, Host], make: Make, server: RedisServer
) -> None:
    hashes = pages("a", NUM_PAGES)
    for number, rank in enumerate(ranks):
        rank.save(hashes)
        assert put(rank, len(mine(hashes, number)))
    for number, rank in enumerate(ranks):
        assert rank.count("remote_left_pages") == NUM_PAGES - len(mine(hashes, number))
        assert rank.count("remote_duplicate_pages") == 0
        assert (rank.sizes(hashes) > 0).all()
    assert server.call("DBSIZE") == NUM_PAGES
    for share in SHARES:  # another server's
        rank = make(share=share)
        plan = rank.plan(hashes)
        assert plan is not None
        assert plan.num_remote == NUM_PAGES
        rank.check(hashes)


@needs_redis
def test_what_one_rank_did_not_put_is_a_miss_on_all(ranks: tuple[Host, Host], make: Make) -> None:
    hashes = pages("a", NUM_PAGES)
    ranks[0].save(hashes)  # the other one lost its pages, or its puts failed
    assert put(ranks[0], len(mine(hashes, 0)))
    num_leading = int(np.argmin(SHARES[0].has(hashes)))
    for rank in (*ranks, make(share=SHARES[1])):
        assert int((rank.sizes(hashes) > 0).sum()) == num_leading


@needs_redis
def test_puts_that_fail_are_counted_by_whose_they_are(
    ranks: tuple[Host, Host], server: RedisServer
) -> None:
    hashes = pages("a", NUM_PAGES)
    server.kill()
    for number, rank in enumerate(ranks):
        while rank.remote.usable:
            rank.sizes(hashes)
        rank.save(hashes)
        num = len(mine(hashes, number))
        assert until(lambda: rank.count("remote_upload_dropped_pages") == num)  # noqa: B023
        assert rank.ready(hashes) == NUM_PAGES


@needs_redis
def test_a_damaged_page_of_another_share_is_put_anew_by_who_saw_it(
    ranks: tuple[Host, Host], server: RedisServer
) -> None:
    hashes = pages("a", NUM_PAGES)
    for number, rank in enumerate(ranks):
        rank.save(hashes)
        assert put(rank, len(mine(hashes, number)))
    page = mine(hashes, 0)[:1]
    (name,) = server.call("KEYS", f"*:{page.tobytes().hex()}:*")  # type: ignore[misc]
    server.call("SETRANGE", name, 3000, b"\0\0\0\0\0\0")  # type: ignore[arg-type]
    # Rank 0 has it in DRAM and never reads it there; its next put would find a sound header.
    other = ranks[1]
    other.store.clear()
    assert other.plan(page) is not None
    assert other.ready(page) == 0
    key = RemoteKey(other.space.digest, page.tobytes(), other.space.lora, RAW_CODEC)
    assert other.remote.rejected([key]) == [True]
    num_put = other.count("remote_written_pages")
    other.save(page)
    assert put(other, num_put + 1)
    assert other.remote.rejected([key]) == [False]
    other.store.clear()
    assert other.plan(page) is not None
    other.check(page)


@needs_redis
def test_a_second_hit_puts_the_share(make: Make) -> None:
    rank = make(policy="second_hit", share=SHARES[0])
    hashes = pages("a", NUM_PAGES)
    rank.save(hashes)
    assert rank.count("remote_left_pages") == 0
    rank.check(hashes)
    assert put(rank, len(mine(hashes, 0)))
    assert rank.count("remote_left_pages") == len(mine(hashes, 1))
