"""How a record lies in a store: as one value, or as several where it is long.

The value under a key's own name is the record's first `part_bytes`; a shorter record is whole
there. The rest lies in parts of the same length, the last shorter, named after the checksum in the
record's header: `NAME/CHECKSUM.1`, `.2`, ... They are stored first, the key's own value last. So
whoever finds that value finds the parts that belong to it and never those of another writer, and
its length and header say how many there are: readers need not know the writer's `part_bytes`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    parse_header,
)
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals
from sglang_ext.tiers.remote.base import RemoteKey, level_name

MIN_PART_BYTES = 64 << 10
MAX_PART_BYTES = 64 << 20
MAX_PARTS = 4096
MAX_RECORD_BYTES = MAX_PART_BYTES * MAX_PARTS
_CHECKSUM = struct.Struct("<16xQ")

Pieces = tuple[ByteArray, ...]


class NamedPieces(NamedTuple):
    """A value under its name; its bytes are those of `pieces`, one after another."""

    name: str
    pieces: Pieces


class HeaderFacts(NamedTuple):
    """What a record's first bytes say about it.

    Attributes:
        meta: of the page.
        total_bytes: of header and payload.
        checksum: as stored.
    """

    meta: RecordMeta
    total_bytes: int
    checksum: int


def checked_facts(
    start: ByteArray,
    key: RemoteKey,
    room_bytes: int = MAX_RECORD_BYTES,
    seals: RecordSeals = CHECKSUMS,
) -> HeaderFacts | VerifyResult:
    """Reads the header at the start of a value, and says what is wrong if it is not the key's.

    A checksum is not looked at: only a whole record can be verified. The tag of a protected
    record's header is.

    Args:
        start: u8 [any number]; what was read.
        key: what was asked for.
        room_bytes: no record may be longer.
        seals: what proves records of this store. `start` stays as it is.
    """
    try:
        plain = seals.plain_header(start, key.namespace)
        facts = _header_facts(plain, start, room_bytes)
    except RecordError as error:
        return error.kind
    meta = facts.meta
    found = RemoteKey(meta.namespace, meta.page_hash, meta.lora, level_name(meta.codec, meta.level))
    return facts if found == key else VerifyResult.FOREIGN


def _header_facts(plain: ByteArray, start: ByteArray, room_bytes: int) -> HeaderFacts:
    """What a plain header says, and with it the checksum, or start of a tag, that is stored."""
    meta, payload_bytes = parse_header(plain, room_bytes)
    (checksum,) = _CHECKSUM.unpack_from(start[:24].tobytes())
    return HeaderFacts(meta, HEADER_BYTES + payload_bytes, checksum)


def split(
    name: str, record: ByteArray, part_bytes: int, seals: RecordSeals = CHECKSUMS
) -> list[NamedPieces]:
    """Cuts a record into values; the first is the one to store last.

    Args:
        name: of the key.
        record: u8 [n], header and payload; what follows the payload is left out. Not changed: what
            seals it goes into a copy of the header.
        part_bytes: longest value.
        seals: what puts seals on records of this store.

    Raises:
        RecordError: it is no record.
    """
    header, payload = seals.seal_to_send(record)
    facts = _header_facts(record, header, record.size)
    first_bytes = part_bytes - HEADER_BYTES
    values = [NamedPieces(name, (header, payload[:first_bytes]))]
    names = part_names(name, facts, part_bytes)
    for number, part_name in enumerate(names):
        start = first_bytes + number * part_bytes
        piece = payload[start : start + part_bytes]
        values.append(NamedPieces(part_name, (piece,)))
    return values


def has_too_many_parts(facts: HeaderFacts, head_bytes: int) -> bool:
    """Whether a record whose first value is `head_bytes` long says that it has more than may be."""
    return facts.total_bytes > MAX_PARTS * head_bytes


def part_names(name: str, facts: HeaderFacts, head_bytes: int) -> list[str]:
    """Returns the names of the parts behind the first value, which is `head_bytes` long."""
    rest = max(0, facts.total_bytes - head_bytes)
    num = -(-rest // head_bytes)
    return [f"{name}/{facts.checksum:016x}.{number}" for number in range(1, num + 1)]
