"""What a page must be before anybody uses it, whoever wrote it.

A record's checksum proves that its bytes are what somebody wrote, not that they are a page: whoever
can write to a store or a folder can make a right checksum. The tiers know bytes only, so what a
page of the local model has to look like is told to them as `PageRules`.
"""

from __future__ import annotations

import abc

from sglang_ext.tiers.records.record import (
    RAW_CODEC,
    ByteArray,
    RecordError,
    RecordMeta,
    parse_header,
)


class PageRules(abc.ABC):
    """Judges records that come from a disk or a store. Thread-safe; no lock is held."""

    @abc.abstractmethod
    def admits_header(self, meta: RecordMeta, payload_bytes: int) -> bool:
        """Whether a record can be one of the local model's pages, by its header alone.

        Called before its payload is read or decoded, and before memory is taken for it.

        Args:
            meta: what the header says; its key is the one that was asked for.
            payload_bytes: what the header says of the payload's length, coded or not.
        """

    @abc.abstractmethod
    def admits_page(self, slot: ByteArray) -> bool:
        """Whether a slot holds a whole page of the local model, as a raw record.

        What lies behind the record's payload is another page's, and is zeroed.

        Args:
            slot: u8 [slot_bytes], writable, with a record whose checksum and key were verified, or
                which was decoded from such a one.
        """


class AnyPage(PageRules):
    """Takes every raw record: for a store whose pages have no layout."""

    def admits_header(self, meta: RecordMeta, payload_bytes: int) -> bool:
        """See `PageRules.admits_header`."""
        return True

    def admits_page(self, slot: ByteArray) -> bool:
        """See `PageRules.admits_page`."""
        try:
            return parse_header(slot)[0].codec == RAW_CODEC
        except RecordError:
            return False
