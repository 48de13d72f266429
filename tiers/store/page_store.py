"""Facade of the page store: DRAM, disk and the threads between them, for one server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import OwnerCallbacks, RecoveredPages, Tier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.policy.cost_model import TransferBacklog
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.quality import ANY, Qualities
from sglang_ext.tiers.remote.items import OnKnown
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.write_policy import DEFAULT_POLICY
from sglang_ext.tiers.store.clearing import Cleared
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.disk_coding import KeepRaw
from sglang_ext.tiers.store.ending import Ending
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.executor import Executor, Threads
from sglang_ext.tiers.store.gate import Gate
from sglang_ext.tiers.store.key_spaces import KeySpaces
from sglang_ext.tiers.store.lookahead import LookAhead
from sglang_ext.tiers.store.movers.namespaces import NO_LORA, Namespaces, rows_by_adapter
from sglang_ext.tiers.store.movers.promoter import Promoter
from sglang_ext.tiers.store.movers.spiller import Spiller
from sglang_ext.tiers.store.movers.transfer_meter import OnMeasured, TransferMeter
from sglang_ext.tiers.store.openings import Opening
from sglang_ext.tiers.store.record_copies import RecordCopies
from sglang_ext.tiers.store.remote.coded_remote import OpenCoded
from sglang_ext.tiers.store.remote.leaving_pages import LeavingPages
from sglang_ext.tiers.store.remote.put_share import EVERY_PAGE, PutShare
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from sglang_ext.tiers.store.remote.remote_pages import RemotePages
from sglang_ext.tiers.store.types import (
    Hashes,
    IsReadSlower,
    KeySpace,
    LoadTicket,
    OnMoved,
    Plan,
    PrefixSurvey,
    Rows,
    SaveTicket,
    Slots,
    StoreCounters,
    TierCounts,
)
from sglang_ext.tiers.transcoder import PageTranscoder

# Share of DRAM that write-back keeps free or clean.
_LOW_WATER_SHARE = 0.125
# Key spaces in which a page that was never stored is looked for, the latest of all.
_MAX_OTHER_SPACES = 16
_CLOSE_LEAVING_S = 0.5  # for the batch in hand, before the disk is closed
_END_S = 1.0  # behind the flush: to seal what was written, and end the threads


@dataclass(frozen=True)
class PageStoreConfig:
    """How the page store is set up.

    Attributes:
        write_policy: `write_through`, `selective`, `write_back`, or `auto`: through until the disk
            is full, then back.
        event_log: file for the event log; empty for none.
        placement: what the policy that chooses what leaves is to do, by the queue; None for the
            least recent page, and no look-ahead.
        remote_policy: which pages go to the remote store: `all`, `second_hit` or `on_eviction`.
        put_share: of these, the ones that this process puts; others are put by who holds the same.
    """

    write_policy: str = DEFAULT_POLICY
    event_log: str = ""
    placement: PolicyConfig | None = None
    remote_policy: str = "all"
    put_share: PutShare = EVERY_PAGE


class PageStore:
    """Pages of KV in DRAM and on disk, by their full key.

    Thread-safe. No method waits for I/O but `open_namespace`, which may list the disk's folder,
    `wait_idle`, `flush` and `close`. It has many methods because it is all that others know of the
    store; each hands on to the part that does the work.

    Attributes:
        arena: the slots; a page's bytes are written and read through it by whoever holds a ticket.
        counters: counts since start.
        events: the store's own log.
        gate: what every load and every save of a device's pages passes.
        lookahead: tells the placement policy what waits; None where it is not to know.
        keeps_pages: False where another process keeps this one's pages (`ReaderStore`).
    """

    keeps_pages = True

    def __init__(
        self,
        arena: HostArena,
        index: PageIndex,
        disk: Tier | None,
        config: PageStoreConfig,
        transcoder: PageTranscoder | None = None,
        on_read: OnMeasured | None = None,
        on_write: OnMeasured | None = None,
        keep_raw: KeepRaw | None = None,
        remote: RemoteStore | None = None,
        on_fetch: OnMeasured | None = None,
        open_coded: OpenCoded | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        rules: PageRules | None = None,
        counters: StoreCounters | None = None,
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
            on_read: takes measurements of the disk's speed; see `TransferMeter`.
            on_write: the same of writing, as whole slots, coded or not.
            keep_raw: says when the transcoder is not worth its time; None: it always is.
            remote: a store that other servers share; None for none. Closed with this one.
            on_fetch: takes measurements of its speed.
            open_coded: codes pages for that store; None stores them there as they are.
            clock: seconds, monotonic; what is decided about DRAM and disk goes by it.
            executor: runs what moves between the two; None for threads.
            rules: what a page from below must be; None takes any record of the right key.
            counters: where things are counted; None for its own.
        """
        self.arena = arena
        self.counters = counters or StoreCounters()
        self.events = EventLog(config.event_log)
        self._disk = disk
        self._closed = False
        self._transcoder = transcoder
        self._packed = transcoder is not None and transcoder.encodes
        policy: PlacementPolicy | None = None
        if config.placement is not None:
            policy = PlacementPolicy(index.capacity, config.placement)
        self._spaces = KeySpaces()
        self._clock = clock
        self._books = Books(
            arena,
            index,
            disk_pages=None if disk is None else disk.max_bytes // arena.slot_bytes,
            write_policy=config.write_policy,
            counters=self.counters,
            events=self.events,
            policy=policy,
            clock=clock,
            space_of=self._spaces.find,
            disk_floor=transcoder.quality if transcoder is not None and self._packed else 0,
            copies_bytes=0 if disk is None else disk.copies_bytes,
        )
        self.gate = Gate(self.counters, self.end_load)
        self._namespaces = Namespaces(
            self._books, self._spaces, self.gate, disk, packed=self._packed
        )
        self.lookahead = LookAhead(self._books, policy) if policy is not None else None
        self._fetch_meter = TransferMeter(on_fetch, counters=self.counters)
        self._read_meter = TransferMeter(on_read, clock, self.counters)
        self._write_meter = TransferMeter(on_write, clock, self.counters)
        self._remote: RemotePages | None = None
        self._leaving: LeavingPages | None = None
        self._spiller: Spiller | None = None
        self._promoter: Promoter | None = None
        decoded = DecodedPages()
        if remote is not None:
            self._connect_remote(remote, config, decoded, open_coded, rules)
        if disk is not None:
            self._connect_disk(disk, executor or Threads(self.counters), keep_raw, decoded, rules)

    def _connect_remote(
        self,
        remote: RemoteStore,
        config: PageStoreConfig,
        decoded: DecodedPages,
        open_coded: OpenCoded | None,
        rules: PageRules | None,
    ) -> None:
        """Starts what moves pages between DRAM and the remote store."""
        self._remote = RemotePages(
            self._books, remote, config.remote_policy, self._fetch_meter, decoded, open_coded,
            rules, config.put_share,
        )  # fmt: skip
        if self.lookahead is not None:
            self.lookahead.on_over = self._let_go
        if config.remote_policy == "on_eviction":
            self._leaving = LeavingPages(
                self._books, remote, self._remote.uploads.send, self._disk, self._transcoder,
                self._spaces.find, rules, config.put_share,
            )  # fmt: skip

    def _let_go(self, hashes: Hashes, numbers: npt.NDArray[np.uint32]) -> None:
        """Nobody is to want pages again: nor is the remote store. The table's lock is held."""
        for number in np.unique(numbers).tolist():
            space = self._spaces.find(number)
            if self._remote is not None and space is not None:
                self._remote.uploads.over(space, hashes[numbers == number])

    def _connect_disk(
        self,
        disk: Tier,
        executor: Executor,
        keep_raw: KeepRaw | None,
        decoded: DecodedPages,
        rules: PageRules | None,
    ) -> None:
        """Starts what moves pages between DRAM and the disk."""
        self._spiller = Spiller(
            self._books,
            disk,
            low_water_pages=max(1, int(self.arena.num_slots * _LOW_WATER_SHARE)),
            executor=executor,
            transcoder=self._transcoder,
            keep_raw=keep_raw,
            decoded=decoded,
            meter=self._write_meter,
            namespaces=self._namespaces,
        )
        self._promoter = Promoter(
            self._books, disk, executor, self._transcoder, self._read_meter, decoded, rules
        )

    # ---- key spaces ----

    def space(self, digest: bytes, lora: bytes = NO_LORA) -> KeySpace:
        """The key space of an opened namespace and a LoRA adapter. Cheap after the first call.

        Loads and saves pass under it until `end_epoch`.
        """
        return self._spaces.get(digest, lora, self.gate)

    def end_epoch(self) -> None:
        """Weights or adapters change: tickets and key spaces given out so far pass no more.

        Pages that are stored stay, and so does what moves between the tiers.
        """
        self.gate.end_epoch()
        self._namespaces.end_adapters()

    def open_namespace(self, digest: bytes, label: dict[str, Any]) -> int:
        """Makes a namespace usable and enters the pages a former run left on disk.

        Waits for the disk: for a server's start. See `open_soon`.

        Args:
            digest: 32 bytes.
            label: what it is, for people who look into the folder.

        Returns:
            Number of pages found on disk.

        Raises:
            TierConfigError: the disk cannot open it.
        """
        if not self._spaces.begin_opening(digest):
            return 0
        if self._spiller is None:
            self._namespaces.end_unused()
            return 0
        try:
            with self._spiller.alone():  # behind what ends namespaces, this one perhaps
                self._namespaces.end_unused()
            return self._namespaces.open(digest, label, self.gate.epoch)
        except BaseException:
            self._spaces.not_opened(digest)
            raise

    def open_soon(self, digest: bytes, label: dict[str, Any]) -> None:
        """Makes a namespace usable in DRAM and in the remote store, and soon on the disk.

        Waits for nothing: the thread that writes to the disk opens it there, before it writes more,
        and as often as it takes. Then pages that a former run left are found.

        Args:
            digest: 32 bytes.
            label: what it is, for people who look into the folder.
        """
        is_new = self._spaces.begin_opening(digest)
        if self._spiller is None:
            if is_new:
                self._namespaces.end_unused()
        elif not is_new:
            self._books.spills.open_again(digest, self.gate.epoch)
        else:
            self._books.spills.open(Opening(digest, label, self._clock(), self.gate.epoch))

    # ---- pages ----

    def follow(self, on_moved: OnMoved, on_known: OnKnown) -> None:
        """Has somebody told of pages that come to a tier or leave one, from any thread.

        Args:
            on_moved: takes hashes u8 `[N, 32]` and the numbers of their key spaces, u32 `[N]`. Must
                return at once: it is called under the store's lock. Where the pages are once it has
                returned, `tiers_of` tells.
            on_known: of pages in the remote store, as calls find it out (`Sightings.hear`).
        """
        self._books.table.on_moved = on_moved
        if self._remote is not None:
            self._remote.watch(on_known)

    def set_return_rule(self, is_read_slower: IsReadSlower) -> None:
        """Has computed pages that the disk has come back to DRAM where the rule says so.

        Args:
            is_read_slower: called by `begin_save`, under the store's lock; must return at once.
        """
        self._books.saves.is_read_slower = is_read_slower

    def open_spaces(self) -> set[tuple[bytes, bytes]]:
        """Namespace and adapter of the key spaces that this epoch has used."""
        return {(each.digest, each.lora) for each in self._spaces.all() if self.gate.is_open(each)}

    @property
    def num_spaces(self) -> int:
        """Key spaces there are; a page of `tiers_of` without a home may be looked for in each."""
        return len(self._spaces)

    def is_open(self, number: int) -> bool:
        """Whether this epoch has used a key space."""
        space = self._spaces.find(number)
        return space is not None and self.gate.is_open(space)

    def tiers_of(self, hashes: Hashes, homes: Rows | None = None) -> npt.NDArray[np.uint8]:
        """Which tiers have pages, of any key space that this epoch has used.

        Args:
            hashes: u8 `[N, 32]`.
            homes: i64 `[N]`, numbers of the key spaces that pages are of. -1 where that is not
                known: such a page is looked for in all of them, one by one. None: all are such.

        Returns:
            u8 `[N]` of `READY` (in DRAM) and `ON_DISK` (a record, on disk or in coded DRAM).
        """
        if homes is None:
            homes = np.full(len(hashes), -1, np.int64)
        closed = [
            number
            for number in np.unique(homes).tolist()
            if number >= 0 and not self.is_open(number)
        ]
        there = np.flatnonzero(~np.isin(homes, closed))
        homes = homes[there]
        numbers: list[int] = []
        if (homes < 0).any():
            numbers = [each.number for each in self._spaces.all() if self.gate.is_open(each)]
        found = np.zeros(len(hashes), np.uint8)
        found[there] = self._books.lookups.tiers_of(hashes[there], homes, numbers)
        return found

    def ready_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> int:
        """Number of leading pages that are ready in DRAM and good enough. O(pages), in memory."""
        return self._books.lookups.ready_prefix(space, hashes, max_quality)

    def locate_prefix(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> TierCounts:
        """In which tiers the leading pages that are stored and good enough lie."""
        return self._books.lookups.locate_prefix(space, hashes, max_quality)

    def survey(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> PrefixSurvey:
        """For each leading page: ready in DRAM, on its way there, or on disk."""
        return self._books.lookups.survey(space, hashes, max_quality)

    def disk_queue(self) -> TransferBacklog:
        """What the disk has to read now. O(1)."""
        return self._read_meter.queue()

    def fetch_queue(self) -> TransferBacklog:
        """What is to be fetched from the remote store now. O(1)."""
        return self._fetch_meter.queue()

    def page_states(self, space: KeySpace, hashes: Hashes) -> tuple[Qualities, Qualities]:
        """Where pages lie that need be no prefix. See `Lookups.states`."""
        return self._books.lookups.states(space, hashes)

    def absences(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY
    ) -> npt.NDArray[np.uint8]:
        """Why pages, in any order, cannot be had: u8 `[N]` of `Absence`. For reports only.

        What was lost is remembered for a while, in bounded memory (`LostPages`).
        """
        spaces = self._spaces.all()[-_MAX_OTHER_SPACES:]
        others = [each.number for each in spaces if each.number != space.number]
        why = self._books.lookups.absences(space, hashes, max_quality, others)
        if self.keeps_records_in_dram:  # what is below the slots is DRAM, too
            why[why == Absence.EVICTED_DISK] = Absence.EVICTED_HOST
        return why

    def begin_save(
        self,
        space: KeySpace,
        hashes: Hashes,
        ancestors: Hashes,
        quality: Qualities | None = None,
    ) -> SaveTicket:
        """Slots for those pages that are not stored as well yet. See `Saves.begin`.

        A key space of an epoch that is over gets none.
        """
        if self.gate.save(space, len(hashes)):
            return self._books.saves.begin(space, hashes, ancestors, quality, before_plans=True)
        nothing = self._books.saves.begin(space, hashes[:0], ancestors[:0])
        return replace(nothing, dropped=len(hashes))

    def finish_save(self, ticket: SaveTicket, *, ok: bool) -> None:
        """Publishes the pages of a ticket, or forgets them when `ok` is false.

        They are forgotten, too, when weights or adapters changed since it began.
        """
        ok = ok and self.gate.save(ticket.space, len(ticket.rows))
        self._books.saves.finish(ticket, ok=ok, why=Absence.NOT_SAVED)
        if self._remote is not None and ok:
            self._remote.uploads.saved(ticket.space, ticket.hashes)

    def pin_ready(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY
    ) -> LoadTicket | None:
        """Pins pages for a load, all of them or none (None)."""
        ticket = self._books.loads.pin_ready(space, hashes, max_quality)
        if self._remote is not None and ticket is not None:
            self._remote.uploads.loaded(space, hashes)
        return ticket

    def pin_leading(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> LoadTicket:
        """Pins the leading pages that are ready, as many as there are, for a load that may come."""
        return self._books.loads.pin_leading(space, hashes, max_quality)

    def begin_load(self, space: KeySpace, ticket: LoadTicket, hashes: Hashes) -> None:
        """Counts pages of `pin_leading` as loaded, by whoever takes their pins over."""
        self._books.loads.begin(space, ticket, hashes)
        if self._remote is not None:
            self._remote.uploads.loaded(space, hashes)

    def drop_damaged(self, ticket: LoadTicket, damaged: Rows) -> None:
        """Forgets pages of a ticket, by index, that are in DRAM but prove to be no pages.

        Nor are they fetched again from a remote store, until they are stored there anew.
        """
        rows, slots = ticket.rows[damaged], ticket.slots[damaged]
        hashes, numbers = self._books.loads.drop_damaged(rows, slots)
        if self._remote is not None:
            for row, number in zip(hashes, numbers.tolist(), strict=True):
                space = self._spaces.find(number)
                if space is not None:
                    self._remote.blame(space, row.tobytes())

    def release(self, slots: Slots) -> None:
        """Gives pins back."""
        self._books.loads.release(slots)

    def end_load(self, ticket: LoadTicket) -> None:
        """A load is over, or will not be: its pins are given back. Any thread.

        Those of pages that other ranks load, too, last until all have told that they are done.
        """
        if ticket.reading is not None:
            ticket.reading.end()
        else:
            self.release(ticket.slots)

    def plan(
        self,
        space: KeySpace,
        hashes: Hashes,
        max_quality: int = ANY,
        priority: int = 0,
        *,
        remote_sizes: npt.NDArray[np.int64] | None = None,
        instead_of: Plan | None = None,
        arrived_s: float | None = None,
    ) -> Plan | None:
        """Keeps a waiting request's pages in DRAM and begins to bring those that are elsewhere.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.
            priority: see `Plan`; may be changed there while the plan lasts.
            remote_sizes: i64 `[N]`, bytes of those pages that the remote store said it has, which
                are fetched behind those that are here; 0: none. None: nothing is fetched.
            instead_of: the request's former plan, which is cancelled next: its room counts as free.
            arrived_s: when the request came, on the clock of `time.monotonic`; None for now.

        Returns:
            A plan to poll and, in the end, to cancel; None when no page is stored.
        """
        if instead_of is not None and instead_of.num_reserved:
            self._books.remote.yield_room(instead_of)
        if self._promoter is None:
            plan = self._books.plans.begin(space, hashes, max_quality, priority)[0]
        else:
            plan = self._promoter.start(space, hashes, max_quality, priority)
        if self._remote is not None and remote_sizes is not None:
            plan = self._remote.extend(
                plan, space, hashes, max_quality, remote_sizes, priority, arrived_s
            )
        return plan

    def ask_remote(self, remote_lookup: RemoteLookup) -> bool:
        """Asks the remote store for pages; False when there will be no answer. Does not block."""
        return self._remote is not None and self._remote.ask(remote_lookup)

    @property
    def remote_stalled_s(self) -> float:
        """For how long the remote store has not answered what it was asked last."""
        return 0.0 if self._remote is None else self._remote.stalled_s

    def cancel_plan(self, plan: Plan) -> None:
        """Gives a plan's pins back, and up what it has not begun to read; safe to call twice."""
        if self._promoter is None:
            self._books.plans.cancel(plan)
        else:
            self._promoter.cancel(plan)

    def mark_of_room(self, num_pages: int) -> int:
        """How far the writing to disk has to come for so many pages to leave DRAM; 0: none is."""
        return self._books.spills.mark_of_room(num_pages)

    def bytes_until(self, mark: int) -> int:
        """What is still to be written until a mark, in bytes of slots. O(1)."""
        return self._books.spills.num_until(mark) * self.arena.slot_bytes if mark else 0

    @property
    def max_planned_pages(self) -> int:
        """Pages that all plans together may pin."""
        return self._books.pins.max_planned_pages

    @property
    def max_lone_plan_pages(self) -> int:
        """Pages that one plan may pin where there is no other."""
        return self._books.pins.max_lone_plan_pages

    @property
    def num_wanted_evicted(self) -> int:
        """Pages so far that left DRAM although a waiting request needs them."""
        return self._books.room.num_wanted_evicted

    # ---- lifecycle ----

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits for saves and promotions in flight; False when that takes longer."""
        return self._books.table.in_flight.wait(timeout_s)

    def clear(self) -> int:
        """Forgets every page of every namespace asked for so far; returns how many these were.

        No page of before is found from now on. What the disk has of them is deleted next, by the
        thread that writes to it and before it writes more (`clears_pending` in `stats`); a process
        that is killed before that finds them again. Where they are many, that thread takes them out
        of the books, too, and DRAM holds them until then.
        """
        forgotten = self._books.clearing.begin(self._asked_for)
        self.events.note("cleared")
        return forgotten

    def _asked_for(self) -> Cleared:
        spaces, digests = self._spaces.all_and_asked_for()
        return Cleared(
            [space.number for space in spaces],
            self._spaces.new_numbers(len(spaces)),
            digests if self._disk is not None else (),
        )

    def flush(self, timeout_s: float) -> int:
        """Writes what is only in DRAM to disk, as far as the time allows; returns pages left."""
        if self._spiller is None:
            return 0
        return self._spiller.flush(self._clock() + timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Flushes, ends all threads and closes the disk tier. Safe to call twice.

        Args:
            timeout_s: for the flush. All the rest takes a second or two more at most: what hangs
                is left behind, and counted. Its folder is then as after `kill -9`.
        """
        if self._closed:
            return
        self._closed = True
        began_s = self._clock()
        ending = Ending(self.counters, timeout_s + _END_S)
        # A remote store may take its time over what is in its threads' hands; the disk comes first.
        if self._leaving is not None:
            self._leaving.stop()
        if self._remote is not None:
            self._remote.stop()
        if self._transcoder is not None:
            self._transcoder.close()
        if self._promoter is not None:
            # What a read brings is worth nothing now: one that hangs leaves time for the flush.
            ending.run("reads from the disk", self._promoter.close, timeout_s / 4)
        self._books.disk.begin_closing()
        if self._spiller is not None:
            # What would be gone with the process is not worth the time.
            lasts = self._disk is not None and self._disk.persistent
            deadline_s = began_s + (timeout_s if lasts else 0.0)
            ending.run("writes to the disk", partial(self._spiller.flush, deadline_s))
            num_lost = self._books.spills.num_only_in_dram()
            self.counters.add("shutdown_lost_pages", num_lost)
            if lasts:
                ending.tell(num_lost)
            ending.run("writes to the disk", self._spiller.close)
        if self._leaving is not None:
            self._leaving.close(_CLOSE_LEAVING_S)
        if self._disk is not None:
            ending.run("the disk", self._disk.close)
        if self._remote is not None:
            ending.run("the remote store", self._remote.close)
        self.events.note("closed", counters=self.counters.snapshot())
        ending.run("the event log", self.events.close)
        ending.raise_first()

    def stats(self) -> dict[str, int]:
        """Counters, and how full DRAM is, in pages."""
        spilling = self._books.spills.num_pages()  # before what it counts towards
        stats = self.counters.snapshot()
        if self.events.on:
            stats["event_log_dropped_lines"] = self.events.num_dropped
            stats["event_log_waiting_lines"] = self.events.num_waiting
        stats["host_pages"] = self.arena.num_used
        stats["host_capacity_pages"] = self.arena.num_slots
        if self.lookahead is not None:
            stats["waiting_requests"] = self.lookahead.num_waiting
            stats["window_requests"] = self.lookahead.num_in_window
            stats["pinned_now_pages"] = self.lookahead.num_pinned
            stats |= self.lookahead.pages_by_tenant()
        if self._remote is not None:
            stats |= self._remote.bytes_by_tenant()
        stats["lost_pages_memory_bytes"] = self._books.table.lost.nbytes
        stats["planned_pages"] = self._books.pins.num_pages
        stats["spill_queue_pages"] = spilling
        stats["openings_pending"] = self._books.spills.num_openings()
        undeleted = self._disk is not None and self._disk.num_undeleted > 0
        stats["clears_pending"] = int(undeleted or bool(self._books.spills.pending_clears()))
        return stats

    @property
    def num_known_pages(self) -> int:
        """Different pages in DRAM, on disk, or on their way."""
        return len(self._books.table.index)

    def remote_stats(self) -> dict[str, int] | None:
        """Counts of the remote store; None without one."""
        return None if self._remote is None else self._remote.stats()

    def check(self) -> None:
        """Verifies index against arena (linear; for tests)."""
        self._books.check()

    @property
    def keeps_records_in_dram(self) -> bool:
        """Whether what lies below the slots is coded DRAM, and no disk."""
        return self._disk is not None and not self._disk.persistent

    def connect(self, disk: OwnerCallbacks) -> None:
        """Lets the disk tier tell the store what reclaiming a segment does to its pages."""
        pages_on_disk, loads = self._books.disk, self._books.loads
        # Pages used since the last reclaim are worth carrying over to a younger segment.
        since = [0]

        def numbers_of(digest: bytes, lora: npt.NDArray[np.uint8]) -> Rows:
            numbers = np.full(len(lora), -1, np.int64)
            for adapter, rows in rows_by_adapter(lora).items():
                number = self._spaces.number_of(digest, adapter)
                numbers[rows] = -1 if number is None else number
            return numbers

        def is_hot(
            digest: bytes, hashes: Hashes, lora: npt.NDArray[np.uint8]
        ) -> npt.NDArray[np.uint8]:
            return pages_on_disk.heat(numbers_of(digest, lora), hashes, since[0])

        def on_moved(digest: bytes, segment: int, pages: RecoveredPages) -> None:
            pages_on_disk.move(numbers_of(digest, pages.lora), segment, pages)

        def on_drop(digest: bytes, segment: int) -> None:
            since[0] = loads.clock
            pages_on_disk.drop_segment(segment)

        disk.is_hot, disk.on_moved, disk.on_drop = is_hot, on_moved, on_drop
        disk.num_needed = pages_on_disk.num_needed
        disk.keeper = pages_on_disk
        if self._books.table.copies is not None:
            disk.copy_keeper = RecordCopies(self._books.table, self._spaces.number_of)
