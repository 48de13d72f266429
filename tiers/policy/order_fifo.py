"""First in, first out."""

from __future__ import annotations

from sglang_ext.tiers.policy.order import BaseOrder


class FifoOrder(BaseOrder):
    """The page that has been known longest leaves first, however it was used since."""

    restamps_on_use = False
    youngest_first = False

    def stamp(self, first_use: int, last_use: int) -> int:
        """See `BaseOrder.stamp`."""
        return first_use
