"""Runs of a call: every step once and in order, the disk always first, no thread left waiting."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sglang_ext.tiers.disk.workers import IoRun, Workers

NUM_MOVING = 3
PATIENCE_S = 300.0


@contextmanager
def workers(num_threads: int, num_moving: int = NUM_MOVING) -> Iterator[Workers]:
    made = Workers(num_threads, num_moving, "test-disk")
    try:
        yield made
    finally:
        made.stop()


class Log:
    """What was done, in order, and how many runs moved at a time.

    Args:
        num_together: moves wait until so many were under way at a time, once.
    """

    def __init__(self, num_together: int = 0) -> None:
        self.steps: list[tuple[str, int]] = []  # appended by any thread
        self.most_moving = 0
        self._num_together = num_together
        self._moving = 0
        self._changed = threading.Condition()

    def run(self, index: int, *, pause_s: float = 0.0, whole: bool = False) -> IoRun:
        def step(name: str) -> Callable[[], None]:
            return lambda: self.steps.append((name, index))

        def move() -> None:
            with self._changed:
                self._moving += 1
                self.most_moving = max(self.most_moving, self._moving)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self.most_moving >= self._num_together, timeout=PATIENCE_S
                )
            time.sleep(pause_s)
            self.steps.append(("move", index))
            with self._changed:
                self._moving -= 1

        run = IoRun(move, step("prepare"), step("finish"))
        return run.whole() if whole else run

    def of(self, index: int) -> list[str]:
        return [name for name, at in self.steps if at == index]


@pytest.mark.parametrize("num_threads", [0, 1, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_every_run_takes_its_steps_in_order(num_threads: int, whole: bool) -> None:
    log = Log()
    with workers(num_threads) as made:
        made.run([log.run(index, whole=whole) for index in range(40)])
    for index in range(40):
        assert log.of(index) == ["prepare", "move", "finish"]


def test_no_more_runs_move_at_a_time_than_said_of_all_calls_together() -> None:
    log = Log(num_together=NUM_MOVING)
    with workers(6) as made:
        runs = [log.run(index, pause_s=1e-3) for index in range(60)]
        calls = [
            threading.Thread(target=made.run, args=(runs[first : first + 20],))
            for first in (0, 20, 40)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join(PATIENCE_S)
    assert log.most_moving == NUM_MOVING
    assert len(log.steps) == 180


def test_who_has_moved_a_run_moves_the_next_before_it_finishes_one() -> None:
    log = Log()
    with workers(0) as made:
        made.run([IoRun(log.run(index).move, None, log.run(index).finish) for index in range(4)])
    assert [name for name, _ in log.steps] == ["move"] * 4 + ["finish"] * 4


def test_what_others_read_is_finished_while_the_disk_works() -> None:
    has_finished = threading.Event()

    def second() -> None:  # the only mover; whoever is free must finish the first run meanwhile
        assert has_finished.wait(PATIENCE_S)

    with workers(1, num_moving=1) as made:
        made.run([IoRun(lambda: None, None, has_finished.set), IoRun(second, None, lambda: None)])


@pytest.mark.parametrize(
    ("bad", "done"),
    [("prepare", []), ("move", ["prepare"]), ("finish", ["prepare", "move"])],
)
def test_after_an_error_a_run_goes_no_further_and_all_others_end(bad: str, done: list[str]) -> None:
    log = Log()

    def fail() -> None:
        raise OSError(bad)

    good = log.run(5)
    assert good.prepare is not None
    assert good.finish is not None
    steps = {"prepare": good.prepare, "move": good.move, "finish": good.finish, bad: fail}
    failing = IoRun(steps["move"], steps["prepare"], steps["finish"])
    with workers(2) as made:
        with pytest.raises(OSError, match=bad):
            made.run([log.run(0), failing, *(log.run(index, pause_s=1e-3) for index in (1, 2, 3))])
        assert log.of(5) == done
        assert len(log.steps) == 12 + len(done)
        made.run([log.run(9)])  # and the next call is none the worse
        assert log.of(9) == ["prepare", "move", "finish"]


def test_a_caller_does_not_wait_for_the_moves_of_another_call() -> None:
    begun, ends = threading.Semaphore(0), [threading.Event() for _ in range(3)]

    def until(end: threading.Event) -> IoRun:
        def move() -> None:
            begun.release()
            assert end.wait(PATIENCE_S)

        return IoRun(move)

    with workers(1) as made:
        quick = threading.Thread(target=made.run, args=([until(end) for end in ends[:2]],))
        quick.start()  # its caller moves one, the helper the other
        assert all(begun.acquire(timeout=PATIENCE_S) for _ in range(2))
        slow = threading.Thread(target=made.run, args=([until(ends[2])] * 2,))
        slow.start()
        assert begun.acquire(timeout=PATIENCE_S)
        ends[0].set()
        time.sleep(0.1)  # the call that is through with its own now could move one of the other's
        ends[1].set()
        quick.join(PATIENCE_S)
        is_kept = quick.is_alive()
        ends[2].set()
        slow.join(PATIENCE_S)
        assert not is_kept


def test_threads_stop_when_a_call_under_way_has_ended() -> None:
    log = Log()
    made = Workers(2, NUM_MOVING, "test-disk")
    runs = [log.run(index, pause_s=2e-3) for index in range(30)]
    call = threading.Thread(target=made.run, args=(runs,))
    call.start()
    time.sleep(0.01)
    made.stop()
    call.join(PATIENCE_S)
    assert not call.is_alive()
    assert len(log.steps) == 90


def test_nobody_is_left_waiting_whoever_leaves_first() -> None:
    """Callers that end at any moment pass on what they were woken for."""
    rng = random.Random(3)
    for num_threads, num_moving in ((0, 1), (1, 1), (1, 2), (3, 3)):
        with workers(num_threads, num_moving) as made:

            def call(made: Workers = made) -> None:
                for _ in range(150):
                    log = Log()
                    num = rng.randrange(1, 4)
                    made.run([log.run(at, pause_s=rng.choice((0, 2e-5))) for at in range(num)])
                    assert len(log.steps) == 3 * num

            callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(PATIENCE_S)
            assert not any(caller.is_alive() for caller in callers)


def test_no_runs_are_nothing() -> None:
    with workers(1) as made:
        made.run([])
