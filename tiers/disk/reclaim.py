"""Where giving up single pages made no room, or nobody gives up any: whole old segments go.

The usual way is `reused_segments.py`: the owner gives up pages (`PageKeeper`), and their places are
written again. A victim here is a sealed segment of any namespace. First come those with the fewest
live blocks, where the owner knows these, then those whose last read or write is longest ago; of the
first few goes the one with the fewest pages that the owner will read soon. Pages that the owner
calls hot move to their namespace's active segment first: at most a quarter of the victim, by size,
and no more than that segment still has room for. While the disk does not let go of what was dropped
before, nothing is dropped for room: that would make none, and can still be read. Everything here
runs on the writing thread under the write lock; readers are never waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import BLOCK_BYTES, OwnerCallbacks, RecoveredPages
from sglang_ext.tiers.disk.disk_context import DiskContext
from sglang_ext.tiers.disk.folder import remove_empty_folder
from sglang_ext.tiers.disk.segments.active import ActiveSegment
from sglang_ext.tiers.disk.segments.catalog import Namespace, Segment
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.disk.segments.layout import (
    FutureVersionError,
    LockedFooterError,
    segment_file_bytes,
)
from sglang_ext.tiers.disk.segments.recovery import read_footer
from sglang_ext.tiers.disk.undeleted import UndeletedFiles
from sglang_ext.tiers.records.checks import RecordKey
from sglang_ext.tiers.records.record import ByteArray, RecordError, VerifyResult
from sglang_ext.tiers.records.seals import SealedRecord

SALVAGE_SHARE = 4
"""At most one in this many blocks of a victim is salvaged."""

_SALVAGE_BYTES = 8 << 20
_CHOICE = 4  # oldest segments among which the least needed goes
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class SegmentReclaimer:
    """Drops segments to make room. Used under the write lock only.

    Attributes:
        fresh: first blocks and lengths of the records that the call in hand wrote, by segment; the
            owner does not know yet that they are pages.
        undeleted: files of segments that were dropped and are still there.
    """

    def __init__(
        self, context: DiskContext, owner: OwnerCallbacks, actives: dict[bytes, ActiveSegment]
    ) -> None:
        self._context = context
        self._owner = owner
        self._actives = actives
        self.fresh: dict[int, dict[int, int]] = {}
        self.undeleted = UndeletedFiles(context)

    def make_room(self, num_bytes: int, digest: bytes) -> bool:
        """Makes room for a new segment of `num_bytes` of namespace `digest`.

        Drops nothing unless what can be dropped suffices. Other namespaces' active segments are
        sealed, which gives back what they preallocated, if they are older than every sealed one
        or if there is no room without that.

        Returns:
            Whether there is room under both bounds now.
        """
        if self._shortfall(num_bytes) <= 0:
            return True
        if not self.undeleted.try_again():
            return False
        self._seal_idle(digest)
        if self._droppable() < self._shortfall(num_bytes):
            self._seal([key for key in self._actives if key != digest])
        shortfall = self._shortfall(num_bytes)
        if self._droppable() < shortfall:
            return False
        victims = self._victims()
        while victims and shortfall > 0:
            given_back = self.reclaim(victims.pop(self._least_needed(victims)))
            if not given_back:
                return False
            shortfall -= given_back
        return shortfall <= 0

    def has_room(self, num_bytes: int, namespace: Namespace) -> bool:
        """Whether a new segment fits after unusable segments were dropped.

        These are sealed segments of other namespaces, and those of this namespace in a format that
        is no longer written (another key, or the other of packed and whole slots). Only segments
        in which the owner keeps no page are dropped, the oldest first.
        """
        keeper, catalog = self._owner.keeper, self._context.catalog
        while self._shortfall(num_bytes) > 0:
            others = catalog.sealed_of_others(namespace.digest)
            unfit = [
                each
                for each in catalog.sealed_unfit(namespace)
                if each.segment_id not in self.fresh
            ]
            idle = [
                segment
                for segment in [*others, *unfit]
                if keeper is None or not keeper.num_live_blocks(segment.segment_id)
            ]
            if not idle or not self.undeleted.try_again():
                return False
            self.reclaim(min(idle, key=lambda segment: segment.last_used))
        return True

    def slots_that_fit(self, namespace: Namespace) -> int:
        """Slots of a segment that would take what is left under the size bound; 0 for none.

        Where segments are packed, footers grow as they are filled again, and need what is left.
        Where the file system's free space is what a whole segment lacks there is no rest: that
        changes all the time, and would become many small segments.
        """
        slot_bytes = namespace.slot_bytes
        left = self._context.config.max_bytes - self._context.catalog.used_bytes
        num_slots = min(max(0, left // slot_bytes), namespace.num_slots)
        while num_slots and segment_file_bytes(num_slots, slot_bytes) > left:
            num_slots -= 1
        if namespace.packed or num_slots == namespace.num_slots:
            return 0
        return num_slots if self._shortfall(segment_file_bytes(num_slots, slot_bytes)) <= 0 else 0

    def shrink(self) -> None:
        """Drops segments while there are more than fit under the size bound.

        A folder that was written under a larger bound has them. Places in them are no room.
        """
        catalog, max_bytes = self._context.catalog, self._context.config.max_bytes
        if catalog.used_bytes <= max_bytes or not self.undeleted.try_again():
            return
        for victim in self._victims():
            if catalog.used_bytes <= max_bytes or not self.reclaim(victim):
                return

    def reclaim_oldest(self) -> bool:
        """Drops the oldest sealed segment, one of this call last; returns whether one is gone."""
        victims = self._context.catalog.oldest_sealed()
        if not victims or not self.undeleted.try_again():
            return False
        return self.reclaim(min(victims, key=lambda each: each.segment_id in self.fresh)) > 0

    def reclaim(self, victim: Segment) -> int:
        """Salvages the victim's hot pages, then drops it; returns the bytes given back."""
        self._context.reach("reclaim:before_salvage")
        try:
            self._salvage(victim)
        except (OSError, FutureVersionError, LockedFooterError) as error:
            self._context.failed("io_read", error)
        self._context.reach("reclaim:before_drop")
        given_back = self.drop(victim)
        self._context.counters.add("segments_dropped")
        return given_back

    def drop(self, segment: Segment, *, cleared: bool = False) -> int:
        """Tells the owner, then removes the segment; returns the bytes given back.

        Args:
            segment: which.
            cleared: whether its records must not be found again, rather than make room.
        """
        context = self._context
        self._call(lambda: self._owner.on_drop(segment.namespace, segment.segment_id), None)
        context.catalog.remove(segment)
        context.reach("reclaim:before_unlink")
        is_gone = self.undeleted.delete(segment.path, segment.file_bytes, cleared=cleared)
        context.fds.forget(segment.segment_id)
        if not is_gone:
            return 0
        self.drop_namespace(segment.namespace)
        return segment.file_bytes

    def drop_namespace(self, digest: bytes) -> None:
        """Forgets a namespace that is not open and has no segment left, and removes its folder."""
        namespace = self._context.catalog.take_if_empty(digest)
        if namespace is not None:
            remove_empty_folder(self._context.io, namespace.folder)

    def _shortfall(self, num_bytes: int) -> int:
        """Returns the bytes to give back before `num_bytes` fit under both bounds."""
        config, context = self._context.config, self._context
        over_size = context.catalog.used_bytes + num_bytes - config.max_bytes
        try:
            free = context.io.free_bytes(config.path)
        except OSError:
            return over_size
        return max(over_size, config.min_free_bytes + num_bytes - free)

    def _droppable(self) -> int:
        return sum(segment.file_bytes for segment in self._context.catalog.oldest_sealed())

    def _victims(self) -> list[Segment]:
        """Sealed segments: those with the fewest live blocks first, then the oldest.

        What the call in hand wrote comes last: its records are no pages yet.
        """
        victims, keeper = self._context.catalog.oldest_sealed(), self._owner.keeper
        fresh = self.fresh
        if keeper is None:
            return sorted(victims, key=lambda each: each.segment_id in fresh)
        return sorted(
            victims,
            key=lambda each: (each.segment_id in fresh, keeper.num_live_blocks(each.segment_id)),
        )

    def _least_needed(self, victims: Sequence[Segment]) -> int:
        """Index of the segment to drop among the oldest; the oldest of equal ones.

        Nobody can need what the call in hand wrote, as its records are no pages yet; it comes last.
        """
        num_needed = [
            (
                victim.segment_id in self.fresh,
                self._call(functools.partial(self._owner.num_needed, victim.segment_id), 0) or 0,
            )
            for victim in victims[:_CHOICE]
        ]
        return num_needed.index(min(num_needed))

    def _seal_idle(self, digest: bytes) -> None:
        """Makes victims of active segments that have been idle for longest."""
        sealed = self._context.catalog.oldest_sealed()
        if sealed:
            oldest = sealed[0].last_used
            idle = [
                key
                for key, active in self._actives.items()
                if key != digest and active.segment.last_used < oldest
            ]
            self._seal(idle)

    def _seal(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._actives.pop(digest).seal()

    def _salvage(self, victim: Segment) -> None:
        """Copies hot pages of the victim to the active segment and tells the owner.

        Raises:
            OSError: the victim cannot be read.
            FutureVersionError: another release sealed the victim meanwhile.
            LockedFooterError: it was sealed with another key.
        """
        active = self._actives.get(victim.namespace)
        limit = (victim.end_block - 1) // SALVAGE_SHARE
        if active is None or not limit or not active.free_blocks:
            return
        _, pages = read_footer(
            self._context.io,
            victim.path,
            victim.path.stat().st_size,
            self._context.seals.footers,
        )
        if pages is None or not len(pages):
            return
        hot = self._call(
            lambda: self._owner.is_hot(victim.namespace, pages.hashes, pages.lora), None
        )
        if hot is None or len(hot) != len(pages):
            return
        heat = np.asarray(hot, np.int16)
        hottest = np.argsort(-heat, kind="stable")[: np.count_nonzero(heat)]
        rows = np.sort(_that_fit(hottest, pages, active, limit))
        at_once = max(1, _SALVAGE_BYTES // victim.slot_bytes)
        buffer = aligned_array(min(at_once, len(rows)) * victim.slot_bytes)
        slots = list(buffer.reshape(-1, victim.slot_bytes))
        for first in range(0, len(rows), at_once):
            self._move(victim, active, pages, rows[first : first + at_once].tolist(), slots)

    def _move(
        self,
        victim: Segment,
        active: ActiveSegment,
        pages: RecoveredPages,
        rows: list[int],
        slots: list[ByteArray],
    ) -> None:
        """Copies the records `rows` of `pages`; each is verified on the way, and sealed again."""
        context = self._context
        kept: list[int] = []
        with context.fds.reading(victim.segment_id, victim.path) as fd:
            for row in rows:
                slot = slots[len(kept)]
                record = slot[: int(pages.num_blocks[row]) * BLOCK_BYTES]
                if context.read_records(fd, [record], int(pages.block[row]) * BLOCK_BYTES) != 1:
                    continue
                page_hash, lora = pages.hashes[row].tobytes(), pages.lora[row].tobytes()
                key = RecordKey(page_hash, victim.namespace, lora if any(lora) else b"")
                if context.seals.open([record], [key])[0] is VerifyResult.OK:
                    kept.append(row)
                    slot[record.size :] = 0  # goes to disk too where a record takes a whole slot
        # Free places in the order of these records may take fewer than in that of their heat.
        kept = kept[: active.count_fitting([_blocks_in(active, pages, row) for row in kept])]
        records = [
            slot[: _blocks_in(active, pages, row) * BLOCK_BYTES]
            for slot, row in zip(slots, kept, strict=False)
        ]

        def prepare(run: range) -> list[SealedRecord | None]:
            found = context.seals.seal(records[run.start : run.stop], victim.namespace)
            return [None if isinstance(each, RecordError) else each for each in found]

        locations = active.append(records, prepare).locations
        if not locations:
            return
        kept = kept[: len(locations)]
        context.counters.add("records_salvaged", len(kept))
        context.counters.add("bytes_moved", sum(record.size for record in records[: len(kept)]))
        moved = dataclasses.replace(
            pages.take(np.array(kept)),
            segment=np.array([location.segment for location in locations], np.uint32),
            block=np.array([location.block for location in locations], np.uint32),
            num_blocks=np.array(
                [record.size // BLOCK_BYTES for record in records[: len(kept)]], np.uint16
            ),
        )
        self._call(lambda: self._owner.on_moved(victim.namespace, victim.segment_id, moved), None)

    def _call(self, callback: Callable[[], _T], fallback: _T | None) -> _T | None:
        """Calls the owner; an error there must not stop the disk, so it is logged and counted."""
        try:
            return callback()
        except Exception:
            _logger.exception("a callback of the disk tier's owner failed")
            self._context.counters.error("callback")
            return fallback


def _blocks_in(active: ActiveSegment, pages: RecoveredPages, row: int) -> int:
    """Returns how many blocks of the active segment a record takes."""
    return int(pages.num_blocks[row]) if active.segment.packed else active.slot_blocks


def _that_fit(
    rows: npt.NDArray[np.intp], pages: RecoveredPages, active: ActiveSegment, limit: int
) -> npt.NDArray[np.intp]:
    """Returns the first of `rows`, at most `limit` blocks, for which the segment has room."""
    blocks = [_blocks_in(active, pages, row) for row in rows.tolist()]
    within = int(np.searchsorted(np.cumsum(blocks), limit, side="right")) if blocks else 0
    return rows[: active.count_fitting(blocks[:within])]
