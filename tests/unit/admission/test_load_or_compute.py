"""The cost model at work on a real page store, with a disk whose speed is set."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute
from sglang_ext.admission.solo import Solo
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix, Shortfall, WaitingRequest
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.policy.cost_model import CostModel, LoadChoice
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, PageStoreConfig, Plan
from sglang_ext.tiers.store.types import Hashes, StoreCounters
from testkit.slow.disk import ThrottledIO

SLOT = 64 << 10
KV = SLOT - 4096
P = 64
DIGEST = hashlib.sha256(b"namespace").digest()
NONE = np.empty((0, 32), np.uint8)
DEADLINE_S = 300.0


def pages(name: str, count: int) -> Hashes:
    rows = [hashlib.sha256(f"{name}{n}".encode()).digest() for n in range(count)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)


class Rig:
    """A store with a throttled disk, and the decisions about it."""

    def __init__(self, folder: Path, placement: PolicyConfig | None = None) -> None:
        self.speed = folder / "speed"
        config = DiskConfig(folder / "disk", 64 << 20, 0, segment_bytes=1 << 20, direct_io="off")
        disk = DiskTier(config, io=ThrottledIO(self.speed))
        self.cost = CostModel(unmeasured_wait_s=0.2)
        feeds = CostFeeds(self.cost, KV, StoreCounters())
        store_config = PageStoreConfig(placement=placement)
        arena = HostArena(64, SLOT)
        self.store = PageStore(
            arena, PageIndex(1024), disk, store_config, on_read=feeds.on_read,
            counters=feeds.counters,
        )  # fmt: skip
        self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)
        self.judge = LoadOrCompute(self.store, self.cost, page_tokens=P, kv_bytes_per_page=KV)
        self.room = WaitingRoom(
            self.store, prefetch_policy="cost", prefetch_timeout_ms=200, decider=self.judge,
            dram=DramChoice(self.cost, self.store.counters, page_tokens=P, kv_bytes_per_page=KV),
        )  # fmt: skip

    def save(self, hashes: Hashes) -> None:
        assert self.compute(hashes) == len(hashes)

    def compute(self, hashes: Hashes) -> int:
        """Offers pages as the device computed them; returns how many the store took."""
        ticket = self.store.begin_save(self.space, hashes, NONE)
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            target = self.store.arena.slots[slot]
            meta = RecordMeta(hashes[page].tobytes(), self.space.digest, b"", 0, P, "pre")
            write_meta(target, meta, KV)
        self.store.finish_save(ticket, ok=True)
        return len(ticket.pages)

    def teach_prefill(self, token_s: float) -> None:
        for tokens in (100, 1000, 5000) * 2:
            self.cost.note_prefill([(tokens, 0)], token_s * tokens)

    def teach_loads(self, page_s: float) -> None:
        for num_pages in (1, 4, 16, 4, 1) * 2:
            self.cost.note_load(num_pages * KV, num_pages * page_s)

    def teach_disk(self, mb_s: float) -> None:
        for power in (16, 18, 20, 22) * 2:
            self.cost.note_read(1 << power, (1 << power) / (1e6 * mb_s))

    def prefix(self, name: str, count: int, new_tokens: int = 10) -> ReusablePrefix:
        return ReusablePrefix(self.space, pages(name, count), 0, 255, None, count * P + new_tokens)

    def request(self, name: str, count: int) -> WaitingRequest:
        found = self.store.locate_prefix(self.space, pages(name, count))
        return WaitingRequest(name, 0, self.prefix(name, count), found, 0)

    def admits(self, handle: str) -> bool:
        """One step of the scheduler, with one request in its queue."""
        self.room.step([handle])
        return self.room.may_admit(handle)

    def ready(self, name: str, count: int) -> int:
        return self.store.ready_prefix(self.space, pages(name, count))

    def count(self, name: str) -> int:
        return self.store.counters.snapshot().get(name, 0)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Its disk holds prefixes a to l of 16 pages each; DRAM is empty."""
    first = Rig(tmp_path)
    for name in "abcdefghijkl":
        first.save(pages(name, 16))
        until(lambda: not first.store.stats()["spill_queue_pages"])
        assert first.store.flush(DEADLINE_S) == 0
    first.store.close(DEADLINE_S)
    second = Rig(tmp_path)
    assert second.ready("a", 16) == 0
    yield second
    second.speed.unlink(missing_ok=True)
    second.room.leave_all()
    second.store.close(DEADLINE_S)


