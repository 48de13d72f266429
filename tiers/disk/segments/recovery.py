"""Finding the records of segments that an earlier process wrote.

A sealed segment costs one read of its end. One that was never sealed (its process was killed) is
read record by record, every checksum verified, up to the first place that holds none: everything
acknowledged lies before it, because records are written and acknowledged in order. One whose free
places were being filled (its length says so), or whose footer is damaged, is read in the same way
to its end; so is one whose footer ends, or was to end, at the preallocated end: it is as long as
one that was never sealed, but not zeros there. All are then sealed.

Where records are packed, the length in one record's header leads to the next, and behind damage
the search goes on block by block. Holes of a sparse file are passed over unread, however long.

Blocks that the disk does not give cost the records that lie there. The file is left as it is then:
the next start may be given more.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_ext.tiers.base import (
    BLOCK_BYTES,
    MAX_RECORD_BLOCKS,
    RecoveredPages,
    record_blocks,
)
from sglang_ext.tiers.disk.segments.fileio import FileIO, aligned_array, read_all, read_small
from sglang_ext.tiers.disk.segments.layout import (
    CHECKSUM_BYTES,
    MAX_SLOTS,
    FutureVersionError,
    LockedFooterError,
    SegmentHeader,
    SegmentTable,
    Trailer,
    decode_footer,
    decode_header,
    decode_trailer,
    reopened_file_bytes,
    table_pages,
)
from sglang_ext.tiers.disk.segments.sealing import write_footer
from sglang_ext.tiers.records.record import MAGIC, ByteArray
from sglang_ext.tiers.records.seals import CHECKSUMS, FooterSeal, RecordSeals

_TAIL_BYTES = 64 << 10
_SCAN_BYTES = 8 << 20
_MOST_UNREAD = 64  # blocks that a disk does not give: each may take it seconds, and the search ends


class SegmentState(enum.Enum):
    """What recovery made of a file that is named as a segment."""

    SEALED = "sealed"
    RESEALED = "resealed"  # scanned, then sealed
    EMPTY = "empty"  # ours, and without a record
    DAMAGED_FOOTER = "damaged_footer"  # scanned, then sealed
    STALE_LAYOUT = "stale_layout"  # of this namespace, with records of another size
    LOCKED = "locked_segment"  # protected, and its key is not here; or not, and a key is asked for
    FOREIGN = "foreign_file"
    FUTURE = "future_version"
    UNREADABLE = "damaged_segment"


@dataclass(frozen=True, slots=True)
class Recovered:
    """One segment after recovery.

    Attributes:
        state: what was found.
        pages: its records; empty unless the state allows reading.
        end_block: records in blocks [1, end_block) may be read.
        file_bytes: the file's size now.
        packed: whether records take the blocks they fill, and not whole slots.
        bytes_written: what sealing wrote.
        is_partly_unread: whether there are blocks, of records or of the table, that the disk did
            not give.
    """

    state: SegmentState
    pages: RecoveredPages
    end_block: int
    file_bytes: int
    packed: bool = False
    bytes_written: int = 0
    is_partly_unread: bool = False


@dataclass(frozen=True, slots=True)
class _Sought:
    """A file that is named as a segment, and what it has to be; see `recover_segment`."""

    io: FileIO
    path: Path
    segment_id: int
    namespace: bytes
    slot_bytes: int
    seals: RecordSeals
    past_holes: bool

    def mismatch(self, found: SegmentHeader | Trailer) -> SegmentState | None:
        """What a file is whose header or trailer says something else; None where it says this."""
        if (found.segment_id, found.namespace) != (self.segment_id, self.namespace):
            return SegmentState.FOREIGN
        if found.slot_bytes != self.slot_bytes:
            return SegmentState.STALE_LAYOUT
        if found.protected is not (self.seals.footers is not None):
            return SegmentState.LOCKED
        return None


def recover_segment(
    io: FileIO,
    path: Path,
    segment_id: int,
    namespace: bytes,
    slot_bytes: int,
    *,
    sync: bool,
    seals: RecordSeals = CHECKSUMS,
    past_holes: bool = False,
) -> Recovered:
    """Returns the records of the segment at `path`; seals it if it is not. Never raises OSError.

    Args:
        io: the system calls.
        path: the file.
        segment_id: the id in its name.
        namespace: digest of the namespace that the folder belongs to.
        slot_bytes: size of the namespace's slots.
        sync: wait for the device when sealing.
        seals: what proves its records.
        past_holes: whether to look behind the first place that holds no record, too, where the
            segment was never sealed. Behind damage there may be records that were acknowledged,
            behind the last write of a process that was killed some that were not.
    """
    sought = _Sought(io, path, segment_id, namespace, slot_bytes, seals, past_holes)
    found, table = _examine(sought)
    if table is None:
        return found
    try:
        fd = io.open(path, os.O_RDWR)
    except OSError:
        return found  # it cannot be written to, as it was read all the same
    try:
        if io.num_names(fd) > 1:  # whoever has the others may be writing to it
            return found
        end = write_footer(io, fd, table, segment_id, namespace, sync=sync, seal=seals.footers)
    except OSError:
        end = found.file_bytes  # a full or failing disk: the records are there all the same
    finally:
        io.close(fd)
    footer_bytes = max(0, end - table.end_block * BLOCK_BYTES)
    return replace(found, file_bytes=end, bytes_written=footer_bytes)


def examine_segment(
    io: FileIO,
    path: Path,
    segment_id: int,
    namespace: bytes,
    slot_bytes: int,
    *,
    seals: RecordSeals = CHECKSUMS,
    past_holes: bool = False,
) -> Recovered:
    """Like `recover_segment`, and leaves the file as it is."""
    return _examine(_Sought(io, path, segment_id, namespace, slot_bytes, seals, past_holes))[0]


def _examine(sought: _Sought) -> tuple[Recovered, SegmentTable | None]:
    """What lies in a segment; with the table to seal it with where it was scanned."""
    try:
        file_bytes = sought.path.stat().st_size
        try:
            return _read_or_scan(sought, file_bytes)
        except FutureVersionError:
            return _nothing(SegmentState.FUTURE, file_bytes), None
        except LockedFooterError:
            return _nothing(SegmentState.LOCKED, file_bytes), None
    except OSError:
        return _nothing(SegmentState.UNREADABLE, 0), None


def _read_or_scan(sought: _Sought, file_bytes: int) -> tuple[Recovered, SegmentTable | None]:
    io, path = sought.io, sought.path
    trailer, pages, tail_error = None, None, None
    try:
        trailer, pages = read_footer(io, path, file_bytes, sought.seals.footers)
    except OSError as error:
        tail_error = error
    if trailer is not None:
        if (state := sought.mismatch(trailer)) is not None:
            return _nothing(state, file_bytes), None
        if pages is not None:
            end = trailer.end_block
            return Recovered(SegmentState.SEALED, pages, end, file_bytes, trailer.packed), None
    header = decode_header(read_small(io, path, 0, BLOCK_BYTES))
    if header is not None and (state := sought.mismatch(header)) is not None:
        return _nothing(state, file_bytes), None
    return _scan_whole(sought, file_bytes, header, trailer, tail_error)


def _scan_whole(
    sought: _Sought,
    file_bytes: int,
    header: SegmentHeader | None,
    trailer: Trailer | None,
    tail_error: OSError | None,
) -> tuple[Recovered, SegmentTable | None]:
    """Looks for records in a segment without a table that can be read."""
    io, path = sought.io, sought.path
    # Only a segment that was never sealed still has the size it was preallocated at, or one whose
    # footer ends right there. The last block tells: it is zeros until a footer is begun, and ends
    # with zeros until that is whole.
    end_block = b""
    if (
        header is not None
        and file_bytes == header.file_bytes
        and trailer is None
        and tail_error is None
    ):
        end_block = read_small(io, path, file_bytes - BLOCK_BYTES, BLOCK_BYTES)
    never_sealed = bool(end_block) and not any(end_block[-CHECKSUM_BYTES:])
    was_reopened = (
        header is not None and file_bytes == reopened_file_bytes(header) and trailer is None
    )
    # With neither header nor trailer the version is not known; a walk finds slots as well.
    source = header or trailer
    table = SegmentTable(sought.slot_bytes // BLOCK_BYTES, packed=source is None or source.packed)
    stop_at_hole = never_sealed and not any(end_block) and not sought.past_holes
    places = _Places(io, stop_at_hole=stop_at_hole)
    begun = _scan(places, path, sought.namespace, table, sought.seals)
    is_partly_unread = tail_error is not None or bool(places.unread)
    if not len(table):
        if is_partly_unread:
            raise tail_error or OSError(errno.EIO, "no block of a record was read")
        if sought.seals.footers is not None and begun:
            return _nothing(SegmentState.LOCKED, file_bytes), None
        ours = header is not None or trailer is not None
        return _nothing(SegmentState.EMPTY if ours else SegmentState.FOREIGN, file_bytes), None
    scanned = never_sealed or was_reopened
    state = SegmentState.RESEALED if scanned else SegmentState.DAMAGED_FOOTER
    found = Recovered(
        state,
        table_pages(table, sought.segment_id),
        table.end_block,
        file_bytes,
        table.packed,
        is_partly_unread=is_partly_unread,
    )
    return found, None if is_partly_unread else table


def read_footer(
    io: FileIO, path: Path, file_bytes: int, seal: FooterSeal | None
) -> tuple[Trailer | None, RecoveredPages | None]:
    """Reads the end of a segment: its trailer and table, each None when damaged or absent.

    The table is None too where it is not protected as `seal` would, or not at all with None.

    Raises:
        OSError: the disk failed.
        FutureVersionError: sealed by a later release.
        LockedFooterError: sealed with another key.
    """
    start = max(0, file_bytes - _TAIL_BYTES)
    tail = read_small(io, path, start, file_bytes - start)
    trailer = decode_trailer(tail, file_bytes)
    if trailer is None:
        return None, None
    if trailer.footer_offset < start:
        tail = read_small(io, path, trailer.footer_offset, trailer.footer_bytes)
    return trailer, decode_footer(tail[-trailer.footer_bytes :], trailer, seal)


class _Places:
    """Reads what a segment holds, as far as the disk gives it.

    Attributes:
        stop_at_hole: whether nothing is looked for behind the first place without a record. Not
            where that is one which the disk does not give: acknowledged ones lie behind it.
        unread: numbers of the blocks that the disk did not give.
    """

    def __init__(self, io: FileIO, *, stop_at_hole: bool) -> None:
        self.io = io
        self.stop_at_hole = stop_at_hole
        self.unread: set[int] = set()

    def fill(self, fd: int, buffer: ByteArray, first: int) -> int:
        """Reads from a block on; zeros stand for what is not to be had.

        Returns:
            How many blocks: fewer than asked only at the file's end, or where too much is not.
        """
        try:
            return read_all(self.io, fd, [buffer], first * BLOCK_BYTES) // BLOCK_BYTES
        except OSError:
            num_blocks = buffer.size // BLOCK_BYTES
        if num_blocks > 1:
            half = num_blocks // 2 * BLOCK_BYTES
            done = self.fill(fd, buffer[:half], first)
            if done * BLOCK_BYTES < half:
                return done
            return done + self.fill(fd, buffer[half:], first + done)
        if len(self.unread) == _MOST_UNREAD:
            return 0
        self.unread.add(first)
        buffer[:] = 0
        return 1

    def ends_at(self, block: int, num_blocks: int) -> bool:
        """Whether the search is over, as no record lies at a place."""
        if self.unread and any(at in self.unread for at in range(block, block + num_blocks)):
            self.stop_at_hole = False
        return self.stop_at_hole


def _scan(
    places: _Places, path: Path, namespace: bytes, table: SegmentTable, seals: RecordSeals
) -> bool:
    """Reads and verifies the records in order and enters them into an empty table.

    Returns:
        Whether something that was read begins as a record and is none, as one of another key.

    Raises:
        OSError: the file cannot be opened.
    """
    io, slot_blocks, begun = places.io, table.slot_blocks, False
    buffer = aligned_array(
        max(2, _SCAN_BYTES // (slot_blocks * BLOCK_BYTES)) * slot_blocks * BLOCK_BYTES
    )
    fd = io.open(path, os.O_RDONLY)
    try:
        while (data := _skip_hole(io, fd, table, stop_at_hole=places.stop_at_hole)) is not None:
            first = table.end_block
            wanted = buffer
            if (hole := io.next_hole(fd, data)) is not None:  # where no record begins
                wanted = buffer[: (-(-hole // BLOCK_BYTES) - first + slot_blocks) * BLOCK_BYTES]
            num_blocks = places.fill(fd, wanted, first)
            is_end = num_blocks * BLOCK_BYTES < wanted.size
            # What may reach beyond the buffer waits for the next one, which begins with it.
            stop = first + num_blocks - (1 if is_end and table.packed else slot_blocks)
            while table.end_block <= stop and len(table) < MAX_SLOTS:
                at = (table.end_block - first) * BLOCK_BYTES
                rest = buffer[at : num_blocks * BLOCK_BYTES][: slot_blocks * BLOCK_BYTES]
                place = table.end_block
                if _add_if_record(table, rest, namespace, seals):
                    continue
                begun |= _begins_as_record(rest)
                if places.ends_at(place, slot_blocks):
                    return begun
            if is_end or len(table) >= MAX_SLOTS:
                break
    finally:
        io.close(fd)
        table.strip_holes()
    return begun


def _skip_hole(io: FileIO, fd: int, table: SegmentTable, *, stop_at_hole: bool) -> int | None:
    """Enters places that the file holds no bytes of, behind the last entry, without reading them.

    A file's length costs whoever makes it nothing, and must not decide how long a scan takes.

    Returns:
        The offset of the next bytes; None where there is nothing more to read.
    """
    data = io.next_data(fd, table.end_block * BLOCK_BYTES)
    if data is None:
        return None
    place = 1 if table.packed else table.slot_blocks
    num_blocks = (data // BLOCK_BYTES - table.end_block) // place * place
    entry_blocks = MAX_RECORD_BLOCKS if table.packed else table.slot_blocks
    num_entries = -(-num_blocks // entry_blocks)
    if num_blocks and (stop_at_hole or len(table) + num_entries >= MAX_SLOTS):
        return None
    table.add_holes(num_blocks)
    return data


def _begins_as_record(block: ByteArray) -> bool:
    return bytes(block[: len(MAGIC)]) == MAGIC


def _add_if_record(
    table: SegmentTable, slot: ByteArray, namespace: bytes, seals: RecordSeals
) -> bool:
    """Enters what lies at the start of `slot`: a record, or a hole where there is none."""
    if _begins_as_record(slot):  # most blocks behind damage are no record's first
        found = seals.open_any(slot, namespace)
        if found is not None:
            meta, payload_bytes = found
            table.add(meta.page_hash, meta.lora, meta.quality, record_blocks(payload_bytes))
            return True
    table.add_hole()
    return False


def _nothing(state: SegmentState, file_bytes: int) -> Recovered:
    return Recovered(state, RecoveredPages.empty(), 1, file_bytes)


def identify(io: FileIO, path: Path, segment_id: int) -> bytes | None:
    """Returns the namespace of the segment at `path`; None when it is not ours to touch.

    Reads the first block, and the last where the first is damaged.
    """
    found = heading_of(io, path, segment_id)
    return found.namespace if found is not None else None


def heading_of(io: FileIO, path: Path, segment_id: int) -> SegmentHeader | Trailer | None:
    """Returns what the first block of a segment says, or its end where that is damaged.

    None when both are, when they are of another segment or of a later release.
    """
    with contextlib.suppress(OSError, FutureVersionError):
        header = decode_header(read_small(io, path, 0, BLOCK_BYTES))
        if header is not None:
            return header if header.segment_id == segment_id else None
        trailer, _ = read_footer(io, path, path.stat().st_size, None)
        if trailer is not None and trailer.segment_id == segment_id:
            return trailer
    return None
