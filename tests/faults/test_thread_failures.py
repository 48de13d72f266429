"""An error that nobody expected, in each thread: its job ends as failed, and the next one goes on.

What is raised comes from what the thread calls: a callback, the disk, the store's client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.load_path import Landing
from sglang_ext.device.load_thread import LoadThread
from sglang_ext.device.ports.cuda import CudaPort
from sglang_ext.device.ports.host import HostPort
from sglang_ext.device.save_thread import SaveThread
from sglang_ext.device.transfers import LoadJob, Place
from sglang_ext.tiers.disk.counters import Counters
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.remote.base import Deadline
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.remote.guard import Guard
from sglang_ext.tiers.store import executor
from sglang_ext.tiers.store.executor import Job, Threads, Work
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from sglang_ext.tiers.store.types import StoreCounters
from testkit.simulated.cuda import Cuda, HappenedEvent
from tests.tiers.remote.remote_cases import make_items, open_store, until
from tests.tiers.remote.test_pages import Host
from tests.unit.store.store_rig import Make, Rig, pages, rigs

WAIT_S = 300.0
ERRORS = [MemoryError(), RuntimeError("injected")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


class Once:
    """Raises at its first calls, then does what it stands for."""

    def __init__(self, error: BaseException, call: Callable[..., Any], times: int = 1) -> None:
        self.error, self.call, self.left = error, call, times
        self.num_calls = 0

    def __call__(self, *values: Any, **named: Any) -> Any:
        self.num_calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return self.call(*values, **named)


def nothing(*_: Any) -> None:
    pass


# ---- loads ----


class Loads:
    """A load thread over a real store; its way to the device says of each layer that it is there.

    Somebody else pins the pages, too, all the time.
    """

    def __init__(self, rig: Rig, port: Any = None) -> None:
        self.rig, self.counter = rig, LoadCounter(2)
        self.port = port or HostPort()
        self.hashes = pages("loaded", 2)
        rig.save(self.hashes)
        rig.settle()
        self.other = rig.store.pin_ready(rig.space, self.hashes)
        path: Any = SimpleNamespace(queue=self._queue, behind_queued=lambda: None)
        self.path = path
        self.thread = LoadThread(rig.store, [], path, self.port, self.counter)

    def _queue(self, parts: Any, fence: Any, on_layer: Callable[[Any], None]) -> Landing:
        first = self.port.record(None)
        for _ in range(self.counter.num_layers):
            on_layer(None)
        return Landing(self.port.record(None), [(first, self.port.record(None))])

    def load(self) -> bool:
        """Whether a batch of two requests landed."""
        index, store, space = self.counter.update_producer(), self.rig.store, self.rig.space
        jobs = []
        for row in (self.hashes[:1], self.hashes[1:]):
            ticket = store.pin_ready(space, row)
            assert ticket is not None
            live = store.gate.load(ticket, space)
            assert live is not None
            jobs.append(LoadJob(live, torch.zeros(1), 0))
        self.thread.start(index, jobs, None)  # type: ignore[arg-type]
        ended: list[bool] = []
        waiting = threading.Thread(
            target=lambda: ended.append(self.counter.finish(index)[0]), daemon=True
        )
        waiting.start()
        waiting.join(WAIT_S)
        assert ended, "the scheduler waits for ever"
        return ended[0]

    def close(self) -> None:
        """Each pin was given back once: the other one's are still there."""
        self.thread.close()
        self.port.close()
        assert self.other is not None
        assert self.rig.arena._pins[self.other.slots].tolist() == [1, 1]
        self.rig.store.release(self.other.slots)


@pytest.fixture(params=["CPU", "CUDA"])
def loads(request: pytest.FixtureRequest, make: Make) -> Iterator[Loads]:
    port = None
    if request.param == "CUDA":
        patch = request.getfixturevalue("monkeypatch")
        patch.setattr(
            "sglang_ext.device.ports.cuda.pinned", lambda n: torch.empty(n, dtype=torch.int64)
        )
        port = CudaPort(torch.device("cpu"), Cuda(event=HappenedEvent))
        port.seconds_between = lambda *_: 0.0  # type: ignore[method-assign]
    made = Loads(make(disk=False), port)
    yield made
    made.close()


@pytest.mark.parametrize("error", ERRORS)
def test_what_follows_a_load_fails(loads: Loads, error: Exception) -> None:
    on_load = loads.thread._on_load = Once(error, nothing)
    assert [loads.load() for _ in range(3)] == [True] * 3
    assert until(lambda: on_load.num_calls == 3)
    assert loads.rig.count("worker_failures") == 1
    assert not loads.rig.count("load_failures")


