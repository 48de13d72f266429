"""What two ranks make of a waiting request by speeds of their own, step by step.

Each has a store whose disk is slow or not, and an opinion of how fast it is; what they tell is
reduced as in a server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from sglang_ext.admission.waiting_request import Remote, ReusablePrefix
from sglang_ext.ranks.consensus import AgreedRequest, Report
from sglang_ext.ranks.lockstep import Lockstep
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from tests.unit.admission.test_load_or_compute import KV, P, Rig, pages, until

NUM_PAGES = 16
CRAWLS = "0.001"  # MB/s: a minute for a page
NOTHING_FOUND = np.empty(0, np.int64)


class Rank:
    """One rank, with pages a of which the first `num_in_dram` are in DRAM, the rest on disk."""

    def __init__(
        self, folder: Path, num_in_dram: int, placement: PolicyConfig | None = None
    ) -> None:
        folder.mkdir()
        first = Rig(folder)
        first.save(pages("a", NUM_PAGES))
        until(lambda: not first.store.stats()["spill_queue_pages"])
        assert first.store.flush(300.0) == 0
        first.store.close(300.0)
        self.rig = Rig(folder, placement)
        plan = self.rig.store.plan(self.rig.space, pages("a", num_in_dram)) if num_in_dram else None
        if plan is not None:
            until(lambda: plan.done)
            self.rig.store.cancel_plan(plan)
        transfers: Any = None  # nothing is saved or loaded
        self.lockstep = Lockstep(
            self.rig.store,
            self.rig.room,
            list,
            transfers,
            page_size=P,
            find_damaged=lambda slots, position: NOTHING_FOUND,
            num_on_device=lambda key: 0,
            min_reduce=lambda vector: None,
            gather=lambda content: [content],
        )
        self.book, self.consensus = self.lockstep.promises, self.lockstep._consensus

    def save(self, start: int, end: int) -> None:
        """Some of the pages come to DRAM, behind those before them."""
        store, own = self.rig.store, pages("a", NUM_PAGES)
        ticket = store.begin_save(self.rig.space, own[start:end], own[:start])
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            meta = RecordMeta(own[start + page].tobytes(), self.rig.space.digest, b"", 0, P, "pre")
            write_meta(store.arena.slots[slot], meta, KV)
        store.finish_save(ticket, ok=True)

    def enter(self) -> None:
        num_tokens = NUM_PAGES * P + 10
        prefix = ReusablePrefix(
            self.rig.space, pages("a", NUM_PAGES), 0, 255, prompt_tokens=num_tokens
        )
        self.book.enter("x", prefix)

    def loadable(self, num_on_device: int) -> int:
        """What a match finds behind so many pages of the device."""
        tail = pages("a", NUM_PAGES)[num_on_device:]
        return self.lockstep.num_loadable("x", self.rig.space, num_on_device, tail, 255)

    @property
    def agreed(self) -> AgreedRequest | None:
        return self.book._promises["x"].settled


def step(ranks: list[Rank]) -> bool:
    """A step of all ranks, whose schedulers would run the request; whether they may."""
    vectors = []
    for rank in ranks:
        rank.rig.room.step(["x"])
        vectors.append(rank.consensus.begin(Report(requests=rank.book.report(["x"]))))
    least = np.min(vectors, axis=0)
    for rank in ranks:
        rank.book.settle(rank.consensus.end(least.copy(), len(rank.book._told)).requests)
        if not rank.book.may_admit("x"):
            rank.rig.room.hold("x")
    may = {rank.book.may_admit("x") for rank in ranks}
    assert len(may) == 1
    return may.pop()


class MakeRanks(Protocol):
    """Makes ranks with so many pages in DRAM."""

    def __call__(self, *in_dram: int, looks_ahead: bool = True) -> list[Rank]: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRanks]:
    ranks: list[Rank] = []

    def made(*in_dram: int, looks_ahead: bool = True) -> list[Rank]:
        for at, num in enumerate(in_dram):
            ranks.append(Rank(tmp_path / str(at), num, PolicyConfig() if looks_ahead else None))
        return ranks

    yield made
    for rank in ranks:
        rank.rig.speed.unlink(missing_ok=True)
        rank.book.leave_all()
        rank.rig.room.leave_all()
        rank.rig.store.close(300.0)


def until_admitted(ranks: list[Rank]) -> None:
    end_s = time.monotonic() + 300
    while not step(ranks):
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_what_one_rank_computes_no_rank_waits_for(make: MakeRanks) -> None:
    """The other one would, for an hour; it takes its reads back and the next step is the last."""
    quick, slow = make(0, 0)
    quick.rig.teach_prefill(1e-6)
    quick.rig.teach_disk(0.1)
    slow.rig.teach_prefill(10.0)
    slow.rig.speed.write_text(CRAWLS)
    for rank in (quick, slow):
        rank.enter()
    assert not step([quick, slow])
    assert step([quick, slow])
    for rank in (quick, slow):
        assert rank.agreed is not None
        assert rank.agreed.end_page == 0
        assert not rank.rig.room._plans.planned
    assert quick.rig.count("cost_recompute") == slow.rig.count("cost_load") == 1
    assert slow.rig.count("cost_limited") == 1
    assert slow.rig.count("cost_gave_up") == 0


def test_a_rank_that_gives_up_the_rest_leaves_time_for_what_it_has(make: MakeRanks) -> None:
    """It has four pages; the other one goes on bringing these, and no more."""
    ahead, behind = make(4, 0)
    ahead.rig.teach_prefill(1e-4)  # 0.1 s for all
    ahead.rig.teach_disk(1000)
    ahead.rig.speed.write_text(CRAWLS)
    behind.rig.teach_prefill(10.0)
    behind.rig.teach_disk(0.1)
    behind.rig.speed.write_text("0.2")  # 1.3 s for four pages, 5 s for all
    for rank in (ahead, behind):
        rank.enter()
    until_admitted([ahead, behind])
    assert ahead.rig.count("cost_gave_up") == behind.rig.count("cost_limited") == 1
    for rank in (ahead, behind):
        assert rank.agreed is not None
        assert (rank.agreed.first_page, rank.agreed.end_page) == (0, 4)


def test_what_becomes_known_on_the_rank_that_had_less_is_brought_by_all(make: MakeRanks) -> None:
    less, more = make(0, 0)
    less.rig.store.clear()
    less.save(0, 4)
    for rank in (less, more):
        rank.rig.teach_prefill(10.0)
        rank.rig.teach_disk(1000)
        rank.enter()
    more.rig.speed.write_text(CRAWLS)
    assert not step([less, more])
    assert not step([less, more])
    assert more.rig.room.progress("x").end_page == 4
    less.save(4, NUM_PAGES)
    end_s = time.monotonic() + 300
    while more.rig.room.progress("x").end_page < NUM_PAGES:
        assert not step([less, more])
        assert time.monotonic() < end_s
    more.rig.speed.unlink()
    until_admitted([less, more])
    assert more.rig.count("cost_limited") == 1
    assert {rank.agreed.end_page for rank in (less, more) if rank.agreed} == {NUM_PAGES}


def test_what_one_rank_has_no_room_for_no_rank_waits_for(make: MakeRanks) -> None:
    """The other one has as many pages as there is room for there, and would wait for the rest."""
    full, slow = make(0, 4, looks_ahead=False)
    rig = full.rig
    rig.save(pages("others", 60))  # of 64 that DRAM holds
    pinned = rig.store.pin_leading(rig.space, pages("others", 60))
    assert len(pinned.slots) == 60
    for rank in (full, slow):
        rank.rig.teach_prefill(10.0)
        rank.rig.teach_disk(1000)
    slow.rig.speed.write_text(CRAWLS)  # an hour for the rest
    for rank in (full, slow):
        rank.enter()
    until_admitted([full, slow])
    rig.store.release(pinned.slots)
    assert rig.count("cost_gave_up") == slow.rig.count("cost_gave_up") == 0
    assert slow.rig.count("cost_limited") == 1
    assert len({rank.agreed.end_page for rank in (full, slow) if rank.agreed}) == 1
    assert slow.agreed is not None
    assert slow.agreed.end_page <= 4


def test_what_the_rank_that_had_nothing_finds_is_brought_by_all(make: MakeRanks) -> None:
    """A third one waits for what the remote store says, so that there is time to find it."""
    ranks = nothing, has, asks = make(0, 0, 0)
    nothing.rig.store.clear()
    asks.rig.store.clear()
    has.rig.speed.write_text(CRAWLS)
    for rank in ranks:
        rank.rig.teach_prefill(10.0)
        rank.rig.teach_disk(1000)
        rank.enter()
    waiting = asks.rig.room.find("x")
    assert waiting is not None
    waiting.remote = Remote.ASKED
    assert not step(ranks)
    assert not step(ranks)
    assert has.rig.room.progress("x").end_page == 0
    nothing.save(0, NUM_PAGES)
    end_s = time.monotonic() + 300
    while has.rig.room.progress("x").end_page < NUM_PAGES:
        assert not step(ranks)
        assert time.monotonic() < end_s
    has.rig.speed.unlink()
    asks.save(0, NUM_PAGES)
    waiting.remote = Remote.ANSWERED
    until_admitted(ranks)
    assert {rank.agreed.end_page for rank in ranks if rank.agreed} == {NUM_PAGES}


def beside_a_slow_link(make: MakeRanks) -> tuple[Rank, Rank]:
    """Two ranks with all pages in DRAM, the second behind a slow link, that agreed on a request."""
    quick, slow = make(NUM_PAGES, NUM_PAGES)
    for rank, page_s in ((quick, 1e-6), (slow, 1.0)):
        rank.rig.teach_prefill(1e-3)
        rank.rig.teach_loads(page_s)
        rank.enter()
    until_admitted([quick, slow])
    return quick, slow


def test_of_dram_all_ranks_load_what_is_worth_it_to_each(make: MakeRanks) -> None:
    """What the slower link is worth counts for both; only that rank counts what it leaves."""
    quick, slow = beside_a_slow_link(make)
    assert quick.agreed is not None
    assert quick.agreed == slow.agreed
    num = quick.agreed.end_page
    assert num < NUM_PAGES
    for rank in (quick, slow):
        assert rank.book.num_promised("x", rank.rig.space, 0) == num
        ticket = rank.book.take("x", rank.rig.space, 0, pages("a", num))
        assert ticket is not None
        rank.rig.store.end_load(ticket)
        rank.book.admit("x", None)
    assert slow.rig.count("cost_dram_left_pages") == NUM_PAGES - num
    assert quick.rig.count("cost_dram_left_pages") == 0


@pytest.mark.parametrize("num_on_device", [0, 8, NUM_PAGES])
def test_what_the_device_has_by_then_no_rank_leaves(make: MakeRanks, num_on_device: int) -> None:
    """Others computed some of the prompt's pages between what was agreed on and its last match."""
    quick, slow = beside_a_slow_link(make)
    assert quick.agreed is not None
    num = quick.agreed.end_page
    assert num < 8
    for rank in (quick, slow):
        assert rank.loadable(0) == num
        if num_on_device == NUM_PAGES:
            rank.lockstep.num_worth("x", NUM_PAGES * P, 0)  # as a match that asks for nothing
        else:
            assert rank.loadable(num_on_device) == max(0, num - num_on_device)
        rank.book.admit("x", None)
    left = NUM_PAGES - max(num, num_on_device)
    assert slow.rig.count("cost_dram_left_pages") == left
    assert slow.rig.count("cost_dram_left_requests") == (left > 0)
    assert quick.rig.count("cost_dram_left_pages") == 0


