"""A stretch of pages of one kind on its way from a store: the plan's chunks, and what is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from sglang_ext.codec.base import Codec
from sglang_ext.codec.registry import codec_class, codec_ids
from sglang_ext.coded_remote.lookup import FoundPage
from sglang_ext.coded_remote.transfer import Part
from sglang_ext.streaming import (
    ChunkFetch,
    ChunkOffer,
    ContextStream,
    LinkEstimator,
    QualityScale,
    StreamCosts,
)
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.staged import START_BYTES

CHUNK_TOKENS = 1500
_CHUNK_BYTES = 32 << 20
_REQUEST_S = 0.001
_UNKNOWN_TOKEN_S = 10.0  # slower than any store


@dataclass(frozen=True)
class Speeds:
    """What the planner is told besides the link.

    Attributes:
        raw_page_bytes: of a page in DRAM.
        decode_bytes_per_s: of raw bytes.
        prefill_s: of new tokens behind others; None while it is not known.
    """

    raw_page_bytes: int
    decode_bytes_per_s: float
    prefill_s: Callable[[int, int], float | None]


def chunks_of(pages: Sequence[FoundPage]) -> list[list[FoundPage]]:
    """Cuts a stretch into chunks of about 1,500 tokens, whole pages, and of bounded bytes.

    The first is half as long: two fetches that begin together would go on to end together, and the
    link would have nothing to do while the next two are asked for. It is decoded sooner, too.
    """
    tokens, largest = pages[0].meta.num_tokens, max(page.sizes[-1] for page in pages)
    num = max(1, min(round(CHUNK_TOKENS / max(1, tokens)), _CHUNK_BYTES // largest))
    first = -(-num // 2)
    starts = [0, *range(first, len(pages), num)]
    return [list(pages[at:end]) for at, end in zip(starts, [*starts[1:], None], strict=True)]


def parts_of(pages: Sequence[FoundPage], level: int, have: int = -1) -> list[Part]:
    """What lifts pages from a level (-1: nothing) to another, both positions in their `sizes`."""
    parts = []
    for page in pages:
        base = START_BYTES if page.stages is not None else 0
        start = page.sizes[have] if have >= 0 else 0
        parts.append(Part(page, base + start, base + page.sizes[level]))
    return parts


class Partial(NamedTuple):
    """Leading pages of a chunk, at a level."""

    num_pages: int
    step: int


class FetchedSpan:
    """State of one stretch. Guarded by its owner's lock.

    Attributes:
        chunks: its pages.
        stream: the planner.
        next_decode: the first chunk that is not published.
        partial: by chunk, the leading pages that came where its other pages could not be had.
        held_bytes: arrived, and not forgotten.
        text_s: expected seconds to compute all of it, and what is behind it.
    """

    def __init__(
        self,
        pages: Sequence[FoundPage],
        link: LinkEstimator,
        speeds: Speeds,
        *,
        now_s: float,
        deadline_s: float | None,
        pages_behind: int,
    ) -> None:
        """Makes the plan.

        Args:
            pages: of one kind, neighbours.
            link: what is known of the link.
            speeds: what is known besides.
            now_s: the time.
            deadline_s: when the first token is due; None for as soon as possible.
            pages_behind: pages of the prompt behind these, to be computed as far as is known.
        """
        self.chunks = chunks_of(pages)
        self.next_decode = 0
        self.partial: dict[int, Partial] = {}
        self.held_bytes = 0
        self._pieces: dict[int, dict[int, ByteArray]] = {page.number: {} for page in pages}
        page_tokens = max(1, pages[0].meta.num_tokens)
        before = pages[0].number * page_tokens
        question = pages_behind * page_tokens + page_tokens // 2
        offers = [_offer(chunk) for chunk in self.chunks]
        self._costs = StreamCosts(
            speeds.raw_page_bytes // page_tokens,
            speeds.decode_bytes_per_s,
            _prefill(speeds.prefill_s, before, question),
            _REQUEST_S,
        )
        self.text_s = self._costs.prefill_s(len(pages) * page_tokens + question, 0)
        self._new_stream = partial(
            ContextStream,
            offers,
            quality=_scale(pages[0]),
            deadline_s=deadline_s,
            question_tokens=question,
        )
        self.stream = self._new_stream(self._costs, link=link, now_s=now_s)

    def would_load(self, now_s: float) -> bool:
        """Whether anything would be fetched if link and decoder took no time."""
        costs = replace(self._costs, decode_bytes_per_s=math.inf, request_s=0.0)
        return self._new_stream(costs, link=LinkEstimator(), now_s=now_s).plan.num_loaded > 0

    def parts(self, fetch: ChunkFetch) -> list[Part]:
        """What a fetch is of, page by page."""
        chunk = self.chunks[fetch.chunk]
        have = _offer(chunk).prefix_bytes.index(fetch.start) if fetch.start else -1
        return parts_of(chunk, fetch.level, have)

    def add(self, page: FoundPage, start: int, data: ByteArray) -> None:
        """Bytes of a page from `start` on are there, verified. Ignored once it is published."""
        pieces = self._pieces.get(page.number)
        if pieces is not None:
            pieces[start] = data
            self.held_bytes += data.size

    def take(self, page: FoundPage, step: int) -> ByteArray | None:
        """All bytes of a page up to a level; None when some are missing. Needs no lock."""
        pieces = self._pieces.get(page.number, {})
        at = START_BYTES if page.stages is not None else 0
        end = at + page.sizes[step]
        parts = []
        while at < end and at in pieces:
            parts.append(pieces[at])
            at += pieces[at].size
        if at != end:
            return None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def forget(self, pages: Sequence[FoundPage]) -> None:
        """The bytes of some pages are not needed any more; what still comes of them is ignored."""
        for page in pages:
            pieces = self._pieces.pop(page.number, {})
            self.held_bytes -= sum(piece.size for piece in pieces.values())


def _offer(chunk: Sequence[FoundPage]) -> ChunkOffer:
    totals = [sum(sizes) for sizes in zip(*(page.sizes for page in chunk), strict=True)]
    return ChunkOffer(sum(max(1, page.meta.num_tokens) for page in chunk), tuple(totals))


def _scale(page: FoundPage) -> QualityScale:
    codec_id = page.meta.codec
    expected_kl: tuple[float, ...] = (0.0,)
    if page.meta.quality != Quality.EXACT:  # also raw bytes of what a codec had changed before
        codec = codec_class(codec_id) if codec_id in codec_ids() else Codec
        expected_kl = codec.expected_kl
    num, last = len(page.sizes), len(expected_kl) - 1
    damage = tuple(expected_kl[min(page.level(step), last)] for step in range(num))
    return QualityScale(damage, default_level=num - 1)


def _prefill(
    prefill_s: Callable[[int, int], float | None], before: int, question: int
) -> Callable[[int, int], float]:
    """Adapts `prefill_s` to the planner. An unknown time counts as too long to compute anything."""

    def seconds(num_new: int, num_before: int) -> float:
        found = prefill_s(num_new, before + num_before)
        if found is None:
            return _UNKNOWN_TOKEN_S * max(0, num_new - question)
        return found

    return seconds
