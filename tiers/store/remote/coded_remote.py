"""What a page store needs to keep coded pages in a remote store: interfaces and shared words."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple, Protocol

from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.record import ByteArray, RecordMeta
from sglang_ext.tiers.remote.base import Outcome
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.types import Hashes, KeySpace, Plan
from sglang_ext.tiers.transcoder import PageTranscoder


class Levels(NamedTuple):
    """Where the levels of a coded record end.

    Attributes:
        first: what the bytes up to the first end decode to.
        ends: in the record, rising; the last is its length.
    """

    first: int
    ends: tuple[int, ...]


class RemoteCodec(PageTranscoder):
    """Codes pages for a store that several servers share, in levels where the codec has them.

    Attributes:
        codec_id: of what it codes with.
        level: the finest level of what it makes.
    """

    codec_id: str
    level: int

    @abc.abstractmethod
    def levels(self, record: ByteArray) -> Levels:
        """The levels of a record that `encode` made."""

    @abc.abstractmethod
    def profile(self, meta: RecordMeta) -> bytes:
        """The profile that a record names, for `learn` at another server.

        Raises:
            LookupError: it is not here.
        """

    @abc.abstractmethod
    def knows(self, meta: RecordMeta) -> bool:
        """Whether a record can be decoded with what is known here."""

    @abc.abstractmethod
    def learn(self, meta: RecordMeta, profile: bytes) -> bool:
        """Takes bytes that are said to be a record's profile; False when they are not.

        It is used to decode the records that name it. What is kept is bounded.
        """

    @abc.abstractmethod
    def max_profile_bytes(self, codec_id: str) -> int:
        """No profile of a codec is longer for the local model; 0 for a codec that has none."""


class Lookup(NamedTuple):
    """A waiting request's pages that DRAM and disk do not have.

    Attributes:
        plan: waits for them.
        space: where they belong.
        hashes: u8 `[N, 32]`, of the prefix as far as it is fetched.
        num_known: leading pages that DRAM and disk have.
        max_quality: no page worse than this.
        num_bytes: of the pages behind those, as the store said.
        num_pages: of the whole prefix.
        asked_s: when the request came, on the clock of `time.monotonic`.
    """

    plan: Plan
    space: KeySpace
    hashes: Hashes
    num_known: int
    max_quality: int
    num_bytes: int
    num_pages: int
    asked_s: float


class CodedRemote(Protocol):
    """Moves pages between DRAM and a remote store, coded. Thread-safe.

    Attributes:
        level: under which coded pages lie there, as names have it.
    """

    level: str

    def upload(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, list[Outcome]]:
        """Codes and stores those pages that are in DRAM; returns which these are, and outcomes."""

    def sizes(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[int]:
        """Bytes to read of the leading pages that the store has; blocks."""

    def first(self, space: KeySpace, hashes: Hashes, max_quality: int) -> int | None:
        """Index of the first of these pages that the store has; blocks."""

    def blame(self, space: KeySpace, page_hash: bytes) -> None:
        """A page cannot be used; it is not asked for until it is stored anew. Does not block."""

    def fetch(self, lookup: Lookup, done: Callable[[], None]) -> None:
        """Begins to bring a request's pages; `done` is called once when nothing more will come.

        May ask the store what it has, and does not wait for the pages.
        """

    def close(self) -> None:
        """Ends what was begun. The store is closed after it."""


OpenCoded = Callable[[Books, RemoteStore, DecodedPages, PageRules], CodedRemote]
"""Connects a coded remote tier to a page store's books; pages that break the rules are misses."""
