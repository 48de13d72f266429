"""What a scheduler builds for resolved arguments before its first request, without weights."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

_REQUESTS = 4
_PAGES = 64


def build(server_args: Any) -> str:
    """Builds pools, allocator and tree with SGLang's code, and lets the plugin look at them.

    Of several ranks as the first one of each stage does, and the last one.

    Returns:
        The classes of the KV pools, of the model and of what drafts for it.

    Raises:
        Exception: whatever SGLang or the plugin says to it.
    """
    pools: set[str] = set()
    for rank in _ranks(server_args):
        pools.update(_build_rank(server_args, rank))
    return " ".join(sorted(pools))


def _build_rank(server_args: Any, rank: int) -> list[str]:
    from sglang_ext.device.pools import describe_pools
    from sglang_ext.seam.hooks.loaded_models import algorithm_of
    from sglang_ext.seam.start.ranks import rank_place
    from sglang_ext.settings.refusals import check_keys, check_model, check_tree

    maker, ctx = _pools_of(server_args, rank)
    rank_place(ctx)
    check_model(ctx)
    tree = _tree(ctx)
    components = [component.name for component in tree.components]
    check_tree(components, has_windows=ctx.is_hybrid_swa, has_states=ctx.is_hybrid_ssm)
    check_keys(algorithm_of(maker), are_pairs=tree.tree_core.is_eagle, has_states=ctx.is_hybrid_ssm)
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    drafts = _draft_pools(server_args, maker, ctx)
    describe_pools(kv_pool, drafts=drafts).layout(ctx.params.page_size)
    return [type(each).__name__ for each in (kv_pool, *drafts)]


def build_without(server_args: Any) -> None:
    """Builds pools, allocators and those of drafts alone.

    Raises:
        Exception: whatever SGLang says to it.
    """
    for rank in _ranks(server_args):
        _draft_pools(server_args, *_pools_of(server_args, rank))


def _ranks(server_args: Any) -> list[int]:
    """The first rank of each stage, and the last one."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    tp_size, pp_size = get_parallel().tp_size, get_parallel().pp_size
    return sorted({*range(0, tp_size * pp_size, tp_size), tp_size * pp_size - 1})


def _pools_of(server_args: Any, rank: int) -> tuple[Any, Any]:
    """Builds a rank's pools and allocator of a few pages.

    Returns:
        SGLang's chooser of pools, and its `TreeCacheBuildContext`.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    model_config = model_config_of(server_args)
    maker = _configurator(server_args, model_config)
    pools = maker._init_pools(
        sizes=_sizes(maker), req_to_token_pool=None, token_to_kv_pool_allocator=None
    )
    return maker, _context(server_args, model_config, pools, maker)


def _draft_pools(server_args: Any, maker: Any, ctx: Any) -> list[Any]:
    """The KV pools of the models that draft, in the same rows; of none without."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_spec

    if maker.spec_algorithm.is_none() or maker.spec_algorithm.is_ngram():
        return []
    model_config = ModelConfig.from_server_args(
        server_args,
        model_path=get_spec().speculative_draft_model_path,
        model_revision=get_spec().speculative_draft_model_revision,
        is_draft_model=True,
        context_length=ctx.model_config.context_len,
    )
    shared = {
        "req_to_token_pool": ctx.params.req_to_token_pool,
        "token_to_kv_pool_allocator": ctx.params.token_to_kv_pool_allocator,
    }
    draft = _configurator(server_args, model_config, is_draft_worker=True, **shared)
    return [draft._init_pools(sizes=_sizes(draft), **shared).token_to_kv_pool]


def _sizes(maker: Any) -> Any:
    from sglang.srt.mem_cache.kv_cache_configurator import _PoolSizes

    tokens = _PAGES * maker.page_size
    return _PoolSizes(
        max_total_num_tokens=tokens,
        max_running_requests=_REQUESTS,
        full_max_total_num_tokens=tokens,
        swa_max_total_num_tokens=tokens,
        c4_max_total_num_tokens=0,
        c128_max_total_num_tokens=0,
        c4_state_pool_size=0,
        c128_state_pool_size=0,
        c4_state_dtype=None,
        c128_state_dtype=None,
    )


