"""SGLang's unified radix cache with tiers below the device: the methods that differ.

Every method here runs on the scheduler's thread. What becomes of waiting requests is decided
behind `admission`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import numpy as np
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.streaming_session import is_virtual_node
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from sglang_ext.admission.admission import Admission
from sglang_ext.admission.forward_timer import ForwardTimer
from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute
from sglang_ext.admission.resume_points import PromptPoints, what_resumes
from sglang_ext.admission.solo import Solo
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.transfers import Hashes, hashes_to_hex
from sglang_ext.hints.handing import hand_on
from sglang_ext.hints.request_hints import hints_of, owner_slot
from sglang_ext.identity.handover import GivenUpRooms, SendingRooms
from sglang_ext.identity.media import images_of
from sglang_ext.identity.model_identity import ModelIdentity
from sglang_ext.identity.tenancy import Tenant, has_nameable_pages, tenant_of
from sglang_ext.provenance.miss_counts import MissKeeper, Wanted
from sglang_ext.provenance.request_state import HitTier, find_state, state_of
from sglang_ext.provenance.tree_quality import DeviceProvenance
from sglang_ext.ranks.lockstep import Lockstep, exchange, group_of, group_of_stage, min_reduce
from sglang_ext.ranks.stages import StagedLockstep, begin_min_reduce
from sglang_ext.seam.device_tree import DeviceTree
from sglang_ext.seam.hybrids.place_questions import Enter, Find, PlaceQuestions
from sglang_ext.seam.kv_events import TierEventRecorder, record_medium
from sglang_ext.seam.linker import HierKVLinker
from sglang_ext.seam.media.page_digests import naming
from sglang_ext.seam.media.requests import MediaRequests
from sglang_ext.seam.metrics.reporter import MetricsReporter
from sglang_ext.seam.metrics.spans import RequestSpans
from sglang_ext.seam.page_hash import hashes_of, request_key, whole_pages_key
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.seam.session_turns import SessionTurns
from sglang_ext.seam.taint import TaintKeeper
from sglang_ext.seam.wrapper import HierKVLinkerWrapper
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.images import PLAIN, STATES
from sglang_ext.settings.quotas import parse_quotas
from sglang_ext.tiers.policy import NUM_OWNERS
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.truncation.agreed_quotes import AgreedQuotes
from sglang_ext.truncation.lineage import lineage_of
from sglang_ext.truncation.quote_search import QuoteSearch
from sglang_ext.truncation.reuse import TruncatedReuse
from sglang_ext.truncation.truncator import Truncator

logger = logging.getLogger(__name__)

# Marks of pages that left the tree may stay before a sweep, beside two for each page of the device.
_SPARE_MARKS = 1024


@dataclass(frozen=True)
class CacheParts:
    """What a cache is built with.

    Attributes:
        linker: the transport, with the page store.
        identity: whose KV it is.
        config: the settings.
        metrics: what publishes counts.
        forward_timer: measures forwards for the cost model; None without one.
        decider: decides between loading and computing; None where everything is loaded.
        dram: the same of pages in DRAM.
        place_questions: makes what asks a remote store for windows or states, given how a request
            enters and is found; None where there is nothing to ask for.
        shares_pages: one rank of this one's group keeps the pages of all.
    """

    linker: HierKVLinker
    identity: ModelIdentity
    config: HierKVConfig
    metrics: MetricsReporter
    forward_timer: ForwardTimer | None = None
    decider: LoadOrCompute | None = None
    dram: DramChoice | None = None
    place_questions: Callable[[Enter, Find], PlaceQuestions] | None = None
    shares_pages: bool = False


class HierKVRadixCache(UnifiedRadixCache):
    """A radix tree whose evicted nodes live on in DRAM and on disk.

    It has many methods because SGLang calls that many of a cache's; each hands on to the part that
    does the work.
    """

    linker: HierKVLinkerWrapper
    matching_request: Any = None
    truncator: Truncator | None = None
    quotes: QuoteSearch | None = None  # with a truncator
    scheduler: Any = None
    only_saves = False  # a decode server: its KV came from elsewhere, and is not to be replaced
    rows_in_doubt = False  # a transfer that nobody waits for any more may still write rows
    _held: frozenset[Any] = frozenset()  # handles of which `is_held` said so in this step

    def __init__(self, params: Any, make_parts: Callable[[Any], CacheParts]) -> None:
        """Builds SGLang's half, the parts that need it, and what stands on both.

        Two things come later, as SGLang has it: its constructor ends with `reset`, before there can
        be a part of ours, and its scheduler is built around the cache (`bind_scheduler`).

        Args:
            params: SGLang's `CacheInitParams`.
            make_parts: is given this cache with SGLang's half: its tree, components and groups.
        """
        super().__init__(params)
        parts = make_parts(self)
        linker, config = parts.linker, parts.config
        self.hier_config = config
        self._quotas = parse_quotas(config.quotas)
        self.identity = parts.identity
        self.metrics_reporter_hier = parts.metrics
        self.forward_timer = parts.forward_timer
        self.spans = RequestSpans(linker.loads.times, knows_tiers=linker.store.keeps_pages)
        self.device_tree = self._device_tree_of(parts)
        self.waiting_room = self._waiting_room_of(parts)
        group = group_of(self)
        tree = RadixTree(self, config.tree_core)
        num_pages = int(self.token_to_kv_pool_allocator.size) // self.page_size
        pages = DeviceProvenance(2 * num_pages + _SPARE_MARKS, tree.live_hashes)
        place_questions: PlaceQuestions | None = None
        if parts.place_questions is not None:
            place_questions = parts.place_questions(self._enter, self.waiting_room.find)
        self.linker = HierKVLinkerWrapper(self, linker, tree, pages, place_questions)
        self._follow_tiers(config, linker.store, num_pages)
        self.taint = TaintKeeper(
            pages,
            tree,
            self.linker,
            self.req_to_token_pool,
            is_alone=group is None,
            # Rows of window layers come and go by themselves. So whoever wants exact KV of a cut
            # prompt is kept apart there (`Truncator`), and all others go on from what there is.
            replaces=not linker.is_hybrid,
            of_pairs=self._keys_are_pairs,
        )
        self.misses = MissKeeper(linker.store, self.page_size, by_tenant=bool(self._quotas.shares))
        self.session_turns = SessionTurns(self.session, linker.store.counters)
        self.given_up_rooms = GivenUpRooms()  # of a decode server
        self.sending_rooms = SendingRooms()  # of a prefill server
        self.media = MediaRequests(tree, linker.store.counters)
        self.admission: Admission = self._admission_of(group, tree, shares_pages=parts.shares_pages)
        self.truncated = TruncatedReuse(
            linker.store,
            self.admission,
            page_size=self.page_size,
            is_movable=lambda: linker.movable,
            windows=self.linker.windows,
        )

    def _device_tree_of(self, parts: CacheParts) -> DeviceTree | None:
        """Installs what has SGLang's eviction spare the queue; None where that is not possible."""
        linker = parts.linker
        looks_ahead = linker.store.lookahead is not None
        # SGLang evicts windows and states by orders of their own, which are not ours to spare in.
        if not looks_ahead or parts.config.tree_core != "python" or linker.is_hybrid:
            return None
        tree = DeviceTree(self.tree_core, self.waiting_queue)
        tree.install()
        return tree

    def _waiting_room_of(self, parts: CacheParts) -> WaitingRoom:
        tree = self.device_tree
        return WaitingRoom(
            parts.linker.store,
            num_still_on_device=None if tree is None else tree.num_still_on_device,
            prefetch_policy=parts.config.prefetch_policy,
            prefetch_timeout_ms=parts.config.prefetch_timeout_ms,
            decider=parts.decider,
            dram=parts.dram,
        )

    def _follow_tiers(self, config: HierKVConfig, store: PageStore, num_pages: int) -> None:
        """SGLang's KV events tell of the tiers, too, where it publishes any."""
        device = self.tree_core.kv_events
        if not device.enabled:
            return
        if config.tree_core != "python":
            logger.warning("hier-kv: KV events tell of the device only: the tree in Rust is in use")
            return
        self.tree_core.kv_events = TierEventRecorder(
            device,
            store,
            record_medium=record_medium(config),
            max_seen_pages=2 * num_pages,
            home_now=lambda: self.linker.number_of_saved,
        )

    def _admission_of(self, group: Any | None, tree: RadixTree, *, shares_pages: bool) -> Admission:
        """Who decides on waiting requests: this process, or with others the ranks of a group."""
        if group is None:
            return Solo(
                self.store,
                self.waiting_room,
                self._queued_handles,
                page_tokens=self.page_size,
                take_saves=super().check_hicache_events,
                finish_loads=super().finish_external_linker_loads,
            )
        parts = (self.store, self.waiting_room, self._queued_handles, self.linker)
        resumption = self.linker.resumption
        common: dict[str, Any] = {
            "page_size": self.page_size,
            "find_damaged": self.hier_linker.find_damaged,
            "num_on_device": tree.num_resumable if resumption else tree.num_on_device,
            "resumes": resumption is not None,
            "gather": partial(exchange, group_of_stage(self)),
        }
        if self.pp_size > 1:
            begin_reduce = partial(begin_min_reduce, group)
            return StagedLockstep(
                *parts, num_stages=self.pp_size, begin_reduce=begin_reduce, **common
            )
        reduce = partial(min_reduce, group)
        return Lockstep(*parts, min_reduce=reduce, shares_pages=shares_pages, **common)

    def _enter(self, handle: Any, prefix: ReusablePrefix, key: Any) -> Any:
        return self.admission.enter(handle, prefix, key)

    @property
    def _keys_are_pairs(self) -> bool:
        """Whether SGLang's keys are of pairs of tokens; see `page_hash`."""
        return bool(self.tree_core.is_eagle)

    @property
    def _kept_of_a_token(self) -> str:
        """What SGLang keeps of a token, where images may be beside it; see `settings.images`."""
        if self.linker.states is not None:
            return STATES
        return "windows" if self.hier_linker.is_hybrid else PLAIN

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
        if space is None or self.rows_in_doubt or not has_nameable_pages(req):
            return None
        if not self.media.allows(req):
            return None
        return self.of_tenant(space, tenant_of(req))

    def of_tenant(self, space: KeySpace, tenant: Tenant | None) -> KeySpace:
        """The same key space for pages that count towards a tenant's share."""
        if not self._quotas.shares or tenant is None:
            return space
        return space._replace(tenant_number=self._quotas.number_of(tenant.salt, tenant.extra_key))

    def bind_scheduler(self, scheduler: Any, truncator: Truncator | None = None) -> None:
        """The scheduler is built, around this cache; called once, before the first request.

        Args:
            scheduler: has the waiting queue.
            truncator: cuts prompts that are too long for it; None: off.
        """
        self.scheduler, self.truncator = scheduler, truncator
        self.only_saves = getattr(scheduler, "disagg_decode_prealloc_queue", None) is not None
        keeps, of_pairs = self._kept_of_a_token, self._keys_are_pairs
        self.media.begin(scheduler, keeps=keeps, of_pairs=of_pairs)
        if truncator is None:
            return
        if truncator.allows_match:
            self.quotes = self._search_for_quotes(truncator)
        self._tell_what_moves(truncator)

    def _tell_what_moves(self, truncator: Truncator) -> None:
        """Says in the log whose stored text is found, and where none can be moved."""
        if not self.truncated.is_movable():
            logger.warning(
                "hier-kv: --hier-kv-truncation %s: K of this model cannot be moved, so what is "
                "kept of a prompt is computed anew behind each new cut, and no stored text is "
                "searched for",
                truncator.mode,
            )
        elif truncator.allows_match:
            logger.info(
                "hier-kv: --hier-kv-truncation %s: only requests with a cache_salt or an extra_key "
                "are searched for stored text, and found, each inside its own",
                truncator.mode,
            )

    def _search_for_quotes(self, truncator: Truncator) -> QuoteSearch:
        """What searches prompts for stored text; of several ranks each does, and all agree."""
        parts = (self.store, self.truncated, truncator)
        if self.admission.decides_alone:
            questions = self.linker.place_questions
            drop = None if questions is None else questions.drop
            return QuoteSearch(*parts, page_size=self.page_size, on_found=drop)

        def key_of(req: Any) -> Any:
            num_tokens = len(req.full_untruncated_fill_ids)
            return request_key(req, num_tokens, self.page_size, of_pairs=self._keys_are_pairs)

        agreed = AgreedQuotes(*parts, page_size=self.page_size, key_of=key_of)
        self.admission.agree_on(agreed)
        return agreed

    def waiting_queue(self) -> Sequence[Any]:
        """The waiting requests, in the order in which the scheduler will take them.

        On a prefill server those behind them, too, that have no place on a decode server yet.
        """
        if self.scheduler is None:
            return ()
        behind = getattr(self.scheduler, "disagg_prefill_bootstrap_queue", None)
        waiting: Sequence[Any] = self.scheduler.waiting_queue
        return waiting if behind is None else [*waiting, *behind.queue]

    def _queued_handles(self) -> list[Any]:
        return [req.cache_request_handle for req in self.waiting_queue()]

    # ---- saves ----

    def swa_retain_floor(self, req: Any) -> int | None:
        """Tokens of a running request before which SGLang may free window layers' rows.

        Where windows may go to other positions, a page more than SGLang keeps: there a window may
        begin inside of a page.
        """
        layers = self.hier_linker.windows
        if layers is None or not self.hier_linker.movable:
            floor: int | None = super().swa_retain_floor(req)
            return floor
        kept = (layers.num_pages + 1) * layers.page_size
        return max(0, int(req.seqlen) - 1 - kept)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Inserts a request's tokens in the tree; new nodes are queued for saving."""
        with naming.pages_of(req):
            self._checkpoint(req, up_to, **kwargs)

    def _checkpoint(self, req: Any, up_to: int, **kwargs: Any) -> None:
        space = self.space_of(req)
        if space is not None and not self.only_saves:
            self._restore_last_page(req, space, up_to)
        self.release_plan(req.cache_request_handle)
        if self.linker.states is not None:
            self.linker.states.forget_misplaced(req)
        with self.linker.saving(req, space):
            super().checkpoint(req, up_to=up_to, **kwargs)
        if not has_nameable_pages(req):
            space = None  # the tree has others' images in the place of its own
        behind_saves = None
        if space is not None and self.linker.windows is not None:
            placed = partial(self.truncated.place_of_save, req)
            behind_saves = self.linker.windows.save(req, space, up_to, placed)
        if space is not None and self.linker.states is not None:
            behind_saves = self.linker.states.save(req, space, up_to)
        if space is not None and req.finished():
            self._note_use(req, space, up_to)
            if self.quotes is not None and images_of(req) is None:
                self.quotes.note(req, space, up_to)
        if behind_saves is not None:  # behind the use, which says where paths part
            self.hier_linker.after_saves(behind_saves)

    def _note_use(self, req: Any, space: KeySpace, up_to: int) -> None:
        """Tells the look-ahead of a request that ends, behind its last save.

        Once a request: how soon its pages are used again is what the placement policy learns.
        """
        lookahead, state = self.store.lookahead, find_state(req)
        if lookahead is None or state is None or state.received is not None:
            return  # what a decode server was sent is never looked for here
        key = request_key(req, up_to, self.page_size, of_pairs=self._keys_are_pairs)
        if len(key):
            hashes = hashes_of(key, self.page_size)
            hashes = self.truncated.stored_path(req, hashes)
            self.hier_linker.after_saves(partial(lookahead.used, space, hashes, state.arrived_s))
            self._note_hints(req, space, hashes)

    def _note_hints(self, req: Any, space: KeySpace, hashes: Any) -> None:
        """Hands on what a request says of its conversation, behind its use."""
        lookahead, tenant = self.store.lookahead, tenant_of(req)
        try:
            hints = hints_of(getattr(req.sampling_params, "custom_params", None))
        except ValueError:
            # SGLang's own front process refuses it; a gateway asks the scheduler without one.
            self.store.counters.add("unusable_hints_requests")
            return
        if hints is None or lookahead is None or tenant is None:
            return
        owner = self.hint_owner(tenant)
        self.hier_linker.after_saves(
            lambda: hand_on(lookahead, space, self.resumable(space, hashes), owner, hints)
        )

    def resumable(self, space: KeySpace, hashes: Hashes) -> Hashes:
        """Keys of all that a prompt of these pages could reuse of the tiers. Any thread.

        The pages alone, but of models with window layers or states: with those where the prompt can
        be resumed, and no page behind that. Where that is behind the last page, the same prompt
        again is resumed before that page, as its last token is computed: with that window, too.
        """
        layers = self.linker.resumption
        if layers is None:
            return hashes
        wanted, end = layers.wish(space, hashes, 0, len(hashes))
        if not end or end < len(hashes):
            return wanted
        again, _ = layers.wish(space, hashes, 0, end - 1)
        known = {page.tobytes() for page in wanted}
        return np.concatenate(
            [wanted, *(page[None] for page in again if page.tobytes() not in known)]
        )

    def hint_owner(self, tenant: Tenant) -> int:
        """By whose record hints of a tenant are believed."""
        secret = bytes.fromhex(self.scheduler.server_args._hier_kv_secret)
        return owner_slot(secret, tenant, NUM_OWNERS)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """SGLang's insert, with what the pages are worth; none where they are of other images."""
        if not self.media.may_insert(req, up_to):
            self._keep_state_out(req)
            return

        def insert() -> None:
            super(HierKVRadixCache, self).checkpoint_into_tree(req, up_to=up_to, **kwargs)

        # SGLang 0.5.22 matches what it has just inserted; that asks for nothing.
        with self.linker.unasked():
            self.taint.insert(req, up_to, insert)

    def _keep_state_out(self, req: Any) -> None:
        """An insert is left out: what SGLang's would have done with a request's state.

        One that ended hands its states to the tree, or the tree frees them; SGLang does not look
        again behind an insert.
        """
        if req.finished():
            for component in self.components.values():
                component.cleanup_after_caching_req(req, is_finished=True)

    def _restore_last_page(self, req: Any, space: KeySpace, up_to: int) -> None:
        """Puts the stored KV of a prompt's last page in place of what was just recomputed.

        The last token of a prompt is always computed, so a prompt of whole pages computes its last
        page again, with other rounding. Where the tree holds that page, SGLang's insert drops what
        was recomputed and decodes on the older KV; this does the same where a tier below holds it,
        so that a page has one value everywhere and answers are those of a device hit. Nothing is
        replaced where the stored page is of worse quality.
        """
        end = up_to - self._keys_are_pairs
        start = end - self.page_size
        if end % self.page_size or req.prefix_len != start or req.kv.cache_protected_len > start:
            return
        key = request_key(req, up_to, self.page_size, of_pairs=self._keys_are_pairs)
        last = hashes_of(key, self.page_size)[-1:]
        rows = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
        state = find_state(req)
        limit = int(Quality.EXACT) if state is None else state.taint
        last, window_rows = self.linker.all_parts(last, rows, self.token_to_kv_pool_allocator)
        ticket = self.admission.take_last(req.cache_request_handle, space, last, limit)
        if ticket is not None:
            self.hier_linker.restore_pages(ticket, space, last, rows, start, window_rows)

    # ---- promotion of waiting requests ----

    def is_backuped(self, node_id: Any) -> bool:
        """Whether a request may be prefetched for; not a session's turn, whose rows no tree has."""
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
        tokens = self._tokens_to_find(req, matched_prefix_tokens + new_input_tokens)
        key = whole_pages_key(
            tokens, extra_key, cache_salt, self.page_size, of_pairs=self._keys_are_pairs
        )
        num_pages = len(key) // self.page_size
        if space is None or req is None or num_pages == 0:
            return
        marker = self.linker.hit_markers.get(handle.rid)
        device_len = marker.device_hit_len if marker else len(matched_prefix_tokens)
        device_pages = device_len // self.page_size
        with naming.pages_of(req):
            hashes = hashes_of(key, self.page_size)
        lineage = lineage_of(req)
        if lineage is not None and self.truncated.is_movable():
            self.truncated.enqueue(req, lineage, space, device_pages, hashes, key)
            return
        num_on_device = min(device_pages, num_pages)
        num_tokens = max(len(tokens), len(req.full_untruncated_fill_ids))
        prefix = self._prefix_of(req, space, hashes, num_on_device, num_tokens)
        self._note_enqueued(req, prefix, device_pages)  # before its plan begins to move its pages
        found = self.admission.enter(handle, prefix, key)
        waiting = self.waiting_room.find(handle)
        if waiting is not None:
            resumes_at = (prefix if prefix.points is None else waiting.prefix).resumes_at
            state_of(req).wanted = Wanted(hashes, waiting, resumes_at)
        questions, layers = self.linker.place_questions, self.linker.resumption
        if questions is not None and layers is not None and prefix.resumes_at is not None:
            tail = hashes[num_on_device:][: layers.most_pages]
            resumable = prefix.resumes_at - num_on_device
            questions.begin(handle, prefix, key, tail, self._num_resumable(req), resumable)
        if self.quotes is not None and images_of(req) is None:
            num_stored = found.total  # of a hybrid, what is needed where it goes on is counted, too
            if prefix.resumes_at is not None:
                num_stored = prefix.resumes_at - num_on_device
            size = self.page_size
            self.quotes.begin(req, space, num_on_device * size, num_stored * size)

    def _prefix_of(
        self, req: Any, space: KeySpace, path: Hashes, num_on_device: int, num_tokens: int
    ) -> ReusablePrefix:
        """What a request that enters the queue could reuse; a hybrid's, where it is resumed.

        Args:
            req: SGLang's request.
            space: of its pages.
            path: u8 `[N, 32]`, hashes of its pages from the root on.
            num_on_device: leading ones that are on the device.
            num_tokens: of its prompt.
        """
        layers, hashes = self.linker.resumption, path
        resumes_at, look_again, points, reach = None, None, None, None
        questions = self.linker.place_questions
        if layers is not None and self.admission.decides_alone:
            limit = self._num_resumable(req)
            look_again = partial(what_resumes, layers, space, path, num_on_device, limit)
            hashes, resumes_at = look_again()
            if questions is None:  # else the remote store is asked, once
                reach = path[: num_on_device + layers.most_pages][:limit]
        elif layers is not None:
            ask = None if questions is None else questions.ask
            points = PromptPoints(layers, self.store, space, path, self._num_resumable(req), ask)
        anchor = self.device_tree.path(req.last_node, self.page_size) if self.device_tree else None
        return ReusablePrefix(
            space, hashes, num_on_device, self.linker.worst_quality_of(req), anchor, num_tokens,
            look_again, points, resumes_at, reach,
        )  # fmt: skip

    def _num_resumable(self, req: Any) -> int:
        """Pages of a prompt behind which it can be resumed: its last token is computed."""
        num_keyed = len(req.full_untruncated_fill_ids) - 1 - self._keys_are_pairs
        return int(max(0, num_keyed) // self.page_size)

    def _tokens_to_find(self, req: Any, tokens: Any) -> Any:
        """A prompt's tokens, with its last one where that ends a page.

        SGLang leaves it out; see `_restore_last_page` for why it is asked for.
        """
        num = len(tokens) + 1
        if req is None or (num - self._keys_are_pairs) % self.page_size:
            return tokens
        if num < len(req.full_untruncated_fill_ids):
            return tokens  # more is computed than the last one, for log-probabilities of the prompt
        return req.full_untruncated_fill_ids[:num]

    def _note_enqueued(self, req: Any, prefix: ReusablePrefix, device_pages: int) -> None:
        """Records where a request's pages lie as it enters the queue, for its report."""
        survey = self.store.survey(prefix.space, prefix.off_device, prefix.max_quality)
        in_dram = survey.ready | survey.coming
        parts = np.split(in_dram, np.flatnonzero(np.diff(in_dram)) + 1)
        tiers = [
            (HitTier.HOST if part[0] else self._record_tier, len(part))
            for part in parts
            if len(part)
        ]
        state_of(req).note_enqueued(self.page_size, [(HitTier.DEVICE, device_pages), *tiers])
        if self.store.events.on:
            self.store.events.note(
                "enqueued",
                rid=req.rid,
                device=device_pages,
                pages=hashes_to_hex(prefix.off_device[: len(in_dram)]),
                on_disk=np.flatnonzero(~in_dram).tolist(),
            )

    @property
    def _record_tier(self) -> HitTier:
        """The tier that records lie in: coded DRAM is DRAM."""
        return HitTier.HOST if self.store.keeps_records_in_dram else HitTier.DISK

    def _enqueued_request(self, handle: Any) -> Any:
        req = self.matching_request
        return req if req is not None and req.rid == handle.rid else None

    def match_prefix(self, params: Any) -> Any:
        """SGLang's match; a turn of a session may first have to give up its session's KV."""
        if params.req is not None:
            self.spans.matched(params.req, self.waiting_room.find)
            if params.req.session is not None:
                self.session_turns.meet(params.req)
            if params.cow_mamba:
                self._leave_state(params.req)
        result = super().match_prefix(params)
        if self.only_saves and params.req is not None:
            # Of a decode server SGLang does not ask the linker, whose match does this elsewhere.
            return self.taint.begin_match(params.key, params.req, result)
        return result

    def begin_match(self, key: Any, req: Any, result: Any) -> Any:
        """The device match of a request, before what the tiers have is added to it."""
        # The request is not among the arguments of the prefetch call that follows its match.
        self.matching_request = req
        usable = self.media.begin_match(key, req, result)
        if usable is not result:
            self._leave_state(req)
        return self.taint.begin_match(key, req, usable)

    def _leave_state(self, req: Any) -> None:
        """No state is copied for a request that does not run: it begins with an empty one.

        Until a match or a load says otherwise. Of another image's match nothing is used, and SGLang
        has noted by then which state that leads to. And where a request that was matched found no
        room, SGLang takes away what it noted and leaves a session's turn its slot, in which is what
        others left there: a later match without a state would go on from that.
        """
        if req.kv.holds_mamba and not req.kv.holds_kv:
            req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, True

    @rank_consensus(same_params=True, same_results=True)
    def check_prefetch_progress(self, handle: Any) -> bool:
        """False while a request should wait for pages that are on their way. O(1)."""
        if handle in self._held:
            return False
        found = all(search.may_admit(handle) for search in self._searches)
        may_run = found and self.admission.may_admit(handle)
        if may_run:
            self.waiting_room.let_go(handle)
        return may_run

    def is_held(self, handle: Any) -> bool:
        """Whether a request should wait, in all of this step; its time to wait begins now."""
        held = not self.check_prefetch_progress(handle)
        if held:
            self._held |= {handle}
        return held

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        """SGLang's own storage attribution is not used; see `RequestState`."""
        return 0, None

    def prefix_device_indices(self, req: Any) -> Any:
        """Rows of an admitted request's prefix; its pages need no plan any more."""
        num_keyed = len(req.full_untruncated_fill_ids) - self._keys_are_pairs
        num_pages, left = divmod(num_keyed, self.page_size)
        self.admission.admit(req.cache_request_handle, None if left else num_pages - 1)
        self._drop_search(req.cache_request_handle)
        self.taint.admit(req)
        return super().prefix_device_indices(req)

    def runs(self, reqs: list[Any], load_index: int) -> None:
        """Requests are about to be computed, a part of their prompts at least.

        Args:
            reqs: of a batch.
            load_index: of the batch of loads beside it; -1 for none.
        """
        for req in reqs:
            if state_of(req).is_counted:
                continue
            if str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX):
                self.misses.leave_out(req)
            else:
                self.misses.runs(req, self.space_of(req))
            self.spans.runs(req, load_index)

    def maybe_hand_to_session(self, req: Any) -> None:
        """As SGLang's; from now on the turn writes its session's rows."""
        super().maybe_hand_to_session(req)
        self.session_turns.begin(req)

    def claim_kv_row(self, req: Any) -> bool:
        """A request that held KV ends or is retracted: its plan ends at the latest now.

        Needed for a request that reused nothing and is barred from the tree, or whose session keeps
        its rows: nothing else releases its plan.
        """
        self.release_plan(req.cache_request_handle)
        self.session_turns.end(req)
        claimed = bool(super().claim_kv_row(req))
        self.session_turns.keep_busy(req)
        if claimed:
            self.session_turns.give_up_unread(req)
        return claimed

    def load_queued(self, req: Any, *, loaded: bool) -> None:
        """A request's load was queued; `loaded` is False when there was nothing to load."""
        handle = req.cache_request_handle
        if loaded:
            first, num_pages = self.waiting_room.remote_pages(handle)
            if num_pages:
                state_of(req).note_remote(first, num_pages)
        self.admission.load_queued(handle)
        self._drop_search(handle)

    def release_plan(self, handle: Any) -> None:
        """A request runs: gives back the pins that kept its pages in DRAM."""
        self.admission.release(handle)
        self._drop_search(handle)

    def _leave_queue(self, handle: Any) -> None:
        self.admission.leave(handle)
        self._drop_search(handle)

    @property
    def _searches(self) -> list[Any]:
        """What looks for more than a waiting request's prefix."""
        return [each for each in (self.quotes, self.linker.place_questions) if each is not None]

    def _drop_search(self, handle: Any) -> None:
        for search in self._searches:
            search.drop(handle)

    def release_all_plans(self) -> None:
        """As `release_plan`, for all requests."""
        self.admission.leave_all()
        for search in self._searches:
            search.drop_all()

    def release_aborted_request(self, handle: Any) -> None:
        """The request will not run: its plan and its queued load are cancelled."""
        self._leave_queue(handle)
        self.linker.release_request(handle.rid)
        super().release_aborted_request(handle)

    # ---- events ----

    def check_hicache_events(self) -> None:
        """Once a scheduler step: plans follow the queue, finished saves release their nodes."""
        self._held = frozenset()
        if self.device_tree is not None:
            self.device_tree.new_step()
        if self.linker.place_questions is not None:
            self.linker.place_questions.step()
        self._drop_outputs(self.admission.step())
        self.identity.step(self.store)
        self.metrics_reporter_hier.maybe_publish()

    @rank_consensus
    def finish_external_linker_loads(self, reqs: list[Any]) -> list[Any]:
        """Waits for the loads of the batch that just ran; returns requests whose loads failed.

        With several ranks these are known at the next step, before any result of the batch is
        used.
        """
        return self.admission.end_loads(reqs)

    def before_result(self, reqs: list[Any]) -> None:
        """The result of a batch is about to be used."""
        self.spans.computed(reqs)
        self._drop_outputs(self.admission.settle_loads(reqs))

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

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        """As SGLang's; where too few states may leave, those that wait to be saved are saved first.

        They are locked until then, and SGLang has no other answer to a lack of states than to end.
        """
        linker = getattr(self, "linker", None)
        lacks = params.mamba_num > 0 and self.mamba_evictable_size() < params.mamba_num
        if lacks and linker is not None and linker.pending_offloads:
            self.store.counters.add("waits_for_saved_states")
            self.quiesce()
        return super().evict_for_alloc(params, **kwargs)

    def free_saved_pages(self) -> bool:
        """SGLang lacks rows for a decode step: what waits to be saved is saved first.

        It is locked until then, so that it cannot be evicted. Without this SGLang would retract
        requests, whose prompts are locked as well, until it aborts the last one. All ranks of a
        group come here in the same step. Not with pipeline stages, which cannot agree on the saves
        that have ended outside of their rounds.

        Returns:
            Whether there may be more room now.
        """
        if self.pp_size > 1 or not self.linker.pending_offloads:
            return False
        self.store.counters.add("waits_for_saved_pages")
        self.quiesce()
        return True

    def take_saves_in_pause(self) -> None:
        """Takes the results of saves that have ended while SGLang is paused and makes no steps.

        Not with pipeline stages, as with `free_saved_pages`.
        """
        if self.pp_size == 1 and self.linker.pending_offloads:
            self.admission.drain_saves()

    def quiesce(self) -> None:
        """Waits for pending saves and takes their results, so that SGLang may flush or update."""
        self.hier_linker.quiesce()
        self.admission.drain_saves()

    def weights_change(self) -> None:
        """Weights or adapters are about to change: what was planned under those of now is void.

        Pending saves are done first: they hold KV of the present weights, and would make SGLang
        refuse its flush. A request that waits is computed, or reuses what is ready when it runs.
        With several ranks all of them come here in the same step.
        """
        self.quiesce()
        self.media.end("weights or adapters changed, and encoded images may be of the old ones")
        self._void_promises()

    def _void_promises(self) -> None:
        self.release_all_plans()
        self.linker.hit_markers.clear()
        self.store.end_epoch()

    def reset(self) -> None:
        """Drops the device tier; the tiers below stay (`/flush_cache`)."""
        is_built = self.linker is not None  # not so in SGLang's constructor
        if is_built:
            self.release_all_plans()
        super().reset()
        if is_built:
            self.rows_in_doubt = False
            self.identity.device_was_reset()
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


def create_cache(ctx: Any, make_parts: Callable[[HierKVRadixCache], CacheParts]) -> Any:
    """Has SGLang build its radix cache, as ours.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.
        make_parts: what is kept below the device, from SGLang's half of the cache.
    """
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(
        ctx, cache_class=partial(HierKVRadixCache, make_parts=make_parts)
    )
