"""Simulations side by side: what to simulate, on all cores, with their outcomes in order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

from bench.core.output import Progress
from bench.policies.order import ORDERS, order_figures
from bench.policies.workloads.loads import asked_pages, offered_load
from sglang_ext.simulator.engine import (
    Conversation,
    Outcome,
    System,
    TraceRequest,
    run,
)
from sglang_ext.simulator.types import Recorded
from sglang_ext.tiers.policy import PolicyConfig

Workload = Sequence[Conversation] | Sequence[TraceRequest]

POLICIES = ("lookahead", "off", *ORDERS)
# Variants of the look-ahead: what each of its two sources of knowledge is worth.
VARIANTS = {
    "queue_only": ("lookahead", PolicyConfig(return_times=False)),
    "returns_only": ("lookahead", PolicyConfig(lookahead=False)),
}
_FIGURES = (
    "num_turns", "hit_rate", "turn_hit_rate", "turn_hit_cap", "host_share",
    "host_tokens", "disk_tokens", "reused_tokens", "reusable_tokens", "prompt_tokens",
    "computed_tokens", "output_tokens", "history_tokens", "gpu_s", "prefill_gpu_s", "wait_load_s",
    "makespan_s", "prefill_tokens_per_s", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s",
    "queue_mean", "queue_max", "load",
)  # fmt: skip

# How much longer simulations with a disk take than those without, of the same requests; roughly.
_DISK_SLOWS = 8

Figures = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One workload on one system under some policies.

    Attributes:
        name: unique among the jobs that are run together.
        build: makes the workload; a picklable call, so that each process makes its own.
        policies: of `POLICIES`, `VARIANTS` and `recompute`. Those of `ORDERS` are replays of the
            order of `lookahead`, and need it.
        warmup_turns: turns before the measured ones.
        measured_turns: None for all that follow.
    """

    name: str
    build: Callable[[], Workload]
    system: System
    policies: tuple[str, ...] = POLICIES
    warmup_turns: int = 0
    measured_turns: int | None = None


@dataclass
class Result:
    """What came of a job.

    Attributes:
        figures: by policy, the numbers of its `Outcome`, counters under `counters`.
        offered_load: GPU seconds asked for per second, without any reuse.
        offered_load_reuse: the same with an unbounded cache.
        recorded: the order of `lookahead`, where it was asked for.
    """

    name: str
    figures: dict[str, Figures] = field(default_factory=dict)
    offered_load: float = 0.0
    offered_load_reuse: float = 0.0
    recorded: Recorded | None = None


def simulate(job: Job, *, keeps_order: bool = False) -> Result:
    """Runs a job's policies one after the other, in this process.

    Args:
        job: what to run.
        keeps_order: the order of `lookahead` is part of the result; large.
    """
    workload = job.build()
    result = Result(
        job.name,
        offered_load=offered_load(workload, job.system, reuse=False),
        offered_load_reuse=offered_load(workload, job.system, reuse=True),
    )
    recorded = None
    for name in _in_order(job.policies):
        if name in ORDERS:
            assert recorded is not None
            result.figures[name] = order_figures(
                recorded, job.system, name, job.warmup_turns, job.measured_turns
            )
            continue
        policy, config = VARIANTS.get(name, (name, None))
        outcome = run(
            workload,
            job.system,
            policy,
            warmup_turns=job.warmup_turns,
            measured_turns=job.measured_turns,
            config=config,
        )
        if name == "lookahead":
            recorded = outcome.recorded
        result.figures[name] = _figures(outcome)
    result.recorded = recorded if keeps_order else None
    return result


def simulate_all(
    jobs: Sequence[Job], progress: Progress, *, processes: int | None = None
) -> dict[str, Result]:
    """Runs jobs on all cores; results by job name, in the order of `jobs`.

    Each simulation is run by itself, the longest first, so that all cores end at about one time.

    Args:
        processes: how many; 0 runs them here. Default: one a core.
    """
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    if count == 0:
        return {job.name: simulate(job) for job in _counted(jobs, progress)}
    parts = parts_of(jobs)
    done: dict[str, list[Result]] = {job.name: [] for job in jobs}
    context = multiprocessing.get_context("spawn")  # numba's threads do not survive a fork
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = [pool.submit(simulate, part) for part in parts]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                result = future.result()
                done[result.name].append(result)
                progress.update(f"{number} of {len(parts)} simulations, last {result.name}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {job.name: _together(job, done[job.name]) for job in jobs}


def parts_of(jobs: Iterable[Job]) -> list[Job]:
    """Each simulation as a job of its own, with the replays of its order; the longest first."""
    parts: list[Job] = []
    for job in jobs:
        replays = tuple(name for name in job.policies if name in ORDERS)
        for name in _in_order(job.policies):
            if name not in ORDERS:
                policies = (name, *replays) if name == "lookahead" else (name,)
                parts.append(replace(job, policies=policies))
    return sorted(parts, key=_length, reverse=True)


def _together(job: Job, parts: Sequence[Result]) -> Result:
    """A job's result of those of its parts, as `simulate` would have it."""
    figures = {name: each for part in parts for name, each in part.figures.items()}
    return replace(parts[0], figures={name: figures[name] for name in _in_order(job.policies)})


def _length(job: Job) -> float:
    """How long a simulation takes, by which they are compared: most of it goes to the disk."""
    if "recompute" in job.policies:
        return 0.0
    pages = asked_pages(job.build(), job.system)
    return pages if job.system.disk_bytes else pages / _DISK_SLOWS


def _in_order(policies: Iterable[str]) -> list[str]:
    """Policies as they are simulated: what others replay comes first."""
    return sorted(policies, key=lambda each: each != "lookahead")


def _counted(jobs: Sequence[Job], progress: Progress) -> Iterable[Job]:
    for number, job in enumerate(jobs):
        progress.update(f"{number} of {len(jobs)} simulations, now {job.name}")
        yield job


def _figures(outcome: Outcome) -> Figures:
    values: Figures = {name: getattr(outcome, name) for name in _FIGURES}
    values["counters"] = dict(outcome.counters)
    return values
