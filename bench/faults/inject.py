"""Faults inside the server's own process, without a line of the product knowing of them.

SGLang loads every plugin of its entry point group. `environment` puts a second one, `load` below,
on the server's import path; it gives the disk tier a `FaultyDisk` for its system calls and a hook
for its failpoints. Both obey a control file (JSON), read anew whenever it changes:

    gate           path: the disk tier is not opened before this file exists
    kill           {"step": s, "count": n}: SIGKILL to all processes of the server at the n-th time
    read_errno     every read of a record fails with this number
    write_errno    every write to a segment, and every preallocation, fails with this number
    read_raises    reads raise what no disk raises; write_raises likewise
    bytes_per_s    how fast the disk is
    hangs          every call of the disk tier waits until it is gone from here
    random         {"seed": s, "share": x, "kinds": [...]}: see `bench.faults.store.schedule`
    report         a number: a report is written beside the control file, with this number

A step is a failpoint of the disk tier, or "record" or "footer": half of that was written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.faults.stalls import StallMeter, install
from bench.faults.store.schedule import Schedule, ScheduledDisk
from bench.faults.tally import check
from runtime_cpu import launch

CONTROL_VARIABLE = "BENCH_FAULTS_CONTROL"
_INFO = "bench_faults-1.dist-info"
_SCHEDULER = "run_scheduler_process"  # SGLang's; it loads the plugins first
_ROOT = Path(__file__).resolve().parent.parent.parent
_BLOCK_BYTES = 4096
_TORN_STEPS = {b"HKVR": "record", b"HKVF": "footer"}
_POLL_S = 0.01
_REPORT_S = 300.0  # for a report, on any machine


class InjectedError(RuntimeError):
    """An error that nobody expects of a disk."""


class Control:
    """The tester's side of a control file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._faults: dict[str, Any] = {}
        self._num_reports = 0
        self.set()

    def set(self, **faults: Any) -> None:
        """Replaces what is in force; without arguments nothing is."""
        self._faults = faults
        temp = self.path.with_name(self.path.name + ".new")
        temp.write_text(json.dumps(faults))
        temp.replace(self.path)

    def report(self) -> dict[str, Any]:
        """What the server's process counted.

        Returns:
            `stalls`: of the scheduler's thread, as `StallMeter.report` has them; `num_hanging`:
            calls of the disk that hang now; `injected`: random faults by kind.

        Raises:
            FaultCheckError: there is no report.
        """
        self._num_reports += 1
        self.set(**{**self._faults, "report": self._num_reports})
        path, deadline_s = _report(self.path), time.monotonic() + _REPORT_S
        while True:
            found = json.loads(path.read_text()) if path.exists() else {}
            if found.get("number") == self._num_reports:
                return dict(found)
            check(time.monotonic() < deadline_s, "the server writes no report of its faults")
            time.sleep(_POLL_S)

    def step_killed_at(self) -> str:
        """The step at which the server killed itself; empty when it did not."""
        marker = _marker(self.path)
        return marker.read_text() if marker.exists() else ""


