"""Simulates serving in virtual time, over the server's own page store and waiting room.

    outcome = run(conversations, system, "lookahead", warmup_turns=10_000)

The workload and the system are the dataclasses of `sglang_ext.simulator.types`, which this
module gives out too. `docs/simulator.md` tells what is modelled and what is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.simulator.loop import Simulator
from sglang_ext.simulator.source import ConversationSource, Source, TraceSource
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
    on_admitted: Callable[[int], None] | None = None,
) -> Outcome:
    """Runs a workload on one server.

    Args:
        workload: conversations or a trace.
        system: the machine.
        policy: one of `POLICIES`.
        warmup_turns: turns, in order of admission, that are not measured.
        measured_turns: turns that are, `None` for all others.
        config: instead of the policy's own.
        on_admitted: is told after each admission how many there were.

    Raises:
        ValueError: no such policy, an empty workload, or no turn to measure.
    """
    if policy not in POLICIES:
        raise ValueError(f"no policy is called {policy!r}; known are {', '.join(POLICIES)}")
    if not workload:
        raise ValueError("the workload is empty; give conversations or trace requests")
    if policy == "recompute":
        system = dataclasses.replace(system, dram_bytes=0, disk_bytes=0)
    source = source_of(workload, system)
    tally = Tally(system, warmup_turns, measured_turns, source.num_requests)
    simulator = Simulator(source, system, config or POLICIES[policy], tally, on_admitted)
    simulator.run()
    done = Recorded(
        simulator.requests,
        max(source.num_pages, 1),
        simulator.admitted,
        simulator.num_waiting,
        simulator.saved,
    )
    return tally.outcome(policy, done, simulator.counters())


def source_of(workload: Sequence[Any], system: System) -> Source:
    """Where the requests of a workload come from."""
    if isinstance(workload[0], Conversation):
        return ConversationSource(workload, system)
    return TraceSource(workload)
