"""Checksums of records: put in when one is written, checked whenever one is read.

Several records are checked together where there are several: their headers one by one, and the
checksums in one call that lets go of the GIL once (`sglang_ext.tiers.records.checksums`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_ext.tiers.records.checksums import digests, is_plain
from sglang_ext.tiers.records.record import (
    CHECKED_FROM,
    CHECKSUM_OFFSET,
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    meta_of,
    parse_fields,
    read_fixed,
)

_U64 = struct.Struct("<Q")


class Sealed(NamedTuple):
    """A record that can be stored.

    Attributes:
        meta: what its header says.
        payload_bytes: length of its payload.
    """

    meta: RecordMeta
    payload_bytes: int


class RecordKey(NamedTuple):
    """Which page a record must be of.

    Attributes:
        page_hash: the 32 bytes asked for.
        namespace: the 32 bytes of the namespace asked for.
        lora: the 32 bytes of the adapter's digest, or empty.
    """

    page_hash: bytes
    namespace: bytes
    lora: bytes


def seal(slot: ByteArray) -> int:
    """Computes the checksum of `slot` and stores it in the header.

    Args:
        slot: u8 [slot_bytes] with a header from `write_meta` and its payload in place.

    Returns:
        The checksum, xxh3_64.

    Raises:
        RecordError: the slot has no header of this version, or a length that does not fit.
    """
    payload_bytes, _ = read_fixed(slot)
    (checksum,) = digests([_covered(slot, payload_bytes)])
    _store(slot, checksum)
    return checksum


def seal_records(slots: Sequence[ByteArray], namespace: bytes) -> list[Sealed | RecordError]:
    """Seals records of one namespace.

    Args:
        slots: as for `seal`.
        namespace: the 32 bytes of their namespace.

    Returns:
        For each what its header says; or what `read_meta` would raise, or an error whose `kind` is
        FOREIGN: then the slot is as it was.
    """
    results = [_read_own(slot, namespace) for slot in slots]
    good = [
        (slot, result)
        for slot, result in zip(slots, results, strict=True)
        if isinstance(result, Sealed)
    ]
    found = digests([_covered(slot, result.payload_bytes) for slot, result in good])
    for (slot, _), checksum in zip(good, found, strict=True):
        _store(slot, checksum)
    return results


def sealed_header(slot: ByteArray) -> ByteArray:
    """Returns a copy of the header with the checksum in it, u8 [512]; leaves `slot` as it is.

    For who sends a record away while others may read or seal the slot.

    Args:
        slot: as for `seal`.

    Raises:
        RecordError: as `seal` does.
    """
    payload_bytes, _ = read_fixed(slot)
    header = slot[:HEADER_BYTES].copy()
    (checksum,) = digests([_covered(slot, payload_bytes)])
    _store(header, checksum)
    return header


def verify(slot: ByteArray, page_hash: bytes, namespace: bytes, lora: bytes) -> VerifyResult:
    """Checks that `slot` holds an intact record of exactly this page. Never raises.

    Args:
        slot: u8 [slot_bytes].
        page_hash: the 32 bytes asked for.
        namespace: the 32 bytes of the namespace asked for.
        lora: the 32 bytes of the adapter's digest, or empty.

    Returns:
        OK only when the whole key matches and the checksum over header and payload is right.
    """
    return verify_records([slot], [RecordKey(page_hash, namespace, lora)])[0]


def verify_records(slots: Sequence[ByteArray], keys: Sequence[RecordKey]) -> list[VerifyResult]:
    """`verify` for each of several records."""
    results = [VerifyResult.BAD_HEADER] * len(slots)
    # Of those with a good header: index, covered bytes, and whether the key is right.
    good: list[tuple[int, ByteArray, bool]] = []
    for at, (slot, key) in enumerate(zip(slots, keys, strict=True)):
        try:
            if is_plain(slot):
                fields, payload_bytes = parse_fields(slot)
                is_own = (fields["k"], fields["n"], fields["l"]) == key
                good.append((at, _covered(slot, payload_bytes), is_own))
        except RecordError as error:
            results[at] = error.kind
        except Exception:
            continue  # whatever it is, it is no record
    found = digests([covered for _, covered, _ in good])
    for (at, _, is_own), checksum in zip(good, found, strict=True):
        if not _is_stored(slots[at], checksum):
            results[at] = VerifyResult.BAD_CHECKSUM
        else:
            results[at] = VerifyResult.OK if is_own else VerifyResult.FOREIGN
    return results


def checksum_matches(slot: ByteArray, payload_bytes: int) -> bool:
    """Says whether the stored checksum is that of the bytes; `payload_bytes` must fit."""
    (checksum,) = digests([_covered(slot, payload_bytes)])
    return _is_stored(slot, checksum)


def _read_own(slot: ByteArray, namespace: bytes) -> Sealed | RecordError:
    try:
        fields, payload_bytes = parse_fields(slot)
    except RecordError as error:
        return error
    if fields["n"] != namespace:
        return RecordError(VerifyResult.FOREIGN, "the record is of another namespace")
    return Sealed(meta_of(fields), payload_bytes)


def _covered(slot: ByteArray, payload_bytes: int) -> ByteArray:
    return slot[CHECKED_FROM : HEADER_BYTES + payload_bytes]


def _store(header: ByteArray, checksum: int) -> None:
    header[CHECKSUM_OFFSET:CHECKED_FROM] = np.frombuffer(_U64.pack(checksum), np.uint8)


def _is_stored(slot: ByteArray, checksum: int) -> bool:
    return slot[CHECKSUM_OFFSET:CHECKED_FROM].tobytes() == _U64.pack(checksum)
