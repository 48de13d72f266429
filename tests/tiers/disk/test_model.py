"""The disk tier against a dict, under random calls."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.tiers.base import Location, RecoveredPages
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.tier_pages import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PACKED_SLOT_BYTES,
    key,
    make_record,
    make_slot,
    read_page,
)

MAX_BYTES = 4 << 20
NAMESPACES = (NAMESPACE, OTHER_NAMESPACE)
namespaces = st.sampled_from(NAMESPACES)
numbers = st.integers(0, 40)


class DiskModel(RuleBasedStateMachine):
    """`pages` holds (namespace, number, location): what must be found, right.

    Namespaces change between whole slots and packed records, so both lie side by side.
    """

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pages: set[tuple[bytes, int, Location]] = set()
        self.gone: set[tuple[bytes, int, Location]] = set()
        self.lengths: dict[tuple[bytes, Location], int] = {}
        self.packed = dict.fromkeys(NAMESPACES, False)
        self.tier = self._open()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.tier.close()
            self.folder.cleanup()

    def _open(self) -> DiskTier:
        config = DiskConfig(
            Path(self.folder.name), MAX_BYTES, min_free_bytes=0, segment_bytes=MAX_BYTES // 4
        )
        tier = DiskTier(config)
        tier.on_drop = self._on_drop
        tier.on_moved = self._on_moved
        tier.is_hot = lambda digest, hashes, lora: hashes[:, 0] < 100
        by_key = {key(number): number for number in range(41)}
        self.found = set()
        for namespace in NAMESPACES:
            pages = tier.open_namespace(
                namespace, PACKED_SLOT_BYTES, {}, packed=self.packed[namespace]
            )
            for row in range(len(pages)):
                location = Location(int(pages.segment[row]), int(pages.block[row]))
                number = by_key[pages.hashes[row].tobytes()]
                self.found.add((namespace, number, location))
                assert self.lengths[namespace, location] == pages.num_blocks[row]
        return tier

    def _on_drop(self, digest: bytes, segment_id: int) -> None:
        lost = {p for p in self.pages if p[0] == digest and p[2].segment == segment_id}
        self.pages -= lost
        self.gone |= lost

    def _on_moved(self, digest: bytes, old: int, moved: RecoveredPages) -> None:
        by_key = {key(number): number for number in range(41)}
        for row in range(len(moved)):
            location = Location(int(moved.segment[row]), int(moved.block[row]))
            self.lengths[digest, location] = int(moved.num_blocks[row])
            self.pages.add((digest, by_key[moved.hashes[row].tobytes()], location))

    @rule(namespace=namespaces, batch=st.lists(numbers, min_size=1, max_size=20))
    def write(self, namespace: bytes, batch: list[int]) -> None:
        make = make_record if self.packed[namespace] else make_slot
        records = [make(n, namespace, slot_bytes=PACKED_SLOT_BYTES) for n in batch]
        locations = self.tier.write(namespace, records)
        for number, record, location in zip(batch, records, locations, strict=True):
            assert location is not None, "there is always something to reclaim"
            self.pages.add((namespace, number, location))
            self.lengths[namespace, location] = record.size // 4096

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def read_one(self, data: st.DataObject) -> None:
        namespace, number, location = data.draw(st.sampled_from(sorted(self.pages)))
        other = (number + 1) % 41
        for num_blocks in (0, self.lengths[namespace, location]):
            assert self._read(location, number, namespace, num_blocks) is VerifyResult.OK
            result = self._read(location, other, namespace, num_blocks)
            assert result is VerifyResult.FOREIGN

    def _read(
        self, location: Location, number: int, namespace: bytes, num_blocks: int = 0
    ) -> VerifyResult:
        return read_page(self.tier, location, number, namespace, b"", PACKED_SLOT_BYTES, num_blocks)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def read_dropped(self, data: st.DataObject) -> None:
        namespace, number, location = data.draw(st.sampled_from(sorted(self.gone)))
        assert self._read(location, number, namespace) is VerifyResult.MISSING

    @rule(namespace=st.one_of(st.none(), namespaces))
    def clear(self, namespace: bytes | None) -> None:
        self.tier.clear(namespace)
        assert not [p for p in self.pages if namespace in (None, p[0])]

    @rule(packed=st.sampled_from([(False, True), (True, False), (True, True)]))
    def reopen(self, packed: tuple[bool, bool]) -> None:
        self.tier.close()
        self.packed = dict(zip(NAMESPACES, packed, strict=True))
        self.tier = self._open()
        assert self.found == self.pages

    @rule(namespace=namespaces, packed=st.booleans())
    def open_again(self, namespace: bytes, packed: bool) -> None:
        self.packed[namespace] = packed
        pages = self.tier.open_namespace(namespace, PACKED_SLOT_BYTES, {}, packed=packed)
        assert len(pages) == len([p for p in self.pages if p[0] == namespace])

    @invariant()
    def the_bound_holds(self) -> None:
        if hasattr(self, "tier"):
            files = Path(self.folder.name).rglob("*.hkv*")
            used = sum(file.stat().st_size for file in files)
            assert used == self.tier.stats().used_bytes <= MAX_BYTES


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
