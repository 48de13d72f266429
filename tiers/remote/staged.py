"""A coded page in a remote store: a record whose leading bytes are of use alone, and verifiable.

A record's checksum covers all of it, so it says nothing about a part that was read. A staged record
has a table between header and coded payload: where each level's bytes end, and their checksums.
Whoever has read the first `START_BYTES` knows what the page is and how many bytes each level takes.
Little-endian (stored; a change needs another version)::

    0     512   the record's header
    512   4     magic "HKVL"
    516   1     version, 1 (a protected record has version 2, see `protection.seals`)
    517   1     number of stages n, 1 to 16
    518   1     first level: what the bytes up to the first end decode to
    519   1     zero
    520   12 n  of each stage: end u32, counted from the record's start; xxh3_64 of its bytes
    ...         zeros up to 760
    760   8     xxh3_64 of bytes [8, 16), [24, 512) and [512, 760)
    768         the payload of the coded record, as it is on disk
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import xxhash

from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    RAW_CODEC,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    parse_header,
    write_meta,
)
from sglang_ext.tiers.records.seals import StageOpener

MAX_STAGES = 16
TABLE_BYTES = 256
START_BYTES = HEADER_BYTES + TABLE_BYTES

_MAGIC, _VERSION = b"HKVL", 1
_HEAD = struct.Struct("<4sBBBB")
_STAGE = struct.Struct("<IQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = START_BYTES - _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Stages:
    """What the first bytes of a staged record say.

    Attributes:
        meta: of the page; its level is the finest one.
        first_level: what the first stage alone decodes to.
        ends: of each stage, from the record's start.
        checksums: of each stage's bytes.
        opener: what proves a stage in place of its checksum, if the record is protected.
    """

    meta: RecordMeta
    first_level: int
    ends: tuple[int, ...]
    checksums: tuple[int, ...]
    opener: StageOpener | None = field(default=None, compare=False)

    def start_of(self, stage: int) -> int:
        """Where a stage's bytes begin."""
        return self.ends[stage - 1] if stage else START_BYTES

    def is_sound(self, stage: int, data: ByteArray) -> bool:
        """Whether `data` are a stage's bytes, all of them; asked once, it makes them plain."""
        if data.size != self.ends[stage] - self.start_of(stage):
            return False
        if self.opener is not None:
            return self.opener(stage, data)
        return _digest(data) == self.checksums[stage]

    @property
    def failure(self) -> VerifyResult:
        """What bytes of a stage that are not sound count as."""
        return VerifyResult.BAD_CHECKSUM if self.opener is None else VerifyResult.UNAUTHENTIC


def stage(record: ByteArray, first_level: int, ends: Sequence[int]) -> ByteArray:
    """Makes a staged record of a coded one.

    Args:
        record: u8 [n], header and payload, of any codec but raw.
        first_level: what the bytes up to the first end decode to.
        ends: where each level's bytes end in `record`, strictly rising, the last one its length.

    Raises:
        RecordError: it is no record.
        ValueError: it is raw, or these are no ends of its levels.
    """
    meta, payload_bytes = parse_header(record)
    bounds = (HEADER_BYTES, *ends)
    rises = all(start < end for start, end in pairwise(bounds))
    if not rises or not 1 <= len(ends) <= MAX_STAGES or ends[-1] != HEADER_BYTES + payload_bytes:
        raise ValueError(f"a record of {payload_bytes} bytes has no stages that end at {ends}")
    if meta.codec == RAW_CODEC:
        raise ValueError("raw records have no stages")
    staged = np.zeros(TABLE_BYTES + ends[-1], np.uint8)
    write_meta(staged, meta, TABLE_BYTES + payload_bytes)
    staged[START_BYTES:] = record[HEADER_BYTES : ends[-1]]
    ends = [end + TABLE_BYTES for end in ends]
    checksums = [_digest(staged[start:end]) for start, end in pairwise((START_BYTES, *ends))]
    write_table(staged, first_level, ends, checksums)
    return staged


