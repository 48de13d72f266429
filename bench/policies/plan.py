"""Which simulations the policy bench runs, in full and in `--quick`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.policies.jobs import POLICIES, VARIANTS, Job
from bench.policies.workloads.agents import agent_tasks, document_questions, long_document
from bench.policies.workloads.bundled import BUNDLED
from bench.policies.workloads.models import (
    CHAT_MODELS,
    LLAMA_13B,
    LLAMA_70B,
    MISTRAL_7B,
    MISTRAL_DECODE_STEP_S,
    Model,
)
from bench.policies.workloads.setups import (
    DRAM_SHARE,
    HOST_GB,
    agents_at,
    chat,
    chat_system,
    documents_at,
    session_system,
    sessions_footprint,
    trace_at,
    trace_factor,
    trace_footprint,
    trace_system,
)
from bench.policies.workloads.sharegpt import NUM_CONVERSATIONS, THINK_S
from sglang_ext.simulator.trace import read_trace

DISKS_GB = {"128G/10T": 10_000.0, "128G/2T": 2_000.0}
WARMUP_TURNS, MEASURED_TURNS = 10_000, 42_000
HBM_CACHE_GB = 10.0
CAPACITY_RATIOS = (0.1, 0.25, 0.4, 0.5, 0.6, 1.0)
THINKS_S = (10.0, 30.0, 60.0, 180.0, 600.0)
SWEPT = ("lookahead", "lru", "waiting", "belady")
LOADS = (0.7, 3.0)
SHARES = (0.01, 0.05, 0.2, 1.0)
DOCUMENT_KIB = (4, 8, 16, 28)


@dataclass(frozen=True)
class Sizes:
    """How much is simulated.

    Attributes:
        scale: conversations, disk and warm-up of the chat set-ups, of the paper's.
        host_scale: their DRAM; of less than some conversations it would not be a tier.
        models: of the chat set-ups.
        agents: tasks.
        documents: sessions.
        trace_requests: None for the whole trace.
        variants: whether the policy's two sources of knowledge are told apart.
        shares: capacities of the other workloads, of their footprint.
        thinks_s: mean think times of the sweep.
    """

    scale: float
    host_scale: float
    models: tuple[Model, ...]
    agents: int
    documents: int
    trace_requests: int | None
    thinks_s: tuple[float, ...] = THINKS_S
    capacity_ratios: tuple[float, ...] = CAPACITY_RATIOS
    variants: bool = True
    shares: tuple[float, ...] = SHARES

    @property
    def policies(self) -> tuple[str, ...]:
        """Of the workloads that are not chats."""
        return (*POLICIES, *VARIANTS) if self.variants else POLICIES


FULL = Sizes(1.0, 1.0, CHAT_MODELS, 500, 1200, None)
QUICK = Sizes(0.0125, 0.15, (LLAMA_13B,), 30, 45, 300, (600.0,), (0.25,), False, (0.2,))


def for_servers(jobs: Iterable[Job], prefetch_policy: str, chunk_tokens: int) -> list[Job]:
    """The same for servers with `--hier-kv-prefetch-policy` and `--chunked-prefill-size`."""
    flags: dict[str, Any] = {"prefetch_policy": prefetch_policy, "chunk_tokens": chunk_tokens}
    return [replace(job, system=replace(job.system, **flags)) for job in jobs]


def chat_jobs(sizes: Sizes) -> Iterator[Job]:
    """4.2, 4.3.3 to 4.3.6 and the sweep of think times; names say which."""
    for model in sizes.models:
        for label, disk_gb in DISKS_GB.items():
            policies = (*POLICIES, "recompute") if disk_gb == max(DISKS_GB.values()) else POLICIES
            yield _chat_job(f"{model.name} {label}", model, sizes, policies, disk_gb=disk_gb)
        yield _chat_job(f"{model.name} no overflow", model, sizes, truncation=False)
        yield _chat_job(f"{model.name} hbm", model, sizes, host_gb=HBM_CACHE_GB, disk_gb=0)
        yield _chat_job(
            f"{model.name} hbm+dram", model, sizes, host_gb=HBM_CACHE_GB + HOST_GB, disk_gb=0
        )
    for ratio in sizes.capacity_ratios:
        disk_gb = ratio * required_gb(LLAMA_13B) - HOST_GB
        yield _chat_job(f"capacity {ratio:g}", LLAMA_13B, sizes, SWEPT, disk_gb=disk_gb)
    for think_s in sizes.thinks_s:
        if think_s != THINK_S:
            yield _chat_job(f"think {think_s:g} s", LLAMA_13B, sizes, SWEPT, think_s=think_s)


def required_gb(model: Model) -> float:
    """4.3.5's CCpUT: a full context of each conversation that starts in the TTL of one hour."""
    return 3600 * model.context_tokens * model.kv_bytes_per_token / 1e9


def _chat_job(
    name: str,
    model: Model,
    sizes: Sizes,
    policies: tuple[str, ...] = ("lookahead",),
    *,
    host_gb: float = HOST_GB,
    disk_gb: float = DISKS_GB["128G/10T"],
    think_s: float = THINK_S,
    truncation: bool = True,
) -> Job:
    return Job(
        name,
        partial(chat, model, round(NUM_CONVERSATIONS * sizes.scale), think_s),
        chat_system(
            model, host_gb * sizes.host_scale, disk_gb * sizes.scale, truncation=truncation
        ),
        policies,
        round(WARMUP_TURNS * sizes.scale),
        round(MEASURED_TURNS * sizes.scale),
    )


def document_jobs() -> Iterator[Job]:
    """4.3.8: one session on one document, batch of one, its second to sixth task measured."""
    for kib in DOCUMENT_KIB:
        system = replace(
            chat_system(MISTRAL_7B, HOST_GB, DISKS_GB["128G/10T"]),
            decode_tokens_per_s=1 / MISTRAL_DECODE_STEP_S,
            batch=1,
        )
        yield Job(
            f"document {kib}K",
            partial(long_document, kib * 1024),
            system,
            ("lookahead", "recompute"),
            warmup_turns=1,
        )


def session_jobs(sizes: Sizes) -> Iterator[Job]:
    """Agents and documents, at each load and share of their footprint."""
    for name, make, at, count in (
        ("agents", agent_tasks, agents_at, sizes.agents),
        ("documents", document_questions, documents_at, sizes.documents),
    ):
        footprint = sessions_footprint(make, count)
        for load in LOADS:
            for share in sizes.shares:
                system = session_system(footprint * share)
                build = partial(at, count, load)
                yield Job(f"{name} {load:g} {share:g}", build, system, sizes.policies)


def trace_jobs(sizes: Sizes, path: Path = BUNDLED) -> Iterator[Job]:
    """A trace stretched to each load, at each share of its footprint."""
    lines = read_trace(path, limit=sizes.trace_requests)
    footprint = trace_footprint(lines, LLAMA_70B.kv_bytes_per_token)
    for load in LOADS:
        for share in sizes.shares:
            host = footprint * share * DRAM_SHARE
            system = trace_system(lines, host, footprint * share - host)
            factor = trace_factor(lines, system, load)
            build = partial(trace_at, path, sizes.trace_requests, factor)
            yield Job(f"trace {load:g} {share:g}", build, system, sizes.policies)
