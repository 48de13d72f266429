"""What a remote store has of a prefix: headers only, up to the first page that it lacks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    RAW_CODEC,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
)
from sglang_ext.tiers.remote.base import Outcome, RemoteKey, level_name
from sglang_ext.tiers.remote.items import GetResult
from sglang_ext.tiers.remote.ranges import RangeRequest
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.remote.staged import START_BYTES, Stages
from sglang_ext.tiers.store.remote.coded_remote import RemoteCodec
from sglang_ext.tiers.store.remote.profiles import RemoteProfiles
from sglang_ext.tiers.store.types import Hashes, KeySpace, StoreCounters

_AT_ONCE = 64
_MAX_REMEMBERED = 8192
_REMEMBERED_S = 1.0


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page that a store has.

    Attributes:
        number: of the page in the prefix.
        key: its name.
        meta: what its header says.
        stages: what can be read of it by levels; None where it is read whole.
        sizes: bytes to read for each level, coarsest first, those of the levels before included.
    """

    number: int
    key: RemoteKey
    meta: RecordMeta
    stages: Stages | None
    sizes: tuple[int, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Pages of one kind can be streamed together."""
        if self.stages is None:
            return (self.meta.codec, self.meta.level)
        return (self.meta.codec, self.meta.level, self.stages.first_level, len(self.sizes))

    def level(self, step: int) -> int:
        """The codec's level at one of `sizes`; whatever its stages say, none finer than its own."""
        if self.stages is None:
            return self.meta.level
        return min(self.meta.level, self.stages.first_level + step)


class _Recent:
    """Pages that were found lately. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Time and page by key space and hash, the oldest first; guarded by _lock.
        self._found: OrderedDict[tuple[int, bytes], tuple[float, FoundPage]] = OrderedDict()

    def note(self, space: KeySpace, pages: Sequence[FoundPage]) -> None:
        """Remembers pages, and forgets those of long ago."""
        now_s = time.monotonic()
        with self._lock:
            for page in pages:
                key = space.number, page.key.page_hash
                self._found[key] = now_s, page
                self._found.move_to_end(key)
            while self._found:
                key, (found_s, _) = next(iter(self._found.items()))
                if len(self._found) <= _MAX_REMEMBERED and found_s > now_s - _REMEMBERED_S:
                    break
                del self._found[key]

    def leading(
        self, space: KeySpace, hashes: Hashes, max_quality: int, first: int
    ) -> list[FoundPage]:
        """Pages from `first` on, up to the first that is not remembered; those are forgotten."""
        oldest_s = time.monotonic() - _REMEMBERED_S
        pages: list[FoundPage] = []
        with self._lock:
            for number in range(first, len(hashes)):
                key = space.number, hashes[number].tobytes()
                found_s, page = self._found.get(key, _NEVER)
                if page is None or found_s < oldest_s or page.meta.quality > max_quality:
                    break
                del self._found[key]
                pages.append(replace(page, number=number))
        return pages


_NEVER: tuple[float, FoundPage | None] = 0.0, None


class Finder:
    """Looks up prefixes. Thread-safe; blocks as long as the store takes.

    A request's prefix is looked up when it is asked whether it is worth waiting for, and again when
    it is fetched, most often at once. What was found the first time is used the second time.
    """

    def __init__(
        self,
        remote: RemoteStore,
        codec: RemoteCodec,
        profiles: RemoteProfiles,
        counters: StoreCounters,
        slot_bytes: int,
        rules: PageRules,
    ) -> None:
        self._remote = remote
        self._rules = rules
        self._profiles = profiles
        self._counters = counters
        self._slot_bytes = slot_bytes
        self._coded_level = level_name(codec.codec_id, codec.level)
        self._recent = _Recent()

    def ask(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[FoundPage]:
        """The pages that the store has now, good enough, up to the first it lacks."""
        found = self._ask(space, hashes, max_quality, 0)
        self._recent.note(space, found)
        return found

    def first(self, space: KeySpace, hashes: Hashes, max_quality: int) -> int | None:
        """Index of the first of these pages that the store has now, coded or as it is."""
        for start in range(0, len(hashes), _AT_ONCE):
            rows = [row.tobytes() for row in hashes[start : start + _AT_ONCE]]
            for at, page in enumerate(self._each(space, rows, max_quality, start)):
                if page is not None:
                    return start + at
        return None

    def blame(self, space: KeySpace, page_hash: bytes) -> None:
        """A coded page proved to be unusable."""
        key = RemoteKey(space.digest, page_hash, space.lora, self._coded_level)
        self._remote.reject(key, "unusable")

    def find(
        self, space: KeySpace, hashes: Hashes, max_quality: int, first: int = 0
    ) -> list[FoundPage]:
        """The pages from `first` on, as `ask` found them a moment ago, or as the store says."""
        found = self._recent.leading(space, hashes, max_quality, first)
        return found + self._ask(space, hashes, max_quality, first + len(found))

    def _ask(
        self, space: KeySpace, hashes: Hashes, max_quality: int, first: int
    ) -> list[FoundPage]:
        found: list[FoundPage] = []
        for start in range(first, len(hashes), _AT_ONCE):
            rows = [row.tobytes() for row in hashes[start : start + _AT_ONCE]]
            for page in self._each(space, rows, max_quality, start):
                if page is None:
                    return found
                found.append(page)
        return found

    def _each(
        self, space: KeySpace, rows: list[bytes], max_quality: int, start: int
    ) -> Iterator[FoundPage | None]:
        """Each page, coded or as it is; lazy: of what is not looked at nothing is rejected."""
        keys = [
            [RemoteKey(space.digest, row, space.lora, level) for row in rows]
            for level in (self._coded_level, RAW_CODEC)
        ]
        room = np.empty((2, len(rows), START_BYTES), np.uint8)
        outs = [list(room[0]), [raw[:HEADER_BYTES] for raw in room[1]]]
        requests = [
            RangeRequest(key, out)
            for some_keys, some_outs in zip(keys, outs, strict=True)
            for key, out in zip(some_keys, some_outs, strict=True)
        ]
        results = self._remote.read_ranges(requests)
        for at in range(len(rows)):
            coded = self._page(start + at, requests[at], results[at], max_quality)
            if coded is not None:
                yield coded
                continue
            other = at + len(rows)
            yield self._page(start + at, requests[other], results[other], max_quality)

    def _page(
        self, number: int, request: RangeRequest, result: GetResult, max_quality: int
    ) -> FoundPage | None:
        if result.outcome is not Outcome.OK:
            return None
        start, key = request.out[: result.num_bytes], request.key
        facts = self._remote.facts(start, key, self._slot_bytes)
        if isinstance(facts, VerifyResult):
            self._remote.reject(key, facts.value)
            return None
        if not self._rules.admits_header(facts.meta, facts.total_bytes - HEADER_BYTES):
            self._remote.reject(key, "unsound")
            return None
        if facts.meta.quality > max_quality:
            return None
        if facts.meta.codec == RAW_CODEC:
            return FoundPage(number, key, facts.meta, None, (facts.total_bytes,))
        return self._coded(number, key, start, facts.total_bytes)

    def _coded(
        self, number: int, key: RemoteKey, start: ByteArray, total_bytes: int
    ) -> FoundPage | None:
        try:
            stages = self._remote.read_stages(start, key, self._slot_bytes)
        except RecordError as error:
            self._remote.reject(key, error.kind.value)
            return None
        if not self._profiles.obtain(stages.meta):
            self._counters.add("remote_missing_profile_pages")
            return None
        if total_bytes > self._remote.part_bytes:  # may be split, and is put together whole
            return FoundPage(number, key, stages.meta, None, (total_bytes,))
        sizes = tuple(end - START_BYTES for end in stages.ends)
        return FoundPage(number, key, stages.meta, stages, sizes)


def runs_of(pages: Sequence[FoundPage]) -> list[list[FoundPage]]:
    """Cuts pages into stretches of one kind."""
    runs: list[list[FoundPage]] = []
    for page in pages:
        if runs and runs[-1][-1].kind == page.kind:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs
