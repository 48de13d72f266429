"""Least recently used first."""

from __future__ import annotations

from sglang_ext.tiers.policy.base_orders.base import BaseOrder


class LruOrder(BaseOrder):
    """The page whose last use is longest ago leaves first."""

    restamps_on_use = True
    youngest_first = False
