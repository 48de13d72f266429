"""The device tree and the waiting queue: what eviction spares, and what it took all the same.

Works on SGLang's Python radix tree; the one in Rust shows no nodes. Nothing is locked, so that
SGLang may evict everything that it counts as evictable: what the queue needs only leaves later,
and admission can never wait for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Requests whose nodes are spared, from the head of the queue.
MAX_SPARED_REQUESTS = 128


class DeviceNode(NamedTuple):
    """A node on a request's path, as it was matched.

    Attributes:
        node_id: SGLang's number of it; not used again when the node is evicted.
        num_pages: pages from the root to its end.
    """

    node_id: int
    num_pages: int


class SparingStrategy:
    """An eviction strategy of SGLang's, behind what the queue needs.

    Nodes on the path of a waiting request sort behind all others, those of the head of the queue
    last; among equals the wrapped strategy decides.

    Args:
        base: what orders the nodes; has `get_priority`.
        ranks: places of needed nodes by number, 1 for the first to leave; called at every look, so
            it should be cheap when nothing changed.
    """

    def __init__(self, base: Any, ranks: Callable[[], dict[int, int]]) -> None:
        self._base = base
        self._ranks = ranks

    def get_priority(self, node: Any) -> tuple[int, Any]:
        """SGLang's order of eviction: the smallest leaves first."""
        return self._ranks().get(node.id, 0), self._base.get_priority(node)


class DeviceTree:
    """SGLang's radix tree as the waiting queue sees it. Scheduler's thread only.

    Args:
        core: SGLang's tree core, in Python.
        queue: the waiting requests, in order.
    """

    def __init__(self, core: Any, queue: Callable[[], Sequence[Any]]) -> None:
        self._core = core
        self._queue = queue
        self._ranks: dict[int, int] | None = None  # of this step; found when first asked for

    def install(self) -> None:
        """Makes SGLang's eviction spare what the queue needs; before the first eviction."""
        self._core.eviction_strategy = SparingStrategy(self._core.eviction_strategy, self.ranks)

    def new_step(self) -> None:
        """The queue may have changed."""
        self._ranks = None

    def ranks(self) -> dict[int, int]:
        """Places of the nodes that waiting requests need, by number; the head's are the highest."""
        if self._ranks is None:
            self._ranks = {}
            waiting = self._queue()[:MAX_SPARED_REQUESTS]
            for rank, req in zip(range(len(waiting), 0, -1), waiting, strict=True):
                node = self._node(req.last_node)
                while node is not None and node.parent is not None and node.id not in self._ranks:
                    self._ranks[node.id] = rank
                    node = node.parent
        return self._ranks

    def path(self, node_id: Any, page_size: int) -> list[DeviceNode]:
        """The nodes from a matched one up to the root, the deepest first."""
        nodes = []
        node = self._node(node_id)
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        path, end = [], 0
        for node in reversed(nodes):
            end += len(node.key)
            path.append(DeviceNode(node.id, end // page_size))
        return path[::-1]

    def num_still_on_device(self, path: Sequence[DeviceNode]) -> int:
        """Pages of a path, from the root on, that are still on the device. O(nodes that left).

        A node that is split keeps its number and its end, and eviction starts at the leaves.
        """
        for entry in path:
            if self._node(entry.node_id) is not None:
                return entry.num_pages
        return 0

    def _node(self, node_id: Any) -> Any:
        try:
            return self._core.node_by_id(node_id)
        except KeyError:
            return None
