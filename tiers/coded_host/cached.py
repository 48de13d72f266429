"""Coded records of a disk tier kept in DRAM as well, so that a read of them is a copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_ext.tiers.base import Enter, Location, PageKeeper, ReadRequest, RecoveredPages, Tier
from sglang_ext.tiers.disk.counters import DiskStats
from sglang_ext.tiers.disk.disk_context import OwnerCallbacks, usable_slot
from sglang_ext.tiers.disk.tier import DiskTier
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.checks import seal, verify
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    VerifyResult,
    parse_header,
)


class CachedDiskTier(Tier, OwnerCallbacks):
    """A disk tier, and the records used last of it in DRAM; it owns the disk tier.

    The disk stays the home of every record: locations are its own, and what the memory forgets is
    read from it. Records from memory are verified like those from disk. Threads as in `DiskTier`.

    Args:
        disk: the tier below; closed with this one.
        max_bytes: bound on the records in memory, headers and payloads.

    Attributes:
        on_drop, on_moved, is_hot, num_needed, keeper: see `OwnerCallbacks`.
        num_hits: records read from memory since start.
    """

    def __init__(self, disk: DiskTier, max_bytes: int) -> None:
        if max_bytes < 1:
            raise TierConfigError(f"records in memory need room, got {max_bytes} bytes")
        super().__init__()
        disk.on_drop = self._dropped
        disk.on_moved = self._moved
        disk.is_hot = self._asked_if_hot
        disk.num_needed = self._asked_for_needed
        self._disk = disk
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Least recent first, and the locations of each segment; guarded by _lock.
        self._records: OrderedDict[Location, ByteArray] = OrderedDict()
        self._by_segment: dict[int, set[Location]] = {}
        self._used_bytes = 0
        self._slot_bytes: dict[bytes, int] = {}  # by namespace; guarded by _lock
        self.num_hits = 0

    @property
    def keeper(self) -> PageKeeper | None:
        """As in `DiskTier`, which asks it."""
        return self._disk.keeper

    @keeper.setter
    def keeper(self, keeper: PageKeeper | None) -> None:
        self._disk.keeper = keeper

    @property
    def max_bytes(self) -> int:
        """See `Tier.max_bytes`; the disk's, as all that lies in memory lies on disk too."""
        return self._disk.max_bytes

    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any], *, packed: bool = False,
        enter: Enter | None = None,
    ) -> RecoveredPages:  # fmt: skip
        """See `Tier.open_namespace`."""
        with self._lock:
            self._slot_bytes[digest] = slot_bytes
        return self._disk.open_namespace(digest, slot_bytes, label, packed=packed, enter=enter)

    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        """See `Tier.write`; what the disk took is kept in memory too."""
        locations = self._disk.write(digest, slots)
        for location, slot in zip(locations, slots, strict=True):
            if location is not None:
                self._keep(location, slot)
        return locations

    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        """See `Tier.read`."""
        results = [self._from_memory(digest, request) for request in requests]
        missing = [at for at, result in enumerate(results) if result is not VerifyResult.OK]
        if missing:
            found = self._disk.read(digest, [requests[at] for at in missing])
            for at, result in zip(missing, found, strict=True):
                results[at] = result
                if result is VerifyResult.OK:
                    self._keep(requests[at].location, requests[at].out)
        return results

    def clear(self, digest: bytes | None) -> None:
        """See `Tier.clear`."""
        self._disk.clear(digest)

    def close(self) -> None:
        """Closes the disk tier too."""
        self._disk.close()
        with self._lock:
            self._records.clear()
            self._by_segment.clear()
            self._used_bytes = 0

    def stats(self) -> DiskStats:
        """The disk tier's."""
        return self._disk.stats()

    def memory_stats(self) -> dict[str, int]:
        """What memory holds, and how often it was of use."""
        with self._lock:
            return {
                "records": len(self._records),
                "used_bytes": self._used_bytes,
                "max_bytes": self._max_bytes,
                "hits": self.num_hits,
            }

    def _keep(self, location: Location, slot: ByteArray) -> None:
        """Takes a copy of a record, with a checksum.

        The disk tier leaves no checksum in the slot where it has better seals. If the record's
        segment was deleted meanwhile, nobody asks for the copy any more: it is dropped as the least
        recent one in the end.
        """
        try:
            size = HEADER_BYTES + parse_header(slot)[1]
        except RecordError:
            return
        record = slot[:size].copy()
        seal(record)
        with self._lock:
            old = self._records.pop(location, None)
            self._used_bytes += record.size - (old.size if old is not None else 0)
            self._records[location] = record
            self._by_segment.setdefault(location.segment, set()).add(location)
            while self._used_bytes > self._max_bytes:
                place, oldest = self._records.popitem(last=False)
                self._used_bytes -= oldest.size
                self._by_segment[place.segment].discard(place)

    def _from_memory(self, digest: bytes, request: ReadRequest) -> VerifyResult:
        with self._lock:
            record = self._records.get(request.location)
            slot_bytes = self._slot_bytes.get(digest, 0)
            if record is not None:
                self._records.move_to_end(request.location)
        if record is None or not usable_slot(request.out, slot_bytes):
            return VerifyResult.MISSING
        request.out[: record.size] = record
        result = verify(request.out, request.page_hash, digest, request.lora)
        if result is VerifyResult.OK:
            with self._lock:
                self.num_hits += 1
        return result

    # The owner sets its callbacks after this tier was made, so they are looked up when called.

    def _moved(self, digest: bytes, segment_id: int, pages: RecoveredPages) -> None:
        self.on_moved(digest, segment_id, pages)

    def _asked_if_hot(
        self, digest: bytes, hashes: ByteArray
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8 | np.bool_]]:
        return self.is_hot(digest, hashes)

    def _asked_for_needed(self, segment_id: int) -> int:
        return self.num_needed(segment_id)

    def _dropped(self, digest: bytes, segment_id: int) -> None:
        with self._lock:
            for location in self._by_segment.pop(segment_id, ()):
                self._used_bytes -= self._records.pop(location).size
        self.on_drop(digest, segment_id)
