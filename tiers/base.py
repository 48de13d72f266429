"""What a tier that keeps records is: its interface and the types that pass through it.

A tier moves bytes. It sees slots (one record each, `sglang_ext.tiers.records.record`), never
tensors. The index from page to location is its owner's.

A new one is a subclass of `Tier` that calls its owner back (`OwnerCallbacks`), a name in
`RecordTier` (`coded_host/__init__.py`) and a case in `_record_tier`, where
`sglang_ext/assembly/parts/store.py` makes it. `coded_host/memory_tier.py` is the smallest.
`tests/tiers/test_tier_conformance.py` is run on each.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, VerifyResult

BLOCK_BYTES = 4096
"""Unit of `Location.block`, and the alignment of slots in memory and in segments."""

NO_SEGMENT = 0xFFFFFFFF
"""Never a segment id; free for callers to mean "not on disk"."""


MAX_RECORD_BLOCKS = 0xFFFF
"""Longest record, in blocks: lengths are kept in 16 bits, in segments and in the index."""


def record_blocks(payload_bytes: int) -> int:
    """Returns how many blocks a record with this payload fills."""
    return -(-(HEADER_BYTES + payload_bytes) // BLOCK_BYTES)


def check_namespace(digest: bytes, slot_bytes: int) -> None:
    """Checks what any tier needs of a namespace.

    Raises:
        TierConfigError: the digest or the size of slots is none.
    """
    if len(digest) != 32:
        raise TierConfigError(f"a namespace digest must be 32 bytes, got {len(digest)}")
    if slot_bytes <= 0 or slot_bytes % BLOCK_BYTES:
        raise TierConfigError(
            f"slot_bytes must be a positive multiple of {BLOCK_BYTES}, got {slot_bytes}"
        )


class Location(NamedTuple):
    """Where a record lies: a segment id (u32) and an offset in blocks of 4096 bytes (u32)."""

    segment: int
    block: int


@dataclass(slots=True)
class ReadRequest:
    """One record to read.

    Attributes:
        location: as returned by `write` or by `open_namespace`.
        page_hash: 32 bytes, compared in full with the record's.
        lora: 32 bytes or empty, compared too.
        out: u8 [slot_bytes], C-contiguous and writable; aligned to 4096 bytes for zero copy. Its
            content means nothing unless the result is `VerifyResult.OK`, and then only up to the
            record's length.
        num_blocks: length of the record, as written or as in `RecoveredPages`; 0 when it is not
            known, which reads as much as a slot holds.
    """

    location: Location
    page_hash: bytes
    lora: bytes
    out: ByteArray
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RecoveredPages:
    """Pages with their locations, as columns.

    Attributes:
        hashes: u8 [N, 32], page hashes; one page may appear more than once.
        lora: u8 [N, 32], adapter digests; all zero where there is none.
        segment: u32 [N].
        block: u32 [N].
        num_blocks: u16 [N], lengths of the records, in blocks of 4096 bytes.
        quality: u8 [N], 0 = exact.
    """

    hashes: ByteArray
    lora: ByteArray
    segment: npt.NDArray[np.uint32]
    block: npt.NDArray[np.uint32]
    num_blocks: npt.NDArray[np.uint16]
    quality: ByteArray

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """All of them, in the order of the attributes."""
        return (
            self.hashes, self.lora, self.segment, self.block, self.num_blocks, self.quality,
        )  # fmt: skip

    def take(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> RecoveredPages:
        """Returns some of the pages: a mask, or positions in any order."""
        hashes, *others = (column[rows] for column in self.columns)
        return RecoveredPages(np.ascontiguousarray(hashes), *others)

    def key_of(self, row: int) -> tuple[bytes, bytes]:
        """A page's hash, and the digest of its adapter; empty where there is none."""
        lora = self.lora[row].tobytes()
        return self.hashes[row].tobytes(), b"" if lora == NO_LORA_ROW else lora

    @classmethod
    def empty(cls) -> RecoveredPages:
        """Returns a table of no pages."""
        return cls(
            hashes=np.zeros((0, 32), np.uint8),
            lora=np.zeros((0, 32), np.uint8),
            segment=np.zeros(0, np.uint32),
            block=np.zeros(0, np.uint32),
            num_blocks=np.zeros(0, np.uint16),
            quality=np.zeros(0, np.uint8),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[RecoveredPages]) -> RecoveredPages:
        """Returns the pages of `parts` in order."""
        if not parts:
            return cls.empty()
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))


NO_LORA_ROW = bytes(32)
"""A row of `RecoveredPages.lora` for a page without an adapter."""


class PageKeeper(Protocol):
    """What a tier's owner says of the records in it, page by page.

    Called by the writing thread under the write lock, so the owner must not hold a lock that these
    methods take when it calls `Tier.write`. The owner enters the locations that one call of `write`
    returned before it begins the next: what it does not name as a page by then is overwritten.
    """

    def give_up(self, num_blocks: int) -> int:
        """Forgets the records that are needed least, until they have as many blocks.

        Returns:
            The blocks that were given up; 0 where there are no more.
        """

    def live_records(
        self, segment: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]] | None:
        """First blocks, ascending, and lengths of those records of a segment that are pages."""

    def num_live_blocks(self, segment: int) -> int:
        """Blocks of these records."""

    def take_thinned(self) -> dict[int, int]:
        """Segments that lost pages since the last call, with the blocks of those left."""


