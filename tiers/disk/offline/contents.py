"""Counts what lies in a disk tier's folder, by namespace."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES, RecoveredPages
from sglang_ext.tiers.disk.offline.survey import NamespaceFolder, SegmentFile, examine, is_sealed
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.layout import SegmentHeader
from sglang_ext.tiers.disk.segments.recovery import Recovered, SegmentState
from sglang_ext.tiers.records.quality import name_of
from sglang_ext.tiers.records.record import HEADER_BYTES, RAW_CODEC, RecordError, parse_header
from sglang_ext.tiers.records.seals import RecordSeals

_COUNTED = (SegmentState.SEALED, SegmentState.RESEALED, SegmentState.DAMAGED_FOOTER)
BEING_WRITTEN = "being_written"
"""State of a segment that a server may be writing to: its pages are a moment's, and apart."""


@dataclass
class Contents:
    """What lies in one namespace.

    Attributes:
        namespace: the folder.
        segments: files that are named as segments.
        num_bytes: of these, as long as they are.
        pages: records in their tables; what a server gave up and has not overwritten counts too.
        pages_being_written: records in segments without a table yet, which a server writes to.
        page_bytes: of the blocks that they take.
        free_slots: whole slots in segments without a codec in which no record lies.
        free_bytes: of all places in segments in which no record lies.
        states: segments by what was found, `SegmentState` values or `BEING_WRITTEN`.
        qualities: pages by quality.
        codecs: pages by codec and level; those of slots are raw.
        adapters: pages by the digest of their LoRA adapter, in hex; "" for none.
        oldest_s: when a segment was used last, of the one used longest ago; since the epoch.
        newest_s: the same of the one that was used last.
    """

    namespace: NamespaceFolder
    segments: int = 0
    num_bytes: int = 0
    pages: int = 0
    pages_being_written: int = 0
    page_bytes: int = 0
    free_slots: int = 0
    free_bytes: int = 0
    states: Counter[str] = field(default_factory=Counter)
    qualities: Counter[str] = field(default_factory=Counter)
    codecs: Counter[str] = field(default_factory=Counter)
    adapters: Counter[str] = field(default_factory=Counter)
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def add_file(self, segment: SegmentFile) -> None:
        """Counts a file."""
        used_s = segment.used_s
        self.oldest_s = min(self.oldest_s, used_s) if self.segments else used_s
        self.newest_s = max(self.newest_s, used_s)
        self.segments += 1
        self.num_bytes += segment.num_bytes

    def add_pages(self, segment: SegmentFile, found: Recovered) -> None:
        """Counts the records of a segment, and the places in which none lies."""
        pages = found.pages
        self.pages += len(pages)
        taken = int(pages.num_blocks.sum())
        self.page_bytes += taken * BLOCK_BYTES
        places = found.end_block - 1
        heading, slot_blocks = segment.heading, segment.slot_bytes // BLOCK_BYTES
        if found.state is SegmentState.RESEALED and isinstance(heading, SegmentHeader):
            places = max(places, heading.num_slots * slot_blocks)
        self.free_bytes += (places - taken) * BLOCK_BYTES
        if not found.packed:
            self.free_slots += (places - taken) // slot_blocks
            self.codecs[RAW_CODEC] += len(pages)
        self.qualities.update(name_of(quality) for quality in pages.quality.tolist())
        adapters, counts = np.unique(pages.lora, axis=0, return_counts=True)
        for adapter, count in zip(adapters, counts.tolist(), strict=True):
            self.adapters[adapter.tobytes().hex() if adapter.any() else ""] += count


def count_contents(
    io: FileIO,
    namespaces: Sequence[NamespaceFolder],
    segments: Sequence[SegmentFile],
    seals: RecordSeals,
    *,
    has_server: bool,
    on_bytes: Callable[[int], None],
) -> list[Contents]:
    """Counts what lies in each namespace.

    Args:
        io: system calls.
        namespaces: from `find_segments`.
        segments: from `find_segments`.
        seals: what proves tables and records.
        has_server: whether a server may be writing to segments.
        on_bytes: told of the bytes of each segment that was counted.
    """
    found = {namespace.path: Contents(namespace) for namespace in namespaces}
    for segment in segments:
        contents = found[segment.namespace.path]
        contents.add_file(segment)
        if has_server and not is_sealed(io, segment):
            contents.states[BEING_WRITTEN] += 1
            contents.pages_being_written += len(examine(io, segment, seals).pages)
        else:
            recovered = examine(io, segment, seals)
            contents.states[recovered.state.value] += 1
            if recovered.state in _COUNTED:
                contents.add_pages(segment, recovered)
                if recovered.packed:
                    contents.codecs.update(_codecs(io, segment, recovered.pages, seals))
        on_bytes(segment.num_bytes)
    return list(found.values())


def _codecs(
    io: FileIO, segment: SegmentFile, pages: RecoveredPages, seals: RecordSeals
) -> Counter[str]:
    """Records by codec and level, which only their own headers say."""
    found: Counter[str] = Counter()
    try:
        fd = io.open(segment.path, os.O_RDONLY)
    except OSError:
        return Counter(unreadable=len(pages))
    try:
        start = np.zeros(HEADER_BYTES, np.uint8)
        for block, num_blocks in zip(pages.block.tolist(), pages.num_blocks.tolist(), strict=True):
            try:
                io.preadv(fd, [start.data], block * BLOCK_BYTES)
                plain = seals.plain_header(start, segment.namespace.digest)
                meta, _ = parse_header(plain, num_blocks * BLOCK_BYTES)
                found[meta.codec if meta.codec == RAW_CODEC else f"{meta.codec}.{meta.level}"] += 1
            except (OSError, RecordError):
                found["unreadable"] += 1
    finally:
        io.close(fd)
    return found
