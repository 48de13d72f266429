"""How much of a scheduler's CPU time goes into telling.

SGLang calls `load` in each of its processes. Counted are, on the scheduler's thread, all of
SGLang's publishing of KV events with what the plugin does there, both recorders' work as pages come
to the device and leave it, and the plugin's metrics; and all of the thread that encodes and sends
the events. Counted apart are SGLang's reports of its own metrics, with the lines that it logs of
its batches without them, too.
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
_SENDER = "zmq-publisher"
_WRITE_EVERY_S = 0.2


def environment(folder: Path, file: Path) -> dict[str, str]:
    """Variables for a server whose scheduler counts, to a file."""
    return {**loading(folder, "bench.serve.telling_probe:load"), _FILE_VARIABLE: str(file)}


def told_s(file: Path) -> tuple[float, float, float]:
    """CPU seconds so far: in telling, of the thread that sends, and in SGLang's own reports."""
    found = json.loads(file.read_text())
    return found["telling_s"], found["sending_s"], found["sglangs_s"]


def load() -> None:
    """Entry point: wraps what tells, in a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules or _FILE_VARIABLE not in os.environ:
        return
    from sglang.srt.managers.scheduler_components.kv_events_publisher import (
        SchedulerKvEventsPublisher,
    )
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    from sglang_ext.seam.kv_events import TierEventRecorder
    from sglang_ext.seam.metrics.reporter import MetricsReporter

    probe = _Probe(Path(os.environ[_FILE_VARIABLE]))
    wrapped = {
        SchedulerKvEventsPublisher: ("publish_kv_events",),
        TierEventRecorder: ("record_store", "record_remove", "record_all_cleared"),
        MetricsReporter: ("maybe_publish",),
    }
    for owner, names in wrapped.items():
        for name in names:
            setattr(owner, name, probe.counted(getattr(owner, name), "telling_s"))
    for name in ("report_prefill_stats", "report_decode_stats", "log_batch_result_stats"):
        method = getattr(SchedulerMetricsReporter, name)
        setattr(SchedulerMetricsReporter, name, probe.counted(method, "sglangs_s"))


class _Probe:
    """Counts of one scheduler; its thread only."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._spent_s = {"telling_s": 0.0, "sglangs_s": 0.0}
        self._next_write_s = 0.0
        self._is_counting = False

    def counted(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The function, with its CPU time counted once, also where one of them calls another."""

        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            if self._is_counting:
                return function(*args, **kwargs)
            self._is_counting, began_s = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
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
