"""Keeps lossy KV apart from exact KV in the device tree: what a match gives, what an insert does.

SGLang's tree keeps one copy of a page. A request that inserts a page which is there already is
handed the tree's rows and its own are freed. So before an insert, pages of the tree that are worse
than the request's own are overwritten with those, in place: the tree's shape, its locks and the
rows that others hold stay as they are, and the request goes on attending to what it computed.
Others attend to better KV from then on; what they compute stays as lossy as it began.

Every method runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_ext.provenance.request_state import find_state, state_of, wants_exact
from sglang_ext.provenance.tree_quality import DeviceProvenance
from sglang_ext.seam.page_hash import hex_hashes_of, request_key
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.seam.wrapper import HierKVLinkerWrapper
from sglang_ext.tiers.records.quality import Qualities, Quality
from sglang_ext.truncation.lineage import lineage_of

logger = logging.getLogger(__name__)

_NOT_EXACT = (
    "hier_kv_exact was asked for, and the device could not keep the exact KV of this prompt beside "
    "what it has of the same tokens; try again, or with another extra_key"
)


class TaintKeeper:
    """Provenance of what the device holds, for one cache.

    Args:
        pages: quality of the pages in the tree.
        tree: the tree.
        wrapper: overwrites pages, and saves them again.
        req_to_token_pool: SGLang's, with each request's rows.
        is_alone: no other rank decides by a tree that is as this one.
        replaces: pages of the tree are made better in place; else the tree keeps what it has.
        of_pairs: SGLang's keys are of pairs of tokens; see `page_hash`.
    """

    def __init__(
        self,
        pages: DeviceProvenance,
        tree: RadixTree,
        wrapper: HierKVLinkerWrapper,
        req_to_token_pool: Any,
        *,
        is_alone: bool = True,
        replaces: bool = True,
        of_pairs: bool = False,
    ) -> None:
        self.pages = pages
        self._replaces = replaces
        self._is_alone = is_alone
        self._of_pairs = of_pairs
        self._tree = tree
        self._wrapper = wrapper
        self._counters = wrapper.cache_linker.store.counters
        self._req_to_token_pool = req_to_token_pool

    # ---- matches ----

    def begin_match(self, key: Any, req: Any, result: Any) -> Any:
        """Cuts the device match of a request that asks for exact KV at the first page that is not.

        Args:
            key: SGLang's `RadixKey`.
            req: the request.
            result: the tree's `MatchResult`.
        """
        state, lineage = find_state(req), lineage_of(req)
        if state is not None and not req.kv.holds_kv:
            state.begin_admission()
        if lineage is not None and not req.kv.holds_kv:
            lineage.begin_admission()
        if not self.pages or not result.device_prefix_len or not wants_exact(req):
            return result
        keys = self._tree.path_hashes(result.last_device_node)
        num_exact = self.pages.num_exact(keys)
        if num_exact == len(keys):
            return result
        return self._tree.match(key[: num_exact * self._tree.page_size])

    def admit(self, req: Any) -> None:
        """Notes what an admitted request's prefix is worth: on the device, and loaded for it."""
        state = find_state(req)
        if not self.pages and state is None:
            return
        on_device = int(Quality.EXACT)
        if self.pages:
            on_device = self.pages.worst(self._tree.path_hashes(req.last_node))
        state_of(req).note_reused(on_device)

    # ---- inserts ----

    def insert(self, req: Any, up_to: int, insert: Callable[[], None]) -> None:
        """Inserts a request's pages in the tree, with what they are worth.

        Args:
            req: SGLang's request.
            up_to: number of its tokens to insert.
            insert: SGLang's own insert of them.

        Raises:
            Exception: what a device raises at a copy, where other ranks may have made theirs: of
                pages that are not alike on all of them they would decide differently.
        """
        state = find_state(req)
        if not self.pages and (state is None or state.taint == Quality.EXACT):
            insert()
            return
        state, page_size = state_of(req), self._tree.page_size
        key = request_key(req, up_to, page_size, of_pairs=self._of_pairs)
        keys = hex_hashes_of(key, page_size)
        quality = state.page_quality(len(keys))
        matched, node_id = self._tree.device_prefix(key)
        on_device = min(matched, len(keys))
        own = -(-req.kv.cache_protected_len // page_size)  # the tree's are before
        worse = own + np.flatnonzero(self.pages.of(keys[own:on_device]) > quality[own:on_device])
        if not self._replaces:  # SGLang may take the request's rows, or some of them
            both = slice(own, on_device)
            quality[both] = np.maximum(quality[both], self.pages.of(keys[both]))
            self.pages.note(keys[both], quality[both])
            worse = worse[:0]
        try:
            rows = self._overwrite(req, node_id, worse)
        except Exception:
            # The tree keeps what it has, and SGLang's insert binds the request to that.
            self._counters.add("device_replace_failures")
            if not self._is_alone:
                raise
            logger.exception("hier-kv: pages on the device could not be replaced by better ones")
            if wants_exact(req):
                req.to_finish = FINISH_ABORT(_NOT_EXACT, HTTPStatus.INTERNAL_SERVER_ERROR)
            rows, worse = None, worse[:0]
        self.pages.note([keys[page] for page in worse], quality[worse])
        self.pages.note(keys[on_device:], quality[on_device:])
        insert()
        state.taint = max(state.taint, self.pages.worst(keys))
        if rows is not None:
            self._counters.add("device_replaced_pages", len(worse))
            self._save_again(req, keys, worse, rows, quality[worse])

    def _overwrite(
        self, req: Any, node_id: Any, pages: npt.NDArray[np.int64]
    ) -> torch.Tensor | None:
        """Copies a request's own pages over the tree's; returns the tree's rows, `[n, P]`."""
        if not len(pages):
            return None
        path, page_size = self._tree.rows(node_id), self._tree.page_size
        own = self._req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        # Cut out, not indexed: indices made here would have to be uploaded, and that waits.
        tokens = [slice(page * page_size, (page + 1) * page_size) for page in pages.tolist()]
        rows = torch.cat([path[each] for each in tokens])
        source = torch.cat([own[each] for each in tokens])
        self._wrapper.cache_linker.overwrite_rows(rows, source)
        return rows.view(-1, page_size)

    def _save_again(
        self,
        req: Any,
        keys: list[str],
        pages: npt.NDArray[np.int64],
        rows: torch.Tensor,
        quality: Qualities,
    ) -> None:
        """Offers better pages `[n]` to the tiers, which the tree takes for stored already."""
        starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
        for start, end in zip(starts, np.append(starts[1:], len(pages)), strict=True):
            first = int(pages[start])
            self._wrapper.save_again(
                req.last_node,
                keys[first : first + int(end - start)],
                rows[start:end].reshape(-1),
                position=first * self._tree.page_size,
                ancestors=keys[:first],
                quality=quality[start:end],
            )

    def clear(self) -> None:
        """The device is empty."""
        self.pages.clear()
