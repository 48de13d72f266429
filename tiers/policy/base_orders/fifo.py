"""First in, first out."""

from __future__ import annotations

from sglang_ext.tiers.policy.base_orders.base import BaseOrder


class FifoOrder(BaseOrder):
    """The page that has been known longest leaves first, however it was used since."""

    restamps_on_use = False
    youngest_first = False
