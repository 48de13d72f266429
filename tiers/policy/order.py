"""Base orders: which of the pages that nobody waits for leaves first. By id, one file each.

A base order is two booleans. A new one is a subclass of `BaseOrder` that sets them, and its line
here, or the entry point of another package (`sglang_ext/registry.py`). One that comes with the
plugin is named in the help of `--hier-kv-base-order`, too (`settings/config.py`), and what it does
is written down in `tests/unit/policy/test_policy_orders.py`. An order that two booleans cannot
express needs changes in `tier_lists.py` and `tier_kernels.py`, which keep the lists.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from sglang_ext.registry import Registry

_ORDERS: Final = Registry(
    "base order",
    "hier_kv.base_orders",
    {
        "lru": "sglang_ext.tiers.policy.order_lru:LruOrder",
        "fifo": "sglang_ext.tiers.policy.order_fifo:FifoOrder",
        "tail_of_queue": "sglang_ext.tiers.policy.order_tail_of_queue:TailOfQueueOrder",
    },
    is_id=lambda text: text.isascii() and text.isidentifier(),
    id_rule="a base order's id is letters, digits and _",
    error=ValueError,
)

register_order = _ORDERS.register
order_ids = _ORDERS.ids


class BaseOrder:
    """An order of leaving that follows from when pages were used.

    Each tier keeps its pages in lists (`tier_kernels.py`). The two attributes say when a page is
    put at the young end of its list, and from which end pages are evicted. So a decision costs the
    same whatever is stored.

    Attributes:
        restamps_on_use: a use moves the page to the young end; otherwise it stays where its first
            use put it.
        youngest_first: the young end leaves first.
    """

    restamps_on_use: ClassVar[bool]
    youngest_first: ClassVar[bool]


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