@pytest.mark.parametrize("error", ERRORS)
def test_a_load_fails(loads: Loads, error: Exception) -> None:
    loads.path.queue = Once(error, loads.path.queue)
    assert [loads.load() for _ in range(3)] == [False, True, True]
    assert loads.rig.count("load_failures") == 1


def test_the_end_of_a_load_fails(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first of two requests; the pins of the second are given back all the same."""
    end_load = loads.rig.store.end_load
    tickets: list[Any] = []

    def end(ticket: Any) -> None:
        tickets.append(ticket)
        if len(tickets) == 1:
            raise MemoryError
        end_load(ticket)

    monkeypatch.setattr(loads.rig.store, "end_load", end)
    assert [loads.load(), loads.load()] == [True, True]
    assert until(lambda: len(tickets) == 4)
    end_load(tickets[0])


# ---- saves ----


class SaveWay:
    """A way from the device that copies nothing: the pages of a save are refused or stored."""

    def __init__(self) -> None:
        self.enter: Callable[[], None] = nothing
        self.has_rows: Callable[..., bool] = lambda *_: True

    def enter_thread(self) -> None:
        self.enter()

    def saving(self, events: Any) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __getitem__(self, part: int) -> SaveWay:
        return self

    def has_rows_below(self, *rows: Any) -> bool:
        return self.has_rows(*rows)


@pytest.mark.parametrize("error", [*ERRORS, SystemExit()])
def test_a_save_or_what_follows_one_fails(make: Make, error: BaseException) -> None:
    rig, way = make(disk=False), SaveWay()
    way.has_rows, way.enter = Once(error, way.has_rows), Once(error, nothing, times=2)
    parts: Any = way
    saves = SaveThread(rig.store, parts, 1)
    place = Place(rig.space, 0, np.empty((0, 32), np.uint8))
    notes: list[int] = []
    saves.after_saves(Once(error, nothing))
    for number in range(3):
        saves.offer(
            place, pages(f"saved{number}", 1), torch.zeros(1), list, accepts_all=False,
            is_of_windows=True,
        )  # fmt: skip
    saves.after_saves(lambda: notes.append(1))
    assert saves.wait_idle(WAIT_S)
    saves.close()
    assert notes == [1]
    assert [saves.pop_completed() for _ in range(3)] == [False] * 3
    assert rig.count("save_failures") == 2  # the thread had no device, then the copy
    assert rig.count("save_unplaced_pages") == 1
    assert rig.count("worker_failures") == 2
    assert not rig.arena._pins.any()


# ---- between DRAM and disk ----


class Jobs(Work):
    """One job after another, without end."""

    def __init__(self) -> None:
        self.num_run = 0
        self.is_closed = False
        self.ready: Callable[[], bool] = lambda: not self.is_closed
        self.job: Callable[[], Job] = lambda: Job(0, self.run)

    def run(self) -> None:
        self.num_run += 1

    def wait(self) -> bool:
        return self.ready()

    def take(self) -> Job:
        return self.job()


@pytest.mark.parametrize("where", ["ready", "job", "run"])
def test_a_workers_job_fails_again_and_again(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on, each time later; a line of the log a minute says so."""
    monkeypatch.setattr(executor, "failures", FailureLog(logging.getLogger("tests.executor")))
    monkeypatch.setattr(executor, "_LONGEST_PAUSE_S", 0.04)
    pauses: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Event", Event)
    work, counters = Jobs(), StoreCounters()
    setattr(work, where, Once(MemoryError(), getattr(work, where), times=5))
    threads = Threads(counters)
    threads.start("test", work, 1)
    assert until(lambda: work.num_run > 2)
    work.is_closed = True
    threads.join(work)
    assert counters.snapshot() == {"worker_failures": 5}
    assert [pause for pause in pauses if pause] == [0.01, 0.02, 0.04, 0.04, 0.04]
    assert len(caplog.records) == 1


def test_one_whose_work_always_fails_ends_when_it_is_to() -> None:
    work, threads = Jobs(), Threads(StoreCounters())
    work.ready = Once(MemoryError(), nothing, times=1 << 60)
    threads.start("test", work, 2)
    assert until(lambda: work.ready.num_calls > 3)  # type: ignore[attr-defined]
    threads.join(work)


@pytest.mark.parametrize("error", ERRORS)
def test_what_is_told_of_a_read_or_a_write_fails(make: Make, error: Exception) -> None:
    rig = make()
    for meter in (rig.store._read_meter, rig.store._write_meter):
        meter._on_measured = Once(error, nothing, times=2)
    for number in range(3):
        hashes = pages(f"read{number}", 2)
        for saved in (hashes, pages(f"filler{number}", rig.arena.num_slots)):
            rig.save(saved)
            rig.settle()
        assert rig.ready(hashes) == 0
        plan = rig.store.plan(rig.space, hashes)
        assert plan is not None
        rig.wait(plan)
        assert rig.ready(hashes) == 2
        rig.store.cancel_plan(plan)
    rig.settle()
    assert rig.count("worker_failures") == 4


# ---- the remote store ----


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[[str], Host]]:
    (tmp_path / "shared").mkdir()
    made: list[Host] = []

    def build(policy: str = "all") -> Host:
        made.append(Host(f"file://{tmp_path / 'shared'}?size=1GB", policy=policy))
        return made[-1]

    yield build
    for each in made:
        each.store.close(5)


