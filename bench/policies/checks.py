"""What every simulation must fulfil before its figures are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from bench.core.case import CaseFailedError
from bench.policies.jobs import Figures, Job, Result
from bench.policies.order import ORDERS
from bench.policies.writes import STEADY_LIMIT, Writes

# The optimum is one of pages: of a prompt that is stored whole a token is computed all the same.
_BELADY_SLACK = 0.005
_REUSABLE_SLACK = 0.005


def check_all(jobs: Sequence[Job], results: Mapping[str, Result]) -> None:
    """Checks each job's outcome.

    Raises:
        CaseFailedError: tokens are lost or made up, policies served different requests, work took
            less time than the machine needs, or a policy is better than the optimum.
    """
    for job in jobs:
        for policy, figures in results[job.name].figures.items():
            _check_one(f"{job.name}, {policy}", job, policy, figures)
        _check_together(job, results[job.name].figures)


def _check_one(name: str, job: Job, policy: str, f: Figures) -> None:
    _same(name, "reused and computed tokens", f["reused_tokens"] + f["computed_tokens"],
          f["prompt_tokens"])  # fmt: skip
    _ordered(name, "reused, reusable, prompt tokens", f["reused_tokens"], f["reusable_tokens"],
             f["prompt_tokens"])  # fmt: skip
    _ordered(name, "turn hit rate and its cap", 0.0, f["turn_hit_rate"], f["turn_hit_cap"], 1.0)
    if policy in ORDERS:
        return
    by_tier = f["host_tokens"] + f["disk_tokens"]
    _same(name, "reused tokens by tier", by_tier, f["reused_tokens"])
    least_s = f["computed_tokens"] / job.system.prefill_tokens_per_s
    _ordered(name, "prefill seconds", least_s, f["prefill_gpu_s"], f["gpu_s"])
    _ordered(name, "TTFT", 0.0, f["ttft_p50_s"], f["ttft_p95_s"], f["ttft_p99_s"])
    if policy == "recompute":
        _same(name, "tokens reused by recomputation", f["reused_tokens"], 0)
    if job.system.disk_bytes == 0:
        _same(name, "tokens from a disk that is not there", f["disk_tokens"], 0)
    _check_writes(name, job, f)


def _check_writes(name: str, job: Job, f: Figures) -> None:
    """Where the disk is larger than DRAM: else what the disk lost is written at every use."""
    if job.system.disk_pages > job.system.host_pages:
        writes = Writes.of(f["counters"], f["counters"].get("disk_records_moved", 0))
        steady = writes.steady_amplification(job.system.host_pages)
        _ordered(name, "pages written for each new one, at steady state", steady, STEADY_LIMIT)


def _check_together(job: Job, figures: Mapping[str, Figures]) -> None:
    names = list(figures)
    for name in names[1:]:
        where = f"{job.name}, {name} and {names[0]}"
        _same(where, "turns", figures[name]["num_turns"], figures[names[0]]["num_turns"])
        if job.warmup_turns == 0 and job.measured_turns is None:
            _same(where, "prompt_tokens", figures[name]["prompt_tokens"],
                  figures[names[0]]["prompt_tokens"])  # fmt: skip
            # In closed loops a policy decides who comes first to a prefix that several share. A
            # replay of the first one's order meets what that met.
            reusable = figures[names[0]]["reusable_tokens"]
            off = abs(figures[name]["reusable_tokens"] - reusable)
            slack = 0 if name in ORDERS else _REUSABLE_SLACK * reusable
            _ordered(where, "reusable tokens apart", 0, off, slack)
    if "belady" not in figures:
        return
    # Other runs than the one whose order it is may serve closed loops in an order of their own.
    best = figures["belady"]["hit_rate"]
    for name in ("lookahead", *(order for order in ORDERS if order in figures)):
        if figures[name]["hit_rate"] > best + _BELADY_SLACK:
            raise CaseFailedError(
                f"{job.name}: {name} hits {figures[name]['hit_rate']:.4f}, the optimum {best:.4f}"
            )


def _same(name: str, what: str, came: float, expected: float) -> None:
    if came != expected:
        raise CaseFailedError(f"{name}: {what}: {came} where {expected} was due")


def _ordered(name: str, what: str, *values: float) -> None:
    slack = 1e-9 * max(abs(value) for value in values)
    if any(low > high + slack for low, high in pairwise(values)):
        raise CaseFailedError(f"{name}: {what} should ascend: {values}")
