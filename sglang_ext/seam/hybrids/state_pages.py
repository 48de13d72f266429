"""States of a hybrid model: where a prompt can be resumed, and what is saved for it.

SGLang's tree keeps a state at the end of some nodes: where a prompt or a chunk of one ended, where
two prompts part, where an answer was when it was last looked at. It goes on behind a prefix only
where it has the state. Those on a request's path that are worth their bytes (`state_choice.py`) are
saved when the request enters the tree. Scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from sglang_ext.device.states.snapshots import Snapshots, furthest_resume, part_hashes
from sglang_ext.device.transfers import Hashes, Place, hashes_from_hex
from sglang_ext.provenance.request_state import state_of
from sglang_ext.seam.hybrids.resumable_pages import ResumablePages
from sglang_ext.seam.hybrids.state_choice import PathState, worth_keeping
from sglang_ext.seam.page_hash import request_key
from sglang_ext.seam.radix_tree import RadixTree, StateNode
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import Rows

# So many places are looked at where a part of a state is. Behind evictions not all may be there.
_MOST_PLACES = 8
_MOST_LEFT_OUT = 4096  # pages behind which a state was left out that are remembered


class StateSaver(Protocol):
    """What saves states of the tree's; see `HierKVLinkerWrapper.save_state`."""

    def save_state(self, node_id: Any, place: Place, page_hash: Hashes, slot: torch.Tensor) -> bool:
        """Queues the state of a node; False when it is refused."""


