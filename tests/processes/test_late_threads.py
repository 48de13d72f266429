"""Late threads, by which tests are found that depend on where threads put things."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from testkit.server import ROOT
from testkit.slow.threads import Delays, LateLock, Lateness

LATENESS = Lateness(7, 2.0)


def slept(
    do: Callable[[Delays], None], thread_name: str, lateness: Lateness = LATENESS
) -> list[float]:
    """The delays of a thread with this name."""
    found: list[float] = []
    delays = Delays(lateness, found.append)
    thread = threading.Thread(target=do, args=(delays,), name=thread_name)
    thread.start()
    thread.join()
    return found


def take_jobs(delays: Delays) -> None:
    """What a thread does that is woken for a job a hundred times."""
    changed = threading.Condition(LateLock(delays, threading.RLock()))  # type: ignore[arg-type]
    for _ in range(100):
        with changed:
            changed.wait(0)


def test_the_plugins_threads_are_late_by_their_seed() -> None:
    found = slept(take_jobs, "hier-kv-spill")
    assert len(found) > 30
    assert [delay_s for delay_s in found if delay_s >= 1.0]
    assert all(0.02 <= delay_s <= 0.3 or 1.0 <= delay_s <= 2.0 for delay_s in found)
    assert slept(take_jobs, "hier-kv-spill") == found
    assert slept(take_jobs, "hier-kv-save") != found
    assert slept(take_jobs, "hier-kv-spill", Lateness(8, 2.0)) != found


@pytest.mark.parametrize("name", ["MainThread", "Thread-1", "hier-kv-load-v_0"])
def test_other_threads_are_on_time(name: str) -> None:
    assert slept(take_jobs, name) == []


def test_a_thread_that_holds_a_lock_is_on_time() -> None:
    def hold(delays: Delays) -> None:
        with LateLock(delays, threading.Lock()):
            take_jobs(delays)

    assert len(slept(hold, "hier-kv-spill")) <= 1  # behind the outer one


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_late_lock_excludes_and_a_condition_on_it_wakes(make: Callable[[], Any]) -> None:
    lock = LateLock(Delays(LATENESS, lambda _: None), make())
    changed = threading.Condition(lock)  # type: ignore[arg-type]
    done: list[int] = []

    def wait_for_it() -> None:
        with changed:
            changed.wait_for(lambda: done, 300)
            done.append(2)

    thread = threading.Thread(target=wait_for_it, name="hier-kv-spill")
    thread.start()
    with changed:
        done.append(1)
        changed.notify_all()
    thread.join(300)
    assert done == [1, 2]
    with lock:
        other = threading.Thread(target=lambda: done.append(lock.acquire(False)))
        other.start()
        other.join()
    assert done == [1, 2, False]


@pytest.mark.parametrize("text", ["", "1", "1:0", "x:20", "1:-2", "1:2000:3"])
def test_a_lateness_is_a_seed_and_milliseconds(text: str) -> None:
    with pytest.raises(ValueError, match="1:2000"):
        Lateness.of(text)


LOCKS = """
import queue, threading
import testkit.slow
from testkit.slow.threads import LateLock, late_threads_if_asked
before = threading.Lock, threading.RLock, threading.Condition.__init__, queue.SimpleQueue
late_threads_if_asked()
after = threading.Lock, threading.RLock, threading.Condition.__init__, queue.SimpleQueue
from sglang_ext.tiers.store.events import EventLog
print(before == after, isinstance(EventLog("")._changed._lock, LateLock),
      isinstance(threading.Lock(), LateLock))
"""


@pytest.mark.parametrize(
    ("asked", "found"), [("", "True False False"), ("1:1", "False True False")]
)
def test_nothing_is_replaced_unless_asked_for(asked: str, found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKS],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HIER_KV_TEST_LATE_THREADS": asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == found
