"""Where pages lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.records.quality import ANY, Qualities
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    READY,
    DiskCopies,
    Hashes,
    KeySpace,
    PrefixSurvey,
    Rows,
    Slots,
    TierCounts,
)


class Lookups:
    """Answers from the table. The first part takes its lock, the second is called with it held."""

    def __init__(self, table: PageTable) -> None:
        self._table, self._index = table, table.index

    def ready_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> int:
        """Number of leading pages that are ready in DRAM and no worse than a quality."""
        with self._table.lock:
            return len(self.ready_rows(space, hashes, max_quality))

    def locate_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> TierCounts:
        """Where the leading pages that are stored anywhere, and no worse than a quality, lie."""
        with self._table.lock:
            return self.count_tiers(self.known_prefix(space, hashes, max_quality))

    def survey(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> PrefixSurvey:
        """The same page by page."""
        with self._table.lock:
            rows = self.known_prefix(space, hashes, max_quality)
            flags = self._index.flags[rows]
            num_blocks = self._index.num_blocks[rows]
        ready = (flags & READY) != 0
        num_blocks[(flags & ON_DISK) == 0] = 0
        return PrefixSurvey(ready, ~ready & ((flags & FILLING) != 0), num_blocks)

    def tiers_of(
        self, hashes: Hashes, homes: Rows, numbers: Sequence[int]
    ) -> npt.NDArray[np.uint8]:
        """`READY` and `ON_DISK` of pages, u8 `[N]`; 0: not stored.

        Args:
            hashes: u8 `[N, 32]`.
            homes: i64 `[N]`, the one key space in which each is looked for; below 0 for none.
            numbers: key spaces in all of which those without one are looked for.
        """
        found, lost = np.zeros(len(hashes), np.uint8), np.flatnonzero(homes < 0)
        homeless = hashes[lost]
        with self._table.lock:
            self._add_tiers(found, self._index.lookup_each(hashes, homes))
            for number in numbers if len(lost) else ():
                rows = np.full(len(hashes), -1, np.int64)
                rows[lost] = self._index.lookup(homeless, number)
                self._add_tiers(found, rows)
        return found

    def _add_tiers(self, found: npt.NDArray[np.uint8], rows: Rows) -> None:
        known = rows >= 0
        found[known] |= self._index.flags[rows[known]] & np.uint8(READY | ON_DISK)

    def states(self, space: KeySpace, hashes: Hashes) -> tuple[Qualities, Qualities]:
        """Flags of pages in any order, 0 where one is not stored, and their quality; u8 `[N]`."""
        with self._table.lock:
            rows = self._index.lookup(hashes, space.number)
            known = rows >= 0
            flags, quality = np.zeros((2, len(rows)), np.uint8)
            flags[known] = self._index.flags[rows[known]]
            quality[known] = self._index.quality[rows[known]]
        return flags & np.uint8(READY | ON_DISK | FILLING), quality

    def absences(
        self, space: KeySpace, hashes: Hashes, max_quality: int, others: Sequence[int]
    ) -> npt.NDArray[np.uint8]:
        """Why pages cannot be had; see `PageStore.absences`.

        Args:
            space: where they belong.
            hashes: u8 `[N, 32]`.
            max_quality: the worst that is asked for.
            others: numbers of key spaces in which the first page that was never stored is looked
                for, and the pages behind it where it is found.
        """
        why = np.zeros(len(hashes), np.uint8)
        with self._table.lock:
            rows = self._index.lookup(hashes, space.number)
            known = rows >= 0
            held = rows[known]
            usable = (self._index.flags[held] & (READY | ON_DISK | FILLING)) != 0
            if max_quality != ANY and self._table.has_inexact:
                why[np.flatnonzero(known)[self._index.quality[held] > max_quality]] = (
                    Absence.NOT_EXACT
                )
            known[known] = usable
            if known.all():
                return why
            why[~known] = self._table.lost.why(hashes[~known], space.number)
            never = np.flatnonzero(why == Absence.NEVER_STORED)
            for number in others if len(never) else ():
                first = int(never[0])
                num = len(self._index.prefix_rows(hashes[first:], number))
                if num:
                    elsewhere = never[never < first + num]
                    why[elsewhere] = Absence.OTHER_NAMESPACE
                    break
        return why

    def to_read(self, rows: Rows, slots: Slots) -> tuple[npt.NDArray[np.bool_], Hashes, DiskCopies]:
        """Which rows are still the pages that are to be read into these slots.

        Returns:
            Bool `[N]`; of those, the page hashes, and where their records lie.
        """
        with self._table.lock:
            there = self._table.still_filling(rows, slots)
            return there, self._index.keys(rows[there])[0], self._copies(rows[there])

    def on_disk(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, DiskCopies]:
        """Those of some pages that lie on disk, and where."""
        with self._table.lock:
            there, rows = self.having(space.number, hashes, ON_DISK)
            return hashes[there], self._copies(rows)

    # ---- the caller holds the lock ----

    def having(self, number: int, hashes: Hashes, flag: int) -> tuple[npt.NDArray[np.bool_], Rows]:
        """Which pages, in any order, have a flag, and the rows of these."""
        rows = self._index.lookup(hashes, number)
        has = rows >= 0
        has[has] = (self._index.flags[rows[has]] & flag) != 0
        return has, rows[has]

    def ready_rows(self, space: KeySpace, hashes: Hashes, max_quality: int) -> Rows:
        """Leading pages that are ready in DRAM and no worse than a quality."""
        rows = self._index.prefix_rows(hashes, space.number, READY)
        return self._good_prefix(rows, max_quality)

    def known_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int) -> Rows:
        """Leading pages that are stored anywhere, or coming, and no worse than a quality."""
        rows = self._index.prefix_rows(hashes, space.number)
        usable = (self._index.flags[rows] & (READY | ON_DISK | FILLING)) != 0
        return self._good_prefix(leading(rows, usable), max_quality)

    def path(
        self, space: KeySpace, hashes: Hashes, num_above: int, max_quality: int
    ) -> tuple[Rows, Rows]:
        """Rows of the first `num_above` pages, as far as known, and of those stored behind them."""
        above = self._index.lookup(hashes[:num_above], space.number)
        below = self.known_prefix(space, hashes[num_above:], max_quality)
        self._table.link(np.concatenate([above, below]))
        return above[above >= 0], below

    def count_tiers(self, rows: Rows) -> TierCounts:
        """In which tiers pages lie that are stored."""
        flags = self._index.flags[rows]
        ready = (flags & READY) != 0
        pending = ~ready & ((flags & FILLING) != 0)
        return TierCounts(
            host=int(ready.sum()),
            disk=int((~ready & ~pending).sum()),
            pending=int(pending.sum()),
        )

    def _good_prefix(self, rows: Rows, max_quality: int) -> Rows:
        if max_quality == ANY or not self._table.has_inexact:
            return rows
        return leading(rows, self._index.quality[rows] <= max_quality)

    def _copies(self, rows: Rows) -> DiskCopies:
        index = self._index
        return DiskCopies(
            index.segment[rows], index.block[rows], index.num_blocks[rows], index.disk_quality[rows]
        )


def leading(rows: Rows, usable: npt.NDArray[np.bool_]) -> Rows:
    """The rows before the first that is not usable."""
    return rows if usable.all() else rows[: int(np.argmin(usable))]
