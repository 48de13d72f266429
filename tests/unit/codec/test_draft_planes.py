"""Pages that hold a draft model's layers, too: coded without loss, whatever codes the model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.codec.base import CodecError
from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.codec.page_codec import TAIL_LENGTH, PageCodec
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.layout import HEADER_BYTES, ROPE_PRE, U8, PageLayout, write_tail
from sglang_ext.tiers.records.record import RecordMeta, parse_header, write_meta
from tests.unit.codec import test_page_codec as plain
from tests.unit.codec.test_page_codec import CHANNELS, DIM, LAYERS, PAGE, SHAPE

# Of the draft: how many layers, and how many values a row has, in the model's own width and less.
DRAFTS = {"alike": (1, CHANNELS), "narrow": (3, DIM)}
CODECS = ["zstd", "lossless", "hier", "cachegen-paper", "cachegen-released"]


def layout_of(draft: str) -> PageLayout:
    num, channels = DRAFTS[draft]
    rows = (2 * CHANNELS,) * LAYERS + (2 * channels,) * num
    return PageLayout(PAGE, rows, rows, 2)


def shape_of(draft: str) -> CodedShape:
    return CodedShape.of(layout_of(draft), "bf16", DIM, DRAFTS[draft][0])


def page(number: int, draft: str) -> U8:
    """A slot with the model's layers of `plain.page`, and a draft's behind them."""
    layout, model = layout_of(draft), plain.page(number)
    slot = np.zeros(layout.slot_bytes, np.uint8)
    end = plain.LAYOUT.tail_offset
    slot[:end] = model[:end]
    rng = np.random.default_rng(1000 + number)
    values = rng.normal(size=(layout.tail_offset - end) // 2).astype(np.float32)
    values[::7] *= 1e30  # of which a codec that loses something would keep little
    slot[end : layout.tail_offset] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    payload_bytes = write_tail(slot, layout, rope_state=ROPE_PRE, position=number * PAGE)
    meta = RecordMeta(number.to_bytes(32, "big"), bytes(32), b"", number * PAGE, PAGE, "pre")
    write_meta(slot, meta, payload_bytes)
    return slot


def learned(codec_id: str, draft: str, folder: Path | None) -> PageCodec:
    """A codec that has learned from 4,096 tokens, if it has to learn at all."""
    codec = PageCodec(shape_of(draft), codec_id, None, folder=folder, owner="model")
    for number in range(64):
        if codec.encode(page(number, draft)) is not None:
            break
    if codec._learner is not None:
        codec._learner.join()
    return codec


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("codec_id", CODECS)
def test_a_drafts_layers_come_back_bit_for_bit(codec_id: str, draft: str, tmp_path: Path) -> None:
    codec, layout = learned(codec_id, draft, tmp_path), layout_of(draft)
    slot = page(100, draft)
    record = codec.encode(slot)
    assert record is not None
    out = np.full(layout.slot_bytes, 0xAB, np.uint8)
    assert codec.decode(record, out)
    first, end = plain.LAYOUT.tail_offset, HEADER_BYTES + parse_header(slot)[1]
    assert np.array_equal(out[first:end], slot[first:end])
    is_same = np.array_equal(out[HEADER_BYTES:first], slot[HEADER_BYTES:first])
    assert is_same == (parse_header(record)[0].quality == 0) == (codec_id in ("zstd", "lossless"))


@pytest.mark.parametrize("codec_id", ["hier", "cachegen-paper"])
def test_what_is_learned_is_of_the_models_layers_alone(codec_id: str, tmp_path: Path) -> None:
    """So what was learned or calibrated without a draft codes pages with one, and the reverse."""
    without = plain.learned(codec_id, tmp_path / "plain")
    codec = learned(codec_id, "narrow", tmp_path / "drafts")
    one, other = codec.encode(page(100, "narrow")), without.encode(plain.page(100))
    assert one is not None
    assert other is not None
    assert parse_header(one)[0].profile == parse_header(other)[0].profile != b""
    stream = _stream(codec, one)
    assert stream == _stream(without, other)
    found = PageCodec(shape_of("alike"), codec_id, None, folder=tmp_path / "plain", owner="model")
    again = found.encode(page(100, "alike"))
    assert again is not None
    assert _stream(found, again) == stream


def _stream(codec: PageCodec, record: U8) -> bytes:
    """The model's part of a record."""
    payload = record[HEADER_BYTES : HEADER_BYTES + parse_header(record)[1]]
    parts = codec.parts(payload)
    assert parts is not None
    return payload[parts.stream_at :].tobytes()


