"""Facade of the page store: DRAM, disk and the threads between them, for one server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages, Tier
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.quality import ANY, Qualities
from sglang_ext.tiers.store.directory import Directory
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.promoter import Promoter
from sglang_ext.tiers.store.spiller import Spiller
from sglang_ext.tiers.store.types import (
    Hashes,
    KeySpace,
    LoadTicket,
    Plan,
    Rows,
    SaveTicket,
    Slots,
    StoreCounters,
    TierCounts,
)
from sglang_ext.tiers.transcoder import PageTranscoder

NO_LORA = b""
# Share of DRAM that write-back keeps free or clean.
_LOW_WATER_SHARE = 0.125


@dataclass(frozen=True)
class StoreConfig:
    """How the page store is set up.

    Attributes:
        write_policy: `write_through`, `selective` or `write_back`.
        event_log: file for the event log; empty for none.
    """

    write_policy: str = "write_through"
    event_log: str = ""


class PageStore:
    """Pages of KV in DRAM and on disk, by their full key.

    Thread-safe. No method but `clear`, `flush` and `close` waits for I/O.

    Attributes:
        arena: the slots; a page's bytes are written and read through it by whoever holds a ticket.
        counters: counts since start.
        events: the store's own log.
    """

    def __init__(
        self,
        arena: HostArena,
        index: PageIndex,
        disk: Tier | None,
        config: StoreConfig,
        transcoder: PageTranscoder | None = None,
    ) -> None:
        """Starts the store's threads.

        Args:
            arena: the slots.
            index: empty; with room for what DRAM and the disk hold. Coded pages are smaller, so
                there may be many more of them than the disk has room for slots.
            disk: the disk tier; None for DRAM only.
            config: the settings.
            transcoder: codes pages for the disk; None stores them as they are, and treats records
                that are coded as misses.
        """
        self.arena = arena
        self.counters = StoreCounters()
        self.events = EventLog(config.event_log)
        self._disk = disk
        self._spaces: list[KeySpace] = []  # by number; guarded by _spaces_lock
        self._numbers: dict[tuple[bytes, bytes], KeySpace] = {}  # guarded by _spaces_lock
        self._opened: set[bytes] = set()  # digests; guarded by _spaces_lock
        self._spaces_lock = threading.Lock()
        self._closed = False
        self._transcoder = transcoder
        self._packed = transcoder is not None and transcoder.encodes
        self._directory = Directory(
            arena,
            index,
            has_disk=disk is not None,
            write_policy=config.write_policy,
            counters=self.counters,
            events=self.events,
        )
        if transcoder is not None and transcoder.encodes:
            self._directory.disk_floor = transcoder.quality
        self._spiller: Spiller | None = None
        self._promoter: Promoter | None = None
        if disk is not None:
            low_water = max(1, int(arena.num_slots * _LOW_WATER_SHARE))
            self._spiller = Spiller(
                self._directory,
                disk,
                self._space_of,
                low_water_pages=low_water,
                transcoder=transcoder,
            )
            self._promoter = Promoter(self._directory, disk, transcoder)

    # ---- key spaces ----

    def space(self, digest: bytes, lora: bytes = NO_LORA) -> KeySpace:
        """The key space of an opened namespace and a LoRA adapter. Cheap after the first call."""
        with self._spaces_lock:
            space = self._numbers.get((digest, lora))
            if space is None:
                space = KeySpace(len(self._spaces), digest, lora)
                self._spaces.append(space)
                self._numbers[digest, lora] = space
            return space

    def open_namespace(self, digest: bytes, label: dict[str, Any]) -> int:
        """Makes a namespace usable and enters the pages a former run left on disk.

        Args:
            digest: 32 bytes.
            label: what it is, for people who look into the folder.

        Returns:
            Number of pages found on disk.
        """
        with self._spaces_lock:
            if digest in self._opened:
                return 0
            self._opened.add(digest)
        if self._disk is None:
            return 0
        try:
            found = self._disk.open_namespace(
                digest, self.arena.slot_bytes, label, packed=self._packed
            )
        except BaseException:
            with self._spaces_lock:
                self._opened.discard(digest)
            raise
        total = 0
        # Sorting digests takes most of a start with a full disk; without adapters there is no need.
        adapters, which = found.lora[:1], np.zeros(len(found), np.intp)
        if found.lora.any():
            adapters, which = np.unique(found.lora, axis=0, return_inverse=True)
        for number, adapter in enumerate(adapters):
            mine = which.reshape(-1) == number
            lora = adapter.tobytes() if adapter.any() else NO_LORA
            total += self._directory.add_recovered(self.space(digest, lora), found.take(mine))
        return total

    def _space_of(self, number: int) -> KeySpace:
        with self._spaces_lock:
            return self._spaces[number]

    # ---- pages ----

    def ready_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> int:
        """Number of leading pages that are ready in DRAM and good enough. O(pages), in memory."""
        return self._directory.ready_prefix(space, hashes, max_quality)

    def locate_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> TierCounts:
        """In which tiers the leading pages that are stored and good enough lie."""
        return self._directory.locate_prefix(space, hashes, max_quality)

    def begin_save(
        self,
        space: KeySpace,
        hashes: Hashes,
        ancestors: Hashes,
        quality: Qualities | None = None,
    ) -> SaveTicket:
        """Slots for those pages that are not stored as well yet. See `Directory.begin_save`."""
        return self._directory.begin_save(space, hashes, ancestors, quality)

    def finish_save(self, ticket: SaveTicket, *, ok: bool) -> None:
        """Publishes the pages of a ticket, or forgets them when `ok` is false."""
        self._directory.finish_save(ticket, ok=ok)

    def pin_ready(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY
    ) -> LoadTicket | None:
        """Pins pages for a load, all of them or none (None)."""
        return self._directory.pin_ready(space, hashes, max_quality)

    def drop_damaged(self, ticket: LoadTicket, damaged: Rows) -> None:
        """Forgets pages of a ticket, by index, that are in DRAM but prove to be no pages."""
        self._directory.drop_damaged(ticket.rows[damaged], ticket.slots[damaged])

    def release(self, slots: Slots) -> None:
        """Gives the pins of a load back."""
        self._directory.release(slots)

    def plan(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> Plan | None:
        """Keeps a waiting request's pages in DRAM and begins to bring those on disk.

        Returns:
            A plan to poll and, in the end, to cancel; None when no page is stored.
        """
        if self._promoter is None:
            return self._directory.begin_plan(space, hashes, max_quality)[0]
        return self._promoter.start(space, hashes, max_quality)

    def has_plan_room(self) -> bool:
        """Whether a starved plan is worth trying again."""
        return self._directory.num_planned_pages < self._directory.max_planned_pages

    def cancel_plan(self, plan: Plan) -> None:
        """Gives a plan's pins back; safe to call twice."""
        self._directory.cancel_plan(plan)

    # ---- lifecycle ----

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits for saves and promotions in flight; False when that takes longer."""
        return self._directory.wait_idle(timeout_s)

    def clear(self) -> int:
        """Removes every page of every opened namespace from DRAM and, durably, from disk."""
        with self._spaces_lock:
            numbers = [space.number for space in self._spaces]
            digests = set(self._opened)
        if self._spiller is None or self._disk is None:
            return self._directory.forget_namespace(numbers)
        with self._spiller.paused():
            forgotten = self._directory.forget_namespace(numbers)
            for digest in digests:
                self._disk.clear(digest)
        self.events.note("cleared")
        return forgotten

    def flush(self, timeout_s: float) -> int:
        """Writes what is only in DRAM to disk, as far as the time allows; returns pages left."""
        if self._spiller is None:
            return 0
        return self._spiller.flush(time.monotonic() + timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Flushes, ends all threads and closes the disk tier. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._transcoder is not None:
            self._transcoder.close()
        if self._promoter is not None:
            self._promoter.close()
        if self._spiller is not None:
            left = self._spiller.flush(time.monotonic() + timeout_s)
            self.counters.add("shutdown_lost_pages", left)
            self._spiller.close()
        if self._disk is not None:
            self._disk.close()
        self.events.note("closed", counters=self.counters.snapshot())
        self.events.close()

    def stats(self) -> dict[str, int]:
        """Counters, and how full DRAM is, in pages."""
        stats = self.counters.snapshot()
        stats["host_pages"] = self.arena.num_used
        stats["host_capacity_pages"] = self.arena.num_slots
        stats["spill_queue_pages"] = sum(len(e.rows) for e in tuple(self._directory.spill_queue))
        return stats

    def check(self) -> None:
        """Verifies index against arena (linear; for tests)."""
        self._directory.check()

    def connect(self, disk: DiskTier) -> None:
        """Lets the disk tier tell the store what reclaiming a segment does to its pages."""
        directory = self._directory
        # Pages used since the last reclaim are worth carrying over to a younger segment.
        since = [0]

        def is_hot(digest: bytes, hashes: Hashes) -> npt.NDArray[np.bool_]:
            used = np.zeros(len(hashes), np.bool_)
            for space in self._spaces_with(digest):
                used |= directory.used_since(space, hashes, since[0])
            return used

        def on_moved(digest: bytes, segment: int, pages: RecoveredPages) -> None:
            for space in self._spaces_with(digest):
                lora = np.frombuffer(space.lora or bytes(32), np.uint8)
                mine = (pages.lora == lora).all(axis=1)
                directory.move_on_disk(space, segment, pages.take(mine))

        def on_drop(digest: bytes, segment: int) -> None:
            since[0] = directory.clock
            directory.drop_segment(segment)

        disk.is_hot, disk.on_moved, disk.on_drop = is_hot, on_moved, on_drop

    def _spaces_with(self, digest: bytes) -> list[KeySpace]:
        with self._spaces_lock:
            return [space for space in self._spaces if space.digest == digest]
