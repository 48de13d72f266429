"""The bytes around a coded chunk: what it is, where its sections lie, and checksums.

Little-endian::

    offset  bytes  field
    0       4      magic "HKVC"
    4       1      format version, 1
    5       1      KV dtype, `KVDtype.code`
    6       1      first level: what the base sections alone decode to
    7       1      last level: what all sections decode to; first <= last
    8       1      number of sections n, 1 to 64
    9       1      flags: bit 0, a profile digest is there
    10      2      zero
    12      4      planes S
    16      4      tokens T
    20      4      channels C
    24      16     codec id, ASCII, zeros behind it
    40      32     profile digest, only with flag bit 0
    ...     20 n   sections: kind u8, level u8, zero u16, end u64, xxh3_64 u64
    ...     8      xxh3_64 of all of the above
    ...            the sections' bytes, one behind the other

`end` counts from the end of the header; a section begins where the one before it ends. Levels never
fall from one section to the next, so that a prefix of the bytes that ends at a section's end serves
every level whose sections it holds: refinements may be cut off, or arrive later. Each section has a
checksum of its own, and is verified when it is taken out. Checksums find damage, not forgery: a
codec must stay within bounds for any section bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from sglang_ext.codec.base import DTYPE_OF_CODE, ChunkShape, CodecError, KVDtype

MAGIC = b"HKVC"  # stored on disk; never change
FORMAT_VERSION = 1  # stored on disk; a change of encoded bytes needs a new number
MAX_SECTIONS = 64
MAX_ID_BYTES = 16
DIGEST_BYTES = 32

_HAS_DIGEST = 1
_FIXED = struct.Struct("<4sBBBBBBHIII16s")
_ENTRY = struct.Struct("<BBHQQ")
_U64 = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Section:
    """One section to be written: what it holds is between its codec and `kind`."""

    kind: int
    level: int
    data: Buffer


@dataclass(frozen=True)
class SectionEntry:
    """One section of a stream: bytes [start, end) of the whole stream."""

    kind: int
    level: int
    start: int
    end: int
    checksum: int


@dataclass(frozen=True)
class ChunkHeader:
    """What a stream says about itself, before any of its sections is read."""

    codec_id: str
    dtype: KVDtype
    shape: ChunkShape
    first_level: int
    last_level: int
    profile_digest: bytes
    sections: tuple[SectionEntry, ...]

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the first section."""
        return self.sections[0].start

    @property
    def total_bytes(self) -> int:
        """Length of the whole stream."""
        return self.sections[-1].end

    def prefix_bytes(self, level: int) -> int:
        """Length of the shortest prefix that decodes at `level`.

        Raises:
            CodecError: the stream has no such level.
        """
        self.check_level(level)
        return max(entry.end for entry in self.sections if entry.level <= level)

    def check_level(self, level: int) -> None:
        """Checks that the stream serves `level`.

        Raises:
            CodecError: it does not.
        """
        if not self.first_level <= level <= self.last_level:
            raise CodecError(
                f"the stream has levels {self.first_level} to {self.last_level}, asked for {level}"
            )


def write_chunk(
    codec_id: str,
    dtype: KVDtype,
    shape: ChunkShape,
    sections: Sequence[Section],
    *,
    first_level: int = 0,
    last_level: int = 0,
    profile_digest: bytes = b"",
) -> bytes:
    """Returns header and sections as one stream.

    Raises:
        ValueError: what is to be written is no legal stream; a bug of the codec.
    """
    ident = codec_id.encode("ascii")
    levels = [section.level for section in sections]
    if not 1 <= len(sections) <= MAX_SECTIONS or not 1 <= len(ident) <= MAX_ID_BYTES:
        raise ValueError(f"cannot write {len(sections)} sections of codec {codec_id!r}")
    if levels != sorted(levels) or levels[0] != first_level or levels[-1] > last_level:
        raise ValueError(f"sections of levels {levels} in levels {first_level} to {last_level}")
    if len(profile_digest) not in (0, DIGEST_BYTES):
        raise ValueError(f"a profile digest has {DIGEST_BYTES} bytes, got {len(profile_digest)}")
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, dtype.code, first_level, last_level, len(sections),
        _HAS_DIGEST if profile_digest else 0, 0, *shape.axes, ident,
    )  # fmt: skip
    parts: list[Buffer] = [fixed, profile_digest]
    end = 0
    for section in sections:
        end += len(section.data)
        checksum = xxhash.xxh3_64_intdigest(section.data)
        parts.append(_ENTRY.pack(section.kind, section.level, 0, end, checksum))
    parts.append(_U64.pack(xxhash.xxh3_64_intdigest(b"".join(parts))))
    parts.extend(section.data for section in sections)
    return b"".join(parts)


