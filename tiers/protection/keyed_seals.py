"""Seals that nobody without the deployment's key can make: tags, and encryption if wished.

A protected record (`header`) is as long as the plain one, so it takes the same place everywhere.
Its header has a tag of its own, which covers the payload's, so a header that was read alone is
proved. A staged record's stages have each a tag, in its table, which takes the place of the plain
one's (`remote.staged`)::

    512   4     magic "HKVL"
    516   1     version, 2
    517   1     number of stages n, 1 to 12
    518   1     first level
    519   1     zero
    520   20 n  of each stage: end u32, counted from the record's start; its tag, 16 bytes
    ...         zeros up to 768
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.protection.aead import ORIGIN_BYTES, TAG_BYTES, Mode, Origin, Protection
from sglang_ext.tiers.protection.header import (
    PAYLOAD_PART,
    OpenHeader,
    begin,
    open_header,
    read_origin,
    seal_header,
)
from sglang_ext.tiers.records.checks import RecordKey
from sglang_ext.tiers.records.checksums import is_plain
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    meta_of,
    parse_fields,
    parse_header,
    read_fixed,
)
from sglang_ext.tiers.records.seals import FooterSeal, RecordSeals, SealedRecord, StageOpener
from sglang_ext.tiers.remote.staged import START_BYTES, TABLE_BYTES, read_stages, write_table

MAX_PROTECTED_STAGES = 12

_WHOLE, _STAGED = 1, 2  # stored; never renumber
_MAGIC, _VERSION = b"HKVL", 2
_HEAD = struct.Struct("<4sBBBB")
_STAGE = struct.Struct("<I16s")
_FIRST_STAGE_PART = 2


class KeyedSeals(RecordSeals):
    """See `RecordSeals`. Thread-safe."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection
        self.footers = KeyedFooters(protection)

    def seal(
        self, slots: Sequence[ByteArray], namespace: bytes
    ) -> list[SealedRecord | RecordError]:
        """See `RecordSeals.seal`."""
        blocks = aligned_array(len(slots) * BLOCK_BYTES).reshape(-1, BLOCK_BYTES)
        return [
            self._sealed(slot, namespace, block) for slot, block in zip(slots, blocks, strict=True)
        ]

    def _sealed(
        self, slot: ByteArray, namespace: bytes, block: ByteArray
    ) -> SealedRecord | RecordError:
        try:
            meta, payload_bytes = parse_header(slot)
            if meta.namespace != namespace:
                return RecordError(VerifyResult.FOREIGN, "the record is of another namespace")
            record = slot[: HEADER_BYTES + payload_bytes]
            if self._protection.mode is Mode.ENCRYPT:
                fill = partial(self._encrypt, record, namespace)
                return SealedRecord(meta, payload_bytes, (), fill)
            header, _ = self._seal_whole(record, namespace, None)
        except RecordError as error:
            return error
        # What is only tagged goes to disk from where it is, but for its first block.
        block[:HEADER_BYTES] = header
        block[HEADER_BYTES:] = slot[HEADER_BYTES:BLOCK_BYTES]
        return SealedRecord(meta, payload_bytes, (block, slot[BLOCK_BYTES:]))

    def _encrypt(self, record: ByteArray, namespace: bytes, out: ByteArray) -> None:
        header, _ = self._seal_whole(record, namespace, out[HEADER_BYTES : record.size])
        out[:HEADER_BYTES] = header
        out[record.size :] = 0

    def open(self, slots: Sequence[ByteArray], keys: Sequence[RecordKey]) -> list[VerifyResult]:
        """See `RecordSeals.open`."""
        return [self._opened(slot, key) for slot, key in zip(slots, keys, strict=True)]

    def _opened(self, slot: ByteArray, key: RecordKey) -> VerifyResult:
        try:
            if not is_plain(slot):
                return VerifyResult.BAD_HEADER
            meta = self._open(slot, key.namespace)
        except RecordError as error:
            return error.kind
        except Exception:
            return VerifyResult.BAD_HEADER  # whatever it is, it is no record
        is_own = (meta.page_hash, meta.namespace, meta.lora) == key
        return VerifyResult.OK if is_own else VerifyResult.FOREIGN

    def open_any(self, slot: ByteArray, namespace: bytes) -> tuple[RecordMeta, int] | None:
        """See `RecordSeals.open_any`."""
        try:
            record = slot.copy()
            meta = self._open(record, namespace)
            return (meta, read_fixed(record)[0]) if meta.namespace == namespace else None
        except RecordError:
            return None

    def seal_to_send(self, record: ByteArray) -> tuple[ByteArray, ByteArray]:
        """See `RecordSeals.seal_to_send`."""
        meta, payload_bytes = parse_header(record)
        end = HEADER_BYTES + payload_bytes
        try:
            stages = read_stages(record[:end], end)
        except RecordError:
            is_copied = self._protection.mode is Mode.ENCRYPT
            out = np.empty(payload_bytes, np.uint8) if is_copied else None
            return self._seal_whole(record[:end], meta.namespace, out)
        if len(stages.ends) > MAX_PROTECTED_STAGES:
            raise RecordError(VerifyResult.BAD_HEADER, "more stages than a protected record has")
        return self._seal_stages(record[:end], meta.namespace, stages.first_level, stages.ends)

    def plain_header(self, start: ByteArray, namespace: bytes) -> ByteArray:
        """See `RecordSeals.plain_header`."""
        return self._open_header(start, namespace).plain

    def open_start(
        self, start: ByteArray, namespace: bytes
    ) -> tuple[ByteArray, StageOpener | None]:
        """See `RecordSeals.open_start`."""
        found = self._open_header(start, namespace)
        payload_bytes, _ = read_fixed(found.plain, 1 << 62)
        stages = _open_table(found, start[HEADER_BYTES:START_BYTES].copy(), payload_bytes)
        plain = np.empty(START_BYTES, np.uint8)
        plain[:HEADER_BYTES] = found.plain
        write_table(plain, stages.first_level, stages.ends, [0] * len(stages.ends))
        return plain, stages.open

    def is_hidden(self, start: ByteArray) -> bool:
        """See `RecordSeals.is_hidden`."""
        origin = read_origin(start)
        return origin is not None and origin.mode is Mode.ENCRYPT

    def _seal_whole(
        self, record: ByteArray, namespace: bytes, out: ByteArray | None
    ) -> tuple[ByteArray, ByteArray]:
        """Header and payload of a protected record; `out` takes the ciphertext."""
        origin, key = begin(self._protection, _WHOLE, namespace)
        payload = record[HEADER_BYTES:]
        out = payload if out is None else out
        tag = key.seal(origin, PAYLOAD_PART, b"", payload, out)
        return seal_header(record[:HEADER_BYTES].tobytes(), origin, key, tag), out

    def _seal_stages(
        self, record: ByteArray, namespace: bytes, first_level: int, ends: Sequence[int]
    ) -> tuple[ByteArray, ByteArray]:
        origin, key = begin(self._protection, _STAGED, namespace)
        out = record.copy()
        table = _HEAD.pack(_MAGIC, _VERSION, len(ends), first_level, 0)
        for at, (start, end) in enumerate(pairwise((START_BYTES, *ends))):
            data = out[start:end]
            table += _STAGE.pack(end, key.seal(origin, _FIRST_STAGE_PART + at, b"", data, data))
        data = out[HEADER_BYTES:START_BYTES]
        data[:] = np.frombuffer(table.ljust(TABLE_BYTES, b"\0"), np.uint8)
        tag = key.seal(origin, PAYLOAD_PART, b"", data, data)
        header = seal_header(record[:HEADER_BYTES].tobytes(), origin, key, tag)
        return header, out[HEADER_BYTES:]

    def _open_header(self, start: ByteArray, namespace: bytes) -> OpenHeader:
        found = open_header(start, self._protection, namespace)
        if isinstance(found, VerifyResult):
            raise RecordError(found, f"the header is {found.value}")
        return found

    def _open(self, slot: ByteArray, namespace: bytes) -> RecordMeta:
        """Makes the record that a slot begins with plain.

        Raises:
            RecordError: it is none, or proved to be wrong.
        """
        found = self._open_header(slot, namespace)
        fields, payload_bytes = parse_fields(found.plain, slot.size)
        end = HEADER_BYTES + payload_bytes
        payload = slot[HEADER_BYTES:end]
        if found.origin.kind == _STAGED:
            stages = _open_table(found, slot[HEADER_BYTES:START_BYTES], payload_bytes)
            slot[:HEADER_BYTES] = found.plain
            stages.open_all(slot)
        elif found.origin.kind != _WHOLE or not found.key.open(
            found.origin, PAYLOAD_PART, b"", payload, found.payload_tag
        ):
            raise RecordError(VerifyResult.UNAUTHENTIC, "the payload is not the header's")
        slot[:HEADER_BYTES] = found.plain
        return meta_of(fields)


