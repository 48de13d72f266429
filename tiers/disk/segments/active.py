"""The segment that a namespace is writing to."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES, Location, RecoveredPages
from sglang_ext.tiers.disk.disk_context import DiskContext
from sglang_ext.tiers.disk.folder import segment_path
from sglang_ext.tiers.disk.segments.catalog import Namespace, Segment
from sglang_ext.tiers.disk.segments.fileio import aligned_array, sync_folder, write_all
from sglang_ext.tiers.disk.segments.layout import (
    MAX_SLOTS,
    SegmentHeader,
    SegmentTable,
    encode_header,
    footer_bytes_bound,
    segment_file_bytes,
    table_pages,
)
from sglang_ext.tiers.disk.segments.sealing import write_footer
from sglang_ext.tiers.disk.workers import IoRun
from sglang_ext.tiers.records.record import ByteArray, RecordMeta
from sglang_ext.tiers.records.seals import SealedRecord

Prepare = Callable[[range], list[SealedRecord | None]]


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of a batch.

    Attributes:
        locations: of the records that are stored, the leading ones.
        failed: the disk failed; the rest were not stored, whatever they hold.
        end_block: behind the places of all of them; where the disk failed, it was before this.
    """

    locations: list[Location]
    failed: bool
    end_block: int


@dataclass(slots=True)
class _Batch:
    """A batch while it is written; the threads of its runs add to it.

    Attributes:
        records: as in `append`.
        prepare: as in `append`.
        metas: of each record that was prepared.
        sealed: what to write of each, from when it was prepared until it was written.
        refused: indices of records that cannot be stored.
        failed: first index of each run that was not written.
    """

    records: Sequence[ByteArray]
    prepare: Prepare
    metas: list[RecordMeta | None]
    sealed: list[SealedRecord | None]
    refused: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def prepare_run(self, run: range) -> None:
        """Prepares neighbours."""
        for index, sealed in zip(run, self.prepare(run), strict=True):
            if sealed is None:
                self.refused.append(index)
            else:
                self.metas[index], self.sealed[index] = sealed.meta, sealed