def test_every_level_of_a_stream_in_levels_has_the_drafts_layers(tmp_path: Path) -> None:
    local = learned("hier", "narrow", tmp_path)
    assert local.encode(page(0, "narrow")) is not None
    codec = RemotePageCodec(shape_of("narrow"), "hier", 3, folder=tmp_path, owner="model")
    slot, layout = page(100, "narrow"), layout_of("narrow")
    record = codec.encode(slot)
    assert record is not None
    levels = codec.levels(record)
    assert (levels.first, len(levels.ends)) == (0, 4)
    errors = []
    for end in levels.ends:
        cut = record[:end].copy()
        write_meta(cut, parse_header(record)[0], end - HEADER_BYTES)
        out = np.full(layout.slot_bytes, 0xAB, np.uint8)
        assert codec.decode(cut, out)
        first = plain.LAYOUT.tail_offset
        assert np.array_equal(out[first : layout.tail_offset], slot[first : layout.tail_offset])
        values, others = (plain._floats(SHAPE.own.take(each)) for each in (slot, out))
        errors.append(float(np.square(values - others).mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("codec_id", ["lossless", "hier"])
def test_a_damaged_draft_is_no_page(codec_id: str, tmp_path: Path) -> None:
    """Checksums are not seen here: a record is damaged before it is sealed."""
    codec, layout = learned(codec_id, "narrow", tmp_path), layout_of("narrow")
    record = codec.encode(page(3, "narrow"))
    assert record is not None
    meta, num_bytes = parse_header(record)
    parts = codec.parts(record[HEADER_BYTES : HEADER_BYTES + num_bytes])
    assert parts is not None
    at, end = HEADER_BYTES + parts.draft_at, HEADER_BYTES + parts.stream_at
    rng, refused = np.random.default_rng(5), 0
    for number in range(100):
        bad = record.copy()
        where = rng.integers(at, at + 4 if number % 4 == 0 else end, 3)
        bad[where] ^= rng.integers(1, 256, 3).astype(np.uint8)
        out = np.empty(layout.slot_bytes + 64, np.uint8)
        out[-64:] = 0x5A
        refused += not codec.decode(bad, out[:-64])
        assert (out[-64:] == 0x5A).all()
    assert refused == 100
    (tail_bytes,) = TAIL_LENGTH.unpack_from(record.data, HEADER_BYTES)
    assert parts.draft_at == TAIL_LENGTH.size + tail_bytes
    for length in (
        parts.draft_at,
        parts.draft_at + 3,
        parts.draft_at + 4,
        parts.stream_at - 1,
        parts.stream_at,
    ):
        cut = record[: HEADER_BYTES + length].copy()
        write_meta(cut, meta, length)
        assert not codec.decode(cut, np.empty(layout.slot_bytes, np.uint8))


def test_a_page_of_the_model_alone_is_none_with_a_draft() -> None:
    """The namespace tells them apart; here they would be told by what they lack."""
    record = plain.learned("lossless", None).encode(plain.page(1))
    assert record is not None
    codec = PageCodec(shape_of("alike"), "lossless", None)
    assert not codec.decode(record, np.empty(layout_of("alike").slot_bytes, np.uint8))


def test_a_draft_with_layers_of_unequal_width_is_refused() -> None:
    rows = (2 * CHANNELS,) * LAYERS + (2 * CHANNELS, CHANNELS)
    with pytest.raises(CodecError, match=r"planes of one width, its draft model has \[128, 256\]"):
        CodedShape.of(PageLayout(PAGE, rows, rows, 2), "bf16", DIM, 2)
