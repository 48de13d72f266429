"""What clients say of conversations: hints of requests, and calls of the steering endpoint."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from testkit.server import Server, ServerError

# True and false ones alike: what is said has no bearing on what a round does next.
_HINTS: tuple[dict[str, Any], ...] = (
    {"returns_in_s": 2},
    {"returns_in_s": 30, "ttl_s": 600},
    {"ttl_s": 1},
    {"pin_s": 20},
    {"ends": True},
)
_CALLS: tuple[dict[str, Any], ...] = (
    {"prefetch": True},
    {"prefetch": True, "pin_s": 20},
    {"pin_s": 20},
    {"unpin": True},
    {"demote": True},
    {"ends": True},
    {"locate": True},
)
_CHANGING = "the weights are changing"
_SHARE_HINTED, _SHARE_CALLED = 0.5, 0.2


def hints_of(rng: random.Random) -> dict[str, Any]:
    """`custom_params` of a request; empty for half of them."""
    return {"hier_kv_hints": rng.choice(_HINTS)} if rng.random() < _SHARE_HINTED else {}


def steer(server: Server, rng: random.Random, ids: Sequence[int], extra_key: str) -> str:
    """Says something of a prompt that was answered, now and then; returns what came of it, if so.

    Raises:
        ServerError, OSError: the call failed, and not because the weights change.
    """
    if rng.random() >= _SHARE_CALLED:
        return ""
    who = {"extra_key": extra_key} if extra_key else {}
    try:
        server.post("/hier_kv/steer", {"input_ids": list(ids), **who, **rng.choice(_CALLS)})
    except ServerError as error:
        if _CHANGING not in error.body:
            raise
        return "steered while weights changed, refused"
    return "steered"
