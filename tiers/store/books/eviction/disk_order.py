"""Which page leaves the disk next, once `disk_pages.py` has no copy to spare.

If DRAM does not have it either, it is then lost. The order is kept by `policy/tier_lists.py`.

Not locked: the owner's lock is held around every call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.policy.tier_lists import Worth
from sglang_ext.tiers.store.books.eviction.segment_rows import SegmentRows
from sglang_ext.tiers.store.types import FILLING, Rows

# Pages that one step of making room takes out of the order. More of them than are needed, and they
# come back to the end from which pages leave: fewer a step would be another order.
_STEP_PAGES = 64
# A page that leaves DRAM is refused for an older one where its score is less than this share of the
# other's. Scores are of classes: a long conversation would be lost as a whole for a near tie.
_CLEARLY = 0.75


class DiskOrder:
    """The pages on disk in the order in which they leave it, and where they lie.

    The order is that of DRAM: what nobody waits for first, then what is needed latest, a page
    before the one that leads to it. A page that is being read stays.

    It has many methods because where pages lie and what they are worth changes together.

    Args:
        index: where pages lie.
        policy: what the queue needs.
        size_pages: pages of a slot's length that the disk has room for. Coded ones are shorter, so
            there may be more, up to the rows of the index.
    """

    def __init__(self, index: PageIndex, policy: PlacementPolicy, size_pages: int) -> None:
        self._index = index
        self._lists = policy.add_tier(index.capacity, min(size_pages, index.capacity))
        self._segments = SegmentRows(index.capacity)

    def enter(self, rows: Rows) -> None:
        """Pages lie on disk now, where the index says; root first, none twice."""
        self.lie(rows)
        self._lists.enter(rows)
        self.changed(rows)

    def leave(self, rows: Rows) -> None:
        """Pages lie on disk no more; the index still says where they lay."""
        self.lift(rows)
        self._lists.exit(rows)

    def lift(self, rows: Rows) -> None:
        """Removes pages from their segments before they move; `lie` follows. Their order stays."""
        self._segments.remove(rows, self._index.segment[rows], self._index.num_blocks[rows])

    def lie(self, rows: Rows) -> None:
        """Pages lie where the index says."""
        self._segments.add(rows, self._index.segment[rows], self._index.num_blocks[rows])

    def changed(self, rows: Rows) -> None:
        """Pages began or ceased to be read."""
        self._lists.hold_where(rows, (self._index.flags[rows] & FILLING) != 0)

    def take(self, num_blocks: int, now_s: float, most: int) -> Rows:
        """Takes out pages that leave, until their records free `num_blocks` blocks or none is left.

        The caller still has to call `leave` for them.

        Args:
            num_blocks: that are asked for.
            now_s: the time.
            most: pages that are taken at most.
        """
        taken: list[Rows] = []
        while num_blocks > 0 and most > 0:
            rows = self._lists.evict(min(_STEP_PAGES, most), now_s)
            if not len(rows):
                break
            blocks = np.cumsum(self._index.num_blocks[rows], dtype=np.int64)
            num = int(np.searchsorted(blocks, num_blocks)) + 1
            if num < len(rows):
                self._lists.put_back(rows[num:])
            taken.append(rows[:num])
            most -= len(taken[-1])
            num_blocks -= int(blocks[min(num, len(rows)) - 1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def take_pages(self, count: int, now_s: float) -> Rows:
        """The same of up to `count` pages, of whatever length."""
        return self._lists.evict(count, now_s)

    def demote(self, rows: Rows) -> int:
        """These pages may leave the disk first; see `TierLists.demote`."""
        return self._lists.demote(rows)

    @property
    def num_by_tenant(self) -> list[int]:
        """Pages of tenants with shares; see `TierLists`."""
        return self._lists.num_by_tenant

    def next_to_leave(self, count: int, now_s: float) -> Rows:
        """Up to `count` pages of those that `take` would take first."""
        return self._lists.next_to_leave(count, now_s)

    def by_worth(self, rows: Rows, now_s: float) -> npt.NDArray[np.intp]:
        """Indices of pages, wherever they lie, by what they are worth here, the most first.

        Of equal ones the first comes first: of a path the root, without which none is reached.
        """
        needed, score, said, follows_scores = self._lists.worth(rows, now_s)
        if not (follows_scores or said.any()):
            score = np.zeros(len(rows))  # all alike
        if not self._lists.has_shares:
            return np.lexsort((-score, -needed))
        return np.lexsort((-score, -needed, ~self._lists.is_within_share(rows)))

    def outweigh(
        self, rows: Rows, others: Rows, now_s: float, *, by_score: bool
    ) -> npt.NDArray[np.bool_]:
        """Which pages are worth more than those beside them on disk, which are older.

        Where tenants have shares, first of all those of one that has no more than its own.

        If the same request needs both, the older page stays. If nobody needs either, the newer one
        wins, unless scores count and the older one's is higher: of pages of which nothing was said
        clearly so, as what is refused is lost. Where something was said of the older one alone, the
        order has already put it behind what nobody spoke of; pinned ones stay.
        """
        mine, theirs = self._lists.needed(rows), self._lists.needed(others)
        unneeded = np.isneginf(mine) & np.isneginf(theirs)
        result: npt.NDArray[np.bool_] = (mine > theirs) | unneeded
        if by_score and unneeded.any():
            worths = (self._lists.worth(each[unneeded], now_s) for each in (rows, others))
            result[unneeded] = _outscore(*worths)
        if self._lists.has_shares:
            within, within2 = (self._lists.is_within_share(each) for each in (rows, others))
            result = np.where(within == within2, result, within)
        return result

    def with_what_leads(self, rows: Rows, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Those of some pages that are chosen, or lead to such or to pages on disk."""
        return self._lists.with_what_leads(rows, chosen)

    def are_needed_less(self, rows: Rows, others: Rows) -> npt.NDArray[np.bool_]:
        """Which pages are needed later than those beside them on disk, or kept by no pin as these.

        Where tenants have shares, first of all those of one that has more than its own.
        """
        mine, theirs = self._lists.needed(rows), self._lists.needed(others)
        unpinned = np.isneginf(theirs) & self._lists.stays_pinned(others)
        unpinned &= ~self._lists.stays_pinned(rows)
        result: npt.NDArray[np.bool_] = (mine < theirs) | ((mine == theirs) & unpinned)
        if self._lists.has_shares:
            within, within2 = (self._lists.is_within_share(each) for each in (rows, others))
            result = np.where(within == within2, result, within2)
        return result

    def rows_of(self, segment: int, most: int | None = None) -> Rows:
        """Rows of the pages in a segment, or of so many of them."""
        return self._segments.rows(segment, most)

    def live(self, segment: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        """First blocks, ascending, and lengths of the records of a segment that are pages."""
        rows = self._segments.rows(segment)
        rows = rows[np.argsort(self._index.block[rows])]
        return self._index.block[rows].copy(), self._index.num_blocks[rows].copy()

    def num_live(self, segment: int) -> int:
        """Blocks of these records."""
        return self._segments.num_blocks(segment)

    def note_thin(self, segments: npt.NDArray[np.uint32]) -> None:
        """Segments may hold records that are no page's."""
        self._segments.note_thin(segments)

    def take_thinned(self) -> dict[int, int]:
        """Segments that lost pages since the last call, and the blocks of those left."""
        return self._segments.take_thinned()

    def check(self, on_disk: Rows) -> None:
        """Verifies the order against the rows that are on disk (linear; for tests).

        Raises:
            AssertionError: they disagree.
        """
        assert len(self._lists) == len(on_disk), (len(self._lists), len(on_disk))
        assert self._lists.has(on_disk).all()
        assert ((self._index.flags[on_disk] & FILLING) != 0).tolist() == self._lists.held(
            on_disk
        ).tolist()
        for segment in np.unique(self._index.segment[on_disk]).tolist():
            mine = on_disk[self._index.segment[on_disk] == segment]
            assert sorted(self.rows_of(segment).tolist()) == mine.tolist()
            assert self.num_live(segment) == int(self._index.num_blocks[mine].sum())


def _outscore(mine: Worth, theirs: Worth) -> npt.NDArray[np.bool_]:
    """Which pages that nobody waits for are worth as much as older ones; see `outweigh`."""
    least = _CLEARLY if mine.follows_scores else 0.0
    learned = np.where(theirs.said, 0.0, theirs.score)  # what is said may be infinite, of a pin
    nothing_said = np.where(theirs.said, ~np.isposinf(theirs.score), mine.score >= least * learned)
    result: npt.NDArray[np.bool_] = np.where(mine.said, mine.score >= theirs.score, nothing_said)
    return result
