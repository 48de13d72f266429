"""Tree-side flow: what a match promises, where a transfer's pages lie, who a request belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    ExternalCacheHitMarker,
    UnifiedCacheLinkerWrapper,
)

from sglang_ext.linker import Hashes, HierKVLinker, Place, hashes_from_hex
from sglang_ext.request_state import Tier, state_of

if TYPE_CHECKING:
    from sglang_ext.cache import HierKVRadixCache

_NO_HASHES = np.empty((0, 32), np.uint8)


class HierKVLinkerWrapper(UnifiedCacheLinkerWrapper):
    """SGLang's wrapper, with positions, namespaces and ready-in-DRAM promises."""

    cache: HierKVRadixCache
    cache_linker: HierKVLinker

    def match(self, key: Any, req: Any, result: Any) -> Any:
        """Extends a device match by the pages that are ready in DRAM now.

        Runs several times for a request: when it enters the queue and at each admission attempt.
        """
        self.hit_markers.pop(req.rid, None)  # a stale one would load pages of an older match
        space = self.cache.space_of(req)
        device_len = result.device_prefix_len
        if space is None or device_len >= len(key):
            return result
        tail_hashes = self._tail_hashes(key, result, device_len)
        num_pages = 0
        if tail_hashes:
            num_pages = self.cache_linker.store.ready_prefix(space, hashes_from_hex(tail_hashes))
        if num_pages == 0:
            return result
        self.hit_markers[req.rid] = ExternalCacheHitMarker(
            tail_hashes=list(tail_hashes[:num_pages]), device_hit_len=device_len
        )
        return result._replace(
            last_host_node=result.best_match_node,
            host_hit_length=num_pages * self.cache.page_size,
        )

    def load_back(self, req: Any) -> tuple[int, Any]:
        """Queues the promised pages into device slots of the request's own."""
        marker = self.hit_markers.get(req.rid)
        space = self.cache.space_of(req)
        if marker is None or space is None:
            self.hit_markers.pop(req.rid, None)
            return 0, req.last_node
        self.cache_linker.place = Place(space, marker.device_hit_len, _NO_HASHES)
        try:
            loaded, node = super().load_back(req)
        finally:
            self.cache_linker.place = None
        if loaded:
            state_of(req).note_loaded(marker.device_hit_len, loaded, Tier.HOST)
        self.cache.release_plan(req.cache_request_handle)
        return loaded, node

    def _offload_node(self, node_id: Any, transfers: list[Any]) -> None:
        space = self.cache.checkpoint_space
        if space is None:
            return
        position, ancestors = self._path_before(node_id, len(transfers[0].device_indices))
        self.cache_linker.place = Place(space, position, ancestors)
        try:
            super()._offload_node(node_id, transfers)
        finally:
            self.cache_linker.place = None

    def _path_before(self, node_id: Any, num_tokens: int) -> tuple[int, Hashes]:
        """Index of a node's first token, and the hashes of the pages before it."""
        core = self.cache.tree_core
        if self.cache.tree_core_name != "python":
            end = len(core.collect_full_device_indices(node_id, self.cache.root_node_handle()))
            return end - num_tokens, _NO_HASHES
        keys: list[str] = []
        node = core.node_by_id(node_id).parent
        position = 0
        while node is not None and node.parent is not None:
            position += len(node.key)
            keys = list(node.hash_value or ()) + keys
            node = node.parent
        return position, hashes_from_hex(keys) if keys else _NO_HASHES
