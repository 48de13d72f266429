"""Settings of a placement policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_ext.tiers.policy.base_orders.registry import base_order

MAX_TENANTS = 15
"""Tenants with a share; a decision may look at pages of each of them."""


@dataclass(frozen=True)
class PolicyConfig:
    """How a `PlacementPolicy` decides.

    Attributes:
        order: id of the base order, for pages that nobody waits for: `lru`, `fifo`,
            `tail_of_queue`, or one that was registered.
        lookahead: pages that a waiting request needs stay while others may leave. Off, the base
            order alone decides: for comparison.
        return_times: below the window, pages leave by learned return times where those do better
            than the base order; and with `lookahead` first those that cut conversations left
            behind, as long as these are not seen to return.
        pin_share: pinned pages leave last while they are no more than this share of a tier.
        shares: of each tier that tenants have by right, each above 0, at most 1 together; tenant n
            has the n-th, from 1 on, and 0 stands for all others, who have the rest.

    Raises:
        ValueError: the order is not known, or a share is none.
    """

    order: str = "lru"
    lookahead: bool = True
    return_times: bool = True
    pin_share: float = 0.0
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        base_order(self.order)
        if not 0.0 <= self.pin_share <= 1.0:
            raise ValueError(f"pin_share is a share from 0 to 1, got {self.pin_share:g}")
        if len(self.shares) > MAX_TENANTS or not all(share > 0 for share in self.shares):
            raise ValueError(f"shares are up to {MAX_TENANTS}, each above 0, got {self.shares}")
        if sum(self.shares) > 1 + 1e-9:
            raise ValueError(f"shares are at most 1 together, got {sum(self.shares):g}")


LEAST_RECENT: Final = PolicyConfig(lookahead=False, return_times=False)
"""The least recent page leaves: a policy that no request is known to."""
