"""Hooks in the schedulers of prefill servers and decode servers.

A prefill server sends a request's KV when the result of its forward is used, behind the end of the
forward's loads: SGLang aborts a request whose load failed instead (`discard_output_reason`). Before
a forward it sends what the tree or an earlier chunk left, in batches that load nothing. The
metadata travels with the KV, in rows that are padded; the padding takes the mark of
`identity/handover.py`. A decode server keeps what it was sent out of its tree, and so out of the
tiers, where the mark is not its own, on all ranks where it is not so on one; what the mark says of
the KV's quality it keeps with the request.

With a draft model its rows travel with the target's. A draft's row of a prompt's last token depends
on the first one of the answer, which the prefill server says. And what SGLang keeps of a request
that it retracts are the target's rows alone: where such a request goes on, its draft's rows are
what another one left.

Of window layers the last window travels. SGLang takes rows for a page more where a prompt ends with
a page, and its tree would have them as that window's: they are given back when the rest has come.
Of layers with a state the one behind the prompt travels; those of a decode server's tree are its
own.

Rows of an index travel behind the last part of the latent ones, to pages that the decode server
names in a list of their own. Where some page that is sent is not in it, what comes has no mark.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.handover import FOREIGN, NUM_WORDS, Handover, Mark, no_mark
from sglang_ext.provenance.request_state import find_state, state_of, wants_exact
from sglang_ext.seam.cache import HierKVRadixCache
from sglang_ext.seam.hooks.hooking import hook
from sglang_ext.seam.hooks.loaded_models import draft_runners
from sglang_ext.tiers.records.quality import Quality

logger = logging.getLogger(__name__)

_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_BOOTSTRAP = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode"
_WAITS_FOR = "_early_send_wait_event"  # of a sender: what the next part that it sends is behind
# Where the mark lies in a row of SGLang's `output_ids`, 16 words of which it uses the first.
_MARK = slice(16 - NUM_WORDS, 16)


def register_disaggregation_hooks() -> None:
    """Registers the hooks; in a scheduler process, before the scheduler is built."""
    hook(f"{_BOOTSTRAP}.finalize_bootstrap", _before_sending)
    hook(f"{_PREFILL}.send_kv_chunk", _around_sending, "around")
    hook(f"{_DECODE}.DecodeTransferQueue._commit_transfer_to_req", _after_arrival)
    hook(f"{_DECODE}.DecodeTransferQueue._defer_release", _after_giving_up)
    hook(f"{_DECODE}.DecodeTransferQueue._do_release", _before_release, "before")
    hook(f"{_DECODE}.DecodePreallocQueue.resume_retracted_reqs", _after_resuming)
    hook(f"{_DECODE}.DecodePreallocQueue._pre_alloc", _before_rows_are_taken, "before")
    hook(
        f"{_DECODE}.SchedulerDisaggregationDecodeMixin.process_decode_queue", _before_step, "before"
    )


def check_transfer(scheduler: Any, cache: HierKVRadixCache) -> None:
    """Refuses to store rows on a decode server that no prefill server sends.

    Raises:
        HierKVConfigError: one sentence; on either server, as both are built alike.
    """
    queues = scheduler.disagg_prefill_bootstrap_queue, scheduler.disagg_decode_prealloc_queue
    for queue in queues:
        if queue is None:
            continue
        args = queue.kv_manager.kv_args
        sent = {at for part in (args.kv_data_ptrs, *args.state_data_ptrs) for at in part}
        rows = (each for each in cache.hier_linker.device_rows if each.numel())
        left = [each for each in rows if each.data_ptr() not in sent]
        if left:
            raise HierKVConfigError(
                "--enable-hier-kv needs SGLang to send all rows of a page from prefill servers to "
                f"decode servers, got {len(left)} kinds of rows that it does not send; leave "
                "--disaggregation-mode out for this model."
            )


def _before_sending(is_known: bool, queue: Any, req: Any) -> None:
    """The decode server has said where a request's KV goes; of two in a room, both to that place.

    SGLang hands out once which leading pages the decode server has, so the second one of two would
    be sent as if it had none. All ranks see the same requests in the same order.
    """
    cache = queue.scheduler.tree_cache
    if is_known and isinstance(cache, HierKVRadixCache) and _is_sent(req):
        cache.sending_rooms.begin(req.bootstrap_room, req.disagg_kv_sender)


def _is_sent(req: Any) -> bool:
    return req.bootstrap_room is not None and req.bootstrap_host != FAKE_BOOTSTRAP_HOST


def _around_sending(
    send: Callable[..., None],
    scheduler: Any,
    req: Any,
    last_chunk: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    cache, restored = scheduler.tree_cache, None
    if isinstance(cache, HierKVRadixCache):
        if req.discard_output_reason is not None and not last_chunk:
            return  # its load failed; SGLang aborts it at its next step
        restored = _send_behind_restored(cache, req.disagg_kv_sender)
        if last_chunk:
            row = scheduler.disagg_metadata_buffers.output_ids[req.metadata_buffer_index]
            row[_MARK] = torch.from_numpy(_mark_of(cache, req))
            # What another one sends from here on comes behind all of this, to a room that is over.
            cache.sending_rooms.end(req.bootstrap_room, req.disagg_kv_sender)
    send(scheduler, req, last_chunk, *args, **kwargs)
    if restored is not None and getattr(req.disagg_kv_sender, _WAITS_FOR, None) is restored:
        # SGLang had no rows to send; what it sends next may be behind a later one.
        setattr(req.disagg_kv_sender, _WAITS_FOR, None)


def _send_behind_restored(cache: HierKVRadixCache, sender: Any) -> Any:
    """Has the thread that sends rows wait for pages that are put in place of recomputed ones.

    Such an event is SGLang's own way to have that thread, and not the scheduler's, wait for a
    forward that may still write what it sends (`TransferKVChunk.wait_event`). Where it has set one
    by now, that is of the forwards' stream, which has been told to wait for these pages.

    Returns:
        The event, if the sender has it from here.
    """
    event = cache.hier_linker.restoring()
    if event is None:
        return None
    if not hasattr(sender, _WAITS_FOR):  # nothing would wait: better here than not at all
        event.synchronize()
        return None
    if getattr(sender, _WAITS_FOR) is not None:
        return None
    setattr(sender, _WAITS_FOR, event)
    return event


def _before_rows_are_taken(queue: Any, *args: Any, **kwargs: Any) -> None:
    """A decode server is about to name rows, and a state's slot, that a prefill server writes.

    With overlap scheduling SGLang launches a forward before it uses the result of the last one. Of
    a request that ended with that result the forward still writes rows behind its tokens, and its
    state, which are free by now. What SGLang computes next is behind it on the device; a transfer
    is behind nothing, so what came could be overwritten. Seldom: a forward is as long as it takes
    the other server to hear of the rows and to send some.
    """
    scheduler = queue.scheduler
    cache = scheduler.tree_cache
    if not isinstance(cache, HierKVRadixCache) or not scheduler.enable_overlap:
        return
    running = scheduler.last_batch
    if running is not None and any(req.finished() for req in running.reqs):
        cache.hier_linker.wait_for_forward()


def _after_arrival(result: None, queue: Any, decode_req: Any) -> None:
    cache = queue.scheduler.tree_cache
    if not isinstance(cache, HierKVRadixCache):
        return
    req = decode_req.req
    row = queue.metadata_buffers.output_ids[decode_req.metadata_buffer_index]
    sent = row[_MARK].tolist()
    row[_MARK] = 0
    if req.bootstrap_host == FAKE_BOOTSTRAP_HOST:  # nothing came, whatever lies in the row
        req.skip_radix_cache_insert = True
        return
    # All ranks take the same requests in the same order: SGLang has agreed on what has arrived.
    quality = cache.admission.agree_on_worst(_quality_here(cache, queue, decode_req, sent))
    if quality == FOREIGN:
        req.skip_radix_cache_insert = True
        cache.store.counters.add("received_foreign_requests")
        _warn_once()
        return
    cache.store.counters.add("received_requests")
    _give_unsent_back(cache, queue.scheduler, req)
    state_of(req).note_received(quality)
    if req.last_node is not None:  # of its rows this server's own are never asked for again
        cache.taint.admit(req)
    if quality > Quality.EXACT:
        cache.store.counters.add("received_inexact_requests")
        if wants_exact(req):
            _refuse_inexact(req)


def _quality_here(cache: HierKVRadixCache, queue: Any, decode_req: Any, sent: list[int]) -> int:
    """The quality of the KV that came to this rank; `FOREIGN` where it may not be stored."""
    req = decode_req.req
    kv_manager = queue.scheduler.disagg_decode_prealloc_queue.kv_manager
    own = _handover_of(cache, req, kv_manager.get_session_id())
    if own is None or not any(sent) or _shares_room(queue, req):
        return FOREIGN
    if req.bootstrap_room in cache.given_up_rooms:
        return FOREIGN
    if _has_drafts(queue.scheduler) and not _goes_on_as_sent(queue, decode_req):
        return FOREIGN
    return own.quality_of(sent)


def _has_drafts(scheduler: Any) -> bool:
    return bool(draft_runners(scheduler.tp_worker.model_runner))


def _goes_on_as_sent(queue: Any, decode_req: Any) -> bool:
    """Whether the answer goes on with the token for which the draft's last row was computed.

    It does not where SGLang has a retracted request's KV computed anew (`/pause_generation`): the
    prefill server samples a token, and the request goes on with the one that was answered before.
    """
    said = decode_req.req.output_ids
    first = int(queue.metadata_buffers.output_ids[decode_req.metadata_buffer_index][0])
    return len(said) > 0 and said[-1] == first


def _give_unsent_back(cache: HierKVRadixCache, scheduler: Any, req: Any) -> None:
    """Window layers' rows before those that were sent are SGLang's again; nobody wrote them.

    As it gives them away itself when the window has gone on.
    """
    if cache.hier_linker.windows is None:
        return
    kv, size = req.kv, cache.page_size
    first = kv.get_evicted_seqlen(ComponentType.SWA)
    window = len(req.full_untruncated_fill_ids) - int(scheduler.sliding_window_size)
    sent = max(kv.cache_protected_len, window) // size * size  # as both ends of the transfer say
    if sent <= first:
        return
    rows = cache.req_to_token_pool.req_to_token[kv.req_pool_idx, first:sent]
    cache.token_to_kv_pool_allocator.free_swa_segment(rows, start_pos=first)
    kv.set_evicted_seqlen(ComponentType.SWA, sent)


def _after_resuming(resumed: list[Any], queue: Any, *args: Any, **kwargs: Any) -> None:
    """Retracted requests have rows again: SGLang kept the target's, and not the draft's.

    Nor has it kept the window layers' rows that it gave away before, for which it takes some. They
    are answered, and enter neither the tree nor a tier. All ranks resume the same ones.
    """
    cache = queue.tree_cache
    if not isinstance(cache, HierKVRadixCache):
        return
    if not _has_drafts(queue.scheduler) and not cache.hier_linker.is_hybrid:
        return
    for req in resumed:
        req.skip_radix_cache_insert = True
    cache.store.counters.add("unsaved_retracted_requests", len(resumed))


def _refuse_inexact(req: Any) -> None:
    """The prefill server was not told what this one was: that exact KV is asked for."""
    req.to_finish = FINISH_ABORT(
        "hier_kv_exact was asked of the decode server, and KV that is not exact came from the "
        "prefill server; send both the same custom_params",
        HTTPStatus.BAD_REQUEST,
    )


def _shares_room(queue: Any, req: Any) -> bool:
    """Whether another request waits for KV under the same number.

    The prefill server knows one place of a room, the last that it was told: what it sent before
    that went to the other request's rows, and the mark does not say so.
    """
    num_waiting: int = sum(each.req.bootstrap_room == req.bootstrap_room for each in queue.queue)
    return num_waiting > 1


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "hier-kv: KV came without the mark of this server's namespace and of the request's tokens, "
        "so it is used and not stored: its prefill server runs without --enable-hier-kv, or with "
        "another model, page size, KV dtype, tokenizer or chat template, or two requests came with "
        "one bootstrap_room, the first of them aborted or not (told once; counted as "
        "received_foreign_requests)"
    )


def _mark_of(cache: HierKVRadixCache, req: Any) -> Mark:
    """What is sent with a request's KV: its mark here; none where it may not be stored."""
    own, state = _handover_of(cache, req, _receiver_of(cache, req)), find_state(req)
    if own is None:
        return no_mark()
    return own.mark(int(Quality.EXACT) if state is None else state.taint)


