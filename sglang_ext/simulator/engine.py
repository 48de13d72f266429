"""Simulates serving in virtual time, over the server's own page store and waiting room.

    outcome = run(conversations, system, "lookahead", warmup_turns=10_000)

The workload and the system are the dataclasses of `sglang_ext.simulator.types`, which this
module gives out too. `docs/lookahead.md` tells what is modelled and what is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_ext.simulator.loop import Simulator
from sglang_ext.simulator.source import ConversationSource, ReplaySource, Source, TraceSource
from sglang_ext.simulator.tally import Tally
from sglang_ext.simulator.types import (
    Conversation,
    Outcome,
    Recorded,
    Request,
    System,
    TraceRequest,
    Turn,
    Workload,
)
from sglang_ext.tiers.policy import PolicyConfig

__all__ = [
    "POLICIES",
    "Conversation",
    "Outcome",
    "Recorded",
    "Request",
    "System",
    "TraceRequest",
    "Turn",
    "Workload",
    "footprint_bytes",
    "offered_load",
    "run",
]

POLICIES: dict[str, PolicyConfig | None] = {
    "lookahead": PolicyConfig(),
    "off": None,
    "recompute": None,
}
"""Settings of the server: `--hier-kv-lookahead` on and off; `recompute` stores nothing."""


def run(
    workload: Workload,
    system: System,
    policy: str,
    *,
    warmup_turns: int = 0,
    measured_turns: int | None = None,
    config: PolicyConfig | None = None,
    recorded: Recorded | None = None,
) -> Outcome:
    """Runs a workload on one server.

    Args:
        workload: conversations or a trace.
        system: the machine.
        policy: one of `POLICIES`.
        warmup_turns: turns, in order of admission, that are not measured.
        measured_turns: turns that are, `None` for all others.
        config: instead of the policy's own.
        recorded: `Outcome.recorded` of a run of the same workload: replayed instead of it, at the
            times at which its requests came there.

    Raises:
        ValueError: no such policy, an empty workload, or no turn to measure.
    """
    if policy not in POLICIES:
        raise ValueError(f"no policy is called {policy!r}; known are {', '.join(POLICIES)}")
    if not workload:
        raise ValueError("the workload is empty; give conversations or trace requests")
    if policy == "recompute":
        system = dataclasses.replace(system, dram_bytes=0, disk_bytes=0)
    source = _source(workload, system)
    if recorded is not None:
        source = ReplaySource(recorded)
    tally = Tally(system, warmup_turns, measured_turns, source.num_requests)
    simulator = Simulator(source, system, config or POLICIES[policy], tally)
    simulator.run()
    done = Recorded(
        simulator.requests, max(source.num_pages, 1), simulator.num_waiting, simulator.saved
    )
    return tally.outcome(policy, done, simulator.counters())


def _source(workload: Sequence[Any], system: System) -> Source:
    if isinstance(workload[0], Conversation):
        return ConversationSource(workload, system)
    return TraceSource(workload)


def offered_load(workload: Workload, system: System, *, reuse: bool) -> float:
    """Work that a workload asks for, per second of the time in which it arrives.

    The larger of two: one prefill at a time, and places in the batch, which are taken from the
    start of the prefill to the end of the answer.

    Args:
        workload: conversations (arrival of a turn: as if answers took no time) or a trace.
        system: the machine; speeds, batch and context window count.
        reuse: with an unbounded store, instead of computing every prompt.
    """
    source = _source(workload, system)
    pending = source.starts()
    seen = np.zeros(max(source.num_pages, 1), np.bool_)
    first_s, last_s, prefill_s, decode_s = np.inf, 0.0, 0.0, 0.0
    number = 0
    while pending:
        pending.sort(reverse=True)
        following = []
        while pending:
            time_s, key = pending.pop()
            request = source.arrive(key, number, time_s)
            number += 1
            first_s, last_s = min(first_s, time_s), max(last_s, time_s)
            reused = 0
            if reuse:
                known = seen[request.prompt_ids]
                pages = len(known) if known.all() else int(np.argmin(known))
                reused = min(pages * system.page_tokens, request.prompt_tokens - 1)
                seen[request.stored_ids] = True
            prefill_s += (request.prompt_tokens - reused) / system.prefill_tokens_per_s
            decode_s += request.output_tokens / system.decode_tokens_per_s
            if (then := source.done(request, time_s)) is not None:
                following.append(then)
        pending = following
    span_s = max(last_s - float(first_s), 1e-9)
    return max(prefill_s, (prefill_s + decode_s) / system.batch) / span_s


def footprint_bytes(workload: Sequence[TraceRequest], system: System) -> float:
    """KV of all distinct pages of a trace."""
    return TraceSource(workload).num_pages * system.page_bytes
