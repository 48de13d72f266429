"""Pages to coded records and back, for every codec; learning from the first pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.codec.base import CodecError
from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.codec.page_codec import PageCodec, parse_level
from sglang_ext.device.layout import HEADER_BYTES, ROPE_PRE, U8, PageLayout, read_tails, write_tail
from sglang_ext.tiers.records.record import RecordMeta, parse_header, write_meta
from sglang_ext.tiers.transcoder import coded_blocks, is_decoded

LAYERS, HEADS, DIM, PAGE = 2, 2, 64, 64
CHANNELS = HEADS * DIM
LAYOUT = PageLayout(PAGE, (2 * CHANNELS,) * LAYERS, (2 * CHANNELS,) * LAYERS, 2)
SHAPE = CodedShape.of(LAYOUT, "bf16", DIM)
MIXING = np.random.default_rng(0).normal(size=(CHANNELS, CHANNELS)) / CHANNELS**0.5


def page(number: int, *, position: int | None = None, num_corrections: int = 3) -> U8:
    """A slot with a page of correlated KV and its tail."""
    rng = np.random.default_rng(number)
    values = rng.normal(size=(2 * LAYERS, PAGE, CHANNELS)) * np.geomspace(1, 0.01, CHANNELS)
    values = (values @ MIXING + 0.3).astype(np.float32)
    slot = np.zeros(LAYOUT.slot_bytes, np.uint8)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    slot[HEADER_BYTES : LAYOUT.tail_offset] = bits.reshape(-1).view(np.uint8)
    position = number * PAGE if position is None else position
    entries = np.stack([np.arange(num_corrections), rng.integers(0, 1 << 16, num_corrections)], 1)
    payload_bytes = write_tail(
        slot,
        LAYOUT,
        rope_state=ROPE_PRE,
        position=position,
        counts=[num_corrections, 0],
        entries=entries.astype(np.uint32),
    )
    meta = RecordMeta(number.to_bytes(32, "big"), bytes(32), b"", position, PAGE, "pre")
    write_meta(slot, meta, payload_bytes)
    return slot


def learned(codec_id: str, folder: Path | None, level: int | None = None) -> PageCodec:
    """A codec that has learned from 4,096 tokens, if it has to learn at all."""
    codec = PageCodec(SHAPE, codec_id, level, folder=folder, owner="model")
    for number in range(64):
        if codec.encode(page(number)) is not None:
            break
    if codec._learner is not None:
        codec._learner.join()
    return codec


def decoded(codec: PageCodec, record: U8) -> U8:
    out = np.full(LAYOUT.slot_bytes, 0xAB, np.uint8)
    assert codec.decode(record, out)
    assert is_decoded(parse_header(record)[0], out)
    return out


@pytest.mark.parametrize("codec_id", ["zstd", "lossless"])
def test_lossless_codecs_give_every_byte_back(codec_id: str) -> None:
    codec = learned(codec_id, None)
    for number, num_corrections in ((0, 0), (1, 3), (2, LAYOUT.max_corrections)):
        slot = page(number, num_corrections=num_corrections)
        record = codec.encode(slot)
        assert record is not None
        out = decoded(codec, record)
        end = HEADER_BYTES + parse_header(slot)[1]
        assert np.array_equal(out[:end], slot[:end])
    assert codec.counts() == {"pages_coded": 4, "pages_decoded": 3}


@pytest.mark.parametrize("codec_id", ["hier", "cachegen-paper", "cachegen-released"])
def test_lossy_codecs_are_close_and_drop_corrections(codec_id: str, tmp_path: Path) -> None:
    codec = learned(codec_id, tmp_path)
    slot = page(100)
    record = codec.encode(slot)
    assert record is not None
    assert 0 < coded_blocks(slot, record) < LAYOUT.slot_bytes // 4096
    meta, _ = parse_header(record)
    assert (meta.codec, meta.quality, meta.position) == (codec_id, 1, 100 * PAGE)
    out = decoded(codec, record)
    tails = read_tails(out[None], np.zeros(1, np.int64), LAYOUT)
    assert tails is not None
    assert (int(tails.rope_state[0]), int(tails.position[0]), len(tails.page)) == (0, 6400, 0)
    values, other = (_floats(SHAPE.own.take(s)) for s in (slot, out))
    assert 0 < np.square(values - other).mean() < 0.1 * values.var()


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("codec_id", ["hier", "cachegen-paper"])
def test_what_was_learned_is_found_again_by_the_next_server(codec_id: str, tmp_path: Path) -> None:
    first = learned(codec_id, tmp_path)
    record = first.encode(page(100))
    assert record is not None
    same = PageCodec(SHAPE, codec_id, None, folder=tmp_path, owner="model")
    again = same.encode(page(100))
    assert again is not None
    assert again.tobytes() == record.tobytes()
    other_model = PageCodec(SHAPE, codec_id, None, folder=tmp_path, owner="another")
    assert other_model.encode(page(100)) is None, "it must learn about its own model"
    for codec in (other_model, PageCodec(SHAPE, "none", None, folder=tmp_path)):
        assert np.array_equal(decoded(codec, record), decoded(first, record))
    elsewhere = PageCodec(SHAPE, codec_id, None, folder=tmp_path / "empty")
    assert not elsewhere.decode(record, np.empty(LAYOUT.slot_bytes, np.uint8))
    assert elsewhere.counts() == {"pages_of_unknown_codec": 1}


def test_damaged_payloads_are_refused(tmp_path: Path) -> None:
    """Checksums are not seen here: a record is damaged before it is sealed."""
    rng = np.random.default_rng(5)
    for codec_id in ("zstd", "lossless", "hier"):
        codec = learned(codec_id, tmp_path)
        record = codec.encode(page(3))
        assert record is not None
        refused = 0
        for _ in range(200):
            bad = record.copy()
            at = rng.integers(HEADER_BYTES, HEADER_BYTES + 64, 3)
            bad[at] = rng.integers(0, 256, 3)
            out = np.empty(LAYOUT.slot_bytes + 64, np.uint8)
            out[-64:] = 0x5A
            refused += not codec.decode(bad, out[:-64])
            assert (out[-64:] == 0x5A).all()
        assert refused > 150
        for length in (HEADER_BYTES, HEADER_BYTES + 3, len(record) // 2):
            cut = record[:length].copy()
            write_meta(cut, parse_header(record)[0], length - HEADER_BYTES)
            assert not codec.decode(cut, np.empty(LAYOUT.slot_bytes, np.uint8))


def test_levels_are_named_or_numbered() -> None:
    assert parse_level("hier", "") is None
    assert parse_level("hier", "3") == 3
    assert parse_level("cachegen-released", "L2") == 1
    for codec_id, text in (("hier", "99"), ("hier", "x0.5"), ("hier", "-1")):
        with pytest.raises(CodecError, match="levels are"):
            parse_level(codec_id, text)
    assert parse_level("zstd", "0") == 0
    with pytest.raises(CodecError, match="there is one level, so leave it out, got '1'"):
        parse_level("zstd", "1")


def test_models_with_planes_of_unequal_width_are_refused() -> None:
    with pytest.raises(CodecError, match="planes of one width"):
        CodedShape.of(PageLayout(PAGE, (256, 256), (128, 128), 2), "bf16", 64)
