"""Which segments exist: sizes, ages, owners. The tier's shared state."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Segment:
    """One segment file. Fields that change are guarded by the catalog's lock.

    Attributes:
        segment_id: u32, unique in the folder's life.
        namespace: 32 bytes.
        path: the file.
        slot_bytes: bytes of a slot; no record is longer.
        end_block: records in blocks [1, end_block) may be read. 1 in a namespace that is not open.
        file_bytes: what counts against the bound.
        last_used: time of the last read or write, nanoseconds since the epoch.
        sealed: whether the file has its footer, or will get none.
        packed: whether records take the blocks they fill, and not whole slots.
        read_since_open: whether `last_used` is newer than the file's own time.
        write_failed: whether the disk did not take what was written to it.
        has_other_names: whether there are hard links to it, through which another server may be
            writing; it is read only.
    """

    segment_id: int
    namespace: bytes
    path: Path
    slot_bytes: int
    end_block: int
    file_bytes: int
    last_used: int
    sealed: bool
    packed: bool = False
    read_since_open: bool = False
    write_failed: bool = False
    has_other_names: bool = False


@dataclass(slots=True)
class Namespace:
    """One namespace. `segments` is guarded by the catalog's lock, the rest by the write lock.

    Attributes:
        digest: 32 bytes.
        folder: where its segments lie.
        slot_bytes: bytes of a slot, as asked when it was opened; 0 until then.
        num_slots: slots that a new segment has room for; 0 until opened.
        packed: whether new segments are.
        segments: by id.
        num_by_format: segments by bytes of a slot and whether they are packed; guarded like them.
    """

    digest: bytes
    folder: Path
    slot_bytes: int = 0
    num_slots: int = 0
    packed: bool = False
    segments: dict[int, Segment] = field(default_factory=dict)
    num_by_format: Counter[tuple[int, bool]] = field(default_factory=Counter)

    @property
    def is_open(self) -> bool:
        """Whether pages of this namespace may be read and written."""
        return self.slot_bytes > 0

    def can_reuse(self, segment: Segment) -> bool:
        """Whether records written now may lie beside those of this segment, which can be read."""
        is_alike = segment.slot_bytes == self.slot_bytes and segment.packed == self.packed
        return is_alike and not (segment.write_failed or segment.has_other_names)


class Catalog:
    """Namespaces and segments. Thread-safe: one lock, held only for look-ups and small changes.

    It has many methods because each look-up or change is one, made whole under the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}  # guarded by _lock
        self._used_bytes = 0  # guarded by _lock
        self._clock = 0  # guarded by _lock

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files."""
        with self._lock:
            return self._used_bytes

    def namespaces(self) -> list[Namespace]:
        """Returns all namespaces, open or not."""
        with self._lock:
            return list(self._namespaces.values())

    def namespace(self, digest: bytes) -> Namespace | None:
        """Returns the namespace of this digest."""
        with self._lock:
            return self._namespaces.get(digest)

    def add_namespace(self, namespace: Namespace) -> None:
        """Adds a namespace that is not there yet."""
        with self._lock:
            self._namespaces[namespace.digest] = namespace

    def take_if_empty(self, digest: bytes) -> Namespace | None:
        """Removes a namespace that has no segments and is not open; None where it stays."""
        with self._lock:
            namespace = self._namespaces.get(digest)
            if namespace is None or namespace.is_open or namespace.segments:
                return None
            return self._namespaces.pop(digest)

    def add(self, segment: Segment) -> None:
        """Adds a segment of a known namespace and counts its bytes."""
        with self._lock:
            namespace = self._namespaces[segment.namespace]
            namespace.segments[segment.segment_id] = segment
            namespace.num_by_format[segment.slot_bytes, segment.packed] += 1
            self._used_bytes += segment.file_bytes

    def remove(self, segment: Segment) -> None:
        """Removes a segment: reads of it are misses from now on."""
        with self._lock:
            namespace = self._namespaces[segment.namespace]
            del namespace.segments[segment.segment_id]
            namespace.num_by_format[segment.slot_bytes, segment.packed] -= 1
            self._used_bytes -= segment.file_bytes

    def keep_counting(self, num_bytes: int) -> None:
        """Counts bytes of a file that could not be removed."""
        with self._lock:
            self._used_bytes += num_bytes

    def segments(self, digest: bytes | None = None) -> list[Segment]:
        """Returns the segments of one namespace or of all."""
        with self._lock:
            return [
                segment
                for namespace in self._namespaces.values()
                if digest is None or namespace.digest == digest
                for segment in namespace.segments.values()
            ]

    def oldest_sealed(self) -> list[Segment]:
        """Returns the sealed segments of every namespace, least recently used first."""
        sealed = [segment for segment in self.segments() if segment.sealed]
        return sorted(sealed, key=lambda segment: (segment.last_used, segment.segment_id))

    def sealed_unfit(self, namespace: Namespace) -> list[Segment]:
        """Returns the namespace's sealed segments to which nothing is written any more.

        Where there are none, which is nearly always, it takes no time by how many there are.
        """
        with self._lock:
            own = namespace.num_by_format[namespace.slot_bytes, namespace.packed]
            if own == len(namespace.segments):
                return []
            return [
                segment
                for segment in namespace.segments.values()
                if segment.sealed and not namespace.can_reuse(segment)
            ]

    def sealed_of_others(self, digest: bytes) -> list[Segment]:
        """Returns the sealed segments of all namespaces but one."""
        others = [each.digest for each in self.namespaces() if each.digest != digest]
        return [each for other in others for each in self.segments(other) if each.sealed]

    def find(self, digest: bytes, segment_ids: Iterable[int]) -> dict[int, Segment]:
        """Returns the segments that may be read and marks them as used now."""
        with self._lock:
            namespace = self._namespaces.get(digest)
            if namespace is None or not namespace.is_open:
                return {}
            known = namespace.segments
            found = {
                index: known[index]
                for index in segment_ids
                if index in known and known[index].end_block > 1
            }
            for segment in found.values():
                segment.last_used = self._now()
                segment.read_since_open = True
            return found

    def grow(self, segment: Segment, end_block: int) -> None:
        """Makes an active segment readable up to `end_block`."""
        with self._lock:
            segment.end_block = end_block
            segment.last_used = self._now()

    def set_format(self, segment: Segment, slot_bytes: int, packed: bool) -> None:
        """Notes how the records of a segment lie, which is known once it was read."""
        with self._lock:
            num_by_format = self._namespaces[segment.namespace].num_by_format
            num_by_format[segment.slot_bytes, segment.packed] -= 1
            segment.slot_bytes, segment.packed = slot_bytes, packed
            num_by_format[slot_bytes, packed] += 1

    def mark_sealed(self, segment: Segment, file_bytes: int) -> None:
        """Notes that a segment is sealed and how long its file is now."""
        with self._lock:
            self._used_bytes += file_bytes - segment.file_bytes
            segment.file_bytes = file_bytes
            segment.sealed = True

    def mark_reopened(self, segment: Segment, most_bytes: int) -> None:
        """Notes that a sealed segment is written to again and how long it may be when sealed."""
        with self._lock:
            self._used_bytes += most_bytes - segment.file_bytes
            segment.file_bytes = most_bytes
            segment.sealed = False

    def segment(self, segment_id: int) -> Segment | None:
        """Returns the segment of this id, of any namespace."""
        with self._lock:
            for each in self._namespaces.values():
                if segment_id in each.segments:
                    return each.segments[segment_id]
        return None

    def now(self) -> int:
        """Returns a time for `Segment.last_used`, later than every one before."""
        with self._lock:
            return self._now()

    def _now(self) -> int:
        self._clock = max(self._clock + 1, time.time_ns())
        return self._clock
