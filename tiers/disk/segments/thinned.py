"""Which sealed segment of a namespace has the most room for new records."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.segments.catalog import Catalog, Namespace, Segment
from sglang_ext.tiers.disk.segments.layout import footer_bytes_bound

# A segment is opened again only if its free blocks are this many times those of its footer.
_WORTH_FOOTERS = 8
# Of segments that are not worth it so many are looked at, as short ones behind them may be.
_MAX_LOOKS = 16
_MIN_ENTRIES = 64


class ThinnedSegments:
    """Segments that lost pages, the emptiest first. Used under the write lock only.

    A call takes time by the logarithm of how many there are, and by those that it passes over: the
    one that is being written, those that the batch in hand wrote to, and a few that are too full.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._live_blocks: dict[int, int] = {}  # by segment
        # By namespace, of free blocks (negative) and segments. An entry counts while it says what
        # is so now; older ones stay until they are met, or are half of all.
        self._heaps: dict[bytes, list[tuple[int, int]]] = {}
        self._num_entries = 0

    def note(self, live_blocks: Mapping[int, int]) -> None:
        """Segments lost pages.

        Args:
            live_blocks: what the pages that are left take, in blocks, by segment.
        """
        self._live_blocks.update(live_blocks)
        if self._num_entries + len(live_blocks) > 2 * len(self._live_blocks) + _MIN_ENTRIES:
            self._heaps, self._num_entries = {}, 0
            live_blocks = dict(self._live_blocks)
        for segment_id in live_blocks:
            segment = self._catalog.segment(segment_id)
            if segment is None:
                del self._live_blocks[segment_id]
            else:
                self._push(segment)

    def take(
        self, namespace: Namespace, first_blocks: int, num_fresh: Callable[[int], int]
    ) -> Segment | None:
        """Takes the segment with the most free blocks; None where none is worth opening.

        It is there again once it loses pages again.

        Args:
            namespace: of which one is wanted.
            first_blocks: length of a record for which there must be room.
            num_fresh: given a segment, its blocks of which the owner does not know yet.
        """
        heap = self._heaps.get(namespace.digest, [])
        passed: dict[int, Segment] = {}
        best, most, num_looks = None, first_blocks - 1, 0
        while heap and -heap[0][0] > most and num_looks < _MAX_LOOKS:
            less_free, segment_id = heapq.heappop(heap)
            num_free = -less_free
            self._num_entries -= 1
            segment = namespace.segments.get(segment_id)
            if segment is None:
                self._live_blocks.pop(segment_id, None)
            elif segment_id in self._live_blocks and namespace.can_reuse(segment):
                if segment_id in passed:
                    continue  # it was noted more than once
                if num_free != self._num_free(segment):  # it was being written then
                    self._push(segment)
                    continue
                passed[segment_id] = segment
                fresh = num_fresh(segment_id)
                num_looks += not fresh
                if segment.sealed and num_free - fresh > max(most, _worth_blocks(segment) - 1):
                    best, most = segment, num_free - fresh
        for segment in passed.values():
            self._push(segment)
        if best is not None:
            del self._live_blocks[best.segment_id]
        return best

    def _num_free(self, segment: Segment) -> int:
        return segment.end_block - 1 - self._live_blocks[segment.segment_id]

    def _push(self, segment: Segment) -> None:
        heap = self._heaps.setdefault(segment.namespace, [])
        heapq.heappush(heap, (-self._num_free(segment), segment.segment_id))
        self._num_entries += 1


def _worth_blocks(segment: Segment) -> int:
    num_records = (segment.end_block - 1) * BLOCK_BYTES // segment.slot_bytes
    footer_blocks = footer_bytes_bound(num_records) // BLOCK_BYTES
    return min(_WORTH_FOOTERS * footer_blocks, segment.end_block - 1)
