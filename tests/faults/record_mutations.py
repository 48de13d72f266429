"""Records forged field by field, every checksum right again, so that parsing goes deep."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import msgpack
import numpy as np
import xxhash

from sglang_ext.device.layout import HEADER_BYTES, U8, PageLayout
from sglang_ext.tiers.records.record import MAGIC, parse_header
from sglang_ext.tiers.remote.staged import START_BYTES

EDGES = (
    0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 504, 511, 512, 4095, 4096, 0xFFFF, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**33, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_FIXED = struct.Struct("<4sHHQQI")
_TEXTS = (
    "",
    "pre",
    "bound",
    "delta",
    "raw",
    "zstd",
    "hier",
    "lossless",
    "none",
    "x" * 40,
    "\u00e9",
)


def number(random: Random, near: int = 0) -> int:
    """A number that a check may have forgotten."""
    if random.random() < 0.5:
        return random.choice(EDGES)
    other = near + random.choice((-8, -1, 1, 8, 64, random.randrange(-512, 512)))
    return min(max(0, other), EDGES[-1])  # a map has no larger ones


def seal(record: bytearray) -> bytes:
    """Puts the right checksum in, as far as there is something to cover."""
    if len(record) >= HEADER_BYTES:
        (payload_bytes,) = struct.unpack_from("<Q", record, 8)
        covered = record[24 : HEADER_BYTES + min(payload_bytes, len(record))]
        struct.pack_into("<Q", record, 16, xxhash.xxh3_64_intdigest(bytes(covered)))
    return bytes(record)


def seal_stages(record: bytearray) -> None:
    """Makes the checksums of a table of stages, and of the stages, right."""
    if len(record) < START_BYTES:
        return
    count, start = record[517], START_BYTES
    for at in range(min(count, 19)):
        place = 520 + 12 * at
        (end,) = struct.unpack_from("<I", record, place)
        if start <= end <= len(record):
            digest = xxhash.xxh3_64_intdigest(bytes(record[start:end]))
            struct.pack_into("<Q", record, place + 4, digest)
        start = end
    state = xxhash.xxh3_64(bytes(record[8:16]))
    state.update(bytes(record[24:760]))
    struct.pack_into("<Q", record, 760, state.intdigest())


def _value(random: Random, old: Any) -> Any:
    if isinstance(old, bool) or random.random() < 0.05:
        return random.choice((None, True, -1, 1.5, [], {}, "x", b"x"))
    if isinstance(old, int):
        return number(random, old)
    if isinstance(old, str):
        return random.choice(_TEXTS)
    if isinstance(old, bytes):
        changes = (b"", b"x", old + b"\0", bytes(32), old[:-1], random.randbytes(32))
        return random.choice(changes)
    return old


def forge_header(record: bytearray, random: Random) -> None:
    """Changes fields of a record's header; the key stays right most of the time."""
    size = len(record)
    magic, version, length, payload_bytes, checksum, map_bytes = _FIXED.unpack_from(record)
    fields = msgpack.unpackb(bytes(record[28 : 28 + map_bytes]))
    if random.random() < 0.4:
        payload_bytes = number(random, payload_bytes)
    names = "pcvrqth" if random.random() < 0.95 else "".join(fields)
    for name in random.sample(names, random.randrange(0, 3)):
        fields[name] = _value(random, fields[name])
    if random.random() < 0.03:
        version = number(random, version) & 0xFFFF
    packed = msgpack.packb(fields)
    if random.random() < 0.02:
        packed = random.randbytes(random.randrange(484))
    map_bytes = len(packed) if random.random() > 0.02 else number(random) & 0xFFFFFFFF
    fixed = _FIXED.pack(magic, version, length, payload_bytes, checksum, map_bytes)
    header = (fixed + packed).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    record[:HEADER_BYTES] = header[: min(size, HEADER_BYTES)]


def forge_tail(tail: bytearray, random: Random, layout: PageLayout) -> None:
    """Changes words of a page's tail: version, state, position, counts, corrections."""
    num_words = len(tail) // 4
    for _ in range(random.randrange(1, 4)):
        kind = random.random()
        if kind < 0.35:  # a position
            struct.pack_into(
                "<Q", tail, 8, number(random, struct.unpack_from("<Q", tail, 8)[0]) % 2**64
            )
        elif kind < 0.5:
            struct.pack_into("<I", tail, 4, random.choice((0, 1, 2, 3, 2**31)))
        elif kind < 0.75:  # the counts, and their sum
            at = 6 + random.randrange(layout.num_layers)
            old = struct.unpack_from("<I", tail, 4 * at)[0]
            new = number(random, old) % 2**32
            struct.pack_into("<I", tail, 4 * at, new)
            if random.random() < 0.7:
                total = struct.unpack_from("<I", tail, 16)[0] + new - old
                struct.pack_into("<I", tail, 16, total % 2**32)
        else:
            at = random.randrange(num_words)
            old = struct.unpack_from("<I", tail, 4 * at)[0]
            struct.pack_into("<I", tail, 4 * at, number(random, old) % 2**32)


def forged_page(slot: U8, random: Random, layout: PageLayout) -> bytes:
    """A raw record as somebody who knows the format would forge it, sealed."""
    _, payload_bytes = parse_header(slot)
    record = bytearray(slot[: HEADER_BYTES + payload_bytes].tobytes())
    if random.random() < 0.6:
        tail = record[layout.tail_offset :]
        forge_tail(tail, random, layout)
        record[layout.tail_offset :] = tail
        if random.random() < 0.5:  # the header says the same
            _copy_to_header(record, tail)
    if random.random() < 0.5:
        forge_header(record, random)
    if random.random() < 0.15:
        at = random.randrange(HEADER_BYTES, len(record))
        record[at : at + 8] = random.randbytes(len(record[at : at + 8]))
    return resized(record, random)


def resized(record: bytearray, random: Random) -> bytes:
    """Sealed, and sometimes shorter or longer than it says."""
    kind = random.random()
    if kind < 0.05:
        del record[random.randrange(len(record)) :]
    elif kind < 0.15:
        record += random.randbytes(random.randrange(1, 4096))
    return seal(record)


def _copy_to_header(record: bytearray, tail: bytearray) -> None:
    state, position = struct.unpack_from("<IQ", tail, 4)
    (map_bytes,) = struct.unpack_from("<I", record, 24)
    fields = msgpack.unpackb(bytes(record[28 : 28 + map_bytes]))
    fields["r"] = ("pre", "bound", "delta")[state % 3]
    fields["p"] = position
    packed = msgpack.packb(fields)
    struct.pack_into("<I", record, 24, len(packed))
    record[28:HEADER_BYTES] = packed.ljust(HEADER_BYTES - 28, b"\0")


def forged_stages(record: bytearray, random: Random) -> None:
    """Changes the table of stages of a staged record; its checksums are right again."""
    for _ in range(random.randrange(1, 3)):
        kind = random.random()
        if kind < 0.3:
            record[517] = random.choice((0, 1, 2, 3, 15, 16, 17, 255))
        elif kind < 0.5:
            record[518] = random.choice((0, 1, 2, 7, 255))
        else:
            place = 520 + 12 * random.randrange(max(1, min(record[517], 16)))
            (end,) = struct.unpack_from("<I", record, place)
            struct.pack_into("<I", record, place, number(random, end) % 2**32)
    seal_stages(record)


def as_array(record: bytes) -> U8:
    """The bytes, u8 [n], writable."""
    return np.frombuffer(bytearray(record), np.uint8)


assert MAGIC == b"HKVR"
