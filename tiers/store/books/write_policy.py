"""When pages are written to disk: as they are saved, as they leave DRAM, or as they are used."""

from __future__ import annotations

from typing import Final

from sglang_ext.tiers.store.books.page_table import PageTable

DEFAULT_POLICY: Final = "auto"
# Times DRAM from which on it is not worth its writes that DRAM and disk hold different pages.
LARGE_DISK: Final = 16
# Pages that may be written again for each that is written for the first time: what adding DRAM and
# disk up may cost in writes. Prompts that come back often would be written at every turn.
AGAIN_SHARE: Final = 0.3


def policy_for_sizes(name: str, dram: int, records: int) -> str:
    """The policy that a setting means for tiers of these sizes, both in bytes or both in pages."""
    return "write_through" if name == "auto" and records > LARGE_DISK * dram else name


class WritePolicy:
    """The setting, and what it means now. The table's lock is held around every call.

    Args:
        name: `write_through`, `selective`, `write_back` or `auto`.
        has_disk: whether there is a disk.
        table: the pages; as many as DRAM holds may be written again before any is written.

    Attributes:
        name: as given.
        disk_is_full: the disk had to give up pages, and was not cleared since.
        closing: what is only in DRAM is about to be gone, so no copy on disk is spare.
    """

    def __init__(self, name: str, table: PageTable, *, has_disk: bool) -> None:
        self.name = name
        self._has_disk = has_disk
        self._table = table
        self.disk_is_full = self.closing = False
        self._was_full = False  # never falls
        self._most_again = self._num_again = float(table.arena.num_slots)

    @property
    def through(self) -> bool:
        """Whether pages are written as they are saved, to have them on disk beside DRAM."""
        if self.name == "auto":
            return self._has_disk and not self._was_full
        return self._has_disk and self.name == "write_through"

    @property
    def back(self) -> bool:
        """Whether pages are written when they are about to leave DRAM, if they are worth it."""
        if self.name == "auto":
            return self._has_disk and not self.through
        return self._has_disk and self.name == "write_back"

    @property
    def on_use(self) -> bool:
        """Whether pages are written when they are used."""
        return self._has_disk and self.name == "selective"

    @property
    def num_to_give_up(self) -> int:
        """How many pages of DRAM and disk may give their place on disk up now.

        Those that did, and are still to be written again, count as written. One that is lost, or
        that the disk refuses, does so no more.
        """
        return max(0, int(self._num_again) - self._table.num_owed)

    def note_written(self, num_first: int, num_again: int) -> None:
        """So many pages were written for the first time, and so many again."""
        num = self._num_again + AGAIN_SHARE * num_first - num_again
        self._num_again = min(self._most_again, max(-self._most_again, num))

    def note_full(self) -> None:
        """The disk had to give up pages. From the first time on `auto` is write-back."""
        self.disk_is_full = self._was_full = True
        if self.back:
            # From now on an unwritten page is held in DRAM only while it is queued for the disk.
            self._table.order.disk_first = False

    def note_cleared(self) -> None:
        """The disk has room again, so it refuses nothing until it next has to give up pages."""
        self.disk_is_full = False
