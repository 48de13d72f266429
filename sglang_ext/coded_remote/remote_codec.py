"""Codes pages for a remote store: in levels where the codec has them, with profiles that travel."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.codec.base import Codec, CodecError, PlaneArray
from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.codec.container import read_header
from sglang_ext.codec.page_codec import PageCodec, is_consistent
from sglang_ext.codec.registry import codec_class, kind_of
from sglang_ext.device.layout import HEADER_BYTES, U8
from sglang_ext.tiers.records.record import RecordMeta, parse_header
from sglang_ext.tiers.store.remote.coded_remote import Levels, RemoteCodec

logger = logging.getLogger(__name__)


class RemotePageCodec(PageCodec, RemoteCodec):
    """A `PageCodec` whose streams hold all levels up to one, where the codec can.

    A learned profile is sent as the bytes of its file, and other servers' arrive likewise.
    A received profile only decodes the records that name it, unless `adopts` is set: otherwise
    anyone who can write to a store that proves no origin could decide how this server codes.

    Attributes:
        codec_id: what pages are coded with.
        level: the finest level of their streams.
        adopts: whether a server that has learned nothing itself yet codes with what it got, because
            the store proves that a server of this deployment made it.
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
        adopts: bool = False,
    ) -> None:
        self.adopts = adopts
        cls = codec_class(codec_id)
        self.codec_id = codec_id
        self.level = cls.default_level if level is None else level
        self._layered = cls.layered
        super().__init__(
            shape, codec_id, self.level, learned=learned, folder=folder, owner=owner, keys=keys
        )

    def levels(self, record: U8) -> Levels:
        """See `RemoteCodec.levels`."""
        meta, payload_bytes = parse_header(record)
        end = HEADER_BYTES + payload_bytes
        if not codec_class(meta.codec).layered:
            return Levels(meta.level, (end,))
        parts = self.parts(record[HEADER_BYTES:end])
        if parts is None:
            raise CodecError("a record without a stream has no levels")
        stream_at = HEADER_BYTES + parts.stream_at
        header = read_header(record[stream_at:end].data)
        levels = range(header.first_level, header.last_level + 1)
        ends = [stream_at + header.prefix_bytes(level) for level in levels]
        if len(set(ends)) < len(ends):  # a level that adds nothing is none to choose
            return Levels(header.last_level, (end,))
        return Levels(header.first_level, tuple(ends))

    def profile(self, meta: RecordMeta) -> bytes:
        """See `RemoteCodec.profile`."""
        learned = self._known.find(meta.codec, meta.profile)
        if learned is None:
            raise LookupError(f"no profile {meta.profile.hex()} of codec {meta.codec}")
        with tempfile.TemporaryDirectory(prefix="hier-kv-") as folder:
            path = Path(folder) / "profile"
            learned.save(path)
            return path.read_bytes()

    def knows(self, meta: RecordMeta) -> bool:
        """See `RemoteCodec.knows`."""
        if meta.profile and not self._known.has(meta.codec, meta.profile):
            return False
        codec = self._codec(meta.codec, meta.profile)
        return codec is not None and is_consistent(codec, meta)

    def learn(self, meta: RecordMeta, profile: bytes) -> bool:
        """See `RemoteCodec.learn`."""
        kind = kind_of(meta.codec)
        if kind is None:
            return False
        try:
            learned = kind.read(profile, self._learned_shape)
            if kind.digest(learned) != meta.profile:
                return False
            self._known.remember(meta.codec, learned)
            with self._lock:
                self._codecs.drop((meta.codec, meta.profile))
            is_known = self.knows(meta)
        except (CodecError, MemoryError):
            return False
        if self.adopts and meta.codec == self._codec_id and self._encoder is None:
            self._adopt(learned)
        return is_known

    def _adopt(self, learned: Any) -> None:
        """Codes with what another server learned, where that has the level that is asked for."""
        try:
            self._use(learned)
        except (CodecError, MemoryError) as error:
            logger.info("hier-kv: another server's profile decodes only (%s)", error)

    def max_profile_bytes(self, codec_id: str) -> int:
        """See `RemoteCodec.max_profile_bytes`."""
        kind = kind_of(codec_id)
        return kind.max_file_bytes(self._learned_shape) if kind is not None else 0

    def _stream(self, codec: Codec, planes: PlaneArray, raw_tokens: int | None) -> bytes:
        if not self._layered:
            return super()._stream(codec, planes, raw_tokens)
        return codec.encode(planes, level=0, last_level=self.level, raw_tokens=raw_tokens)
