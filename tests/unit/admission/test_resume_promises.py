"""Where ranks with other stores resume a hybrid's prompt, against what each of them has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.admission.resume_points import PromptPoints  # noqa: E402
from sglang_ext.admission.waiting import WaitingRoom  # noqa: E402
from sglang_ext.admission.waiting_request import (  # noqa: E402
    Readiness,
    Remote,
    ReusablePrefix,
)
from sglang_ext.admission.window_question import WindowQuestion  # noqa: E402
from sglang_ext.device.layout import PageLayout  # noqa: E402
from sglang_ext.device.states.snapshots import Snapshots, StatePool  # noqa: E402
from sglang_ext.device.windows.window_layers import WindowLayers  # noqa: E402
from sglang_ext.provenance.tree_quality import DeviceProvenance  # noqa: E402
from sglang_ext.ranks.consensus import Consensus, Report, _decode  # noqa: E402
from sglang_ext.ranks.resume_promises import MAX_ROUNDS, ResumeBook  # noqa: E402
from sglang_ext.seam.hybrids.place_questions import PlaceQuestions  # noqa: E402
from sglang_ext.seam.hybrids.state_pages import StatePages  # noqa: E402
from sglang_ext.seam.hybrids.window_pages import WindowPages  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.policy import PolicyConfig  # noqa: E402
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig  # noqa: E402

CASES = 150
PAGE, WINDOW_PAGES = 4, 2
LAYOUT = PageLayout(PAGE, (64, 64), (64, 64), 2)
HANDLE = "r"


class Rank:
    """A rank's store, in which any pages can be, and its promises."""

    def __init__(self, number: int) -> None:
        arena = HostArena(512, LAYOUT.slot_bytes)
        placement = PolicyConfig()
        self.store = PageStore(arena, PageIndex(1024), None, PageStoreConfig(placement=placement))
        self.store.open_namespace(bytes(32), {})
        self.space: KeySpace = self.store.space(bytes(32))
        self.rng, self.damage = random.Random(number), 0.0
        nothing: Any = None
        pool = StatePool((torch.zeros(3, 6, 4, 7, 9),), (0, 2, 4))
        self.snapshots = Snapshots(pool, LAYOUT)
        self.states = StatePages(self.snapshots, self.store, nothing, nothing)
        copiers: Any = (None, None)
        self.layers = WindowLayers(WINDOW_PAGES, PAGE, copiers, [])
        self.windows = WindowPages(
            self.layers,
            self.store,
            nothing,
            nothing,
            pages=DeviceProvenance(1),
            may_move=lambda: False,
        )  # fmt: skip
        self.room = WaitingRoom(
            self.store, prefetch_policy="wait_complete", prefetch_timeout_ms=0.0
        )
        self.checked: list[tuple[int, int]] = []
        self.consensus = Consensus(lambda vector: None)
        self.book = ResumeBook(
            self.store, self.room, page_size=PAGE, find_damaged=self.find_damaged,
            note=self.consensus.note,
        )  # fmt: skip

    def find_damaged(self, slots: Any, position: int | None) -> Any:
        assert position is not None
        self.checked += [(int(slot), position + at * PAGE) for at, slot in enumerate(slots)]
        return np.flatnonzero([self.rng.random() < self.damage for _ in slots])

    def parts(self, hashes: Any, page: int, *, of_states: bool) -> Any:
        """Keys of a page that are not the page's own."""
        entries = self.snapshots.entries if of_states else self.layers.entries
        return entries(hashes[page : page + 1])

    def has(self, keys: Any) -> bool:
        return bool((self.store.page_states(self.space, keys)[0] != 0).all())


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Rank]]:
    ranks = [Rank(number) for number in range(2)]
    yield ranks
    for rank in ranks:
        rank.store.close()


