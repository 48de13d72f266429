"""What comes back of a server that guesses, beside what its device has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.records.record import parse_header
from testkit.requests import flush_device
from testkit.server import Server, ServerError
from tests.e2e.drafts.test_speculation import assert_same, guesses, records
from tests.e2e.hier_server import by_tier, settled

Answers = Sequence[dict[str, Any]]


def device_hits(
    server: Server, turns: Callable[[Server], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Answers behind what the device has; see test_speculation.py of why it is the third time."""
    turns(server)
    settled(server)
    flush_device(server)
    turns(server)
    settled(server)
    hits = turns(server)
    settled(server)
    assert min(by_tier(answer)["device"] for answer in hits) >= 384
    return hits


def check_same(found: Answers, hits: Answers) -> None:
    """Tokens, log-probabilities and guesses are those of device hits."""
    assert_same(found, hits, 0.0)
    assert [guesses(answer) for answer in found] == [guesses(answer) for answer in hits]


def check_restored(found: Answers, hits: Answers, tier: str) -> None:
    """They are, and all that the first turns reused came from a tier."""
    reused = [by_tier(answer)["device"] for answer in hits]
    assert [by_tier(answer)[tier] for answer in found][::2] == reused[::2]
    check_same(found, hits)


def check_thresholds_stay(server: Server) -> None:
    """Its administrator is told why the thresholds of guesses are not lowered, and they are not."""
    threshold = "speculative_accept_threshold_acc"
    change = {"pp_max_micro_batch_size": 3, threshold: 0.5}
    refusal = "--enable-hier-kv needs --speculative-accept-threshold-acc .*, got 0.5; leave it"
    with pytest.raises(ServerError, match=refusal) as refused:
        server.post("/set_internal_state", {"server_args": change})
    assert refused.value.status == 400
    [state] = server.get("/server_info")["internal_states"]
    assert state[threshold] == 1.0
    assert state["pp_max_micro_batch_size"] != 3
    assert server.post("/set_internal_state", {"server_args": {threshold: 1.0}}) == [True]


def codecs_on_disk(folder: Path) -> set[str]:
    """Of all records below a folder."""
    return {parse_header(record)[0].codec for _, _, record in records(folder)}
