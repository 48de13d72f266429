"""Codes pages for the disk with one of the codecs, and decodes what any of them coded.

A coded page's payload (stored on disk, never renumber)::

    u32 tail length | tail (sglang_ext.device.layout) | rows of an index, if the model has one, as
    they lie in the page, layer by layer | of a page with a draft model's layers, u32 length and
    stream of theirs, always by `lossless` | the codec's stream of the model's K and V

A lossless codec keeps the tail with its corrections; after a lossy one K is no longer on the grid
that corrections are for, and the tail is written without any.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_ext.codec.base import Codec, CodecError, LearnedShape, PlaneArray, kv_dtype
from sglang_ext.codec.coded_shape import CodedShape, Planes
from sglang_ext.codec.learned import MAX_KNOWN, MAX_KNOWN_BYTES, LearnedFolder
from sglang_ext.codec.memo import Memo
from sglang_ext.codec.registry import codec_class, create_codec, kind_of
from sglang_ext.device.layout import (
    HEADER_BYTES,
    ROPE_NAMES,
    U8,
    read_tails,
    write_tail,
)
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import RecordMeta, parse_header, write_meta
from sglang_ext.tiers.transcoder import PageTranscoder, coded_record, raw_header

logger = logging.getLogger(__name__)

TAIL_LENGTH = struct.Struct("<I")
_STREAM_LENGTH = struct.Struct("<I")
# What a draft guesses hangs on its own KV, which is a small part of a page.
_DRAFT_CODEC = "lossless"
_SAMPLE_TOKENS = 4096
_SAMPLE_BYTES = 256 << 20
_ROPE_NUMBERS = {name: number for number, name in ROPE_NAMES.items()}


class _Parts(NamedTuple):
    """Where the parts of a coded payload lie: the tail comes behind its length.

    Attributes:
        index_at: where rows of an index begin, and the tail ends.
        draft_at: where the stream of a draft's planes begins.
        stream_at: where that of the model's planes begins.
    """

    index_at: int
    draft_at: int
    stream_at: int


class PageCodec(PageTranscoder):
    """Codes pages with one codec at one level; decodes pages of every codec.

    A codec that has to learn about the model does so from the first pages it is shown, in a thread
    of its own; until then pages are stored raw.

    Attributes:
        max_pages_a_slot: coded pages that the room of a raw one is expected to hold at most.

    Args:
        shape: of the pages.
        codec_id: what to code with; "none" codes nothing and decodes all the same.
        level: the codec's level; None for its default.
        learned: what the codec knows of the model; None to take it from `folder`, or to learn it.
        folder: where learned things are kept.
        owner: name of the model whose pages these are; what was learned for it is used again.
        keys: what proves that it was learned by a server of this deployment (`LearnedFolder`).
    """

    def __init__(
        self,
        shape: CodedShape,
        codec_id: str,
        level: int | None,
        *,
        learned: Any = None,
        folder: Path | None = None,
        owner: str = "",
        keys: Sequence[bytes] = (),
    ) -> None:
        self.encodes = codec_id != "none"
        lossy = codec_class(codec_id).lossy
        self.quality = int(Quality.LOSSY if lossy else Quality.EXACT)
        # Room in the index: a page is expected to shrink by no more than this.
        self.max_pages_a_slot = (12 if lossy else 3) if self.encodes else 1
        self._shape, self._codec_id, self._level = shape, codec_id, level
        self._learned_shape = LearnedShape(shape.own.num_planes, shape.own.num_channels)
        self._known, self._owner = LearnedFolder(folder, self._learned_shape, keys), owner
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # guarded by _lock
        # By id and digest of what was learned; None: not to be had. Guarded by _lock.
        self._codecs: Memo[Codec | None] = Memo(MAX_KNOWN, MAX_KNOWN_BYTES)
        self._samples: list[PlaneArray] = []  # guarded by _lock
        self._num_samples = 0  # tokens; guarded by _lock
        self._closed = False  # guarded by _lock
        self._encoder: tuple[Codec, bytes] | None = None  # replaced as a whole
        self._learner: threading.Thread | None = None  # guarded by _lock
        self._draft_codec: Codec | None = None
        if shape.draft is not None:
            self._draft_codec = create_codec(_DRAFT_CODEC, dtype=shape.dtype)
            if self.encodes:
                _try_codec(self._draft_codec, shape.draft, None)
        if self.encodes:
            self._prepare(learned)

    def _prepare(self, learned: Any) -> None:
        """Makes the encoder from what is known already."""
        if kind_of(self._codec_id) is None:
            codec = create_codec(self._codec_id, dtype=self._shape.dtype)
            _try_codec(codec, self._shape.own, self._level)
            self._encoder = (codec, b"")
            return
        if learned is not None:
            self._use(self._known.store(self._codec_id, learned))
            return
        earlier = self._known.latest(self._codec_id, self._owner)
        if earlier is not None:
            try:
                self._use(earlier)
            except CodecError as error:
                logger.info("hier-kv: the stored profile is of another model (%s)", error)

    def encode(self, slot: U8) -> U8 | None:
        """Codes one page; None until the codec knows the model. Contract of `PageTranscoder`."""
        encoder = self._encoder
        planes = self._shape.own.take(slot)
        if encoder is None:
            self._sample(planes)
            return None
        codec, digest = encoder
        meta, _ = parse_header(slot)
        stream = self._stream(codec, planes, _raw_tokens(codec, meta))
        tail = self._tail(slot, meta, keep_corrections=not codec.lossy)
        head = TAIL_LENGTH.pack(len(tail)) + tail + self._shape.index_of(slot)
        payload = np.frombuffer(head + self._draft_stream(slot) + stream, np.uint8)
        self._count("pages_coded")
        return coded_record(
            meta,
            payload,
            codec=codec.codec_id,
            level=0 if self._level is None else self._level,
            profile=digest,
            quality=self.quality,
        )

    def decode(self, record: U8, out_slot: U8) -> bool:
        """Decodes one page. Contract of `PageTranscoder`."""
        meta, payload_bytes = parse_header(record)
        codec = self._codec(meta.codec, meta.profile)
        if codec is None:
            self._count("pages_of_unknown_codec")
            return False
        if not is_consistent(codec, meta):
            return False
        payload = record[HEADER_BYTES : HEADER_BYTES + payload_bytes]
        layout = self._shape.layout
        parts = self.parts(payload)
        if parts is None:
            return False
        planes = self._shape.own.take(out_slot)
        try:
            codec.decode(payload[parts.stream_at :].data, planes)
            self._decode_draft(payload[parts.draft_at : parts.stream_at], out_slot)
        except CodecError as error:
            logger.debug("hier-kv: page %s is not decoded: %s", meta.page_hash.hex(), error)
            return False
        self._shape.own.put(planes, out_slot)
        self._shape.put_index(payload[parts.index_at : parts.draft_at], out_slot)
        for gap in layout.gaps:  # else bytes of whatever page had the slot before
            out_slot[gap] = 0
        tail_bytes = parts.index_at - TAIL_LENGTH.size
        tail_end = layout.tail_offset + tail_bytes
        out_slot[layout.tail_offset : tail_end] = payload[TAIL_LENGTH.size : parts.index_at]
        write_meta(out_slot, raw_header(meta), tail_end - HEADER_BYTES)
        self._count("pages_decoded")
        return self._has_sound_tail(out_slot, tail_bytes)

    def parts(self, payload: U8) -> _Parts | None:
        """Where the parts of a payload lie; None where it is too short, or no such payload."""
        layout, end = self._shape.layout, len(payload)
        if end < TAIL_LENGTH.size:
            return None
        (tail_bytes,) = TAIL_LENGTH.unpack_from(payload.data)
        index = TAIL_LENGTH.size + tail_bytes
        draft = stream = index + self._shape.index_bytes
        if self._shape.draft is not None and draft + _STREAM_LENGTH.size <= end:
            (num_bytes,) = _STREAM_LENGTH.unpack_from(payload.data, draft)
            stream = draft + _STREAM_LENGTH.size + num_bytes
        if tail_bytes > layout.tail_bytes(layout.max_corrections) or stream > end:
            return None
        return _Parts(index, draft, stream)

    def close(self) -> None:
        """Begins to learn nothing any more. Contract of `PageTranscoder`."""
        with self._lock:
            self._closed = True
            self._samples.clear()

    def counts(self) -> dict[str, int]:
        """Pages coded, decoded and not decodable since start."""
        with self._lock:
            return dict(self._counts)

    def _stream(self, codec: Codec, planes: PlaneArray, raw_tokens: int | None) -> bytes:
        return codec.encode(planes, level=self._level, raw_tokens=raw_tokens)

    def _draft_stream(self, slot: U8) -> bytes:
        """A draft's planes, coded, behind their length; nothing without a draft."""
        if self._draft_codec is None or self._shape.draft is None:
            return b""
        stream = self._draft_codec.encode(self._shape.draft.take(slot))
        return _STREAM_LENGTH.pack(len(stream)) + stream

    def _decode_draft(self, stream: U8, out_slot: U8) -> None:
        """The way back.

        Raises:
            CodecError: it is none of this shape.
        """
        if self._draft_codec is None or self._shape.draft is None:
            return
        planes = self._shape.draft.take(out_slot)
        self._draft_codec.decode(stream[_STREAM_LENGTH.size :].data, planes)
        self._shape.draft.put(planes, out_slot)

    def _tail(self, slot: U8, meta: RecordMeta, *, keep_corrections: bool) -> bytes:
        layout = self._shape.layout
        if keep_corrections:
            _, payload_bytes = parse_header(slot)
            return slot[layout.tail_offset : HEADER_BYTES + payload_bytes].tobytes()
        scratch = np.zeros(layout.slot_bytes, np.uint8)
        end = write_tail(
            scratch, layout, rope_state=_ROPE_NUMBERS[meta.rope], position=meta.position
        )
        return scratch[layout.tail_offset : HEADER_BYTES + end].tobytes()

    def _has_sound_tail(self, slot: U8, tail_bytes: int) -> bool:
        layout = self._shape.layout
        if tail_bytes < layout.tail_bytes(0):
            return False
        tails = read_tails(slot[None], np.zeros(1, np.int64), layout)
        return tails is not None and layout.tail_bytes(len(tails.page)) == tail_bytes

    def _codec(self, codec_id: str, digest: bytes) -> Codec | None:
        """The decoder of a record; None when the codec or what it learned is not to be had."""
        encoder = self._encoder
        if encoder is not None and (encoder[0].codec_id, encoder[1]) == (codec_id, digest):
            return encoder[0]
        key = (codec_id, digest)
        with self._lock:
            if key in self._codecs:
                return self._codecs.get(key)
        codec: Codec | None = None
        learned = None
        try:
            learned = self._known.find(codec_id, digest) if digest else None
            codec = create_codec(codec_id, dtype=self._shape.dtype, profile=learned)
        except CodecError as error:
            logger.warning("hier-kv: pages of codec %r cannot be decoded: %s", codec_id, error)
        with self._lock:
            num_bytes = 0 if learned is None else learned.nbytes
            self._codecs.put(key, codec, num_bytes + (0 if codec is None else codec.table_bytes))
        return codec

    def _sample(self, planes: PlaneArray) -> None:
        """Keeps a copy of a page to learn from, and begins to learn once there are enough."""
        per_token = planes.shape[0] * planes.shape[2] * planes.itemsize
        wanted = min(_SAMPLE_TOKENS, max(planes.shape[1], _SAMPLE_BYTES // per_token))
        with self._lock:
            if self._learner is not None or self._closed or self._encoder is not None:
                return
            self._samples.append(planes.copy())
            self._num_samples += planes.shape[1]
            if self._num_samples < wanted:
                return
            chunks, self._samples = self._samples, []
            self._learner = threading.Thread(
                target=self._learn, args=(chunks,), name="hier-kv-profile", daemon=True
            )
            self._learner.start()

    def _learn(self, chunks: list[PlaneArray]) -> None:
        kind = kind_of(self._codec_id)
        if kind is None:
            return
        shape = self._shape
        source = f"the first {self._num_samples} tokens of a server"
        try:
            # One chunk: neighbouring tokens of a page stay neighbours, pages follow each other.
            chunk = np.ascontiguousarray(np.concatenate(chunks, axis=1))
            learned = kind.build([chunk], shape.dtype, shape.head_dim, source)
            self._use(self._known.store(self._codec_id, learned, self._owner))
        except Exception:
            # Pages stay raw: the codec is an economy, not a need.
            logger.exception("hier-kv: no profile could be made for codec %s", self._codec_id)
            self._count("profile_failures")
        else:
            logger.info("hier-kv: codec %s learned from %s", self._codec_id, source)

    def _use(self, learned: Any) -> None:
        kind = kind_of(self._codec_id)
        if kind is None:
            raise ValueError(f"{self._codec_id} learns nothing")
        shape = self._shape
        codec = create_codec(self._codec_id, dtype=shape.dtype, profile=learned)
        _try_codec(codec, self._shape.own, self._level)
        with self._lock:
            self._encoder = (codec, kind.digest(learned))
            self._samples.clear()  # it may have come before there were enough of them

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _try_codec(codec: Codec, of: Planes, level: int | None) -> None:
    """Proves that level and profile are of this model, and compiles what is not compiled."""
    zeros = np.zeros(of.axes, kv_dtype(of.dtype).storage)
    codec.decode(codec.encode(zeros, level=level), zeros)


def parse_level(codec_id: str, text: str) -> int | None:
    """The level that `text` names: a number, or a name where the codec has names; None for "".

    Raises:
        CodecError: no codec of this id has such a level. How many levels a profile has is checked
            when it is used.
    """
    if not text:
        return None
    cls, kind = codec_class(codec_id), kind_of(codec_id)
    names = cls.level_names
    if text in names:
        return int(names.index(text))
    num_levels = kind.num_levels if kind is not None else cls.num_levels
    if not text.isascii() or not text.isdigit() or len(text) > 4 or int(text) >= num_levels:
        if num_levels == 1:
            raise CodecError(f"there is one level, so leave it out, got {text[:40]!r}")
        known = f"{', '.join(names)} or " if names else ""
        raise CodecError(f"levels are {known}0 to {num_levels - 1}, got {text[:40]!r}")
    return int(text)


def is_consistent(codec: Codec, meta: RecordMeta) -> bool:
    """Whether a record can be what the codec makes: a level it has, and no better than it is."""
    is_good_enough = not codec.lossy or meta.quality >= Quality.LOSSY
    return meta.level < codec.num_levels and is_good_enough


def _raw_tokens(codec: Codec, meta: RecordMeta) -> int | None:
    """Only a conversation's first page has the tokens that all others attend to."""
    return None if meta.position == 0 or not codec.lossy else 0