class _Stages(NamedTuple):
    """The table of a protected staged record, proved."""

    header: OpenHeader
    first_level: int
    ends: tuple[int, ...]
    tags: tuple[bytes, ...]

    def open(self, stage: int, data: ByteArray) -> bool:
        """See `StageOpener`."""
        part = _FIRST_STAGE_PART + stage
        return self.header.key.open(self.header.origin, part, b"", data, self.tags[stage])

    def open_all(self, record: ByteArray) -> None:
        """Makes all stages of a record plain, and its table; the header is.

        Raises:
            RecordError: one is proved to be wrong.
        """
        checksums = []
        for at, (start, end) in enumerate(pairwise((START_BYTES, *self.ends))):
            data = record[start:end]
            if not self.open(at, data):
                raise RecordError(VerifyResult.UNAUTHENTIC, f"stage {at} is not the table's")
            checksums.append(int(xxhash.xxh3_64_intdigest(data.data)))
        write_table(record, self.first_level, self.ends, checksums)


def _open_table(found: OpenHeader, table: ByteArray, payload_bytes: int) -> _Stages:
    """Proves a table of stages, u8 [256], in place.

    Raises:
        RecordError: it is none, or wrong.
    """
    is_table = found.origin.kind == _STAGED and table.size == TABLE_BYTES
    if not is_table or payload_bytes <= TABLE_BYTES:
        raise RecordError(VerifyResult.BAD_HEADER, "no table of stages")
    if not found.key.open(found.origin, PAYLOAD_PART, b"", table, found.payload_tag):
        raise RecordError(VerifyResult.UNAUTHENTIC, "the table of stages is not the header's")
    data = table.tobytes()
    magic, version, count, first_level, zero = _HEAD.unpack_from(data)
    if (magic, version, zero) != (_MAGIC, _VERSION, 0) or not 1 <= count <= MAX_PROTECTED_STAGES:
        raise RecordError(VerifyResult.BAD_VERSION, "a table of stages of another version")
    entries = [_STAGE.unpack_from(data, _HEAD.size + at * _STAGE.size) for at in range(count)]
    ends = tuple(end for end, _ in entries)
    rises = all(one < other for one, other in pairwise((START_BYTES, *ends)))
    if not rises or ends[-1] != HEADER_BYTES + payload_bytes:
        raise RecordError(VerifyResult.BAD_HEADER, f"stages that end at {ends}")
    return _Stages(found, first_level, ends, tuple(tag for _, tag in entries))