def test_a_fast_disk_is_waited_for(rig: Rig) -> None:
    rig.teach_prefill(1e-2)  # 10 s for the prefix
    rig.room.enter("x", rig.prefix("a", 16))
    until(lambda: rig.admits("x"))
    assert rig.ready("a", 16) == 16
    assert rig.count("cost_load") == 1
    assert rig.count("cost_gave_up") == 0
    until(lambda: rig.cost.state()["disk_samples"] == 1)  # noted after the pages are there


def test_a_slow_disk_is_not_waited_for_and_not_loaded_from(rig: Rig) -> None:
    rig.teach_prefill(1e-6)
    rig.teach_disk(0.1)
    rig.speed.write_text("0.001")
    rig.room.enter("x", rig.prefix("a", 16))
    assert rig.admits("x")
    rig.room.leave("x")
    assert rig.count("cost_recompute") == 1
    # A probe of one page, which nobody waits for.
    assert rig.count("cost_probes") == 1
    assert rig.store.disk_queue().bytes_ahead == SLOT


def test_what_is_in_dram_is_used_though_the_rest_is_recomputed(rig: Rig) -> None:
    plan = rig.store.plan(rig.space, pages("a", 4))
    assert plan is not None
    until(lambda: plan.done)
    rig.teach_prefill(1e-6)
    for _ in range(3):
        rig.teach_disk(0.1)
    rig.speed.write_text("0.1")
    rig.room.enter("x", rig.prefix("a", 16))
    assert rig.admits("x")
    assert rig.ready("a", 16) == 4
    assert rig.count("cost_recompute") == 1
    rig.room.leave("x")
    rig.store.cancel_plan(plan)


def test_follows_a_disk_that_becomes_fast_within_five_requests(rig: Rig) -> None:
    rig.teach_prefill(1e-2)  # 10 s for the prefix; the disk takes 1,000 s, then next to nothing
    rig.teach_disk(0.001)
    choices = []
    for name in "abcdefg":
        samples = rig.cost.state()["disk_samples"]
        request = rig.request(name, 16)
        choices.append(rig.judge.enter(request).choice)
        num = rig.judge.num_pages(request)
        plan = rig.store.plan(rig.space, pages(name, num)) if num else None
        rig.judge.planned(request)
        until(lambda: rig.cost.state()["disk_samples"] > samples)  # noqa: B023
        if plan is not None:
            rig.store.cancel_plan(plan)
        rig.judge.leave(request)
    assert choices[0] is LoadChoice.RECOMPUTE
    assert set(choices[5:]) == {LoadChoice.LOAD}


def test_a_disk_that_crawls_is_given_up_by_the_time_its_pages_are_worth(rig: Rig) -> None:
    rig.teach_prefill(1e-4)
    rig.teach_disk(1000)
    rig.speed.write_text("0.001")
    rig.room.enter("x", rig.prefix("a", 16))
    assert not rig.admits("x")
    until(lambda: rig.admits("x"))
    assert rig.count("cost_gave_up") == 1
    assert rig.ready("a", 16) == 0

    def choice_of_next() -> LoadChoice:
        request = rig.request("b", 16)
        choice = rig.judge.enter(request).choice
        rig.judge.leave(request)
        return choice

    # The next one sees for how long nothing has arrived, which its pages are worth for a while.
    until(lambda: choice_of_next() is LoadChoice.RECOMPUTE)


def test_a_place_behind_others_is_time_for_a_part(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.judge, "_clock", lambda: 0.0)  # no time passes between two lines
    rig.teach_prefill(1e-3)
    rig.teach_disk(0.5)
    first, second = rig.request("nowhere", 10), rig.request("a", 16)
    assert rig.judge.enter(first).choice is LoadChoice.NONE
    # 0.65 s of prefill before it: 0.3 MB come meanwhile, and 2 s would be needed for all.
    verdict = rig.judge.enter(second)
    assert verdict.choice is LoadChoice.PARTIAL
    assert verdict.pages == pytest.approx(0.65 * 0.5e6 / SLOT, abs=1)
    rig.judge.leave(first)
    rig.judge.leave(second)
    assert rig.judge.enter(rig.request("b", 16)).choice is LoadChoice.RECOMPUTE


