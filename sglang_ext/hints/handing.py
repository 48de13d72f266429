"""Hands what a request says of its conversation to the store."""

from __future__ import annotations

from sglang_ext.hints.request_hints import RequestHints
from sglang_ext.tiers.store import KeySpace
from sglang_ext.tiers.store.lookahead import LookAhead
from sglang_ext.tiers.store.types import Hashes


def hand_on(
    lookahead: LookAhead,
    space: KeySpace,
    hashes: Hashes,
    owner: int,
    hints: RequestHints,
    *,
    by_operator: bool = False,
) -> None:
    """Tells the look-ahead all of a request's hints, behind `LookAhead.used`.

    Args:
        lookahead: of the store.
        space: namespace and adapter.
        hashes: u8 `[N, 32]`, the conversation's pages from the root on.
        owner: by whose record it is believed; see `owner_slot`.
        hints: what it says.
        by_operator: no request of the conversation says so; then its pins give way to none.
    """
    if hints.ends or hints.returns_in_s is not None:
        lookahead.hint(space, hashes, owner=owner, returns_in_s=hints.returns_in_s)
    if hints.ttl_s is not None:
        lookahead.limit_life(space, hashes, owner=owner, ttl_s=hints.ttl_s)
    if hints.pin_s is not None:
        lookahead.pin(space, hashes, owner=owner, seconds=hints.pin_s, gives_way=not by_operator)
