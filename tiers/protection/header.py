"""The header of a protected record, which is record format version 2.

Little-endian::

    offset  bytes  field
    0       4      magic "HKVR"
    4       2      format version, 2
    6       2      header length, 512
    8       8      payload_bytes
    16      8      the first bytes of the payload's tag; parts of long records are named after it
    24      408    as in version 1: map length, map, zeros; encrypted in mode 2
    432     1      mode: 1 = tagged, 2 = encrypted
    433     1      kind of payload: 1 = one piece, 2 = stages
    434     6      zeros
    440     8      key id
    448     16     salt of the process that wrote it
    464     8      counter of that process; with the number of a part the nonce
    472     8      zeros
    480     16     tag of the payload; of its table of stages where the kind is 2
    496     16     tag of bytes [0, 496)

The parts of a record have a nonce each: 0 header, 1 payload or table, 2 + i stage i.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from sglang_ext.tiers.protection.aead import (
    NOTHING,
    ORIGIN_BYTES,
    TAG_BYTES,
    Mode,
    Origin,
    Protection,
    SealKey,
)
from sglang_ext.tiers.records.record import (
    CHECKED_FROM,
    CHECKSUM_OFFSET,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    PROTECTED_VERSION,
    ByteArray,
    RecordError,
    VerifyResult,
)

PAYLOAD_PART = 1
_HEADER_PART = 0
_PURPOSE = b"record"
_BODY_END = 432
_ORIGIN_END = _BODY_END + ORIGIN_BYTES
_PAYLOAD_TAG_AT = 480
_HEADER_TAG_AT = 496
_VERSION = struct.Struct("<H")
_VERSION_AT = 4


@dataclass(frozen=True, slots=True)
class OpenHeader:
    """What a protected record's header says, proved.

    Attributes:
        plain: the header of the plain record, u8 [512]; its checksum is 0.
        origin: whose it is.
        key: what its parts are proved with.
        payload_tag: of its payload, or table.
    """

    plain: ByteArray
    origin: Origin
    key: SealKey
    payload_tag: bytes


def begin(protection: Protection, kind: int, namespace: bytes) -> tuple[Origin, SealKey]:
    """An origin for a new record, and the key for its parts."""
    origin = protection.begin(kind)
    key = protection.key_of(origin, _PURPOSE, namespace)
    assert key is not None  # the writing key is always here
    return origin, key


def seal_header(plain: bytes, origin: Origin, key: SealKey, payload_tag: bytes) -> ByteArray:
    """The header of a protected record, u8 [512].

    Args:
        plain: of the plain record, 512 bytes.
        origin: from `begin`.
        key: from `begin`.
        payload_tag: what sealing the payload gave.

    Raises:
        RecordError: the map is longer than there is room for.
    """
    if plain.count(0, _BODY_END) != HEADER_BYTES - _BODY_END:
        raise RecordError(VerifyResult.BAD_HEADER, "no room for tags behind the map")
    header = np.frombuffer(plain, np.uint8).copy()
    _put(header, _VERSION_AT, _VERSION.pack(PROTECTED_VERSION))
    _put(header, CHECKSUM_OFFSET, payload_tag[: CHECKED_FROM - CHECKSUM_OFFSET])
    _put(header, _BODY_END, origin.pack())
    _put(header, _PAYLOAD_TAG_AT, payload_tag)
    known, body = _known(header, origin.mode)
    _put(header, _HEADER_TAG_AT, key.seal(origin, _HEADER_PART, known, body, body))
    return header


def open_header(
    start: ByteArray, protection: Protection, namespace: bytes
) -> OpenHeader | VerifyResult:
    """Proves the header that `start` begins with, which stays as it is.

    Returns:
        What it says; UNPROTECTED where it has no tag, UNAUTHENTIC where it has a wrong one,
        UNKNOWN_KEY where it names a key that is not here.
    """
    header = start[:HEADER_BYTES].copy()
    if header.size < HEADER_BYTES or header[: len(MAGIC)].tobytes() != MAGIC:
        return VerifyResult.BAD_MAGIC
    (version,) = _VERSION.unpack_from(header.data, _VERSION_AT)
    if version != PROTECTED_VERSION:
        is_plain = version == FORMAT_VERSION
        return VerifyResult.UNPROTECTED if is_plain else VerifyResult.BAD_VERSION
    origin = Origin.unpack(header[_BODY_END:_ORIGIN_END].tobytes())
    if origin is None:
        return VerifyResult.BAD_HEADER
    key = protection.key_of(origin, _PURPOSE, namespace)
    if key is None:
        return VerifyResult.UNKNOWN_KEY
    payload_tag = header[_PAYLOAD_TAG_AT:_HEADER_TAG_AT].tobytes()
    tag = header[_HEADER_TAG_AT:].tobytes()
    known, body = _known(header, origin.mode)
    if not key.open(origin, _HEADER_PART, known, body, tag):
        return VerifyResult.UNAUTHENTIC
    _put(header, _VERSION_AT, _VERSION.pack(FORMAT_VERSION))
    header[CHECKSUM_OFFSET:CHECKED_FROM] = 0
    header[_BODY_END:] = 0
    return OpenHeader(header, origin, key, payload_tag)


def read_origin(start: ByteArray) -> Origin | None:
    """Who a protected record says it is of, unproved; None where it is no protected record."""
    header = start[:HEADER_BYTES].tobytes()
    if len(header) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        return None
    is_protected = _VERSION.unpack_from(header, _VERSION_AT) == (PROTECTED_VERSION,)
    return Origin.unpack(header[_BODY_END:_ORIGIN_END]) if is_protected else None


def _known(header: ByteArray, mode: Mode) -> tuple[bytes, ByteArray]:
    """What the header's tag covers as it is, and what is encrypted, a part of `header`."""
    if mode is Mode.TAG:
        return header[:_HEADER_TAG_AT].tobytes(), NOTHING
    known = header[:CHECKED_FROM].tobytes() + header[_BODY_END:_HEADER_TAG_AT].tobytes()
    return known, header[CHECKED_FROM:_BODY_END]


def _put(header: ByteArray, at: int, data: bytes) -> None:
    header[at : at + len(data)] = np.frombuffer(data, np.uint8)


assert _HEADER_TAG_AT + TAG_BYTES == HEADER_BYTES
