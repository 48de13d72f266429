"""Finding the records of segments that an earlier process wrote.

A sealed segment costs one read of its end. One that was never sealed (its process was killed) is
read record by record, every checksum verified, up to the first slot that is no record: everything
acknowledged lies before it, because slots are filled in order and acknowledged in order. A sealed
one whose footer is damaged is read in the same way, to its end. Either is then sealed.
"""

from __future__ import annotations

import contextlib
import enum
import os
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.tiers.base import BLOCK_BYTES, RecoveredPages
from sglang_ext.tiers.disk.fileio import FileIO, aligned_array, read_all, read_small
from sglang_ext.tiers.disk.layout import (
    FutureVersionError,
    SegmentTable,
    Trailer,
    decode_footer,
    decode_header,
    decode_trailer,
    record_offset,
    table_pages,
)
from sglang_ext.tiers.disk.sealing import write_footer
from sglang_ext.tiers.record import ByteArray, RecordError, checksum_matches, parse_header

_TAIL_BYTES = 64 << 10
_SCAN_BYTES = 8 << 20


class SegmentState(enum.Enum):
    """What recovery made of a file that is named as a segment."""

    SEALED = "sealed"
    RESEALED = "resealed"  # scanned, then sealed
    EMPTY = "empty"  # ours, and without a record
    DAMAGED_FOOTER = "damaged_footer"  # scanned, then sealed
    STALE_LAYOUT = "stale_layout"  # of this namespace, with records of another size
    FOREIGN = "foreign_file"
    FUTURE = "future_version"
    UNREADABLE = "damaged_segment"


@dataclass(frozen=True, slots=True)
class Recovered:
    """One segment after recovery.

    Attributes:
        state: what was found.
        pages: its records; empty unless the state allows reading.
        num_records: slots [0, num_records) that may be read.
        file_bytes: the file's size now.
        bytes_written: what sealing wrote.
    """

    state: SegmentState
    pages: RecoveredPages
    num_records: int
    file_bytes: int
    bytes_written: int = 0


def recover_segment(
    io: FileIO, path: Path, segment_id: int, namespace: bytes, slot_bytes: int, *, sync: bool
) -> Recovered:
    """Returns the records of the segment at `path`; seals it if it is not. Never raises OSError.

    Args:
        io: the system calls.
        path: the file.
        segment_id: the id in its name.
        namespace: digest of the namespace that the folder belongs to.
        slot_bytes: size of the namespace's records.
        sync: wait for the device when sealing.
    """
    try:
        file_bytes = path.stat().st_size
        try:
            return _recover(io, path, segment_id, namespace, slot_bytes, file_bytes, sync)
        except FutureVersionError:
            return _nothing(SegmentState.FUTURE, file_bytes)
    except OSError:
        return _nothing(SegmentState.UNREADABLE, 0)


def _recover(
    io: FileIO,
    path: Path,
    segment_id: int,
    namespace: bytes,
    slot_bytes: int,
    file_bytes: int,
    sync: bool,
) -> Recovered:
    trailer, pages = read_footer(io, path, file_bytes)
    if trailer is not None:
        if (trailer.segment_id, trailer.namespace) != (segment_id, namespace):
            return _nothing(SegmentState.FOREIGN, file_bytes)
        if trailer.slot_bytes != slot_bytes:
            return _nothing(SegmentState.STALE_LAYOUT, file_bytes)
        if pages is not None:
            return Recovered(SegmentState.SEALED, pages, trailer.num_records, file_bytes)
    header = decode_header(read_small(io, path, 0, BLOCK_BYTES))
    if header is not None:
        if (header.segment_id, header.namespace) != (segment_id, namespace):
            return _nothing(SegmentState.FOREIGN, file_bytes)
        if header.slot_bytes != slot_bytes:
            return _nothing(SegmentState.STALE_LAYOUT, file_bytes)
    # Only a segment that was never sealed still has the size it was preallocated at.
    never_sealed = header is not None and file_bytes == header.file_bytes and trailer is None
    table = _scan(io, path, namespace, slot_bytes, file_bytes, stop_at_hole=never_sealed)
    if not len(table):
        ours = header is not None or trailer is not None
        return _nothing(SegmentState.EMPTY if ours else SegmentState.FOREIGN, file_bytes)
    state = SegmentState.RESEALED if never_sealed else SegmentState.DAMAGED_FOOTER
    fd = io.open(path, os.O_RDWR)
    try:
        end = write_footer(io, fd, table, segment_id, slot_bytes, namespace, sync=sync)
    except OSError:
        end = file_bytes  # a full or failing disk: the records are there all the same
    finally:
        io.close(fd)
    pages = table_pages(table, segment_id, slot_bytes)
    footer_bytes = max(0, end - record_offset(len(table), slot_bytes))
    return Recovered(state, pages, len(table), end, footer_bytes)