def write_table(
    start: ByteArray, first_level: int, ends: Sequence[int], checksums: Sequence[int]
) -> None:
    """Writes the table of a staged record behind its header, which is there.

    Args:
        start: u8 [at least START_BYTES], writable.
        first_level: what the first stage decodes to.
        ends: of each stage, from the record's start.
        checksums: of each stage's bytes, xxh3_64.
    """
    table = _HEAD.pack(_MAGIC, _VERSION, len(ends), first_level, 0)
    table += b"".join(map(_STAGE.pack, ends, checksums))
    padded = table.ljust(TABLE_BYTES, b"\0")
    start[HEADER_BYTES:START_BYTES] = np.frombuffer(padded, np.uint8)
    checksum = _CHECKSUM.pack(_digest_of_start(start))
    start[_CHECKSUM_AT:START_BYTES] = np.frombuffer(checksum, np.uint8)


def read_stages(start: ByteArray, room_bytes: int) -> Stages:
    """Reads and checks the first bytes of a staged record. The rest need not be there.

    Args:
        start: u8 [at least START_BYTES].
        room_bytes: no record may be longer.

    Raises:
        RecordError: they are no such bytes, of another version, or damaged.
    """
    meta, payload_bytes = parse_header(start, room_bytes)
    if start.size < START_BYTES or payload_bytes <= TABLE_BYTES:
        raise RecordError(VerifyResult.BAD_HEADER, "no room for a table of stages")
    table = start[HEADER_BYTES:START_BYTES].tobytes()
    magic, version, count, first_level, zero = _HEAD.unpack_from(table)
    if magic != _MAGIC:
        raise RecordError(
            VerifyResult.BAD_MAGIC, f"a table of stages has {_MAGIC!r}, got {magic!r}"
        )
    if version != _VERSION:
        raise RecordError(VerifyResult.BAD_VERSION, f"stages of version {version}")
    if _CHECKSUM.unpack_from(table, TABLE_BYTES - _CHECKSUM.size)[0] != _digest_of_start(start):
        raise RecordError(VerifyResult.BAD_CHECKSUM, "the table of stages is damaged")
    if zero or not 1 <= count <= MAX_STAGES:
        raise RecordError(VerifyResult.BAD_HEADER, f"{count} stages")
    entries = [_STAGE.unpack_from(table, _HEAD.size + at * _STAGE.size) for at in range(count)]
    ends = tuple(end for end, _ in entries)
    rises = all(one < other for one, other in pairwise((START_BYTES, *ends)))
    if not rises or ends[-1] != HEADER_BYTES + payload_bytes or meta.codec == RAW_CODEC:
        raise RecordError(VerifyResult.BAD_HEADER, f"stages that end at {ends}")
    return Stages(meta, first_level, ends, tuple(checksum for _, checksum in entries))


def unstage(stages: Stages, last: int, payload: ByteArray) -> ByteArray:
    """Returns the coded record that the leading stages make, u8 [n].

    Args:
        stages: of the record.
        last: the last stage that is there.
        payload: u8, the bytes of stages 0 to `last`, verified.

    Raises:
        ValueError: these are too many bytes, or too few.
    """
    if payload.size != stages.ends[last] - START_BYTES:
        raise ValueError(f"{payload.size} bytes do not end where stage {last} does")
    record = np.empty(HEADER_BYTES + payload.size, np.uint8)
    level = min(stages.meta.level, stages.first_level + last)
    write_meta(record, replace(stages.meta, level=level), payload.size)
    record[HEADER_BYTES:] = payload
    return record


def _digest(data: ByteArray) -> int:
    return int(xxhash.xxh3_64_intdigest(data.data))


def _digest_of_start(start: ByteArray) -> int:
    state = xxhash.xxh3_64(start[8:16].tobytes())
    state.update(start[24:_CHECKSUM_AT].tobytes())
    return int(state.intdigest())
