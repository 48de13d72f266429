"""Whose KV the server's pages are: what enters the namespace beside the weights."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from sglang_ext.assembly.draft_setup import draft_facts, live_models
from sglang_ext.assembly.index_setup import index_facts
from sglang_ext.assembly.parts.rank_copies import RankCopies
from sglang_ext.assembly.parts.served_kv import ServedKV
from sglang_ext.device.layout import LAYOUT_VERSION
from sglang_ext.device.pools import DevicePool, HybridPools
from sglang_ext.device.rope_discovery import tables_digest
from sglang_ext.device.states.snapshots import Snapshots
from sglang_ext.device.windows.block_groups import BlockGroups
from sglang_ext.identity.model_identity import ModelIdentity
from sglang_ext.ranks.lockstep import exchange
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.seam.expected_pages import attention_backends
from sglang_ext.seam.hooks.loaded_models import algorithm_of, draft_runners
from sglang_ext.settings.arguments import number_formats
from sglang_ext.settings.config import HierKVConfig

# Attention that divides K and V of every head by a layer's scales as it writes them in fp8.
_DIVIDING = ("triton", "flashinfer", "fa3", "fa4", "trtllm_mha")


def build_identity(
    ctx: Any,
    config: HierKVConfig,
    kv: ServedKV,
    place: RankPlace,
    group: Any | None,
    copies: RankCopies,
) -> ModelIdentity:
    """What names the pages of the loaded model.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.
        config: the settings.
        kv: what is served.
        place: this rank's.
        group: of the ranks that take steps together, None for one alone.
        copies: whether these hold the same KV.
    """
    runner, alike = kv.runner, copies.are_alike
    label = {
        "model": str(ctx.server_args.model_path),
        "kv_dtype": str(kv.pools.full.dtype),
        "page_size": ctx.params.page_size,
        "rope": config.rope,
    }
    if place.shares_steps:
        group = ctx.tp_group.cpu_group

    def adapters() -> dict[str, Any]:
        manager = runner.lora_manager
        return dict(manager.loras) if manager is not None else {}

    return ModelIdentity(
        live_models(runner.model, kv.drafts),
        fixed_facts(ctx, kv.pools, place, kv.snapshots, alike=alike),
        label,
        adapters,
        partial(exchange, group),
        serves_alike=not place.shares_steps,
        ranks_share=alike,
        needs_one_name=copies.is_one,
        is_final=place.pp_size > 1,
        scaled_by=scaled_by(attention_backends(ctx.server_args), kv.pools.full),
    )


def scaled_by(backends: Collection[str], pool: DevicePool) -> list[str]:
    """Attention backends that may not keep K and V as others do, where a layer has scales of them.

    Some divide by these what they write into an fp8 pool, some do not; a reader is told by none of
    its bytes which one wrote it.

    Args:
        backends: of the server, by name.
        pool: what they write into.
    """
    if pool.values is None:
        return []
    dividing = _DIVIDING if pool.kind == "mha" else ()
    return sorted(set(backends) - set(dividing))


def model_facts(ctx: Any) -> dict[str, Any]:
    """The model's configuration, but for where its files lie and who wrote them."""
    facts: dict[str, Any] = ctx.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None)
    return facts


def fixed_facts(
    ctx: Any,
    pools: HybridPools,
    place: RankPlace,
    snapshots: Snapshots | None,
    *,
    alike: bool,
) -> dict[str, Any]:
    """What enters the namespace besides the weights, and never changes while the server runs."""
    pool = pools.full
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    runner = ctx.tp_worker.model_runner
    drafts = draft_runners(runner)
    fixed = {
        "layout_version": LAYOUT_VERSION,
        "model": model_facts(ctx),
        "kv_dtype": str(pool.dtype),
        "kv_cache_dtype": str(ctx.server_args.kv_cache_dtype),
        "pool": pool.kind,
        "layers": [list(k.shape[1:]) for k in pool.k] + [list(v.shape[1:]) for v in pool.v],
        "page_size": ctx.params.page_size,
        # Ranks that hold the same KV look for it under one name. Sums over other numbers of ranks
        # round otherwise.
        "tp": ["all" if alike else place.tp_rank, place.tp_size],
    }
    if pool.values is not None:
        # By one argument GPUs of two makers keep kinds of fp8, in which the same bits differ by 2.
        fixed["values"] = pool.format
    formats = number_formats(lambda name: getattr(ctx.server_args, name, None))
    if formats:
        fixed["number_formats"] = formats
    if place.shares_steps:
        # Experts and MLPs lie in shares on all of these, whose weights all enter the namespace.
        fixed["ranks_of_mlp"] = place.num_ranks
    if place.cp_size > 1:
        # Of a shard of a prefill products are of other shapes, and round otherwise.
        fixed["context"] = [place.cp_size, place.cp_strategy]
    if place.pp_size > 1:
        # A page holds the layers of a stage; what these compute with comes from all of them.
        fixed["stage"] = [place.pp_rank, place.pp_size, int(kv_pool.start_layer)]
    if pools.groups is not None:
        fixed["parts"] = pools.groups.describe()
    if isinstance(pools.groups, BlockGroups):
        parts = pools.window_parts()
        fixed["blocks"] = [[list(block.shape[1:]) for block in part.k] for part in parts]
    if drafts:
        are_pairs = ctx.params.is_eagle and snapshots is None
        fixed["drafts"] = draft_facts(algorithm_of(runner), drafts, keys_are_pairs=are_pairs)
    models = live_models(runner.model, drafts)
    index = index_facts(models, kv_pool, pool)
    if index is not None:
        fixed["index"] = index
    if snapshots is not None:
        # An earlier build stored states that were kept inside of a page, too.
        fixed["states"] = [*snapshots.pool.describe(), snapshots.part_bytes, "behind whole pages"]
    if drafts or index is not None or snapshots is not None or pools.window is not None:
        # Of other models each layer's rotation is looked at, and enters with how K is stored.
        fixed["tables"] = tables_digest(models)
    return fixed