def test_a_prefix_that_is_read_in_a_little_more_than_its_time_is_read_for_others_sake(
    rig: Rig,
) -> None:
    """Half a second of prefill, three quarters of reading: twice the former is more."""
    decoding = [False]
    judge = LoadOrCompute(
        rig.store, rig.cost, page_tokens=P, kv_bytes_per_page=KV,
        is_decoding=lambda: decoding[0], clock=lambda: 0.0,
    )  # fmt: skip
    rig.teach_prefill(5e-4)
    rig.teach_disk(16 * SLOT / 0.75e6)

    def choice(name: str) -> LoadChoice:
        request = rig.request(name, 16)
        found = judge.enter(request).choice
        judge.leave(request)
        return found

    assert choice("a") is LoadChoice.RECOMPUTE
    decoding[0] = True
    assert choice("a") is LoadChoice.LOAD
    decoding[0] = False
    first = rig.request("nowhere", 0)
    judge.enter(first)
    assert choice("a") is LoadChoice.LOAD
    judge.leave(first)
    assert choice("a") is LoadChoice.RECOMPUTE


def test_a_request_waits_so_much_longer_while_there_are_others(rig: Rig) -> None:
    now_s = [0.0]
    judge = LoadOrCompute(
        rig.store, rig.cost, page_tokens=P, kv_bytes_per_page=KV, clock=lambda: now_s[0]
    )
    rig.teach_prefill(5e-4)  # half a second for the prefix
    rig.teach_disk(10.0)
    rig.speed.write_text("0.001")  # nothing comes
    request, other = rig.request("a", 16), rig.request("nowhere", 0)
    judge.enter(request)
    judge.enter(other)
    assert judge.should_hold(request)
    now_s[0] = 0.9
    assert judge.should_hold(request)
    judge.leave(other)
    now_s[0] = 0.95
    assert not judge.should_hold(request)
    judge.leave(request)


def test_nothing_known_means_load_and_a_bounded_wait(rig: Rig) -> None:
    rig.speed.write_text("0.001")
    rig.room.enter("x", rig.prefix("a", 16))
    assert rig.count("cost_load") == 1
    started_s = time.monotonic()
    until(lambda: rig.admits("x"))
    assert time.monotonic() - started_s >= 0.2


def test_requests_that_leave_leave_nothing(rig: Rig) -> None:
    rig.teach_prefill(1e-3)
    rig.teach_disk(0.1)
    for name in "abcd":
        rig.room.enter(name, rig.prefix(name, 16))
    rig.room.enter("a", rig.prefix("e", 16))  # again, with another prefix
    for name in "abcdz":
        rig.room.leave(name)
    assert rig.judge.num_waiting == 0
    assert rig.judge._ahead_s == 0.0
    rig.room.leave_all()
    assert rig.store.wait_idle(DEADLINE_S)
    until(lambda: not rig.store.arena._pins.any())
    rig.store.check()


def test_what_several_ranks_would_use_again_is_judged_though_the_part_was_all_there(
    rig: Rig,
) -> None:
    """Of the part nothing had to be read; of the whole most has to, from a disk that crawls now."""
    plan = rig.store.plan(rig.space, pages("a", 4))
    assert plan is not None
    until(lambda: plan.done)
    rig.teach_prefill(1e-4)
    rig.teach_disk(1000)
    request = rig.request("a", 16)
    rig.judge.enter(request)
    request.limit = 4
    assert rig.judge.num_pages(request) == 4
    for _ in range(10):
        rig.teach_disk(0.1)
    request.limit = 16
    assert rig.judge.num_pages(request) == 4
    rig.judge.leave(request)
    rig.store.cancel_plan(plan)


