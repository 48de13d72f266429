"""Sealing: the step that turns an append-only file into one that is found by its end.

Order matters, for a process killed between any two steps:

1. footer and trailer are written behind the last record, inside the preallocated space; the
   file's end is still zeros, so the segment still counts as never sealed;
2. (fsync, if asked)
3. the file is cut right behind the trailer: one atomic step that makes it sealed.

Where the footer ends exactly at the file's end there is nothing to cut, and a half-written footer
fails its checksum, which also means never sealed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.segments.fileio import FileIO, aligned_array, write_all
from sglang_ext.tiers.disk.segments.layout import SegmentTable, encode_footer
from sglang_ext.tiers.records.seals import FooterSeal


def write_footer(
    io: FileIO,
    fd: int,
    table: SegmentTable,
    segment_id: int,
    namespace: bytes,
    *,
    sync: bool,
    seal: FooterSeal | None,
    failpoint: Callable[[str], None] | None = None,
) -> int:
    """Seals the segment open at `fd`, whose records `table` lists.

    Args:
        io: the system calls.
        fd: the file.
        table: its records.
        segment_id: its id.
        namespace: its namespace.
        sync: wait for the device.
        seal: what protects the table, if the segment is protected.
        failpoint: a test's hook.

    Returns:
        The file's size from now on.

    Raises:
        OSError: the disk failed; the segment counts as never sealed and loses nothing.
    """
    footer = encode_footer(table, segment_id, namespace, seal)
    block = aligned_array(len(footer))
    block[:] = np.frombuffer(footer, np.uint8)
    offset = table.end_block * BLOCK_BYTES
    if failpoint:
        failpoint("seal:before_footer")
    write_all(io, fd, [block], offset)
    if sync:
        io.sync(fd)
    if failpoint:
        failpoint("seal:before_truncate")
    io.truncate(fd, offset + len(footer))
    if sync:
        io.sync(fd)
    if failpoint:
        failpoint("seal:done")
    return offset + len(footer)
