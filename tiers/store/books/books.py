"""The parts of the store's books, put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import LEAST_RECENT, PlacementPolicy
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store.books.disk_pages import DiskPages
from sglang_ext.tiers.store.books.dram_room import DramRoom
from sglang_ext.tiers.store.books.eviction.copy_order import CopyOrder
from sglang_ext.tiers.store.books.eviction.disk_order import DiskOrder
from sglang_ext.tiers.store.books.eviction.dram_order import DramOrder
from sglang_ext.tiers.store.books.loads import Loads
from sglang_ext.tiers.store.books.lookups import Lookups
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.books.plan_pins import PlanPins
from sglang_ext.tiers.store.books.plans import Plans
from sglang_ext.tiers.store.books.remote_book import RemoteBook
from sglang_ext.tiers.store.books.saves import Saves
from sglang_ext.tiers.store.books.spill_queue import SpillQueue
from sglang_ext.tiers.store.books.write_policy import WritePolicy
from sglang_ext.tiers.store.clearing import Clearing
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import KeySpace, StoreCounters


class Books:
    """State of every page: where it lies, who is using it, and which leave next.

    One lock, the table's, guards all parts; each says which of its methods take it. No part blocks
    on I/O, so the scheduler's thread may call them. A part knows those before it in this list:

    Attributes:
        table: the state of every page.
        lookups: where pages lie.
        writing: when pages are written to disk.
        disk: what the disk has, gives up and takes.
        spills: what is on its way to disk.
        room: slots of DRAM, and what leaves it.
        pins: what plans of waiting requests pin.
        plans: plans, and what they bring from disk.
        saves: pages that enter DRAM.
        clearing: pages that are forgotten, all of some key spaces.
        loads: pages that are read.
        remote: what is fetched from a remote store, and sent to it.
    """

    def __init__(
        self,
        arena: HostArena,
        index: PageIndex,
        *,
        disk_pages: int | None,
        write_policy: str,
        counters: StoreCounters,
        events: EventLog,
        policy: PlacementPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        space_of: Callable[[int], KeySpace | None] | None = None,
        disk_floor: int = Quality.EXACT,
        copies_bytes: int = 0,
    ) -> None:
        """Makes all parts.

        Args:
            arena: the slots.
            index: the rows.
            disk_pages: pages of a slot's length that the disk tier has room for; None: there is
                none.
            write_policy: see `PageStoreConfig`.
            counters: where things are counted.
            events: the store's log.
            policy: what leaves DRAM and the disk, by the queue; None for the least recent page,
                and no look-ahead.
            clock: time in seconds, monotonic.
            space_of: finds a key space by its number; None where it was retired.
            disk_floor: the best that the disk tier keeps.
            copies_bytes: of records that the disk tier has in DRAM as well; 0 where it has none.
        """
        looks_ahead = policy is not None
        if policy is None:
            policy = PlacementPolicy(index.capacity, LEAST_RECENT)
        has_disk = disk_pages is not None
        disk_first = has_disk and write_policy in ("write_through", "auto")
        order = DramOrder(arena, index, policy, disk_first=disk_first)
        disk_order = None if disk_pages is None else DiskOrder(index, policy, disk_pages)
        copies = None
        if copies_bytes:
            num_pages = arena.num_slots + (disk_pages or 0)
            copies = CopyOrder(index, policy, copies_bytes, num_pages * arena.slot_bytes)
        self.table = table = PageTable(
            arena, index, policy, order=order, disk_order=disk_order, copies=copies,
            counters=counters, events=events, clock=clock,
        )  # fmt: skip
        self.lookups = Lookups(table)
        self.writing = WritePolicy(write_policy, table, has_disk=has_disk)
        self.disk = DiskPages(table, self.writing)
        self.spills = SpillQueue(table, self.writing, self.disk, space_of or _no_space)
        self.room = DramRoom(table, self.spills, self.writing)
        self.pins = PlanPins(table, yields_to_saves=not looks_ahead)
        self.plans = Plans(table, self.lookups, self.room, self.pins, self.disk)
        self.saves = Saves(
            table, self.room, self.pins, self.spills, self.writing, self.disk, int(disk_floor)
        )
        self.clearing = Clearing(table, self.spills)
        self.loads = Loads(table, self.lookups, self.spills)
        self.remote = RemoteBook(table, self.lookups, self.room, self.pins)

    def check(self) -> None:
        """Verifies the parts against each other (linear; for tests). Takes the lock.

        Raises:
            TierInvariantError, AssertionError: they disagree.
        """
        self.table.check()
        with self.table.lock:
            self.pins.check()


def _no_space(number: int) -> KeySpace:
    raise LookupError(f"nobody said which key space has the number {number}")
