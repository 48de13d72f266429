"""What every simulation must fulfil before its figures are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.case import CaseFailedError
from bench.policies_jobs import Figures, Job, Result
from bench.policies_oracle import belady_tokens, lru_tokens
from bench.policies_trace import BLOCK_TOKENS, Line

# A replay in another order (closed loops) or with other times of arrival in a tier may differ by
# this much without anything being wrong; the optimum is exact only for its own order.
_BELADY_SLACK = 0.005
_ORDER_SLACK = 0.02
_LRU_SLACK = 0.03
_REUSABLE_SLACK = 0.001


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
    by_tier = f["device_tokens"] + f["host_tokens"] + f["disk_tokens"]
    _same(name, "reused tokens by tier", by_tier, f["reused_tokens"])
    _ordered(name, "reused, reusable, prompt tokens", f["reused_tokens"], f["reusable_tokens"],
             f["prompt_tokens"])  # fmt: skip
    _ordered(name, "turn hit rate and its cap", 0.0, f["turn_hit_rate"], f["turn_hit_cap"], 1.0)
    least_s = f["computed_tokens"] / job.system.prefill_tokens_per_s
    _ordered(name, "prefill seconds", least_s, f["prefill_gpu_s"], f["gpu_s"])
    _ordered(name, "TTFT", 0.0, f["ttft_p50_s"], f["ttft_p95_s"], f["ttft_p99_s"])
    if policy == "recompute":
        _same(name, "tokens reused by recomputation", f["reused_tokens"], 0)
    if job.system.disk_bytes == 0:
        _same(name, "tokens from a disk that is not there", f["disk_tokens"], 0)


def _check_together(job: Job, figures: Mapping[str, Figures]) -> None:
    names = list(figures)
    for name in names[1:]:
        where = f"{job.name}, {name} and {names[0]}"
        _same(where, "turns", figures[name]["num_turns"], figures[names[0]]["num_turns"])
        if job.warmup_turns == 0 and job.measured_turns is None:
            for key in ("prompt_tokens", "output_tokens"):
                _same(where, key, figures[name][key], figures[names[0]][key])
            # In closed loops a policy decides who comes first to a prefix that several share.
            reusable = figures[names[0]]["reusable_tokens"]
            off = abs(figures[name]["reusable_tokens"] - reusable)
            _ordered(where, "reusable tokens apart", 0, off, _REUSABLE_SLACK * reusable)
    if "belady" not in figures:
        return
    best = figures["belady"]["hit_rate"]
    for name in names:
        slack = _BELADY_SLACK if name == "lookahead" else _ORDER_SLACK
        if figures[name]["hit_rate"] > best + slack:
            raise CaseFailedError(
                f"{job.name}: {name} hits {figures[name]['hit_rate']:.4f}, the optimum {best:.4f}"
            )


@dataclass(frozen=True)
class OrderBound:
    """Hits by order alone at one capacity, as shares of the reusable tokens."""

    lru: float
    belady: float


def order_bound(lines: Sequence[Line], capacity_bytes: float, kv_bytes_per_token: float,
                reusable_tokens: int) -> OrderBound:  # fmt: skip
    """LRU and the optimum for a trace in its own order, over one pool of `capacity_bytes`."""
    blocks = int(capacity_bytes / (BLOCK_TOKENS * kv_bytes_per_token))
    return OrderBound(
        lru_tokens(lines, blocks) / reusable_tokens, belady_tokens(lines, blocks) / reusable_tokens
    )


def check_against_order(name: str, figures: Mapping[str, Figures], bound: OrderBound) -> None:
    """Holds a simulated trace against the replay without a clock.

    Raises:
        CaseFailedError: a policy is above the optimum of the order, or LRU is far above LRU's.
    """
    for policy, values in figures.items():
        limit = bound.lru + _LRU_SLACK if policy == "lru" else bound.belady + _BELADY_SLACK
        if values["hit_rate"] > limit:
            raise CaseFailedError(
                f"{name}: {policy} hits {values['hit_rate']:.4f}; in that order the capacity "
                f"allows {limit:.4f}"
            )


def _same(name: str, what: str, came: float, expected: float) -> None:
    if came != expected:
        raise CaseFailedError(f"{name}: {what}: {came} where {expected} was due")


def _ordered(name: str, what: str, *values: float) -> None:
    slack = 1e-9 * max(abs(value) for value in values)
    if any(low > high + slack for low, high in pairwise(values)):
        raise CaseFailedError(f"{name}: {what} should ascend: {values}")