class ActiveSegment:
    """A segment open for appending. Used under the write lock only.

    Attributes:
        segment: the segment.
        slot_blocks: blocks of a slot.
        room_blocks: blocks of records that it had room for when it was empty.
    """

    def __init__(self, context: DiskContext, segment: Segment, fd: int, num_slots: int) -> None:
        self.segment = segment
        self.slot_blocks = segment.slot_bytes // BLOCK_BYTES
        self.room_blocks = num_slots * self.slot_blocks
        self._num_slots = num_slots
        self._context = context
        self._fd = fd
        self._table = SegmentTable(self.slot_blocks, segment.packed)

    @classmethod
    def create(
        cls, context: DiskContext, namespace: Namespace, segment_id: int, num_slots: int
    ) -> ActiveSegment:
        """Preallocates a segment under a temp name, then publishes it and adds it to the catalog.

        Args:
            context: the tier's.
            namespace: whose segment it is.
            segment_id: its number.
            num_slots: slots that it has room for.

        Raises:
            OSError: the disk failed or is full; nothing is left behind.
        """
        io = context.io
        file_bytes = segment_file_bytes(num_slots, namespace.slot_bytes)
        path = segment_path(namespace.folder, segment_id)
        temp = path.with_name(path.name + ".tmp")
        fd = io.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | context.direct_flag)
        try:
            io.allocate(fd, file_bytes)
            block = aligned_array(BLOCK_BYTES)
            block[:] = np.frombuffer(
                encode_header(
                    SegmentHeader(
                        segment_id,
                        num_slots,
                        namespace.slot_bytes,
                        file_bytes,
                        namespace.digest,
                        namespace.packed,
                        context.seals.footers is not None,
                    )
                ),
                np.uint8,
            )
            write_all(io, fd, [block], 0)
            context.reach("create:before_rename")
            _publish(context, fd, temp, path)
        except BaseException:
            io.close(fd)
            with contextlib.suppress(OSError):
                io.unlink(temp)
            raise
        context.counters.add("bytes_written", BLOCK_BYTES)
        segment = Segment(
            segment_id=segment_id,
            namespace=namespace.digest,
            path=path,
            slot_bytes=namespace.slot_bytes,
            end_block=1,
            file_bytes=file_bytes,
            last_used=context.catalog.now(),
            sealed=False,
            packed=namespace.packed,
        )
        context.catalog.add(segment)
        return cls(context, segment, fd, num_slots)

    @property
    def free_blocks(self) -> int:
        """Blocks not yet written that records may take."""
        if not self.segment.packed:
            return (self._num_slots - len(self._table)) * self.slot_blocks
        footer_blocks = footer_bytes_bound(len(self._table) + 1) // BLOCK_BYTES
        free = self.segment.file_bytes // BLOCK_BYTES - self._table.end_block - footer_blocks
        return max(0, free)

    @property
    def may_be_split(self) -> bool:
        """Whether a batch that does not fit as a whole begins here all the same."""
        return False

    def count_fitting(self, blocks: Sequence[int]) -> int:
        """Returns how many of the next records, of these lengths, still fit behind the last."""
        table = self._table
        if not self.segment.packed:
            return min(len(blocks), self._num_slots - len(table))
        end, num = table.end_block, len(table)
        for count, num_blocks in enumerate(blocks):
            end, num = end + num_blocks, num + 1
            if num > MAX_SLOTS or end * BLOCK_BYTES + footer_bytes_bound(num) > (
                self.segment.file_bytes
            ):
                return count
        return len(blocks)

    def append(self, records: Sequence[ByteArray], prepare: Prepare) -> Appended:
        """Writes records behind the last one, each run prepared while others are on their way.

        Args:
            records: u8 [n * 4096] each, whole slots unless the segment is packed; they fit.
            prepare: makes the records of a run ready and says what to write; None where one
                cannot be stored. Called once for each run, by several threads.

        Returns:
            What is stored: all of them, or those before the first that `prepare` refused or the
            first failed write. Later writes start where those end.
        """
        context = self._context
        sizes = [record.size for record in records]
        blocks = [size // BLOCK_BYTES for size in sizes]
        places = self._find_places(blocks)
        batch = _Batch(records, prepare, [None] * len(records), [None] * len(records))
        context.work(
            [
                IoRun(
                    prepare=partial(batch.prepare_run, run),
                    move=partial(self._write_run, batch, run, places[run.start] * BLOCK_BYTES),
                )
                for run in context.split_runs(sizes, places)
            ]
        )
        if context.config.fsync == "always" and not batch.failed:
            try:
                context.io.sync(self._fd)
            except OSError as error:
                context.failed("io_write", error)
                batch.failed.append(0)
        stored = min((*batch.failed, *batch.refused), default=len(records))
        metas = [meta for meta in batch.metas[:stored] if meta is not None]
        assert len(metas) == stored
        self._note(metas, places[:stored], blocks[:stored])
        context.catalog.grow(self.segment, self._end_block())
        locations = [Location(self.segment.segment_id, place) for place in places[:stored]]
        end_block = max(map(sum, zip(places, blocks, strict=True)), default=self._end_block())
        return Appended(locations, bool(batch.failed), end_block)

    def pages(self) -> RecoveredPages:
        """Returns the records written so far."""
        return table_pages(self._table, self.segment.segment_id)

    def seal(self) -> None:
        """Writes the footer, cuts the preallocated rest off and closes the file.

        When the disk fails at it, the failure is counted and the segment can still be read: a
        later process finds its records one by one.
        """
        end = self.segment.file_bytes
        try:
            end = self._write_footer(self._final_table())
        except OSError as error:
            self._context.failed("io_seal", error)
        finally:
            self.close()
        self._note_sealed(end)

    def seal_behind(self, end_block: int) -> bool:
        """Seals after a failed write, where the disk takes the footer behind what it did not take.

        A place may be bad and the disk well: whoever went on with this segment would write to that
        place for ever. Of a segment that is sealed so no free place is written to any more.

        Args:
            end_block: behind the places of that write.

        Returns:
            Whether it is sealed; where the disk takes nothing it is open as before.
        """
        table = self._final_table()
        table.add_holes(end_block - table.end_block)
        try:
            end = self._write_footer(table)
        except OSError:
            table.strip_holes()
            return False
        self.close()
        self.segment.write_failed = True
        self._context.catalog.grow(self.segment, table.end_block)
        self._note_sealed(end)
        return True

    def _write_footer(self, table: SegmentTable) -> int:
        context, segment = self._context, self.segment
        end = write_footer(
            context.io,
            self._fd,
            table,
            segment.segment_id,
            segment.namespace,
            sync=context.config.fsync != "none",
            seal=context.seals.footers,
            failpoint=context.failpoint,
        )
        context.counters.add("bytes_written", end - table.end_block * BLOCK_BYTES)
        return end

    def _note_sealed(self, file_bytes: int) -> None:
        self._context.catalog.mark_sealed(self.segment, file_bytes)
        self._context.counters.add("segments_sealed")

    def close(self) -> None:
        """Closes the file without sealing it."""
        with contextlib.suppress(OSError):
            self._context.io.close(self._fd)

    def _find_places(self, blocks: Sequence[int]) -> list[int]:
        """First blocks of records of these lengths, for all of which there is room."""
        return list(itertools.accumulate(blocks, initial=self._table.end_block))[:-1]

    def _note(
        self, metas: Sequence[RecordMeta], places: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Enters records that were written in the places that were found for them."""
        for meta, num_blocks in zip(metas, blocks, strict=True):
            self._table.add(meta.page_hash, meta.lora, meta.quality, num_blocks)

    def _end_block(self) -> int:
        return self._table.end_block

    def _final_table(self) -> SegmentTable:
        return self._table

    def _write_run(self, batch: _Batch, run: range, offset: int) -> None:
        """Writes one run at `offset`, up to the first record that was refused."""
        refused = (index for index in run if batch.metas[index] is None)
        good = range(run.start, next(refused, run.stop))
        if not good:
            return
        try:
            pieces = self._pieces([batch.records[at].size for at in good], batch.sealed, good)
            self._context.write_records(self._fd, pieces, offset)
        except OSError as error:
            self._context.failed("io_write", error)
            batch.failed.append(run.start)
        else:
            self._context.counters.add("bytes_written", sum(piece.size for piece in pieces))
        finally:
            batch.sealed[run.start : run.stop] = [None] * len(run)  # they may hold copies

    def _pieces(
        self, sizes: Sequence[int], sealed: Sequence[SealedRecord | None], rows: range
    ) -> list[ByteArray]:
        """What to write of neighbours; in this thread's buffer where it is made only now."""
        records = [record for record in sealed[rows.start : rows.stop] if record is not None]
        if any(record.fill is None for record in records):
            return [piece for record in records for piece in record.pieces]
        buffer = self._context.bounce.get(sum(sizes))
        ends = itertools.accumulate(sizes)
        for record, size, end in zip(records, sizes, ends, strict=True):
            assert record.fill is not None
            record.fill(buffer[end - size : end])
        return [buffer]


def _publish(context: DiskContext, fd: int, temp: Path, path: Path) -> None:
    if context.config.fsync == "always":
        context.io.sync(fd)
    context.io.rename(temp, path)
    if context.config.fsync == "always":
        sync_folder(context.io, path.parent)
