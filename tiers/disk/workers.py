"""Threads that share the runs of a call with the thread that made it.

A run is prepared, moved and finished: before a write its checksums are computed, after a read they
are checked. That takes CPU while other runs are on their way, so a few threads keep the disk busy.
A thread whose bytes have moved gives the disk the next run before anything else: another one would
have to be woken for it, and the disk would wait. The caller works too; with no helper it does all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Task = Callable[[], None]


@dataclass(frozen=True, slots=True)
class IoRun:
    """Neighbouring records that are moved in one call. Its steps follow one another.

    Attributes:
        move: gives it to the disk and waits for it.
        prepare: what takes CPU before that; None: nothing.
        finish: what takes CPU behind it; None: nothing.
    """

    move: Task
    prepare: Task | None = None
    finish: Task | None = None

    def whole(self) -> IoRun:
        """All of its steps as one."""
        steps = [step for step in (self.prepare, self.move, self.finish) if step is not None]

        def move() -> None:
            for step in steps:
                step()

        return IoRun(move)


class _Batch:
    """The runs of one call, by what is to be done with them next. Guarded by the workers' lock."""

    def __init__(self, runs: Sequence[IoRun]) -> None:
        self.to_prepare = deque(run for run in runs if run.prepare is not None)
        self.to_move = deque(run for run in runs if run.prepare is None)
        self.to_finish: deque[IoRun] = deque()
        self.num_moving = 0
        self.num_left = len(runs)
        self.error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What a thread does with a run; `queue` is the one that it was taken from."""

    batch: _Batch
    run: IoRun
    queue: deque[IoRun]
    task: Task | None


class Workers:
    """A few helper threads. Thread-safe; several calls share them.

    Args:
        num_threads: helper threads.
        num_moving: runs that move at a time, of all calls.
        name: of the threads.
    """

    def __init__(self, num_threads: int, num_moving: int, name: str) -> None:
        self._changed = threading.Condition()
        # All guarded by _changed.
        self._batches: list[_Batch] = []
        self._num_slots = num_moving
        self._num_idle = 0
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, runs: Sequence[IoRun]) -> None:
        """Takes runs through their steps, on this thread and the helpers; returns when all ended.

        Raises:
            BaseException: the first error of a step, after all have ended.
        """
        if not runs:
            return
        batch = _Batch(runs)
        with self._changed:
            self._batches.append(batch)
            self._changed.notify_all()
        self._work(batch)
        if batch.error is not None:
            raise batch.error

    def stop(self) -> None:
        """Ends the helper threads and waits for them."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self, own: _Batch | None = None) -> None:
        """Does steps until `own` has ended, or without one until the threads stop."""
        step: _Step | None = None
        error: BaseException | None = None
        while True:
            with self._changed:
                if step is not None:
                    self._note(step, error)
                step = error = None  # who waits keeps no record alive
                step = self._next(own)
            if step is None:
                return
            try:
                if step.task is not None:
                    step.task()
            except BaseException as caught:  # handed to the caller by run()
                error = caught

    def _next(self, own: _Batch | None) -> _Step | None:
        """Waits for a step to do; None when there is no more reason to. The lock is held."""
        has_waited = False
        while True:
            leaves = self._is_stopped if own is None else not own.num_left
            step = None if leaves else self._take(own)
            if leaves or step is not None or not has_waited:
                self._wake_others()
            if leaves or step is not None:
                return step
            self._num_idle += 1
            self._changed.wait()
            self._num_idle -= 1
            has_waited = True  # nothing new to tell others

    def _take(self, own: _Batch | None) -> _Step | None:
        """Takes the most urgent step: first moves, as the disk must not wait, then what was read.

        A caller moves runs of its own call only: with another's it would return too late.
        """
        batch = self._moves_next()
        if batch is not None and own in (None, batch):
            self._num_slots -= 1
            batch.num_moving += 1
            run = batch.to_move.popleft()
            return _Step(batch, run, batch.to_move, run.move)
        for batch in self._batches:
            if batch.to_finish:
                run = batch.to_finish.popleft()
                return _Step(batch, run, batch.to_finish, run.finish)
        for batch in self._batches:
            if batch.to_prepare:
                run = batch.to_prepare.popleft()
                return _Step(batch, run, batch.to_prepare, run.prepare)
        return None

    def _moves_next(self) -> _Batch | None:
        """The call whose run should move now: with the fewest on their way, then the oldest."""
        waiting = [batch for batch in self._batches if batch.to_move]
        if not waiting or not self._num_slots:
            return None
        return min(waiting, key=lambda batch: batch.num_moving)

    def _wake_others(self) -> None:
        """Somebody who waits can do what this thread does not."""
        if not self._num_idle:
            return
        if self._moves_next() is not None:
            self._changed.notify_all()  # not everybody may move it
        elif any(batch.to_finish or batch.to_prepare for batch in self._batches):
            self._changed.notify()

    def _note(self, step: _Step, error: BaseException | None) -> None:
        """A step has ended: what comes next for its run."""
        batch, run = step.batch, step.run
        has_moved = step.queue is batch.to_move
        if has_moved:
            self._num_slots += 1
            batch.num_moving -= 1
        if error is not None:
            batch.error = batch.error or error
        elif step.queue is batch.to_prepare:
            batch.to_move.append(run)
            return
        elif has_moved and run.finish is not None:
            batch.to_finish.append(run)
            return
        batch.num_left -= 1
        if not batch.num_left:
            self._batches.remove(batch)
            self._changed.notify_all()
