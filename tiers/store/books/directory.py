"""State of every page: where it lies, who is using it, and which leave DRAM next.

All state is guarded by `Directory.lock`; methods take it themselves unless their name starts with
an underscore. Nothing here blocks on I/O, so the scheduler's thread may call it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import NO_SLOT
from sglang_ext.tiers.records.quality import ANY, Qualities, Quality
from sglang_ext.tiers.store.books.remote_book import RemoteBook
from sglang_ext.tiers.store.types import (
    FILLING,
    GIVEN_UP,
    ON_DISK,
    QUEUED,
    READY,
    SENT,
    SPILLING,
    WRITE_DROPPED,
    Hashes,
    KeySpace,
    LoadTicket,
    PrefixSurvey,
    Rows,
    SaveTicket,
    Slots,
    TierCounts,
)

_BURST_FADES = 0.99  # what the largest save counts for, at each save after it
# How often one save has plans yield: what they held may be on its way to disk, and of no use yet.
_MAX_YIELDS = 4


class Directory(RemoteBook):
    """Look-ups, saves and loads."""

    # ---- look-up ----

    def ready_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> int:
        """Number of leading pages that are ready in DRAM and no worse than a quality."""
        with self.lock:
            rows = self.index.prefix_rows(hashes, space.number, READY)
            return len(self._good_prefix(rows, max_quality))

    def locate_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> TierCounts:
        """Where the leading pages that are stored anywhere, and no worse than a quality, lie."""
        with self.lock:
            return self._count_tiers(self._known_prefix(space, hashes, max_quality))

    def tiers_of(self, hashes: Hashes, numbers: list[int]) -> npt.NDArray[np.uint8]:
        """`READY` and `ON_DISK` of pages of some key spaces, u8 `[N]`; 0: not stored."""
        found = np.zeros(len(hashes), np.uint8)
        with self.lock:
            for number in numbers:
                rows = self.index.lookup(hashes, number)
                known = rows >= 0
                found[known] |= self.index.flags[rows[known]] & np.uint8(READY | ON_DISK)
        return found

    def survey(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> PrefixSurvey:
        """The same page by page."""
        with self.lock:
            rows = self._known_prefix(space, hashes, max_quality)
            flags = self.index.flags[rows]
            num_blocks = self.index.num_blocks[rows]
        ready = (flags & READY) != 0
        num_blocks[(flags & ON_DISK) == 0] = 0
        return PrefixSurvey(ready, ~ready & ((flags & FILLING) != 0), num_blocks)

    def states(self, space: KeySpace, hashes: Hashes) -> tuple[Qualities, Qualities]:
        """Flags of pages in any order, 0 where one is not stored, and their quality; u8 `[N]`."""
        with self.lock:
            rows = self.index.lookup(hashes, space.number)
            known = rows >= 0
            flags, quality = np.zeros((2, len(rows)), np.uint8)
            flags[known] = self.index.flags[rows[known]]
            quality[known] = self.index.quality[rows[known]]
        return flags & np.uint8(READY | ON_DISK | FILLING), quality

    # ---- saves ----

    def begin_save(
        self,
        space: KeySpace,
        hashes: Hashes,
        ancestors: Hashes,
        quality: Qualities | None = None,
        *,
        before_plans: bool = False,
    ) -> SaveTicket:
        """Takes slots for those of the offered pages that are not stored as well yet.

        A page that is stored worse stays as it is until the new one is published in its place.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`, in path order.
            ancestors: u8 `[M, 32]`, the pages before them on the path; kept young with them.
            quality: u8 `[N]`; None when all are exact.
            before_plans: whether plans of waiting requests may give up their room for it.
        """
        quality = np.zeros(len(hashes), np.uint8) if quality is None else quality
        with self.lock:
            rows, created = self.index.insert(hashes, space.number)
            path = np.concatenate([self.index.lookup(ancestors, space.number), rows])
            wanted = created | self._worse(rows, quality) if self.has_inexact else created
            pages = np.flatnonzero(wanted)
            self._link(path)
            self._touch(path)  # before room is made: the path must not be pushed out by its child
            self.burst_pages = max(len(pages) + self.num_reserved, self.burst_pages * _BURST_FADES)
            slots = self._alloc(len(pages), keep=self.num_reserved)
            if before_plans:
                slots = self._alloc_of_plans(slots, len(pages))
            num = len(slots)
            refused = pages[num:]
            self._remove(rows[refused][created[refused]])
            dropped = int((rows < 0).sum()) + len(refused)
            pages = pages[:num]
            ticket = SaveTicket(
                space, pages, rows[pages], slots, dropped, path, quality[pages], ~created[pages],
                hashes[pages],
            )  # fmt: skip
            self._begin_save(ticket)
            self._touch(path)
            self.num_in_flight += 1
        self.counters.add("duplicate_pages", len(hashes) - num - dropped)
        self.counters.add("save_dropped_pages", dropped)
        return ticket

    def finish_save(self, ticket: SaveTicket, *, ok: bool) -> None:
        """Publishes the pages of a save, or forgets them when it failed."""
        new = ~ticket.replaces
        with self.lock:
            rows = ticket.rows[new]
            rows = rows[self._still_filling(rows, ticket.slots[new])]
            replaced = self._replace(ticket, ok=ok)
            self._unpin_slots(ticket.slots)
            if ok:
                self._publish(rows)
                if self.on_published is not None:
                    self.on_published(ticket.space.number, ticket.hashes)
                rows = np.concatenate([rows, replaced])
                self._touch(ticket.path)
                if self.has_disk and self.writes_through:
                    self._queue_spill(ticket.space, rows)
                elif self.should_look:
                    self.spill_ready.notify()
            else:
                self._forget(rows)
            self._settle(ticket.rows[new], ticket.slots[new], failed=not ok)
            self._end_in_flight()
            inexact = int((self.index.quality[rows] > Quality.EXACT).sum()) if ok else 0
            hashes = self._moved(rows) if ok else None
        self.counters.add("saved_pages" if ok else "save_failed_pages", len(rows))
        self.counters.add("saved_lossy_pages", inexact)
        self.counters.add("replaced_pages", len(replaced))
        if hashes is not None:
            self.events.pages("saved", hashes)

    def _alloc_of_plans(self, slots: Slots, count: int) -> Slots:
        """Adds to some slots, up to a count, what plans of waiting requests give up for a save."""
        for _ in range(_MAX_YIELDS):
            short = count - len(slots)
            if not short or not self._yield_plans(short):
                break
            more = self._alloc(short, keep=self.num_reserved)
            slots = np.concatenate([slots, more])
        return slots

    def _begin_save(self, ticket: SaveTicket) -> None:
        new = ~ticket.replaces
        self._begin_filling(ticket.rows[new], ticket.slots[new])
        self.index.quality[ticket.rows[new]] = ticket.quality[new]
        self._pin_slots(ticket.slots[ticket.replaces])
        self.has_inexact |= bool(ticket.quality.any())

    def _replace(self, ticket: SaveTicket, *, ok: bool) -> Rows:
        """Puts better copies in the place of what is stored; returns the rows where it did.

        Looked up again: the page may have left, or come back, since the save began.
        """
        which = ticket.replaces
        slots, quality = ticket.slots[which], ticket.quality[which]
        rows = self.index.lookup(ticket.hashes[which], ticket.space.number)
        fits = self._worse(rows, quality) & ok
        self.arena.free(slots[~fits])
        rows, slots, quality = rows[fits], slots[fits], quality[fits]
        old = self.index.host_slot[rows]
        self.arena.free(old[old != NO_SLOT])
        self.index.host_slot[rows] = slots
        self.index.quality[rows] = quality
        # The old copy may be on its way in or out: whoever moves it finds another slot here.
        gone = QUEUED | SPILLING | WRITE_DROPPED | SENT | GIVEN_UP
        # A record on disk that this page would improve is forgotten, so that this one is written.
        stale = self.index.disk_quality[rows] > np.maximum(quality, self.disk_floor)
        self._take_off_disk(rows[stale])
        self.index.flags[rows] &= np.uint8(0xFF ^ gone)
        self._publish(rows)
        return rows

    # ---- loads ----

    def pin_ready(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY
    ) -> LoadTicket | None:
        """Pins pages for a load; None unless all are ready in DRAM and no worse than a quality."""
        with self.lock:
            rows = self.index.prefix_rows(hashes, space.number, READY)
            if len(self._good_prefix(rows, max_quality)) < len(hashes):
                return None
            ticket = self._pin(space, rows)
            self._use(space, rows)
        self._count_load(ticket, hashes)
        return ticket

    def pin_leading(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> LoadTicket:
        """Pins the leading pages that are ready in DRAM and good enough, as many as there are.

        They are kept for a load that may come (`begin_load`); nothing is counted as loaded yet.
        """
        with self.lock:
            rows = self.index.prefix_rows(hashes, space.number, READY)
            return self._pin(space, self._good_prefix(rows, max_quality))

    def begin_load(self, space: KeySpace, ticket: LoadTicket, hashes: Hashes) -> None:
        """Counts pages of `pin_leading` as loaded, by whoever takes their pins over. Cannot fail.

        Args:
            space: where the pages belong.
            ticket: the pages. One that was forgotten or replaced since is loaded from its pinned
                slot all the same.
            hashes: u8 `[n, 32]`, for the log.
        """
        with self.lock:
            same = self.index.is_live(ticket.rows)
            same &= self.index.host_slot[ticket.rows] == ticket.slots
            self._use(space, ticket.rows[same])
        self._count_load(ticket, hashes)

    def _pin(self, space: KeySpace, rows: Rows) -> LoadTicket:
        quality = self.index.quality[rows]
        slots = self.index.host_slot[rows].copy()
        self._pin_slots(slots)
        return LoadTicket(space, rows, slots, quality)

    def _use(self, space: KeySpace, rows: Rows) -> None:
        self._touch(rows)
        self._clock += 1
        self.index.note_hits(rows, self._clock)
        self._offer_again(rows)
        if self.has_disk and self.write_policy == "selective":
            self._queue_spill(space, rows)

    def _count_load(self, ticket: LoadTicket, hashes: Hashes) -> None:
        self.counters.add("loaded_pages", len(ticket.rows))
        self.counters.add("loaded_lossy_pages", int((ticket.quality > Quality.EXACT).sum()))
        self.events.pages("loaded", hashes)

    def drop_damaged(self, rows: Rows, slots: Slots) -> tuple[Hashes, npt.NDArray[np.uint32]]:
        """Forgets pages whose bytes in DRAM went bad, and their copies on disk, made of the same.

        Args:
            rows: i64 `[n]`, pinned.
            slots: i32 `[n]`, where the bad bytes lie; a page that lies elsewhere by now stays.

        Returns:
            Hashes and numbers of the key spaces of those that were forgotten.
        """
        with self.lock:
            same = self.index.is_live(rows) & (self.index.host_slot[rows] == slots)
            rows = rows[same & ((self.index.flags[rows] & READY) != 0)]
            keys = self.index.keys(rows)
            hashes = self._moved(rows)
            self._forget(rows)
        self.counters.add("damaged_pages", len(rows))
        if hashes is not None:
            self.events.pages("lost", hashes)
        return keys

    def pin_present(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, Slots]:
        """Pins those of some pages that are ready in DRAM; for who sends them away.

        No use of theirs: neither their age nor their hits change. `release` gives the pins back.
        """
        with self.lock:
            rows = self.index.lookup(hashes, space.number)
            ready = rows >= 0
            ready[ready] = (self.index.flags[rows[ready]] & READY) != 0
            slots = self.index.host_slot[rows[ready]].copy()
            self._pin_slots(slots)
        return hashes[ready], slots

    def release(self, slots: Slots) -> None:
        """Gives pins back."""
        with self.lock:
            self._unpin_slots(slots)

    # ---- everything ----

    def forget_namespace(self, numbers: list[int], digests: Iterable[bytes] = ()) -> int:
        """Forgets all pages of some key spaces; what is in flight for them ends in nothing.

        Args:
            numbers: of the key spaces.
            digests: of the namespaces of which the disk is to lose everything that it has now;
                nothing is given to it to write before that.
        """
        with self.lock:
            self.spill_queue.clear()
            self.to_clear.update(digests)
            self.spill_ready.notify_all()
            total = 0
            for number in numbers:
                rows = self.index.rows_of_namespace(number)
                slots = self.index.host_slot[rows]
                self.arena.free(slots[slots != NO_SLOT])
                total += self._remove(rows)
            return total

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no save or promotion is in flight; False when it takes longer."""
        with self.lock:
            return self.idle.wait_for(lambda: self.num_in_flight == 0, timeout_s)
