"""What a workload asks of a machine: its load, and what an unbounded cache would hold and reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sglang_ext.simulator.engine import source_of
from sglang_ext.simulator.source import Source
from sglang_ext.simulator.trace import BLOCK_TOKENS, Line
from sglang_ext.simulator.types import Request, System, Workload


def offered_load(workload: Workload, system: System, *, reuse: bool) -> float:
    """Work that a workload asks for, per second of the time in which it arrives.

    The larger of two: one prefill at a time, and places in the batch, which are taken from the
    start of the prefill to the end of the answer.

    Args:
        workload: conversations (arrival of a turn: as if answers took no time) or a trace.
        system: the machine; speeds, batch and context window count.
        reuse: with an unbounded store, instead of computing every prompt.
    """
    source = source_of(workload, system)
    seen = np.zeros(max(source.num_pages, 1), np.bool_)
    first_s, last_s, prefill_s, decode_s = np.inf, 0.0, 0.0, 0.0
    for time_s, request in _requests(source):
        first_s, last_s = min(first_s, time_s), max(last_s, time_s)
        reused = 0
        if reuse:
            known = seen[request.prompt_ids]
            pages = len(known) if known.all() else int(np.argmin(known))
            reused = min(pages * system.page_tokens, request.prompt_tokens - 1)
            seen[request.stored_ids] = True
        prefill_s += (request.prompt_tokens - reused) / system.prefill_tokens_per_s
        decode_s += request.output_tokens / system.decode_tokens_per_s
    span_s = max(last_s - float(first_s), 1e-9)
    return max(prefill_s, (prefill_s + decode_s) / system.batch) / span_s


def asked_pages(workload: Workload, system: System) -> int:
    """Pages of all prompts together."""
    requests = _requests(source_of(workload, system))
    return sum(request.prompt_tokens // system.page_tokens for _, request in requests)


def _requests(source: Source) -> Iterator[tuple[float, Request]]:
    """All requests and when they arrive: as if answers took no time, a round of turns at a time."""
    pending, number = source.starts(), 0
    while pending:
        pending.sort(reverse=True)
        following = []
        while pending:
            time_s, key = pending.pop()
            request = source.arrive(key, number, time_s)
            number += 1
            yield time_s, request
            if (then := source.done(request, time_s)) is not None:
                following.append(then)
        pending = following


def stretched(lines: Sequence[Line], factor: float) -> list[Line]:
    """The same requests with all times multiplied by `factor`: above 1 is less load."""
    return [replace(line, arrival_s=line.arrival_s * factor) for line in lines]


def reusable_tokens(lines: Sequence[Line]) -> int:
    """Prompt tokens in whole blocks that an unbounded cache would have."""
    return sum(_reusable(lines))


def _reusable(lines: Sequence[Line]) -> Iterator[int]:
    seen: set[int] = set()
    for line in lines:
        known = 0
        ids = line.hash_ids.tolist()
        for each in ids:
            if each not in seen:
                break
            known += BLOCK_TOKENS
        seen.update(ids)
        yield min(known, line.input_tokens)


def num_blocks(lines: Sequence[Line]) -> int:
    """Distinct blocks: the footprint of an unbounded cache."""
    return len({each for line in lines for each in line.hash_ids.tolist()})
