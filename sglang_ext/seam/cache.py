"""SGLang's unified radix cache with tiers below the device: the few methods that differ.

Every method here runs on the scheduler's thread. What becomes of waiting requests is decided in
`waiting.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.session.streaming_session import is_virtual_node
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from sglang_ext.admission.forward_timer import ForwardTimer
from sglang_ext.admission.load_or_compute import LoadOrCompute
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import Wish
from sglang_ext.device.transfers import hashes_from_hex
from sglang_ext.identity.model_identity import ModelIdentity
from sglang_ext.provenance.taint import TaintKeeper
from sglang_ext.ranks.lockstep import AgreedPrompt, Lockstep, exchange, group_of, min_reduce
from sglang_ext.seam.device_tree import DeviceTree
from sglang_ext.seam.linker import HierKVLinker
from sglang_ext.seam.metrics import MetricsReporter
from sglang_ext.seam.request_state import Tier, find_state, max_quality_of, state_of
from sglang_ext.seam.wrapper import HierKVLinkerWrapper
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.truncation.reuse import TruncatedReuse

if TYPE_CHECKING:
    from sglang_ext.seam.hooks.truncation import Truncator
    from sglang_ext.truncation.quote_search import QuoteSearch

logger = logging.getLogger(__name__)


class HierKVRadixCache(UnifiedRadixCache):
    """A radix tree whose evicted nodes live on in DRAM and on disk."""

    linker: HierKVLinkerWrapper
    matching_request: Any = None
    checkpoint_request: Any = None
    truncator: Truncator | None = None
    quotes: QuoteSearch | None = None  # with a truncator
    scheduler: Any = None
    lockstep: Lockstep | None = None  # with several ranks that must decide alike

    def attach(
        self,
        linker: HierKVLinker,
        identity: ModelIdentity,
        config: HierKVConfig,
        metrics: MetricsReporter,
        forward_timer: ForwardTimer | None = None,
        cost: LoadOrCompute | None = None,
    ) -> None:
        """Connects the tiers; called once, right after construction."""
        self.hier_config = config
        self.identity = identity
        self.tree_core_name = config.tree_core
        self.checkpoint_space: KeySpace | None = None
        self.metrics_reporter_hier = metrics
        self.forward_timer = forward_timer
        looks_ahead = linker.store.lookahead is not None
        self.device_tree: DeviceTree | None = None
        if looks_ahead and config.tree_core == "python":
            self.device_tree = DeviceTree(self.tree_core, self.waiting_queue)
            self.device_tree.install()
        self.waiting_room = WaitingRoom(
            linker.store,
            num_held=self.device_tree.num_held if self.device_tree is not None else None,
            prefetch_policy=config.prefetch_policy,
            prefetch_timeout_ms=config.prefetch_timeout_ms,
            cost=cost,
        )
        self.taint = TaintKeeper(self)
        self.truncated = TruncatedReuse(self)
        self.linker = HierKVLinkerWrapper(self, linker)
        group = group_of(self)
        if group is not None:
            linker.accepts_all = True
            self.lockstep = Lockstep(self, partial(min_reduce, group), partial(exchange, group))

    @property
    def hier_linker(self) -> HierKVLinker:
        """The transport."""
        return self.linker.cache_linker

    @property
    def store(self) -> PageStore:
        """DRAM and disk."""
        return self.hier_linker.store

    def space_of(self, req: Any) -> KeySpace | None:
        """Key space of a request; None while nothing may be reused or saved for it."""
        # Asked for every request: it also notes which weights and adapters the device holds KV of.
        space = self.identity.space_of(req, self.store)
        return space if _depends_on_tokens_alone(req) else None

    def bind_scheduler(self, scheduler: Any) -> None:
        """Gives access to the waiting queue; called once, when the scheduler is built."""
        self.scheduler = scheduler

    def waiting_queue(self) -> Sequence[Any]:
        """The waiting requests, in the order in which the scheduler will take them."""
        return self.scheduler.waiting_queue if self.scheduler is not None else ()

    # ---- saves ----

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Inserts a request's tokens in the tree; new nodes are queued for saving."""
        self.checkpoint_space, self.checkpoint_request = self.space_of(req), req
        if self.checkpoint_space is not None:
            self._restore_last_page(req, self.checkpoint_space, up_to)
        self.release_plan(req.cache_request_handle)
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
            self._note_use(req, up_to)
            if self.quotes is not None and self.checkpoint_space is not None and req.finished():
                self.quotes.note(req, self.checkpoint_space, up_to)
        finally:
            self.checkpoint_space = self.checkpoint_request = None

    def _note_use(self, req: Any, up_to: int) -> None:
        """Tells the look-ahead of a request that ends, behind its last save.

        Once a request: how soon its pages are used again is what the placement policy learns.
        """
        lookahead, space, state = self.store.lookahead, self.checkpoint_space, find_state(req)
        if lookahead is None or space is None or state is None or not req.finished():
            return
        key = RadixKey(
            req.full_untruncated_fill_ids[: up_to // self.page_size * self.page_size],
            req.extra_key,
            cache_salt=req.cache_salt,
        )
        if len(key):
            hashes = hashes_from_hex(get_storage_hash_str(key, None, page_size=self.page_size))
            hashes = self.truncated.stored_path(req, hashes)
            self.hier_linker.after_saves(partial(lookahead.used, space, hashes, state.arrived_s))

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """SGLang's insert, with what the pages are worth."""

        def insert() -> None:
            super(HierKVRadixCache, self).checkpoint_into_tree(req, up_to=up_to, **kwargs)

        self.taint.insert(req, up_to, insert)

    def _restore_last_page(self, req: Any, space: KeySpace, up_to: int) -> None:
        """Puts the stored KV of a prompt's last page in place of what was just recomputed.

        The last token of a prompt is always computed, so a prompt of whole pages computes its last
        page again, with other rounding. Where the tree holds that page, SGLang's insert drops what
        was recomputed and decodes on the older KV; this does the same where a tier below holds it,
        so that a page has one value everywhere and answers are those of a device hit. Unless what
        the tiers have is worse.
        """
        start = up_to - self.page_size
        if up_to % self.page_size or req.prefix_len != start or req.kv.cache_protected_len > start:
            return
        key = RadixKey(
            req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt
        )
        last = hashes_from_hex(get_storage_hash_str(key, None, page_size=self.page_size))[-1:]
        rows = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:up_to]
        state = find_state(req)
        limit = int(Quality.EXACT) if state is None else state.taint
        if self.lockstep is None:
            self.hier_linker.restore_pages(space, last, rows, start, max_quality=limit)
            return
        ticket = self.lockstep.promises.take_last(req.cache_request_handle, last.tobytes())
        if ticket is not None and int(ticket.quality.max()) <= limit:
            self.hier_linker.restore_pinned(ticket, space, last, rows, start)
        elif ticket is not None:
            self.store.release(ticket.slots)

    # ---- promotion of waiting requests ----

    def is_backuped(self, node_id: Any) -> bool:
        """SGLang asks it before it offers a request for prefetching; not so a session's turn.

        A turn of a streaming session goes on in the session's rows, which are in no tree.
        """
        return not is_virtual_node(node_id)

    def is_root(self, node_id: Any) -> bool:
        """As SGLang's, which is asked of a session's rows as well."""
        return not is_virtual_node(node_id) and bool(super().is_root(node_id))

    @rank_consensus(same_params=["handle.rid", "len(new_input_tokens)"])
    def prefetch_from_storage(
        self,
        handle: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        *,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """A request enters the queue: notes what it could reuse, and where that lies.

        `last_hash` belongs to the device end of the match while `new_input_tokens` begin behind
        what is in DRAM, so the chain is hashed from the start of the prompt.
        """
        self._leave_queue(handle)
        req = self._enqueued_request(handle)
        space = self.space_of(req) if req is not None else None
        tokens = matched_prefix_tokens + new_input_tokens
        if req is not None and (len(tokens) + 1) % self.page_size == 0:
            # SGLang leaves the last token out; see `_restore_last_page` for why it is asked for.
            tokens = req.full_untruncated_fill_ids[: len(tokens) + 1]
        num_pages = len(tokens) // self.page_size
        if space is None or req is None or num_pages == 0:
            return
        key = RadixKey(tokens, extra_key, cache_salt=cache_salt)
        keys = get_storage_hash_str(
            key[: num_pages * self.page_size], None, page_size=self.page_size
        )
        marker = self.linker.hit_markers.get(handle.rid)
        device_len = marker.device_hit_len if marker else len(matched_prefix_tokens)
        device_pages = device_len // self.page_size
        hashes = hashes_from_hex(keys)
        lineage = self.truncated.lineage_of(req)
        if lineage is not None:
            if self.lockstep is None:  # ranks do not agree yet on what a lineage is made of
                self.truncated.enqueue(req, lineage, space, device_pages, hashes[device_pages:])
            return
        num_above = min(device_pages, num_pages)
        above = self.device_tree.path(req.last_node, self.page_size) if self.device_tree else None
        num_tokens = max(len(tokens), len(req.full_untruncated_fill_ids))
        wish = Wish(space, hashes, num_above, max_quality_of(req), above, num_tokens)
        self._note_enqueued(req, wish, device_pages)  # before its plan begins to move its pages
        if self.lockstep is None:
            found = self.waiting_room.enter(handle, wish)
        else:
            key = key[: num_pages * self.page_size]
            found = self.lockstep.promises.enter(handle, wish, AgreedPrompt(key))
        if self.quotes is not None:
            self.quotes.begin(req, space, (num_above + found.total) * self.page_size)

    def _note_enqueued(self, req: Any, wish: Wish, device_pages: int) -> None:
        """Records where a request's pages lie as it enters the queue, for its report."""
        survey = self.store.survey(wish.space, wish.below, wish.max_quality)
        in_dram = survey.ready | survey.coming
        parts = np.split(in_dram, np.flatnonzero(np.diff(in_dram)) + 1)
        tiers = [
            (Tier.HOST if part[0] else self._record_tier, len(part)) for part in parts if len(part)
        ]
        state_of(req).note_enqueued(self.page_size, [(Tier.DEVICE, device_pages), *tiers])
        if self.store.events.on:
            self.store.events.note(
                "enqueued",
                rid=req.rid,
                device=device_pages,
                pages=[row.tobytes().hex() for row in wish.below[: len(in_dram)]],
                on_disk=np.flatnonzero(~in_dram).tolist(),
            )

    @property
    def _record_tier(self) -> Tier:
        """The tier that records lie in: coded DRAM is DRAM."""
        return Tier.HOST if self.store.keeps_records_in_dram else Tier.DISK

    def _enqueued_request(self, handle: Any) -> Any:
        req = self.matching_request
        return req if req is not None and req.rid == handle.rid else None

    def match_prefix(self, params: Any) -> Any:
        """SGLang's match; a turn of a session may first have to give up its session's KV."""
        if params.req is not None and params.req.session is not None:
            self.taint.meet_session(params.req)
        return super().match_prefix(params)

    def _finalize_match_result(self, params: Any, result: Any) -> Any:
        # The request is not among the arguments of the prefetch call that follows its match.
        self.matching_request = params.req
        return super()._finalize_match_result(params, self.taint.begin_match(params, result))

    @rank_consensus(same_params=True, same_results=True)
    def check_prefetch_progress(self, handle: Any) -> bool:
        """False while a request should wait for pages that are on their way. O(1)."""
        if self.quotes is not None and not self.quotes.may_admit(handle):
            return False
        if self.lockstep is not None:
            return self.lockstep.may_admit(handle)
        return self.waiting_room.may_admit(handle)

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        """SGLang's own storage attribution is not used; see `RequestState`."""
        return 0, None

    def truncate_with(self, truncator: Truncator | None) -> None:
        """Cuts prompts that are too long from now on; None: off."""
        from sglang_ext.truncation.quote_search import QuoteSearch

        self.truncator = truncator
        alone = getattr(self, "lockstep", None) is None  # a search ends when it ends
        if truncator is not None and truncator.allows_match and alone:
            self.quotes = QuoteSearch(self, truncator)
            logger.info(
                "hier-kv: --hier-kv-truncation %s: only requests with a cache_salt or an extra_key "
                "are searched for stored text, and found, each inside its own",
                truncator.mode,
            )

    def prefix_device_indices(self, req: Any) -> Any:
        """Rows of an admitted request's prefix; its pages need no plan any more."""
        if self.lockstep is None:
            self.release_plan(req.cache_request_handle)
        else:
            num_pages, left = divmod(len(req.full_untruncated_fill_ids), self.page_size)
            last_page = None if left else num_pages - 1
            self.lockstep.promises.admit(req.cache_request_handle, last_page)
        self.taint.admit(req)
        return super().prefix_device_indices(req)

    def maybe_hand_to_session(self, req: Any) -> None:
        """As SGLang's; from now on the turn writes its session's rows."""
        super().maybe_hand_to_session(req)
        self.taint.begin_turn(req)

    def claim_kv_row(self, req: Any) -> bool:
        """A request that held KV ends or is retracted: its plan ends at the latest now.

        One that reused nothing and is barred from the tree, or whose session keeps its rows, comes
        past none of the other places.
        """
        self.release_plan(req.cache_request_handle)
        self.taint.leave_session(req)
        return bool(super().claim_kv_row(req))

    def note_remote(self, req: Any) -> None:
        """Attributes what a waiting request's plan brought from the remote store."""
        first, num_pages = self.waiting_room.remote_pages(req.cache_request_handle)
        if num_pages:
            state_of(req).note_remote(first, num_pages)

    def release_plan(self, handle: Any) -> None:
        """A request is admitted: gives back the pins that kept its pages in DRAM."""
        if self.lockstep is not None:
            self.lockstep.promises.leave(handle)
        else:
            self.waiting_room.leave(handle, admitted=True)
        if self.quotes is not None:
            self.quotes.drop(handle)

    def _leave_queue(self, handle: Any) -> None:
        if self.lockstep is not None:
            self.lockstep.promises.leave(handle)
        else:
            self.waiting_room.leave(handle)
        if self.quotes is not None:
            self.quotes.drop(handle)

    def release_all_plans(self) -> None:
        """As `release_plan`, for all requests."""
        if self.lockstep is not None:
            self.lockstep.promises.leave_all()
        self.waiting_room.leave_all()
        if self.quotes is not None:
            self.quotes.drop_all()

    def release_aborted_request(self, handle: Any) -> None:
        """The request will not run: its plan and its queued load are cancelled."""
        self._leave_queue(handle)
        self.linker.release_request(handle.rid)
        super().release_aborted_request(handle)

    # ---- events ----

    def check_hicache_events(self) -> None:
        """Once a scheduler step: plans follow the queue, finished saves release their nodes."""
        if self.device_tree is not None:
            self.device_tree.new_step()
        self.waiting_room.step([req.cache_request_handle for req in self.waiting_queue()])
        if self.lockstep is None:
            super().check_hicache_events()
        else:
            self._drop_outputs(self.lockstep.step())
        self.metrics_reporter_hier.maybe_publish()

    @rank_consensus
    def finish_external_linker_loads(self, reqs: list[Any]) -> list[Any]:
        """Waits for the loads of the batch that just ran; returns requests whose loads failed.

        With several ranks these are known at the next step, before any result of the batch is
        used.
        """
        if self.lockstep is None:
            failed: list[Any] = super().finish_external_linker_loads(reqs)
            return failed
        rids, landed = self.linker.end_loads()
        if rids:
            loaded = [req for req in reqs if req.rid in rids]
            self.lockstep.loads_ended(loaded, landed=landed)
        return []

    def before_result(self, reqs: list[Any]) -> None:
        """The result of a batch is about to be used."""
        if self.lockstep is not None:
            self._drop_outputs(self.lockstep.settle_loads(reqs))

    def _drop_outputs(self, failed: list[Any]) -> None:
        """Requests whose KV did not land on some rank are aborted, as SGLang does with one rank."""
        for req in failed:
            req.skip_radix_cache_insert = True
            req.discard_output_reason = FINISH_ABORT(
                "External KV cache load failed", HTTPStatus.SERVICE_UNAVAILABLE
            )
        chunked = self.scheduler.chunked_req if failed else None
        if chunked is not None and chunked in failed:
            self.scheduler._pending_chunked_abort_req = chunked
            self.scheduler.process_pending_chunked_abort()

    def has_pending_cache_operations(self) -> bool:
        """Whether something of ours is in flight; SGLang is not idle then."""
        return bool(self.linker.pending_offloads or self.linker.inflight_load_rids)

    def quiesce(self) -> None:
        """Waits for pending saves and takes their results, so that SGLang may flush or update."""
        self.hier_linker.quiesce()
        if self.lockstep is None:
            UnifiedRadixCache.check_hicache_events(self)
        else:
            self.lockstep.drain_saves()

    def weights_change(self) -> None:
        """Weights or adapters are about to change: what was planned under those of now is void.

        Pending saves are done first: they hold KV of the present weights, and would make SGLang
        refuse its flush. A request that waits is computed, or reuses what is ready when it runs.
        With several ranks all of them come here in the same step.
        """
        self.quiesce()
        self._void_promises()

    def _void_promises(self) -> None:
        self.release_all_plans()
        self.linker.hit_markers.clear()
        self.store.end_epoch()

    def reset(self) -> None:
        """Drops the device tier; the tiers below stay (`/flush_cache`)."""
        if getattr(self, "waiting_room", None) is not None:
            self.release_all_plans()
        super().reset()
        identity = getattr(self, "identity", None)
        if identity is not None:
            identity.device_was_reset()
            self.taint.clear()

    def clear_storage_backend(self) -> bool:
        """Drops the tiers below the device, and their text (`/hicache/storage-backend/clear`).

        Waits for nothing: saves under way end as not stored, and the disk deletes its pages when it
        gets to it.
        """
        self._void_promises()
        cleared = self.store.clear()
        self.linker.forget_saves()
        if self.quotes is not None:
            self.quotes.forget()
        logger.info("hier-kv: %d pages are forgotten; the disk deletes its own next", cleared)
        return True

    def release_host_resources(self) -> None:
        """Shutdown: ends the threads and writes to disk what time allows."""
        if self.quotes is not None:
            self.quotes.close()
        self.linker.close()
        super().release_host_resources()


def _depends_on_tokens_alone(req: Any) -> bool:
    """Whether a request's KV is a function of its token ids; images and embeddings are not.

    SGLang bars requests with override embeddings from its tree, and those whose load failed.
    """
    return (
        getattr(req, "multimodal_inputs", None) is None
        and not getattr(req, "input_embeds", None)
        and not getattr(req, "skip_radix_cache_insert", False)
    )
