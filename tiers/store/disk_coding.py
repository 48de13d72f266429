"""Pages between their raw form in DRAM and their coded form on disk.

Both classes do their work with no lock of the store held. A page that cannot be coded is stored
raw; a record that cannot be decoded is a miss. Neither is ever an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ext.tiers.base import BLOCK_BYTES, record_blocks
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.records.page_rules import AnyPage, PageRules
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    RAW_CODEC,
    ByteArray,
    RecordError,
    parse_header,
    read_meta,
)
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.types import StoreCounters
from sglang_ext.tiers.transcoder import PageTranscoder, coded_blocks, is_decoded

logger = logging.getLogger(__name__)

KeepRaw = Callable[[float], bool]
"""Says whether pages should be stored raw, given coded over raw bytes of those coded lately."""

# While pages are kept raw, one in this many is coded, so that sizes and speeds stay known.
_STILL_CODED = 32
_SHARE_STEP = 0.1


class DiskRecord(NamedTuple):
    """What goes to disk for one page.

    Attributes:
        data: u8 [n * 4096], part of a slot or of the encoder's memory.
        quality: of the record, as far as its coding goes.
    """

    data: ByteArray
    quality: int


class PageEncoder:
    """Codes batches of pages. One thread at a time; a batch is good until the next."""

    def __init__(
        self,
        transcoder: PageTranscoder,
        slot_bytes: int,
        batch_pages: int,
        counters: StoreCounters,
        keep_raw: KeepRaw | None = None,
        decoded: DecodedPages | None = None,
    ) -> None:
        self._transcoder = transcoder
        self._decoded = decoded
        self._counters = counters
        # Aligned for O_DIRECT; committed as far as it is used.
        self._room = aligned_array(batch_pages * slot_bytes)
        self._has_warned = False
        self._keep_raw = keep_raw
        self._share: float | None = None  # coded over raw bytes, of what was coded lately
        self._num_seen = 0

    def encode(self, slots: Sequence[ByteArray]) -> list[DiskRecord]:
        """Returns what to write for at most `batch_pages` slots."""
        records: list[DiskRecord] = []
        used = num_coded = num_kept = 0
        keeps_raw = (
            self._keep_raw is not None and self._share is not None and self._keep_raw(self._share)
        )
        for slot in slots:
            self._num_seen += 1
            if keeps_raw and self._num_seen % _STILL_CODED:
                records.append(DiskRecord(_without_spare_blocks(slot), Quality.EXACT))
                num_kept += 1
                continue
            record = self._encode_one(slot, self._room[used:])
            if record is None:
                records.append(DiskRecord(_without_spare_blocks(slot), Quality.EXACT))
            else:
                records.append(record)
                used += record.data.size
                num_coded += 1
                share = record.data.size / _without_spare_blocks(slot).size
                last = share if self._share is None else self._share
                self._share = last + _SHARE_STEP * (share - last)
        self._counters.add("coded_pages", num_coded)
        self._counters.add("coded_bytes", used)
        self._counters.add("uncoded_pages", len(slots) - num_coded - num_kept)
        self._counters.add("kept_raw_pages", num_kept)
        return records

    def _would_lose_twice(self, slot: ByteArray) -> bool:
        if self._decoded is None or self._transcoder.quality == Quality.EXACT:
            return False
        return not self._decoded.may_lose(read_meta(slot))

    def _encode_one(self, slot: ByteArray, room: ByteArray) -> DiskRecord | None:
        try:
            if self._would_lose_twice(slot):
                return None
            record = self._transcoder.encode(slot)
            num_blocks = 0 if record is None else coded_blocks(slot, record)
            if record is None or num_blocks == 0:
                return None
            data = room[: num_blocks * BLOCK_BYTES]
            data[: record.size] = record
            data[record.size :] = 0
            return DiskRecord(data, read_meta(record).quality)
        except Exception:
            self._counters.add("encode_failures")
            if not self._has_warned:
                self._has_warned = True
                logger.exception("hier-kv: a page could not be coded; such pages are stored raw")
            return None


class PageDecoder:
    """Turns what was read from disk into raw pages, in their slots. Thread-safe."""

    def __init__(
        self,
        transcoder: PageTranscoder | None,
        slot_bytes: int,
        decoded: DecodedPages | None = None,
        rules: PageRules | None = None,
    ) -> None:
        self._transcoder = transcoder
        self._rules = rules or AnyPage()
        self._decoded = decoded
        self._slot_bytes = slot_bytes
        self._local = threading.local()
        self._has_warned = False

    def decode(self, slot: ByteArray) -> tuple[int | None, int]:
        """Decodes the record that a slot holds, in place.

        Args:
            slot: u8 [slot_bytes], begins with a record whose checksum and key were verified. Ends
                as a raw record, or as anything.

        Returns:
            The page's quality, None when it cannot be had, which is a miss; and the raw bytes that
            decoding made, 0 where the record was raw.
        """
        try:
            meta, payload_bytes = parse_header(slot)
            if self._decoded is not None:
                self._decoded.note(meta)
            if not self._rules.admits_header(meta, payload_bytes):
                return None, 0
            if meta.codec == RAW_CODEC:
                return (meta.quality if self._rules.admits_page(slot) else None), 0
            if self._transcoder is None:
                return None, 0
            num_bytes = HEADER_BYTES + payload_bytes
            record = self._scratch()[:num_bytes]
            record[:] = slot[:num_bytes]
            is_page = self._transcoder.decode(record, slot) and is_decoded(meta, slot)
            if is_page and self._rules.admits_page(slot):
                return meta.quality, parse_header(slot)[1]
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.exception("hier-kv: a page could not be decoded; it is computed again")
        return None, 0

    def _scratch(self) -> ByteArray:
        scratch: ByteArray | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = aligned_array(self._slot_bytes)
        return scratch


def _without_spare_blocks(slot: ByteArray) -> ByteArray:
    """Returns the blocks of a slot that its record fills."""
    try:
        return slot[: record_blocks(parse_header(slot)[1]) * BLOCK_BYTES]
    except RecordError:
        return slot  # the disk tier refuses and counts it
