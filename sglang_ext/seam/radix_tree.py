"""What the plugin asks of SGLang's radix tree, whichever of its cores holds it.

The core in Rust shows no nodes: where one is needed the answer is empty there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_ext.device.transfers import Hashes, hashes_from_hex

_NO_HASHES = np.empty((0, 32), np.uint8)


class TreeNode(NamedTuple):
    """A node on a path, with the rows of a hybrid model's window layers.

    Attributes:
        node_id: SGLang's number of it.
        first: index of its first page.
        end: behind its last page.
        hashes: of its pages.
        window_rows: `[(end - first) * P]`, rows of the window layers' pool; None where they left.
        parts: whether several paths go on behind it.
    """

    node_id: Any
    first: int
    end: int
    hashes: Sequence[str]
    window_rows: torch.Tensor | None
    parts: bool


class StateNode(NamedTuple):
    """A node on a path, with the state behind it.

    Attributes:
        node_id: SGLang's number of it.
        end: pages from the root to its end.
        slot: `[1]`, the state's, in the pool of states.
        parts: whether several paths go on behind it.
    """

    node_id: Any
    end: int
    slot: torch.Tensor
    parts: bool


class RadixTree:
    """The tree of one cache. Scheduler's thread only.

    Args:
        cache: SGLang's `UnifiedRadixCache`.
        core_name: `python` or `rust`.

    Attributes:
        page_size: P.
        shows_nodes: whether nodes can be looked at.
    """

    def __init__(self, cache: Any, core_name: str) -> None:
        self._cache = cache
        self.page_size: int = cache.page_size
        self.shows_nodes = core_name == "python"

    @property
    def _core(self) -> Any:
        return self._cache.tree_core

    def match(self, key: Any) -> Any:
        """SGLang's `MatchResult` of a key, of the device alone."""
        result = self._core.match_prefix(MatchPrefixParams(key=key))
        self._cache._apply_cache_actions(result.cache_actions)
        return result

    def device_prefix(self, key: Any) -> tuple[int, Any]:
        """Pages of a key that are on the device, and the node in which these end."""
        matched, node_id, _ = self._core.match_full_device_prefix(key)
        return int(matched) // self.page_size, node_id

    def window_path(self, key: Any) -> tuple[int, list[TreeNode]]:
        """Pages of a key whose full layers are on the device, and the nodes that hold them.

        Nothing where the tree does not say which pages a node holds.
        """
        num_pages, node_id = self.device_prefix(key)
        nodes: list[Any] = []
        node = self._core.node_by_id(node_id) if num_pages else None
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        path: list[TreeNode] = []
        for node in reversed(nodes):
            if node.hash_value is None:
                return 0, []
            first = path[-1].end if path else 0
            rows = node.component_data[ComponentType.SWA].value
            if rows is not None and len(rows) != len(node.key):
                rows = None  # which pages such rows are of is not said
            end = first + len(node.key) // self.page_size
            parts = len(node.children) > 1
            path.append(TreeNode(node.id, first, end, node.hash_value, rows, parts))
        return num_pages, path

    def state_path(self, key: Any) -> list[StateNode]:
        """The nodes of a key's path behind which the device has a state, from the root on.

        A node's state is that behind its last token. Nodes in which the key ends are left out, and
        those behind a page without a hash, whose state has no name.
        """
        num_pages, node_id = self.device_prefix(key)
        path: list[StateNode] = []
        node = self._core.node_by_id(node_id) if num_pages else None
        depth = self._depth(node)
        while node is not None and node.parent is not None:
            slot = node.component_data[ComponentType.MAMBA].value
            if len(node.hash_value or ()) * self.page_size != len(node.key):
                path.clear()
            elif slot is not None and depth <= num_pages * self.page_size:
                end = depth // self.page_size
                path.append(StateNode(node.id, end, slot, len(node.children) > 1))
            depth -= len(node.key)
            node = node.parent
        return path[::-1]

    @staticmethod
    def _depth(node: Any) -> int:
        """Tokens from the root to the end of a node."""
        depth = 0
        while node is not None and node.parent is not None:
            depth += len(node.key)
            node = node.parent
        return depth

    def num_on_device(self, key: Any) -> int:
        """Pages of a key that are on the device."""
        return self.device_prefix(key)[0]

    def num_resumable(self, key: Any) -> int:
        """As `num_on_device`, of a hybrid: up to where its windows or its state are there."""
        return int(self.match(key).device_prefix_len) // self.page_size

    def rows(self, node_id: Any) -> torch.Tensor:
        """Rows of the device pool on the path from the root to the end of a node."""
        rows: torch.Tensor = self._core.collect_full_device_indices(
            node_id, self._core.root_node_handle()
        )
        return rows

    def path_hashes(self, node_id: Any) -> list[str]:
        """Hashes of the pages from the root to the end of a node; none for a session's rows."""
        if self._cache.is_root(node_id) or is_virtual_node(node_id):
            return []
        return [*self._core.get_prefix_hash_values(node_id), *self._core.get_hash_values(node_id)]

    def path_before(self, node_id: Any, num_tokens: int) -> tuple[int, Hashes]:
        """Index of a node's first token, and the hashes of the pages before it.

        Args:
            node_id: the node.
            num_tokens: its number of tokens.
        """
        core = self._core
        if not self.shows_nodes:
            end = len(core.collect_full_device_indices(node_id, self._cache.root_node_handle()))
            return end - num_tokens, _NO_HASHES
        above: list[Sequence[str]] = []
        node = core.node_by_id(node_id).parent
        position = 0
        while node is not None and node.parent is not None:
            position += len(node.key)
            above.append(node.hash_value or ())
            node = node.parent
        keys = [key for hashes in reversed(above) for key in hashes]
        return position, hashes_from_hex(keys) if keys else _NO_HASHES

    def is_being_saved(self, node_id: Any, page: int) -> bool:
        """Whether the save of a page on the path to a node is under way.

        Args:
            node_id: a node.
            page: index of a page before the node's own.
        """
        above = []
        node = self._core.node_by_id(node_id).parent
        while node.parent is not None:
            above.append(node)
            node = node.parent
        end = 0
        for node in reversed(above):
            end += len(node.key) // self.page_size
            if page < end:
                return node.write_through_pending_id is not None
        return False

    @property
    def live_hashes(self) -> Callable[[], Iterable[str]] | None:
        """What lists the hashes of all pages in the tree; None where nodes are not shown."""
        return self._live_hashes if self.shows_nodes else None

    def _live_hashes(self) -> Iterable[str]:
        for node in self._core._node_arena.values():
            yield from node.hash_value or ()

    def forget_saves(self) -> None:
        """Marks every node as stored nowhere; the core in Rust keeps its marks until a flush."""
        if self.shows_nodes:
            for node in self._core._node_arena.values():
                node.external_cache_stored = False
