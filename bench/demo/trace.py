"""What the demo asked, as a trace for `hier-kv size`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.demo.chats import PAGE_SIZE, Served


def write_trace(served: Sequence[Served], path: Path) -> None:
    """Writes a run's requests in the order in which they were sent, in blocks of a page."""
    ids: dict[tuple[int, ...], int] = {}
    in_order = sorted(served, key=lambda one: one.sent_s)
    lines = []
    for one in in_order:
        ends = [*range(PAGE_SIZE, len(one.prompt), PAGE_SIZE), len(one.prompt)]
        line = {
            "timestamp": int(1e3 * (one.sent_s - in_order[0].sent_s)),
            "input_length": len(one.prompt),
            "output_length": one.output_tokens,
            "hash_ids": [ids.setdefault(one.prompt[:end], len(ids)) for end in ends],
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
