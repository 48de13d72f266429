"""How much of a scheduler's CPU time goes into telling.

SGLang calls `load` in each of its processes. Counted are, on the scheduler's thread, all of
SGLang's publishing of KV events with what the plugin does there, both recorders' work as pages come
to the device and leave it, and the plugin's metrics; and all of the thread that encodes and sends
the events. Counted apart are SGLang's reports of its own metrics, with the lines that it logs of
its batches without them, too.

Of idle steps publishing counts only where there were events, of pages whose saves end behind the
last answer: a scheduler without requests asks for events as often as it can, and how long it has
none says how busy the machine is. What is noted for the next publishing counts always.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testkit.rank_probe import loading

_FILE_VARIABLE = "BENCH_TELLING_PROBE"
_MUTE_VARIABLE = "BENCH_TELLING_MUTE"
_SENDER = "zmq-publisher"
_WRITE_EVERY_S = 0.2


def environment(folder: Path, file: Path, *, is_mute: bool) -> dict[str, str]:
    """Variables for a server whose scheduler counts, to a file.

    Args:
        folder: where the entry point is written.
        file: where to count to.
        is_mute: whether the plugin tells nothing there, whatever SGLang does.
    """
    loads = loading(folder, "bench.serve.telling_probe:load")
    return {**loads, _FILE_VARIABLE: str(file), _MUTE_VARIABLE: "1" if is_mute else ""}


def told_s(file: Path) -> tuple[float, float, float]:
    """CPU seconds so far: in telling, of the thread that sends, and in SGLang's own reports."""
    found = json.loads(file.read_text())
    return found["telling_s"], found["sending_s"], found["sglangs_s"]


def load() -> None:
    """Entry point: wraps what tells, in a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules or _FILE_VARIABLE not in os.environ:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.kv_events_publisher import (
        SchedulerKvEventsPublisher,
    )
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    from sglang_ext.seam.kv_events import TierEventRecorder
    from sglang_ext.seam.metrics.reporter import MetricsReporter

    if os.environ[_MUTE_VARIABLE]:
        _mute()
    probe = _Probe(Path(os.environ[_FILE_VARIABLE]))
    wrapped = {
        SchedulerKvEventsPublisher: ("publish_kv_events",),
        TierEventRecorder: ("record_store", "record_remove", "record_all_cleared"),
        MetricsReporter: ("maybe_publish",),
    }
    for owner, names in wrapped.items():
        notes = owner is TierEventRecorder
        for name in names:
            counted = probe.counted(getattr(owner, name), "telling_s", always=notes)
            setattr(owner, name, counted)
    for name in ("report_prefill_stats", "report_decode_stats", "log_batch_result_stats"):
        method = getattr(SchedulerMetricsReporter, name)
        setattr(SchedulerMetricsReporter, name, probe.counted(method, "sglangs_s"))
    Scheduler.on_idle = probe.begins(Scheduler.on_idle, is_idle=True)
    Scheduler.run_batch = probe.begins(Scheduler.run_batch, is_idle=False)
    TierEventRecorder.take = probe.noted(TierEventRecorder.take)  # type: ignore[method-assign]


def _mute() -> None:
    """SGLang's own recorder stays in the tree, and of the plugin's metrics there are none."""
    from sglang_ext.seam import cache
    from sglang_ext.seam.metrics.reporter import MetricsReporter

    def keep(device: Any, *_: Any, **__: Any) -> Any:
        return device

    make = MetricsReporter.__init__

    @functools.wraps(make)
    def make_none(*args: Any, **kwargs: Any) -> None:
        make(*args, **(kwargs | {"enabled": False}))

    vars(cache)["TierEventRecorder"] = keep
    MetricsReporter.__init__ = make_none  # type: ignore[method-assign]


class _Probe:
    """Counts of one scheduler; its thread only."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._spent_s = {"telling_s": 0.0, "sglangs_s": 0.0}
        self._next_write_s = 0.0
        self._is_counting = False
        self._is_idle = False  # no batch since the last idle step
        self._has_told = False  # events, in what is being counted

    def begins(self, function: Callable[..., Any], *, is_idle: bool) -> Callable[..., Any]:
        """The function, with which idle steps begin, or others."""

        @functools.wraps(function)
        def begin(*args: Any, **kwargs: Any) -> Any:
            self._is_idle = is_idle
            return function(*args, **kwargs)

        return begin

    def noted(self, take: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The function, with whether there were events."""

        @functools.wraps(take)
        def note(*args: Any, **kwargs: Any) -> list[Any]:
            events = take(*args, **kwargs)
            self._has_told = self._has_told or bool(events)
            return events

        return note

    def counted(
        self, function: Callable[..., Any], kind: str, *, always: bool = False
    ) -> Callable[..., Any]:
        """The function, with its CPU time counted once, also where one of them calls another.

        Args:
            function: it is a scheduler's.
            kind: of time.
            always: whether it is called for what happens alone, and so counts in idle steps, too.
        """

        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            if self._is_counting:
                return function(*args, **kwargs)
            self._is_counting, self._has_told, began_s = True, False, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                if always or self._has_told or not self._is_idle:
                    self._spent_s[kind] += time.thread_time() - began_s
                self._is_counting = False
                self._write()

        return count

    def _write(self) -> None:
        """Not counted as telling."""
        now_s = time.monotonic()
        if now_s < self._next_write_s:
            return
        self._next_write_s = now_s + _WRITE_EVERY_S
        found = {**self._spent_s, "sending_s": _sending_s()}
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(self._file)


def _sending_s() -> float:
    """CPU seconds so far of the thread that sends events."""
    found = [thread.native_id for thread in threading.enumerate() if _SENDER in thread.name]
    texts = [Path(f"/proc/self/task/{each}/schedstat").read_text() for each in found]
    return sum(1e-9 * int(text.split()[0]) for text in texts)
