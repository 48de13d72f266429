"""State of every page: where it lies, who is using it, and which leave DRAM next.

All state is guarded by `Directory.lock`; methods take it themselves unless their name starts with
an underscore. Nothing here blocks on I/O, so the scheduler's thread may call it.

A page in DRAM is evicted only when it is ready, unpinned, not being written to disk, and either on
disk already or not meant for it. The LRU list is touched child before parent, so a page never
outlives, in DRAM, the pages that lead to it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import NO_SEGMENT, NO_SLOT, PageIndex
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    QUEUED,
    READY,
    SPILLING,
    WRITE_DROPPED,
    Hashes,
    KeySpace,
    LoadTicket,
    Plan,
    Rows,
    SaveTicket,
    Slots,
    SpillEntry,
    StoreCounters,
    TierCounts,
)

# Rows of the LRU tail that one eviction looks at, so that it stays short when none can leave.
_MAX_EVICTION_SCAN = 4096
# Share of DRAM that may be pinned for waiting requests; the rest stays free to move.
_PLAN_SHARE = 0.5


class Directory:
    """Index, arena and spill queue under one lock."""

    def __init__(
        self,
        arena: HostArena,
        index: PageIndex,
        *,
        has_disk: bool,
        write_policy: str,
        counters: StoreCounters,
        events: EventLog,
    ) -> None:
        self.lock = threading.Lock()
        self.spill_ready = threading.Condition(self.lock)
        self.arena = arena
        self.index = index
        self.has_disk = has_disk
        self.write_policy = write_policy
        self.counters = counters
        self.events = events
        self.spill_queue: deque[SpillEntry] = deque()  # guarded by lock
        self.num_in_flight = 0  # saves and promotions that own FILLING rows; guarded by lock
        self.idle = threading.Condition(self.lock)
        self.max_planned_pages = max(1, int(arena.num_slots * _PLAN_SHARE))
        self.num_planned_pages = 0  # pins of all plans; guarded by lock
        self._waiters: dict[int, list[Plan]] = {}  # row -> plans that wait for it
        self._clock = 0

    # ---- look-up ----

    def ready_prefix(self, space: KeySpace, hashes: Hashes) -> int:
        """Number of leading pages that are ready in DRAM."""
        with self.lock:
            return self.index.prefix_len(hashes, space.number, READY)

    def locate_prefix(self, space: KeySpace, hashes: Hashes) -> TierCounts:
        """Where the leading pages that are stored anywhere lie."""
        with self.lock:
            flags = self.index.flags[self._known_prefix(space, hashes)]
        ready = (flags & READY) != 0
        pending = ~ready & ((flags & FILLING) != 0)
        return TierCounts(
            host=int(ready.sum()),
            disk=int((~ready & ~pending).sum()),
            pending=int(pending.sum()),
        )

    def _known_prefix(self, space: KeySpace, hashes: Hashes) -> Rows:
        rows = self.index.prefix_rows(hashes, space.number)
        usable = (self.index.flags[rows] & (READY | ON_DISK | FILLING)) != 0
        return rows if usable.all() else rows[: int(np.argmin(usable))]

    # ---- saves ----

    def begin_save(self, space: KeySpace, hashes: Hashes, ancestors: Hashes) -> SaveTicket:
        """Takes slots for those of the offered pages that are stored nowhere yet.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`, in path order.
            ancestors: u8 `[M, 32]`, the pages before them on the path; kept young with them.
        """
        with self.lock:
            rows, created = self.index.insert(hashes, space.number)
            path = np.concatenate([self.index.lookup(ancestors, space.number), rows])
            pages = np.flatnonzero(created)
            new_rows = rows[pages]
            self._touch(path)  # before room is made: the path must not be pushed out by its child
            slots = self._alloc(len(pages))
            num = len(slots)
            self.index.remove(new_rows[num:])
            dropped = int((rows < 0).sum()) + len(pages) - num
            pages, new_rows = pages[:num], new_rows[:num]
            self._begin_filling(new_rows, slots)
            self._touch(path)
            self.num_in_flight += 1
        self.counters.add("duplicate_pages", len(hashes) - num - dropped)
        self.counters.add("save_dropped_pages", dropped)
        return SaveTicket(space, pages, new_rows, slots, dropped, path)

    def finish_save(self, ticket: SaveTicket, *, ok: bool) -> None:
        """Publishes the pages of a save, or forgets them when it failed."""
        with self.lock:
            rows = ticket.rows[self._still_filling(ticket.rows, ticket.slots)]
            self.arena.unpin(ticket.slots)
            if ok:
                self._publish(rows)
                self._touch(ticket.path)
                if self.has_disk and self.write_policy == "write_through":
                    self._queue_spill(ticket.space, rows)
            else:
                self._forget(rows)
            self._settle(ticket.rows, failed=not ok)
            self._end_in_flight()
            hashes = self._log_keys(rows) if ok else None
        self.counters.add("saved_pages" if ok else "save_failed_pages", len(rows))
        if hashes is not None:
            self.events.pages("saved", hashes)

    # ---- loads ----

    def pin_ready(self, space: KeySpace, hashes: Hashes) -> LoadTicket | None:
        """Pins pages for a load; None unless every one of them is ready in DRAM."""
        with self.lock:
            rows = self.index.prefix_rows(hashes, space.number, READY)
            if len(rows) < len(hashes):
                return None
            slots = self.index.host_slot[rows].copy()
            self.arena.pin(slots)
            self._touch(rows)
            self._clock += 1
            self.index.note_hits(rows, self._clock)
            if self.has_disk and self.write_policy == "selective":
                self._queue_spill(space, rows)
        self.counters.add("loaded_pages", len(rows))
        self.events.pages("loaded", hashes)
        return LoadTicket(rows, slots)

    def release(self, slots: Slots) -> None:
        """Gives pins back."""
        with self.lock:
            self.arena.unpin(slots)

    # ---- promotions ----

    def begin_plan(self, space: KeySpace, hashes: Hashes) -> tuple[Plan | None, Rows, Slots]:
        """Pins the leading stored pages for a waiting request and takes slots for those on disk.

        All plans together pin at most `max_planned_pages`, so that saves and loads can go on.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.

        Returns:
            The plan (None when no page is stored), and the rows and slots to read from disk. The
            plan is `starved` when there was no room to begin.
        """
        with self.lock:
            known = self._known_prefix(space, hashes)
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
        self, plan: Plan, rows: Rows, slots: Slots, ok: npt.NDArray[np.bool_]
    ) -> None:
        """Publishes pages that were read and verified; forgets the others.

        Args:
            plan: the plan for which they were read.
            rows: i64 `[n]`.
            slots: i32 `[n]`, as `begin_plan` gave them.
            ok: bool `[n]`, which of them were read and are right.
        """
        with self.lock:
            filling = self._still_filling(rows, slots)
            self.arena.unpin(slots)
            good, bad = rows[ok & filling], rows[~ok & filling]
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

    def locations(self, rows: Rows) -> tuple[Hashes, list[tuple[int, int]]]:
        """Page hashes and disk locations of rows that are being promoted."""
        with self.lock:
            hashes, _ = self.index.keys(rows)
            segments, blocks = self.index.segment[rows], self.index.block[rows]
        return hashes, list(zip(segments.tolist(), blocks.tolist(), strict=True))

    # ---- disk ----

    def add_recovered(
        self,
        space: KeySpace,
        hashes: Hashes,
        segments: npt.NDArray[np.uint32],
        blocks: npt.NDArray[np.uint32],
    ) -> int:
        """Enters pages that a former run left on disk; returns how many found room."""
        with self.lock:
            rows, _ = self.index.insert(hashes, space.number)
            known = rows >= 0
            rows = rows[known]
            self.index.segment[rows] = segments[known]
            self.index.block[rows] = blocks[known]
            self.index.flags[rows] |= ON_DISK
            return int(known.sum())

    def move_on_disk(
        self,
        space: KeySpace,
        hashes: Hashes,
        old_segment: int,
        segments: npt.NDArray[np.uint32],
        blocks: npt.NDArray[np.uint32],
    ) -> None:
        """Notes that reclaiming a segment copied some of its pages elsewhere."""
        with self.lock:
            rows = self.index.lookup(hashes, space.number)
            moved = (rows >= 0) & (self.index.segment[np.maximum(rows, 0)] == old_segment)
            self.index.segment[rows[moved]] = segments[moved]
            self.index.block[rows[moved]] = blocks[moved]

    def drop_segment(self, segment: int) -> None:
        """Forgets the disk copies in a segment that is about to be deleted."""
        with self.lock:
            rows = self.index.rows_of_segment(segment)
            self.index.flags[rows] &= np.uint8(0xFF ^ ON_DISK)
            self.index.segment[rows] = NO_SEGMENT
            in_dram = (self.index.flags[rows] & (READY | FILLING)) != 0
            # Not written a second time, which could go round for ever, so they may leave DRAM.
            self.index.flags[rows[in_dram]] |= WRITE_DROPPED
            lost, kept = self._log_keys(rows[~in_dram]), self._log_keys(rows[in_dram])
            self.index.remove(rows[~in_dram])
        self.counters.add("disk_reclaimed_pages", len(rows))
        if lost is not None and kept is not None:
            self.events.pages("lost", lost)
            self.events.pages("reclaimed", kept)

    def used_since(self, space: KeySpace, hashes: Hashes, clock: int) -> npt.NDArray[np.bool_]:
        """Which pages were loaded after a point of the logical clock."""
        with self.lock:
            rows = self.index.lookup(hashes, space.number)
            known = rows >= 0
            known[known] = self.index.stamp[rows[known]] > max(clock, 0)
            return known

    @property
    def clock(self) -> int:
        """Logical time: number of loads so far."""
        return self._clock

    def take_spills(self, max_pages: int) -> SpillEntry | None:
        """Takes queued pages of one key space for the spiller, pinned; None when there are none."""
        with self.lock:
            taken: list[SpillEntry] = []
            num = 0
            while self.spill_queue and num < max_pages:
                entry = self.spill_queue[0]
                if taken and entry.space != taken[0].space:
                    break
                self.spill_queue.popleft()
                if len(entry.rows) > max_pages - num:
                    entry, rest = _split(entry, max_pages - num)
                    self.spill_queue.appendleft(rest)
                entry = self._still_valid(entry)
                if len(entry.rows):
                    taken.append(entry)
                    num += len(entry.rows)
            if not num:
                return None
            rows = np.concatenate([entry.rows for entry in taken])
            slots = np.concatenate([entry.slots for entry in taken])
            self.index.flags[rows] |= SPILLING
            self.arena.pin(slots)
            return SpillEntry(taken[0].space, rows, slots, np.empty(0, np.uint32))

    def finish_spill(
        self,
        entry: SpillEntry,
        stored: npt.NDArray[np.bool_],
        segments: npt.NDArray[np.uint32],
        blocks: npt.NDArray[np.uint32],
    ) -> None:
        """Enters the disk locations of written pages; only now are they acknowledged."""
        with self.lock:
            rows = entry.rows
            same = self.index.is_live(rows) & (self.index.host_slot[rows] == entry.slots)
            same &= (self.index.flags[rows] & SPILLING) != 0
            self.index.flags[rows[same]] &= np.uint8(0xFF ^ (QUEUED | SPILLING))
            stored = stored & same
            done = rows[stored]
            self.index.segment[done] = segments[stored]
            self.index.block[done] = blocks[stored]
            self.index.flags[done] |= ON_DISK
            self.index.flags[rows[same & ~stored]] |= WRITE_DROPPED
            self.arena.unpin(entry.slots)
            hashes = self._log_keys(done)
        self.counters.add("written_pages", int(stored.sum()))
        self.counters.add("write_dropped_pages", int((~stored).sum()))
        if hashes is not None:
            self.events.pages("written", hashes)

    def queue_coldest(self, spaces: Callable[[int], KeySpace], max_pages: int) -> int:
        """Queues the least recent pages that are not on disk; for write-back and shutdown."""
        with self.lock:
            rows = self.index.lru_tail(
                max_pages, ON_DISK | QUEUED | SPILLING | FILLING | WRITE_DROPPED
            )
            _, numbers = self.index.keys(rows)
            for number in np.unique(numbers).tolist():
                self._queue_spill(spaces(number), rows[numbers == number])
            return len(rows)

    def num_unwritten(self) -> int:
        """Pages in DRAM that the disk neither has nor refused (linear)."""
        with self.lock:
            return len(self.index.lru_tail(self.arena.num_slots, ON_DISK | WRITE_DROPPED))

    def needs_cleaning(self, low_water_pages: int) -> bool:
        """Whether the DRAM pages that could leave at once fell below the low-water mark."""
        with self.lock:
            if self.arena.num_free >= low_water_pages:
                return False
            tail = self.index.lru_tail(low_water_pages, FILLING)
            clean = (self.index.flags[tail] & ON_DISK) != 0
            return self.arena.num_free + int(clean.sum()) < low_water_pages

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

    def check(self) -> None:
        """Verifies index and arena against each other (linear; for tests).

        Raises:
            TierInvariantError, AssertionError: they disagree.
        """
        with self.lock:
            self.index.check()
            self.arena.check()
            rows = self.index.rows()
            slots = self.index.host_slot[rows]
            held = slots[slots != NO_SLOT]
            assert len(np.unique(held)) == len(held), "two pages share a slot"
            assert len(held) == self.arena.num_used, (len(held), self.arena.num_used)
            in_dram = (self.index.flags[rows] & (READY | FILLING)) != 0
            assert bool((in_dram == (slots != NO_SLOT)).all()), "flags and slots disagree"

    # ---- private; the caller holds the lock ----

    def _alloc(self, count: int) -> Slots:
        slots = self.arena.alloc(count)
        if len(slots) < count:
            self._evict(count - len(slots))
            slots = np.concatenate([slots, self.arena.alloc(count - len(slots))])
        return slots

    def _evict(self, count: int) -> None:
        scan = min(max(4 * count, 64), _MAX_EVICTION_SCAN)
        rows = self.index.lru_tail(scan, FILLING | SPILLING | QUEUED)
        if self.has_disk and self.write_policy != "selective":
            rows = rows[(self.index.flags[rows] & (ON_DISK | WRITE_DROPPED)) != 0]
        rows = rows[~self.arena.pinned(self.index.host_slot[rows])][:count]
        on_disk = (self.index.flags[rows] & ON_DISK) != 0
        evicted, lost = self._log_keys(rows), self._log_keys(rows[~on_disk])
        self.arena.free(self.index.host_slot[rows])
        kept = rows[on_disk]
        self.index.lru_remove(kept)
        self.index.host_slot[kept] = NO_SLOT
        self.index.flags[kept] &= np.uint8(0xFF ^ READY)
        self.index.remove(rows[~on_disk])
        self.counters.add("evicted_pages", len(rows))
        self.counters.add("lost_pages", int((~on_disk).sum()))
        if evicted is not None and lost is not None:
            self.events.pages("evicted", evicted)
            self.events.pages("lost", lost)

    def _begin_filling(self, rows: Rows, slots: Slots) -> None:
        self.index.host_slot[rows] = slots
        self.index.flags[rows] |= FILLING
        self.arena.pin(slots)

    def _still_filling(self, rows: Rows, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which rows are still the pages that began to fill these slots (not cleared since)."""
        same = self.index.is_live(rows) & (self.index.host_slot[rows] == slots)
        filling: npt.NDArray[np.bool_] = same & ((self.index.flags[rows] & FILLING) != 0)
        return filling

    def _publish(self, rows: Rows) -> None:
        self.index.flags[rows] &= np.uint8(0xFF ^ FILLING)
        self.index.flags[rows] |= READY
        self.index.lru_add(rows[::-1])

    def _forget(self, rows: Rows) -> None:
        """Removes pages whose slot never became ready; a copy on disk proved unreadable."""
        self.arena.free(self.index.host_slot[rows])
        self.index.remove(rows)

    def _settle(self, rows: Rows, *, failed: bool) -> None:
        for row in rows.tolist():
            for plan in self._waiters.pop(row, ()):
                plan.remaining -= 1
                plan.failed |= failed

    def _touch(self, rows: Rows) -> None:
        self.index.lru_touch(rows[::-1])

    def _queue_spill(self, space: KeySpace, rows: Rows) -> None:
        flags = self.index.flags[rows]
        rows = rows[(flags & (ON_DISK | QUEUED | SPILLING)) == 0]
        if len(rows):
            self.index.flags[rows] |= QUEUED
            slots = self.index.host_slot[rows].copy()
            generations = self.arena.generation[slots].copy()
            self.spill_queue.append(SpillEntry(space, rows, slots, generations))
            self.spill_ready.notify()

    def _still_valid(self, entry: SpillEntry) -> SpillEntry:
        same = (
            self.index.is_live(entry.rows)
            & (self.index.host_slot[entry.rows] == entry.slots)
            & (self.arena.generation[entry.slots] == entry.generations)
            & ((self.index.flags[entry.rows] & QUEUED) != 0)
        )
        return SpillEntry(entry.space, entry.rows[same], entry.slots[same], entry.generations[same])

    def _end_in_flight(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.idle.notify_all()

    def _log_keys(self, rows: Rows) -> Hashes | None:
        return self.index.keys(rows)[0] if self.events.on else None


def _split(entry: SpillEntry, at: int) -> tuple[SpillEntry, SpillEntry]:
    head = SpillEntry(entry.space, entry.rows[:at], entry.slots[:at], entry.generations[:at])
    tail = SpillEntry(entry.space, entry.rows[at:], entry.slots[at:], entry.generations[at:])
    return head, tail