def test_what_is_told_of_a_fetch_or_the_fetch_fails(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, hashes = host(), pages("fetched", 3)
    writer.save(hashes)
    assert writer.uploaded(3)
    reader = host()
    remote: Any = reader.store._remote
    reader.store._fetch_meter._on_measured = Once(MemoryError(), nothing)
    monkeypatch.setattr(remote, "_look_up", Once(RuntimeError("injected"), remote._look_up))
    monkeypatch.setattr(remote._meter, "began", Once(MemoryError(), remote._meter.began, 0))
    assert reader.plan(hashes) is not None  # ends, though nothing came
    assert reader.ready(hashes) == 0
    assert reader.count("remote_failures") == 1
    reader.plan(hashes)
    assert reader.ready(hashes) == 3
    assert reader.count("worker_failures") == 1


def test_a_question_fails(host: Callable[..., Host]) -> None:
    asker, hashes = host(), pages("asked", 2)
    asker.save(hashes)
    assert asker.uploaded(2)
    thread: Any = asker.store._remote._lookup_thread  # type: ignore[union-attr]
    thread._find_sizes = Once(MemoryError(), thread._find_sizes)
    found = []
    for _ in range(2):
        lookup = RemoteLookup(asker.space, hashes, 0, 255)
        assert asker.store.ask_remote(lookup)
        assert until(lambda: lookup.done)  # noqa: B023
        found.append(len(lookup.sizes))
    assert found == [0, 2]


def test_uploads_fail(host: Callable[..., Host]) -> None:
    writer = host()
    uploads: Any = writer.store._remote.uploads  # type: ignore[union-attr]
    uploads._upload = Once(MemoryError(), uploads._upload, times=2)
    for number in range(3):
        writer.save(pages(f"up{number}", 1))
    assert writer.uploaded(1)
    assert writer.count("remote_failures") == 2


def test_pages_that_leave_cannot_be_sent_for_a_while(
    host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log a minute, not one each time."""
    writer = host("on_eviction")
    leaving: Any = writer.store._leaving
    leaving._send_coldest = Once(MemoryError(), leaving._send_coldest, times=5)
    for number in range(12):
        writer.save(pages(f"leaving{number}", 8))
    assert writer.uploaded(1)
    assert writer.count("remote_failures") == 5
    assert sum("could not be uploaded" in each.message for each in caplog.records) <= 1


@pytest.mark.parametrize("error", ERRORS)
def test_a_look_through_the_shared_folder_fails(tmp_path: Path, error: Exception) -> None:
    store = open_store(f"file://{tmp_path}?size=64MB")
    reclaimer: Any = store._engine.reclaimer  # type: ignore[attr-defined]
    assert store.wait_usable(WAIT_S)
    assert until(lambda: reclaimer.num_scans == 1)
    reclaimer._scan = Once(error, reclaimer._scan)
    for num_scans in (2, 3):
        reclaimer.note_written(reclaimer._max_bytes)
        assert until(lambda: reclaimer.num_scans >= num_scans)  # noqa: B023
    assert until(lambda: not reclaimer.is_overfull)
    assert store.put(make_items([1]))
    store.close()


def test_renewing_values_fails() -> None:
    class Engine(SimpleNamespace):
        def ping(self, deadline: Deadline) -> None: ...

    engine: Any = Engine()
    upkeep = Once(MemoryError(), nothing)
    guard = Guard(
        engine, Counters(), BreakerConfig(), max_calls=1, probe_timeout_s=1.0, shown="test",
        upkeep=upkeep, upkeep_every_s=0.001,
    )  # fmt: skip
    assert until(lambda: upkeep.num_calls > 2)
    assert guard.usable
    guard.close()
