"""SGLang's unified radix cache with tiers below the device: the few methods that differ.

Every method here runs on the scheduler's thread. Waiting requests are held by `Plan`s of the page
store: their pages move from disk to DRAM while others run, until they are there or the deadline is
over.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_ext.config import HierKVConfig
from sglang_ext.linker import Hashes, HierKVLinker, hashes_from_hex
from sglang_ext.metrics import MetricsReporter
from sglang_ext.model_identity import ModelIdentity
from sglang_ext.request_state import Tier, find_state, max_quality_of, state_of
from sglang_ext.taint import TaintKeeper
from sglang_ext.tiers.quality import Quality
from sglang_ext.tiers.store import KeySpace, PageStore, Plan
from sglang_ext.wrapper import HierKVLinkerWrapper

logger = logging.getLogger(__name__)


# Between two attempts to begin a plan for which DRAM has no free slot: the scheduler polls all the
# time, and an attempt looks up the whole prefix.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.032


@dataclass
class _Waiting:
    """A waiting request's plan, and what to plan again with."""

    plan: Plan
    space: KeySpace
    hashes: Hashes
    max_quality: int
    since_s: float = field(default_factory=time.monotonic)
    pause_s: float = _FIRST_PAUSE_S
    next_plan_s: float = 0.0

    def may_plan_again(self, now_s: float) -> bool:
        """Whether a starved plan's turn has come; the pauses between its turns grow."""
        if now_s < self.next_plan_s:
            return False
        self.next_plan_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
        return True


class HierKVRadixCache(UnifiedRadixCache):
    """A radix tree whose evicted nodes live on in DRAM and on disk."""

    linker: HierKVLinkerWrapper
    matching_request: Any = None

    def attach(
        self,
        linker: HierKVLinker,
        identity: ModelIdentity,
        config: HierKVConfig,
        metrics: MetricsReporter,
    ) -> None:
        """Connects the tiers; called once, right after construction."""
        self.hier_config = config
        self.identity = identity
        self.tree_core_name = config.tree_core
        self.checkpoint_space: KeySpace | None = None
        self.metrics_reporter_hier = metrics
        self._plans: dict[Any, _Waiting] = {}
        self.taint = TaintKeeper(self)
        self.linker = HierKVLinkerWrapper(self, linker)

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

    # ---- saves ----

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Inserts a request's tokens in the tree; new nodes are queued for saving."""
        self.release_plan(req.cache_request_handle)
        self.checkpoint_space = self.space_of(req)
        if self.checkpoint_space is not None:
            self._restore_last_page(req, self.checkpoint_space, up_to)
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
        finally:
            self.checkpoint_space = None

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
        self.hier_linker.restore_pages(space, last, rows, start, max_quality=limit)

    # ---- promotion of waiting requests ----

    def is_backuped(self, node_id: Any) -> bool:
        """True: SGLang asks it before it offers a request for prefetching."""
        return True

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
        """A request enters the queue: notes where its pages lie, begins to promote those on disk.

        `last_hash` belongs to the device end of the match while `new_input_tokens` begin behind
        what is in DRAM, so the chain is hashed from the start of the prompt.
        """
        self.release_plan(handle)
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
        hashes = hashes_from_hex(keys)[device_pages:]
        limit = max_quality_of(req)
        found = self.store.locate_prefix(space, hashes, limit)
        state_of(req).note_enqueued(
            self.page_size,
            [
                (Tier.DEVICE, device_pages),
                (Tier.HOST, found.host + found.pending),
                (Tier.DISK, found.disk),
            ],
        )
        if self.store.events.on:
            self.store.events.note(
                "enqueued",
                rid=handle.rid,
                device=device_pages,
                host=found.host + found.pending,
                pages=[row.tobytes().hex() for row in hashes[: sum(found)]],
            )
        plan = self.store.plan(space, hashes, limit)
        if plan is not None:
            self._plans[handle] = _Waiting(plan, space, hashes, limit)

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

    def check_prefetch_progress(self, handle: Any) -> bool:
        """False while a request should wait for pages that are on their way. O(1)."""
        waiting = self._plans.get(handle)
        if waiting is None or self.hier_config.prefetch_policy == "best_effort":
            return True
        now_s = time.monotonic()
        starved = waiting.plan.starved and self.store.has_plan_room()
        if starved and waiting.may_plan_again(now_s):
            self.store.cancel_plan(waiting.plan)
            plan = self.store.plan(waiting.space, waiting.hashes, waiting.max_quality)
            if plan is None:
                del self._plans[handle]
                return True
            waiting.plan = plan
        if waiting.plan.done and not waiting.plan.starved:
            return True
        waited_ms = 1e3 * (now_s - waiting.since_s)
        config = self.hier_config
        if config.prefetch_policy == "wait_complete" or waited_ms < config.prefetch_timeout_ms:
            return False
        self.store.counters.add("prefetch_timeouts")
        self.release_plan(handle)
        return True

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        """SGLang's own storage attribution is not used; see `RequestState`."""
        return 0, None

    def prefix_device_indices(self, req: Any) -> Any:
        """Rows of an admitted request's prefix; its pages need no plan any more."""
        self.release_plan(req.cache_request_handle)
        self.taint.admit(req)
        return super().prefix_device_indices(req)

    def claim_kv_row(self, req: Any) -> bool:
        """A request that held KV ends or is retracted: its plan ends at the latest now.

        One that reused nothing and is barred from the tree, or whose session keeps its rows, comes
        past none of the other places.
        """
        self.release_plan(req.cache_request_handle)
        self.taint.leave_session(req)
        return bool(super().claim_kv_row(req))

    def release_plan(self, handle: Any) -> None:
        """Gives back the pins that kept a waiting request's pages in DRAM."""
        waiting = self._plans.pop(handle, None)
        if waiting is not None:
            self.store.cancel_plan(waiting.plan)

    def release_aborted_request(self, handle: Any) -> None:
        """The request will not run: its plan and its queued load are cancelled."""
        self.release_plan(handle)
        self.linker.release_request(handle.rid)
        super().release_aborted_request(handle)

    # ---- events ----

    def check_hicache_events(self) -> None:
        """Once a scheduler step: finished saves release their nodes, metrics are published."""
        super().check_hicache_events()
        self.metrics_reporter_hier.maybe_publish()

    def has_pending_cache_operations(self) -> bool:
        """Whether something of ours is in flight; SGLang is not idle then."""
        return bool(self.linker.pending_offloads or self.linker.inflight_load_rids)

    def quiesce(self) -> None:
        """Waits for pending saves and takes their results, so that SGLang may flush or update."""
        self.hier_linker.quiesce()
        UnifiedRadixCache.check_hicache_events(self)

    def reset(self) -> None:
        """Drops the device tier; the tiers below stay (`/flush_cache`)."""
        for handle in list(getattr(self, "_plans", ())):
            self.release_plan(handle)
        super().reset()
        identity = getattr(self, "identity", None)
        if identity is not None:
            identity.device_was_reset()
            self.taint.clear()

    def clear_storage_backend(self) -> bool:
        """Drops the tiers below the device (`/hicache/storage-backend/clear`)."""
        self.quiesce()
        for handle in list(self._plans):
            self.release_plan(handle)
        self.linker.hit_markers.clear()
        cleared = self.store.clear()
        logger.info("hier-kv: cleared %d pages from DRAM and disk", cleared)
        return True

    def release_host_resources(self) -> None:
        """Shutdown: ends the threads and writes to disk what time allows."""
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
