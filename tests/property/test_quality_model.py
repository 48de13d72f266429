"""The books against a model that writes down the quality of every copy, in the copies."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from sglang_ext.tiers.base import RecoveredPages
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import ANY, Quality
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import (
    FILLING,
    ON_DISK,
    QUEUED,
    READY,
    SPILLING,
    WRITE_DROPPED,
    DiskCopies,
    Epoch,
    KeySpace,
    LoadTicket,
    Plan,
    Rows,
    SaveTicket,
    SpillEntry,
    StoreCounters,
)
from tests.long_form import count

SPACE = KeySpace(0, b"n" * 32, b"", Epoch())
NUM_PAGES, CHAIN, NUM_SLOTS, SEGMENT_PAGES = 15, 5, 11, 12
PAGES = np.stack(
    [np.frombuffer(hashlib.sha256(b"%d" % page).digest(), np.uint8) for page in range(NUM_PAGES)]
)
NONE = np.empty((0, 32), np.uint8)
NUMBER = {row.tobytes(): page for page, row in enumerate(PAGES)}

Copy = tuple[int, int]  # page and quality, as they are in a slot or in a record


@dataclass
class Load:
    ticket: LoadTicket
    pages: list[int]
    limit: int


@dataclass
class Promotion:
    plan: Plan
    rows: Rows
    slots: np.ndarray
    copies: list[Copy] = field(default_factory=list)


class Model:
    """Random operations, each checked against what is in slots and records."""

    def __init__(self, seed: int, policy: str, floor: int) -> None:
        self.rng = random.Random(seed)
        self.arena = HostArena(NUM_SLOTS, 4096)
        self.floor = floor
        self.books = Books(
            self.arena,
            PageIndex(64),
            disk_pages=64,
            write_policy=policy,
            counters=StoreCounters(),
            events=EventLog(""),
            space_of=lambda number: SPACE,
            disk_floor=floor,
        )
        self.index = self.books.table.index
        self.disk: dict[tuple[int, int], Copy] = {}
        self.saves: list[SaveTicket] = []
        self.spills: list[tuple[SpillEntry, list[Copy]]] = []
        self.promotions: list[Promotion] = []
        self.plans: list[Plan] = []
        self.loads: list[Load] = []
        self.written = 0
        self.counts: dict[str, int] = {}

    # ---- copies ----

    def put(self, slot: int, copy: Copy) -> None:
        self.arena.slots[slot, 0], self.arena.slots[slot, 1] = copy

    def in_slot(self, slot: int) -> Copy:
        return int(self.arena.slots[slot, 0]), int(self.arena.slots[slot, 1])

    def state(self) -> dict[int, Copy]:
        """What is ready in DRAM."""
        rows = self.index.rows()
        rows = rows[(self.index.flags[rows] & READY) != 0]
        return {int(row): self.in_slot(int(self.index.host_slot[row])) for row in rows}

    def some_pages(self) -> list[int]:
        """Leading or later pages of one chain."""
        start = self.rng.randrange(NUM_PAGES // CHAIN) * CHAIN
        first = self.rng.choice((0, 0, 0, 1, 3))
        return list(range(start + first, start + self.rng.randint(first + 1, CHAIN)))

    # ---- operations ----

    def begin_save(self) -> None:
        pages = self.some_pages()
        quality = np.array([self.rng.choice((0, 0, 1, 2)) for _ in pages], np.uint8)
        known = self.index.lookup(PAGES[pages], 0)
        before = [int(self.index.quality[row]) if row >= 0 else None for row in known.tolist()]
        given = None if not quality.any() and self.rng.random() < 0.5 else quality
        ticket = self.books.saves.begin(SPACE, PAGES[pages], NONE, given)
        taken = set(ticket.pages.tolist())
        for place, had in enumerate(before):
            wanted = had is None or had > quality[place]
            assert place not in taken or wanted, "a page that is stored as well is saved again"
        for place, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            self.put(slot, (pages[place], int(quality[place])))
        self.saves.append(ticket)

    def finish_save(self) -> bool | None:
        if not self.saves:
            return False
        ticket = self.saves.pop(self.rng.randrange(len(self.saves)))
        before = self.state()
        self.books.saves.finish(ticket, ok=self.rng.random() < 0.8)
        after = self.state()
        for row, (page, quality) in before.items():
            assert row in after, "a save took a page away"
            assert after[row][0] == page
            assert after[row][1] <= quality, "a worse copy replaced a better one"
        return None

    def take_spills(self) -> bool | None:
        entry = self.books.spills.take(self.rng.randint(1, 5))
        if entry is None:
            return False
        self.spills.append((entry, [self.in_slot(slot) for slot in entry.slots.tolist()]))
        return None

    def finish_spill(self) -> bool | None:
        if not self.spills:
            return False
        entry, copies = self.spills.pop(self.rng.randrange(len(self.spills)))
        num = len(copies)
        places = [divmod(self.written + at, SEGMENT_PAGES) for at in range(num)]
        self.written += num
        coded = np.array([self.rng.choice((0, self.floor)) for _ in copies], np.uint8)
        stored = np.array([self.rng.random() < 0.9 for _ in copies], np.bool_)
        for at, (page, quality) in enumerate(copies):
            if stored[at]:
                self.disk[places[at]] = (page, max(quality, int(coded[at])))
        segments, blocks = (np.array(column, np.uint32) for column in zip(*places, strict=True))
        self.books.spills.finish(
            entry, stored, DiskCopies(segments, blocks, np.ones(num, np.uint16), coded)
        )
        return None

    def plan(self) -> bool | None:
        pages, limit = self.some_pages(), self.rng.choice((0, 1, ANY))
        plan, rows, slots = self.books.plans.begin(SPACE, PAGES[pages], limit)
        if plan is None:
            return False
        self.plans.append(plan)
        if len(rows):
            there, hashes, places = self.books.lookups.to_read(rows, slots)
            assert there.all()
            found = []
            for at, row in enumerate(hashes):
                copy = self.disk[int(places.segment[at]), int(places.block[at])]
                assert copy[0] == NUMBER[row.tobytes()], "another page's record"
                assert copy[1] <= limit, "a plan promotes a page that is too lossy"
                found.append(copy)
            self.promotions.append(Promotion(plan, rows, slots, found))
        return None

    def finish_promotion(self) -> bool | None:
        if not self.promotions:
            return False
        read = self.promotions.pop(self.rng.randrange(len(self.promotions)))
        ok = np.array([self.rng.random() < 0.9 for _ in read.copies], np.bool_)
        for slot, copy in zip(read.slots.tolist(), read.copies, strict=True):
            self.put(slot, copy)
        quality = np.array([quality for _, quality in read.copies], np.uint8)
        self.books.plans.finish_promotion(read.plan, read.rows, read.slots, ok, quality)
        self.books.plans.end_promotion()
        return None

    def cancel_plan(self) -> bool | None:
        if not self.plans:
            return False
        self.books.plans.cancel(self.plans.pop())
        return None

    def load(self) -> bool | None:
        pages, limit = self.some_pages(), self.rng.choice((0, 1, ANY))
        ready = self.books.lookups.ready_prefix(SPACE, PAGES[pages], limit)
        rows = self.index.lookup(PAGES[pages], 0).tolist()
        state, expected = self.state(), 0
        while expected < len(rows) and rows[expected] in state:
            if state[rows[expected]][1] > limit:
                break
            expected += 1
        assert ready == expected
        located = self.books.lookups.locate_prefix(SPACE, PAGES[pages], limit)
        assert sum(located) >= ready
        whole = self.books.loads.pin_ready(SPACE, PAGES[pages], limit)
        if whole is not None:
            assert ready == len(pages)
            self.books.loads.release(whole.slots)
        if not ready:
            return False
        ticket = self.books.loads.pin_ready(SPACE, PAGES[pages[:ready]], limit)
        assert ticket is not None
        self.loads.append(Load(ticket, pages[:ready], limit))
        return None

    def finish_load(self) -> bool | None:
        """What was pinned is still there, whatever replaced or evicted the page."""
        if not self.loads:
            return False
        load = self.loads.pop(self.rng.randrange(len(self.loads)))
        self.check_load(load)
        self.books.loads.release(load.ticket.slots)
        return None

    def check_load(self, load: Load) -> None:
        copies = [self.in_slot(slot) for slot in load.ticket.slots.tolist()]
        assert [page for page, _ in copies] == load.pages
        assert [quality for _, quality in copies] == load.ticket.quality.tolist()
        assert max(quality for _, quality in copies) <= load.limit

    def reclaim(self) -> bool | None:
        """The oldest segment goes; some of its records are copied to a younger one before."""
        segments = sorted({segment for segment, _ in self.disk})
        if len(segments) < 2:
            return False
        if self.promotions:  # the disk tier reads from a segment until it is gone
            return False
        old = [place for place in sorted(self.disk) if place[0] == segments[0]]
        kept = [place for place in old if self.rng.random() < 0.4]
        moved = [divmod(self.written + at, SEGMENT_PAGES) for at in range(len(kept))]
        self.written += len(kept)
        self.disk.update({to: self.disk[at] for at, to in zip(kept, moved, strict=True)})
        numbers = np.full(len(moved), SPACE.number)
        self.books.disk.move(numbers, segments[0], self.records(moved))
        self.books.disk.drop_segment(segments[0])
        for place in old:
            del self.disk[place]
        return None

    def records(self, places: list[tuple[int, int]]) -> RecoveredPages:
        copies = [self.disk[place] for place in places]
        table = np.array(places, np.uint32).reshape(-1, 2)
        return RecoveredPages(
            hashes=PAGES[[page for page, _ in copies]],
            lora=np.zeros((len(copies), 32), np.uint8),
            segment=table[:, 0].copy(),
            block=table[:, 1].copy(),
            num_blocks=np.ones(len(copies), np.uint16),
            quality=np.array([quality for _, quality in copies], np.uint8),
        )

    def queue_all(self) -> None:
        self.books.spills.queue_all()

    # ---- checks ----

    def page_at(self, row: int) -> int:
        return NUMBER[self.index.keys([row])[0][0].tobytes()]

    def check(self) -> None:
        if not any(ticket.replaces.any() for ticket in self.saves):  # those hold slots of no row
            self.books.check()
        for row, (page, quality) in self.state().items():
            assert self.page_at(row) == page
            assert quality == self.index.quality[row], "DRAM is not as good as is said"
        for row in self.index.rows().tolist():
            if self.index.flags[row] & ON_DISK:
                place = int(self.index.segment[row]), int(self.index.block[row])
                page, quality = self.disk[place]
                assert page == self.page_at(row)
                assert quality == self.index.disk_quality[row], "the disk is not as good as is said"
        for load in self.loads:
            self.check_load(load)

    def drain(self) -> None:
        """Everything in flight ends, and what waits for the disk is written."""
        ends = (self.finish_save, self.finish_promotion, self.cancel_plan, self.finish_load)
        while any(end() is not False for end in ends):
            pass
        while self.take_spills() is not False or self.finish_spill() is not False:
            pass
        self.check()
        rows = self.index.rows()
        flags = self.index.flags[rows]
        assert not (flags & (FILLING | QUEUED | SPILLING)).any()
        if self.books.writing.name == "write_through":
            assert ((flags & (ON_DISK | WRITE_DROPPED)) != 0).all(), "a page is never written"

    def restart(self) -> None:
        """Another process finds the records, the best of each page."""
        index = PageIndex(64)
        books = Books(
            HostArena(2, 4096),
            index,
            disk_pages=64,
            write_policy="write_through",
            counters=StoreCounters(),
            events=EventLog(""),
        )
        places = list(self.disk)
        self.rng.shuffle(places)
        books.disk.add_recovered(SPACE, self.records(places))
        best: dict[int, int] = {}
        for page, quality in self.disk.values():
            best[page] = min(best.get(page, ANY), quality)
        rows = index.lookup(PAGES, 0)
        assert {page for page in range(NUM_PAGES) if rows[page] >= 0} == set(best)
        for page, quality in best.items():
            row = int(rows[page])
            assert index.quality[row] == index.disk_quality[row] == quality
            assert self.disk[int(index.segment[row]), int(index.block[row])] == (page, quality)
        books.check()


_WEIGHTS: dict[str, float] = {
    "begin_save": 10, "finish_save": 10, "take_spills": 8, "finish_spill": 8, "plan": 6,
    "finish_promotion": 8, "cancel_plan": 6, "load": 8, "finish_load": 8, "reclaim": 2,
    "queue_all": 2,
}  # fmt: skip


@pytest.mark.parametrize("policy", ["write_through", "write_back", "selective"])
@pytest.mark.parametrize("floor", [Quality.EXACT, Quality.LOSSY])
def test_every_copy_is_as_good_as_is_said(policy: str, floor: Quality) -> None:
    model = Model(len(policy) + floor, policy, int(floor))
    names, weights = zip(*_WEIGHTS.items(), strict=True)
    for step in range(count(600, 20_000)):
        name = model.rng.choices(names, weights)[0]
        operation: Callable[[], bool | None] = getattr(model, name)
        if operation() is not False:
            model.counts[name] = model.counts.get(name, 0) + 1
        model.check()
        if step % 200 == 199:
            model.drain()
    model.restart()
    assert set(model.counts) == set(_WEIGHTS), model.counts
    counters = model.books.table.counters.snapshot()
    assert counters["replaced_pages"] > 0
    assert counters["saved_lossy_pages"] > 0
    assert counters["loaded_lossy_pages"] > 0
