"""Meets the models that SGLang loads: the target before its weights are read, and those that draft.

SGLang builds its radix cache from the target model's worker alone. Its draft worker is asked for a
plan of HiCache's just before, when its pools are there, so that is where it is met.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from sglang_ext.device.rope_discovery import type_of_attention, window_of
from sglang_ext.seam.expected_pages import page_tokens
from sglang_ext.seam.hooks.hooking import hook
from sglang_ext.settings.disaggregation import check_handed_windows, is_disaggregated
from sglang_ext.settings.refusals import check_attention, check_branched_windows, check_heads

_ATTRIBUTE = "_hier_kv_draft_runners"
# SGLang's runner of the model that is loaded now.
_loading: ContextVar[Any] = ContextVar("loading", default=None)


def register_model_hooks(check_before_weights: Callable[[Any, Any], None]) -> None:
    """Registers them; in a scheduler process, before the scheduler is built.

    Args:
        check_before_weights: called with the target's runner and its model, as `check_layers` is.
    """
    hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _around_loading, "around")

    def after_building(model: Any, *args: Any, **kwargs: Any) -> None:
        runner = _loading.get()
        if runner is None or runner.is_draft_worker:
            return
        if hasattr(runner.server_args, "_hier_kv"):
            check_layers(runner, model)
            check_before_weights(runner, model)

    hook("sglang.srt.model_loader.loader._initialize_model", after_building)
    hook(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.init_hicache_draft_plan",
        _after_plan,
    )


def check_layers(runner: Any, model: Any) -> None:
    """Refuses a model whose layers do what was not foreseen.

    Args:
        runner: SGLang's model runner of the target.
        model: its model, with weights or without.

    Raises:
        HierKVConfigError: one sentence.
    """
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.model_executor.model_runner_components.load_model_utils import (
        resolve_sliding_window_size,
    )
    from sglang.srt.runtime_context import get_parallel

    modules, config, parallel = list(model.modules()), runner.model_config, get_parallel()
    check_attention({type_of_attention(module) for module in modules})
    if parallel.attn_dp_size > 1:
        heads = config.num_attention_heads // parallel.attn_tp_size
        check_heads({getattr(module, "tp_q_head_num", heads) for module in modules}, heads)
    server_args = runner.server_args
    # With --disable-hybrid-swa-memory, and of some models always, they are in the one pool.
    window = max(map(window_of, modules), default=0) or config.attention_chunk_size or 0
    check_branched_windows(window, partial(resolution_result, server_args))
    if config.is_hybrid_swa and is_disaggregated(server_args.disaggregation_mode):
        handed = resolve_sliding_window_size(model, config)
        is_chunk = bool(config.attention_chunk_size)
        check_handed_windows(page_tokens(server_args), handed, is_chunk=is_chunk)


def _around_loading(load: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    token = _loading.set(self)
    try:
        return load(self, *args, **kwargs)
    finally:
        _loading.reset(token)


def _after_plan(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    setattr(self.target_worker.model_runner, _ATTRIBUTE, tuple(self._draft_model_runners()))


def draft_runners(target_runner: Any) -> tuple[Any, ...]:
    """SGLang's model runners of what drafts for a target; none without a draft model."""
    found: tuple[Any, ...] = getattr(target_runner, _ATTRIBUTE, ())
    return found


def algorithm_of(target_runner: Any) -> str | None:
    """The algorithm of speculative decoding that runs; None without.

    SGLang's arguments may have another name of it.
    """
    algorithm = target_runner.spec_algorithm
    return None if algorithm.is_none() else str(algorithm.name)
