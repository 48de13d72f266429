"""Builds the cache with its tiers, in the scheduler process, when model and KV pool exist."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sglang_ext import __version__
from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.admission.forward_timer import ForwardTimer
from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute
from sglang_ext.assembly.codec_setup import agree_on_profile, build_codecs
from sglang_ext.assembly.draft_setup import count_loads_of
from sglang_ext.assembly.one_copy import reader_store
from sglang_ext.assembly.parts.identity import build_identity, model_facts
from sglang_ext.assembly.parts.kernel_choice import choose_kernels, uses_triton
from sglang_ext.assembly.parts.rank_copies import RankCopies, agree_on_copies
from sglang_ext.assembly.parts.served_kv import ServedKV, ropes_of, served_kv
from sglang_ext.assembly.parts.store import build_store, describe_records, share_folder
from sglang_ext.assembly.size_advice import advise_on_sizes
from sglang_ext.assembly.state_setup import awaited_layers, check_room, follow_loads
from sglang_ext.assembly.window_setup import place_questions_of, window_layers, with_windows
from sglang_ext.codec.page_codec import PageCodec
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.local_pages import LocalPages
from sglang_ext.device.pinning import pin_memory, place_near
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.ports import open_port
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.identity.namespace import namespace_digest
from sglang_ext.ranks.lockstep import exchange, group_of
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.ranks.same_settings import agree_on_settings, await_all, settings_of
from sglang_ext.seam.cache import CacheParts, create_cache
from sglang_ext.seam.hash_fallback import ensure_page_hash
from sglang_ext.seam.hooks.loaded_models import algorithm_of, check_layers, draft_runners
from sglang_ext.seam.linker import HierKVLinker
from sglang_ext.seam.media.page_digests import install_page_digests
from sglang_ext.seam.metrics.reporter import MetricsReporter
from sglang_ext.seam.start.ranks import (
    arguments_of_nodes,
    group_of_nodes,
    node_rank,
    rank_place,
)
from sglang_ext.settings.config import GIB, HierKVConfig
from sglang_ext.settings.disaggregation import is_disaggregated
from sglang_ext.settings.quotas import parse_quotas
from sglang_ext.settings.refusals import check_keys, check_model, check_tree
from sglang_ext.tiers.coded_host import RecordTier
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.store import PageStore
from sglang_ext.tiers.store.types import StoreCounters

logger = logging.getLogger(__name__)


def build_cache(ctx: Any) -> Any:
    """SGLang's radix cache factory for the backend `hier_kv`.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.

    Raises:
        HierKVConfigError: the model or the machine cannot be served; one sentence.
    """
    place = rank_place(ctx)
    config = HierKVConfig.from_dict(ctx.server_args._hier_kv)
    if place.num_nodes > 1:
        _agree_with_nodes(ctx, config, place)
    if config.disk_dir and place.num_ranks > 1:
        share_folder(Path(config.disk_dir), ctx.server_args._hier_kv_server)
    config = place.config_of(config)
    check_model(ctx)
    ensure_page_hash()
    install_page_digests()
    ctx.params.tree_core_backend = config.tree_core
    cache = create_cache(ctx, partial(_make_cache_parts, ctx, config, place))
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    kv_pool.register_layer_transfer_counter(cache.hier_linker.layer_done_counter)
    if ctx.is_hybrid_ssm:
        follow_loads(ctx, cache.hier_linker.layer_done_counter)
    ctx.tp_worker.register_hicache_layer_transfer_counter(cache.hier_linker.layer_done_counter)
    count_loads_of(draft_runners(ctx.tp_worker.model_runner), cache.hier_linker.layer_done_counter)
    return cache


def _make_cache_parts(ctx: Any, config: HierKVConfig, place: RankPlace, cache: Any) -> CacheParts:
    """Makes everything that the cache is built with, from SGLang's half of it."""
    _check_built(ctx, cache)
    kv, group = served_kv(ctx, config), group_of(cache)
    if kv.is_hybrid:
        config = with_windows(config)
    if group is not None:
        agree_on_profile(config, str(ctx.server_args.model_path), partial(exchange, group))
    copies = agree_on_copies(kv, config, place, group, ctx.server_args.disaggregation_mode)
    config = config if copies.one_copy is None else copies.one_copy.config
    ropes = ropes_of(kv, config, place, has_group=group is not None)
    cost = CostModel(config.prefetch_timeout_ms / 1e3)
    feeds = CostFeeds(cost, kv.layout.kv_bytes, StoreCounters())
    store, disk, page_codec = _store(ctx, config, place, kv, copies, ropes[0], feeds)
    if kv.snapshots is not None:
        check_room(kv.snapshots, store.arena.num_slots)
    linker = _linker(ctx, config, kv, ropes, cache, store, feeds, accepts_all=group is not None)
    timer = ForwardTimer(
        cost,
        linker.loads.seconds,
        feeds.on_prefill,
        runs_in_launch=kv.pools.full.device.type == "cpu",
    )
    _tell(ctx, config, kv, ropes[0], store)
    # How long a stage computes says little of how long a prompt does.
    may_decide = config.prefetch_policy == "cost" and place.pp_size == 1
    has_lower_tier = disk is not None or bool(config.remote_url)
    return CacheParts(
        linker=linker,
        identity=build_identity(ctx, config, kv, place, group, copies),
        config=config,
        metrics=_metrics(
            ctx, config, place, store, disk, page_codec, cost, linker, is_one=copies.is_one
        ),
        forward_timer=timer,
        decider=_decider(store, kv.layout, cost, timer) if may_decide and has_lower_tier else None,
        dram=_dram_choice(feeds, kv.layout) if may_decide else None,
        place_questions=place_questions_of(linker.windows, kv.snapshots, store, config),
        shares_pages=copies.is_one,
    )


