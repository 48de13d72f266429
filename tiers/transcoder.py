"""How pages are coded on their way to disk and decoded on their way back.

The tiers move bytes and know no codec. Whoever sets up the store gives it a `PageTranscoder`; the
spill thread then writes what `encode` returns, and the promote threads hand to `decode` what they
read. What is coded says so in its record's header: codec, level, profile and quality. None of them
is in the page's key, so records of several codecs lie side by side in a namespace.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np

from sglang_ext.tiers.base import record_blocks
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    RAW_CODEC,
    ByteArray,
    RecordError,
    RecordMeta,
    parse_header,
    write_meta,
)


class PageTranscoder(abc.ABC):
    """Codes pages for the disk. Thread-safe: called by several threads, none of which holds a lock.

    Neither method may keep its arguments. An error that one raises costs the page: it is stored
    raw, or it is a miss, and counted.

    Attributes:
        encodes: whether pages are coded from now on. With False `encode` is never called and
            namespaces are laid out as without a transcoder; what is coded already is decoded.
        quality: what `encode` makes of an exact page at its best: 0 when it loses nothing.
    """

    encodes: bool = True
    quality: int = 0

    @abc.abstractmethod
    def encode(self, slot: ByteArray) -> ByteArray | None:
        """Codes one page.

        Args:
            slot: u8 [slot_bytes], a raw record whose header has no checksum yet. Not to be changed.

        Returns:
            u8 [n], n <= slot_bytes, the coded record with its header (`coded_record` makes one),
            copied before the next call;
            None when the page is better stored raw.
        """

    def close(self) -> None:  # noqa: B027
        """The store is about to close; pages may still be coded and decoded."""

    @abc.abstractmethod
    def decode(self, record: ByteArray, out_slot: ByteArray) -> bool:
        """Decodes one page.

        Args:
            record: u8 [n], header and payload of a record of any codec but raw; its checksum, key
                and namespace have been verified. Lengths in the payload are not to be trusted all
                the same: who can write to the folder can make a right checksum.
            out_slot: u8 [slot_bytes]; takes the raw record with its header (`raw_header` writes
                it). What it held before means nothing.

        Returns:
            Whether it worked; False is a miss.
        """


def coded_record(
    meta: RecordMeta,
    payload: ByteArray,
    *,
    codec: str,
    level: int = 0,
    profile: bytes = b"",
    quality: int = 0,
) -> ByteArray:
    """Returns a record, u8 [512 + payload], of a page whose raw header says `meta`.

    Args:
        meta: the page's.
        payload: u8 [n], coded.
        codec: id, not "raw".
        level: the codec's setting.
        profile: hash of the codec's profile.
        quality: 0 when the codec loses nothing. A page that is lossy already stays at least so.
    """
    record = np.empty(HEADER_BYTES + payload.size, np.uint8)
    coded = dataclasses.replace(
        meta, codec=codec, level=level, profile=profile, quality=max(quality, meta.quality)
    )
    write_meta(record, coded, payload.size)
    record[HEADER_BYTES:] = payload
    return record


def raw_header(meta: RecordMeta) -> RecordMeta:
    """Returns what the header of a decoded page says, given that of its coded record."""
    return dataclasses.replace(meta, codec=RAW_CODEC, level=0, profile=b"")


def coded_blocks(slot: ByteArray, record: ByteArray) -> int:
    """Returns the blocks that a coded record fills; 0 when it is not to be stored.

    It is when it is of the same page, no better than the page itself, and saves a block.

    Args:
        slot: the raw record.
        record: what `PageTranscoder.encode` returned for it.

    Raises:
        RecordError: one of them is no record.
        ValueError: what was returned for it is not the same page coded.
    """
    meta, raw_bytes = parse_header(slot)
    coded, coded_bytes = parse_header(record)
    if coded.codec == RAW_CODEC or not _is_same_page(meta, coded):
        raise ValueError(f"expected page {meta.page_hash.hex()} coded, got {coded}")
    if record.dtype != np.uint8 or record.ndim != 1 or coded.quality < meta.quality:
        raise ValueError(f"a coded record is u8 [n] and no better than its page, got {coded}")
    blocks = record_blocks(coded_bytes)
    return blocks if blocks < record_blocks(raw_bytes) else 0


def is_decoded(coded: RecordMeta, slot: ByteArray) -> bool:
    """Says whether `slot` holds a raw record of the page that `coded` is of.

    Args:
        coded: header of the record that was decoded.
        slot: what it was decoded to.
    """
    try:
        meta, _ = parse_header(slot)
    except RecordError:
        return False
    return meta.codec == RAW_CODEC and meta.quality == coded.quality and _is_same_page(meta, coded)


def _is_same_page(one: RecordMeta, other: RecordMeta) -> bool:
    return raw_header(dataclasses.replace(one, quality=0)) == raw_header(
        dataclasses.replace(other, quality=0)
    )