class KeyedFooters(FooterSeal):
    """See `FooterSeal`. What is stored is origin, tag, and the table or its ciphertext."""

    _PURPOSE = b"footer"

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    def seal(self, namespace: bytes, known: bytes, table: bytes) -> bytes:
        """See `FooterSeal.seal`."""
        origin = self._protection.begin(_WHOLE)
        key = self._protection.key_of(origin, self._PURPOSE, namespace)
        assert key is not None  # the writing key is always here
        data = np.frombuffer(table, np.uint8).copy()
        tag = key.seal(origin, PAYLOAD_PART, origin.pack() + known, data, data)
        return origin.pack() + tag + data.tobytes()

    def open(self, namespace: bytes, known: bytes, data: bytes) -> bytes | None:
        """See `FooterSeal.open`."""
        if len(data) < ORIGIN_BYTES + TAG_BYTES:
            return None
        packed = data[:ORIGIN_BYTES]
        origin = Origin.unpack(packed)
        key = origin and self._protection.key_of(origin, self._PURPOSE, namespace)
        if origin is None or key is None:
            return None
        tag = data[ORIGIN_BYTES : ORIGIN_BYTES + TAG_BYTES]
        table = np.frombuffer(data[ORIGIN_BYTES + TAG_BYTES :], np.uint8).copy()
        is_own = key.open(origin, PAYLOAD_PART, packed + known, table, tag)
        return table.tobytes() if is_own else None