def read_header(data: Buffer) -> ChunkHeader:
    """Reads and checks a stream's header; the sections need not be there yet.

    Raises:
        CodecError: it is no header of this version, damaged, or cut short.
    """
    if len(data) < _FIXED.size:
        raise CodecError(f"a chunk has a header of at least {_FIXED.size} bytes, got {len(data)}")
    magic, version, code, first, last, count, flags, zero, *axes, ident = _FIXED.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise CodecError(
            f"not a chunk of version {FORMAT_VERSION}: magic {magic!r}, version {version}"
        )
    digest_end = _FIXED.size + (DIGEST_BYTES if flags & _HAS_DIGEST else 0)
    checksum_at = digest_end + _ENTRY.size * count
    if len(data) < checksum_at + _U64.size:
        raise CodecError(f"header of {checksum_at + _U64.size} bytes is cut at {len(data)}")
    with memoryview(data) as view:
        if xxhash.xxh3_64_intdigest(view[:checksum_at]) != _U64.unpack_from(view, checksum_at)[0]:
            raise CodecError("the checksum of a chunk's header does not match: it is damaged")
        digest = bytes(view[_FIXED.size : digest_end])
        sections = _read_sections(view, digest_end, count)
    if code not in DTYPE_OF_CODE or flags & ~_HAS_DIGEST or zero or first > last or not count:
        raise CodecError("a chunk's header has fields that this version does not know")
    levels = [section.level for section in sections]
    if levels != sorted(levels) or levels[0] != first or levels[-1] > last:
        raise CodecError(f"a chunk's sections of levels {levels} do not make levels {first}-{last}")
    name = ident.rstrip(b"\0")
    if not name or not all(33 <= byte < 127 for byte in name):
        raise CodecError(f"a chunk's codec id is printable ASCII, got {ident!r}")
    return ChunkHeader(
        name.decode("ascii"), DTYPE_OF_CODE[code], ChunkShape(*axes), first, last, digest, sections
    )


def _read_sections(view: memoryview, offset: int, count: int) -> tuple[SectionEntry, ...]:
    entries = []
    base = start = offset + _ENTRY.size * count + _U64.size
    for kind, level, zero, end, checksum in _ENTRY.iter_unpack(
        view[offset : offset + _ENTRY.size * count]
    ):
        if zero or base + end < start:
            raise CodecError(f"a chunk's section ends at {base + end}, in front of {start}")
        entries.append(SectionEntry(kind, level, start, base + end, checksum))
        start = base + end
    return tuple(entries)


class Chunk:
    """A stream, or a prefix of one, whose header is good and is what the caller expects."""

    def __init__(
        self,
        data: Buffer,
        *,
        codec_id: str,
        dtype: KVDtype,
        shape: ChunkShape,
        profile_digest: bytes = b"",
    ):
        """Reads the header and compares it with what is expected.

        Raises:
            CodecError: the header is bad or says something else, or bytes follow the last section.
        """
        self._view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        self.header = read_header(self._view)
        found = self.header
        for name, want, got in (
            ("codec", codec_id, found.codec_id),
            ("dtype", dtype.name, found.dtype.name),
            ("[planes, tokens, channels]", shape.axes, found.shape.axes),
            ("profile", profile_digest.hex(), found.profile_digest.hex()),
        ):
            if want != got:
                raise CodecError(f"expected a chunk with {name} {want}, got {got}")
        if len(self._view) > found.total_bytes:
            raise CodecError(f"{len(self._view)} bytes of a chunk of {found.total_bytes}")

    @property
    def last_whole_level(self) -> int:
        """The finest level whose sections are all here, -1 if not even the first one's are."""
        missing = [e.level for e in self.header.sections if e.end > len(self._view)]
        if not missing:
            return self.header.last_level
        return min(missing) - 1 if min(missing) > self.header.first_level else -1

    def pick_level(self, level: int | None) -> int:
        """Returns `level`, or the finest level present if it is None.

        Raises:
            CodecError: the level is not in the stream, or its sections have been cut off.
        """
        present = self.last_whole_level
        if level is not None:
            self.header.check_level(level)
        if present < (self.header.first_level if level is None else level):
            raise CodecError(
                f"{len(self._view)} of {self.header.total_bytes} bytes are here: "
                f"not enough for level {self.header.first_level if level is None else level}"
            )
        return present if level is None else level

    def section(self, kind: int, level: int) -> memoryview:
        """Returns the bytes of a section, verified.

        Raises:
            CodecError: there is no such section or more than one, or it is cut short or damaged.
        """
        entries = [e for e in self.header.sections if (e.kind, e.level) == (kind, level)]
        if len(entries) != 1:
            raise CodecError(f"{len(entries)} sections of kind {kind}, level {level}; needed one")
        entry = entries[0]
        if entry.end > len(self._view):
            raise CodecError(f"a section ends at {entry.end}, {len(self._view)} bytes are here")
        part = self._view[entry.start : entry.end]
        if xxhash.xxh3_64_intdigest(part) != entry.checksum:
            raise CodecError(f"section of kind {kind}, level {level} is damaged (checksum)")
        return part
