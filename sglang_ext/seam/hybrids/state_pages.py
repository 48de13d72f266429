"""States of a hybrid model: where a prompt can be resumed, and what is saved for it.

SGLang's tree keeps a state at the end of some nodes: where a prompt or a chunk of one ended, where
two prompts part, where an answer was when it was last looked at. It goes on behind a prefix only
where it has the state. Every state that the tree keeps on the path of a request is saved when the
request enters the tree. Scheduler's thread only.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from sglang_ext.device.states.snapshots import Snapshots, furthest_resume, part_hashes
from sglang_ext.device.transfers import Hashes, Place, hashes_from_hex
from sglang_ext.provenance.request_state import state_of
from sglang_ext.seam.hybrids.resumable_pages import ResumablePages
from sglang_ext.seam.page_hash import request_key
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import Rows

# So many places are looked at where a part of a state is. Behind evictions not all may be there.
_MOST_PLACES = 8


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

    def _resume(self, space: KeySpace, tail: Hashes, states: int) -> int:
        """Where stored pages can be gone on behind, when all full layers' parts are there."""
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

    def save(self, req: Any, space: KeySpace, up_to: int) -> None:
        """Saves the states that the tree keeps on a request's path.

        Args:
            req: a request that was just inserted in the tree, or inserted again.
            space: the request's.
            up_to: tokens of it that are in the tree at most.
        """
        size, offered = self._tree.page_size, state_of(req).offered_states
        for node in self._tree.state_path(request_key(req, up_to, size)):
            last = node.hashes[-1]
            page = hashes_from_hex([last])
            if self._offers_stored:
                if last in offered:
                    continue
                offered.add(last)
            elif self._is_stored(space, page):
                continue
            position, before = self._tree.path_before(node.node_id, len(node.hashes) * size)
            path = np.concatenate([before, hashes_from_hex(list(node.hashes))])
            place = Place(space, position + (len(node.hashes) - 1) * size, path)
            if not self._saver.save_state(node.node_id, place, page, node.slot):
                return

    def _is_stored(self, space: KeySpace, page: Hashes) -> bool:
        states = self._store.page_states(space, self._snapshots.entries(page))[0]
        return bool((states != 0).all())