def _receiver_of(cache: HierKVRadixCache, req: Any) -> str | None:
    """The one rank that a request's KV is sent to; None where it is sent to none, or to more.

    None, too, where another request's may have come between, or it went to a place of another's, or
    rows of an index do not all have a place.
    """
    if not _is_sent(req):
        return None
    if not cache.sending_rooms.has_alone(req.bootstrap_room, req.disagg_kv_sender):
        return None
    known = req.disagg_kv_sender.kv_mgr.transfer_infos.get(req.bootstrap_room, {})
    # A thread of SGLang's adds to it.
    places = [each for each in list(known.values()) if not each.is_dummy]
    if len(places) != 1 or not _takes_all_index_rows(cache, req, places[0]):
        return None
    name: str = places[0].mooncake_session_id
    return name


def _takes_all_index_rows(cache: HierKVRadixCache, req: Any, place: Any) -> bool:
    """Whether the decode server has named a page for the index rows of each one that is sent.

    Of two lists that are not of one length SGLang sends what both have, and writes that to its log.
    """
    named = place.dst_state_indices
    num_tokens = len(req.full_untruncated_fill_ids) - req.disagg_decode_prefix_len
    num_pages = -(-num_tokens // cache.page_size)
    return all(
        at < len(named) and len(named[at]) == num_pages
        for at, kind in enumerate(req.disagg_kv_sender.kv_mgr.kv_args.state_types)
        if kind == StateType.DSA
    )


def _handover_of(cache: HierKVRadixCache, req: Any, receiver: str | None) -> Handover | None:
    """A request's KV as this server has it; None where it may not be stored."""
    space = cache.space_of(req)
    if space is None or req.bootstrap_room is None or receiver is None:
        return None
    # On either server those whose rows are sent: no output is among them before its first forward.
    tokens = req.full_untruncated_fill_ids
    return Handover(space.digest, int(req.bootstrap_room), tokens, receiver)


def _after_giving_up(result: None, queue: Any, decode_req: Any) -> None:
    """A request is given up while its KV is on its way, and another one may come with its room."""
    cache = queue.scheduler.tree_cache
    if isinstance(cache, HierKVRadixCache):
        cache.given_up_rooms.add(decode_req.req.bootstrap_room)


def _before_release(queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang gives away the rows of an aborted request, after a time whatever became of its KV.

    Whose rows a transfer still writes then nobody knows, so nothing is stored until a flush.
    """
    cache = queue.scheduler.tree_cache
    if not isinstance(cache, HierKVRadixCache):
        return
    receiver = decode_req.kv_receiver
    num_senders = len(receiver.bootstrap_infos) if receiver.abort_notified else 0
    room = decode_req.req.bootstrap_room
    is_over = receiver.kv_mgr.is_abort_release_safe(room, num_senders)
    # All ranks release the same requests in the same order; a transfer is of each by itself.
    if cache.admission.agree_on_worst(int(not is_over)):
        cache.rows_in_doubt = True
        cache.store.counters.add("unended_transfers")
        logger.warning(
            "hier-kv: the prefill server of room %d did not say in time that its transfer has "
            "ended, so its rows are given away while it may write them: nothing is stored until "
            "/flush_cache (counted as unended_transfers)",
            room,
        )


def _before_step(scheduler: Any) -> None:
    """SGLang's decode loop asks no external cache for events; saves would never be taken."""
    cache = scheduler.tree_cache
    if isinstance(cache, HierKVRadixCache):
        cache.check_hicache_events()