def import_all() -> None:
    """Imports what `build` needs and SGLang imports late; tens of seconds on a busy machine."""
    for name in (
        "sglang.srt.mem_cache.kv_cache_configurator",
        "sglang.srt.mem_cache.kv_cache_builder",
        "sglang.srt.mem_cache.registry",
        "sglang.srt.mem_cache.unified_radix_cache",
        "sglang.srt.model_executor.model_runner_components.layer_setup",
        "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state",
        "sglang.srt.speculative.spec_info",
        "sglang_ext.assembly.factory",
    ):
        import_module(name)


def _configurator(
    server_args: Any, model_config: Any, *, is_draft_worker: bool = False, **shared: Any
) -> Any:
    """SGLang's chooser of pools, as a model runner would fill it in.

    Args:
        server_args: SGLang's, resolved and published.
        model_config: of the model, or of what drafts for it.
        is_draft_worker: whether it is the latter.
        shared: of the former's pools, what the latter takes for its own.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components.layer_setup import (
        resolve_layer_indices,
    )
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.runtime_context import get_model, get_parallel, get_schedule, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    parallel = get_parallel()
    dtype_name, kv_dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=is_draft_worker,
        is_dflash=algorithm.is_dflash_family(),
        speculative_draft_attention_backend="",
    )
    model = _stage(model_config, is_draft_worker=is_draft_worker)
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=parallel.attn_dp_size,
        pp_size=parallel.pp_size,
        pp_group=SimpleNamespace(world_size=parallel.pp_size, rank_in_group=parallel.pp_rank),
        model=model,
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_str=dtype_name or get_model().kv_cache_dtype,
        model_dtype=model_config.dtype,
        page_size=get_schedule().page_size,
        sliding_window_size=getattr(model_config, "sliding_window_size", None),
        spec_algorithm=algorithm,
        is_draft_worker=is_draft_worker,
        post_capture_kv_active=False,
        spec_aux_config=resolve_spec_aux_hidden_state_config(
            server_args=server_args,
            model_config=model_config,
            spec_algorithm=algorithm,
            is_draft_worker=is_draft_worker,
        ),
        is_hybrid_swa=model_config.is_hybrid_swa,
        is_hybrid_swa_compress=model_config.is_hybrid_swa_compress,
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(
            model=model, model_config=model_config, is_draft_worker=is_draft_worker
        ),
        forward_stream=None,
        memory_pool_config=None,
        **{"req_to_token_pool": None, "token_to_kv_pool_allocator": None, **shared},
    )


def _stage(model_config: Any, *, is_draft_worker: bool) -> Any:
    """In a model's place: a module that knows its stage's layers. A draft has no stages."""
    import torch
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.runtime_context import get_parallel

    model, parallel = torch.nn.Module(), get_parallel()
    if parallel.pp_size > 1 and not is_draft_worker:
        model.start_layer, model.end_layer = get_pp_indices(
            model_config.num_hidden_layers, parallel.pp_rank, parallel.pp_size
        )
    return model


def _context(server_args: Any, model_config: Any, pools: Any, maker: Any) -> Any:
    """What SGLang tells the factory of a cache, as its `build_kv_cache` fills it in."""
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.runtime_context import get_exec, get_memory, get_parallel

    memory = get_memory()
    params = CacheInitParams(
        disable=memory.disable_radix_cache,
        req_to_token_pool=pools.req_to_token_pool,
        token_to_kv_pool_allocator=pools.token_to_kv_pool_allocator,
        page_size=maker.page_size,
        is_eagle=maker.spec_algorithm.is_eagle(),
        eviction_policy=memory.radix_eviction_policy,
        eviction_policy_config=memory.radix_eviction_policy_config,
        enable_session_radix_cache=memory.enable_session_radix_cache,
        tree_core_backend="python",
        enable_mamba_extra_buffer=get_exec().mamba.enable_mamba_extra_buffer,
        sliding_window_size=maker.sliding_window_size if model_config.is_hybrid_swa else None,
    )
    return TreeCacheBuildContext(
        server_args=server_args,
        params=params,
        is_hybrid_swa=model_config.is_hybrid_swa,
        is_hybrid_ssm=uses_ssm_state(model_config),
        enable_hierarchical_cache=memory.enable_hierarchical_cache,
        disable_radix_cache=memory.disable_radix_cache,
        tp_worker=None,
        model_config=model_config,
        tp_size=get_parallel().tp_size,
        tp_rank=get_parallel().tp_rank,
        tp_group=None,
        is_dsa=is_deepseek_dsa(model_config.hf_config),
    )


def _tree(ctx: Any) -> Any:
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(ctx)