def step(ranks: list[Rank]) -> None:
    """One step of all of them, with the reduction between."""
    reports = []
    for rank in ranks:
        rank.room.step([HANDLE])
        reports.append(rank.book.report([HANDLE]))
    vectors = [
        rank.consensus._encode(Report(requests=report))
        for rank, report in zip(ranks, reports, strict=True)
    ]
    least = np.min(vectors, axis=0)
    assert least[0] == -least[1], "other histories"
    for rank, report in zip(ranks, reports, strict=True):
        rank.book.settle(_decode(least, len(report)).requests)


def stored_at(rank: Rank, hashes: Any, first: int, end: int, *, of_states: bool) -> bool:
    """Whether a prompt with `first` pages on the device can go on behind `end` pages here."""
    if not rank.has(hashes[first:end]):
        return False
    pages = [end - 1] if of_states else range(max(first, end - WINDOW_PAGES), end)
    return all(rank.has(rank.parts(hashes, page, of_states=of_states)) for page in pages)


@pytest.mark.parametrize("damage", [0.0, 0.05])
@pytest.mark.parametrize("of_states", [False, True])
def test_ranks_agree_on_the_furthest_place_that_all_have(
    ranks: list[Rank], of_states: bool, damage: float
) -> None:
    rng = random.Random(7)
    seen = set()
    for number in range(CASES):
        num = rng.randint(2, 9)
        hashes = np.frombuffer(rng.randbytes(32 * num), np.uint8).reshape(num, 32)
        first, limit = rng.randint(0, 2), num - rng.randint(0, 1)
        if first >= limit:
            continue
        share = rng.choice((0.7, 0.95))
        for rank in ranks:
            rank.damage = damage
            keys = [hashes[page : page + 1] for page in range(num) if rng.random() < 0.97]
            keys += [
                rank.parts(hashes, page, of_states=of_states)
                for page in range(num)
                if rng.random() < share
            ]
            if keys:
                ticket = rank.store.begin_save(rank.space, np.concatenate(keys), hashes[:0])
                rank.store.finish_save(ticket, ok=True)
        common = [
            end
            for end in range(first + 1, limit + 1)
            if all(stored_at(rank, hashes, first, end, of_states=of_states) for rank in ranks)
        ]
        for rank in ranks:
            layers: Any = rank.states if of_states else rank.windows
            points = PromptPoints(layers, rank.store, rank.space, hashes, limit)
            rank.book.enter(HANDLE, ReusablePrefix(rank.space, hashes, first, 255, points=points))
        for _round in range(MAX_ROUNDS):
            assert not any(rank.book.may_admit(HANDLE) for rank in ranks)
            step(ranks)
            if ranks[0].book.may_admit(HANDLE):
                break
        assert all(rank.book.may_admit(HANDLE) for rank in ranks)
        promised = {rank.book.num_promised(HANDLE, rank.space, first) for rank in ranks}
        (found,) = promised
        if not damage:
            assert found == max(common, default=first) - first
        seen.add((found, _round))
        on_device = rng.randint(first, first + found)  # it may have become more meanwhile
        check_taken(ranks, hashes, on_device, first + found, of_states=of_states)
        check_last(ranks, hashes, limit, found + first == limit, of_states=of_states)
        for rank in ranks:
            assert not rank.store.arena._pins.any()
            rank.checked.clear()
            if not number % 8:  # every prompt is another one; DRAM has room for some
                rank.store.clear()
                assert rank.store.wait_idle(300)
    assert len({found for found, _ in seen}) > 4
    assert len({rounds for _, rounds in seen}) > 2


def store_all(rank: Rank, hashes: Any, *, of_states: bool, ok: bool = True) -> Any:
    """Pages of a prompt and all that it can be resumed with; begun only where not `ok`."""
    keys = [rank.parts(hashes, page, of_states=of_states) for page in range(len(hashes))]
    ticket = rank.store.begin_save(rank.space, np.concatenate([hashes, *keys]), hashes[:0])
    if ok:
        rank.store.finish_save(ticket, ok=True)
    return ticket


def enter(rank: Rank, hashes: Any, limit: int, *, of_states: bool) -> None:
    layers: Any = rank.states if of_states else rank.windows
    points = PromptPoints(layers, rank.store, rank.space, hashes, limit)
    rank.book.enter(HANDLE, ReusablePrefix(rank.space, hashes, 0, 255, points=points))