def read_footer(
    io: FileIO, path: Path, file_bytes: int
) -> tuple[Trailer | None, RecoveredPages | None]:
    """Reads the end of a segment: its trailer and table, each None when damaged or absent.

    Raises:
        OSError: the disk failed.
        FutureVersionError: sealed by a later release.
    """
    start = max(0, file_bytes - _TAIL_BYTES)
    tail = read_small(io, path, start, file_bytes - start)
    trailer = decode_trailer(tail, file_bytes)
    if trailer is None:
        return None, None
    if trailer.footer_offset < start:
        tail = read_small(io, path, trailer.footer_offset, trailer.footer_bytes)
    return trailer, decode_footer(tail[-trailer.footer_bytes :], trailer)


def _scan(
    io: FileIO,
    path: Path,
    namespace: bytes,
    slot_bytes: int,
    file_bytes: int,
    *,
    stop_at_hole: bool,
) -> SegmentTable:
    """Reads and verifies the records in slot order."""
    table = SegmentTable()
    num_slots = max(0, file_bytes - BLOCK_BYTES) // slot_bytes
    at_once = max(1, _SCAN_BYTES // slot_bytes)
    buffer = aligned_array(at_once * slot_bytes).reshape(at_once, slot_bytes)
    fd = io.open(path, os.O_RDONLY)
    try:
        for first in range(0, num_slots, at_once):
            wanted = min(at_once, num_slots - first)
            got = read_all(io, fd, [buffer[:wanted].reshape(-1)], record_offset(first, slot_bytes))
            for slot in buffer[: got // slot_bytes]:
                if not _add_if_record(table, slot, namespace) and stop_at_hole:
                    table.strip_holes()
                    return table
            if got < wanted * slot_bytes:
                break
    finally:
        io.close(fd)
    table.strip_holes()
    return table


def _add_if_record(table: SegmentTable, slot: ByteArray, namespace: bytes) -> bool:
    with contextlib.suppress(RecordError):
        meta, payload_bytes = parse_header(slot)
        if meta.namespace == namespace and checksum_matches(slot, payload_bytes):
            table.add(meta.page_hash, meta.lora, meta.quality)
            return True
    table.add_hole()
    return False


def _nothing(state: SegmentState, file_bytes: int) -> Recovered:
    return Recovered(state, RecoveredPages.empty(), 0, file_bytes)


def identify(io: FileIO, path: Path, segment_id: int) -> bytes | None:
    """Returns the namespace of the segment at `path`; None when it is not ours to touch.

    Reads the first block, and the last where the first is damaged.
    """
    with contextlib.suppress(OSError, FutureVersionError):
        header = decode_header(read_small(io, path, 0, BLOCK_BYTES))
        if header is not None:
            return header.namespace if header.segment_id == segment_id else None
        trailer, _ = read_footer(io, path, path.stat().st_size)
        if trailer is not None and trailer.segment_id == segment_id:
            return trailer.namespace
    return None
