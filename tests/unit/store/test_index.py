"""The page index on chosen cases; `tests/property/test_index_model.py` has the random ones."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sglang_ext.tiers import index_kernels as kernels
from sglang_ext.tiers.errors import TierConfigError, TierInvariantError, TierUsageError
from sglang_ext.tiers.index import MAX_CAPACITY, NO_SEGMENT, PageIndex

NS = 7


def random_hashes(num: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (num, 32), dtype=np.uint8)


def filled(num: int, capacity: int | None = None, seed: int = 0) -> PageIndex:
    index = PageIndex(capacity or num, seed=seed)
    index.insert(random_hashes(num), NS)
    return index


def rows_of_segment(index: PageIndex, segment: int) -> npt.NDArray[np.int64]:
    rows = index.rows()
    found: npt.NDArray[np.int64] = rows[index.segment[rows] == segment]
    return found


def test_inserted_pages_are_found_and_others_are_not() -> None:
    hashes = random_hashes(500)
    index = PageIndex(300)
    rows, created = index.insert(hashes[:300], NS)
    assert created.all()
    assert len(np.unique(rows)) == 300
    np.testing.assert_array_equal(index.lookup(hashes[:300], NS), rows)
    assert (index.lookup(hashes[300:], NS) == -1).all()
    assert len(index) == 300
    index.check()


def test_same_hash_in_two_namespaces_is_two_pages() -> None:
    hashes = random_hashes(10)
    index = PageIndex(20)
    first = index.insert(hashes, 1).rows
    second = index.insert(hashes, 2).rows
    assert not np.isin(first, second).any()
    np.testing.assert_array_equal(index.lookup(hashes, 1), first)
    np.testing.assert_array_equal(index.lookup(hashes, 2), second)
    assert (index.lookup(hashes, 3) == -1).all()


def without_tags(capacity: int, seed: int) -> PageIndex:
    """An index in which every bucket word has the tag 0, so that only the full key tells apart."""
    index = PageIndex(capacity, seed=seed)
    index._table = (*index._table[:3], np.uint64(0xFFFFFFFF), index._table[4])
    return index


def test_without_tags_every_bit_of_hash_and_namespace_tells_pages_apart() -> None:
    known = random_hashes(1)
    variants = np.repeat(known, 256, axis=0)
    bits = np.arange(256)
    variants[bits, bits // 8] ^= (1 << (bits % 8)).astype(np.uint8)
    # One page in eight buckets, placed by 64 seeds: each variant meets it several times.
    for seed in range(64):
        index = without_tags(1, seed)
        index.insert(known, NS)
        assert index.lookup(known, NS)[0] == 0
        assert (index.lookup(variants, NS) == -1).all()
        for bit in range(32):
            assert index.lookup(known, NS ^ (1 << bit))[0] == -1


def test_without_tags_colliding_pages_live_side_by_side() -> None:
    hashes = random_hashes(700)
    index = without_tags(700, seed=0)
    rows, created = index.insert(hashes, NS)
    assert created.all()
    np.testing.assert_array_equal(index.lookup(hashes, NS), rows)
    assert len(index.prefix_rows(hashes, NS)) == 700
    index.remove(rows[::2])
    np.testing.assert_array_equal(index.lookup(hashes[1::2], NS), rows[1::2])
    assert (index.lookup(hashes[::2], NS) == -1).all()


def test_known_page_keeps_its_row_and_columns_on_a_second_insert() -> None:
    index = PageIndex(8)
    hashes = random_hashes(4)
    rows = index.insert(hashes, NS).rows
    index.host_slot[rows] = [5, 6, 7, 8]
    again = index.insert(hashes[::-1], NS)
    assert not again.created.any()
    np.testing.assert_array_equal(again.rows, rows[::-1])
    np.testing.assert_array_equal(index.host_slot[rows], [5, 6, 7, 8])


def test_page_named_twice_in_a_batch_is_created_once() -> None:
    index = PageIndex(8)
    one = random_hashes(1)
    rows, created = index.insert(np.concatenate([one, one]), NS)
    assert rows[0] == rows[1]
    assert created.tolist() == [True, False]
    assert len(index) == 1


def test_full_index_refuses_new_pages_and_still_returns_known_ones() -> None:
    index = filled(6)
    hashes = random_hashes(9)
    rows, created = index.insert(hashes, NS)
    assert (rows[:6] >= 0).all()
    assert (rows[6:] == -1).all()
    assert not created.any()
    index.check()


def test_reused_row_starts_clean_and_is_not_listed() -> None:
    index = PageIndex(1)
    row = index.insert(random_hashes(1, seed=1), NS).rows
    zeros: list[npt.NDArray[Any]] = [
        index.block, index.num_blocks, index.disk_quality, index.flags, index.quality, index.stamp,
    ]  # fmt: skip
    for column in [*zeros, index.host_slot, index.segment]:
        column[row] = 9
    index.lru_add(row)
    assert index.remove(row) == 1
    again = index.insert(random_hashes(1, seed=2), NS).rows
    np.testing.assert_array_equal(again, row)
    assert index.host_slot[row] == -1
    assert index.segment[row] == NO_SEGMENT
    for column in zeros:
        assert column[row] == 0
    assert index.lru_count == 0


def test_churn_reuses_rows_instead_of_growing() -> None:
    index = filled(100, capacity=100_000)
    before = index._state[kernels.TOP]
    for seed in range(1, 50):
        index.remove(index.rows())
        index.insert(random_hashes(100, seed), NS)
    assert index._state[kernels.TOP] == before
    index.check()


@pytest.mark.parametrize("seed", range(6))
def test_removal_in_any_order_leaves_the_rest_reachable(seed: int) -> None:
    # Five pages in eight buckets: runs that go round the table's end are common.
    hashes = random_hashes(5, seed)
    for order in itertools.permutations(range(5)):
        index = PageIndex(5, seed=seed)
        rows = index.insert(hashes, NS).rows
        left = set(range(5))
        for page in order:
            assert index.remove(rows[page : page + 1]) == 1
            left.discard(page)
            found = index.lookup(hashes, NS)
            for other in range(5):
                assert found[other] == (rows[other] if other in left else -1)


def test_remove_passes_over_rows_that_hold_no_page() -> None:
    index = filled(3, capacity=10)
    assert index.remove([-1, 0, 0, 3, 9, 10, 10**12]) == 1
    assert index.remove([0]) == 0
    assert len(index) == 2
    index.check()


def test_prefix_stops_at_the_first_page_that_is_missing_or_lacks_a_flag() -> None:
    hashes = random_hashes(200)
    index = PageIndex(200)
    rows = index.insert(np.delete(hashes, 150, axis=0), NS).rows
    assert len(index.prefix_rows(hashes, NS)) == 150
    index.flags[rows] = 0b101
    index.flags[rows[70]] = 0b001
    assert len(index.prefix_rows(hashes, NS, 0b001)) == 150
    assert len(index.prefix_rows(hashes, NS, 0b101)) == 70
    assert len(index.prefix_rows(hashes, NS, 0b010)) == 0
    np.testing.assert_array_equal(index.prefix_rows(hashes, NS, 0b101), rows[:70])
    assert len(index.prefix_rows(hashes[:0], NS)) == 0
    assert len(index.prefix_rows(hashes, NS + 1)) == 0


def test_last_of_a_touched_batch_is_most_recent() -> None:
    index = filled(5)
    index.lru_add([0, 1, 2, 3, 4])
    index.lru_touch([3, 1])
    assert index.lru_tail(9).tolist() == [0, 2, 4, 3, 1]
    assert index.lru_tail(2).tolist() == [0, 2]
    assert index.lru_tail(0).tolist() == []
    index.check()


def test_touch_lists_no_row_and_add_does() -> None:
    index = filled(3)
    index.lru_touch([0, 1])
    assert index.lru_count == 0
    index.lru_add([1, 1, 0])
    assert index.lru_tail(9).tolist() == [1, 0]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_lru_removal_at_either_end_and_in_the_middle(gone: int) -> None:
    index = filled(3)
    index.lru_add([0, 1, 2])
    index.lru_remove([gone, gone, -1, 99])
    assert index.lru_tail(9).tolist() == [row for row in range(3) if row != gone]
    assert index.is_live([gone])[0]
    index.check()


def test_lru_tail_skips_flagged_rows() -> None:
    index = filled(6)
    index.lru_add(range(6))
    index.flags[[0, 1, 4]] = 0b1000
    index.flags[2] = 0b0100
    assert index.lru_tail(2, 0b1000).tolist() == [2, 3]
    assert index.lru_tail(9, 0b1100).tolist() == [3, 5]
    assert index.lru_tail(9).tolist() == [0, 1, 2, 3, 4, 5]


def test_removed_page_leaves_the_lru_list() -> None:
    index = filled(4)
    index.lru_add([2, 0, 3, 1])
    index.remove([0, 2])
    assert index.lru_tail(9).tolist() == [3, 1]
    index.check()


def test_rows_by_segment_and_namespace() -> None:
    index = PageIndex(20)
    rows = index.insert(random_hashes(10), 1).rows
    others = index.insert(random_hashes(5), 2).rows
    index.segment[rows[2:6]] = 33
    index.remove(rows[3:4])
    assert rows_of_segment(index, 33).tolist() == sorted(rows[[2, 4, 5]].tolist())
    assert rows_of_segment(index, 34).tolist() == []
    assert index.rows_of_namespaces([2]).tolist() == sorted(others.tolist())
    # A freed row keeps its old namespace number in memory, and must not be found by it.
    assert rows[3] not in index.rows_of_namespaces([1])
    assert index.rows_of_namespaces([7, 2, 0, 1]).tolist() == index.rows().tolist()
    assert index.rows_of_namespaces([0, 3]).tolist() == []
    assert index.rows_of_namespaces([]).tolist() == []
    assert len(index.rows()) == 14
    # Every segment-less live row, and no freed one.
    assert len(rows_of_segment(index, NO_SEGMENT)) == 11


def test_stamp_of_a_use_is_the_clocks_low_bits() -> None:
    index = filled(3)
    index.note_use([1, 1, 1, -1, 2], clock=2**32 + 5)
    assert index.stamp.tolist() == [0, 5, 5]


def test_keys_come_back_as_they_went_in() -> None:
    hashes = random_hashes(10)
    index = PageIndex(10)
    rows = index.insert(hashes, 0xFFFFFFFF).rows
    copies, namespaces = index.keys(rows[::2])
    np.testing.assert_array_equal(copies, hashes[::2])
    assert (namespaces == 0xFFFFFFFF).all()
    index.remove(rows[4:5])
    with pytest.raises(TierUsageError, match="holds no page"):
        index.keys(rows)


def test_read_only_unaligned_and_strided_hashes_are_taken() -> None:
    hashes = random_hashes(9)
    index = PageIndex(9)
    rows = index.insert(hashes, NS).rows
    frozen = np.frombuffer(hashes.tobytes(), np.uint8).reshape(-1, 32)
    odd = np.frombuffer(b"x" + hashes.tobytes(), np.uint8, offset=1).reshape(-1, 32)
    assert not frozen.flags.writeable
    for given in (frozen, odd, np.asfortranarray(hashes)):
        np.testing.assert_array_equal(index.lookup(given, NS), rows)
    np.testing.assert_array_equal(index.lookup(hashes[::2], NS), rows[::2])


@pytest.mark.parametrize(
    "hashes",
    [np.zeros((2, 16), np.uint8), np.zeros(32, np.uint8), np.zeros((2, 32), np.int8)],
    ids=["short", "flat", "signed"],
)
def test_wrongly_shaped_hashes_are_refused(hashes: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(TierUsageError, match=r"u8\[N, 32\]"):
        PageIndex(4).lookup(hashes, NS)


@pytest.mark.parametrize("namespace", [-1, 2**32])
def test_namespace_beyond_32_bits_is_refused(namespace: int) -> None:
    with pytest.raises(TierUsageError, match="32 bits"):
        PageIndex(4).insert(random_hashes(1), namespace)


@pytest.mark.parametrize("rows", [[1.5], np.zeros((2, 2), np.int64), [True]])
def test_rows_that_are_no_row_numbers_are_refused(rows: npt.ArrayLike) -> None:
    with pytest.raises(TierUsageError, match="integers"):
        filled(3).remove(rows)


@pytest.mark.parametrize("capacity", [0, -3, MAX_CAPACITY + 1])
def test_capacity_out_of_range_is_refused_in_one_sentence(capacity: int) -> None:
    with pytest.raises(TierConfigError, match=r"^[^.]*\.$"):
        PageIndex(capacity)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 255, 256])
def test_every_capacity_can_be_filled_to_the_last_row(capacity: int) -> None:
    index = filled(capacity)
    assert len(index) == capacity
    assert capacity / len(index._buckets) <= 0.7
    assert (index.lookup(random_hashes(50, seed=99), NS) == -1).all()
    index.check()


def damage_bucket(index: PageIndex) -> None:
    index._buckets[np.flatnonzero(index._buckets)[0]] ^= np.uint32(1 << 31)


def damage_link(index: PageIndex) -> None:
    index._prev[2] = 0


def damage_count(index: PageIndex) -> None:
    index._state[kernels.COUNT] += 1


def damage_free_stack(index: PageIndex) -> None:
    index._state[kernels.FREE_HEAD] = kernels.NIL


@pytest.mark.parametrize(
    "damage",
    [damage_bucket, damage_link, damage_count, damage_free_stack],
    ids=lambda f: f.__name__,
)
def test_check_finds_damage(damage: object) -> None:
    index = filled(5)
    index.lru_add([0, 1, 2])
    index.remove([4])
    index.check()
    damage(index)  # type: ignore[operator]
    with pytest.raises(TierInvariantError):
        index.check()


COMPILED = ["insert", "lookup", "lru_remove", "lru_sink", "lru_tail", "lru_touch", "note_use",
            "prefix", "remove", "rows_where"]  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_kernel_is_compiled_once_and_runs_without_the_gil(name: str) -> None:
    kernel = getattr(kernels, name)
    assert len(kernel.nopython_signatures) == 1
    assert not kernel._can_compile, "it would compile in the middle of serving"
    assert kernel.targetoptions["nogil"]


RSS_PROGRAM = """
import sys
import numpy as np
from sglang_ext.tiers.index import PageIndex

def rss_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))

def fill(index, num):
    rng = np.random.default_rng(0)
    for start in range(0, num, 4096):
        size = (min(4096, num - start), 32)
        index.lru_add(index.insert(rng.integers(0, 256, size, dtype=np.uint8), 1).rows)

capacity, num = int(sys.argv[1]), int(sys.argv[2])
fill(PageIndex(8192), 8192)  # what the interpreter and the batches need is there before
before = rss_bytes()
index = PageIndex(capacity)
fill(index, num)
assert len(index) == num
print((rss_bytes() - before) / num)
"""


# Buckets are a power of two: these capacities are just below and just above a doubling.
@pytest.mark.parametrize("capacity", [183_000, 184_000])
@pytest.mark.parametrize("fill", [0.35, 0.7, 1.0])
def test_memory_stays_within_132_bytes_a_page(capacity: int, fill: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RSS_PROGRAM, str(capacity), str(int(capacity * fill))],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert 60 < float(done.stdout) <= 132  # 60: what the columns alone need
