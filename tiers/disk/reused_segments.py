"""Writing new records into the places of records that no page needs any more.

A sealed segment is opened again, its free places are filled, and it is sealed anew. So room is made
page by page, and nothing is copied to make it. What a kill at any instant leaves:

- before a byte is overwritten the file is lengthened past the size it was preallocated at. That one
  step takes its trailer from its end, and no segment in another state has that length, so a later
  process knows that the footer is not to be believed, and verifies every record;
- sealing writes a new footer behind the last record and cuts the file there, as for a new segment.

The owner says which records are pages. The others may be anything: their places are free.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import BLOCK_BYTES, PageKeeper, RecoveredPages
from sglang_ext.tiers.disk.disk_context import DiskContext, tell_of_other_names
from sglang_ext.tiers.disk.segments.active import ActiveSegment
from sglang_ext.tiers.disk.segments.catalog import Namespace, Segment
from sglang_ext.tiers.disk.segments.fileio import read_small
from sglang_ext.tiers.disk.segments.layout import (
    MAX_SLOTS,
    FutureVersionError,
    LockedFooterError,
    SegmentTable,
    decode_header,
    footer_bytes_bound,
    reopened_file_bytes,
)
from sglang_ext.tiers.disk.segments.recovery import read_footer
from sglang_ext.tiers.disk.segments.thinned import ThinnedSegments
from sglang_ext.tiers.records.record import RecordMeta

_GIVE_UP_SHARE = 8  # of a segment, at least one in so many is given up at once
_MAX_FAILED = 3  # segments that could not be opened, until a call goes without
_MAX_ROUNDS = 16  # of giving up, until a segment is worth opening

Gaps = npt.NDArray[np.int64]
"""First blocks and ends of free runs, `[N, 2]`, ascending."""
_Entry = tuple[bytes, bytes, int, int]  # page hash, adapter, quality, blocks


class ReusedSegment(ActiveSegment):
    """A sealed segment whose free places are filled. Used under the write lock only."""

    def __init__(
        self,
        context: DiskContext,
        segment: Segment,
        fd: int,
        kept: dict[int, _Entry],
        footer_bytes: int,
    ) -> None:
        super().__init__(context, segment, fd, 0)
        self._entries = kept
        self._footer_bytes = footer_bytes
        self._gaps = _gaps(kept, segment.end_block)
        self.room_blocks = self.free_blocks

    @classmethod
    def open(
        cls,
        context: DiskContext,
        segment: Segment,
        keeper: PageKeeper,
        fresh: Mapping[int, int],
        first_blocks: int,
    ) -> ReusedSegment | None:
        """Opens a sealed segment for writing; None where that cannot be, or is of no use.

        Args:
            context: the tier's.
            segment: sealed.
            keeper: says which of its records are pages.
            fresh: lengths by first block of other records that are kept.
            first_blocks: length of a record for which there must be a place.

        Raises:
            OSError: the disk failed; the segment is as it was, or counts as never sealed.
            FutureVersionError: another release sealed it meanwhile.
            LockedFooterError: somebody with another key did.
        """
        header = decode_header(read_small(context.io, segment.path, 0, BLOCK_BYTES))
        trailer, pages = read_footer(
            context.io, segment.path, segment.path.stat().st_size, context.seals.footers
        )
        live = keeper.live_records(segment.segment_id)
        if header is None or trailer is None or pages is None or live is None:
            return None
        lengths = {**dict(zip(live[0].tolist(), live[1].tolist(), strict=True)), **fresh}
        kept = _entries(pages, lengths)
        if kept is None or trailer.end_block != segment.end_block:
            return None
        room = header.file_bytes - segment.end_block * BLOCK_BYTES
        spare = context.config.max_bytes - context.catalog.used_bytes
        room = min(room, trailer.footer_bytes + max(0, spare))
        fd = context.io.open(segment.path, os.O_RDWR | context.direct_flag)
        try:
            opened = cls(context, segment, fd, kept, room)
            segment.has_other_names = context.io.num_names(fd) > 1
            if segment.has_other_names:
                tell_of_other_names(context.config.path, segment.path)
            elif opened.count_fitting([first_blocks]):
                context.reach("reuse:before_open")
                context.io.truncate(fd, reopened_file_bytes(header))
                if context.config.fsync != "none":
                    context.io.sync(fd)
                context.reach("reuse:opened")
                context.catalog.mark_reopened(segment, segment.end_block * BLOCK_BYTES + room)
                return opened
        except BaseException:
            with contextlib.suppress(OSError):
                context.io.close(fd)
            raise
        context.io.close(fd)
        return None

    @property
    def free_blocks(self) -> int:
        """Blocks not yet written that records may take."""
        return int((self._gaps[:, 1] - self._gaps[:, 0]).sum())

    @property
    def may_be_split(self) -> bool:
        """Its places are what there is: a batch fills them, and goes on elsewhere."""
        return True

    def count_fitting(self, blocks: Sequence[int]) -> int:
        """Returns how many of the next records, of these lengths, find places."""
        return len(self._places(blocks)[0])

    def _places(self, blocks: Sequence[int]) -> tuple[list[int], Gaps]:
        """First blocks of the leading records that fit, and the gaps that are left.

        Each takes the shortest gap that is long enough. What is left of a gap, and what is too
        short for one record, is there for the next. (The first gap behind the last record held
        2 to 4 % less: what it passed over stayed empty.)
        """
        gaps, places = self._gaps.copy(), list[int]()
        for num_blocks in blocks[: self._max_records(len(blocks))]:
            rest = gaps[:, 1] - gaps[:, 0] - num_blocks
            fits = np.flatnonzero(rest >= 0)
            if not len(fits):
                break
            first = int(fits[np.argmin(rest[fits])])
            places.append(int(gaps[first, 0]))
            gaps[first, 0] += num_blocks
        return places, gaps

    def _max_records(self, wanted: int) -> int:
        """How many of so many records the footer has room for, each with a hole behind it."""
        if not self.segment.packed:
            return wanted  # a slot has its entry, whether a record lies in it or not
        num = len(self._entries) + len(self._gaps)

        def is_over(more: int) -> bool:
            entries = num + 2 * more
            return entries > MAX_SLOTS or footer_bytes_bound(entries) > self._footer_bytes

        return bisect.bisect_left(range(1, wanted + 1), True, key=is_over)

    def _find_places(self, blocks: Sequence[int]) -> list[int]:
        return self._places(blocks)[0]

    def _note(
        self, metas: Sequence[RecordMeta], places: Sequence[int], blocks: Sequence[int]
    ) -> None:
        _, self._gaps = self._places(blocks)
        for meta, place, num_blocks in zip(metas, places, blocks, strict=True):
            self._entries[place] = (meta.page_hash, meta.lora, meta.quality, num_blocks)

    def _end_block(self) -> int:
        return self.segment.end_block

    def _final_table(self) -> SegmentTable:
        table = SegmentTable(self.slot_blocks, self.segment.packed)
        for place in sorted(self._entries):
            table.add_holes(place - table.end_block)
            table.add(*self._entries[place])
        table.add_holes(self.segment.end_block - table.end_block)
        return table


class Reuser:
    """Finds the segment that the next records go to. Used under the write lock only."""

    def __init__(self, context: DiskContext) -> None:
        self._context = context
        self._thinned = ThinnedSegments(context.catalog)

    def open(
        self,
        namespace: Namespace,
        keeper: PageKeeper,
        blocks: Sequence[int],
        fresh: Mapping[int, Mapping[int, int]],
    ) -> ReusedSegment | None:
        """Opens the segment with the most free room; if none has enough, has pages given up.

        Args:
            namespace: the segment's.
            keeper: the owner.
            blocks: lengths of the records to write.
            fresh: records that the owner does not know yet, by segment: lengths by first block.

        Returns:
            None where there is no place: the owner keeps everything, or segments go as a whole.
        """
        segment_blocks = namespace.num_slots * namespace.slot_bytes // BLOCK_BYTES
        step = max(min(sum(blocks), segment_blocks), segment_blocks // _GIVE_UP_SHARE, 1)

        def num_fresh(segment_id: int) -> int:
            return sum(fresh.get(segment_id, {}).values())

        failed: list[int] = []
        try:
            for _ in range(_MAX_ROUNDS):
                self._thinned.note(keeper.take_thinned())
                while (segment := self._thinned.take(namespace, blocks[0], num_fresh)) is not None:
                    kept = fresh.get(segment.segment_id, {})
                    try:
                        opened = ReusedSegment.open(self._context, segment, keeper, kept, blocks[0])
                    except OSError as error:
                        self._context.failed("io_read", error)
                        failed.append(segment.segment_id)
                        # A disk that fails is no fuller for it: to give up pages mends nothing.
                        if len(failed) == _MAX_FAILED:
                            return None
                        continue
                    except (FutureVersionError, LockedFooterError) as error:
                        self._context.failed("io_read", error)
                        continue
                    if opened is not None:
                        self._context.counters.add("segments_reused")
                        return opened
                if not keeper.give_up(step):
                    return None
            return None
        finally:  # they may be opened at another time, and an empty one loses no more pages
            self._thinned.note({each: keeper.num_live_blocks(each) for each in failed})


def _entries(pages: RecoveredPages, lengths: Mapping[int, int]) -> dict[int, _Entry] | None:
    """Entries of the footer for records, given by block and length; None where one is not in it."""
    rows = {block: row for row, block in enumerate(pages.block.tolist())}
    kept: dict[int, _Entry] = {}
    for block, num_blocks in lengths.items():
        row = rows.get(block)
        if row is None or int(pages.num_blocks[row]) != num_blocks:
            return None
        kept[block] = (*pages.key_of(row), int(pages.quality[row]), num_blocks)
    return kept


def _gaps(kept: dict[int, _Entry], end_block: int) -> Gaps:
    """Runs of blocks in [1, end_block) that no kept record covers: first ones and ends."""
    starts = np.array(sorted(kept), np.int64)
    ends = starts + np.array([kept[start][3] for start in starts.tolist()], np.int64)
    gaps = np.stack([np.r_[1, ends], np.r_[starts, end_block]], axis=1)
    return gaps[gaps[:, 0] < gaps[:, 1]]
