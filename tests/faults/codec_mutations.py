"""Valid streams made bad: at random, or inside, with every checksum right again."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import xxhash
import zstandard

from sglang_ext.codec import CodecError
from sglang_ext.codec.container import Section, read_header, write_chunk

_EDGES = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_MAX_INFLATED = 1 << 20
_PROFILE_HEAD = 10


def corrupt(data: bytes, random: Random) -> bytes:
    """`data` with one to some small changes, of which some change its length."""
    changed = bytearray(data)
    keep_length = random.random() < 0.7
    for _ in range(1 + int(random.expovariate(0.7))):
        size = len(changed)
        at = random.randrange(size + 1)
        kind = random.randrange(3 if keep_length else 0, 9)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            changed[at:at] = random.randbytes(random.randrange(1, 40))
        elif kind == 2:
            del changed[at : at + random.randrange(1, 40)]
        elif kind == 3:
            width = random.choice((1, 2, 4, 8))
            value = random.choice(_EDGES) & ((1 << 8 * width) - 1)
            changed[at : at + width] = value.to_bytes(width, "little")
        elif kind == 4:
            changed[at : at + 32] = random.randbytes(len(changed[at : at + 32]))
        elif kind == 5 and size:
            source = random.randrange(size)
            part = changed[source : source + random.randrange(1, 64)]
            changed[at : at + len(part)] = part
        elif kind == 6:
            changed[at : at + 8] = bytes([random.choice((0, 255))]) * len(changed[at : at + 8])
        elif at < size:
            changed[at] ^= 1 << random.randrange(8)
    return bytes(changed[: len(data)] if keep_length else changed)


def _corrupt_frame(data: bytes, random: Random) -> bytes:
    """Changes what a zstandard frame within `data` holds, if there is one."""
    at = data.find(b"\x28\xb5\x2f\xfd")
    if at < 0:
        return corrupt(data, random)
    try:
        # A frame that was changed before may name any size, and zstandard would allocate that.
        if not 0 <= zstandard.frame_content_size(data[at:]) <= _MAX_INFLATED:
            return corrupt(data, random)
        content = zstandard.ZstdDecompressor().decompress(data[at:])
    except zstandard.ZstdError:
        return corrupt(data, random)
    changed = corrupt(content, random)
    if random.random() < 0.8:  # most often of the right length, so that it is looked into
        changed = changed[: len(content)].ljust(len(content), b"\0")
    return data[:at] + zstandard.ZstdCompressor(level=1).compress(changed)


def _with_checksum(data: bytes, end: int, order: str = "<") -> bytes:
    checksum = struct.pack(f"{order}Q", xxhash.xxh3_64_intdigest(data[:end]))
    return data[:end] + checksum + data[end + 8 :]


@dataclass(frozen=True)
class Source:
    """Valid streams of one format, and its own way to make them bad inside.

    Attributes:
        streams: some, of one codec, dtype, shape and profile.
        form: "HKVC"; or "<" or ">" for a format that ends in an xxh3-64 of all before, in this
            byte order.
    """

    streams: Sequence[bytes]
    form: str

    def mutated(self, random: Random) -> bytes:
        """A stream with something wrong with it; rarely a right one."""
        data = random.choice(self.streams)
        kind = random.random()
        if kind < 0.03:
            return random.randbytes(random.randrange(400))
        if kind < 0.1:
            return corrupt(data, random)
        if kind < 0.15:
            return data[: random.randrange(len(data) + 1)]
        return self._inside(data, random)

    def _inside(self, data: bytes, random: Random) -> bytes:
        if self.form == "HKVC":
            way = random.choices((_in_sections, _in_header), (9, 1))[0]
            return way(data, self.streams, random)
        body = data[:-8]
        change: Callable[[bytes, Random], bytes] = random.choice((corrupt, _corrupt_frame))
        body = change(body, random)
        if body[:4] == b"HKVP" and len(body) > _PROFILE_HEAD and random.random() < 0.3:
            body = body[:_PROFILE_HEAD] + corrupt(body[_PROFILE_HEAD:], random)
        return _with_checksum(body, len(body), self.form)


def _in_header(data: bytes, streams: Sequence[bytes], random: Random) -> bytes:
    """Changes fields in front of the sections."""
    end = read_header(data).header_bytes - 8
    head = bytearray(data[:end])
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(4, end)
        if random.random() < 0.5:
            width = random.choice((1, 2, 4, 8))
            value = random.choice(_EDGES) & ((1 << 8 * width) - 1)
            head[at : at + width] = value.to_bytes(width, "little")
        else:
            head[at] ^= 1 << random.randrange(8)
    changed = bytes(head[:end]) + data[end:]
    # The checksum is where the header's own count of sections puts it.
    end = 40 + (32 if changed[9] & 1 else 0) + 20 * changed[8]
    return _with_checksum(changed, end) if end + 8 <= len(changed) else changed


def _in_sections(data: bytes, streams: Sequence[bytes], random: Random) -> bytes:
    """Changes what sections hold, which there are, or takes some of another stream."""
    header = read_header(data)
    sections = [Section(e.kind, e.level, data[e.start : e.end]) for e in header.sections]
    for _ in range(1 + (random.random() < 0.3)):
        at = random.randrange(len(sections))
        chosen = sections[at]
        kind = random.random()
        if kind < 0.5:
            sections[at] = replace(chosen, data=corrupt(bytes(chosen.data), random))
        elif kind < 0.85:
            sections[at] = replace(chosen, data=_corrupt_frame(bytes(chosen.data), random))
        elif kind < 0.9:
            other = random.choice(streams)
            entry = random.choice(read_header(other).sections)
            sections[at] = replace(chosen, data=other[entry.start : entry.end])
        elif kind < 0.93:
            sections[at] = replace(chosen, kind=random.randrange(9))
        elif kind < 0.96 and len(sections) > 1:
            del sections[at]
        else:
            sections[at] = replace(chosen, data=random.randbytes(len(chosen.data)))
    try:
        return write_chunk(
            header.codec_id, header.dtype, header.shape, sections,
            first_level=header.first_level, last_level=header.last_level,
            profile_digest=header.profile_digest,
        )  # fmt: skip
    except (CodecError, ValueError):  # sections that no header can describe
        return corrupt(data, random)
