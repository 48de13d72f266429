"""Base orders by id.

A new one is a subclass of `BaseOrder` that sets its two booleans, and its line here, or the entry
point of another package (`sglang_ext/registry.py`). One that comes with the plugin is named in the
help of `--hier-kv-base-order`, too (`settings/config.py`), and what it does is written down in
`tests/unit/policy/test_policy_orders.py`. An order that two booleans cannot express needs changes
in `tier_lists.py` and `tier_kernels.py`, which keep the lists.
"""

from __future__ import annotations

from typing import Any, Final

from sglang_ext.registry import Registry
from sglang_ext.tiers.policy.base_orders.base import BaseOrder

_ORDERS: Final = Registry(
    "base order",
    "hier_kv.base_orders",
    {
        "lru": "sglang_ext.tiers.policy.base_orders.lru:LruOrder",
        "fifo": "sglang_ext.tiers.policy.base_orders.fifo:FifoOrder",
        "tail_of_queue": "sglang_ext.tiers.policy.base_orders.tail_of_queue:TailOfQueueOrder",
    },
    is_id=lambda text: text.isascii() and text.isidentifier(),
    id_rule="a base order's id is letters, digits and _",
    error=ValueError,
)

register_order = _ORDERS.register
order_ids = _ORDERS.ids


def base_order(order_id: str) -> BaseOrder:
    """Imports and builds the base order called `order_id`.

    Raises:
        ValueError: no base order has this id, or what has it is none.
    """
    cls: Any = _ORDERS.load(order_id)
    if not (isinstance(cls, type) and issubclass(cls, BaseOrder)):
        raise ValueError(f"the base order {order_id!r} must be a subclass of BaseOrder")
    order: BaseOrder = cls()
    return order
