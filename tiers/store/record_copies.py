"""What a tier that has records in DRAM as well asks the store of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import Location, RecordCopy
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import ON_DISK, SPILLING, Rows


class RecordCopies:
    """The `CopyKeeper` of a store whose table has an order of copies. Takes the table's lock.

    Args:
        table: the pages.
        number_of: finds the number of a key space by namespace and adapter.
    """

    def __init__(self, table: PageTable, number_of: Callable[[bytes, bytes], int | None]) -> None:
        assert table.copies is not None
        self._table, self._index, self._order = table, table.index, table.copies
        self._number_of = number_of

    def keep(
        self, digest: bytes, copies: Sequence[RecordCopy], *, written: bool
    ) -> tuple[list[bool], list[Location]]:
        """See `CopyKeeper.keep`: what is no page, or needed less than all that lies there, is not.

        A page that was read may have left the disk since, and its place may be another page's.
        """
        places = np.array([copy.location for copy in copies], np.uint32).reshape(-1, 2)
        sizes = np.array([copy.num_bytes for copy in copies], np.uint32)
        with self._table.lock:
            rows = self._rows(digest, copies)
            are_pages = self._are_pages(rows, places, written=written)
            self._order.enter(rows[are_pages], places[are_pages], sizes[are_pages])
            num_wanted = self._order.make_room(self._table.now_s())
            are_pages[are_pages] = self._order.has(rows[are_pages])
            gone = self._order.take_gone()
        self._table.counters.add("coded_evicted_wanted_pages", num_wanted)
        return are_pages.tolist(), gone

    def _rows(self, digest: bytes, copies: Sequence[RecordCopy]) -> Rows:
        rows = np.full(len(copies), -1, np.int64)
        adapters = [copy.lora for copy in copies]
        for lora in set(adapters):
            number = self._number_of(digest, lora)
            if number is None:
                continue
            mine = np.flatnonzero([each == lora for each in adapters])
            hashes = b"".join(copies[at].page_hash for at in mine.tolist())
            rows[mine] = self._index.lookup(np.frombuffer(hashes, np.uint8).reshape(-1, 32), number)
        return rows

    def _are_pages(self, rows: Rows, places: npt.NDArray[np.uint32], *, written: bool) -> (
        npt.NDArray[np.bool_]
    ):  # fmt: skip
        """Which records are those that the table has, or is about to have, at these places."""
        held = np.maximum(rows, 0)
        if written:
            fit = (self._index.flags[held] & (SPILLING | ON_DISK)) == SPILLING
        else:
            fit = (self._index.flags[held] & ON_DISK) != 0
            fit &= self._index.segment[held] == places[:, 0]
            fit &= self._index.block[held] == places[:, 1]
        fit &= rows >= 0
        _, last = np.unique(rows[::-1], return_index=True)
        is_last = np.zeros(len(rows), np.bool_)
        is_last[len(rows) - 1 - last] = True
        result: npt.NDArray[np.bool_] = fit & is_last
        return result
