"""Words that the parts of the page store share: states of a page, tickets, plans, counters."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.records.quality import Qualities

Hashes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
IsReadSlower = Callable[[int, npt.NDArray[np.int64]], bool]
"""Whether the disk takes longer to bring pages than the device took to compute them: the number of
pages before them on their path, and the bytes of their records."""
OnMoved = Callable[[Hashes, npt.NDArray[np.uint32]], None]
"""Takes pages that come to a tier or leave one: hashes, and numbers of their key spaces."""

# Bits of `PageIndex.flags`.
READY = 1  # the host slot holds the whole page, verified; it may be loaded
ON_DISK = 2  # `segment` and `block` name a record
FILLING = 4  # the host slot is being written, by a save or a promotion
QUEUED = 8  # waits for the spiller
SPILLING = 16  # the spiller is writing it; its slot is pinned
SENT = 64  # offered to the remote store as it lies in DRAM (policy `on_eviction`)
WRITE_DROPPED = 32  # the disk did not take it (full, failing); it may leave DRAM all the same
GIVEN_UP = 128  # in DRAM; its copy on disk gave its place to another page


class Epoch:
    """A time in which neither weights nor adapters change. Equal to itself only."""

    __slots__ = ()


class KeySpace(NamedTuple):
    """A namespace and a LoRA adapter, with the number the index knows the pair by.

    Attributes:
        number: u32, the index's namespace number.
        digest: 32 bytes, namespace digest.
        lora: 32 bytes, digest of the adapter's weights, or empty.
        epoch: when it was given out. Pages outlast it; what connects them with the device does not
            (`gate.py`).
        tenant_number: whose share the pages count towards, 0 for that of all who have none of
            their own; see `PolicyConfig.shares`.
    """

    number: int
    digest: bytes
    lora: bytes
    epoch: Epoch
    tenant_number: int = 0


class TierCounts(NamedTuple):
    """How many leading pages of a prefix are stored, and where.

    Attributes:
        host: pages among them that are ready in DRAM.
        disk: pages among them that are on disk only.
        pending: pages among them that are on their way into DRAM.
        remote: pages behind those that the remote store said it has.
    """

    host: int
    disk: int
    pending: int
    remote: int = 0

    @property
    def here(self) -> int:
        """Pages that this server has."""
        return self.host + self.disk + self.pending

    @property
    def total(self) -> int:
        """Pages that are stored anywhere."""
        return self.here + self.remote


class PrefixSurvey(NamedTuple):
    """Where the leading stored pages of a prefix lie, as columns of one row a page.

    Attributes:
        ready: bool `[n]`, in DRAM.
        coming: bool `[n]`, on its way into DRAM.
        num_blocks: u16 `[n]`, length of the record on disk; 0 where there is none.
    """

    ready: npt.NDArray[np.bool_]
    coming: npt.NDArray[np.bool_]
    num_blocks: npt.NDArray[np.uint16]


@dataclass(frozen=True)
class SaveTicket:
    """Slots to fill with new pages; ends with `PageStore.finish_save`.

    Attributes:
        space: where the pages belong.
        pages: i64 `[n]`, which of the offered pages are new, ascending.
        rows: i64 `[n]`, their rows.
        slots: i32 `[n]`, their slots, pinned.
        dropped: number of offered pages for which there was no room.
        path: i64 `[m]`, rows of the whole path in order, these pages among them.
        quality: u8 `[n]`.
        replaces: bool `[n]`, pages that are stored, but worse, or not in DRAM; their rows keep
            their own slots until these are published.
        hashes: u8 `[n, 32]`.
    """

    space: KeySpace
    pages: Rows
    rows: Rows
    slots: Slots
    dropped: int
    path: Rows
    quality: Qualities
    replaces: npt.NDArray[np.bool_]
    hashes: Hashes


class Reading(Protocol):
    """What somebody reads from slots that others read, too, and that are pinned for all of them."""

    def end(self) -> None:
        """This process is done with it; once, from any thread."""


@dataclass(frozen=True)
class LoadTicket:
    """Pages pinned for a load; ends with `PageStore.end_load`.

    Attributes:
        space: where the pages belong.
        rows: i64 `[n]`.
        slots: i32 `[n]`, pinned.
        quality: u8 `[n]`.
        reading: of pages that several ranks load; it ends in the place of the pins.
    """

    space: KeySpace
    rows: Rows
    slots: Slots
    quality: Qualities
    reading: Reading | None = None


class Plan:
    """A request's pages on their way to DRAM, and the pins that keep them there.

    Made by `PageStore.plan`; from then on `remaining` is an int that only falls, so polling it is
    O(1) and needs no lock. `cancel` (through the store) gives the pins back.

    Attributes:
        rows: those of the pages below that were known here when it was made.
        num_planned: leading pages that will be ready when the plan is done, unless some fail.
        num_stored: leading pages that were stored when it was made; more than `num_planned` where
            DRAM had no room for all.
        remaining: pages not ready yet.
        num_remote_left: those of them that come from the remote store.
        num_here_left: the others: from disk, or on their way to DRAM already when it was made.
        reads_disk: some of the latter came, or come, from disk.
        failed: a page could not be read; the pages from it on are not promised.
        cancelled: its pins were given back, by whoever made it or for the room of a save.
        priority: reads of the plan with the smallest go first: the request's place in the queue.
    """

    def __init__(self, rows: Rows, remaining: int, num_stored: int | None = None) -> None:
        self.rows = rows
        self.num_planned = len(rows)
        self.num_stored = len(rows) if num_stored is None else num_stored
        self.remaining = remaining
        self.num_remote_left = 0
        self.num_here_left = remaining
        self.reads_disk = False
        # Pages that it may pin and does not yet, as they are fetched; guarded by the store.
        self.num_reserved = 0
        self.failed = False
        self.slots: Slots = np.empty(0, np.int32)  # pinned by this plan; guarded by the store
        # No slot was free for a page, or another request fetches it: worth planning again later.
        self.lacked_room = False
        self.fetch_failed = False  # the remote store did not give what it said it had
        # Which pages of the prefix came from the remote store; written by the thread that fetches.
        self.first_remote = self.num_remote = 0
        self.cancelled = False
        self.priority = 0

    @property
    def starved(self) -> bool:
        """Pages are stored, but there was no room in DRAM to begin with; plan again later."""
        return self.num_stored > 0 and not self.num_planned

    @property
    def short(self) -> bool:
        """DRAM had no room for all of the stored pages."""
        return self.num_planned < self.num_stored

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive."""
        return self.remaining <= 0 or self.failed


