"""State of every page: where it lies, who is using it, and which leave DRAM next.

All state is guarded by `Directory.lock`; methods take it themselves unless their name starts with
an underscore. Nothing here blocks on I/O, so the scheduler's thread may call it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import NO_SEGMENT, NO_SLOT
from sglang_ext.tiers.quality import ANY, Qualities, Quality
from sglang_ext.tiers.store.disk_book import DiskBook
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    QUEUED,
    READY,
    SPILLING,
    WRITE_DROPPED,
    DiskCopies,
    Hashes,
    KeySpace,
    LoadTicket,
    Plan,
    Rows,
    SaveTicket,
    Slots,
    TierCounts,
)


class Directory(DiskBook):
    """Look-ups, saves, loads and promotions."""

    # ---- look-up ----

    def ready_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> int:
        """Number of leading pages that are ready in DRAM and no worse than a quality."""
        with self.lock:
            rows = self.index.prefix_rows(hashes, space.number, READY)
            return len(self._good_prefix(rows, max_quality))

    def locate_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> TierCounts:
        """Where the leading pages that are stored anywhere, and no worse than a quality, lie."""
        with self.lock:
            flags = self.index.flags[self._known_prefix(space, hashes, max_quality)]
        ready = (flags & READY) != 0
        pending = ~ready & ((flags & FILLING) != 0)
        return TierCounts(
            host=int(ready.sum()),
            disk=int((~ready & ~pending).sum()),
            pending=int(pending.sum()),
        )

    def _known_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int) -> Rows:
        rows = self.index.prefix_rows(hashes, space.number)
        usable = (self.index.flags[rows] & (READY | ON_DISK | FILLING)) != 0
        return self._good_prefix(leading(rows, usable), max_quality)

    def _good_prefix(self, rows: Rows, max_quality: int) -> Rows:
        if max_quality == ANY or not self.has_inexact:
            return rows
        return leading(rows, self.index.quality[rows] <= max_quality)

    # ---- saves ----

    def begin_save(
        self,
        space: KeySpace,
        hashes: Hashes,
        ancestors: Hashes,
        quality: Qualities | None = None,
    ) -> SaveTicket:
        """Takes slots for those of the offered pages that are not stored as well yet.

        A page that is stored worse stays as it is until the new one is published in its place.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`, in path order.
            ancestors: u8 `[M, 32]`, the pages before them on the path; kept young with them.
            quality: u8 `[N]`; None when all are exact.
        """
        quality = np.zeros(len(hashes), np.uint8) if quality is None else quality
        with self.lock:
            rows, created = self.index.insert(hashes, space.number)
            path = np.concatenate([self.index.lookup(ancestors, space.number), rows])
            wanted = created | self._worse(rows, quality) if self.has_inexact else created
            pages = np.flatnonzero(wanted)
            self._touch(path)  # before room is made: the path must not be pushed out by its child
            slots = self._alloc(len(pages))
            num = len(slots)
            refused = pages[num:]
            self.index.remove(rows[refused][created[refused]])
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
            self.arena.unpin(ticket.slots)
            if ok:
                self._publish(rows)
                rows = np.concatenate([rows, replaced])
                self._touch(ticket.path)
                if self.has_disk and self.write_policy == "write_through":
                    self._queue_spill(ticket.space, rows)
            else:
                self._forget(rows)
            self._settle(ticket.rows[new], failed=not ok)
            self._end_in_flight()
            inexact = int((self.index.quality[rows] > Quality.EXACT).sum()) if ok else 0
            hashes = self._log_keys(rows) if ok else None
        self.counters.add("saved_pages" if ok else "save_failed_pages", len(rows))
        self.counters.add("saved_lossy_pages", inexact)
        self.counters.add("replaced_pages", len(replaced))
        if hashes is not None:
            self.events.pages("saved", hashes)

    def _begin_save(self, ticket: SaveTicket) -> None:
        new = ~ticket.replaces
        self._begin_filling(ticket.rows[new], ticket.slots[new])
        self.index.quality[ticket.rows[new]] = ticket.quality[new]
        self.arena.pin(ticket.slots[ticket.replaces])
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
        gone = QUEUED | SPILLING | WRITE_DROPPED
        # A record on disk that this page would improve is forgotten, so that this one is written.
        stale = self.index.disk_quality[rows] > np.maximum(quality, self.disk_floor)
        self.index.segment[rows[stale]] = NO_SEGMENT
        self.index.flags[rows[stale]] &= np.uint8(0xFF ^ ON_DISK)
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
            quality = self.index.quality[rows]
            slots = self.index.host_slot[rows].copy()
            self.arena.pin(slots)
            self._touch(rows)
            self._clock += 1
            self.index.note_hits(rows, self._clock)
            if self.has_disk and self.write_policy == "selective":
                self._queue_spill(space, rows)
        self.counters.add("loaded_pages", len(rows))
        self.counters.add("loaded_lossy_pages", int((quality > Quality.EXACT).sum()))
        self.events.pages("loaded", hashes)
        return LoadTicket(rows, slots, quality)

    def drop_damaged(self, rows: Rows, slots: Slots) -> None:
        """Forgets pages whose bytes in DRAM went bad, and their copies on disk, made of the same.

        Args:
            rows: i64 `[n]`, pinned.
            slots: i32 `[n]`, where the bad bytes lie; a page that lies elsewhere by now stays.
        """
        with self.lock:
            same = self.index.is_live(rows) & (self.index.host_slot[rows] == slots)
            rows = rows[same & ((self.index.flags[rows] & READY) != 0)]
            hashes = self._log_keys(rows)
            self._forget(rows)
        self.counters.add("damaged_pages", len(rows))
        if hashes is not None:
            self.events.pages("lost", hashes)

    def release(self, slots: Slots) -> None:
        """Gives pins back."""
        with self.lock:
            self.arena.unpin(slots)

    # ---- promotions ----

    def begin_plan(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY
    ) -> tuple[Plan | None, Rows, Slots]:
        """Pins the leading stored pages for a waiting request and takes slots for those on disk.

        All plans together pin at most `max_planned_pages`, so that saves and loads can go on.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.

        Returns:
            The plan (None when no page is stored), and the rows and slots to read from disk. The
            plan is `starved` when there was no room to begin.
        """
        with self.lock:
            known = self._known_prefix(space, hashes, max_quality)
            rows = known[: max(0, self.max_planned_pages - self.num_planned_pages)]
            flags = self.index.flags[rows]
            # Pins first: making room for what comes must not push out what is there.
            held = rows[(flags & (READY | FILLING)) != 0]
            held_slots = self.index.host_slot[held].copy()
            self.arena.pin(held_slots)
            missing = np.flatnonzero((flags & (READY | FILLING)) == 0)
            slots = self._alloc(len(missing))
            if len(slots) < len(missing):
                rows, missing = rows[: missing[len(slots)]], missing[: len(slots)]
            to_read = rows[missing]
            self._begin_filling(to_read, slots)
            self.arena.pin(slots)  # the plan's own pin beside the reader's
            pending = rows[(self.index.flags[rows] & READY) == 0]
            plan = Plan(rows, remaining=len(pending), starved=len(known) > 0 and len(rows) == 0)
            plan.slots = np.concatenate([held_slots, slots])
            self.num_planned_pages += len(plan.slots)
            for row in pending.tolist():
                self._waiters.setdefault(row, []).append(plan)
            if len(to_read):
                self.num_in_flight += 1
            self._touch(rows)
        self.counters.add("plans_short", int(len(rows) < len(known)))
        return (plan if len(known) else None), to_read, slots

    def finish_promotion(
        self,
        plan: Plan,
        rows: Rows,
        slots: Slots,
        ok: npt.NDArray[np.bool_],
        quality: npt.NDArray[np.uint8],
    ) -> None:
        """Publishes pages that were read and verified; forgets the others.

        Args:
            plan: the plan for which they were read.
            rows: i64 `[n]`.
            slots: i32 `[n]`, as `begin_plan` gave them.
            ok: bool `[n]`, which of them were read and are right.
            quality: u8 `[n]`, what the records said of those.
        """
        with self.lock:
            filling = self._still_filling(rows, slots)
            self.arena.unpin(slots)
            good, bad = rows[ok & filling], rows[~ok & filling]
            self.index.quality[good] = self.index.disk_quality[good] = quality[ok & filling]
            self.has_inexact |= bool(quality[ok].any())
            self._publish(good)
            self._touch(plan.rows)
            hashes, lost = self._log_keys(good), self._log_keys(bad)
            self._forget(bad)
            self._settle(rows[ok], failed=False)
            self._settle(rows[~ok], failed=True)
        self.counters.add("promoted_pages", len(good))
        if hashes is not None:
            self.events.pages("promoted", hashes)
        if lost is not None:
            self.events.pages("lost", lost)

    def end_promotion(self) -> None:
        """Says that the last batch of a plan's reads is finished."""
        with self.lock:
            self._end_in_flight()

    def cancel_plan(self, plan: Plan) -> None:
        """Gives a plan's pins back; reads under way go on and their pages stay useful."""
        with self.lock:
            if not plan.cancelled:
                plan.cancelled = True
                self.num_planned_pages -= len(plan.slots)
                self.arena.unpin(plan.slots)

    def locations(self, rows: Rows) -> tuple[Hashes, DiskCopies]:
        """Page hashes of rows that are being promoted, and where their records lie."""
        with self.lock:
            index = self.index
            hashes, _ = index.keys(rows)
            return hashes, DiskCopies(
                index.segment[rows],
                index.block[rows],
                index.num_blocks[rows],
                index.disk_quality[rows],
            )

    # ---- everything ----

    def forget_namespace(self, numbers: list[int]) -> int:
        """Forgets all pages of some key spaces; what is in flight for them ends in nothing."""
        with self.lock:
            self.spill_queue.clear()
            total = 0
            for number in numbers:
                rows = self.index.rows_of_namespace(number)
                slots = self.index.host_slot[rows]
                self.arena.free(slots[slots != NO_SLOT])
                total += self.index.remove(rows)
            return total

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no save or promotion is in flight; False when it takes longer."""
        with self.lock:
            return self.idle.wait_for(lambda: self.num_in_flight == 0, timeout_s)


def leading(rows: Rows, usable: npt.NDArray[np.bool_]) -> Rows:
    """The rows before the first that is not usable."""
    return rows if usable.all() else rows[: int(np.argmin(usable))]
