"""Which rows of window layers, and which states, a path of the device's tree has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402

from sglang_ext.seam.radix_tree import RadixTree  # noqa: E402

PAGE = 4


def node(node_id: int, parent: Any, pages: int, rows: int | None, *, hashed: bool = True) -> Any:
    value = None if rows is None else torch.arange(rows) + 100 * node_id
    hashes = [f"{node_id}-{page}" for page in range(pages)] if hashed else None
    return SimpleNamespace(
        id=node_id,
        parent=parent,
        key=[0] * pages * PAGE,
        hash_value=hashes,
        children={},
        component_data={
            ComponentType.SWA: SimpleNamespace(value=value),
            ComponentType.MAMBA: SimpleNamespace(value=value),
        },
    )


def tree_of(nodes: list[Any], num_tokens: int) -> RadixTree:
    by_id: Callable[[int], Any] = {each.id: each for each in nodes}.__getitem__
    core = SimpleNamespace(
        node_by_id=by_id,
        match_full_device_prefix=lambda key: (num_tokens, nodes[-1].id, num_tokens),
    )
    cache: Any = SimpleNamespace(tree_core=core, page_size=PAGE)
    return RadixTree(cache, "python")


def path(*parts: tuple[int, int | None]) -> list[Any]:
    nodes = [node(0, None, 0, None)]
    for number, (pages, rows) in enumerate(parts, start=1):
        nodes.append(node(number, nodes[-1], pages, rows))
    return nodes


def test_each_node_has_its_pages_and_the_rows_of_its_own() -> None:
    nodes = path((3, None), (2, 2 * PAGE), (1, PAGE))
    num_pages, found = tree_of(nodes, 6 * PAGE).window_path("key")
    assert num_pages == 6
    assert [(each.node_id, each.first, each.end) for each in found] == [
        (1, 0, 3), (2, 3, 5), (3, 5, 6),
    ]  # fmt: skip
    assert found[0].window_rows is None
    assert [int(each.window_rows[0]) for each in found[1:] if each.window_rows is not None] == [
        200,
        300,
    ]


def test_rows_of_fewer_tokens_than_the_node_has_are_those_of_no_page() -> None:
    """SGLang takes such rows for the node's last pages; taken for its first they were wrong KV."""
    num_pages, found = tree_of(path((3, 2 * PAGE)), 3 * PAGE).window_path("key")
    assert num_pages == 3
    assert found[0].window_rows is None


def test_a_node_that_does_not_name_its_pages_ends_it() -> None:
    nodes = path((3, 3 * PAGE))
    nodes.append(node(2, nodes[-1], 1, PAGE, hashed=False))
    assert tree_of(nodes, 4 * PAGE).window_path("key") == (0, [])


def test_states_are_those_of_nodes_that_the_key_passes() -> None:
    nodes = path((3, 1), (2, None), (1, 1), (2, 1))
    found = tree_of(nodes, 7 * PAGE).state_path("key")
    assert [(each.node_id, each.end) for each in found] == [(1, 3), (3, 6)]


@pytest.mark.parametrize("hashes", [None, ["1-0"], ["1-0", "1-1", "1-2", "1-3"]])
def test_what_lies_behind_a_page_without_a_name_has_no_state(hashes: list[str] | None) -> None:
    """Its own hash would be looked for, and found, at another number of tokens."""
    nodes = path((2, 1), (3, 1), (1, 1))
    nodes[2].hash_value = hashes
    found = tree_of(nodes, 6 * PAGE).state_path("key")
    assert [(each.node_id, each.end) for each in found] == [(1, 2)]


def test_pages_before_a_node_are_those_of_all_above_it_from_the_root_on() -> None:
    nodes = path((2, None), (1, None), (3, None), (1, None))
    names = iter(range(1, 8))
    for each in nodes[1:]:
        each.hash_value = [f"{next(names):064x}" for _ in each.hash_value]
    position, hashes = tree_of(nodes, 7 * PAGE).path_before(nodes[-1].id, PAGE)
    assert position == 6 * PAGE
    assert hashes[:, -1].tolist() == [1, 2, 3, 4, 5, 6]
    assert tree_of(nodes, 7 * PAGE).path_before(nodes[1].id, 2 * PAGE)[0] == 0
