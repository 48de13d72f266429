"""Which pages a remote store has, by their headers. May block."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.remote.upload_queue import remote_key
from sglang_ext.tiers.store.types import Hashes, KeySpace


class RemoteHeads:
    """Asks a store that keeps pages as they are.

    Args:
        remote: the store.
        rules: what a page must be.
    """

    def __init__(self, remote: RemoteStore, rules: PageRules) -> None:
        self._remote = remote
        self._rules = rules

    def leading(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[tuple[int, int]]:
        """(quality, bytes) of the leading pages that the store has and are good enough."""
        found: list[tuple[int, int]] = []
        for meta, num_bytes in self._admitted(space, hashes, max_quality):
            if meta is None:
                break
            found.append((meta.quality, num_bytes))
        return found

    def first(self, space: KeySpace, hashes: Hashes, max_quality: int) -> int | None:
        """The first page that the store has and is good enough; see `FindFirst`."""
        for at, (meta, _) in enumerate(self._admitted(space, hashes, max_quality)):
            if meta is not None:
                return at
        return None

    def _admitted(
        self, space: KeySpace, hashes: Hashes, max_quality: int
    ) -> Iterator[tuple[RecordMeta | None, int]]:
        """Each page's header, if it may be of the page and that is good enough; and its length.

        What is there and is not this page's is counted here: as no header of it is found, nobody
        reads it whole. Lazy: of what is not looked at nothing is rejected.
        """
        keys = [remote_key(space, row.tobytes()) for row in hashes]
        for key, head in zip(keys, self._remote.head(keys), strict=True):
            meta = head.meta
            if head.rejected is not None:
                self._remote.reject(key, head.rejected.value)
            if meta is not None and meta.quality > max_quality:
                meta = None
            if meta and not self._rules.admits_header(meta, head.num_bytes - HEADER_BYTES):
                self._remote.reject(key, "unsound")
                meta = None
            yield meta, head.num_bytes
