"""The store's own log: one JSON object a line, for tests and audits.

A line is written with one unbuffered `write`, after the fact it states, so a line that is in the
file is true even when the process was killed right after it.

    {"t": seconds, "e": "saved", "pages": [hex, ...]}       in DRAM, ready
    {"t": ..., "e": "written", "pages": [...]}   acknowledged: on disk and in the index
    {"t": ..., "e": "promoted", ...}             disk to DRAM
    {"t": ..., "e": "loaded", ...}               pinned for a load to the device
    {"t": ..., "e": "evicted", ...}              left DRAM
    {"t": ..., "e": "reclaimed", ...}            left the disk with their segment, stay in DRAM
    {"t": ..., "e": "lost", ...}                             left the last tier that held them
    {"t": ..., "e": "rejected", "kind": "bad_checksum", ...} read from disk and refused
    {"t": ..., "e": "enqueued", "rid": r, "device": n, "pages": [...], "on_disk": [i, ...]}
        A request entered the queue: n of its pages were on the device, the next ones (`pages`) in
        DRAM or on their way there, but for those of some indices, which were on disk.
    {"t": ..., "e": "admitted", "rid": r, "position": p, "pages": [...]}
        Its pages from token p on are loaded from DRAM.
    {"t": ..., "e": "restored", "pages": [...]}
        The last page of a prompt, computed again, was overwritten with what DRAM has of it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from sglang_ext.tiers.store.types import Hashes


class EventLog:
    """Appends events to a file, or does nothing when it has none. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        if path:
            self._fd = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def on(self) -> bool:
        """Whether events are kept; callers skip the cost of naming pages when not."""
        return self._fd >= 0

    def pages(self, event: str, hashes: Hashes, **fields: Any) -> None:
        """Logs an event of some pages."""
        if self._fd >= 0 and len(hashes):
            self.note(event, pages=[row.tobytes().hex() for row in hashes], **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Logs an event."""
        if self._fd >= 0:
            line = json.dumps({"t": round(time.time(), 6), "e": event, **fields})
            os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        """Closes the file; later events are ignored."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