def test_room_is_waited_for_as_reads_are(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of sixteen pages are there; the others take 0.08 s to read, and 0.77 s to compute."""
    left_bytes = 1 << 20
    monkeypatch.setattr(rig.store, "bytes_until", lambda mark: left_bytes if mark else 0)
    rig.teach_prefill(1e-3)
    rig.teach_disk(10)
    request = rig.request("a", 16)
    rig.judge.enter(request)
    request.plan = Plan(np.arange(4), 0, num_stored=16)

    def holds() -> bool:
        assert request.estimate is not None
        request.estimate.asked_at_s = -math.inf
        return rig.judge.should_hold(request)

    assert not holds()  # nothing says that its plan may become longer
    request.awaits_room = True
    assert holds()  # whatever room takes: it was never measured
    for _ in range(5):
        rig.cost.note_write(1 << 20, 0.1)
    request.room_mark = 1
    assert holds()
    for _ in range(5):
        rig.cost.note_write(1 << 20, 2.0)
    assert not holds()
    left_bytes = 0  # it is all written: the next attempt may have the room
    assert holds()
    request.awaits_room = False
    assert not holds()
    request.plan = None
    rig.judge.leave(request)


def test_a_page_that_is_missed_in_the_middle_is_worth_all_behind_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page is to come: 0.13 s, where a page takes 0.06 s to compute and all of them 1 s."""
    monkeypatch.setattr(rig.judge, "_moving_s", lambda *_: 0.13)
    rig.teach_prefill(1e-3)
    for num_leading, holds in ((15, False), (2, True)):
        monkeypatch.setattr(
            rig.store, "ready_prefix", lambda _, pages, __, n=num_leading: min(n, len(pages))
        )
        request = rig.request("a", 16)
        rig.judge.enter(request)
        request.plan = Plan(np.arange(16), 1)
        assert rig.judge.should_hold(request) is holds
        request.plan = None
        rig.judge.leave(request)


def test_a_plan_is_made_without_a_probe_beside_it(rig: Rig) -> None:
    """It may pin seven eighths of DRAM where it is alone, and half of it where it is not."""
    rig.teach_prefill(1e-6)
    rig.teach_disk(0.1)
    rig.speed.write_text("0.001")
    first, second = rig.request("a", 16), rig.request("nowhere", 16)
    for request in (first, second):
        rig.judge.enter(request)
    assert rig.judge.num_pages(first) == 0
    assert rig.judge._probe is None
    rig.judge.planned(first)
    assert rig.judge._probe is not None
    assert rig.judge.num_pages(first) == 0  # no plan is made, so the probe goes on
    assert rig.judge._probe is not None
    assert rig.judge.num_pages(second) == 16
    assert rig.judge._probe is None
    first.plan = Plan(np.arange(0), 0, num_stored=16)  # short of room: a probe would take some
    rig.judge.planned(first)
    assert rig.judge._probe is None
    first.plan = None
    for request in (first, second):
        rig.judge.leave(request)


def test_a_probe_that_is_done_pins_nothing_once_nobody_waits(rig: Rig) -> None:
    """Nothing else would give its page back before the next request that waits."""
    rig.teach_prefill(1e-6)
    rig.teach_disk(0.1)
    rig.speed.write_text("0.001")
    rig.room.enter("x", rig.prefix("a", 16))
    assert rig.admits("x")
    rig.room.leave("x", admitted=True)
    rig.room.step([])
    assert rig.judge._probe is not None  # its read is not over: the disk is to be measured
    samples = rig.cost.state()["disk_samples"]
    rig.speed.unlink()

    def is_given_back() -> bool:
        rig.room.step([])
        return rig.judge._probe is None

    until(is_given_back)
    assert rig.store.stats()["planned_pages"] == 0
    until(lambda: rig.cost.state()["disk_samples"] > samples)


def test_a_queue_that_waits_for_answers_gives_time_to_read(rig: Rig) -> None:
    """By the prefills before it its turn is past; by how the queue moved it is yet to come."""
    now_s = [0.0]
    judge = LoadOrCompute(
        rig.store, rig.cost, page_tokens=P, kv_bytes_per_page=KV, clock=lambda: now_s[0]
    )
    rig.teach_prefill(1e-5)  # 10 ms for the prefix
    rig.teach_disk(1.0)  # a second
    requests = [rig.request(name, 16) for name in "abcdefgh"]
    for request in requests:
        assert judge.enter(request).pages <= 1
    assert judge.num_pages(requests[7]) <= 1
    for request in requests[:5]:
        now_s[0] += 10.0
        judge.leave(request, admitted=True)
    assert judge.num_pages(requests[7]) == 16
    now_s[0] += 29.5  # three intervals, and half a second before its turn
    assert 0 < judge.num_pages(requests[7]) < 16
    now_s[0] += 5.0
    assert judge.num_pages(requests[7]) == 0
    for request in requests[5:]:
        judge.leave(request)
    assert judge.enter(requests[0]).choice is LoadChoice.RECOMPUTE  # nobody waited meanwhile
    judge.leave(requests[0])


@pytest.mark.parametrize(("disk_factor", "num_returned"), [(2.0, 0), (0.5, 16)])
def test_what_is_computed_beside_a_slow_disk_is_in_dram_the_next_time(
    rig: Rig, disk_factor: float, num_returned: int
) -> None:
    """Only if the disk takes longer than computing: else it would be read the next time."""
    token_s = 1e-3
    rig.teach_prefill(token_s)
    rig.teach_disk(disk_factor * KV / (P * token_s) / 1e6)
    rig.compute(pages("a", 16))
    assert rig.ready("a", 16) == rig.count("returned_pages") == num_returned


@pytest.mark.parametrize("is_asked_again", [True, False])
def test_a_wait_for_a_place_is_no_wait_for_pages(rig: Rig, is_asked_again: bool) -> None:
    """Each is held for a second at most, and runs ten seconds later, as the batch is full."""
    now_s = [0.0]
    judge = LoadOrCompute(
        rig.store, rig.cost, page_tokens=P, kv_bytes_per_page=KV, clock=lambda: now_s[0]
    )
    rig.teach_prefill(5e-4)  # half a second for the prefix, which counts twice beside others
    rig.teach_disk(10.0)  # less than that
    requests = [rig.request(name, 16) for name in "abcdefgh"]
    for request in requests:
        judge.enter(request)
    for request in requests[:5]:
        assert judge.should_hold(request)
        now_s[0] += 0.1
        if is_asked_again:
            request.let_go_s = now_s[0]
        now_s[0] += 9.9
        judge.leave(request, admitted=True)
    left_s = judge._pace.turn_in_s(0, now_s[0])
    # Who was not asked again may have been held for all of that second.
    assert left_s == pytest.approx(9.9 if is_asked_again else 9.0, abs=0.05)
    for request in requests[5:]:
        judge.leave(request)


# ---- pages in DRAM -------------------------------------------------------------------------------


def solo(rig: Rig) -> Solo:
    """What decides alone of what the rig's requests load of DRAM."""
    return Solo(rig.store, rig.room, list, P, lambda: None, lambda reqs: [])


def test_of_dram_is_loaded_what_is_worth_it_and_the_rest_counts_as_too_slow(rig: Rig) -> None:
    admission, hashes = solo(rig), pages("m", 16)
    rig.save(hashes)
    rig.teach_prefill(1e-3)  # a page's worth of tokens: 64 ms
    prefix = rig.prefix("m", 16)

    def loadable() -> int:
        return admission.num_loadable("x", rig.space, 0, hashes, 255)

    admission.enter("x", prefix, None)
    assert loadable() == 16  # no load was measured
    admission.leave("x")
    rig.teach_loads(1.0)
    admission.enter("x", prefix, None)
    num = loadable()
    assert num < 16
    rig.teach_loads(1e-6)
    assert loadable() == num  # decided: attempts to admit it do not differ
    waiting = rig.room.find("x")
    assert waiting is not None
    admission.release("x")
    assert rig.count("cost_dram_left_requests") == 1
    assert rig.count("cost_dram_left_pages") == 16 - num
    assert waiting.shortfall() is Shortfall.TOO_SLOW
    admission.enter("x", prefix, None)
    assert loadable() == 16
    admission.release("x")
    assert rig.count("cost_dram_left_requests") == 1


def test_what_nobody_waits_for_is_loaded_as_before(rig: Rig) -> None:
    """SGLang matches a request before it enters the queue."""
    admission, hashes = solo(rig), pages("m", 16)
    rig.save(hashes)
    rig.teach_prefill(1e-6)
    rig.teach_loads(1.0)
    assert admission.num_loadable("x", rig.space, 0, hashes, 255) == 16
    admission.enter("x", rig.prefix("m", 16), None)
    assert admission.num_loadable("x", rig.space, 0, hashes, 255) == 0
    admission.leave("x")
    assert rig.count("cost_dram_left_requests") == 0  # it did not run
