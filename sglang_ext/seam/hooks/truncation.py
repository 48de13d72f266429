"""Cuts prompts that are too long, in the scheduler.

SGLang checks lengths twice: in its front process (see `front.py`), and in the scheduler, which
first bounds `max_new_tokens` by what the prompt leaves. The cut is made before both steps of the
scheduler: the client's wish is still known then, and everything after it sees the cut prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.seam.hooks.hooking import hook
from sglang_ext.seam.hooks.request_observers import request_observers
from sglang_ext.seam.page_hash import page_hasher
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.truncation.cut import DEFAULT_HEAD_TOKENS, CutRefusedError
from sglang_ext.truncation.lineage import CutLineage, attach_lineage, lineage_of
from sglang_ext.truncation.modes import why_not_cut
from sglang_ext.truncation.truncator import Truncator, may_cut, note_why_not_cut

logger = logging.getLogger(__name__)

# With fewer there is no window of a few messages to cut to.
_LEAST_CONTEXT = 128
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SESSION = "sglang.srt.session.session_controller.Session"


def register_truncation_hooks() -> None:
    """Registers the scheduler's part. It acts where the cache is ours and truncation is on."""
    request_observers.add(_note_wish)
    hook(f"{_SCHEDULER}.init_req_max_new_tokens", _around_max_new_tokens, "around")
    hook(f"{_SESSION}._concat_token_arrays", _around_concat, "around")


def build_truncator(scheduler: Any, config: HierKVConfig, page_size: int) -> Truncator | None:
    """The truncator of a scheduler; None when truncation is off."""
    if config.truncation == "off":
        return None
    if scheduler.max_req_len <= _LEAST_CONTEXT and config.truncation_head <= DEFAULT_HEAD_TOKENS:
        logger.warning(
            "hier-kv: a context of %d tokens is too short to truncate prompts to; longer ones are "
            "refused",
            scheduler.max_req_len,
        )
        return None
    linker = scheduler.tree_cache.hier_linker
    return Truncator(
        config,
        bytes.fromhex(scheduler.server_args._hier_kv_secret),
        context_len=int(scheduler.model_config.context_len),
        max_req_len=int(scheduler.max_req_len),
        max_input_len=int(scheduler.max_req_input_len),
        page_size=page_size,
        hash_of=page_hasher(page_size),
        tokenizer=scheduler.tokenizer,
        parts_exact=lambda: linker.is_hybrid and linker.movable,
    )


def _note_wish(scheduler: Any, req: Any, message: Any) -> None:
    # What the client asked for is on the message; the request is given it only later.
    note_why_not_cut(req, why_not_cut(message))


def _around_max_new_tokens(original: Callable[..., Any], self: Any, req: Any) -> Any:
    truncator = getattr(self.tree_cache, "truncator", None)
    if truncator is not None and may_cut(req):
        _cut(self.tree_cache, truncator, req)
    return original(self, req)


def _cut(cache: Any, truncator: Truncator, req: Any) -> None:
    counters = cache.store.counters
    try:
        lineage = truncator.cut(req)
    except (CutRefusedError, ValueError) as error:
        counters.add("truncation_refusals")
        req.set_finish_with_abort(str(error))
        return
    if lineage is None:
        return
    attach_lineage(req, lineage)
    counters.add("truncated_requests")
    counters.add("truncated_tokens", lineage.num_dropped)


def _around_concat(
    original: Callable[..., Any], last_req: Any, req: Any, session_params: Any
) -> Any:
    """A session's next turn goes on from the whole of the last one's prompt, not from its cut."""
    lineage = lineage_of(last_req)
    if not isinstance(lineage, CutLineage):
        return original(last_req, req, session_params)
    kept = last_req.origin_input_ids, last_req.origin_input_ids_unpadded
    last_req.origin_input_ids = last_req.origin_input_ids_unpadded = lineage.tokens
    try:
        return original(last_req, req, session_params)
    finally:
        last_req.origin_input_ids, last_req.origin_input_ids_unpadded = kept