@pytest.mark.parametrize("of_states", [False, True])
@pytest.mark.parametrize("num", [1, 5])
def test_a_prompt_that_is_promised_all_lacks_nothing(
    ranks: list[Rank], num: int, of_states: bool
) -> None:
    """Else it would be agreed on once more, and its pins be given back meanwhile."""
    rng = random.Random(num)
    for limit in (num, num - 1):  # without and with a last page that is whole
        hashes = np.frombuffer(rng.randbytes(32 * num), np.uint8).reshape(num, 32)
        for rank in ranks:
            rank.damage = 0.0
            store_all(rank, hashes, of_states=of_states)
            enter(rank, hashes, limit, of_states=of_states)
        while not ranks[0].book.may_admit(HANDLE):
            step(ranks)
        for rank in ranks:
            assert rank.book.num_promised(HANDLE, rank.space, 0) == limit
            assert rank.book.gap(HANDLE) == (0, 0)
            rank.book.leave(HANDLE)
            assert not rank.store.arena._pins.any()


def test_the_wait_for_a_nearer_place_counts_from_the_first_one(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    slow, other = ranks
    hashes = np.frombuffer(random.Random(55).randbytes(32 * 5), np.uint8).reshape(5, 32)
    ticket = store_all(slow, hashes, of_states=False, ok=False)  # under way until the end
    store_all(other, hashes[:3], of_states=False)
    room = WaitingRoom(
        slow.store, prefetch_policy="timeout", prefetch_timeout_ms=500.0, clock=lambda: now_s[0]
    )
    monkeypatch.setattr(slow, "room", room)
    monkeypatch.setattr(slow.book, "_room", room)
    for rank in ranks:
        rank.damage = 0.0
        enter(rank, hashes, 5, of_states=False)
    slow.room.step([HANDLE])
    slow.room.hold(HANDLE)
    assert slow.room.readiness(HANDLE) is Readiness.WAITING
    now_s[0] += 0.5
    first = slow.book._promises[HANDLE]
    step(ranks)
    assert slow.book._promises[HANDLE] is not first  # it names a nearer place
    assert slow.room.readiness(HANDLE) is Readiness.LATE
    for rank in ranks:
        rank.book.leave(HANDLE)
    slow.store.finish_save(ticket, ok=True)
    assert not slow.store.arena._pins.any()


class Question:
    """A question that is answered, or late, when the test says so."""

    def __init__(self, tail: Any) -> None:
        self.tail = tail
        self.end: int | None = None
        self.resume_keys = self.last_keys = tail[:0]
        self.is_late = self.is_over = self.is_dropped = False

    @property
    def is_open(self) -> bool:
        return not (self.is_over or self.is_dropped)

    def step(self) -> bool:
        return self.is_over

    def drop(self) -> None:
        self.is_dropped = True


@pytest.mark.parametrize("how", ["is_over", "is_late"])
def test_all_ranks_wait_while_a_remote_store_is_asked_on_one(ranks: list[Rank], how: str) -> None:
    """And what it does not have, or does not say in time, is a place nearer on all of them."""
    asks, _ = ranks
    hashes = np.frombuffer(random.Random(71).randbytes(32 * 6), np.uint8).reshape(6, 32)
    asked: list[Question] = []

    def ask(space: Any, tail: Any, last: Any, least: int, max_quality: int) -> Any:
        asked.append(Question(tail))
        return asked[-1]

    for rank in ranks:
        rank.damage = 0.0
        store_all(rank, hashes[: 2 if rank is asks else 4], of_states=False)
        layers: Any = rank.windows
        points = PromptPoints(
            layers, rank.store, rank.space, hashes, 6, ask if rank is asks else None
        )
        rank.book.enter(HANDLE, ReusablePrefix(rank.space, hashes, 0, 255, points=points))
    entered = [rank.room.find(HANDLE) for rank in ranks]
    late = asks.store.stats().get("remote_lookups_late", 0)
    for _ in range(5):
        step(ranks)
        assert not any(rank.book.may_admit(HANDLE) for rank in ranks)
    # What the other one does not have is not asked for any more.
    assert [len(question.tail) for question in asked] == [6, 4]
    assert asked[0].is_dropped
    for question in asked:
        setattr(question, how, True)
    while not asks.book.may_admit(HANDLE):
        step(ranks)
    assert asked[1].is_dropped
    assert len(asked) == 2  # up to where it is known to be, nothing is left to ask for
    for rank in ranks:
        assert rank.book.may_admit(HANDLE)
        assert rank.book.num_promised(HANDLE, rank.space, 0) == 2
    assert asks.store.stats().get("remote_lookups_late", 0) - late == (how == "is_late")
    unanswered = [
        any(record.remote is Remote.UNANSWERED for record in waiting.records())
        for waiting in entered
        if waiting is not None
    ]
    assert unanswered == [how == "is_late", False]
    for rank in ranks:
        rank.book.leave(HANDLE)
        assert not rank.store.arena._pins.any()


def test_the_wait_for_a_remote_store_counts_from_the_first_question(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, (asks, other) = [50.0], ranks
    lookups: list[Any] = []
    hashes = np.frombuffer(random.Random(73).randbytes(32 * 6), np.uint8).reshape(6, 32)

    def never_answered(lookup: Any) -> bool:
        lookups.append(lookup)
        return True

    monkeypatch.setattr(asks.store, "ask_remote", never_answered)
    window_questions = PlaceQuestions(
        WindowQuestion,
        asks.layers,
        asks.store,
        lambda *_: None,
        lambda _: None,
        longest_s=2.0,
        clock=lambda: now_s[0],
    )
    for rank, num in ((asks, 2), (other, 4)):
        rank.damage = 0.0
        store_all(rank, hashes[:num], of_states=False)
        ask = window_questions.ask if rank is asks else None
        layers: Any = rank.windows
        points = PromptPoints(layers, rank.store, rank.space, hashes, 6, ask)
        rank.book.enter(HANDLE, ReusablePrefix(rank.space, hashes, 0, 255, points=points))
    late = asks.store.stats().get("remote_lookups_late", 0)
    now_s[0] += 1.5
    step(ranks)  # a nearer place is asked for
    assert [len(lookup.hashes) for lookup in lookups if not lookup.cancelled] == [2]
    step(ranks)
    assert not asks.book.may_admit(HANDLE)
    now_s[0] += 0.5
    for _ in range(MAX_ROUNDS):
        step(ranks)
    assert all(lookup.cancelled for lookup in lookups)
    assert asks.store.stats()["remote_lookups_late"] - late == 1
    for rank in ranks:
        assert rank.book.may_admit(HANDLE)
        assert rank.book.num_promised(HANDLE, rank.space, 0) == 2
        rank.book.leave(HANDLE)
        assert not rank.store.arena._pins.any()


@pytest.mark.parametrize("is_late", [False, True])
def test_what_could_not_be_fetched_on_one_rank_has_all_ask_for_less(
    ranks: list[Rank], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless one of them has waited long enough: then all go by what they have."""
    fails, has = ranks
    hashes = np.frombuffer(random.Random(74).randbytes(32 * 6), np.uint8).reshape(6, 32)
    asked: dict[int, list[Question]] = {0: [], 1: []}

    def ask_of(number: int) -> Any:
        def ask(space: Any, tail: Any, last: Any, least: int, max_quality: int) -> Any:
            asked[number].append(Question(tail))
            return asked[number][-1]

        return ask

    for number, rank in enumerate(ranks):
        rank.damage = 0.0
        store_all(rank, hashes[: 2 if rank is fails else 5], of_states=True)
        points = PromptPoints(rank.states, rank.store, rank.space, hashes, 6, ask_of(number))
        rank.book.enter(HANDLE, ReusablePrefix(rank.space, hashes, 0, 255, points=points))
    before = [rank.store.stats().get("remote_lookups_nearer", 0) for rank in ranks]
    step(ranks)
    for number, end in enumerate((5, None)):  # on one the store has five, the other has them here
        (question,) = asked[number]
        question.end, question.is_over = end, True
        question.resume_keys = fails.parts(hashes, 4, of_states=True)
    if is_late:
        monkeypatch.setattr(has.room, "readiness", lambda handle: Readiness.LATE)
    for _ in range(3):
        step(ranks)  # all name the fifth page, and one rank has not what it takes
    nearer = [
        rank.store.stats().get("remote_lookups_nearer", 0) - num
        for rank, num in zip(ranks, before, strict=True)
    ]
    # The one that has a state behind the fourth has nothing to ask for.
    assert nearer == [not is_late, 0]
    assert [len(question.tail) for question in asked[0]] == [6] + [4] * (not is_late)
    if not is_late:
        assert not fails.book.may_admit(HANDLE)
        assert not has.book.may_admit(HANDLE)
        asked[0][-1].is_over = True
    for _ in range(5):
        step(ranks)
    for rank in ranks:
        assert rank.book.may_admit(HANDLE)
        assert rank.book.num_promised(HANDLE, rank.space, 0) == 2
        rank.book.leave(HANDLE)
        assert not rank.store.arena._pins.any()


def test_a_request_that_leaves_is_not_asked_for_any_more(ranks: list[Rank]) -> None:
    hashes = np.frombuffer(random.Random(72).randbytes(32 * 6), np.uint8).reshape(6, 32)
    (rank, _), question = ranks, Question(hashes)
    layers: Any = rank.windows
    ask: Any = lambda *_: question  # noqa: E731
    points = PromptPoints(layers, rank.store, rank.space, hashes, 6, ask)
    rank.book.enter(HANDLE, ReusablePrefix(rank.space, hashes, 0, 255, points=points))
    assert not question.is_dropped
    rank.book.leave(HANDLE)
    assert question.is_dropped


def check_taken(ranks: list[Rank], hashes: Any, first: int, end: int, *, of_states: bool) -> None:
    """What a load is given is what it asks for, pinned and checked, on each rank."""
    if first == end:
        return
    for rank in ranks:
        pages = [end - 1] if of_states else list(range(max(first, end - WINDOW_PAGES), end))
        entries = rank.snapshots.entries if of_states else rank.layers.entries
        wanted = np.concatenate([hashes[first:end], entries(hashes[pages])])
        assert rank.book.num_usable(HANDLE, rank.space, first, end - first - 1) == 0
        ticket = rank.book.take(HANDLE, rank.space, first, wanted)
        assert ticket is not None
        keys, _ = rank.store._books.table.index.keys(ticket.rows)
        assert keys.tobytes() == wanted.tobytes()
        assert rank.store.arena._pins[ticket.slots].all()
        positions = list(range(first, end))
        num = len(wanted) - len(positions)
        positions += [end - 1] * num if of_states else pages * rank.layers.num_groups
        where = zip(ticket.slots.tolist(), positions, strict=True)
        assert {(slot, page * PAGE) for slot, page in where} <= set(rank.checked)
        assert rank.book.num_promised(HANDLE, rank.space, first) == 0
        rank.store.release(ticket.slots)


def check_last(
    ranks: list[Rank], hashes: Any, limit: int, reaches: bool, *, of_states: bool
) -> None:
    """A prompt's last page is put in place by all ranks or by none."""
    tickets = []
    for rank in ranks:
        rank.book.admit(HANDLE, len(hashes) - 1)
        last = hashes[-1:]
        parts = last if of_states else rank.windows.parts(last)
        tickets.append(rank.book.take_last(HANDLE, parts.tobytes()))
        if tickets[-1] is not None:
            rank.store.release(tickets[-1].slots)
    assert len({ticket is None for ticket in tickets}) == 1
    assert reaches or tickets[0] is None
    assert limit < len(hashes) or tickets[0] is None
