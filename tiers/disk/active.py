"""The segment that a namespace is writing to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES, Location, RecoveredPages
from sglang_ext.tiers.disk.catalog import Namespace, Segment
from sglang_ext.tiers.disk.context import DiskContext
from sglang_ext.tiers.disk.fileio import aligned_array, sync_folder, write_all
from sglang_ext.tiers.disk.folder import segment_path
from sglang_ext.tiers.disk.layout import (
    SegmentHeader,
    SegmentTable,
    encode_header,
    record_offset,
    segment_file_bytes,
    table_pages,
)
from sglang_ext.tiers.disk.sealing import write_footer
from sglang_ext.tiers.record import ByteArray, RecordError, RecordMeta, seal


class ActiveSegment:
    """A segment open for appending. Used under the write lock only."""

    def __init__(self, context: DiskContext, segment: Segment, fd: int, num_slots: int) -> None:
        self.segment = segment
        self.num_slots = num_slots
        self._context = context
        self._fd = fd
        self._table = SegmentTable()

    @classmethod
    def create(cls, context: DiskContext, namespace: Namespace, segment_id: int) -> ActiveSegment:
        """Preallocates a segment under a temp name, then publishes it and adds it to the catalog.

        Raises:
            OSError: the disk failed or is full; nothing is left behind.
        """
        io = context.io
        file_bytes = segment_file_bytes(namespace.num_slots, namespace.slot_bytes)
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
                        namespace.num_slots,
                        namespace.slot_bytes,
                        file_bytes,
                        namespace.digest,
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
            num_records=0,
            file_bytes=file_bytes,
            last_used=context.catalog.now(),
            sealed=False,
        )
        context.catalog.add(segment)
        return cls(context, segment, fd, namespace.num_slots)

    @property
    def num_free(self) -> int:
        """Slots not yet written."""
        return self.num_slots - len(self._table)

    def append(
        self, slots: Sequence[ByteArray], metas: Sequence[RecordMeta], *, salvage: bool = False
    ) -> list[Location]:
        """Writes records behind the last one; checksums are computed unless it is a salvage.

        Returns:
            Locations of the records that are stored: all of them, or, when the disk failed, those
            before the first failed write. Later writes start where those end.
        """
        context, slot_bytes, first = self._context, self.segment.slot_bytes, len(self._table)
        per_run = context.slots_per_run(len(slots), slot_bytes)
        failed: list[int] = []
        tasks = [
            partial(self._write_run, slots[at : at + per_run], at, not salvage, failed)
            for at in range(0, len(slots), per_run)
        ]
        context.workers.run(tasks)
        if context.config.fsync == "always" and not failed:
            try:
                context.io.sync(self._fd)
            except OSError:
                context.counters.error("io_write")
                failed.append(0)
        stored = min(failed, default=len(slots))
        for meta in metas[:stored]:
            self._table.add(meta.page_hash, meta.lora, meta.quality)
        context.catalog.grow(self.segment, len(self._table))
        context.counters.add("bytes_written", stored * slot_bytes)
        blocks = slot_bytes // BLOCK_BYTES
        return [
            Location(self.segment.segment_id, 1 + index * blocks)
            for index in range(first, first + stored)
        ]

    def pages(self) -> RecoveredPages:
        """Returns the records written so far."""
        return table_pages(self._table, self.segment.segment_id, self.segment.slot_bytes)

    def seal(self) -> None:
        """Writes the footer, cuts the preallocated rest off and closes the file.

        When the disk fails at it, the failure is counted and the segment can still be read: a
        later process finds its records one by one.
        """
        context, segment = self._context, self.segment
        end = segment.file_bytes
        try:
            end = write_footer(
                context.io,
                self._fd,
                self._table,
                segment.segment_id,
                segment.slot_bytes,
                segment.namespace,
                sync=context.config.fsync != "none",
                failpoint=context.failpoint,
            )
            footer_bytes = end - record_offset(len(self._table), segment.slot_bytes)
            context.counters.add("bytes_written", footer_bytes)
        except OSError:
            context.counters.error("io_seal")
        finally:
            self.close()
        context.catalog.mark_sealed(segment, end)
        context.counters.add("segments_sealed")

    def close(self) -> None:
        """Closes the file without sealing it."""
        with contextlib.suppress(OSError):
            self._context.io.close(self._fd)

    def _write_run(
        self, slots: Sequence[ByteArray], at: int, with_checksum: bool, failed: list[int]
    ) -> None:
        offset = record_offset(len(self._table) + at, self.segment.slot_bytes)
        try:
            if with_checksum:
                for slot in slots:
                    seal(slot)
            self._context.write_slots(self._fd, slots, offset)
        except (OSError, RecordError):  # the latter if a header changed during the call
            self._context.counters.error("io_write")
            failed.append(at)


def _publish(context: DiskContext, fd: int, temp: Path, path: Path) -> None:
    if context.config.fsync == "always":
        context.io.sync(fd)
    context.io.rename(temp, path)
    if context.config.fsync == "always":
        sync_folder(context.io, path.parent)