def test_a_probe_that_another_rank_takes_no_part_in_is_none(make: MakeRanks) -> None:
    """It goes on passing its pages over, so it probes as soon as all ranks do."""
    ranks = probing, _ = make(NUM_PAGES, NUM_PAGES)
    for rank in ranks:
        rank.rig.teach_prefill(1e-3)
        rank.rig.teach_loads(1.0)
        for tokens in (100, 1000, 5000) * 2:  # a load that is begun costs more than all computing
            rank.rig.cost.note_load(tokens, 10.0)
    while not probing.rig.cost._num_passed_over >= 16:
        probing.rig.cost.note_passed_over()

    def run() -> int:
        for rank in ranks:
            rank.enter()
        until_admitted(list(ranks))
        num = {rank.loadable(0) for rank in ranks}
        for rank in ranks:
            rank.book.admit("x", None)
        assert len(num) == 1
        return num.pop()

    assert run() == 0
    assert [rank.rig.count("cost_dram_probes") for rank in ranks] == [0, 0]
    assert [rank.rig.count("cost_dram_left_pages") for rank in ranks] == [NUM_PAGES] * 2
    for rank in ranks:
        while rank.rig.cost._num_passed_over < 16:
            rank.rig.cost.note_passed_over()
    num = run()
    assert num > 0
    assert [rank.rig.count("cost_dram_probes") for rank in ranks] == [1, 1]
    assert [rank.rig.count("cost_dram_left_pages") for rank in ranks] == [2 * NUM_PAGES - num] * 2
