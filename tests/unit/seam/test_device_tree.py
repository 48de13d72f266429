"""What the device's eviction spares for the queue, and what it took all the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sglang_ext.seam.device_tree import MAX_SPARED_REQUESTS, DeviceNode, DeviceTree

PAGE = 4


@dataclass
class Node:
    """What of SGLang's tree node is looked at."""

    id: int
    parent: Node | None
    key: list[int]
    last_access_time: float = 0.0


@dataclass
class Core:
    """SGLang's tree core, with the four methods that are used of it."""

    nodes: dict[int, Node] = field(default_factory=dict)
    eviction_strategy: Any = None

    def __post_init__(self) -> None:
        self.nodes[0] = Node(0, None, [])
        self.eviction_strategy = SimpleNamespace(get_priority=lambda node: node.last_access_time)

    def node_by_id(self, node_id: Any) -> Node:
        return self.nodes[node_id]

    def add(self, node_id: int, parent: int, pages: int, time: float = 0.0) -> None:
        self.nodes[node_id] = Node(node_id, self.nodes[parent], [0] * pages * PAGE, time)

    def leaving(self) -> list[int]:
        """Ids in the order of eviction, as SGLang's heap has it."""
        strategy = self.eviction_strategy
        nodes = [node for node in self.nodes.values() if node.parent is not None]
        return [node.id for node in sorted(nodes, key=strategy.get_priority)]


def request(node_id: Any) -> Any:
    return SimpleNamespace(last_node=node_id)


def test_what_the_queue_needs_leaves_last_and_the_head_s_last_of_all() -> None:
    core = Core()
    queue: list[Any] = []
    for node_id, time in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)):
        core.add(node_id, 0, 1, time)
    tree = DeviceTree(core, lambda: queue)
    tree.install()
    assert core.leaving() == [1, 2, 3, 4]
    queue += [request(1), request(3)]
    assert core.leaving() == [1, 2, 3, 4]  # within a step the queue is as it was
    tree.new_step()
    assert core.leaving() == [2, 4, 3, 1]
    queue.clear()
    tree.new_step()
    assert core.leaving() == [1, 2, 3, 4]


def test_a_shared_node_counts_for_the_first_that_needs_it() -> None:
    core = Core()
    core.add(1, 0, 2, 1.0)
    core.add(2, 1, 1, 0.0)
    core.add(3, 1, 1, 0.0)
    tree = DeviceTree(core, lambda: [request(2), request(3), request(0), request(None), request(9)])
    ranks = tree.ranks()
    assert ranks[1] == ranks[2] == 5
    assert ranks[3] == 4
    assert set(ranks) == {1, 2, 3}


def test_only_the_head_of_a_long_queue_is_spared() -> None:
    core = Core()
    for node_id in range(1, 300):
        core.add(node_id, 0, 1)
    tree = DeviceTree(core, lambda: [request(node_id) for node_id in range(1, 300)])
    assert len(tree.ranks()) == MAX_SPARED_REQUESTS


def test_pages_that_are_still_held() -> None:
    core = Core()
    core.add(1, 0, 2)
    core.add(2, 1, 3)
    core.add(3, 2, 1)
    tree = DeviceTree(core, list)
    path = tree.path(3, PAGE)
    assert path == [DeviceNode(3, 6), DeviceNode(2, 5), DeviceNode(1, 2)]
    assert tree.num_still_on_device(path) == 6
    del core.nodes[3]
    assert tree.num_still_on_device(path) == 5
    del core.nodes[2]
    assert tree.num_still_on_device(path) == 2
    del core.nodes[1]
    assert tree.num_still_on_device(path) == 0
    assert tree.path(None, PAGE) == []
    assert tree.num_still_on_device([]) == 0


def test_a_split_changes_nothing() -> None:
    """The deeper part keeps its number, and its end."""
    core = Core()
    core.add(1, 0, 4)
    tree = DeviceTree(core, list)
    path = tree.path(1, PAGE)
    core.add(7, 0, 1)
    core.nodes[1] = Node(1, core.nodes[7], [0] * 3 * PAGE)
    assert tree.num_still_on_device(path) == 4
    assert tree.path(1, PAGE) == [DeviceNode(1, 4), DeviceNode(7, 1)]