def _store(
    ctx: Any,
    config: HierKVConfig,
    place: RankPlace,
    kv: ServedKV,
    copies: RankCopies,
    ropes: list[LayerRope],
    feeds: CostFeeds,
) -> tuple[PageStore, RecordTier | None, PageCodec | None]:
    """The page store, what keeps its records, and their codec; `ropes` of the full layers."""
    of_pages = (config, kv.pools.full, kv.layout, kv.kv_pool.dtype, kv.runner, place)
    has_states = kv.snapshots is not None
    page_codec, remote_codec = build_codecs(*of_pages, kv.num_draft_layers, has_states=has_states)
    if copies.one_copy is not None and not copies.one_copy.keeps:
        return reader_store(copies.one_copy, kv.layout, feeds.counters), None, page_codec
    # A stored page of a hybrid, of a model with an index, or behind a draft without a lossy codec
    # is exact, unless it is loaded at another position.
    # With prefill and decode servers no lossy codec was tried.
    may_move = kv.is_hybrid and all(rope.movable for rope in ropes)
    is_disaggregating = is_disaggregated(ctx.server_args.disaggregation_mode)
    exact_only = (kv.is_bound and not may_move) or is_disaggregating
    rules = LocalPages(kv.layout, ropes, config.rope, exact_only=exact_only)
    store, disk = build_store(
        config, kv.layout, page_codec, feeds, remote_codec, rules, copies.put_share,
        copies.one_copy, is_hybrid=kv.is_hybrid, num_ranks=place.num_ranks,
    )  # fmt: skip
    return store, disk, page_codec


def _check_built(ctx: Any, cache: Any) -> None:
    """Refuses a model or a tree, as SGLang built them, whose KV cannot be kept.

    Raises:
        HierKVConfigError: one sentence.
    """
    check_tree(
        [component.name for component in cache.components],
        has_windows=ctx.is_hybrid_swa,
        has_states=ctx.is_hybrid_ssm,
    )
    runner = ctx.tp_worker.model_runner
    check_layers(runner, runner.model)
    check_keys(
        algorithm_of(runner), are_pairs=cache.tree_core.is_eagle, has_states=ctx.is_hybrid_ssm
    )


def _linker(
    ctx: Any,
    config: HierKVConfig,
    kv: ServedKV,
    ropes: Sequence[list[LayerRope]],
    cache: Any,
    store: PageStore,
    feeds: CostFeeds,
    *,
    accepts_all: bool,
) -> HierKVLinker:
    """What copies pages between the pools and DRAM, with its threads; `ropes` of each part."""
    pool = kv.pools.full
    states: Sequence[tuple[int, ...]] = ()
    if kv.snapshots is not None:
        states = awaited_layers(kv.snapshots, kv.kv_pool, kv.num_draft_layers)
    is_pinned = _pin(store, pool)
    copier = PageCopier(
        pool,
        kv.layout,
        ropes[0],
        store.arena.slots,
        mode=config.rope,
        kernels=choose_kernels(config, kv.pools, ropes, kv.layout.page_size),
        parallel_loads=not uses_triton(config, pool),
    )
    return HierKVLinker(
        store,
        copier,
        num_layers=_num_layers(kv, states),
        page_size=ctx.params.page_size,
        kv_pool=kv.kv_pool,
        port=open_port(pool.device, pinned=is_pinned),
        forward_stream=kv.runner.forward_stream,
        windows=window_layers(cache, kv.pools, copier, ropes[1:]),
        accepts_all=accepts_all,
        on_load=feeds.on_load,
        snapshots=kv.snapshots,
        state_layers=states,
    )


