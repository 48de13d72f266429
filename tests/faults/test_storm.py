"""Random faults under the stores, without a server; `python -m bench faults` injects many more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.faults.stalls import MeteredLock, MeteredRLock, StallMeter, metered_wait
from bench.faults.store.kills import kill_stores
from bench.faults.store.power import cut_power
from bench.faults.store.remote_storm import storm_folder, storm_redis
from bench.faults.store.storm import storm_disk, storm_memory
from bench.faults.tally import Tallies
from sglang_ext.device.load_counter import LoadCounter
from testkit.remote.redis_server import redis_binary

SEED = 20
Storm = Callable[[Path, int, int, Tallies], None]


@pytest.mark.parametrize(
    ("storm", "wanted"),
    [(storm_disk, 60), (storm_memory, 30), (cut_power, 8), (kill_stores, 2), (storm_folder, 40)],
)
def test_random_faults_do_no_harm(storm: Storm, wanted: int, tmp_path: Path) -> None:
    assert_harmless(storm, wanted, tmp_path)


@pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")
def test_a_bad_network_before_redis_does_no_harm(tmp_path: Path) -> None:
    assert_harmless(storm_redis, 30, tmp_path)


def assert_harmless(storm: Storm, wanted: int, folder: Path) -> None:
    tallies = Tallies()
    storm(folder, wanted, SEED, tallies)
    assert sum(tally.injected for tally in tallies.by_kind.values()) >= wanted
    assert {kind: tally for kind, tally in tallies.by_kind.items() if not tally.harmless} == {}


# ---- the meter of the scheduler's stalls ---------------------------------------------------------


class Holder:
    """Another thread that does I/O for as long as the test likes, with a lock in its hands."""

    def __init__(self, meter: StallMeter, lock: MeteredLock | None) -> None:
        self.is_in, self.may_leave = threading.Event(), threading.Event()
        self._meter, self._lock = meter, lock
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.is_in.wait()

    def _run(self) -> None:
        if self._lock is not None:
            self._lock.acquire()
        with self._meter.io("a slow disk"):
            self.is_in.set()
            self.may_leave.wait()
            time.sleep(0.15)
        if self._lock is not None:
            self._lock.release()


class Awaited:
    """A lock that says when somebody waits for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.on_wait: Callable[[], None] = lambda: None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of the lock."""
        if blocking:
            self.on_wait()
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        """As of the lock."""
        self._lock.release()


@pytest.mark.parametrize("kind", [MeteredLock, MeteredRLock])
def test_a_lock_held_over_io_is_a_stall(kind: type[MeteredLock]) -> None:
    meter = StallMeter(threading.get_ident())
    inner = Awaited(threading.RLock() if kind is MeteredRLock else threading.Lock())
    lock = kind(meter, inner, "here")
    holder = Holder(meter, lock)
    inner.on_wait = holder.may_leave.set
    with lock:
        pass
    holder.thread.join()
    assert meter.report()["max_ms"] >= 100.0


def test_a_lock_held_without_io_is_none() -> None:
    meter = StallMeter(threading.get_ident())
    holder = Holder(meter, None)
    with MeteredLock(meter, threading.Lock(), "here"):
        holder.may_leave.set()
        holder.thread.join()
    assert meter.report()["num"] == 0


@pytest.mark.parametrize("kind", [MeteredLock, MeteredRLock])
def test_a_lock_that_a_waiting_thread_gave_back_is_not_held_over_io(
    kind: type[MeteredLock],
) -> None:
    meter = StallMeter(threading.get_ident())
    lock = kind(meter, threading.RLock() if kind is MeteredRLock else threading.Lock(), "here")
    condition: Any = threading.Condition(lock)  # type: ignore[arg-type]
    wait = metered_wait(meter, threading.Condition.wait)
    waits, holds, ended = threading.Event(), threading.Event(), threading.Event()

    def waiter() -> None:
        with condition:
            waits.set()
            while not ended.is_set():
                wait(condition)

    def holder() -> None:
        with lock:
            holds.set()
            time.sleep(0.15)

    threads = [threading.Thread(target=waiter), threading.Thread(target=holder)]
    threads[0].start()
    waits.wait()
    threads[1].start()
    holds.wait()
    with condition:
        ended.set()
        condition.notify_all()
    for thread in threads:
        thread.join()
    assert meter.report()["num"] == 0


@pytest.mark.parametrize("copies", [True, False])
def test_a_wait_for_a_layer_is_a_stall_unless_it_is_being_copied(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = StallMeter(threading.get_ident())
    monkeypatch.setattr(threading.Condition, "wait", metered_wait(meter, threading.Condition.wait))
    counter, measured = LoadCounter(1), threading.Event()
    index = counter.update_producer()

    def load() -> None:
        while not counter._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        begin_s = time.thread_time()
        while copies and time.thread_time() - begin_s < 0.2:
            pass
        time.sleep(0 if copies else 0.2)
        counter.complete(index)
        measured.wait()

    thread = threading.Thread(target=load, name="hier-kv-load")
    thread.start()
    counter.wait_until(0)
    measured.set()
    thread.join()
    assert (meter.report()["max_ms"] < 100.0) == copies


def test_copying_threads_may_begin_and_end_while_the_scheduler_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = StallMeter(threading.get_ident())
    monkeypatch.setattr(threading.Condition, "wait", metered_wait(meter, threading.Condition.wait))
    may_end, have_ended = threading.Event(), threading.Event()
    names = {"__name__": "sglang_ext.somewhere"}  # the plugin is among the callers
    copies = [
        threading.Thread(target=may_end.wait, name=f"hier-kv-load-{i}", daemon=True)
        for i in range(8)
    ]
    for thread in copies:
        eval("thread.start()", names | {"thread": thread})

    def end() -> None:
        may_end.set()
        for thread in copies:
            thread.join()
        have_ended.set()

    threading.Thread(target=end).start()
    eval("have_ended.wait()", names | {"have_ended": have_ended})
    assert meter.report()["num"] > 0


@pytest.mark.parametrize(
    ("module", "function", "num"),
    [
        ("sglang_ext.assembly.factory", "build", 0),
        ("sglang_ext.seam.hooks.loaded_models", "_around_loading", 0),
        ("sglang_ext.seam.cache", "build", 1),
    ],
)
def test_a_start_holds_up_nobody(module: str, function: str, num: int) -> None:
    """Kernels are compiled then, and kept on disk; weights are read by threads of SGLang."""
    meter = StallMeter(threading.get_ident())

    def stall() -> None:
        with meter.io("os.replace"):
            time.sleep(0.001)

    inner = {"__name__": "sglang_ext.kernels.rope.api", "stall": stall}
    exec("def call(): stall()", inner)
    outer = {"__name__": module, "call": inner["call"]}
    exec(f"def {function}(): call()", outer)
    eval(f"{function}()", outer)
    assert meter.report()["num"] == num
