"""The disk tier against a dict, under random calls."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.tiers.base import Location, RecoveredPages
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.record import VerifyResult
from tests.tiers.tier_pages import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT_BYTES,
    key,
    make_slot,
    read_page,
)

MAX_BYTES = 1 << 20
NAMESPACES = (NAMESPACE, OTHER_NAMESPACE)
namespaces = st.sampled_from(NAMESPACES)
numbers = st.integers(0, 40)


class DiskModel(RuleBasedStateMachine):
    """`pages` maps (namespace, number, location) to nothing: what must be found, right."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pages: set[tuple[bytes, int, Location]] = set()
        self.gone: set[tuple[bytes, int, Location]] = set()
        self.tier = self._open()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.tier.close()
            self.folder.cleanup()

    def _open(self) -> DiskTier:
        config = DiskConfig(
            Path(self.folder.name), MAX_BYTES, min_free_bytes=0, segment_bytes=128 << 10
        )
        tier = DiskTier(config)
        tier.on_drop = self._on_drop
        tier.on_moved = self._on_moved
        tier.is_hot = lambda digest, hashes: hashes[:, 0] < 100
        by_key = {key(number): number for number in range(41)}
        self.found = set()
        for namespace in NAMESPACES:
            pages = tier.open_namespace(namespace, SLOT_BYTES, {})
            for row in range(len(pages)):
                location = Location(int(pages.segment[row]), int(pages.block[row]))
                number = by_key[pages.hashes[row].tobytes()]
                self.found.add((namespace, number, location))
        return tier

    def _on_drop(self, digest: bytes, segment_id: int) -> None:
        lost = {p for p in self.pages if p[0] == digest and p[2].segment == segment_id}
        self.pages -= lost
        self.gone |= lost

    def _on_moved(self, digest: bytes, old: int, moved: RecoveredPages) -> None:
        by_key = {key(number): number for number in range(41)}
        for row in range(len(moved)):
            location = Location(int(moved.segment[row]), int(moved.block[row]))
            self.pages.add((digest, by_key[moved.hashes[row].tobytes()], location))

    @rule(namespace=namespaces, batch=st.lists(numbers, min_size=1, max_size=20))
    def write(self, namespace: bytes, batch: list[int]) -> None:
        locations = self.tier.write(namespace, [make_slot(n, namespace) for n in batch])
        for number, location in zip(batch, locations, strict=True):
            assert location is not None, "there is always something to reclaim"
            self.pages.add((namespace, number, location))

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def read_one(self, data: st.DataObject) -> None:
        namespace, number, location = data.draw(st.sampled_from(sorted(self.pages)))
        assert read_page(self.tier, location, number, namespace) is VerifyResult.OK
        other = (number + 1) % 41
        if (namespace, other, location) not in self.pages:
            assert read_page(self.tier, location, other, namespace) is VerifyResult.FOREIGN

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def read_dropped(self, data: st.DataObject) -> None:
        namespace, number, location = data.draw(st.sampled_from(sorted(self.gone)))
        assert read_page(self.tier, location, number, namespace) is VerifyResult.MISSING

    @rule(namespace=st.one_of(st.none(), namespaces))
    def clear(self, namespace: bytes | None) -> None:
        self.tier.clear(namespace)
        assert not [p for p in self.pages if namespace in (None, p[0])]

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self._open()
        assert self.found == self.pages

    @rule(namespace=namespaces)
    def open_again(self, namespace: bytes) -> None:
        pages = self.tier.open_namespace(namespace, SLOT_BYTES, {})
        assert len(pages) == len([p for p in self.pages if p[0] == namespace])

    @invariant()
    def the_bound_holds(self) -> None:
        if hasattr(self, "tier"):
            files = Path(self.folder.name).rglob("*.hkv*")
            used = sum(file.stat().st_size for file in files)
            assert used == self.tier.stats().used_bytes <= MAX_BYTES


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
