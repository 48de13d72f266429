"""Counts, inside each scheduler process, the collectives of every scheduler step.

SGLang loads every plugin of its entry point group; `environment` puts `load` below on the server's
import path. Each scheduler writes a file of its own, `PID.json`:

    steps               scheduler steps
    per_step            {number of reductions: number of steps that had so many}
    tp_rank, dp_rank    which scheduler it is

Counted are calls of `torch.distributed.all_reduce` on the process group on which the plugin agrees;
SGLang broadcasts requests on it too, which is no reduction.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from runtime_cpu import launch

FOLDER_VARIABLE = "BENCH_RANK_PROBE"
_ROOT = Path(__file__).resolve().parent.parent
_WRITE_EVERY_S = 0.2


def environment(folder: Path) -> dict[str, str]:
    """Variables for a server whose schedulers count; the counts come to `folder`."""
    return {**loading(folder, "testkit.rank_probe:load"), FOLDER_VARIABLE: str(folder)}


def loading(folder: Path, function: str) -> dict[str, str]:
    """Variables for a server whose processes call a function as they load their plugins.

    Args:
        folder: where the entry point is written.
        function: as entry points name it.
    """
    info = folder / "bench_probe-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nbench_probe = {function}\n")
    path = [str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return {"PYTHONPATH": launch.environment(base)["PYTHONPATH"]}


def counts(folder: Path) -> list[dict[str, Any]]:
    """What the schedulers wrote, by rank; numbers of reductions are integers again."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    for one in found:
        one["per_step"] = {int(number): steps for number, steps in one["per_step"].items()}
    return sorted(found, key=lambda one: (one["dp_rank"], one["tp_rank"]))


def fresh_counts(folder: Path, timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """What the schedulers write from now on: with all that they had done before this call.

    Raises:
        TimeoutError: one of them takes no more steps.
    """
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    deadline_s = time.monotonic() + timeout_s
    # What is written first may have been counted before this call; what is written next was not.
    for _ in range(2):
        while any(path.stat().st_mtime_ns == was for path, was in before.items()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a scheduler wrote nothing more to {folder}")
            time.sleep(0.02)
        before = {path: path.stat().st_mtime_ns for path in before}
    return counts(folder)


def load() -> None:
    """Entry point: hooks the scheduler's step, in processes that have one."""
    import sys

    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from torch import distributed

    probe = _Probe(Path(os.environ[FOLDER_VARIABLE]))
    all_reduce = distributed.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        probe.reduced(kwargs.get("group"))
        return all_reduce(tensor, *args, **kwargs)

    distributed.all_reduce = counted
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        probe.before_step,
        HookType.BEFORE,
    )


class _Probe:
    """Counts of one scheduler."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self._group: Any = None
        self._per_step: Counter[int] = Counter()
        self._steps = 0
        self._reductions = 0
        self._next_write_s = 0.0

    def reduced(self, group: Any) -> None:
        """A reduction on some group."""
        self._reductions += group is not None and group is self._group

    def before_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """A step begins, so the one before it, with its forward and its results, is over."""
        from sglang.srt.runtime_context import get_parallel

        from sglang_ext.ranks.lockstep import group_of

        if self._steps:
            self._per_step[self._reductions] += 1
        self._group = group_of(scheduler.tree_cache)
        self._steps += 1
        self._reductions = 0
        now_s = time.monotonic()
        if now_s >= self._next_write_s:
            self._next_write_s = now_s + _WRITE_EVERY_S
            content = {
                "steps": self._per_step.total(),
                "per_step": dict(self._per_step),
                "tp_rank": get_parallel().tp_rank,
                "dp_rank": get_parallel().dp_rank or 0,
            }
            temp = self._path.with_suffix(".new")
            temp.write_text(json.dumps(content))
            temp.replace(self._path)
