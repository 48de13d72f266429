"""Workloads and systems of the policy bench, put together: what one simulation is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.policies.workloads.agents import agent_tasks, document_questions, footprint_tokens
from bench.policies.workloads.bundled import BUNDLED
from bench.policies.workloads.loads import num_blocks, offered_load, stretched
from bench.policies.workloads.models import (
    BATCH,
    DISK_BYTES_PER_S,
    LLAMA_70B,
    PCIE_BYTES_PER_S,
    Model,
)
from bench.policies.workloads.sharegpt import Conversations, sharegpt_like
from sglang_ext.simulator.engine import Conversation, System, TraceRequest, Turn
from sglang_ext.simulator.trace import BLOCK_TOKENS, Line, read_trace
from sglang_ext.tiers.base import BLOCK_BYTES, MAX_RECORD_BLOCKS

SEED = 4
PAGE_TOKENS = 128
HOST_GB = 128.0
LONG_CONTEXT = 1 << 20  # no overflow
# Of a capacity that is given as a share of a footprint, what is DRAM. The paper's is 1.3 %; a fifth
# lets the smallest capacities hold a few requests in DRAM.
DRAM_SHARE = 0.2


def chat(model: Model, count: int, think_s: float) -> list[Conversation]:
    """ShareGPT-like conversations for a model; called in the process that simulates them."""
    return as_turns(sharegpt_like(SEED, count=count, think_s=think_s), model.context_tokens)


def as_turns(source: Conversations, context_tokens: int) -> list[Conversation]:
    """The simulator's form of conversations.

    A question or an answer longer than half of the context window is cut there: it could not be
    served otherwise. Think times move to the turn before.
    """
    most = context_tokens // 2
    questions = source.question_tokens.clip(max=most).tolist()
    answers = source.answer_tokens.clip(max=most).tolist()
    thinks = [*source.think_s.tolist()[1:], 0.0]
    marks = source.first.tolist()
    return [
        Conversation(
            start,
            tuple(Turn(questions[at], answers[at], thinks[at]) for at in range(low, high)),
        )
        for start, low, high in zip(source.start_s.tolist(), marks, marks[1:], strict=False)
    ]


def page_tokens(model: Model) -> int:
    """Tokens of a page: `PAGE_TOKENS`, or half as many as often as a page must fit a record."""
    tokens = PAGE_TOKENS
    while tokens * model.kv_bytes_per_token + BLOCK_BYTES > MAX_RECORD_BLOCKS * BLOCK_BYTES:
        tokens //= 2
    return tokens


def chat_system(model: Model, host_gb: float, disk_gb: float, *, truncation: bool = True) -> System:
    """The paper's machine.

    HBM keeps nothing between turns, as in the paper outside 4.3.6. A request decodes at the step
    time of a full batch with half-full contexts.
    """
    return System(
        page_tokens=page_tokens(model),
        kv_bytes_per_token=model.kv_bytes_per_token,
        dram_bytes=host_gb * 1e9,
        disk_bytes=disk_gb * 1e9,
        dram_gb_s=PCIE_BYTES_PER_S / 1e9,
        disk_gb_s=DISK_BYTES_PER_S / 1e9,
        disk_write_gb_s=DISK_BYTES_PER_S / 1e9,
        prefill_tokens_per_s=model.prefill_tokens_per_s,
        decode_tokens_per_s=1 / model.decode_step_s(model.context_tokens / 2),
        batch=BATCH,
        context_window=model.context_tokens,
        truncation=truncation,
    )


def session_system(capacity_bytes: float) -> System:
    """LLaMA-70B's machine for agents and documents, without overflow, of a given capacity."""
    return replace(
        chat_system(LLAMA_70B, 0, 0),
        decode_tokens_per_s=1 / LLAMA_70B.decode_step_s(16_384),
        context_window=LONG_CONTEXT,
        dram_bytes=capacity_bytes * DRAM_SHARE,
        disk_bytes=capacity_bytes * (1 - DRAM_SHARE),
    )


def sessions_at_load(
    make: Callable[[int, int, float], list[Conversation]], count: int, load: float
) -> list[Conversation]:
    """Sessions whose starts are spread so that the offered load without reuse is `load`."""
    base = make(SEED, count, 1.0)
    factor = offered_load(base, session_system(0), reuse=False) / load
    return [replace(each, start_s=each.start_s * factor) for each in base]


def sessions_footprint(make: Callable[[int, int, float], list[Conversation]], count: int) -> float:
    """Bytes of KV of all sessions, shared prefixes once."""
    return float(footprint_tokens(make(SEED, count, 1.0)) * LLAMA_70B.kv_bytes_per_token)


agents_at = partial(sessions_at_load, agent_tasks)
documents_at = partial(sessions_at_load, document_questions)


def trace_system(
    lines: list[Line],
    host_bytes: float,
    disk_bytes: float,
    *,
    kv_bytes_per_token: float = LLAMA_70B.kv_bytes_per_token,
    prefill_tokens_per_s: float = LLAMA_70B.prefill_tokens_per_s,
) -> System:
    """A machine for a trace. Batch slots are twice what prefill at full speed can fill, so that
    prefill is what a load is a share of."""
    decode_tokens_per_s = 1 / LLAMA_70B.decode_step_s(16_384)
    input_tokens = sum(line.input_tokens for line in lines) / len(lines)
    output_s = sum(line.output_tokens for line in lines) / len(lines) / decode_tokens_per_s
    slots = 2 * prefill_tokens_per_s / input_tokens * output_s
    return replace(
        chat_system(LLAMA_70B, 0, 0),
        page_tokens=BLOCK_TOKENS,
        kv_bytes_per_token=kv_bytes_per_token,
        dram_bytes=host_bytes,
        disk_bytes=disk_bytes,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        batch=max(BATCH, int(slots) + 1),
    )


def trace_requests(lines: list[Line]) -> list[TraceRequest]:
    """The simulator's form of a trace."""
    return [
        TraceRequest(line.arrival_s, line.hash_ids, line.input_tokens, line.output_tokens)
        for line in lines
    ]


def trace_at(path: Path, limit: int | None, factor: float) -> list[TraceRequest]:
    """A trace with its times stretched; called in the process that simulates it."""
    return trace_requests(stretched(read_trace(path, limit=limit), factor))


def trace_factor(lines: list[Line], system: System, load: float) -> float:
    """What to multiply the trace's times with for an offered load without reuse of `load`."""
    return offered_load(trace_requests(lines), system, reuse=False) / load


def trace_footprint(lines: list[Line], kv_bytes_per_token: float) -> float:
    """Bytes of all distinct blocks."""
    return num_blocks(lines) * BLOCK_TOKENS * kv_bytes_per_token


__all__ = [
    "BUNDLED",
    "agents_at",
    "as_turns",
    "chat",
    "chat_system",
    "documents_at",
    "session_system",
    "sessions_footprint",
    "trace_at",
    "trace_factor",
    "trace_footprint",
    "trace_requests",
    "trace_system",
]