def _pin(store: PageStore, pool: DevicePool) -> bool:
    """Page-locks DRAM for a CUDA device; returns whether all of it is."""
    if pool.device.type != "cuda":
        return False
    place_near(store.arena, torch.cuda.get_device_properties(pool.device))
    pinned_bytes = pin_memory(store.arena, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    return pinned_bytes == store.arena.nbytes


def _num_layers(kv: ServedKV, states: Sequence[tuple[int, ...]]) -> int:
    """Layers that a load tells the forward of."""
    if states:
        return 1 + max(map(max, states))
    groups = kv.pools.groups
    if groups is not None:
        return 1 + max(*groups.full, *groups.window)
    return kv.pools.full.num_layers if kv.num_draft_layers else int(kv.kv_pool.layer_num)


def _decider(
    store: PageStore, layout: PageLayout, cost: CostModel, timer: ForwardTimer
) -> LoadOrCompute:
    """Decides between loading and computing, while a request waits."""
    return LoadOrCompute(
        store,
        cost,
        page_tokens=layout.page_size,
        kv_bytes_per_page=layout.kv_bytes,
        is_decoding=lambda: timer.is_decoding,
    )


def _dram_choice(feeds: CostFeeds, layout: PageLayout) -> DramChoice:
    """The same of pages in DRAM; without a disk or a remote store, too."""
    return DramChoice(
        feeds.cost,
        feeds.counters,
        page_tokens=layout.page_size,
        kv_bytes_per_page=layout.kv_bytes,
    )


def _tell(
    ctx: Any, config: HierKVConfig, kv: ServedKV, ropes: list[LayerRope], store: PageStore
) -> None:
    """Logs what is kept, and what of long prompts is not."""
    is_position_free = config.rope == "pre" and any(rope.movable for rope in ropes)
    logger.info(
        "hier-kv: %d pages of %d tokens in %.2f GiB of DRAM, %s, K stored %s",
        store.arena.num_slots,
        ctx.params.page_size,
        store.arena.nbytes / GIB,
        describe_records(config) if store.keeps_pages else "all kept by tensor parallel rank 0",
        "before rotary embedding" if is_position_free else "as the engine has it",
    )
    if not kv.is_hybrid:  # of a hybrid's pages, which are of several kinds, not all are loaded
        advise_on_sizes(config, store, ctx.params.page_size, int(ctx.model_config.context_len))


def _metrics(
    ctx: Any,
    config: HierKVConfig,
    place: RankPlace,
    store: PageStore,
    disk: RecordTier | None,
    page_codec: PageCodec | None,
    cost: CostModel,
    linker: HierKVLinker,
    *,
    is_one: bool,
) -> MetricsReporter:
    metrics = MetricsReporter(
        store,
        disk,
        page_codec,
        cost,
        saves=linker.numbers_of_saves,
        enabled=bool(ctx.params.enable_metrics),
        num_tenants=len(parse_quotas(config.quotas).shares),
        labels={
            "model_name": ctx.server_args.served_model_name or ctx.server_args.model_path,
            "tp_rank": str(place.tp_rank),
            "dp_rank": str(place.dp_rank),
            **({"pp_rank": str(place.pp_rank)} if place.pp_size > 1 else {}),
        },
    )
    metrics.set_info(
        page_size=ctx.params.page_size,
        slot_bytes=linker.copier.layout.slot_bytes,
        kv_bytes_per_page=linker.copier.layout.kv_bytes,
        rope=config.rope,
        codec=config.record_codec,
        level=config.record_level,
        kernels="triton" if uses_triton(config, linker.copier.pool) else "numba",
        tp_rank=place.tp_rank,
        dp_rank=place.dp_rank,
        **({"pp_rank": place.pp_rank} if place.pp_size > 1 else {}),
        **({"pages_kept_by_tp_rank": 0} if is_one else {}),
    )
    return metrics


def _agree_with_nodes(ctx: Any, config: HierKVConfig, place: RankPlace) -> None:
    """Refuses nodes that were not started alike; all take the first one's secret."""
    server_args, group = ctx.server_args, group_of_nodes(ctx, place)
    alike = {
        "release of sglang-hier-kv": __version__,
        "release of SGLang": version("sglang"),
        "model configuration": namespace_digest(model_facts(ctx)).hex()[:16],
        **arguments_of_nodes(server_args),
    }
    own = settings_of(config, node_rank(), server_args._hier_kv_secret, alike)
    await_all(group)
    server_args._hier_kv_secret = agree_on_settings(own, partial(exchange, group))