def environment(folder: Path, control: Control) -> dict[str, str]:
    """Variables for a server that obeys `control`.

    Args:
        folder: where the plugin's metadata is written.
        control: its control file.
    """
    info = folder / _INFO
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-faults\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nbench_faults = bench.faults.inject:load\n"
    )
    path = [str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return {
        CONTROL_VARIABLE: str(control.path),
        "PYTHONPATH": launch.environment(base)["PYTHONPATH"],
    }


class Plan:
    """The server's side of a control file. Thread-safe: one lock guards all state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp = (0, 0)  # of the file: two within a tick of its clock have another number
        self._faults: Mapping[str, Any] = {}
        self._left = 0  # times that the step of "kill" has still to come

    def faults(self) -> Mapping[str, Any]:
        """What is in force now."""
        with self._lock:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._stamp = stamp
                self._faults = json.loads(self._path.read_text())
                self._left = int(self._faults.get("kill", {}).get("count", 0))
            return self._faults

    def is_due(self, step: str) -> bool:
        """Whether the server dies at this step, this time."""
        if self.faults().get("kill", {}).get("step") != step:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def die(self, step: str) -> None:
        """Leaves a note of where, and ends every process of the server at once."""
        _marker(self._path).write_text(step)
        os.killpg(os.getsid(0), signal.SIGKILL)  # the server was started in a session of its own
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, step: str) -> None:
        """The disk tier's failpoint hook."""
        if self.is_due(step):
            self.die(step)

    def wait_for_gate(self) -> None:
        """Waits until the disk tier may open its folder."""
        while (gate := self.faults().get("gate")) and not os.path.exists(gate):
            time.sleep(_POLL_S)


class FaultyDisk(ScheduledDisk):
    """System calls that fail, drag, hang and stop half-way, as a plan says."""

    def __init__(self, plan: Plan, meter: StallMeter) -> None:
        super().__init__(Schedule(0, 0.0))
        self.num_hanging = 0  # guarded by _lock
        self._plan = plan
        self._meter = meter
        self._lock = threading.Lock()
        self._random: Mapping[str, Any] | None = None  # guarded by _lock

    def open(self, path: Path, flags: int) -> int:
        with self._meter.io("disk open"):
            self._enter()
            return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._meter.io("disk read"):
            faults = self._enter()
            if faults.get("read_raises"):
                raise InjectedError("injected into a read")
            if "read_errno" in faults:
                raise OSError(faults["read_errno"], "injected into a read")
            done = super().preadv(fd, buffers, offset)
            _drag(faults, done)
            return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._meter.io("disk write"):
            faults = self._enter()
            if faults.get("write_raises"):
                raise InjectedError("injected into a write")
            if "write_errno" in faults:
                raise OSError(faults["write_errno"], "injected into a write")
            step = _TORN_STEPS.get(bytes(buffers[0][:4]), "")
            if step and self._plan.is_due(step):
                super().pwritev(fd, _first_half(buffers), offset)
                self._plan.die(step)
            done = super().pwritev(fd, buffers, offset)
            _drag(faults, done)
            return done

    def allocate(self, fd: int, num_bytes: int) -> None:
        with self._meter.io("disk allocate"):
            faults = self._enter()
            if "write_errno" in faults:
                raise OSError(faults["write_errno"], "injected into an allocation")
            super().allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        with self._meter.io("disk truncate"):
            self._enter()
            super().truncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        with self._meter.io("disk sync"):
            self._enter()
            super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self._meter.io("disk rename"):
            self._enter()
            super().rename(source, target)

    def unlink(self, path: Path) -> None:
        with self._meter.io("disk unlink"):
            self._enter()
            super().unlink(path)

    def free_bytes(self, path: Path) -> int:
        with self._meter.io("disk free space"):
            self._enter()
            return super().free_bytes(path)

    def _enter(self) -> Mapping[str, Any]:
        """Begins a call: hangs while it is to hang; returns the faults in force."""
        if self._plan.faults().get("hangs"):
            with self._lock:
                self.num_hanging += 1
            while self._plan.faults().get("hangs"):
                time.sleep(_POLL_S)
            with self._lock:
                self.num_hanging -= 1
        faults = self._plan.faults()
        random = faults.get("random")
        with self._lock:
            if random != self._random:
                self._random = random
                before = self.schedule.injected
                self.schedule = _schedule_of(random)
                self.schedule.injected = before
        return faults


def _schedule_of(random: Mapping[str, Any] | None) -> Schedule:
    if random is None:
        return Schedule(0, 0.0)
    return Schedule(random["seed"], random["share"], tuple(random["kinds"]))


def _write_reports(control: Path, plan: Plan, meter: StallMeter, disks: list[FaultyDisk]) -> None:
    """Answers every "report" of the control file; a thread of its own."""
    last = None
    while True:
        number = plan.faults().get("report")
        if number is not None and number != last:
            injected = sum((disk.schedule.injected for disk in disks), Counter[str]())
            found = {
                "number": number,
                "stalls": meter.report(),
                "num_hanging": sum(disk.num_hanging for disk in disks),
                "injected": dict(injected),
            }
            temp = _report(control).with_suffix(".new")
            temp.write_text(json.dumps(found))
            temp.replace(_report(control))
            last = number
        time.sleep(_POLL_S)


def load() -> None:
    """The plugin's entry point: called by SGLang in each of its processes."""
    path = os.environ.get(CONTROL_VARIABLE)
    if not path or not _is_scheduler():
        return
    from sglang_ext.tiers.disk import DiskTier

    plan = Plan(Path(path))
    meter = StallMeter(threading.get_ident())  # SGLang loads plugins on the scheduler's thread
    install(meter)
    disks: list[FaultyDisk] = []
    report = (Path(path), plan, meter, disks)
    threading.Thread(target=_write_reports, args=report, daemon=True).start()
    original = DiskTier.__init__

    def opened_late_on_a_faulty_disk(self: DiskTier, config: Any, **_: Any) -> None:
        plan.wait_for_gate()
        disks.append(FaultyDisk(plan, meter))
        original(self, config, io=disks[-1], failpoints=plan.reach)

    DiskTier.__init__ = opened_late_on_a_faulty_disk  # type: ignore[method-assign]


def _is_scheduler() -> bool:
    frame = sys._getframe(1)
    while frame.f_code.co_name != _SCHEDULER:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def _marker(control: Path) -> Path:
    return control.with_name(control.name + ".killed")


def _report(control: Path) -> Path:
    return control.with_name(control.name + ".report")


def _first_half(buffers: Sequence[memoryview]) -> list[memoryview]:
    left = sum(len(view) for view in buffers) // 2 // _BLOCK_BYTES * _BLOCK_BYTES
    half: list[memoryview] = []
    for view in buffers:
        if left <= 0:
            break
        half.append(view[:left])
        left -= len(view)
    return half


def _drag(faults: Mapping[str, Any], num_bytes: int) -> None:
    if "bytes_per_s" in faults:
        time.sleep(num_bytes / faults["bytes_per_s"])
