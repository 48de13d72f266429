"""Which pages' values have been through a codec, so that no lossy codec meets them again."""

from __future__ import annotations

import threading

from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import RecordMeta

_MAX_PAGES = 1 << 18


class DecodedPages:
    """Pages that came from a tier or a store as something less than exact. Thread-safe.

    A page that is not exact was either computed here over lossy KV, and has values that no codec
    has seen, or it came from below and has values that one has changed. Only the first kind may be
    coded by a lossy codec: a second pass would add its error to that of the first, unseen.

    What the device holds came from this process, so what was never noted here was computed here.
    Once there are too many to remember, every page that is not exact counts as noted.
    """

    def __init__(self, max_pages: int = _MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._lock = threading.Lock()
        self._pages: set[int] = set()  # hashes of keys; guarded by _lock

    def note(self, meta: RecordMeta) -> None:
        """A page came from below."""
        if meta.quality > Quality.EXACT:
            with self._lock:
                if len(self._pages) <= self._max_pages:
                    self._pages.add(_key(meta))

    def may_lose(self, meta: RecordMeta) -> bool:
        """Whether a lossy codec may code this page."""
        if meta.quality == Quality.EXACT:
            return True
        with self._lock:
            return len(self._pages) <= self._max_pages and _key(meta) not in self._pages


def _key(meta: RecordMeta) -> int:
    return hash((meta.page_hash, meta.namespace, meta.lora))
