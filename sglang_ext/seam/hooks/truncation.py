"""Cuts prompts that are too long, in the scheduler.

SGLang checks lengths twice: in its front process (see `truncation_front`), and in the scheduler
after it has bounded `max_new_tokens` by what the prompt leaves. The cut is made before both of the
latter, so that the client's wish is still known and everything after it sees the cut prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.hooks.hooking import hook
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.truncation.cut import DEFAULT_HEAD_TOKENS, Cut, CutRefusedError, CutRule
from sglang_ext.truncation.lineage import CutLineage, attach_lineage, lineage_of, names_of
from sglang_ext.truncation.marks import MessageMarks, marks_of_tokenizer
from sglang_ext.truncation.policy import (
    STATED,
    check_length,
    cuts_overflow,
    matches_content,
    mode_of,
    why_not_cut,
)
from sglang_ext.truncation.reuse import page_hashes

logger = logging.getLogger(__name__)

# With fewer there is no window of a few messages to cut to.
_LEAST_CONTEXT = 128
_UNCUT = "_hier_kv_not_cut"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SESSION = "sglang.srt.session.session_controller.Session"


def register_truncation_hooks() -> None:
    """Registers the scheduler's part. It acts where the cache is ours and truncation is on."""
    hook(f"{_SCHEDULER}._create_generation_req", _after_create)
    hook(f"{_SCHEDULER}.init_req_max_new_tokens", _around_max_new_tokens, "around")
    hook(f"{_SESSION}._concat_token_arrays", _around_concat, "around")


# ---- the scheduler ----


class Truncator:
    """Cuts prompts that are too long, in one scheduler.

    Args:
        config: the plugin's settings.
        secret: names of lineages are keyed with it.
        context_len: of the model.
        max_req_len: SGLang's bound for prompt and output together.
        max_input_len: SGLang's bound for a prompt; one that long is refused already.
        page_size: P.
        tokenizer: tells where messages begin; None for none.

    Raises:
        HierKVConfigError: the settings leave nothing of the context to cut to.
    """

    def __init__(
        self,
        config: HierKVConfig,
        secret: bytes,
        *,
        context_len: int,
        max_req_len: int,
        max_input_len: int,
        page_size: int,
        tokenizer: Any,
    ) -> None:
        self.mode = config.truncation
        self.secret = secret
        self._longest = config.truncation_longest
        self._context_len = context_len
        self._max_input_len = max_input_len
        self.hash_of = page_hashes(page_size)
        self._marks = _marks_of(tokenizer)
        try:
            self._rule = CutRule(
                max_req_len - 1,
                ratio=config.truncation_ratio,
                head_tokens=config.truncation_head,
                align=page_size,
            )
        except ValueError as error:
            raise HierKVConfigError(
                f"--hier-kv-truncation cannot work here: {error}; change --hier-kv-truncation-head "
                "or add --hier-kv-truncation off."
            ) from error

    @property
    def allows_match(self) -> bool:
        """Whether prompts that fit may be searched for stored text at all."""
        return matches_content(self.mode)

    def wants_match(self, req: Any) -> bool:
        """Whether a request opted in: it may be searched for stored text, and found later."""
        try:
            return matches_content(mode_of(req.sampling_params.custom_params, self.mode))
        except ValueError:
            return False

    @staticmethod
    def may_quote(req: Any) -> bool:
        """Whether a request's prompt is its tokens alone, and only its answer is wanted."""
        return getattr(req, _UNCUT, "unknown") == "" and req.session is None

    def head_of(self, tokens: Any) -> int:
        """Tokens at the beginning of a prompt that are never dropped."""
        return min(len(tokens), self._rule.head_len(self._marks.find(tokens).first))

    def cut(self, req: Any) -> CutLineage | None:
        """The lineage of a request whose prompt must be cut; None where it need not.

        Args:
            req: SGLang's, before its `max_new_tokens` was bounded by what its prompt leaves.

        Raises:
            CutRefusedError: it cannot be cut to anything useful.
            ValueError: it is too long to be cut, or asks for what it may not have.
        """
        params = req.sampling_params
        custom = params.custom_params if isinstance(params.custom_params, dict) else {}
        tokens, wish = req.origin_input_ids, params.max_new_tokens
        stated = wish if custom.get(STATED) and wish is not None else 0
        if len(tokens) < self._max_input_len and len(tokens) + stated <= self._context_len:
            return None
        if not cuts_overflow(mode_of(custom, self.mode)):
            return None
        check_length(len(tokens), self._context_len, self._longest)  # sessions grow on this side
        limit = min(self._rule.context_len - self._rule.room(wish), self._max_input_len - 1)
        messages = self._marks.find(tokens)
        cut = self._rule.cut(len(tokens), limit, self._rule.head_len(messages.first), messages)
        return self._lineage(req, cut) if cut.is_cut else None

    def _lineage(self, req: Any, cut: Cut) -> CutLineage:
        tokens = req.origin_input_ids[:]
        names = names_of(self.secret, tokens, cut, extra_key=req.extra_key, salt=req.cache_salt)
        return CutLineage(tokens, cut, req.extra_key, req.cache_salt, names, self.hash_of)


def _marks_of(tokenizer: Any) -> MessageMarks:
    if tokenizer is None:
        return MessageMarks()
    try:
        return marks_of_tokenizer(tokenizer)
    except Exception:
        logger.exception("hier-kv: the chat template does not show where messages begin")
        return MessageMarks()


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
    return Truncator(
        config,
        bytes.fromhex(scheduler.server_args._hier_kv_secret),
        context_len=int(scheduler.model_config.context_len),
        max_req_len=int(scheduler.max_req_len),
        max_input_len=int(scheduler.max_req_input_len),
        page_size=page_size,
        tokenizer=scheduler.tokenizer,
    )


def _after_create(result: Any, self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    # What the client asked for is on the message; the request is given it only later.
    setattr(result, _UNCUT, why_not_cut(recv_req))


def _around_max_new_tokens(original: Callable[..., Any], self: Any, req: Any) -> Any:
    truncator = getattr(self.tree_cache, "truncator", None)
    if truncator is not None and _may_cut(req):
        _cut(self.tree_cache, truncator, req)
    return original(self, req)


def _may_cut(req: Any) -> bool:
    """Whether a request's prompt may be cut, as far as that is not the client's doing."""
    session = req.session
    return (
        lineage_of(req) is None
        and getattr(req, _UNCUT, "unknown") == ""
        and req.to_finish is None
        and req.finished_reason is None
        and getattr(req, "multimodal_inputs", None) is None
        # A streaming session's KV stays where it is from turn to turn; nothing before may change.
        and not (session is not None and session.streaming)
    )


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
