"""SGLang's linker wrapper: matches go on with stored pages, loads are queued, nodes are saved.

It lies between the tree (`cache.py`, whose methods call it) and the transport (`linker.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    ExternalCacheHitMarker,
    UnifiedCacheLinkerWrapper,
    _PendingOffload,
)

from sglang_ext.admission.admission import Admission
from sglang_ext.device.transfers import Hashes, Place, hashes_from_hex, hashes_to_hex
from sglang_ext.provenance.request_state import HitTier, max_quality_of, state_of
from sglang_ext.provenance.tree_quality import DeviceProvenance
from sglang_ext.seam.hybrids.place_questions import PlaceQuestions
from sglang_ext.seam.hybrids.state_pages import StatePages
from sglang_ext.seam.hybrids.window_pages import WindowPages
from sglang_ext.seam.linker import HierKVLinker
from sglang_ext.seam.media.page_digests import naming
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.tiers.records.quality import Qualities, Quality
from sglang_ext.tiers.store import KeySpace
from sglang_ext.truncation.lineage import lineage_of
from sglang_ext.truncation.reuse import TruncatedReuse

if TYPE_CHECKING:
    import torch

_NO_HASHES = np.empty((0, 32), np.uint8)


class LinkedCache(Protocol):
    """What the wrapper asks of the cache that it serves."""

    page_size: int
    tree_core: Any
    admission: Admission
    truncated: TruncatedReuse
    components: dict[Any, Any]

    def space_of(self, req: Any) -> KeySpace | None:
        """Key space of a request; None while nothing may be reused or saved for it."""

    def begin_match(self, key: Any, req: Any, result: Any) -> Any:
        """The device match of a request, as far as the request may use it."""

    def load_queued(self, req: Any, *, loaded: bool) -> None:
        """A request's load was queued; `loaded` is False when there was nothing to load."""

    def inc_lock_ref(self, node_id: Any) -> Any:
        """SGLang's lock of a node and of those above it."""

    def dec_lock_ref(self, node_id: Any, params: Any) -> Any:
        """Its end."""


class _Saving(NamedTuple):
    """Whose pages SGLang saves in a checkpoint."""

    req: Any
    space: KeySpace


