"""What would come back at the tail of the queue leaves first."""

from __future__ import annotations

from sglang_ext.tiers.policy.base_orders.base import BaseOrder


class TailOfQueueOrder(BaseOrder):
    """The page used last leaves first.

    Under first come, first served, with think times alike, the conversation that was served last
    comes back last and stands at the tail of the queue. This extends the rule inside the window
    (the tail leaves first) to requests that are not in the queue yet. It keeps a stable part of a
    set that is visited in turn and does not fit, where LRU keeps nothing of it.
    """

    restamps_on_use = True
    youngest_first = True
