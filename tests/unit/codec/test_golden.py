"""Golden streams: today's encoders make them, today's decoders read them, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from sglang_ext.codec.coded_symbols import unpack_symbols
from sglang_ext.codec.container import MAGIC, SectionEntry, read_header
from sglang_ext.codec.hier.profile import Profile
from tests.unit.codec import golden_chunks as golden

_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_NAMES = tuple(golden.codecs())


def _unpacked(data: bytes) -> bytes:
    """`data`, with what a zstandard frame in it holds in the frame's place.

    Another release of zstandard makes other frames of the same bytes.
    """
    at = data.find(_FRAME_MAGIC)
    return data if at < 0 else data[:at] + zstandard.ZstdDecompressor().decompress(data[at:])


def _span(entry: SectionEntry) -> tuple[int, int]:
    return entry.start, entry.end


def _parts(data: bytes) -> list[tuple[object, ...]]:
    if data[:4] != MAGIC:
        return [(data,)]
    header = read_header(data)
    fields = (header.codec_id, header.dtype, header.shape, header.first_level, header.last_level)
    sections = [(e.kind, e.level, _unpacked(data[e.start : e.end])) for e in header.sections]
    return [(*fields, header.profile_digest), *sections]


@pytest.mark.parametrize("name", _NAMES)
def test_encoder_makes_the_golden_stream(name: str) -> None:
    stored = (golden.GOLDEN / name).read_bytes()
    assert _parts(golden.encode(golden.codecs()[name])) == _parts(stored)


@pytest.mark.parametrize("name", _NAMES)
def test_decoder_reads_the_golden_stream(name: str) -> None:
    codec = golden.codecs()[name]
    decoded = golden.decode(codec, (golden.GOLDEN / name).read_bytes())
    with np.load(golden.CONTENTS) as stored:
        for key, out in decoded.items():
            assert np.array_equal(out, stored[name + key]), key
    if not codec.lossy:
        assert np.array_equal(decoded[""], golden.planes(codec.dtype.name))
    assert (len(decoded) == golden.LAST_LEVEL + 2) == (codec.codec_id == "hier")


def test_the_profile_file_is_read_as_it_was() -> None:
    profile = Profile.load(golden.PROFILE)
    header = read_header((golden.GOLDEN / "codec-hier-v1.bin").read_bytes())
    assert header.profile_digest == profile.digest
    again = Profile.from_bytes(profile.to_bytes())
    assert again.digest == profile.digest


def test_golden_streams_use_all_there_is() -> None:
    """Raw rows, escapes and refinements; channels, rows, symbols, low bits and rare ones."""
    hier = read_header((golden.GOLDEN / "codec-hier-v1.bin").read_bytes())
    assert [(e.kind, e.level) for e in hier.sections] == [(1, 0), (2, 0), (3, 1), (3, 2)]
    base = (golden.GOLDEN / "codec-hier-v1.bin").read_bytes()[slice(*_span(hier.sections[1]))]
    assert len(unpack_symbols(memoryview(base), 1)[1]) > 0  # escapes
    lossless = read_header((golden.GOLDEN / "codec-lossless-v1.bin").read_bytes())
    assert [e.kind for e in lossless.sections] == [2, 3, 4, 5, 6]
    assert min(e.end - e.start for e in lossless.sections) > 0