class DiskCopies(NamedTuple):
    """Where pages lie on disk, as columns of one row a page.

    Attributes:
        segment: u32 `[n]`.
        block: u32 `[n]`.
        num_blocks: u16 `[n]`, lengths of the records.
        quality: u8 `[n]`, of the copies on disk, which may be worse than those in DRAM.
    """

    segment: npt.NDArray[np.uint32]
    block: npt.NDArray[np.uint32]
    num_blocks: npt.NDArray[np.uint16]
    quality: npt.NDArray[np.uint8]

    def take(self, rows: npt.NDArray[np.bool_]) -> DiskCopies:
        """The rows for which a mask is true."""
        return DiskCopies(
            self.segment[rows], self.block[rows], self.num_blocks[rows], self.quality[rows]
        )


class SpillEntry(NamedTuple):
    """Pages queued for the disk; a page whose slot changed hands since is skipped.

    Attributes:
        space: where they belong.
        rows: i64 `[n]`, a parent before its children.
        slots: i32 `[n]`, where they lie.
        generations: u32 `[n]`, of the slots.
        from_end: they are written to make room: the last ones first, as they leave DRAM.
    """

    space: KeySpace
    rows: Rows
    slots: Slots
    generations: npt.NDArray[np.uint32]
    from_end: bool = False


_DURATIONS_KEPT = 4096  # of a kind, until somebody takes them


@dataclass
class StoreCounters:
    """Counts since start. Guarded by its own lock; read with `snapshot`."""

    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Durations that nobody has taken yet, by what took them; None while nobody wants them.
    _durations: dict[str, deque[float]] | None = None

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to one count."""
        if amount:
            with self._lock:
                self._counts[name] += amount

    def time(self, what: str, seconds: float) -> None:
        """Adds microseconds to the count `<what>_us`, and remembers how long this one took."""
        with self._lock:
            self._counts[f"{what}_us"] += int(1e6 * seconds)
            if self._durations is not None:
                kept = self._durations.setdefault(what, deque(maxlen=_DURATIONS_KEPT))
                kept.append(seconds)

    def keep_durations(self) -> None:
        """From now on `time` remembers each; somebody will take them."""
        with self._lock:
            self._durations = {}

    def take_durations(self) -> dict[str, deque[float]]:
        """What `time` was told since the last call, by what took it: the last 4,096 of each."""
        with self._lock:
            taken, self._durations = self._durations or {}, None if self._durations is None else {}
            return taken

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)
