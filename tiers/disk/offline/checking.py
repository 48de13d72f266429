"""Reads every record of a segment and says which are sound. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.offline.survey import SegmentFile, examine, is_sealed
from sglang_ext.tiers.disk.segments.fileio import FileIO, aligned_array, read_all
from sglang_ext.tiers.disk.segments.layout import SegmentHeader
from sglang_ext.tiers.disk.segments.recovery import Recovered, SegmentState
from sglang_ext.tiers.records.checks import RecordKey
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    MAGIC,
    ByteArray,
    RecordError,
    parse_header,
)
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.records.soundness import Soundness, soundness_of

_READABLE = (SegmentState.SEALED, SegmentState.RESEALED, SegmentState.DAMAGED_FOOTER)
_SCANNED = (SegmentState.RESEALED, SegmentState.DAMAGED_FOOTER, SegmentState.EMPTY)


class ReadProgress(Protocol):
    """Whoever is told how far reading is."""

    def __call__(self, num_bytes: int) -> None:
        """So many bytes were read."""

    def skip(self, num_bytes: int) -> None:
        """So many bytes need not be read."""


class Fault(NamedTuple):
    """A place that is not sound.

    Attributes:
        block: where it begins in the segment, in blocks of 4096 bytes; 0 for the whole file.
        soundness: what it is.
        reason: a `VerifyResult` or `SegmentState` value, or `io_read` or `not_whole`.
    """

    block: int
    soundness: Soundness
    reason: str


@dataclass
class SegmentCheck:
    """What became of checking a segment.

    Attributes:
        segment: the file.
        found: its table, or what a scan of it brought; None where it was left out.
        sound: records that are.
        faults: what is not.
        left_out: why it was not checked; "" if it was.
        behind: sound records that the next start of a server would not find, as they lie behind
            damage in a segment that was never sealed.
    """

    segment: SegmentFile
    found: Recovered | None = None
    sound: int = 0
    faults: list[Fault] = field(default_factory=list)
    left_out: str = ""
    behind: int = 0


def check_segment(
    io: FileIO,
    segment: SegmentFile,
    seals: RecordSeals,
    *,
    has_server: bool,
    progress: ReadProgress,
) -> SegmentCheck:
    """Checks each record of a segment. Never raises OSError.

    Args:
        io: system calls.
        segment: the file.
        seals: what proves its records.
        has_server: whether a server may be writing to it; then it is left out if it is not sealed.
        progress: told of bytes that were read, and of the rest of the file, which is not.
    """
    if has_server and not is_sealed(io, segment):
        progress.skip(segment.num_bytes)
        return SegmentCheck(segment, left_out="being written")
    check = _Checker(io, segment, seals, progress).check()
    if check.faults and not segment.is_unchanged():
        # What a server wrote meanwhile is no damage.
        return SegmentCheck(segment, left_out="changed or removed while it was read")
    return check


class _Checker:
    """Checks one segment."""

    def __init__(
        self,
        io: FileIO,
        segment: SegmentFile,
        seals: RecordSeals,
        progress: ReadProgress,
    ) -> None:
        self._io = io
        self._segment = segment
        self._seals = seals
        self._progress = progress
        self._rest = segment.num_bytes

    def check(self) -> SegmentCheck:
        """Reads the table, then the records, then what lies where there should be none."""
        found = examine(self._io, self._segment, self._seals, past_holes=True)
        check = SegmentCheck(self._segment, found)
        check.faults += _faults_of_file(self._segment, found)
        try:
            fd = self._io.open(self._segment.path, os.O_RDONLY)
        except OSError:
            if found.state is not SegmentState.UNREADABLE:
                check.faults.append(Fault(0, Soundness.UNREADABLE, "io_read"))
        else:
            try:
                if found.state in _READABLE:
                    self._check_records(fd, check, found)
                if found.state in _SCANNED:
                    self._check_places(fd, check, found)
                elif found.state is SegmentState.LOCKED:
                    self._check_locked(fd, check)
            finally:
                self._io.close(fd)
        self._progress.skip(self._rest)
        return check

    def _check_records(self, fd: int, check: SegmentCheck, found: Recovered) -> None:
        pages, namespace = found.pages, self._segment.namespace.digest
        slot = aligned_array(self._segment.slot_bytes)
        for row in np.argsort(pages.block).tolist():
            block = int(pages.block[row])
            record = slot[: int(pages.num_blocks[row]) * BLOCK_BYTES]
            page_hash, lora = pages.key_of(row)
            key = RecordKey(page_hash, namespace, lora)
            fault = self._fault_of(fd, record, block, key)
            if fault is None:
                check.sound += 1
            else:
                check.faults.append(fault)
            self._rest -= record.size
            self._progress(record.size)

    def _fault_of(self, fd: int, record: ByteArray, block: int, key: RecordKey) -> Fault | None:
        try:
            num_bytes = read_all(self._io, fd, [record], block * BLOCK_BYTES)
        except OSError:
            return Fault(block, Soundness.UNREADABLE, "io_read")
        if num_bytes < record.size:
            return Fault(block, Soundness.CORRUPT, "missing")
        (result,) = self._seals.open([record], [key])
        soundness = soundness_of(result)
        return None if soundness is Soundness.SOUND else Fault(block, soundness, result.value)

    def _check_places(self, fd: int, check: SegmentCheck, found: Recovered) -> None:
        """Finds what begins as a record where the scan found none that is whole."""
        taken = dict(zip(found.pages.block.tolist(), found.pages.num_blocks.tolist(), strict=True))
        for block in self._places(fd, taken):
            fault = self._fault_at(fd, block)
            if fault is not None:
                check.faults.append(fault or Fault(block, Soundness.CORRUPT, "not_whole"))
        if found.state is SegmentState.RESEALED:
            reached = examine(self._io, self._segment, self._seals)
            check.behind = len(found.pages) - len(reached.pages)

    def _check_locked(self, fd: int, check: SegmentCheck) -> None:
        """Says of each record of a segment whose table cannot be opened why that is so."""
        for block in self._places(fd, {}):
            fault = self._fault_at(fd, block)
            if fault is not None:
                locked = Fault(block, Soundness.UNAUTHENTIC, SegmentState.LOCKED.value)
                check.faults.append(fault or locked)

    def _places(self, fd: int, taken: dict[int, int]) -> Iterator[int]:
        """Blocks at which a record may begin and none of those that are known lies.

        None lies in a hole of the file, which is not looked through.
        """
        heading = self._segment.heading
        is_packed = heading is None or heading.packed
        step = 1 if is_packed else self._segment.slot_bytes // BLOCK_BYTES
        block, end = 1, self._segment.num_bytes // BLOCK_BYTES
        while block < end:
            data = self._next_data(fd, block)
            if data > block:
                block += -(-(data - block) // step) * step
            elif block in taken:
                block += taken[block]
            else:
                yield block
                block += step

    def _next_data(self, fd: int, block: int) -> int:
        """The first block from `block` on that the file has bytes of; its end where there is none.

        A block that cannot be told is left to be read.
        """
        try:
            offset = self._io.next_data(fd, block * BLOCK_BYTES)
        except OSError:
            return block
        return (self._segment.num_bytes if offset is None else offset) // BLOCK_BYTES

    def _fault_at(self, fd: int, block: int) -> Fault | tuple[()] | None:
        """What is wrong with the header at a block, which may begin a record.

        Returns:
            None where no record begins; an empty tuple where its header says of nothing wrong.
        """
        start = np.zeros(HEADER_BYTES, np.uint8)
        try:
            self._io.preadv(fd, [start.data], block * BLOCK_BYTES)
            if start[: len(MAGIC)].tobytes() != MAGIC:
                return None
            parse_header(self._seals.plain_header(start, self._segment.namespace.digest), 1 << 62)
        except RecordError as error:
            return Fault(block, soundness_of(error.kind), error.kind.value)
        except OSError:
            return Fault(block, Soundness.UNREADABLE, "io_read")
        return ()


def _faults_of_file(segment: SegmentFile, found: Recovered) -> list[Fault]:
    """What is wrong with a segment besides its records."""
    if found.state is SegmentState.UNREADABLE:
        return [Fault(0, Soundness.UNREADABLE, "io_read")]
    if found.state in (SegmentState.FOREIGN, SegmentState.FUTURE):
        return [Fault(0, Soundness.UNREADABLE, found.state.value)]
    heading = segment.heading
    never_sealed = isinstance(heading, SegmentHeader) and segment.num_bytes == heading.file_bytes
    if found.state is SegmentState.DAMAGED_FOOTER or (
        found.state is SegmentState.EMPTY and not never_sealed
    ):
        return [Fault(0, Soundness.CORRUPT, SegmentState.DAMAGED_FOOTER.value)]
    return []
