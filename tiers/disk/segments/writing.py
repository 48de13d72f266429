"""Writing records: the thread-safe front of active segments and reclaim.

It chooses segments and makes room; `active.py` writes the bytes.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

from sglang_ext.tiers.base import BLOCK_BYTES, Location, OwnerCallbacks
from sglang_ext.tiers.disk.config import MIN_SLOTS
from sglang_ext.tiers.disk.disk_context import DiskContext, usable_slot
from sglang_ext.tiers.disk.folder import SegmentIds
from sglang_ext.tiers.disk.reclaim import SALVAGE_SHARE, SegmentReclaimer
from sglang_ext.tiers.disk.reused_segments import Reuser
from sglang_ext.tiers.disk.segments.active import ActiveSegment
from sglang_ext.tiers.disk.segments.catalog import Namespace
from sglang_ext.tiers.disk.segments.layout import segment_file_bytes
from sglang_ext.tiers.records.record import ByteArray, RecordError, VerifyResult
from sglang_ext.tiers.records.seals import RecordSeals, SealedRecord

_MOST_OTHERS = 1  # active segments of namespaces of before: what DRAM still has of them is written


class _Batch:
    """Rows that are written together. `prepare` may be called by several threads.

    Attributes:
        rows: which rows of the slots.
        payload_bytes: i64 by index in `rows`, of those that were prepared.
        refused: reasons of the rows that hold no record of the namespace.
    """

    def __init__(
        self, seals: RecordSeals, namespace: bytes, slots: Sequence[ByteArray], rows: list[int]
    ) -> None:
        self.rows = rows
        self.payload_bytes = [0] * len(rows)
        self.refused: dict[int, str] = {}
        self._seals = seals
        self._namespace = namespace
        self._slots = slots

    def prepare(self, run: range) -> list[SealedRecord | None]:
        """Checks the headers of neighbouring records and seals them."""
        found: list[SealedRecord | None] = []
        rows = [self.rows[index] for index in run]
        sealed = self._seals.seal([self._slots[row] for row in rows], self._namespace)
        for index, row, result in zip(run, rows, sealed, strict=True):
            if isinstance(result, RecordError):
                is_foreign = result.kind is VerifyResult.FOREIGN
                self.refused[row] = "foreign" if is_foreign else "malformed"
                found.append(None)
            else:
                self.payload_bytes[index] = result.payload_bytes
                found.append(result)
        return found


class Writer:
    """Stores records. `lock` (the write lock) guards all its state and every method needs it."""

    def __init__(self, context: DiskContext, owner: OwnerCallbacks, ids: SegmentIds) -> None:
        self.lock = threading.RLock()
        self.actives: dict[bytes, ActiveSegment] = {}
        self.reclaimer = SegmentReclaimer(context, owner, self.actives)
        self._context = context
        self._ids = ids
        self._owner = owner
        self._reuser = Reuser(context)
        self._is_full_for_good = False
        self._failed = False  # in the call in hand, for another reason than a full disk

    def write(self, namespace: Namespace, slots: Sequence[ByteArray]) -> list[Location | None]:
        """Stores one record per slot; the contract is `Tier.write`'s."""
        locations: list[Location | None] = [None] * len(slots)
        rows = self._usable(namespace, slots)
        self.reclaimer.fresh.clear()
        self._failed = False
        while rows:
            blocks = [slots[row].size // BLOCK_BYTES for row in rows]
            active = self._active(namespace, blocks)
            if active is None:
                self._context.counters.drop("io" if self._failed else "full", len(rows))
                break
            fitting = rows[: active.count_fitting(blocks)]
            batch = _Batch(self._context.seals, namespace.digest, slots, fitting)
            done = active.append([slots[row] for row in batch.rows], batch.prepare)
            for row, location in zip(batch.rows, done.locations, strict=False):
                locations[row] = location
            fresh = self.reclaimer.fresh.setdefault(active.segment.segment_id, {})
            fresh.update(zip((each.block for each in done.locations), blocks, strict=False))
            self._count(batch, len(done.locations))
            rows = [row for row in rows[len(done.locations) :] if row not in batch.refused]
            if done.failed:
                self._context.counters.drop("io", len(rows))
                self._leave(active, done.end_block)
                break
            self._reclaim_early(namespace, active)
        self._withdraw_reclaimed(namespace, locations)
        return locations

    def seal(self, digest: bytes) -> None:
        """Seals the namespace's active segment, or removes it if it is empty."""
        active = self.actives.pop(digest, None)
        if active is None:
            return
        if active.segment.end_block > 1:
            active.seal()
        else:
            active.close()
            self.reclaimer.drop(active.segment)

    def seal_others(self, digest: bytes, most_left: int = 0) -> None:
        """Seals the active segments of other namespaces, but for the last written of them.

        Each is an open file with room that was taken ahead. Of a server one namespace is written
        to, but for a while behind a change of weights.
        """
        others = [active.segment for key, active in self.actives.items() if key != digest]
        others.sort(key=lambda segment: segment.last_used)
        for segment in others[: max(0, len(others) - most_left)]:
            self.seal(segment.namespace)

    def clear(self, digest: bytes) -> None:
        """Removes every segment of the namespace, for good."""
        active = self.actives.pop(digest, None)
        if active is not None:
            active.close()
        for segment in self._context.catalog.segments(digest):
            self.reclaimer.drop(segment, cleared=True)

    def _usable(self, namespace: Namespace, slots: Sequence[ByteArray]) -> list[int]:
        """Returns rows of `slots` that are memory of this namespace's pages."""
        rows = [
            row
            for row, slot in enumerate(slots)
            if usable_slot(slot, namespace.slot_bytes, packed=namespace.packed)
        ]
        if len(rows) < len(slots):
            self._context.counters.drop("malformed", len(slots) - len(rows))
        return rows

    def _count(self, batch: _Batch, num_stored: int) -> None:
        counters = self._context.counters
        counters.add("records_written", num_stored)
        counters.add("useful_bytes", sum(batch.payload_bytes[:num_stored]))
        for reason in batch.refused.values():
            counters.drop(reason)

    def _leave(self, active: ActiveSegment, end_block: int) -> None:
        """Goes on in another segment after a failed write, unless the disk takes nothing at all.

        To open others, and to give up pages for it, would mend nothing then.
        """
        segment = active.segment
        is_empty = segment.end_block == 1
        if not active.seal_behind(end_block):
            return
        del self.actives[segment.namespace]
        if is_empty:
            self.reclaimer.drop(segment)

    def _withdraw_reclaimed(self, namespace: Namespace, locations: list[Location | None]) -> None:
        """Hands out no location whose segment went to make room for the rest of its own batch."""
        for row, location in enumerate(locations):
            if location is not None and location.segment not in namespace.segments:
                locations[row] = None
                self._context.counters.drop("full")

    def _active(self, namespace: Namespace, blocks: Sequence[int]) -> ActiveSegment | None:
        """Returns an active segment with room for the first of some records, of these lengths.

        None when there is none to be had.

        A batch that would be split but fits in a fresh segment gets one, if little is lost by
        sealing early: a sealed file is cut, so nothing but its length.
        """
        active = self.actives.get(namespace.digest)
        if active is not None:
            nearly_full = active.free_blocks <= active.room_blocks // SALVAGE_SHARE
            split = active.free_blocks < sum(blocks) <= active.room_blocks
            early = nearly_full and split and not active.may_be_split
            if active.count_fitting(blocks[:1]) and not early:
                return active
            self.seal(namespace.digest)
        if not self._is_mounted():
            return None
        needed = segment_file_bytes(namespace.num_slots, namespace.slot_bytes)
        active = self._into_what_is_left(namespace, blocks, needed)
        if active is None:
            if not self.reclaimer.make_room(needed, namespace.digest):
                return None
            active = self._create(namespace, namespace.num_slots)
        if active is not None:
            self.seal_others(namespace.digest, _MOST_OTHERS)
            self.actives[namespace.digest] = active
        return active

    def _into_what_is_left(
        self, namespace: Namespace, blocks: Sequence[int], needed: int
    ) -> ActiveSegment | None:
        """Finds places under the size bound where there is no room for a new segment.

        The rest of the room gets a smaller segment, then segments with free places are opened.
        """
        keeper = self._owner.keeper
        if keeper is None or self.reclaimer.has_room(needed, namespace):
            return None
        self.reclaimer.shrink()
        num_slots = self.reclaimer.slots_that_fit(namespace)
        if num_slots >= MIN_SLOTS:
            active = self._create(namespace, num_slots, may_drop=False)
            if active is not None:
                return active
        return self._reuser.open(namespace, keeper, blocks, self.reclaimer.fresh)

    def _create(
        self, namespace: Namespace, num_slots: int, *, may_drop: bool = True
    ) -> ActiveSegment | None:
        """Makes a segment; on a full disk drops an old one, if it may, and tries once more.

        A disk that stays full all the same is not our doing: no more is dropped for it until a
        segment could be made again.
        """
        for is_last in (self._is_full_for_good or not may_drop, True):
            try:
                active = ActiveSegment.create(self._context, namespace, self._ids.take(), num_slots)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not full:
                    self._failed = True
                    self._context.failed("io_write", error)
                if may_drop:
                    self._is_full_for_good = full and is_last
                if is_last or not full or not self.reclaimer.reclaim_oldest():
                    return None
            else:
                self._is_full_for_good = False
                return active
        return None

    def _is_mounted(self) -> bool:
        """Whether the folder is on the file system of the start; if not, it counts as failed.

        Asked before room is made: what is given up while a mount is gone makes none. Nor is what
        lies below the mount filled, often the system's own, small disk.
        """
        error = self.reclaimer.undeleted.mount_error()
        if error is None:
            return True
        self._failed = True
        self._context.failed("io_write", error)
        return False

    def _reclaim_early(self, namespace: Namespace, active: ActiveSegment) -> None:
        """Reclaims while the active segment still has room for what is worth keeping."""
        if self._owner.keeper is not None:
            return  # room is made page by page
        is_due = 0 < active.free_blocks <= active.room_blocks // SALVAGE_SHARE
        if is_due and self._is_mounted():
            self.reclaimer.make_room(active.segment.file_bytes, namespace.digest)
