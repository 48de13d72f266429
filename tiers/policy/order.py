"""Base orders: which of the pages that nobody waits for leaves first. By id, one file each."""

from __future__ import annotations

import abc
import importlib
from typing import Any, ClassVar

_BUILTIN: dict[str, str] = {
    "lru": "sglang_ext.tiers.policy.order_lru:LruOrder",
    "fifo": "sglang_ext.tiers.policy.order_fifo:FifoOrder",
    "tail_of_queue": "sglang_ext.tiers.policy.order_tail_of_queue:TailOfQueueOrder",
}
_ORDERS: dict[str, str] = dict(_BUILTIN)


class BaseOrder(abc.ABC):
    """An order of leaving that follows from when pages were used.

    Every order here is a list of pages to which a page is appended at some event, and which is read
    from one of its ends; that keeps each decision constant in what is stored.

    Attributes:
        restamps_on_use: a use moves the page to the young end; otherwise it stays where its first
            use put it.
        youngest_first: the young end leaves first.
    """

    restamps_on_use: ClassVar[bool]
    youngest_first: ClassVar[bool]

    @abc.abstractmethod
    def stamp(self, first_use: int, last_use: int) -> int:
        """Place of a page in the order: smaller leaves sooner.

        Args:
            first_use: logical time at which the page came to be known.
            last_use: logical time of its last use, not before `first_use`.
        """


def register_order(order_id: str, target: str) -> None:
    """Registers `target` ("module:Class") as the base order called `order_id`.

    Raises:
        ValueError: the id is taken, or `target` is not of the form "module:Class".
    """
    if order_id in _ORDERS:
        raise ValueError(f"base order {order_id!r} is already registered as {_ORDERS[order_id]!r}")
    if target.count(":") != 1:
        raise ValueError(f"a base order is registered as 'module:Class', got {target!r}")
    _ORDERS[order_id] = target


def order_ids() -> tuple[str, ...]:
    """The registered ids, sorted."""
    return tuple(sorted(_ORDERS))


def base_order(order_id: str) -> BaseOrder:
    """Imports and builds the base order called `order_id`.

    Raises:
        ValueError: no base order has this id.
        TypeError: what is registered under it is no `BaseOrder`.
    """
    if order_id not in _ORDERS:
        raise ValueError(
            f"no base order is called {order_id!r}; known are {', '.join(order_ids())}"
        )
    module, name = _ORDERS[order_id].split(":")
    cls: Any = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, BaseOrder)):
        raise TypeError(f"{_ORDERS[order_id]} must be a subclass of BaseOrder")
    order: BaseOrder = cls()
    return order
