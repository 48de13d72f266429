"""Window layers of a hybrid model: where a prompt can be resumed, and what is saved for it.

SGLang's tree goes on behind a prefix only where the window layers' KV of the last window is there.
It is saved where a prompt is likely to be resumed: at the end of a prompt and of its answer, where
a request went on behind another's prefix, and where it would have if the window had been there.
Scheduler's thread only.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from sglang_ext.device.transfers import Hashes, Place, hashes_from_hex
from sglang_ext.device.windows.window_layers import WindowLayers, resume_length
from sglang_ext.provenance.request_state import find_state, state_of
from sglang_ext.seam.hybrids.resumable_pages import ResumablePages
from sglang_ext.seam.page_hash import request_key
from sglang_ext.seam.radix_tree import RadixTree, TreeNode
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import Rows


class WindowSaver(Protocol):
    """What saves rows of the tree's; see `HierKVLinkerWrapper.save_window`."""

    def save_window(self, node_id: Any, place: Place, hashes: Hashes, rows: torch.Tensor) -> bool:
        """Queues the window layers of some pages of a node; False when it is refused."""


class WindowPages(ResumablePages):
    """The window layers' pages of one cache.

    Args:
        layers: how they are stored.
        store: see `ResumablePages`, as the rest.
        saver: what saves.
    """

    def __init__(
        self,
        layers: WindowLayers,
        store: PageStore,
        tree: RadixTree,
        saver: WindowSaver,
        *,
        offers_stored: bool = False,
    ) -> None:
        super().__init__(store, tree, offers_stored=offers_stored)
        self._layers = layers
        self._saver = saver

    # ---- hits ----

    def pages_between(self, first: int, end: int) -> Rows:
        """Which pages the windows' keys in a wish are of; see `wish`.

        Args:
            first: pages on the device.
            end: pages behind which the prompt is resumed.
        """
        window = self._layers.window_of(end - first)
        return np.tile(first + np.arange(window.start, window.stop), self._layers.num_groups)

    @property
    def most_pages(self) -> int:
        """Pages that a plan has room for, with their windows; of more the windows would lack."""
        most = self._store.max_lone_plan_pages
        num_groups, num_pages = self._layers.num_groups, self._layers.num_pages
        return max(most - num_groups * num_pages, min(num_pages, most // (1 + num_groups)))

    def parts(self, hashes: Hashes) -> Hashes:
        """Keys of all parts of some pages: of the full layers, then group by group."""
        return self._layers.page_keys(hashes)

    def _resume(self, space: KeySpace, tail: Hashes, states: int) -> int:
        """Where stored pages can be gone on behind, when all full layers' parts are there."""
        if not len(tail):
            return 0
        flags = self._store.page_states(space, self._layers.entries(tail))[0]
        there = (flags.reshape(self._layers.num_groups, -1) & np.uint8(states) != 0).all(axis=0)
        return resume_length(np.ones(len(tail), np.bool_), there, self._layers.num_pages)

    def _beside(self, tail: Hashes, end: int) -> Hashes:
        return self._layers.entries(tail[self._layers.window_of(end)])

    # ---- saves ----

    def note_match(self, req: Any, result: Any, num_stored: int) -> None:
        """A request was matched: where it goes on, or would, others are likely to.

        Args:
            req: the request.
            result: SGLang's match on the device.
            num_stored: pages behind its device prefix that are stored.
        """
        size = self._layers.page_size
        device = result.device_prefix_len // size
        furthest = max(device + num_stored, result.full_kv_hit_length // size)
        state_of(req).resume_pages = {device, furthest} - {0}

    def save(self, req: Any, space: KeySpace, up_to: int) -> None:
        """Saves the windows at which a request's prompt may be resumed.

        Args:
            req: a request that was just inserted in the tree, or inserted again.
            space: the request's.
            up_to: tokens of it that are in the tree at most.
        """
        state = find_state(req)
        ends = set() if state is None else set(state.resume_pages)
        size = self._layers.page_size
        if up_to >= len(req.origin_input_ids):  # between chunks nobody goes on
            # The same prompt again computes its last token, so it resumes before that.
            ends |= {up_to // size, (len(req.origin_input_ids) - 1) // size} - {0}
        if not ends:
            return
        num_pages, nodes = self._tree.window_path(request_key(req, up_to, size))
        for end in sorted(ends):
            if end <= num_pages:
                self._save_end(space, nodes, end)
        if state is not None:
            state.resume_pages = {end for end in state.resume_pages if end > num_pages}

    def _save_end(self, space: KeySpace, nodes: list[TreeNode], end: int) -> None:
        """Saves what going on behind `end` pages needs, if the device has all of it."""
        window = self._layers.window_of(end)
        hashes = hashes_from_hex([page for node in nodes for page in node.hashes][:end])
        inside = [n for n in nodes if n.first < window.stop and n.end > window.start]
        if any(node.window_rows is None for node in inside):
            return
        entries = self._layers.entries(hashes[window])
        is_stored = bool((self._store.page_states(space, entries)[0] != 0).all())
        if is_stored and not self._offers_stored:
            return
        size = self._layers.page_size
        for node in inside:
            first, stop = max(node.first, window.start), min(node.end, window.stop)
            assert node.window_rows is not None
            rows = node.window_rows[(first - node.first) * size : (stop - node.first) * size]
            place = Place(space, first * size, hashes[:stop])
            if not self._saver.save_window(node.node_id, place, hashes[first:stop], rows):
                return
        if not is_stored:
            self._store.counters.add("saved_windows")
