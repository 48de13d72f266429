"""Records in DRAM, without a disk below: gone when the process ends.

Records are kept at their own length, in groups that are called segments as on disk, because the
owner speaks of losses by segment. Room is made record by record where the owner says which to give
up, and then the records of the segments that these lay in are looked at. So a segment has few of
them, whatever the tier's size is. Without an owner the segment that was used longest ago goes, and
what is called hot moves on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from sglang_ext.tiers.base import (
    BLOCK_BYTES,
    Enter,
    Location,
    OwnerCallbacks,
    PageKeeper,
    ReadRequest,
    RecoveredPages,
    Tier,
    check_namespace,
    record_blocks,
)
from sglang_ext.tiers.disk.counters import Counters, DiskStats
from sglang_ext.tiers.disk.disk_context import usable_slot
from sglang_ext.tiers.disk.reclaim import SALVAGE_SHARE
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.checks import seal, verify
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    VerifyResult,
    parse_header,
)

# Of a small tier so many segments fit in the bound: one is a small part of it.
_NUM_SEGMENTS = 32
_SEGMENT_RECORDS = 64  # a record that leaves has so many looked at
_CHOICE = 4  # oldest segments among which the least needed goes


@dataclass
class _Segment:
    """Records of one namespace, by block; blocks count records from 1."""

    segment_id: int
    namespace: bytes
    records: dict[int, ByteArray] = field(default_factory=dict)
    num_bytes: int = 0
    num_appended: int = 0

    def is_full(self, most_bytes: int) -> bool:
        return self.num_appended >= _SEGMENT_RECORDS or self.num_bytes >= most_bytes


@dataclass(frozen=True)
class _Namespace:
    slot_bytes: int
    packed: bool


class MemoryTier(Tier, OwnerCallbacks):
    """Keeps records of many namespaces in DRAM, within a bound on their bytes.

    It has many methods because a tier has, and makes room record by record besides.

    Threads and callbacks as in `DiskTier`: any number may `read`; what writes takes the write lock,
    under which the callbacks are called.

    Args:
        max_bytes: the bound, on headers and payloads.

    Attributes:
        on_drop, on_moved, is_hot, num_needed, keeper: see `OwnerCallbacks`.
    """

    persistent = False

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise TierConfigError(f"a tier in memory needs room, got {max_bytes} bytes")
        super().__init__()
        self._fresh: set[Location] = set()  # of the call in hand; guarded by _write_lock
        self._max_bytes = max_bytes
        self._counters = Counters()
        self._write_lock = threading.RLock()
        self._lock = threading.Lock()  # never held in a callback
        self._namespaces: dict[bytes, _Namespace] = {}  # guarded by _lock
        # Used longest ago first; guarded by _lock, changed under both but for the order.
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._active: dict[bytes, _Segment] = {}  # guarded by _write_lock
        self._used_bytes = 0  # guarded by _lock
        self._next_id = 1  # guarded by _write_lock
        self._is_closed = False  # guarded by _lock, changed under both

    @property
    def max_bytes(self) -> int:
        """See `Tier.max_bytes`."""
        return self._max_bytes

    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any], *, packed: bool = False,
        enter: Enter | None = None,
    ) -> RecoveredPages:  # fmt: skip
        """See `Tier.open_namespace`."""
        check_namespace(digest, slot_bytes)
        with self._write_lock:
            with self._lock:
                if self._is_closed:
                    raise TierConfigError("the memory tier is closed; open a new one")
                self._namespaces[digest] = _Namespace(slot_bytes, packed)
                found = [
                    (Location(each.segment_id, block), record)
                    for each in self._segments.values()
                    if each.namespace == digest
                    for block, record in each.records.items()
                ]
            pages = _table(found)
            if enter is not None:
                enter(pages)
        return pages

    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        """See `Tier.write`. Copies; `slots` may change afterwards."""
        with self._write_lock:
            with self._lock:
                namespace, is_closed = self._namespaces.get(digest), self._is_closed
            if is_closed or namespace is None:
                self._counters.drop("closed" if is_closed else "namespace", len(slots))
                return [None] * len(slots)
            self._settle_fresh()
            sizes = [self._record_bytes(digest, namespace, slot) for slot in slots]
            # Of all at once, for the owner is asked once then; as far as they are no more than fit.
            self._make_room(min(sum(sizes), self._max_bytes))
            locations = [
                self._write_one(digest, slot, size) if size else None
                for slot, size in zip(slots, sizes, strict=True)
            ]
            with self._lock:  # room for the last ones may have been made of the first
                return [
                    location
                    if location is not None and location.segment in self._segments
                    else None
                    for location in locations
                ]

    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        """See `Tier.read`."""
        return [self._read_one(digest, request) for request in requests]

    def clear(self, digest: bytes | None) -> None:
        """See `Tier.clear`. Calls `on_drop` for every segment."""
        with self._write_lock:
            with self._lock:
                found = [
                    each for each in self._segments.values() if digest in (None, each.namespace)
                ]
            for segment in found:
                self._drop(segment)

    def end_namespace(self, digest: bytes) -> None:
        """See `Tier.end_namespace`."""
        with self._write_lock:
            self.clear(digest)
            with self._lock:
                self._namespaces.pop(digest, None)

    def close(self) -> None:
        """See `Tier.close`. Everything is gone."""
        with self._write_lock, self._lock:
            self._is_closed = True
            self._segments.clear()
            self._active.clear()
            self._used_bytes = 0

    def stats(self) -> DiskStats:
        """What was counted, in the disk tier's words."""
        with self._lock:
            num_segments, used_bytes = len(self._segments), self._used_bytes
        return self._counters.stats(
            mode="memory",
            segments=num_segments,
            used_bytes=used_bytes,
            max_bytes=self._max_bytes,
            open_fds=0,
        )

    # ---- write lock held ----

    def _settle_fresh(self) -> None:
        """What the owner does not name as a page of the last call's records goes."""
        segments, keeper = {place.segment for place in self._fresh}, self.keeper
        self._fresh.clear()
        if keeper is not None:
            for segment_id in segments:
                self._keep_live(segment_id, keeper)

    def _record_bytes(self, digest: bytes, namespace: _Namespace, slot: ByteArray) -> int:
        """The size of the record in a slot; 0 where it is none that can be stored."""
        try:
            size = namespace.slot_bytes
            if not usable_slot(slot, size, packed=namespace.packed):
                raise ValueError("not a slot of this namespace")
            meta, payload_bytes = parse_header(slot)
        except (RecordError, ValueError):
            self._counters.drop("malformed")
            return 0
        if meta.namespace != digest:
            self._counters.drop("foreign")
            return 0
        if HEADER_BYTES + payload_bytes > self._max_bytes:
            self._counters.drop("full")
            return 0
        return HEADER_BYTES + payload_bytes

    def _write_one(self, digest: bytes, slot: ByteArray, num_bytes: int) -> Location:
        self._make_room(num_bytes)
        seal(slot)
        record = slot[:num_bytes].copy()
        location = self._append(digest, record)
        self._fresh.add(location)
        self._counters.add("records_written")
        self._counters.add("useful_bytes", num_bytes - HEADER_BYTES)
        self._counters.add("bytes_written", record.size)
        return location

    def _append(self, digest: bytes, record: ByteArray) -> Location:
        segment = self._active.get(digest)
        if segment is None or segment.is_full(self._max_bytes // _NUM_SEGMENTS):
            if segment is not None and not segment.records:  # all that it had has left
                with self._lock:
                    del self._segments[segment.segment_id]
            segment = self._active[digest] = _Segment(self._next_id, digest)
            self._next_id += 1
        with self._lock:
            segment.num_appended += 1
            block = segment.num_appended
            segment.records[block] = record
            segment.num_bytes += record.size
            self._used_bytes += record.size
            self._segments[segment.segment_id] = segment
            self._segments.move_to_end(segment.segment_id)
        return Location(segment.segment_id, block)

    def _make_room(self, num_bytes: int) -> None:
        """Makes room for records of so many bytes, which are no more than the bound."""
        while self._used_bytes + num_bytes > self._max_bytes:
            if self._free_records(num_bytes):
                continue
            victim = self._victim()
            self._salvage(victim)
            self._drop(victim)
            self._counters.add("segments_dropped")

    def _free_records(self, num_bytes: int) -> bool:
        """Frees records that are no pages any more; if none, asks for some. True if it freed any.

        Without a keeper there are none: segments go as a whole.
        """
        keeper, before = self.keeper, self._used_bytes
        if keeper is None:
            return False
        over = before + num_bytes - self._max_bytes
        for give_up in (0, -(-over // BLOCK_BYTES)):
            if give_up and not keeper.give_up(give_up):
                return False
            for segment_id in keeper.take_thinned():
                self._keep_live(segment_id, keeper)
            if self._used_bytes < before:
                return True
        return False

    def _keep_live(self, segment_id: int, keeper: PageKeeper) -> None:
        live = keeper.live_records(segment_id)
        with self._lock:
            segment = self._segments.get(segment_id)
            if segment is None or live is None:
                return
            for block in segment.records.keys() - set(live[0].tolist()):
                if Location(segment_id, block) not in self._fresh:
                    num_bytes = segment.records.pop(block).size
                    segment.num_bytes -= num_bytes
                    self._used_bytes -= num_bytes
            if not segment.records and self._active.get(segment.namespace) is not segment:
                del self._segments[segment_id]

    def _victim(self) -> _Segment:
        """Of the segments used longest ago the one with the fewest pages that are needed soon."""
        with self._lock:
            oldest = list(islice(self._segments.values(), _CHOICE))
        try:
            return min(oldest, key=lambda each: self.num_needed(each.segment_id))
        except Exception:
            self._counters.error("callback")
            return oldest[0]

    def _salvage(self, victim: _Segment) -> None:
        """Moves hot records on, at most a share of the victim: room is made all the same."""
        if self._active.get(victim.namespace) is victim:
            del self._active[victim.namespace]
        found = [
            (Location(victim.segment_id, block), record) for block, record in victim.records.items()
        ]
        pages = _table(found)
        try:
            hot = self.is_hot(victim.namespace, pages.hashes, pages.lora)
        except Exception:
            self._counters.error("callback")
            return
        left, kept, places = victim.num_bytes // SALVAGE_SHARE, [], []
        heat = np.asarray(hot, np.int16)
        for row in np.argsort(-heat, kind="stable")[: np.count_nonzero(heat)].tolist():
            left -= found[row][1].size
            if left < 0:
                break
            kept.append(row)
            places.append(self._append(victim.namespace, found[row][1]))
        if not kept:
            return
        moved = pages.take(np.array(kept))
        moved.segment[:] = [place.segment for place in places]
        moved.block[:] = [place.block for place in places]
        self._counters.add("records_salvaged", len(kept))
        self._call(lambda: self.on_moved(victim.namespace, victim.segment_id, moved))

    def _drop(self, segment: _Segment) -> None:
        self._call(lambda: self.on_drop(segment.namespace, segment.segment_id))
        if self._active.get(segment.namespace) is segment:
            del self._active[segment.namespace]
        with self._lock:
            del self._segments[segment.segment_id]
            self._used_bytes -= segment.num_bytes

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._counters.error("callback")

    # ---- any thread ----

    def _read_one(self, digest: bytes, request: ReadRequest) -> VerifyResult:
        result = VerifyResult.MISSING
        with self._lock:
            namespace = self._namespaces.get(digest)
            segment = self._segments.get(request.location[0])
            record = None
            if namespace is not None and segment is not None and segment.namespace == digest:
                record = segment.records.get(request.location[1])
                self._segments.move_to_end(segment.segment_id)
        size = namespace.slot_bytes if namespace is not None else 0
        if record is not None and usable_slot(request.out, size):
            request.out[: record.size] = record
            result = verify(request.out, request.page_hash, digest, request.lora)
        if result is VerifyResult.OK and record is not None:
            self._counters.add("records_read")
            self._counters.add("bytes_read", record.size)
        else:
            self._counters.error(result.value)
        return result


def _table(found: Sequence[tuple[Location, ByteArray]]) -> RecoveredPages:
    """Records as columns; they were parsed when they were written."""
    if not found:
        return RecoveredPages.empty()
    metas = [parse_header(record) for _, record in found]
    return RecoveredPages(
        hashes=np.stack([np.frombuffer(meta.page_hash, np.uint8) for meta, _ in metas]),
        lora=np.stack([np.frombuffer(meta.lora or bytes(32), np.uint8) for meta, _ in metas]),
        segment=np.array([place.segment for place, _ in found], np.uint32),
        block=np.array([place.block for place, _ in found], np.uint32),
        num_blocks=np.array([record_blocks(size) for _, size in metas], np.uint16),
        quality=np.array([meta.quality for meta, _ in metas], np.uint8),
    )
