"""Checks SGLang's arguments once it has decided all of them, before a process loads weights."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.model_kind import hybrid_stages, model_kind, rows_of
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.model_kinds import STATE_KINDS
from sglang_ext.settings.refusals import Resolved, check_branches, check_kind, check_resolved
from sglang_ext.settings.speculation import NGRAM

logger = logging.getLogger(__name__)


def around_resolution(resolve: Callable[[Any], None], self: Any) -> None:
    """AROUND hook of ``ServerArgs.resolve_once``: refuses what cannot work, once a record.

    Raises:
        HierKVConfigError: the set-up is refused, and was not given on the command line.
        SystemExit: it is refused, and was.
    """
    # The record is pickled to the scheduler processes, with this mark on it.
    if getattr(self, "_hier_kv_checked", False):
        resolve(self)
        return
    try:
        _resolve_and_check(resolve, self)
    except HierKVConfigError as error:
        if not getattr(self, "_hier_kv_from_command_line", False):
            raise
        sys.exit(f"sglang-hier-kv: {error}")
    self._hier_kv_checked = True


def _resolve_and_check(resolve: Callable[[Any], None], server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolution_result

    try:
        resolve(server_args)
    except Exception as error:
        # What a hybrid model cannot have (pages of 64 tokens) may come from the plugin.
        known, kind = getattr(server_args, "_model_config", None), "mha"
        if known is not None:
            kind = model_kind(known)
            check_kind(kind)
            if kind in STATE_KINDS and isinstance(error, AssertionError):
                raise _in_words(error, server_args) from error
        # Nor does it let guesses branch with these pages but under some backends.
        check_branches(partial(resolution_result, server_args), kind)
        raise
    config = HierKVConfig.from_dict(server_args._hier_kv)
    for warning in check_resolved(resolved(server_args), config):
        logger.warning("hier-kv: %s", warning)


def _in_words(error: AssertionError, server_args: Any) -> HierKVConfigError:
    """What SGLang only asserts of pages and states, which it may not have of pages of one token."""
    asserted = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
    return HierKVConfigError(
        "--enable-hier-kv needs arguments with which SGLang keeps states behind pages of "
        f"{server_args.page_size} tokens, got others, of which it says: {asserted}; leave "
        "--mamba-track-interval and --linear-attn-backend out, or give a --page-size of which the "
        "former is a multiple."
    )


def resolved(server_args: Any) -> Resolved:
    """What SGLang decided, from a resolved record."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolution_result

    fields = record_fields(type(server_args))
    given = getattr(server_args, "_raw_input", {})
    has_model = str(server_args.model_path).lower() not in ("none", "dummy")
    model_config = model_config_of(server_args) if has_model else None
    values = {field.name: resolution_result(server_args, field.name) for field in fields}
    draft = _draft_config(server_args, values) if has_model else None
    return Resolved(
        values=values,
        given={field.name: given.get(field.name) for field in fields},
        defaults={field.name: _default(field) for field in fields},
        model_kind=model_kind(model_config) if has_model else "mha",
        release=version("sglang"),
        architecture=_architecture(model_config) if has_model else "",
        stages=_stages(model_config, values.get("pp_size") or 1) if has_model else (),
        rows=("", "") if draft is None else _rows(model_config, draft, values),
        draft="" if draft is None else _architecture(draft),
    )


def _draft_config(server_args: Any, values: Mapping[str, Any]) -> Any:
    """SGLang's ``ModelConfig`` of a draft model with KV of its own.

    None where there is none, or it is not known: what cannot be read is for SGLang to tell. Where
    no path is given SGLang loads the model itself once more.
    """
    from sglang.srt.configs.model_config import ModelConfig

    if values.get("speculative_algorithm") in (None, NGRAM):
        return None
    try:
        return ModelConfig.from_server_args(
            server_args,
            model_path=values.get("speculative_draft_model_path"),
            model_revision=values.get("speculative_draft_model_revision"),
            is_draft_model=True,
        )
    except (OSError, ValueError) as error:
        logger.warning("hier-kv: the draft model's configuration is not known yet: %s", error)
        return None


def _rows(model_config: Any, draft: Any, values: Mapping[str, Any]) -> tuple[str, str]:
    """What is kept of a token by the model, and by a draft model, in words."""
    dtype = str(values.get("kv_cache_dtype"))
    return rows_of(model_config, dtype), rows_of(draft, dtype, drafts=True)


def _stages(model_config: Any, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Layers of the pipeline stages of a hybrid; none where there is one stage."""
    if num_stages == 1:
        return ()
    try:
        return tuple(hybrid_stages(model_config, num_stages))
    except ValueError as error:
        raise HierKVConfigError(
            f"SGLANG_PP_LAYER_PARTITION must give each of {num_stages} stages its number of the "
            f"model's layers, of which SGLang says: {error}; change it or --pp-size, or unset it."
        ) from error


def _architecture(model_config: Any) -> str:
    return next(iter(model_config.hf_config.architectures or ()), "")


def _default(field: Any) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default
