"""Window layers of a hybrid model: where a prompt can be resumed, and what is saved for it.

SGLang's tree goes on behind a prefix only where the window layers' KV of the last window is there.
It is saved where a prompt is likely to be resumed: at the end of a prompt and of its answer, where
a request went on behind another's prefix, and where it would have if the window had been there.
When a turn of a conversation ends, what only the turns before it needed is the first to leave.
Scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.composition import Composition
from sglang_ext.device.transfers import Hashes, Place, hashes_from_hex
from sglang_ext.device.windows.window_layers import WindowLayers, resume_length
from sglang_ext.provenance.request_state import find_state, state_of
from sglang_ext.provenance.tree_quality import DeviceProvenance
from sglang_ext.seam.hybrids.resumable_pages import STORED, ResumablePages
from sglang_ext.seam.page_hash import request_key
from sglang_ext.seam.radix_tree import RadixTree, TreeNode
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import Rows

# A place of a save and its number of pages, to that with what of them is not stored again.
Placed = Callable[[Place, int], Place]


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
        pages: quality of the pages in the tree.
        may_move: what is saved may be resumed at other positions, too.
        of_pairs: SGLang's keys are of pairs of tokens; see `page_hash`.
    """

    def __init__(
        self,
        layers: WindowLayers,
        store: PageStore,
        tree: RadixTree,
        saver: WindowSaver,
        *,
        pages: DeviceProvenance,
        may_move: Callable[[], bool],
        of_pairs: bool = False,
        offers_stored: bool = False,
    ) -> None:
        super().__init__(store, tree, offers_stored=offers_stored)
        self._layers = layers
        self._saver = saver
        self._pages = pages
        self._may_move = may_move
        self._of_pairs = of_pairs

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

    def _resume(self, space: KeySpace, tail: Hashes, states: int, max_quality: int = ANY) -> int:
        """Where stored pages can be gone on behind, when all full layers' parts are there."""
        if not len(tail):
            return 0
        there = self._has_windows(space, tail, states, max_quality)
        return resume_length(np.ones(len(tail), np.bool_), there, self._layers.num_pages)

    def _has_windows(
        self, space: KeySpace, hashes: Hashes, states: int, max_quality: int
    ) -> npt.NDArray[np.bool_]:
        """Of which pages the window layers' parts are all in one of `states`; bool `[N]`."""
        flags, quality = self._store.page_states(space, self._layers.entries(hashes))
        usable = (flags & np.uint8(states) != 0) & (quality <= max_quality)
        there: npt.NDArray[np.bool_] = usable.reshape(self._layers.num_groups, -1).all(axis=0)
        return there

    def _beside(self, tail: Hashes, end: int) -> Hashes:
        return self._layers.entries(tail[self._layers.window_of(end)])

    # ---- prompts that are made of other pages ----

    def resumable_part(
        self, space: KeySpace, made: Composition, states: int, max_quality: int
    ) -> Composition | None:
        """What of a composition can be gone on behind; None where that is nowhere.

        Args:
            space: where the stored pages belong.
            made: of stored pages of full layers.
            states: any of these of a stored page of window layers is enough.
            max_quality: the worst that may be loaded.
        """
        lacks = ~self._has_windows(space, made.hashes, states, max_quality)
        there = made.worst_of(lacks.astype(np.uint8)) == 0
        full, num = np.ones(made.num_pages, np.bool_), min(made.num_pages, self.most_pages)
        while num := resume_length(full[:num], there[:num], self._layers.num_pages):
            part = made.part(0, num)
            if len(self.keys_of(part)) <= self._store.max_lone_plan_pages:
                return part
            num -= 1
        return None

    def keys_of(self, made: Composition) -> Hashes:
        """Keys of all that a composition is made of, its window with it."""
        return self._layers.keys_of(made)

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

    def save(
        self, req: Any, space: KeySpace, up_to: int, placed: Placed
    ) -> Callable[[], None] | None:
        """Saves the windows at which a request's prompt may be resumed.

        Args:
            req: a request that was just inserted in the tree, or inserted again.
            space: the request's.
            up_to: tokens of it that are in the tree at most.
            placed: says of a place and a number of pages there what of it need not be stored.

        Returns:
            What is to be called, in any thread, when these saves are done and the placement policy
            has been told of the request; None where nothing is.
        """
        state = find_state(req)
        ends = set() if state is None else set(state.resume_pages)
        size, num_prompt = self._layers.page_size, len(req.origin_input_ids)
        # Between chunks nobody goes on. The same prompt again computes its last token, so it
        # resumes before that.
        own: set[int] = set()
        if up_to >= num_prompt:
            own = {self._whole_pages(up_to), self._whole_pages(num_prompt - 1)} - {0}
        ends |= own
        if not ends:
            return None
        key = request_key(req, up_to, size, of_pairs=self._of_pairs)
        num_pages, nodes = self._tree.window_path(key)
        for end in sorted(ends):
            if end <= num_pages:
                self._save_end(space, nodes, end, placed)
        gone_on: set[int] = set()
        if state is not None:
            gone_on = {end for end in state.resume_pages if end <= num_pages}
            state.resume_pages -= gone_on
        if self._store.lookahead is None or not nodes:
            return None
        needed: set[int] = set()
        # Of what a decode server was sent it is not known where paths part.
        if own and req.finished() and (state is None or state.received is None):
            # The tree may have less than all tokens: who comes next goes on where that ends.
            needed = own | {self._whole_pages(num_prompt), num_pages}
            needed |= {node.end for node in nodes if node.parts}
        if not gone_on and not needed:
            return None
        path = hashes_from_hex([page for node in nodes for page in node.hashes][:num_pages])
        # What was let leave once, and is an end of this turn, too, stays again.
        return partial(self._note_turn, space, path, gone_on | needed & own, needed)

    def _whole_pages(self, num_tokens: int) -> int:
        """Pages that some tokens fill; with keys of pairs they are a pair less."""
        return max(0, num_tokens - self._of_pairs) // self._layers.page_size

    def _note_turn(
        self, space: KeySpace, path: Hashes, gone_on: set[int], needed: set[int]
    ) -> None:
        """Lets pages leave first that going on where the last turn did would not need.

        Only once the window at the path's end is stored: its save may have been refused, or failed;
        then what was there before is still the best.

        Args:
            space: the request's.
            path: u8 `[N, 32]`, its pages from the root on.
            gone_on: pages behind which it went on, or would now.
            needed: pages behind which others are likely to; none while it runs.
        """
        lookahead = self._store.lookahead
        assert lookahead is not None
        if gone_on:
            ends = {end for end in gone_on if end <= len(path)}
            lookahead.went_on(space, self._layers.entries(path[self._in_windows(ends)]))
        last = path[self._layers.window_of(len(path))]
        if not needed or not self._has_windows(space, last, STORED, ANY).all():
            return
        spare = np.ones(len(path), np.bool_)
        spare[self._in_windows({end for end in needed if end <= len(path)})] = False
        if spare.any():
            beside = np.tile(path[spare], (self._layers.num_groups, 1))
            lookahead.let_leave(space, beside, self._layers.entries(path[spare]))

    def _in_windows(self, ends: Iterable[int]) -> Rows:
        """Numbers of the pages that going on behind some needs, ascending."""
        window_of = self._layers.moved_window_of if self._may_move() else self._layers.window_of
        pages = [np.arange(window.start, window.stop) for window in map(window_of, ends)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *pages]))

    def _save_end(self, space: KeySpace, nodes: list[TreeNode], end: int, placed: Placed) -> None:
        """Saves what going on behind `end` pages needs, if the device has all of it."""
        window, inside = self._layers.window_of(end), None
        if self._may_move():
            wider = self._layers.moved_window_of(end)
            inside = _with_rows(nodes, wider)
            window = window if inside is None else wider
        inside = inside or _with_rows(nodes, window)
        if inside is None:
            return
        keys = [page for node in nodes for page in node.hashes][:end]
        hashes = hashes_from_hex(keys)
        size = self._layers.page_size
        whole = Place(space, window.start * size, hashes)
        needless = self._has_windows(space, hashes[window], STORED, ANY)
        aliased = placed(whole, window.stop - window.start).aliased
        if aliased is not None:
            needless |= aliased
        if needless.all() and not self._offers_stored:
            return
        for node in inside:
            first, stop = max(node.first, window.start), min(node.end, window.stop)
            assert node.window_rows is not None
            rows = node.window_rows[(first - node.first) * size : (stop - node.first) * size]
            quality = self._pages.of(keys[first:stop]) if self._pages else None
            place = placed(Place(space, first * size, hashes[:stop], quality), stop - first)
            if not self._saver.save_window(node.node_id, place, hashes[first:stop], rows):
                return
        if not needless.all():
            self._store.counters.add("saved_windows")


def _with_rows(nodes: list[TreeNode], window: slice) -> list[TreeNode] | None:
    """The nodes in which pages lie, if the device has the window layers' rows of all."""
    inside = [n for n in nodes if n.first < window.stop and n.end > window.start]
    return None if any(node.window_rows is None for node in inside) else inside