class StatePages(ResumablePages):
    """The states of one cache; a prompt is resumed behind a page that has a whole one.

    Args:
        snapshots: how they are stored.
        store: see `ResumablePages`, as the rest.
        saver: what saves; what is stored is offered to it once a request.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        store: PageStore,
        tree: RadixTree,
        saver: StateSaver,
        *,
        offers_stored: bool = False,
    ) -> None:
        super().__init__(store, tree, offers_stored=offers_stored)
        self._snapshots = snapshots
        self._saver = saver
        self._left_out: OrderedDict[bytes, None] = OrderedDict()  # hashes, the last one last

    # ---- hits ----

    def pages_between(self, first: int, end: int) -> Rows:
        """Which page the keys of a wish's state are of; see `wish`.

        Args:
            first: pages on the device.
            end: pages behind which the prompt is resumed.
        """
        return np.full(self._snapshots.num_parts, end - 1)

    @property
    def most_pages(self) -> int:
        """Pages that a plan has room for, with a state."""
        return max(0, self._store.max_lone_plan_pages - self._snapshots.num_parts)

    def _resume(self, space: KeySpace, tail: Hashes, states: int, max_quality: int = ANY) -> int:
        """Where stored pages can be gone on behind, when all full layers' parts are there.

        Pages of these models are all exact, so no limit of quality keeps any out.
        """
        if not len(tail):
            return 0
        flags = self._store.page_states(space, part_hashes(tail, 0))[0]
        for end in furthest_resume(flags & np.uint8(states) != 0, _MOST_PLACES):
            flags = self._store.page_states(space, self._beside(tail, end))[0]
            if (flags & np.uint8(states) != 0).all():
                return end
        return 0

    def _beside(self, tail: Hashes, end: int) -> Hashes:
        return self._snapshots.entries(tail[end - 1])

    def branch_at(self, device_len: int, num_stored: int, grid: int) -> int:
        """Tokens behind which others are likely to go on, as the pages up to there are stored.

        SGLang keeps a state where the pages on the device end; this is where those of all tiers do.

        Args:
            device_len: tokens of a request's device prefix.
            num_stored: pages behind it that are stored.
            grid: tokens; states are kept at multiples of it.
        """
        return (device_len + num_stored * self._tree.page_size) // grid * grid

    # ---- saves ----

    def forget_misplaced(self, req: Any) -> None:
        """Has SGLang not give its tree a state of a running request that is inside of a page.

        It keeps states a number of pages behind where a chunk of a prompt begins, and a chunk need
        not begin with a page: with `--enable-mixed-chunk`, or where little of the device is free.
        Its tree takes such a state for that behind the last whole page, and others would go on
        behind that from tokens that are not theirs.

        Args:
            req: a request that is about to be inserted in the tree.
        """
        at = req.kv.mamba_last_track_seqlen
        if at is not None and at % self._tree.page_size:
            req.kv.mamba_last_track_seqlen = None
            self._store.counters.add("misplaced_states")

    def note_branch(self, req: Any, num_tokens: int) -> None:
        """A request was matched: SGLang keeps a state where it parts from what was stored before.

        That may be where others part, too, or where its own conversation ended.
        """
        # The last match counts, which every rank makes in the same state of its tree.
        state_of(req).resume_pages = {num_tokens // self._tree.page_size}

    def save(self, req: Any, space: KeySpace, up_to: int) -> Callable[[], None] | None:
        """Saves those states that the tree keeps on a request's path which are worth it.

        While it runs, what it will end with is not known: of what comes then a state is saved if it
        spares enough, or if without it nothing could be reused of the prompt.

        Args:
            req: a request that was just inserted in the tree, or inserted again.
            space: the request's.
            up_to: tokens of it that are in the tree at most.

        Returns:
            What is to be called, in any thread, when these saves are done and the placement policy
            has been told of the request; None where nothing is.
        """
        nodes = self._tree.state_path(request_key(req, up_to, self._tree.page_size))
        if not nodes:
            return None
        last, at = nodes[-1], {node.end for node in nodes}
        path = hashes_from_hex(self._tree.path_hashes(last.node_id))
        stored = self._stored_ends(space, path)
        known = set() if self._offers_stored else stored
        needed = {node.end for node in nodes if node.parts} | self._asked_again(req, path)
        if req.finished():
            needed.add(last.end)
        kept = self._kept(known | at, known, needed)
        if not kept | known and up_to >= len(req.origin_input_ids):
            kept.add(last.end)
        self._offer(req, space, path, [n for n in nodes if n.end in kept - known])
        superseded = set[int]()
        if req.finished():
            self._note_left_out(path, at - kept - known)
            superseded = stored - self._kept(stored, set(), needed)
        gone_on = stored & needed if up_to >= len(req.origin_input_ids) else set[int]()
        if self._store.lookahead is None or not superseded | gone_on:
            return None
        return partial(self._note_turn, space, path, gone_on, superseded)

    def _kept(self, ends: set[int], known: set[int], needed: set[int]) -> set[int]:
        """Pages behind which states are worth their bytes, of those behind some."""
        order = sorted(ends)
        states = [PathState(end, end in known, end in needed) for end in order]
        keep = worth_keeping(states, self._snapshots.least_pages)
        return {end for end, keeps in zip(order, keep, strict=True) if keeps}

    def _offer(self, req: Any, space: KeySpace, path: Hashes, nodes: Sequence[StateNode]) -> None:
        """Queues states for saving, until one is refused."""
        offered = state_of(req).offered_states
        for node in nodes:
            page = path[node.end - 1 : node.end]
            if self._offers_stored:
                if page.tobytes() in offered:
                    continue
                offered.add(page.tobytes())
            place = Place(space, (node.end - 1) * self._tree.page_size, path[: node.end])
            if not self._saver.save_state(node.node_id, place, page, node.slot):
                return

    def _stored_ends(self, space: KeySpace, path: Hashes) -> set[int]:
        """Pages of a path behind which a whole state is stored."""
        first = self._store.page_states(space, part_hashes(path, 0))[0]
        ends = (np.flatnonzero(first) + 1).tolist()
        return {end for end in ends if self._is_stored(space, path[end - 1 : end])}

    def _is_stored(self, space: KeySpace, page: Hashes) -> bool:
        states = self._store.page_states(space, self._snapshots.entries(page))[0]
        return bool((states != 0).all())

    def _asked_again(self, req: Any, path: Hashes) -> set[int]:
        """Where the request parted from what was stored, if a state was left out there before.

        A conversation does so once at the end of each answer; paths that part do it again.
        """
        asked = {end for end in state_of(req).resume_pages if 0 < end <= len(path)}
        return {end for end in asked if path[end - 1].tobytes() in self._left_out}

    def _note_left_out(self, path: Hashes, ends: set[int]) -> None:
        """Counts states that were left out, and remembers some of the last."""
        for end in ends:
            page = path[end - 1].tobytes()
            if page not in self._left_out:
                self._store.counters.add("unsaved_states")
            self._left_out[page] = None
            self._left_out.move_to_end(page)
        while len(self._left_out) > _MOST_LEFT_OUT:
            self._left_out.popitem(last=False)

    def _note_turn(
        self, space: KeySpace, path: Hashes, gone_on: set[int], superseded: set[int]
    ) -> None:
        """Lets stored states leave first that would be left out now, as the path's last is stored.

        Its save may have been refused, or failed: then what was there before is still the best.

        Args:
            space: the request's.
            path: u8 `[N, 32]`, pages up to the last state, from the root on.
            gone_on: pages behind which somebody went on, of the device's states, too: what was let
                leave there once stays again.
            superseded: pages behind which the stored states would be left out.
        """
        lookahead = self._store.lookahead
        assert lookahead is not None
        if gone_on:
            lookahead.went_on(space, self._parts_at(path, gone_on))
        if superseded and self._is_stored(space, path[-1:]):
            at = [end - 1 for end in sorted(superseded)]
            beside = np.repeat(path[at], self._snapshots.num_parts, axis=0)
            lookahead.let_leave(space, beside, self._parts_at(path, superseded))

    def _parts_at(self, path: Hashes, ends: set[int]) -> Hashes:
        """Keys of the parts of the states behind some pages, in the order of the path."""
        return np.concatenate([self._snapshots.entries(path[end - 1]) for end in sorted(ends)])
