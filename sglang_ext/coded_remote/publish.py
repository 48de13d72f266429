"""Pages that arrived from a remote store are decoded into DRAM and made known."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sglang_ext.coded_remote.lookup import FoundPage
from sglang_ext.coded_remote.run import FetchedSpan
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.record import (
    RAW_CODEC,
    ByteArray,
    RecordError,
    parse_header,
    read_meta,
)
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.remote.staged import START_BYTES, read_stages, unstage
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.remote.coded_remote import Lookup, RemoteCodec
from sglang_ext.tiers.transcoder import is_decoded

logger = logging.getLogger(__name__)


class Publisher:
    """Decodes pages into slots and publishes them, as a save does. One thread, but `decode`."""

    def __init__(
        self,
        books: Books,
        remote: RemoteStore,
        codec: RemoteCodec,
        decoded: DecodedPages,
        rules: PageRules,
    ) -> None:
        self._table, self._saves, self._book = books.table, books.saves, books.remote
        self._remote = remote
        self._rules = rules
        self._codec = codec
        self._decoded = decoded

    def publish(
        self, lookup: Lookup, run: FetchedSpan, pages: Sequence[FoundPage], step: int
    ) -> bool:
        """Publishes neighbouring pages of a run, at one level; returns whether all are there now.

        Args:
            lookup: whose pages they are.
            run: holds their bytes.
            pages: at least one.
            step: the level, as a position in `FoundPage.sizes`.
        """
        first, last = pages[0].number, pages[-1].number + 1
        hashes = lookup.hashes[first:last]
        quality = np.array([page.meta.quality for page in pages], np.uint8)
        ticket = self._saves.begin(lookup.space, hashes, lookup.hashes[:first], quality)
        ok = False
        try:
            slots = self._table.arena.slots
            ok = all(
                self._fill(run, pages[at], step, slots[slot])
                for at, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True)
            )
        except Exception:
            logger.exception("hier-kv: a page from the remote store could not be decoded")
        finally:
            self._saves.finish(ticket, ok=ok)
        counters = self._table.counters
        if not ok:
            counters.add("remote_failed_pages", len(ticket.slots))
            return False
        counters.add("remote_promoted_pages", len(ticket.slots))
        is_raw = pages[0].meta.codec == RAW_CODEC
        name = "raw" if is_raw else f"level_{pages[0].level(step)}"
        counters.add(f"remote_{name}_pages", len(ticket.slots))
        # What another request is saving now is not to be had yet: the plan is made again.
        complete = not ticket.dropped and len(pages) == self._book.adopt(
            lookup.plan, lookup.space, hashes, lookup.max_quality
        )
        lookup.plan.lacked_room |= not complete
        return complete

    def _fill(self, run: FetchedSpan, page: FoundPage, step: int, slot: ByteArray) -> bool:
        data = run.take(page, step)
        if data is None:
            return False
        self._decoded.note(page.meta)
        return self.decode(page, data, step, slot)

    def decode(self, page: FoundPage, data: ByteArray, step: int, slot: ByteArray) -> bool:
        """Decodes what was read of a page up to a level; returns whether it worked. Any thread.

        What proves to be no page is not asked for again until it is stored anew.
        """
        if page.meta.codec != RAW_CODEC and not self._codec.knows(page.meta):
            return False  # its profile was forgotten meanwhile, which is not the store's fault
        kind = self._misfit(page, data, step, slot)
        if not kind:
            return True
        self._table.counters.add(f"rejected_{kind}")
        self._remote.reject(page.key, kind)
        return False

    def _misfit(self, page: FoundPage, data: ByteArray, step: int, slot: ByteArray) -> str:
        """Fills a slot; returns what is wrong with the page, or ""."""
        if page.meta.codec == RAW_CODEC:
            is_read = self._copy(page, data, slot)
        else:
            is_read = self._decode(page, data, step, slot)
        if not is_read:
            return "codec"
        return "" if self._rules.admits_page(slot) else "unsound"

    def _decode(self, page: FoundPage, data: ByteArray, step: int, slot: ByteArray) -> bool:
        try:
            if page.stages is not None:
                record = unstage(page.stages, step, data)
            else:
                stages = read_stages(data, data.size)
                if stages.meta != page.meta:  # replaced since it was found
                    return False
                record = unstage(stages, len(stages.ends) - 1, data[START_BYTES:])
        except RecordError:
            return False
        return self._codec.decode(record, slot) and is_decoded(read_meta(record), slot)

    @staticmethod
    def _copy(page: FoundPage, data: ByteArray, slot: ByteArray) -> bool:
        try:
            meta, _ = parse_header(data)
        except RecordError:
            return False
        if meta != page.meta or data.size > slot.size:
            return False
        slot[: data.size] = data
        return True
