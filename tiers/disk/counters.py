"""What the disk tier counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A snapshot; counts run since the tier was opened.

    Attributes:
        mode: "direct" (O_DIRECT) or "buffered"; "memory" for a tier in DRAM.
        bytes_written: all bytes given to the file system: records, headers, footers, salvage.
        bytes_read: bytes of records read by `read`.
        useful_bytes: payload bytes of `records_written`.
        records_written: records stored, those of pages that the tier had had before among them.
        records_read: records read and found right.
        records_salvaged: records moved out of a segment before it was dropped.
        bytes_moved: bytes of these.
        segments_reused: segments opened again to fill the places of records that were given up.
        records_recovered: records found when namespaces were opened.
        segments: segments in the folder that this release can use, of every namespace.
        segments_sealed: segments sealed.
        segments_dropped: segments removed to make room.
        used_bytes: bytes that count against `max_bytes`, preallocated ones included.
        max_bytes: the bound.
        open_fds: segment files held open for reading.
        errors: by kind: `VerifyResult` values of failed reads, `io_read`, `io_write`, `io_seal`,
            `io_unlink`, `callback`, and what recovery met: `damaged_footer`,
            `damaged_segment`, `foreign_file`, `future_version`, `stale_layout`.
        dropped: records not stored, by reason: `full`, `io`, `malformed`, `foreign`, `closed`,
            `namespace`.
    """

    mode: str
    bytes_written: int
    bytes_read: int
    useful_bytes: int
    records_written: int
    records_read: int
    records_salvaged: int
    bytes_moved: int
    segments_reused: int
    records_recovered: int
    segments: int
    segments_sealed: int
    segments_dropped: int
    used_bytes: int
    max_bytes: int
    open_fds: int
    errors: dict[str, int]
    dropped: dict[str, int]


_TOTALS = (
    "bytes_written", "bytes_read", "useful_bytes", "records_written", "records_read",
    "records_salvaged", "bytes_moved", "segments_reused", "records_recovered", "segments_sealed",
    "segments_dropped",
)  # fmt: skip


class Counters:
    """Named counts in three groups. Thread-safe: one lock guards all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()  # guarded by _lock
        self._errors: Counter[str] = Counter()  # guarded by _lock
        self._dropped: Counter[str] = Counter()  # guarded by _lock

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to a total."""
        with self._lock:
            self._totals[name] += amount

    def error(self, kind: str) -> None:
        """Counts an error."""
        with self._lock:
            self._errors[kind] += 1

    def drop(self, reason: str, amount: int = 1) -> None:
        """Counts records that were not stored."""
        with self._lock:
            self._dropped[reason] += amount

    def snapshot(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Returns copies of totals, errors and dropped, taken at one instant."""
        with self._lock:
            return dict(self._totals), dict(self._errors), dict(self._dropped)

    def stats(
        self, *, mode: str, segments: int, used_bytes: int, max_bytes: int, open_fds: int
    ) -> DiskStats:
        """What was counted, with what the tier says of itself now; see `DiskStats`."""
        totals, errors, dropped = self.snapshot()
        return DiskStats(
            mode=mode,
            segments=segments,
            used_bytes=used_bytes,
            max_bytes=max_bytes,
            open_fds=open_fds,
            errors=errors,
            dropped=dropped,
            **{name: totals.get(name, 0) for name in _TOTALS},
        )