class RecordCopy(NamedTuple):
    """A record that a tier could keep in DRAM as well.

    Attributes:
        location: where the tier has it.
        page_hash, lora: its key in the namespace; see `ReadRequest`.
        num_bytes: of it, header and payload.
    """

    location: Location
    page_hash: bytes
    lora: bytes
    num_bytes: int


class CopyKeeper(Protocol):
    """What the owner of a tier that has records in DRAM as well says of these.

    Called by any thread that reads or writes, so the owner must not hold a lock that this takes
    when it calls the tier.
    """

    def keep(
        self, digest: bytes, copies: Sequence[RecordCopy], *, written: bool
    ) -> tuple[list[bool], list[Location]]:
        """Records are at hand, just read or written, and could be kept.

        Args:
            digest: their namespace.
            copies: the records, a page before those that it leads to.
            written: by the call in hand, so that the owner does not know yet where they lie.

        Returns:
            Which of them are to be kept, and the places of others that are to be forgotten since
            the last call: before these are entered, as one may have the place of another.
        """


Enter = Callable[[RecoveredPages], object]


class OwnerCallbacks:
    """Callbacks that whoever owns the tier sets on it; called by the writing thread, lock held.

    Attributes:
        on_drop: called with (namespace digest, segment id) before that segment is removed: every
            location in it is about to become a miss.
        on_moved: called with (namespace digest, old segment id, pages) after hot pages were
            copied out of a segment and before its `on_drop`; `pages` says where they lie now.
        is_hot: called with (namespace digest, hashes u8 [N, 32], adapters u8 [N, 32], zeros for
            none); returns u8 or bool [N], above 0 for the pages worth salvaging from a segment
            about to be dropped, those with the highest values first.
        num_needed: called with a segment id; returns how many pages in it will be read soon. Of
            the oldest segments the one with the fewest is dropped.
        keeper: says which records are pages and which of them to give up, so that room is made
            page by page, in place; None: whole segments go.
        copy_keeper: says which records to have in DRAM as well, where the tier has some there;
            None: those that were used last. Any thread calls it.
    """

    keeper: PageKeeper | None = None
    copy_keeper: CopyKeeper | None = None

    def __init__(self) -> None:
        self.on_drop: Callable[[bytes, int], None] = lambda digest, segment_id: None
        self.on_moved: Callable[[bytes, int, RecoveredPages], None]
        self.on_moved = lambda digest, segment_id, pages: None
        self.is_hot: Callable[
            [bytes, ByteArray, ByteArray], np.ndarray[tuple[int], np.dtype[np.uint8 | np.bool_]]
        ]
        self.is_hot = lambda digest, hashes, lora: np.zeros(len(hashes), np.bool_)
        self.num_needed: Callable[[int], int] = lambda segment_id: 0


class Tier(abc.ABC):
    """A place where records live. Reads may come from many threads, writes from one at a time.

    Attributes:
        persistent: whether records outlive the process.
    """

    persistent: bool = True

    @property
    @abc.abstractmethod
    def max_bytes(self) -> int:
        """Bound on the bytes of its records, of all namespaces together."""

    @property
    def copies_bytes(self) -> int:
        """Bound on the bytes of the records that it has in DRAM as well; 0 where it has none."""
        return 0

    @abc.abstractmethod
    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any], *, packed: bool = False,
        enter: Enter | None = None,
    ) -> RecoveredPages:  # fmt: skip
        """Makes a namespace usable and returns the pages that already lie in it.

        Args:
            digest: 32 bytes.
            slot_bytes: size of a slot of the namespace, a multiple of 4096; no record is longer.
            label: what the namespace is, for people; plain msgpack types.
            packed: what is written from now on are records of any length in whole blocks, not
                whole slots. What was written before is found in either case.
            enter: called with these pages before anything else is written, so that no room is made
                of them as of pages that nobody knows. May take the owner's own lock.

        Raises:
            TierConfigError: the namespace cannot be served as asked.
        """

    @abc.abstractmethod
    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        """Stores one record per slot; `None` where one was not stored (counted, never raised).

        The checksum is computed here and stored in the slot. A location is handed out only after
        the record's bytes were written.

        Args:
            digest: the namespace.
            slots: u8 [slot_bytes] each; in a packed namespace u8 [n * 4096] with n blocks that
                hold the record whole, and n is the length to read it with.
        """

    @abc.abstractmethod
    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        """Reads and verifies records; one result per request, never raises on bad data."""

    @abc.abstractmethod
    def clear(self, digest: bytes | None) -> None:
        """Removes every record of one namespace, or of all with `None`, for good."""

    @property
    def num_undeleted(self) -> int:
        """Files of records that were cleared and are still there; tried again as it writes."""
        return 0

    def may_hold(self, digest: bytes) -> bool:
        """Whether there may be records of a namespace that was never opened, of a former run."""
        return True

    def end_namespace(self, digest: bytes) -> None:  # noqa: B027
        """Removes a namespace of which the owner has no page; it may be opened again.

        Its records, if there are any left, are nobody's, and go. Called by the thread that writes.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Publishes what was written and frees threads, files and locks. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
