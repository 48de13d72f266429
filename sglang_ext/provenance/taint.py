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
from collections.abc import Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_ext.provenance.tree_quality import DeviceProvenance
from sglang_ext.seam.request_state import find_state, state_of, wants_exact
from sglang_ext.tiers.records.quality import Qualities, Quality
from sglang_ext.truncation.lineage import lineage_of

if TYPE_CHECKING:
    from sglang_ext.seam.cache import HierKVRadixCache

logger = logging.getLogger(__name__)

_ON_SESSION = "_hier_kv_taint"
_SESSION_KEY = "_hier_kv_key"
_RUNNING_TURN = "_hier_kv_running_turn"
_SESSION_IS_BUSY = "Streaming session already has an active request."  # as SGLang says it
_SPARE_MARKS = 1024


class TaintKeeper:
    """Provenance of what the device holds, for one cache.

    Attributes:
        pages: quality of the pages in the tree.
    """

    def __init__(self, cache: HierKVRadixCache) -> None:
        self._cache = cache
        num_pages = int(cache.token_to_kv_pool_allocator.size) // cache.page_size
        live_keys = self._live_keys if cache.tree_core_name == "python" else None
        self.pages = DeviceProvenance(2 * num_pages + _SPARE_MARKS, live_keys)

    # ---- matches ----

    def begin_match(self, params: Any, result: Any) -> Any:
        """Cuts the device match of a request that asks for exact KV at the first page that is not.

        Args:
            params: SGLang's `MatchPrefixParams`.
            result: the tree's `MatchResult`.
        """
        req = params.req
        if req is None:
            return result
        state, lineage = find_state(req), lineage_of(req)
        if state is not None and not req.kv.holds_kv:
            state.begin_admission()
        if lineage is not None and not req.kv.holds_kv:
            lineage.begin_admission()
        if not self.pages or not result.device_prefix_len or not wants_exact(req):
            return result
        keys = self._path_keys(result.last_device_node)
        num_exact = self.pages.num_exact(keys)
        if num_exact == len(keys):
            return result
        cache = self._cache
        shorter = replace(params, key=params.key[: num_exact * cache.page_size])
        result = cache.tree_core.match_prefix(shorter)
        cache._apply_cache_actions(result.cache_actions)
        return result

    def admit(self, req: Any) -> None:
        """Notes what an admitted request's prefix is worth: on the device, and loaded for it."""
        state = find_state(req)
        if not self.pages and state is None:
            return
        on_device = int(Quality.EXACT)
        if self.pages:
            on_device = self.pages.worst(self._path_keys(req.last_node))
        state_of(req).note_reused(on_device)

    # ---- inserts ----

    def insert(self, req: Any, up_to: int, insert: Callable[[], None]) -> None:
        """Inserts a request's pages in the tree, with what they are worth.

        Args:
            req: SGLang's request.
            up_to: number of its tokens to insert.
            insert: SGLang's own insert of them.
        """
        state = find_state(req)
        if not self.pages and (state is None or state.taint == Quality.EXACT):
            insert()
            return
        state, cache = state_of(req), self._cache
        key = RadixKey(
            req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt
        ).page_aligned(cache.page_size)
        keys = get_storage_hash_str(key, None, page_size=cache.page_size)
        quality = state.page_quality(len(keys))
        matched, node_id, _ = cache.tree_core.match_full_device_prefix(key)
        on_device = min(matched // cache.page_size, len(keys))
        own = -(-req.kv.cache_protected_len // cache.page_size)  # the tree's are before
        worse = own + np.flatnonzero(self.pages.of(keys[own:on_device]) > quality[own:on_device])
        try:
            rows = self._overwrite(req, node_id, worse)
        except Exception:
            # The tree keeps what it has, and SGLang's insert binds the request to that.
            cache.hier_linker.store.counters.add("device_replace_failures")
            logger.exception("hier-kv: pages on the device could not be replaced by better ones")
            rows, worse = None, worse[:0]
        self.pages.note([keys[page] for page in worse], quality[worse])
        self.pages.note(keys[on_device:], quality[on_device:])
        insert()
        state.taint = max(state.taint, self.pages.worst(keys))
        if rows is not None:
            cache.hier_linker.store.counters.add("device_replaced_pages", len(worse))
            self._save_again(req, keys, worse, rows, quality[worse])

    def _overwrite(
        self, req: Any, node_id: Any, pages: npt.NDArray[np.int64]
    ) -> torch.Tensor | None:
        """Copies a request's own pages over the tree's; returns the tree's rows, `[n, P]`."""
        if not len(pages):
            return None
        cache = self._cache
        path = cache.tree_core.collect_full_device_indices(
            node_id, cache.tree_core.root_node_handle()
        )
        own = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        tokens = torch.from_numpy(pages[:, None] * cache.page_size + np.arange(cache.page_size))
        tokens = tokens.to(path.device)
        rows: torch.Tensor = path[tokens]
        cache.hier_linker.overwrite_rows(rows.view(-1), own[tokens.view(-1)])
        return rows

    def _save_again(
        self,
        req: Any,
        keys: list[str],
        pages: npt.NDArray[np.int64],
        rows: torch.Tensor,
        quality: Qualities,
    ) -> None:
        """Offers better pages `[n]` to the tiers, which the tree takes for stored already."""
        cache = self._cache
        if cache.checkpoint_space is None:
            return
        starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
        for start, end in zip(starts, np.append(starts[1:], len(pages)), strict=True):
            first = int(pages[start])
            cache.linker.save_again(
                req.last_node,
                keys[first : first + int(end - start)],
                rows[start:end].reshape(-1),
                position=first * cache.page_size,
                ancestors=keys[:first],
                quality=quality[start:end],
            )

    # ---- sessions: their KV passes from turn to turn outside the tree ----

    def meet_session(self, req: Any) -> None:
        """A turn is about to be matched: it will go on with the KV of the turns before it.

        A turn that asks for exact KV where that is not gets none of it: the session's KV is given
        up, as SGLang does where it cannot be used, and the prompt is computed. So is a turn's with
        another adapter, `extra_key` or salt than those before it: SGLang would go on with KV of
        the other adapter, and keep it under this turn's key if the turn is aborted.

        A turn that comes while another runs on the session's rows gets neither of the two: those
        rows are being written. Nor does one that SGLang refused for another that still waits.
        """
        session = self._cache.session
        slot = session.slots.get(req.session.session_id)
        if getattr(slot, _RUNNING_TURN, None) not in (None, req):
            req.session._inflight = True
            self._turn_away(req)
            return
        if getattr(req.to_finish, "message", None) == _SESSION_IS_BUSY:
            self._turn_away(req)
            return
        if not session.will_lend_record(req):
            return
        taint = getattr(slot, _ON_SESSION, Quality.EXACT)
        own_key = _session_key(req)
        is_another = getattr(slot, _SESSION_KEY, own_key) != own_key
        if is_another or (taint > Quality.EXACT and wants_exact(req)):
            session.release_session(req.session.session_id)
        elif taint > Quality.EXACT:
            state_of(req).note_reused(int(taint))

    def _turn_away(self, req: Any) -> None:
        """Ends a turn as SGLang does where a session has another one.

        SGLang notes that none runs any more when it takes such a turn from its session, and then
        lets the next one in, onto the same rows; or it leaves the turn in a session that has no
        rows yet, and two turns bring the first ones. Here the note and the session stay the other
        turn's.
        """
        if req.to_finish is None:
            req.to_finish = FINISH_ABORT(
                _SESSION_IS_BUSY, HTTPStatus.BAD_REQUEST, "BadRequestError"
            )
        req.release_mm_inputs_on_abort()
        req.session = None
        self._cache.hier_linker.store.counters.add("refused_session_turns")

    def begin_turn(self, req: Any) -> None:
        """A request was given rows; those of a session's turn are the session's until it ends."""
        slot = self._cache.session.borrowed_slot(req)
        if slot is not None:
            setattr(slot, _RUNNING_TURN, req)

    def leave_session(self, req: Any) -> None:
        """A turn ends or is retracted; its session may keep its KV."""
        slot = self._cache.session.borrowed_slot(req)
        if slot is None:
            return
        setattr(slot, _RUNNING_TURN, None)
        setattr(slot, _SESSION_KEY, _session_key(req))
        state = find_state(req)
        if state is not None and state.taint > Quality.EXACT:
            setattr(slot, _ON_SESSION, state.taint)

    def clear(self) -> None:
        """The device is empty."""
        self.pages.clear()

    def _path_keys(self, node_id: Any) -> list[str]:
        core = self._cache.tree_core
        if self._cache.is_root(node_id) or is_virtual_node(node_id):
            return []  # what a session's rows are worth, its slot says
        return [*core.get_prefix_hash_values(node_id), *core.get_hash_values(node_id)]

    def _live_keys(self) -> Iterable[str]:
        for node in self._cache.tree_core._node_arena.values():
            yield from node.hash_value or ()


def _session_key(req: Any) -> tuple[str | None, str | None, str | None]:
    """What must be equal for one turn to go on with the KV of another."""
    return req.lora_id, req.extra_key, req.cache_salt
