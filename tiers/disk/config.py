"""Settings of the disk tier and the arithmetic of segment sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.segments.layout import MAX_SLOTS, segment_file_bytes
from sglang_ext.tiers.errors import TierConfigError

MIN_SLOTS = 8
"""A segment holds at least this many records, whatever the size bound."""

SEGMENTS_PER_BOUND = 8
"""Segments are made small enough that this many fit under the size bound, if slots allow."""

_MODES = ("auto", "on", "off")
_FSYNC = ("none", "seal", "always")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """How a disk tier is set up.

    Attributes:
        path: folder of the tier; made if absent. One live process owns it at a time.
        max_bytes: bound on the bytes of all segment files in the folder, of every namespace.
        min_free_bytes: the tier does not grow while the file system has less than this left.
        segment_bytes: size of a segment file; less under a small `max_bytes`.
        direct_io: "auto" uses O_DIRECT where a trial write and read succeed; "on" insists.
        fsync: "none" survives a killed process, not a power cut; "seal" syncs a segment when it
            is sealed; "always" syncs before a write returns.
        helper_threads: how many runs of neighbours are read or written at once beside the
            caller's; one more thread than that takes checksums meanwhile. With 0 the caller does
            everything, one run after the other.
    """

    path: Path
    max_bytes: int
    min_free_bytes: int
    segment_bytes: int = 256 << 20
    direct_io: Literal["auto", "on", "off"] = "auto"
    fsync: Literal["none", "seal", "always"] = "none"
    helper_threads: int = 2

    def check(self) -> None:
        """Refuses settings that cannot work.

        Raises:
            TierConfigError: with one sentence that says what to change.
        """
        smallest = 2 * segment_file_bytes(MIN_SLOTS, BLOCK_BYTES)
        if self.max_bytes < smallest:
            raise TierConfigError(
                f"the disk tier's size must be at least {smallest} bytes (two small segments),"
                f" got {self.max_bytes}; raise the size or turn the disk tier off"
            )
        if self.segment_bytes < BLOCK_BYTES:
            raise TierConfigError(
                f"segment_bytes must be at least {BLOCK_BYTES}, got {self.segment_bytes}"
            )
        if self.min_free_bytes < 0:
            raise TierConfigError(f"min_free_bytes must not be negative, got {self.min_free_bytes}")
        if self.direct_io not in _MODES:
            raise TierConfigError(f"direct_io must be one of {_MODES}, got {self.direct_io!r}")
        if self.fsync not in _FSYNC:
            raise TierConfigError(f"fsync must be one of {_FSYNC}, got {self.fsync!r}")
        if not 0 <= self.helper_threads <= 64:
            raise TierConfigError(f"helper_threads must be in [0, 64], got {self.helper_threads}")

    @property
    def num_helpers(self) -> int:
        """Threads beside the caller: one more than calls at once, which computes checksums."""
        return self.helper_threads + 1 if self.helper_threads else 0

    def slots_per_segment(self, slot_bytes: int) -> int:
        """Returns how many records of `slot_bytes` one segment holds.

        Raises:
            TierConfigError: two segments of `MIN_SLOTS` records do not fit in `max_bytes`.
        """
        target = min(self.segment_bytes, self.max_bytes // SEGMENTS_PER_BOUND)
        slots = max(MIN_SLOTS, min(MAX_SLOTS, target // slot_bytes))
        while slots > MIN_SLOTS and segment_file_bytes(slots, slot_bytes) > target:
            slots -= 1
        needed = 2 * segment_file_bytes(slots, slot_bytes)
        if needed > self.max_bytes:
            raise TierConfigError(
                f"a page takes {slot_bytes} bytes, so the disk tier needs at least {needed} bytes"
                f" (two segments of {slots} pages), got {self.max_bytes}; raise its size"
            )
        return slots
