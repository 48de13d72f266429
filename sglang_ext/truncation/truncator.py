"""Which prompts of a scheduler are cut, and where."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.provenance.request_state import wants_exact
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.truncation.cut import Cut, CutRule
from sglang_ext.truncation.lineage import ChainHash, CutLineage, lineage_of, names_of
from sglang_ext.truncation.marks import MessageMarks, marks_of_tokenizer
from sglang_ext.truncation.modes import (
    STATED,
    check_length,
    cuts_overflow,
    matches_content,
    mode_of,
)

logger = logging.getLogger(__name__)

_UNCUT = "_hier_kv_not_cut"


class Truncator:
    """Cuts prompts that are too long, in one scheduler.

    Args:
        config: the plugin's settings.
        secret: names of lineages are keyed with it.
        context_len: of the model.
        max_req_len: SGLang's bound for prompt and output together.
        max_input_len: SGLang's bound for a prompt; one that long is refused already.
        page_size: P.
        hash_of: page hashes of (tokens, extra_key, salt), u8 `[N, 32]`.
        tokenizer: tells where messages begin; None for none.
        parts_exact: says whether cut prompts of requests that want exact KV are lineages of
            their own, as the device tree cannot put exact pages in the place of others.

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
        hash_of: ChainHash,
        tokenizer: Any,
        parts_exact: Callable[[], bool] = lambda: False,
    ) -> None:
        self.mode = config.truncation
        self.secret = secret
        self._longest = config.truncation_longest
        self._context_len = context_len
        self._max_input_len = max_input_len
        self.hash_of = hash_of
        self._marks = _marks_of(tokenizer)
        self._parts_exact = parts_exact
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
        names = names_of(
            self.secret,
            tokens,
            cut,
            extra_key=req.extra_key,
            salt=req.cache_salt,
            is_exact=self._parts_exact() and wants_exact(req),
        )
        return CutLineage(tokens, cut, req.extra_key, req.cache_salt, names, self.hash_of)


def _marks_of(tokenizer: Any) -> MessageMarks:
    if tokenizer is None:
        return MessageMarks()
    try:
        return marks_of_tokenizer(tokenizer)
    except Exception:
        logger.exception("hier-kv: the chat template does not show where messages begin")
        return MessageMarks()


def note_why_not_cut(req: Any, reason: str) -> None:
    """Records why a request's prompt may not be cut; an empty reason: it may."""
    setattr(req, _UNCUT, reason)


def may_cut(req: Any) -> bool:
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
