"""Coded records of a disk tier kept in DRAM as well, so that a read of them is a copy."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_ext.tiers.base import (
    Enter,
    Location,
    OwnerCallbacks,
    PageKeeper,
    ReadRequest,
    RecordCopy,
    RecoveredPages,
    Tier,
)
from sglang_ext.tiers.disk.counters import DiskStats
from sglang_ext.tiers.disk.disk_context import usable_slot
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

logger = logging.getLogger(__name__)


class _Copy:
    """A record in memory; it has room there before its bytes have come."""

    __slots__ = ("num_bytes", "record")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.record: ByteArray | None = None


class CachedDiskTier(Tier, OwnerCallbacks):
    """A disk tier, and some of its records in DRAM; it owns the disk tier.

    The disk stays the home of every record: locations are its own, and what the memory forgets is
    read from it. Records from memory are verified like those from disk. Which are kept says the
    owner (`copy_keeper`), page by page; where nobody says it, those that were used last. Threads as
    in `DiskTier`. It has many methods because it is a tier around another one.

    Args:
        disk: the tier below; closed with this one.
        max_bytes: bound on the records in memory, headers and payloads.

    Attributes:
        on_drop, on_moved, is_hot, num_needed, keeper, copy_keeper: see `OwnerCallbacks`.
        num_hits: records read from memory since start.
    """

    def __init__(self, disk: DiskTier, max_bytes: int) -> None:
        if max_bytes < 1:
            raise TierConfigError(f"records in memory need room, got {max_bytes} bytes")
        super().__init__()
        # The owner sets its callbacks after this tier was made: they are looked up when called.
        disk.on_drop = self._dropped
        disk.on_moved = lambda digest, segment, pages: self.on_moved(digest, segment, pages)  # noqa: PLW0108
        disk.is_hot = lambda digest, hashes, lora: self.is_hot(digest, hashes, lora)  # noqa: PLW0108
        disk.num_needed = lambda segment: self.num_needed(segment)  # noqa: PLW0108
        self._disk = disk
        self._max_bytes = max_bytes
        # Held while the owner is asked and its answer is entered, so that answers are entered in
        # their order. Taken before the owner's lock and before _lock, which readers wait for.
        self._deciding = threading.Lock()
        self._lock = threading.Lock()
        # Least recent first, and the locations of each segment; guarded by _lock.
        self._copies: OrderedDict[Location, _Copy] = OrderedDict()
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

    @property
    def copies_bytes(self) -> int:
        """See `Tier.copies_bytes`."""
        return self._max_bytes

    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any], *, packed: bool = False,
        enter: Enter | None = None,
    ) -> RecoveredPages:  # fmt: skip
        """See `Tier.open_namespace`."""
        with self._lock:
            self._slot_bytes[digest] = slot_bytes
        return self._disk.open_namespace(digest, slot_bytes, label, packed=packed, enter=enter)

    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        """See `Tier.write`; what the disk took may be kept in memory too."""
        locations = self._disk.write(digest, slots)
        written = [
            (location, slot)
            for location, slot in zip(locations, slots, strict=True)
            if location is not None
        ]
        self._keep(digest, written, written=True)
        return locations

    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        """See `Tier.read`."""
        results = [self._from_memory(digest, request) for request in requests]
        missing = [at for at, result in enumerate(results) if result is not VerifyResult.OK]
        if missing:
            found = self._disk.read(digest, [requests[at] for at in missing])
            for at, result in zip(missing, found, strict=True):
                results[at] = result
            read = [
                (requests[at].location, requests[at].out)
                for at in missing
                if results[at] is VerifyResult.OK
            ]
            self._keep(digest, read, written=False)
        return results

    def clear(self, digest: bytes | None) -> None:
        """See `Tier.clear`."""
        self._disk.clear(digest)

    @property
    def num_undeleted(self) -> int:
        """See `Tier.num_undeleted`."""
        return self._disk.num_undeleted

    def may_hold(self, digest: bytes) -> bool:
        """See `Tier.may_hold`."""
        return self._disk.may_hold(digest)

    def end_namespace(self, digest: bytes) -> None:
        """See `Tier.end_namespace`."""
        self._disk.end_namespace(digest)
        with self._lock:
            self._slot_bytes.pop(digest, None)

    def close(self) -> None:
        """Closes the disk tier too."""
        self._disk.close()
        with self._lock:
            self._copies.clear()
            self._by_segment.clear()
            self._used_bytes = 0

    def stats(self) -> DiskStats:
        """The disk tier's."""
        return self._disk.stats()

    def memory_stats(self) -> dict[str, int]:
        """What memory holds, and how often it was of use."""
        with self._lock:
            return {
                "records": len(self._copies),
                "used_bytes": self._used_bytes,
                "max_bytes": self._max_bytes,
                "hits": self.num_hits,
            }

    def _keep(
        self, digest: bytes, found: Sequence[tuple[Location, ByteArray]], *, written: bool
    ) -> None:
        """Takes copies of those of some records that are to be kept, each with a checksum.

        The disk tier leaves no checksum in the slot where it has better seals.
        """
        offers: list[RecordCopy] = []
        records: list[ByteArray] = []
        for location, slot in found:
            try:
                meta, payload_bytes = parse_header(slot)
            except RecordError:
                continue
            num_bytes = HEADER_BYTES + payload_bytes
            room = self._room_bytes(num_bytes)
            offers.append(RecordCopy(location, meta.page_hash, meta.lora, room))
            records.append(slot[:num_bytes])
        if not offers:
            return
        copies = self._make_places(digest, offers, written)
        for copy, record in zip(copies, records, strict=True):
            if copy is not None:
                record = record.copy()
                seal(record)
                copy.record = record  # if it has lost its place meanwhile, nobody sees it

    def _room_bytes(self, num_bytes: int) -> int:
        """How much of the room a record of so many bytes takes."""
        return num_bytes

    def _make_places(
        self, digest: bytes, offers: Sequence[RecordCopy], written: bool
    ) -> list[_Copy | None]:
        """Gives places to those of some records that are to be kept; None for the others."""
        with self._deciding:
            kept, gone = self._ask(digest, offers, written)
            copies = [
                _Copy(offer.num_bytes) if is_kept else None
                for offer, is_kept in zip(offers, kept, strict=True)
            ]
            with self._lock:
                self._forget(gone)
                for offer, copy in zip(offers, copies, strict=True):
                    if copy is not None:
                        self._enter(offer.location, copy)
                while self._used_bytes > self._max_bytes:  # nobody said what is to leave
                    self._forget([next(iter(self._copies))])
        return copies

    def _ask(
        self, digest: bytes, offers: Sequence[RecordCopy], written: bool
    ) -> tuple[list[bool], list[Location]]:
        if self.copy_keeper is None:
            return [True] * len(offers), []
        try:
            return self.copy_keeper.keep(digest, offers, written=written)
        except Exception:
            logger.exception("hier-kv: coded DRAM could not be told which pages to keep")
            return [False] * len(offers), []

    def _from_memory(self, digest: bytes, request: ReadRequest) -> VerifyResult:
        with self._lock:
            copy = self._copies.get(request.location)
            record = None if copy is None else copy.record
            slot_bytes = self._slot_bytes.get(digest, 0)
            if copy is not None:
                self._copies.move_to_end(request.location)
        if record is None or not usable_slot(request.out, slot_bytes):
            return VerifyResult.MISSING
        request.out[: record.size] = record
        result = verify(request.out, request.page_hash, digest, request.lora)
        if result is VerifyResult.OK:
            with self._lock:
                self.num_hits += 1
        return result

    # ---- the caller holds _lock ----

    def _enter(self, location: Location, copy: _Copy) -> None:
        self._forget([location])
        self._copies[location] = copy
        self._by_segment.setdefault(location.segment, set()).add(location)
        self._used_bytes += copy.num_bytes

    def _forget(self, locations: Iterable[Location]) -> None:
        for location in locations:
            copy = self._copies.pop(location, None)
            if copy is None:
                continue
            self._used_bytes -= copy.num_bytes
            neighbours = self._by_segment[location.segment]
            neighbours.discard(location)
            if not neighbours:
                del self._by_segment[location.segment]

    # ---- called by the disk tier ----

    def _dropped(self, digest: bytes, segment_id: int) -> None:
        with self._lock:
            self._forget(list(self._by_segment.get(segment_id, ())))
        self.on_drop(digest, segment_id)
