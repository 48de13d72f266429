"""The record: one page of KV with a self-describing, checksummed header.

A raw record is the same bytes in DRAM, where it fills one slot, and on disk. A coded one
(`sglang_ext.tiers.transcoder`) is on disk only, and shorter. Little-endian::

    offset  bytes  field
    0       4      magic "HKVR"
    4       2      format version, 1
    6       2      header length, 512
    8       8      payload_bytes
    16      8      checksum: xxh3_64 (seed 0) of bytes [24, 512 + payload_bytes)
    24      4      map length m, at most 484
    28      m      msgpack map (keys below, in this order)
    28 + m  ...    zeros up to 512
    512     ...    payload, then padding that is neither checked nor read

    map: k page hash (32 B), n namespace digest (32 B), l LoRA weight digest (32 B or empty),
    p position of the first token, c codec id, v level, r rope state, q quality (0 = exact),
    t number of tokens, h profile hash (0 to 64 B)

The fields in front of the checksum need no cover: magic, version and header length have one legal
value each, and another `payload_bytes` means another hash input. See docs/formats.md, which also
says why xxh3_64 was chosen. This module writes and reads headers; `sglang_ext.tiers.records.checks`
puts checksums in and checks them. Every function of the two is thread-safe as long as no two
threads write to one slot.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.errors import TierError

ByteArray: TypeAlias = npt.NDArray[np.uint8]

MAGIC = b"HKVR"  # stored on disk; never change
FORMAT_VERSION = 1  # stored on disk; a change of encoded bytes needs a new number
PROTECTED_VERSION = 2  # stored on disk; the format of `sglang_ext.tiers.protection.header`
HEADER_BYTES = 512
DIGEST_BYTES = 32
ROPE_STATES = ("pre", "bound", "delta")  # stored on disk as text; never rename
RAW_CODEC = "raw"  # stored on disk as text; never rename
MAX_CODEC_BYTES = 32
MAX_PROFILE_BYTES = 64

_FIXED = struct.Struct("<4sHHQQI")
CHECKSUM_OFFSET = 16
CHECKED_FROM = 24
_MAP_OFFSET = _FIXED.size
_MAX_MAP_BYTES = HEADER_BYTES - _MAP_OFFSET
_MAP_KEYS = ("k", "n", "l", "p", "c", "v", "r", "q", "t", "h")  # stored on disk; never rename
_U32 = struct.Struct("<I")
_BYTE_FIELDS = (
    ("k", "page_hash", (DIGEST_BYTES,)),
    ("n", "namespace", (DIGEST_BYTES,)),
    ("l", "lora", (0, DIGEST_BYTES)),
    ("h", "profile", range(MAX_PROFILE_BYTES + 1)),
)
_INT_FIELDS = (
    ("p", "position", 2**63),
    ("t", "num_tokens", 2**32),
    ("v", "level", 256),
    ("q", "quality", 256),
)


class VerifyResult(enum.Enum):
    """What a check of one record found. Anything but `OK` is a miss."""

    OK = "ok"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"
    BAD_CHECKSUM = "bad_checksum"
    UNPROTECTED = "unprotected"  # a key is set and the record has no tag
    UNAUTHENTIC = "unauthentic"  # a key is set and a tag of the record is wrong
    UNKNOWN_KEY = "unknown_key"  # a key is set and the record was protected with another
    PROTECTED = "protected"  # no key is set and the record is protected with one
    FOREIGN = "foreign"  # an intact record of another page, namespace or LoRA adapter
    MISSING = "missing"  # no bytes to check: unknown segment, short read, I/O error


class RecordError(TierError):
    """A slot does not hold a well-formed record.

    Attributes:
        kind: what is wrong, in the terms of `VerifyResult`.
    """

    def __init__(self, kind: VerifyResult, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """What a record says about its page.

    Attributes:
        page_hash: 32 bytes, SGLang's chained page hash.
        namespace: 32 bytes, digest of all that makes KV incompatible.
        lora: 32 bytes (digest of the adapter's weights), or empty for the base model.
        position: saved position of the page's first token.
        num_tokens: tokens in the page.
        rope: one of `ROPE_STATES`.
        codec: id of the payload's codec, ASCII, at most 32 bytes.
        level: quality setting of the codec, 0 to 255.
        quality: 0 = exact; 1 to 255 = how lossy the worst ancestor is.
        profile: hash of the codec's profile, at most 64 bytes; empty without one.
    """

    page_hash: bytes
    namespace: bytes
    lora: bytes
    position: int
    num_tokens: int
    rope: str
    codec: str = RAW_CODEC
    level: int = 0
    quality: int = 0
    profile: bytes = b""


def write_meta(slot: ByteArray, meta: RecordMeta, payload_bytes: int) -> None:
    """Writes the header of `slot` with the checksum left 0; `seal` fills it in.

    Args:
        slot: u8 [slot_bytes], writable; bytes from 512 on are not touched.
        meta: what the header says.
        payload_bytes: length of the payload, which starts at byte 512.

    Raises:
        ValueError: a field of `meta` is out of range, or the payload does not fit in the slot.
    """
    if not 0 <= payload_bytes <= slot.size - HEADER_BYTES:
        raise ValueError(
            f"payload_bytes must be in [0, {slot.size - HEADER_BYTES}] for a slot of"
            f" {slot.size} bytes, got {payload_bytes}"
        )
    fields = dict(zip(_MAP_KEYS, _values(meta), strict=True))
    problem = _problem(fields)
    if problem:
        raise ValueError(problem)
    packed: bytes = msgpack.packb(fields)
    fixed = _FIXED.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, payload_bytes, 0, len(packed))
    header = (fixed + packed).ljust(HEADER_BYTES, b"\0")
    slot[:HEADER_BYTES] = np.frombuffer(header, np.uint8)


def read_meta(slot: ByteArray) -> RecordMeta:
    """Parses the header of `slot`; does not look at the checksum or the payload.

    Args:
        slot: u8 [at least 512]. Lengths in it are checked before use.

    Raises:
        RecordError: `kind` is BAD_MAGIC, BAD_VERSION or BAD_HEADER.
    """
    return parse_header(slot)[0]


def parse_header(slot: ByteArray, room_bytes: int | None = None) -> tuple[RecordMeta, int]:
    """Like `read_meta`, and also returns payload_bytes.

    Args:
        slot: u8 [at least 512].
        room_bytes: no record may be longer; `slot.size` by default.
    """
    fields, payload_bytes = parse_fields(slot, room_bytes)
    return meta_of(fields), payload_bytes


def read_fixed(slot: ByteArray, room_bytes: int | None = None) -> tuple[int, bytes]:
    """Checks what stands in front of the map; returns payload_bytes and the header's 512 bytes.

    Raises:
        RecordError: as `read_meta` does.
    """
    room_bytes = slot.size if room_bytes is None else room_bytes
    header = slot[:HEADER_BYTES].tobytes()
    if len(header) < HEADER_BYTES:
        raise _bad_header(f"a record needs {HEADER_BYTES} bytes of header, got {len(header)}")
    magic, version, header_bytes, payload_bytes, _, _ = _FIXED.unpack_from(header)
    if magic != MAGIC:
        raise RecordError(VerifyResult.BAD_MAGIC, f"magic must be {MAGIC!r}, got {magic!r}")
    if version == PROTECTED_VERSION:
        raise RecordError(VerifyResult.PROTECTED, "the record is protected with a key")
    if version != FORMAT_VERSION:
        raise RecordError(
            VerifyResult.BAD_VERSION,
            f"this release reads record version {FORMAT_VERSION}, got {version}",
        )
    if header_bytes != HEADER_BYTES:
        raise _bad_header(f"header length must be {HEADER_BYTES}, got {header_bytes}")
    if payload_bytes > room_bytes - HEADER_BYTES:
        raise _bad_header(f"a payload of {payload_bytes} bytes exceeds the slot of {room_bytes}")
    return payload_bytes, header


def _bad_header(message: str) -> RecordError:
    return RecordError(VerifyResult.BAD_HEADER, message)


def _values(meta: RecordMeta) -> tuple[object, ...]:
    return (
        meta.page_hash,
        meta.namespace,
        meta.lora,
        meta.position,
        meta.codec,
        meta.level,
        meta.rope,
        meta.quality,
        meta.num_tokens,
        meta.profile,
    )


def parse_fields(slot: ByteArray, room_bytes: int | None = None) -> tuple[dict[str, Any], int]:
    """Returns the checked fields of the map, by their stored keys, and payload_bytes.

    Raises:
        RecordError: as `read_meta` does.
    """
    payload_bytes, header = read_fixed(slot, room_bytes)
    (map_bytes,) = _U32.unpack_from(header, CHECKED_FROM)
    if map_bytes > _MAX_MAP_BYTES:
        raise _bad_header(f"map length must be at most {_MAX_MAP_BYTES}, got {map_bytes}")
    end = _MAP_OFFSET + map_bytes
    if header.count(0, end) != HEADER_BYTES - end:
        raise _bad_header("bytes between the map and the payload must be zero")
    try:
        fields = msgpack.unpackb(
            header[_MAP_OFFSET:end], max_map_len=len(_MAP_KEYS), max_array_len=0, max_ext_len=0
        )
    except Exception as error:  # msgpack raises many types on malformed input
        raise _bad_header(f"the map is not msgpack: {error!r}") from error
    if not isinstance(fields, dict) or tuple(fields) != _MAP_KEYS:
        raise _bad_header(f"the map must have the keys {_MAP_KEYS} in this order")
    problem = _problem(fields)
    if problem:
        raise _bad_header(problem)
    return fields, payload_bytes


def meta_of(fields: dict[str, Any]) -> RecordMeta:
    """What `parse_fields` found, as a value."""
    return RecordMeta(
        page_hash=fields["k"],
        namespace=fields["n"],
        lora=fields["l"],
        position=fields["p"],
        num_tokens=fields["t"],
        rope=fields["r"],
        codec=fields["c"],
        level=fields["v"],
        quality=fields["q"],
        profile=fields["h"],
    )


def _problem(fields: dict[str, Any]) -> str:
    """Returns what is wrong with the fields of a map, or "" when all are in range."""
    for key, name, lengths in _BYTE_FIELDS:
        value = fields[key]
        if type(value) is not bytes or len(value) not in lengths:
            return f"{name} must be bytes, of a length in {lengths}"
    for key, name, limit in _INT_FIELDS:
        value = fields[key]
        if type(value) is not int or not 0 <= value < limit:
            return f"{name} must be an int in [0, {limit})"
    if fields["r"] not in ROPE_STATES:
        return f"rope must be one of {ROPE_STATES}"
    codec = fields["c"]
    if type(codec) is not str or not codec.isascii() or not 0 < len(codec) <= MAX_CODEC_BYTES:
        return f"codec must be 1 to {MAX_CODEC_BYTES} ASCII characters"
    return ""