class HierKVLinkerWrapper(UnifiedCacheLinkerWrapper):
    """SGLang's wrapper, with positions, namespaces and ready-in-DRAM promises.

    It has many methods because half of them take the place of SGLang's, which calls them by name.

    Args:
        cache: the cache that it serves.
        cache_linker: the transport.
        tree: the cache's.
        pages: quality of the pages in the tree.
        place_questions: what a remote store is asked of windows or states; None without one.

    Attributes:
        windows: the window layers' pages; None of a model without.
        states: the states of its layers; None of a model without.
        place_questions: as given.
    """

    cache: LinkedCache
    cache_linker: HierKVLinker
    pending_offloads: list[Any]
    inflight_load_rids: list[str]
    inflight_load_index: int
    _is_asked = True  # a match is that of a request which looks for what it can reuse
    _num_void = 0  # leading pending saves of which nothing is stored any more

    def __init__(
        self,
        cache: LinkedCache,
        cache_linker: HierKVLinker,
        tree: RadixTree,
        pages: DeviceProvenance,
        place_questions: PlaceQuestions | None = None,
    ) -> None:
        super().__init__(cache, cache_linker)
        self._tree = tree
        self._pages = pages
        self._saving: _Saving | None = None
        is_one_of_many = cache_linker.accepts_all
        self.windows: WindowPages | None = None
        if cache_linker.windows is not None:
            self.windows = WindowPages(
                cache_linker.windows,
                cache_linker.store,
                tree,
                self,
                pages=pages,
                may_move=lambda: cache_linker.movable,  # the check at start may say otherwise
                of_pairs=bool(cache.tree_core.is_eagle),
                offers_stored=is_one_of_many,
            )
        self.states: StatePages | None = None
        if cache_linker.snapshots is not None:
            self.states = StatePages(
                cache_linker.snapshots, cache_linker.store, tree, self, offers_stored=is_one_of_many
            )
        self.place_questions = place_questions

    @property
    def resumption(self) -> WindowPages | StatePages | None:
        """What knows where prompts can be resumed; None where that is behind any page."""
        return self.windows or self.states

    @contextmanager
    def saving(self, req: Any, space: KeySpace | None) -> Iterator[None]:
        """Says whose pages those are that SGLang saves inside; with no space none are saved."""
        self._saving = None if space is None else _Saving(req, space)
        try:
            yield
        finally:
            self._saving = None

    @property
    def number_of_saved(self) -> int:
        """Number of the key space of what is being saved; -1 where nothing is."""
        return -1 if self._saving is None else self._saving.space.number

    @contextmanager
    def unasked(self) -> Iterator[None]:
        """Matches inside are SGLang's own; nothing is added to them."""
        self._is_asked = False
        try:
            yield
        finally:
            self._is_asked = True

    def match(self, key: Any, req: Any, result: Any) -> Any:
        """Extends a device match by the pages that are ready in DRAM now.

        Runs several times for a request: when it enters the queue and at each admission attempt.
        """
        if not self._is_asked:
            return result
        with naming.pages_of(req):
            return self._match(key, req, result)

    def _match(self, key: Any, req: Any, result: Any) -> Any:
        key, _ = key.maybe_to_bigram_view(self.cache.tree_core.is_eagle)
        result = self.cache.begin_match(key, req, result)
        self.hit_markers.pop(req.rid, None)  # a stale one would load pages of an older match
        space = self.cache.space_of(req)
        device_len = result.device_prefix_len
        if space is None or device_len >= len(key) or self._loads_for_another(req):
            self._note_nothing_to_load(req, device_len)
            return result
        tail_hashes = self._tail_hashes(key, result, device_len)
        if self.resumption is not None:
            result = self._note_hybrid(req, space, result, tail_hashes)
        if not tail_hashes:
            self._note_nothing_to_load(req, device_len)
            return result
        num_pages = self._num_loadable(req, space, device_len, tail_hashes)
        if num_pages == 0:
            return result
        self.hit_markers[req.rid] = ExternalCacheHitMarker(
            tail_hashes=list(tail_hashes[:num_pages]), device_hit_len=device_len
        )
        return result._replace(
            last_host_node=result.best_match_node,
            host_hit_length=num_pages * self.cache.page_size,
            **self._window_hit(result, num_pages),
        )

    def _loads_for_another(self, req: Any) -> bool:
        """Whether the batch that is being built loads for another request of the same id.

        Front processes do not know each other's ids, so with several of them two requests may have
        one. A load and its rows go by that id: the later request would have the earlier one's.
        """
        return req.rid in self.inflight_load_rids

    def _note_nothing_to_load(self, req: Any, device_len: int) -> None:
        """What an earlier match would have left in DRAM is not left by this one."""
        self.cache.admission.num_worth(req.cache_request_handle, device_len, 0)

    def _note_hybrid(self, req: Any, space: KeySpace, result: Any, tail: list[str]) -> Any:
        """Sees to it that a window or a state is saved where the stored pages end.

        SGLang keeps a state where the device's pages end, and is asked to where those of all tiers
        do.
        """
        hashes = hashes_from_hex(tail) if tail else _NO_HASHES
        first_page = result.device_prefix_len // self.cache.page_size
        num_stored = self.cache.admission.num_stored(
            req.cache_request_handle, space, first_page, hashes
        )
        if self.windows is not None:
            self.windows.note_match(req, result, num_stored)
        if self.states is None:
            return result
        grid = self.cache.components[ComponentType.MAMBA].mamba_checkpoint_grid
        branch = self.states.branch_at(result.device_prefix_len, num_stored, grid)
        on_device = max(result.device_prefix_len, result.mamba_branching_seqlen or 0)
        self.states.note_branch(req, max(branch, on_device))
        if branch <= on_device:
            return result
        return result._replace(mamba_branching_seqlen=branch)

    def _window_hit(self, result: Any, num_pages: int) -> dict[str, int]:
        """What of a hit window layers or a state take on the device, for SGLang's budget."""
        layers = self.cache_linker.windows
        if self.states is not None:
            return {"mamba_host_hit_length": max(result.mamba_host_hit_length, 1)}
        if layers is None:
            return {}
        num_tokens = min(num_pages, layers.num_pages) * self.cache.page_size
        return {"swa_host_hit_length": max(result.swa_host_hit_length, num_tokens)}

    def _num_loadable(self, req: Any, space: KeySpace, device_len: int, tail: list[str]) -> int:
        """Pages behind the device prefix that can be loaded."""
        hashes, lineage = hashes_from_hex(tail), lineage_of(req)
        if lineage is not None and self.cache.truncated.is_movable():
            return self.cache.truncated.ready_pages(req, lineage, space, device_len, hashes)
        if self.resumption is not None and self.cache.admission.decides_alone:
            return self.resumption.num_loadable(space, hashes, self.worst_quality_of(req))
        return self.cache.admission.num_loadable(
            req.cache_request_handle,
            space,
            device_len // self.cache.page_size,
            hashes,
            max_quality_of(req),
        )

    def worst_quality_of(self, req: Any) -> int:
        """The worst quality that a request may be given.

        Of a hybrid nothing but a cut prompt rests on moved KV, and the tree cannot be given better
        pages in place, so what says of itself that it does is none of another prompt's.
        """
        if self.resumption is not None and lineage_of(req) is None:
            return int(Quality.EXACT)
        return max_quality_of(req)

    def load_back(self, req: Any) -> tuple[int, Any]:
        """Queues the promised pages into device slots of the request's own."""
        marker = self.hit_markers.get(req.rid)
        space = self.cache.space_of(req)
        if marker is None or space is None:
            self.hit_markers.pop(req.rid, None)
            return 0, req.last_node
        start = marker.device_hit_len
        lineage = lineage_of(req)
        composition = None if lineage is None else lineage.composition
        first_page = start // self.cache.page_size
        place = Place(
            space,
            start,
            _NO_HASHES,
            max_quality=self.worst_quality_of(req),
            composition=composition,
            take=self.cache.admission.taker(req.cache_request_handle, space, first_page),
        )
        with self.cache_linker.placed(place):
            loaded, node = super().load_back(req)
        if loaded:
            state = state_of(req)
            state.note_loaded(start, loaded, HitTier.HOST)
            quality = self.cache_linker.queued_quality(req.rid)
            state.note_loaded_quality(first_page, quality)
            if lineage is not None and composition is not None:
                lineage.note_loaded(composition)
                self.cache_linker.store.counters.add("moved_tokens", composition.num_moved)
        self.cache.load_queued(req, loaded=bool(loaded))
        return loaded, node

    def end_loads(self) -> tuple[list[str], bool]:
        """Waits for the loads of the batch that just ran, on this rank.

        Returns:
            Ids of the requests that loaded, the same on every rank, and whether the loads landed
            on this one.
        """
        rids, self.inflight_load_rids = self.inflight_load_rids, []
        if not rids:
            return [], True
        index, self.inflight_load_index = self.inflight_load_index, -1
        landed = self.cache_linker.finish_layer_wise_loading(index)
        for rid in rids:
            self.private_load_indices.pop(rid, None)
        return rids, landed

    def num_pending_saves(self) -> int:
        """Saves whose results were not taken yet."""
        return len(self.pending_offloads)

    def ended_saves(self, most: int) -> list[bool]:
        """Results of the oldest saves that ended on this rank and were not taken yet."""
        most = min(most, len(self.pending_offloads))
        return self.cache_linker.completed_offloads(most)

    def _offload_node(self, node_id: Any, transfers: list[Any]) -> None:
        if self._saving is None:
            return
        req, space = self._saving
        num_tokens = len(transfers[0].device_indices)
        position, ancestors = self._tree.path_before(node_id, num_tokens)
        if lineage_of(req) is None:  # what a cut prompt goes on from is stored under other hashes
            transfers, num_kept = self._with_lost(node_id, transfers, space, ancestors)
            # Not counted from the root: with the core in Rust no ancestors are known.
            position -= (len(ancestors) - num_kept) * self.cache.page_size
            ancestors = ancestors[:num_kept]
        quality = self._pages.of(transfers[0].keys) if self._pages else None
        place = self.cache.truncated.place_of_save(
            req,
            Place(space, position, ancestors, quality),
            num_tokens // self.cache.page_size,
        )
        with self.cache_linker.placed(place):
            super()._offload_node(node_id, transfers)

    def _with_lost(
        self, node_id: Any, transfers: list[Any], space: KeySpace, ancestors: Hashes
    ) -> tuple[list[Any], int]:
        """Adds to a node's save the pages before it that were saved once and are stored no more.

        SGLang offers a node once, and none of what follows such pages could be found. They are
        on the device, and locked with the node.

        Returns:
            What to save, and how many pages are before that.
        """
        if not self.cache_linker.store.keeps_pages:
            return transfers, len(ancestors)  # what is stored is known to another rank
        num_kept = len(self.cache_linker.store.survey(space, ancestors).ready)
        if num_kept == len(ancestors) or self._tree.is_being_saved(node_id, num_kept):
            return transfers, len(ancestors)
        first, *others = transfers
        rows = self._tree.rows(node_id)[num_kept * self.cache.page_size :]
        keys = [*hashes_to_hex(ancestors[num_kept:]), *first.keys]
        if len(rows) != len(keys) * self.cache.page_size:
            return transfers, len(ancestors)
        self.cache_linker.store.counters.add("saved_again_pages", len(ancestors) - num_kept)
        return [replace(first, device_indices=rows, keys=keys), *others], num_kept

    def save_again(
        self,
        node_id: Any,
        keys: list[str],
        rows: torch.Tensor,
        *,
        position: int,
        ancestors: list[str],
        quality: Qualities,
    ) -> None:
        """Queues pages of the tree that were made better for saving, even if they are stored.

        Args:
            node_id: node at or below the pages, locked until they are saved.
            keys: the pages' hashes.
            rows: `[N * P]`, rows of the device pool.
            position: index of the first token.
            ancestors: hashes of the pages before.
            quality: of the pages, u8 `[N]`.
        """
        if self._saving is None:
            return
        place = Place(self._saving.space, position, hashes_from_hex(ancestors), quality)
        transfer = PoolTransfer(name=PoolName.KV, device_indices=rows, keys=keys)
        with self.cache_linker.placed(place):
            self._queue_locked(node_id, lambda: self.cache_linker.offload([transfer]))

    def all_parts(
        self, hashes: Hashes, rows: torch.Tensor, allocator: Any
    ) -> tuple[Hashes, torch.Tensor | None]:
        """Keys of all parts of some pages, and the rows of their window layers.

        Args:
            hashes: u8 `[N, 32]`, the pages' own.
            rows: `[N * P]`, rows of the device pool.
            allocator: SGLang's, which knows the window layers' rows.
        """
        if self.windows is None:
            return hashes, None
        return self.windows.parts(hashes), allocator.translate_loc_from_full_to_swa(rows)

    def save_window(self, node_id: Any, place: Place, hashes: Hashes, rows: torch.Tensor) -> bool:
        """Queues the window layers of pages of a node, which is locked until they are saved.

        Args:
            node_id: the node; all pages are its own.
            place: of the pages.
            hashes: u8 `[N, 32]`, the pages' own.
            rows: `[N * P]`, rows of the window layers' pool.

        Returns:
            False when it is refused.
        """
        return self._queue_locked(
            node_id, lambda: self.cache_linker.offload_windows(place, hashes, rows)
        )

    def save_state(self, node_id: Any, place: Place, page_hash: Hashes, slot: torch.Tensor) -> bool:
        """Queues the state behind a node, which is locked until it is saved: its state, too.

        Args:
            node_id: the node.
            place: of its last page; `ancestors` end with that one.
            page_hash: u8 `[1, 32]`, of its last page.
            slot: `[1]`, in the pool of states.

        Returns:
            False when it is refused.
        """
        return self._queue_locked(
            node_id, lambda: self.cache_linker.offload_state(place, page_hash, slot)
        )

    def _queue_locked(self, node_id: Any, offload: Callable[[], bool]) -> bool:
        """Queues a save of our own with its node locked until it is done; False: it is refused.

        No nodes to publish: SGLang's marks on nodes belong to its own save of them.
        """
        lock = self.cache.inc_lock_ref(node_id).to_dec_params()
        queued = offload()
        if queued:
            self.pending_offloads.append(_PendingOffload(node_id, lock, []))
        else:
            self.cache.dec_lock_ref(node_id, lock)
        return queued

    def forget_saves(self) -> None:
        """The tiers were cleared: what is on the device is stored nowhere, whatever was saved.

        A page is saved again when a request inserts it again; otherwise pages behind it could not
        be found. SGLang's Rust tree keeps its marks, so there this happens only after a flush.
        """
        self._num_void = len(self.pending_offloads)
        self._tree.forget_saves()

    def commit_completed_offloads(self, successes: Sequence[bool]) -> None:
        """As SGLang's; saves from before `forget_saves` ended as not stored, whenever they did."""
        num_void = min(self._num_void, len(successes))
        self._num_void -= num_void
        super().commit_completed_offloads([*[False] * num_void, *successes[num_void:]])

    def reset(self) -> None:
        """As SGLang's, which gives up all pending saves."""
        super().reset()
        self._num_void = 0

    def replace_pending_offload_node(
        self, ack_id: Any, old_node_id: Any, new_node_ids: list[Any]
    ) -> None:
        """A node whose save is under way was split; entries of `save_again` stay as they are."""
        everything = self.pending_offloads
        self.pending_offloads = [entry for entry in everything if entry.publish_node_ids]
        super().replace_pending_offload_node(ack_id, old_node_id, new_node_ids)
        ordinary = iter(self.pending_offloads)
        self.pending_offloads = [
            next(ordinary) if entry.publish_node_ids else entry for entry in everything
        ]
