"""Which record of those that lie in DRAM beside the disk leaves next; the disk still has it then.

Not locked: the owner's lock is held around every call.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.anonymous_memory import lazy_zeros
from sglang_ext.tiers.base import Location
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.store.types import FILLING, ON_DISK, READY, Rows

Places = npt.NDArray[np.uint32]


class CopyOrder:
    """The pages whose records lie in DRAM as well, in the order in which these leave it.

    The order is that of the tiers (`TierLists`). Who waits for a page that has a slot in DRAM, or
    is being read into one, does not need its record, so that one leaves as if nobody waited. No
    record is held: whoever reads one has its bytes, whatever becomes of the place.

    Memory: 29 bytes a row, committed as rows come into use.

    Args:
        index: where pages lie.
        policy: what the queue needs.
        max_bytes: bound on the records.
        all_bytes: of all pages that the index is made for, as whole slots; what part of them the
            bound is tells how many records there may be.
    """

    def __init__(
        self, index: PageIndex, policy: PlacementPolicy, max_bytes: int, all_bytes: int
    ) -> None:
        self._index, self._policy = index, policy
        self._max_bytes = max_bytes
        expected = max(1, min(index.capacity, index.capacity * max_bytes // all_bytes))
        self._lists = policy.add_tier(expected, holds_copies=True)
        self._place: Places = lazy_zeros((index.capacity, 2), np.uint32)  # segment, block
        self._size: npt.NDArray[np.uint32] = lazy_zeros((index.capacity,), np.uint32)  # 0: none
        self._num_bytes = 0
        self._gone: list[Places] = []

    def enter(self, rows: Rows, places: Places, sizes: npt.NDArray[np.uint32]) -> None:
        """Records of pages come to lie in DRAM; root first, none twice. `make_room` follows.

        Args:
            rows: i64 `[n]`.
            places: u32 `[n, 2]`, segment and block.
            sizes: u32 `[n]`, bytes, above 0.
        """
        before = self._size[rows]
        old = rows[before > 0]
        self._gone.append(self._place[old])
        self._place[rows], self._size[rows] = places, sizes
        self._num_bytes += int(sizes.sum(dtype=np.int64) - before.sum(dtype=np.int64))
        self._lists.enter(rows)
        self.changed(rows)

    def leave(self, rows: Rows) -> None:
        """The disk has those of some pages that lie here no more, or elsewhere."""
        rows = rows[self._size[rows] > 0]
        if len(rows):
            rows = np.unique(rows)
            self._forget(rows)
            self._lists.exit(rows)

    def changed(self, rows: Rows) -> None:
        """Pages came to slots of DRAM, or left them."""
        rows = rows[self._size[rows] > 0]
        self._lists.spare_where(rows, self._in_dram(rows))

    def make_room(self, now_s: float) -> int:
        """What is needed least leaves until the records are within their bound.

        Returns:
            How many of those that leave somebody waits for, and has from the disk alone now.
        """
        num_wanted = 0
        while self._num_bytes > self._max_bytes and len(self._lists):
            over = self._num_bytes - self._max_bytes
            rows = self._lists.evict(math.ceil(over * len(self._lists) / self._num_bytes), now_s)
            if not len(rows):
                break
            freed = np.cumsum(self._size[rows], dtype=np.int64)
            num = min(int(np.searchsorted(freed, over)) + 1, len(rows))
            self._lists.put_back(rows[num:])
            rows = rows[:num]
            num_wanted += int((self._policy.wanted(rows) & ~self._in_dram(rows)).sum())
            self._forget(rows)
        return num_wanted

    def has(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages have a record here."""
        there: npt.NDArray[np.bool_] = self._size[rows] > 0
        return there

    def take_gone(self) -> list[Location]:
        """The places of the records that left since the last call."""
        gone, self._gone = self._gone, []
        return [Location(*place) for places in gone for place in places.tolist()]

    def check(self) -> None:
        """Verifies the order against the index (linear; for tests).

        Raises:
            AssertionError: they disagree.
        """
        rows = np.flatnonzero(self._size).astype(np.int64)
        assert len(self._lists) == len(rows), (len(self._lists), len(rows))
        assert self._lists.has(rows).all()
        assert self._index.is_live(rows).all()
        assert self._num_bytes == int(self._size[rows].sum(dtype=np.int64)) <= self._max_bytes
        placed = rows[(self._index.flags[rows] & ON_DISK) != 0]  # others are being written
        assert (self._place[placed, 0] == self._index.segment[placed]).all()
        assert (self._place[placed, 1] == self._index.block[placed]).all()
        assert self._lists.spare(rows).tolist() == self._in_dram(rows).tolist()

    def _in_dram(self, rows: Rows) -> npt.NDArray[np.bool_]:
        in_dram: npt.NDArray[np.bool_] = (self._index.flags[rows] & (READY | FILLING)) != 0
        return in_dram

    def _forget(self, rows: Rows) -> None:
        self._gone.append(self._place[rows])
        self._num_bytes -= int(self._size[rows].sum(dtype=np.int64))
        self._size[rows] = 0
