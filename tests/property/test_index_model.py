"""The page index against a dict and an OrderedDict, over random histories of calls."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.tiers.index import NO_SEGMENT, PageIndex

NUM_PAGES = 40
Key = tuple[int, int]  # (page number, namespace)


def hash_of(page: int) -> npt.NDArray[np.uint8]:
    """Pages differ in one byte only, at a place that depends on the page."""
    digest = np.zeros(32, np.uint8)
    digest[page % 32] = 1 + page // 32
    return digest


def hashes_of(pages: list[int]) -> npt.NDArray[np.uint8]:
    return np.array([hash_of(page) for page in pages], np.uint8).reshape(-1, 32)


pages_lists = st.lists(st.integers(0, NUM_PAGES - 1), max_size=12)
namespaces = st.sampled_from([0, 1, 2**32 - 1])
places = st.lists(st.integers(-1, 2 * NUM_PAGES), max_size=8)


class IndexMachine(RuleBasedStateMachine):
    """`rows` is what the index must hold; `lru` its list, least recent first."""

    @initialize(capacity=st.integers(1, 24), seed=st.integers(0, 2**64 - 1))
    def start(self, capacity: int, seed: int) -> None:
        self.index = PageIndex(capacity, seed=seed)
        self.rows: dict[Key, int] = {}
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.flags: dict[int, int] = {}
        self.segments: dict[int, int] = {}

    def pick(self, chosen: list[int]) -> list[int]:
        """Row numbers, some of them live, some freed, some never used, some negative."""
        return [place if place < self.index.capacity + 2 else -1 for place in chosen]

    def live(self, chosen: list[int]) -> list[int]:
        known = set(self.rows.values())
        return [row for row in self.pick(chosen) if row in known]

    @rule(pages=pages_lists, namespace=namespaces)
    def insert(self, pages: list[int], namespace: int) -> None:
        rows, created = self.index.insert(hashes_of(pages), namespace)
        for page, row, is_new in zip(pages, rows.tolist(), created.tolist(), strict=True):
            key = (page, namespace)
            if key in self.rows:
                assert (row, is_new) == (self.rows[key], False)
            elif len(self.rows) == self.index.capacity:
                assert (row, is_new) == (-1, False)
            else:
                assert is_new
                assert 0 <= row < self.index.capacity
                assert row not in self.rows.values()
                self.rows[key] = row
                self.flags[row] = 0

    @rule(pages=pages_lists, namespace=namespaces)
    def lookup(self, pages: list[int], namespace: int) -> None:
        found = self.index.lookup(hashes_of(pages), namespace).tolist()
        assert found == [self.rows.get((page, namespace), -1) for page in pages]

    @rule(pages=pages_lists, namespace=namespaces, need=st.integers(0, 3))
    def prefix(self, pages: list[int], namespace: int, need: int) -> None:
        expected = []
        for page in pages:
            row = self.rows.get((page, namespace))
            if row is None or self.flags[row] & need != need:
                break
            expected.append(row)
        found = self.index.prefix_rows(hashes_of(pages), namespace, need)
        assert found.tolist() == expected

    @rule(chosen=places)
    def remove(self, chosen: list[int]) -> None:
        gone = set(self.live(chosen))
        assert self.index.remove(self.pick(chosen)) == len(gone)
        self.rows = {key: row for key, row in self.rows.items() if row not in gone}
        for row in gone:
            self.lru.pop(row, None)
            self.flags.pop(row)
            self.segments.pop(row, None)

    @rule(chosen=places, flags=st.integers(0, 3), segment=st.integers(0, 2))
    def write_columns(self, chosen: list[int], flags: int, segment: int) -> None:
        for row in self.live(chosen):
            self.index.flags[row] = self.flags[row] = flags
            self.index.segment[row] = self.segments[row] = segment

    @rule(chosen=places)
    def lru_add(self, chosen: list[int]) -> None:
        self.index.lru_add(self.pick(chosen))
        for row in self.live(chosen):
            self.lru.pop(row, None)
            self.lru[row] = None

    @rule(chosen=places)
    def lru_touch(self, chosen: list[int]) -> None:
        self.index.lru_touch(self.pick(chosen))
        for row in self.live(chosen):
            if row in self.lru:
                self.lru.move_to_end(row)

    @rule(chosen=places)
    def lru_sink(self, chosen: list[int]) -> None:
        self.index.lru_sink(self.pick(chosen))
        for row in self.live(chosen):
            if row in self.lru:
                self.lru.move_to_end(row, last=False)

    @rule(chosen=places)
    def lru_remove(self, chosen: list[int]) -> None:
        self.index.lru_remove(self.pick(chosen))
        for row in self.live(chosen):
            self.lru.pop(row, None)

    @rule(count=st.integers(0, 30), skip=st.integers(0, 3))
    def lru_tail(self, count: int, skip: int) -> None:
        expected = [row for row in self.lru if not self.flags[row] & skip][:count]
        assert self.index.lru_tail(count, skip).tolist() == expected

    @invariant()
    def same_contents(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.rows)
        assert self.index.lru_count == len(self.lru)
        assert self.index.rows().tolist() == sorted(self.rows.values())
        keys, namespaces = self.index.keys(list(self.rows.values()))
        for key, number, (page, namespace) in zip(keys, namespaces, self.rows, strict=True):
            assert (key.tobytes(), number) == (hash_of(page).tobytes(), namespace)
        for segment in (0, 1, 2, NO_SEGMENT):
            expected = [
                row for row in self.rows.values()
                if self.segments.get(row, NO_SEGMENT) == segment
            ]  # fmt: skip
            rows = self.index.rows()
            assert rows[self.index.segment[rows] == segment].tolist() == sorted(expected)


IndexMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestIndexAgainstModel = IndexMachine.TestCase


def test_ten_thousand_random_operations_on_a_table_near_its_full_load() -> None:
    # Long histories near the load limit make the long runs that hypothesis rarely reaches.
    rng = np.random.default_rng(3)
    index = PageIndex(179, seed=3)  # 179 of 256 buckets: the highest load there is
    model: dict[bytes, int] = {}
    pool = rng.integers(0, 256, (260, 32), dtype=np.uint8)
    for _ in range(2_000):
        batch = pool[rng.integers(0, len(pool), 5)]
        if rng.random() < 0.5:
            for hashed, row in zip(batch, index.insert(batch, 1).rows.tolist(), strict=True):
                if row >= 0:
                    assert model.setdefault(hashed.tobytes(), row) == row
        else:
            known = {h.tobytes() for h in batch} & model.keys()
            assert index.remove(index.lookup(batch, 1)) == len(known)
            for key in known:
                del model[key]
        assert index.lookup(pool, 1).tolist() == [model.get(h.tobytes(), -1) for h in pool]
    index.check()
