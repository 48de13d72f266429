"""Placement: what to fetch ahead of its use and what may leave, from the waiting queue."""

from sglang_ext.tiers.policy.base_orders.base import BaseOrder
from sglang_ext.tiers.policy.base_orders.registry import base_order, order_ids, register_order
from sglang_ext.tiers.policy.config import LEAST_RECENT, PolicyConfig
from sglang_ext.tiers.policy.hints.hint_kernels import NUM_OWNERS
from sglang_ext.tiers.policy.placement import PlacementPolicy
from sglang_ext.tiers.policy.tier_lists import TierLists

__all__ = [
    "LEAST_RECENT",
    "NUM_OWNERS",
    "BaseOrder",
    "PlacementPolicy",
    "PolicyConfig",
    "TierLists",
    "base_order",
    "order_ids",
    "register_order",
]
