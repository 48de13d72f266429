"""Hooks in the schedulers of prefill servers and decode servers.

A prefill server sends a request's KV when the result of its forward is used, behind the end of the
forward's loads: SGLang aborts a request whose load failed instead (`discard_output_reason`). Before
a forward it sends what the tree or an earlier chunk left, in batches that load nothing. The
metadata travels with the KV, in rows that are padded; the padding takes the mark of
`identity/handover.py`. A decode server keeps what it was sent out of its tree, and so out of the
tiers, where the mark is not its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sglang_ext.identity.handover import NUM_WORDS, Mark, mark_of, no_mark
from sglang_ext.provenance.request_state import find_state
from sglang_ext.seam.cache import HierKVRadixCache
from sglang_ext.seam.hooks.hooking import hook
from sglang_ext.tiers.records.quality import Quality

logger = logging.getLogger(__name__)

_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_DECODE = "sglang.srt.disaggregation.decode"
# Where the mark lies in a row of SGLang's `output_ids`, 16 words of which it uses the first.
_MARK = slice(16 - NUM_WORDS, 16)


def register_disaggregation_hooks() -> None:
    """Registers the hooks; in a scheduler process, before the scheduler is built."""
    hook(f"{_PREFILL}.send_kv_chunk", _around_sending, "around")
    hook(f"{_DECODE}.DecodeTransferQueue._commit_transfer_to_req", _after_arrival)
    hook(
        f"{_DECODE}.SchedulerDisaggregationDecodeMixin.process_decode_queue", _before_step, "before"
    )


def _around_sending(
    send: Callable[..., None],
    scheduler: Any,
    req: Any,
    last_chunk: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    cache = scheduler.tree_cache
    if isinstance(cache, HierKVRadixCache):
        if req.discard_output_reason is not None and not last_chunk:
            return  # its load failed; SGLang aborts it at its next step
        cache.hier_linker.wait_restored()
        if last_chunk:
            row = scheduler.disagg_metadata_buffers.output_ids[req.metadata_buffer_index]
            row[_MARK] = torch.from_numpy(_own_mark(cache, req))
    send(scheduler, req, last_chunk, *args, **kwargs)


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
    is_own = any(sent) and sent == _own_mark(cache, req).tolist()
    if is_own and not _shares_room(queue, req):
        cache.store.counters.add("received_requests")
        return
    req.skip_radix_cache_insert = True
    cache.store.counters.add("received_foreign_requests")
    _warn_once()


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
        "one bootstrap_room (told once; counted as received_foreign_requests)"
    )


def _own_mark(cache: HierKVRadixCache, req: Any) -> Mark:
    """The mark of a request's KV as this server has it; none where it may not be stored."""
    space, state = cache.space_of(req), find_state(req)
    is_exact = state is None or state.taint == Quality.EXACT
    if space is None or req.bootstrap_room is None or not is_exact:
        return no_mark()
    # On either server those whose rows are sent: no output is among them before its first forward.
    return mark_of(space.digest, int(req.bootstrap_room), req.full_untruncated_fill_ids)


def _before_step(scheduler: Any) -> None:
    """SGLang's decode loop asks no external cache for events; saves would never be taken."""
    cache = scheduler.tree_cache
    if isinstance(cache, HierKVRadixCache):
        cache.check_hicache_events()
