"""The page store of a process whose pages another one keeps, in memory that both have mapped."""

from __future__ import annotations

from sglang_ext.tiers.records.quality import Qualities
from sglang_ext.tiers.store.page_store import PageStore
from sglang_ext.tiers.store.types import Hashes, KeySpace, LoadTicket, SaveTicket, Slots


class ReaderStore(PageStore):
    """Knows of no page and gives out no slot; it loads from slots that its keeper tells of.

    The arena is borrowed. A save ends at once, as one of pages that are stored already. Pins are
    the keeper's business.
    """

    keeps_pages = False

    def begin_save(
        self,
        space: KeySpace,
        hashes: Hashes,
        ancestors: Hashes,
        quality: Qualities | None = None,
    ) -> SaveTicket:
        """A ticket of no pages."""
        return super().begin_save(space, hashes[:0], ancestors[:0])

    def begin_load(self, space: KeySpace, ticket: LoadTicket, hashes: Hashes) -> None:
        """Counts pages that are about to be loaded here; their use is noted by the keeper."""
        self._books.loads.count(ticket, hashes)

    def release(self, slots: Slots) -> None:
        """Nothing is pinned here."""

    def stats(self) -> dict[str, int]:
        """As `PageStore.stats`; the DRAM is the keeper's."""
        return {**super().stats(), "host_pages": 0, "host_capacity_pages": 0}
