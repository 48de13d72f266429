"""What a scheduler builds for resolved arguments before its first request, without weights."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

_REQUESTS = 4
_PAGES = 64


def build(server_args: Any) -> str:
    """Builds pools, allocator and tree with SGLang's code, and lets the plugin look at them.

    Returns:
        The class of the KV pool.

    Raises:
        Exception: whatever SGLang or the plugin says to it.
    """
    from sglang_ext.device.pools import describe_pools
    from sglang_ext.seam.start.ranks import rank_place
    from sglang_ext.settings.compat import check_model, check_tree

    ctx = build_pools(server_args)
    rank_place(ctx)
    check_model(ctx)
    components = [component.name for component in _tree(ctx).components]
    check_tree(components, has_windows=ctx.is_hybrid_swa, has_states=ctx.is_hybrid_ssm)
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    describe_pools(kv_pool).full.layout(ctx.params.page_size)
    return type(kv_pool).__name__


def build_pools(server_args: Any) -> Any:
    """Builds pools and allocator of a few pages.

    Returns:
        SGLang's `TreeCacheBuildContext`.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.mem_cache.kv_cache_configurator import _PoolSizes
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    model_config = model_config_of(server_args)
    maker = _configurator(server_args, model_config)
    tokens = _PAGES * maker.page_size
    sizes = _PoolSizes(
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
    pools = maker._init_pools(sizes=sizes, req_to_token_pool=None, token_to_kv_pool_allocator=None)
    return _context(server_args, model_config, pools, maker)


def import_all() -> None:
    """Imports what `build` needs and SGLang imports late; tens of seconds on a busy machine."""
    for name in (
        "sglang.srt.mem_cache.kv_cache_configurator",
        "sglang.srt.mem_cache.kv_cache_builder",
        "sglang.srt.mem_cache.registry",
        "sglang.srt.mem_cache.unified_radix_cache",
        "sglang.srt.model_executor.model_runner_components.layer_setup",
        "sglang.srt.speculative.spec_info",
        "sglang_ext.assembly.factory",
    ):
        import_module(name)


def _configurator(server_args: Any, model_config: Any) -> Any:
    """SGLang's chooser of pools, as a model runner would fill it in."""
    import torch
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
    from sglang.srt.runtime_context import get_model, get_parallel, get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    dtype_name, kv_dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    num_layers = model_config.num_attention_layers
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=get_parallel().attn_dp_size,
        pp_size=1,
        pp_group=SimpleNamespace(world_size=1, rank_in_group=0),
        model=torch.nn.Module(),
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_str=dtype_name or get_model().kv_cache_dtype,
        model_dtype=model_config.dtype,
        page_size=get_schedule().page_size,
        sliding_window_size=getattr(model_config, "sliding_window_size", None),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SimpleNamespace(draft_model_config=None, dflash_draft_num_layers=None),
        is_hybrid_swa=model_config.is_hybrid_swa,
        is_hybrid_swa_compress=model_config.is_hybrid_swa_compress,
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        layer_info=ModelLayerInfo(
            start_layer=0,
            end_layer=num_layers,
            num_effective_layers=num_layers,
            swa_attention_layer_ids=model_config.swa_attention_layer_ids,
            full_attention_layer_ids=model_config.full_attention_layer_ids,
        ),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )


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
        tp_rank=0,
        tp_group=None,
        is_dsa=is_deepseek_dsa(model_config.hf_config),
    )


def _tree(ctx: Any) -> Any:
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(ctx)
