"""Takes segments, or records out of them, from a folder that no server holds.

A record goes by the format's own means: the segment is sealed anew with a table in which there is
nothing at its place, as where records are given up (`sglang_ext.tiers.disk.reused_segments`). A
kill at any instant leaves a file whose table is not believed; the next server then finds every
whole record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.folder import remove_temp_files
from sglang_ext.tiers.disk.offline.survey import NamespaceFolder, SegmentFile, examine
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.layout import (
    SegmentHeader,
    SegmentTable,
    reopened_file_bytes,
)
from sglang_ext.tiers.disk.segments.recovery import Recovered, SegmentState, recover_segment
from sglang_ext.tiers.disk.segments.sealing import write_footer
from sglang_ext.tiers.records.seals import RecordSeals

_NAMESPACE_FILE = "ns.msgpack"


def remove_segment(segment: SegmentFile) -> None:
    """Removes a segment's file; whatever lies in its folder's place is not followed.

    Raises:
        OSError: it cannot be removed.
    """
    with _opened(segment.namespace.path) as folder:
        os.unlink(segment.path.name, dir_fd=folder)
        os.fsync(folder)


def remove_empty_namespace(io: FileIO, namespace: NamespaceFolder) -> bool:
    """Removes a namespace's folder if nothing but its own small file is left in it.

    Raises:
        OSError: it cannot be removed.
    """
    remove_temp_files(io, namespace.path)
    with _opened(namespace.path) as folder:
        if not set(os.listdir(folder)) <= {_NAMESPACE_FILE}:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NAMESPACE_FILE, dir_fd=folder)
    os.rmdir(namespace.path)
    return True


def cut_out(
    io: FileIO,
    segment: SegmentFile,
    found: Recovered,
    blocks: Collection[int],
    seals: RecordSeals,
) -> None:
    """Seals a segment anew without the records at some blocks; the others stay where they are.

    Args:
        io: system calls.
        segment: the file.
        found: its records.
        blocks: where those begin that go; not all of them.
        seals: what protects its table.

    Raises:
        OSError: the disk failed; whole records are found all the same.
    """
    digest = segment.namespace.digest
    _, used_ns = segment.stamp  # its pages were used no later than before
    if found.state is not SegmentState.SEALED:
        # Without a table to be believed: as the next server would do it, but past damage.
        recover_segment(
            io,
            segment.path,
            segment.segment_id,
            digest,
            segment.slot_bytes,
            sync=True,
            seals=seals,
            past_holes=True,
        )
        if examine(io, segment, seals).state is not SegmentState.SEALED:
            raise OSError(f"{segment.place} could not be sealed")
        os.utime(segment.path, ns=(used_ns, used_ns), follow_symlinks=False)
        return
    table = _table_without(segment, found, blocks)
    fd = io.open(segment.path, os.O_RDWR)
    try:
        if io.num_names(fd) > 1:
            raise OSError(f"{segment.place} has hard links to it, which would change as well")
        if isinstance(segment.heading, SegmentHeader):
            io.truncate(fd, reopened_file_bytes(segment.heading))
            io.sync(fd)
        write_footer(io, fd, table, segment.segment_id, digest, sync=True, seal=seals.footers)
        os.utime(fd, ns=(used_ns, used_ns))
    finally:
        io.close(fd)


def _table_without(segment: SegmentFile, found: Recovered, blocks: Collection[int]) -> SegmentTable:
    pages = found.pages
    table = SegmentTable(segment.slot_bytes // BLOCK_BYTES, found.packed)
    for row in np.argsort(pages.block).tolist():
        block = int(pages.block[row])
        if block in blocks:
            continue
        table.add_holes(block - table.end_block)
        table.add(*pages.key_of(row), int(pages.quality[row]), int(pages.num_blocks[row]))
    table.add_holes(found.end_block - table.end_block)
    return table


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)
