"""States of a hybrid model: where a prompt can be resumed, and what is saved for it.

SGLang's tree keeps a state at the end of some nodes: where a prompt or a chunk of one ended, where
two prompts part, where an answer was when it was last looked at. It goes on behind a prefix only
where it has the state. So a hit is the longest prefix of which the full layers' pages are all
stored and behind whose last page a whole state is; what is behind it is computed. Every state that
the tree keeps on the path of a request is saved when the request enters the tree. Scheduler's
thread only.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from sglang_ext.device.states.snapshots import Snapshots, furthest_resume, part_hashes
from sglang_ext.device.transfers import Hashes, Place, hashes_from_hex
from sglang_ext.provenance.request_state import state_of
from sglang_ext.seam.page_hash import request_key
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import READY, Rows

# So many places are looked at where a part of a state is. Behind evictions not all may be there.
_MOST_PLACES = 8


class StateSaver(Protocol):
    """What saves states of the tree's; see `HierKVLinkerWrapper.save_state`."""

    def save_state(self, node_id: Any, place: Place, page_hash: Hashes, slot: torch.Tensor) -> bool:
        """Queues the state of a node; False when it is refused."""


class StatePages:
    """The states of one cache.

    Args:
        snapshots: how they are stored.
        store: DRAM and disk.
        tree: SGLang's.
        saver: what saves.
        offers_stored: what is stored is offered to it, too, once a request: of several ranks, each
            has to offer the same, whatever it has.
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
        self._snapshots = snapshots
        self._store = store
        self._tree = tree
        self._saver = saver
        self._offers_stored = offers_stored

    # ---- hits ----

    def num_loadable(self, space: KeySpace, tail: Hashes, max_quality: int) -> int:
        """Pages behind a device prefix that can be loaded, and be gone on behind, now.

        Args:
            space: where they belong.
            tail: u8 `[N, 32]`, the pages from the prefix on.
            max_quality: the worst that may be loaded.
        """
        num = self._store.ready_prefix(space, tail, max_quality)
        return self._resume(space, tail[:num], READY)

    def wish(
        self, space: KeySpace, hashes: Hashes, num_on_device: int, limit: int
    ) -> tuple[Hashes, int]:
        """What a request that waits could reuse, in the order in which it is of use.

        Args:
            space: where its pages belong.
            hashes: u8 `[N, 32]`, its pages from the root on.
            num_on_device: leading ones that are on the device.
            limit: pages that can be loaded at most; the next one is asked for all the same, when
                all those before can be, as a prompt's last page is (`_restore_last_page`).

        Returns:
            The pages up to where it can be resumed, and the state there; and how many pages behind
            the device prefix the former are.
        """
        tail = hashes[num_on_device:limit]
        num = self._store.locate_prefix(space, tail).total
        end = self._resume(space, tail[: min(num, self.most_pages)], 0xFF)
        wanted = [hashes[: num_on_device + end]]
        if end:
            wanted.append(self._snapshots.entries(tail[end - 1]))
        if num_on_device + end == limit < len(hashes):
            wanted.append(hashes[limit : limit + 1])
        return np.concatenate(wanted), end

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
            flags = self._store.page_states(space, self._snapshots.entries(tail[end - 1]))[0]
            if (flags & np.uint8(states) != 0).all():
                return end
        return 0

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
