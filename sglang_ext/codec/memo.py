"""A memory of things that can be had again: bounded, the least recent leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Values by key, at most so many and of so many bytes in all. Not thread-safe.

    The value that was put last stays, however large it is.

    Args:
        max_items: bound on their number.
        max_bytes: bound on the bytes that were named with them.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of values."""
        return len(self._items)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a key has a value."""
        return key in self._items

    def get(self, key: Hashable) -> Value | None:
        """A key's value, used just now; None without one."""
        if key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key][0]

    def put(self, key: Hashable, value: Value, num_bytes: int) -> None:
        """Remembers a value, and forgets others for it."""
        self.drop(key)
        self._items[key] = value, num_bytes
        self.num_bytes += num_bytes
        while len(self._items) > 1 and (
            len(self._items) > self._max_items or self.num_bytes > self._max_bytes
        ):
            self.drop(next(iter(self._items)))

    def drop(self, key: Hashable) -> None:
        """Forgets a key."""
        if key in self._items:
            self.num_bytes -= self._items.pop(key)[1]
