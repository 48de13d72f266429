"""Builds the cache with its tiers, in the scheduler process, when model and KV pool exist."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from sglang_ext import __version__
from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.admission.forward_timer import ForwardTimer
from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute
from sglang_ext.assembly.codec_setup import (
    agree_on_profile,
    build_page_codec,
    build_remote_codec,
)
from sglang_ext.assembly.draft_setup import (
    count_loads_of,
    draft_facts,
    kept_ropes,
    live_models,
)
from sglang_ext.assembly.early_checks import check_slots
from sglang_ext.assembly.index_setup import index_facts
from sglang_ext.assembly.key_setup import Trust, build_trust
from sglang_ext.assembly.limits import record_bytes, tell_limits
from sglang_ext.assembly.one_copy import OneCopy, agree_on_one_copy, may_keep_one_copy, reader_store
from sglang_ext.assembly.policy_setup import placement_of
from sglang_ext.assembly.remote_setup import (
    are_alike,
    division_of,
    open_remote,
    put_share,
    text_time,
)
from sglang_ext.assembly.state_setup import (
    awaited_layers,
    check_room,
    follow_loads,
    snapshots_of,
)
from sglang_ext.assembly.window_setup import (
    bound_ropes,
    place_questions_of,
    read_layers,
    ropes_of_parts,
    window_layers,
    with_windows,
)
from sglang_ext.codec.page_codec import PageCodec
from sglang_ext.coded_remote.coded import coded_pages
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import LAYOUT_VERSION, PageLayout
from sglang_ext.device.local_pages import LocalPages
from sglang_ext.device.pinning import pin_memory, place_near
from sglang_ext.device.pools import DevicePool, HybridPools, describe_pools
from sglang_ext.device.ports import open_port
from sglang_ext.device.rope_discovery import LayerRope, discover_ropes
from sglang_ext.device.states.snapshots import Snapshots
from sglang_ext.device.windows.block_groups import BlockGroups
from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.model_identity import ModelIdentity
from sglang_ext.identity.namespace import namespace_digest
from sglang_ext.kernels import rope as rope_kernels
from sglang_ext.ranks.lockstep import exchange, group_of
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.ranks.same_settings import agree_on_settings, await_all, settings_of
from sglang_ext.seam.cache import CacheParts, create_cache
from sglang_ext.seam.hash_fallback import ensure_page_hash
from sglang_ext.seam.hooks.loaded_models import algorithm_of, check_layers, draft_runners
from sglang_ext.seam.linker import HierKVLinker
from sglang_ext.seam.media.page_digests import install_page_digests
from sglang_ext.seam.metrics.reporter import MetricsReporter
from sglang_ext.seam.start.ranks import group_of_nodes, node_rank, rank_place
from sglang_ext.settings.arguments import number_formats, on_all_nodes
from sglang_ext.settings.compat import (
    check_keys,
    check_model,
    check_tree,
)
from sglang_ext.settings.config import GIB, HierKVConfig
from sglang_ext.settings.disaggregation import is_disaggregated
from sglang_ext.settings.lossless import lossy_codec
from sglang_ext.settings.quotas import parse_quotas
from sglang_ext.tiers.coded_host import CachedDiskTier, MemoryTier, RecordTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.folder import SharedFolderLock
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.store import (
    EVERY_PAGE,
    PageStore,
    PageStoreConfig,
    PutShare,
    policy_for_sizes,
)
from sglang_ext.tiers.store.types import StoreCounters

logger = logging.getLogger(__name__)

# Pages of other adapters and of namespaces opened later need rows too.
_INDEX_SLACK = 1.25


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
        _share_folder(Path(config.disk_dir), ctx.server_args._hier_kv_server)
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
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    runner = ctx.tp_worker.model_runner
    drafts = draft_runners(runner)
    read = None
    if ctx.is_hybrid_swa:
        read = read_layers(runner.model_config.hf_text_config, runner.model)
    pools = describe_pools(kv_pool, read, [each.token_to_kv_pool for each in drafts])
    pool, num_drafts = pools.full, pools.num_draft_layers
    layout = pools.layout(ctx.params.page_size)
    snapshots = snapshots_of(ctx, layout)
    is_hybrid = pools.window is not None or snapshots is not None
    if is_hybrid:
        config = with_windows(config)
    is_lossy = bool(lossy_codec(config))
    is_bound = (bool(drafts) and not is_lossy) or is_hybrid or pool.has_index
    group = group_of(cache)
    alike = are_alike(pool, place, is_alone=not is_hybrid)
    if group is not None:
        model_path = str(ctx.server_args.model_path)
        agree_on_profile(config, model_path, partial(exchange, group))
    one_copy = None
    if alike and may_keep_one_copy(place, ctx.server_args.disaggregation_mode):
        one_copy = agree_on_one_copy(config, layout, place, partial(exchange, group))
    config = config if one_copy is None else one_copy.config
    first_layer = int(kv_pool.start_layer) if place.pp_size > 1 else 0
    if pools.window is not None:
        alone = group is None and not place.shares_steps and not drafts
        moves = config.truncation != "off" and alone
        ropes, *window_ropes = ropes_of_parts(runner.model, pools, moves=moves)
    else:
        of_stage = range(first_layer, first_layer + pool.num_layers - num_drafts)
        ropes = bound_ropes(pool) if is_bound else discover_ropes(runner.model, pool, of_stage)
        ropes += kept_ropes(pool.num_layers - len(ropes))  # none where all are bound
        window_ropes = []
    of_pages = (config, pool, layout, kv_pool.dtype, runner, place)
    has_states = snapshots is not None
    page_codec = build_page_codec(*of_pages, num_drafts, has_states=has_states)
    remote_codec = build_remote_codec(*of_pages, num_drafts, has_states=has_states)
    cost = CostModel(config.prefetch_timeout_ms / 1e3)
    feeds = CostFeeds(cost, layout.kv_bytes, StoreCounters())
    # Of hybrids, an index, and drafts without a lossy codec only what moves is anything but exact.
    # With prefill and decode servers no lossy codec was tried.
    has_moved = is_hybrid and all(rope.movable for rope in ropes)
    is_disaggregating = is_disaggregated(ctx.server_args.disaggregation_mode)
    exact_only = (is_bound and not has_moved) or is_disaggregating
    rules = LocalPages(layout, ropes, config.rope, exact_only=exact_only)
    share = put_share(place) if alike and one_copy is None else EVERY_PAGE
    disk: RecordTier | None = None
    if one_copy is not None and not one_copy.keeps:
        store: PageStore = reader_store(one_copy, layout, feeds.counters)
    else:
        store, disk = _build_store(
            config, layout, page_codec, feeds, remote_codec, rules, share, one_copy,
            is_hybrid=is_hybrid, num_ranks=place.num_ranks,
        )  # fmt: skip
    disk_or_remote = disk is not None or bool(config.remote_url)
    if snapshots is not None:
        check_room(snapshots, store.arena.num_slots)
    linker = _linker(
        ctx, config, pools, layout, [ropes, *window_ropes], cache, store, feeds, snapshots,
        num_drafts=num_drafts, accepts_all=group is not None,
    )  # fmt: skip
    timer = ForwardTimer(
        cost,
        linker.loads.seconds,
        feeds.on_prefill,
        runs_in_launch=pool.device.type == "cpu",
    )
    # How long a stage computes says little of how long a prompt does.
    may_decide = disk_or_remote and place.pp_size == 1
    is_free = config.rope == "pre" and any(rope.movable for rope in ropes)
    _tell_sizes(config, store, ctx.params.page_size, is_position_free=is_free)
    if not is_hybrid:  # of a hybrid's pages, which are of several kinds, not all are loaded
        tell_limits(config, store, ctx.params.page_size, int(ctx.model_config.context_len))
    return CacheParts(
        linker,
        _identity(
            ctx, config, pools, place, group, snapshots, alike=alike, is_one=one_copy is not None
        ),
        config,
        _metrics(
            ctx, config, place, store, disk, page_codec, cost, linker, is_one=one_copy is not None
        ),
        timer,
        _decider(config, store, layout, cost, timer) if may_decide else None,
        _dram_choice(config, feeds, layout) if place.pp_size == 1 else None,
        place_questions_of(linker.windows, snapshots, store, config),
        shares_pages=one_copy is not None,
    )


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
    pools: HybridPools,
    layout: PageLayout,
    ropes: Sequence[list[LayerRope]],
    cache: Any,
    store: PageStore,
    feeds: CostFeeds,
    snapshots: Snapshots | None,
    *,
    num_drafts: int,
    accepts_all: bool,
) -> HierKVLinker:
    """What copies pages between the pools and DRAM, with its threads; `ropes` a part each."""
    pool, runner = pools.full, ctx.tp_worker.model_runner
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    states = () if snapshots is None else awaited_layers(snapshots, kv_pool, num_drafts)
    is_pinned = _pin(store, pool)
    copier = PageCopier(
        pool,
        layout,
        ropes[0],
        store.arena.slots,
        mode=config.rope,
        kernels=_kernels(config, pools, ropes, layout.page_size),
        parallel_loads=not _uses_triton(config, pool),
    )
    return HierKVLinker(
        store,
        copier,
        num_layers=_num_layers(kv_pool, pools, states, has_drafts=num_drafts > 0),
        page_size=ctx.params.page_size,
        kv_pool=kv_pool,
        port=open_port(pool.device, pinned=is_pinned),
        forward_stream=runner.forward_stream,
        windows=window_layers(cache, pools, copier, ropes[1:]),
        accepts_all=accepts_all,
        on_load=feeds.on_load,
        snapshots=snapshots,
        state_layers=states,
    )


def _pin(store: PageStore, pool: DevicePool) -> bool:
    """Page-locks DRAM for a CUDA device; returns whether all of it is."""
    if pool.device.type != "cuda":
        return False
    place_near(store.arena, torch.cuda.get_device_properties(pool.device))
    pinned_bytes = pin_memory(store.arena, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    return pinned_bytes == store.arena.nbytes


def _decider(
    config: HierKVConfig,
    store: PageStore,
    layout: PageLayout,
    cost: CostModel,
    timer: ForwardTimer,
) -> LoadOrCompute | None:
    """Decides between loading and computing, where the operator asked for that."""
    if config.prefetch_policy != "cost":
        return None
    return LoadOrCompute(
        store,
        cost,
        page_tokens=layout.page_size,
        kv_bytes_per_page=layout.kv_bytes,
        is_decoding=lambda: timer.is_decoding,
    )


def _dram_choice(config: HierKVConfig, feeds: CostFeeds, layout: PageLayout) -> DramChoice | None:
    """The same of pages in DRAM; without a disk or a remote store, too."""
    if config.prefetch_policy != "cost":
        return None
    return DramChoice(
        feeds.cost,
        feeds.counters,
        page_tokens=layout.page_size,
        kv_bytes_per_page=layout.kv_bytes,
    )


def _tell_sizes(
    config: HierKVConfig, store: PageStore, page_size: int, *, is_position_free: bool
) -> None:
    logger.info(
        "hier-kv: %d pages of %d tokens in %.2f GiB of DRAM, %s, K stored %s",
        store.arena.num_slots,
        page_size,
        store.arena.nbytes / GIB,
        _describe_records(config) if store.keeps_pages else "all kept by tensor parallel rank 0",
        "before rotary embedding" if is_position_free else "as the engine has it",
    )


def _num_layers(
    kv_pool: Any, pools: HybridPools, states: Sequence[tuple[int, ...]], *, has_drafts: bool
) -> int:
    """Layers that a load tells the forward of."""
    if states:
        return 1 + max(map(max, states))
    if pools.groups is not None:
        return 1 + max(*pools.groups.full, *pools.groups.window)
    return pools.full.num_layers if has_drafts else int(kv_pool.layer_num)


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
        kernels="triton" if _uses_triton(config, linker.copier.pool) else "numba",
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
        "model configuration": namespace_digest(_model_facts(ctx)).hex()[:16],
        **on_all_nodes(lambda name: getattr(server_args, name, None)),
    }
    own = settings_of(config, node_rank(), server_args._hier_kv_secret, alike)
    await_all(group)
    server_args._hier_kv_secret = agree_on_settings(own, partial(exchange, group))


def _share_folder(folder: Path, server: str) -> None:
    """Keeps other servers out of a folder that the ranks of this one share, as long as it runs."""
    try:
        SharedFolderLock(FileIO(), folder, server)
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error


def _build_store(
    config: HierKVConfig,
    layout: PageLayout,
    page_codec: PageCodec | None,
    feeds: CostFeeds,
    remote_codec: RemotePageCodec | None,
    rules: PageRules,
    share: PutShare,
    one_copy: OneCopy | None,
    *,
    is_hybrid: bool,
    num_ranks: int,
) -> tuple[PageStore, RecordTier | None]:
    num_slots = config.host_bytes // layout.slot_bytes
    check_slots(num_slots, layout.slot_bytes, config.host_size)
    trust = build_trust(config)
    try:
        memory = None if one_copy is None else one_copy.memory
        arena = HostArena(num_slots, layout.slot_bytes, memory=memory)
        disk = _record_tier(config, trust)
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error
    factor = page_codec.max_pages_a_slot if page_codec is not None else 1
    capacity = num_slots + factor * (record_bytes(config) // layout.slot_bytes)
    index = PageIndex(max(1024, int(capacity * _INDEX_SLACK)))
    remote = None
    if config.remote_url:
        division = division_of(config, 1 if one_copy is not None else num_ranks)
        remote = open_remote(config.remote_url, trust, division)
    keep_raw = None
    if disk is not None and config.coding == "cost":
        keep_raw = partial(feeds.keep_raw, disk)
    store = PageStore(
        arena,
        index,
        disk,
        _store_config(config, share, is_hybrid=is_hybrid),
        page_codec,
        on_read=feeds.on_read,
        on_write=feeds.on_write,
        keep_raw=keep_raw,
        remote=remote,
        on_fetch=feeds.on_fetch,
        open_coded=None
        if remote_codec is None
        else coded_pages(remote_codec, text_time(config, feeds.cost), config.slo_ms / 1e3 or None),
        rules=rules,
        counters=feeds.counters,
    )
    if disk is not None:
        store.connect(disk)
    # The first saves should not pay for page faults; the thread ends by itself.
    threading.Thread(
        target=arena.prefault,
        args=(threading.Event(),),
        kwargs={"pause_s": 0.001},
        name="hier-kv-prefault",
        daemon=True,
    ).start()
    return store, disk


def _store_config(config: HierKVConfig, share: PutShare, *, is_hybrid: bool) -> PageStoreConfig:
    return PageStoreConfig(
        policy_for_sizes(config.write_policy, config.host_bytes, record_bytes(config)),
        config.event_log,
        placement_of(config, is_hybrid=is_hybrid),
        config.remote_policy,
        share,
    )


def _record_tier(config: HierKVConfig, trust: Trust) -> RecordTier | None:
    """What keeps pages as records: the disk, DRAM with the records coded, or both."""
    if not config.disk_dir:
        return MemoryTier(config.coded_host_bytes) if config.coded_host_bytes else None
    disk = DiskTier(_disk_config(config), seals=trust.seals)
    return CachedDiskTier(disk, config.coded_host_bytes) if config.coded_host_bytes else disk


def _describe_records(config: HierKVConfig) -> str:
    coded = config.coded_host_bytes / GIB
    held = f"{coded:.2f} GiB of DRAM for pages coded with {config.record_codec}, "
    disk = f"disk folder {config.disk_dir}" if config.disk_dir else "no disk tier"
    return f"{held}{disk}" if coded else disk


def _disk_config(config: HierKVConfig) -> DiskConfig:
    modes: dict[str, Literal["auto", "on", "off"]] = {
        "auto": "auto",
        "direct": "on",
        "buffered": "off",
    }
    fsync: dict[str, Literal["none", "seal", "always"]] = {
        "none": "none",
        "seal": "seal",
        "always": "always",
    }
    return DiskConfig(
        path=Path(config.disk_dir),
        max_bytes=config.disk_bytes,
        min_free_bytes=int(config.disk_free_floor * GIB),
        segment_bytes=int(config.disk_segment_size * GIB),
        direct_io=modes[config.disk_io],
        fsync=fsync[config.disk_fsync],
    )


def _uses_triton(config: HierKVConfig, pool: DevicePool) -> bool:
    return config.kernels == "triton" or pool.device.type == "cuda"


def _kernels(
    config: HierKVConfig, pools: HybridPools, ropes: Sequence[list[LayerRope]], page_size: int
) -> ModuleType | Any:
    pool = pools.full
    if config.kernels == "numba" and pool.device.type == "cuda":
        raise HierKVConfigError(
            "--hier-kv-kernels numba needs a KV pool on the CPU, got one on "
            f"{pool.device}; use auto or triton."
        )
    if _uses_triton(config, pool):
        from sglang_ext.kernels.rope import gpu

        if pool.device.type == "cuda":
            _compile(gpu, pools, ropes, page_size)
        return gpu
    known = [rope.spec for part in ropes for rope in part if rope.spec is not None]
    spec = known[0] if known else None
    rope_kernels.warm_up(pool.dtype, spec)
    for dtype in {v.dtype for v in pool.v} - {pool.dtype}:  # rows of an index
        rope_kernels.warm_up(dtype)
    return rope_kernels


def _compile(
    kernels: ModuleType, pools: HybridPools, ropes: Sequence[list[LayerRope]], page_size: int
) -> None:
    """Compiles the kernels of all layers now: the first load should not wait for a compiler."""
    start_s = time.monotonic()
    done = set()
    parts = [pools.full, *pools.window_parts()]
    layers: list[tuple[torch.Tensor, Any]] = []
    for part, of_layers in zip(parts, ropes, strict=True):
        layers += zip(part.k, (rope.spec for rope in of_layers), strict=True)
        layers += ((v, None) for v in part.v if v.shape[2])
    for tensor, spec in layers:
        kind = (tensor.dtype, tensor.shape[1:], tensor.stride(), id(spec))
        if kind not in done:
            done.add(kind)
            kernels.warm_up(tensor, spec, page_size)
    logger.info(
        "hier-kv: kernels of %d kinds of layers compiled in %.1f s",
        len(done),
        time.monotonic() - start_s,
    )


def _model_facts(ctx: Any) -> dict[str, Any]:
    """The model's configuration, but for where its files lie and who wrote them."""
    facts: dict[str, Any] = ctx.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None)
    return facts


def _identity(
    ctx: Any,
    config: HierKVConfig,
    pools: HybridPools,
    place: RankPlace,
    group: Any | None,
    snapshots: Snapshots | None,
    *,
    alike: bool,
    is_one: bool,
) -> ModelIdentity:
    runner = ctx.tp_worker.model_runner
    label = {
        "model": str(ctx.server_args.model_path),
        "kv_dtype": str(pools.full.dtype),
        "page_size": ctx.params.page_size,
        "rope": config.rope,
    }
    if place.shares_steps:
        group = ctx.tp_group.cpu_group

    def adapters() -> dict[str, Any]:
        manager = runner.lora_manager
        return dict(manager.loras) if manager is not None else {}

    return ModelIdentity(
        live_models(runner.model, draft_runners(runner)),
        _fixed_facts(ctx, pools, place, snapshots, alike=alike),
        label,
        adapters,
        partial(exchange, group),
        serves_alike=not place.shares_steps,
        ranks_share=alike,
        needs_one_name=is_one,
        is_final=place.pp_size > 1,
    )


def _fixed_facts(
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
        "model": _model_facts(ctx),
        "kv_dtype": str(pool.dtype),
        "kv_cache_dtype": str(ctx.server_args.kv_cache_dtype),
        "pool": pool.kind,
        "layers": [list(k.shape[1:]) for k in pool.k] + [list(v.shape[1:]) for v in pool.v],
        "page_size": ctx.params.page_size,
        # Ranks that hold the same KV look for it under one name. Sums over other numbers of ranks
        # round otherwise.
        "tp": ["all" if alike else place.tp_rank, place.tp_size],
    }
    formats = number_formats(lambda name: getattr(ctx.server_args, name, None))
    if formats:
        fixed["number_formats"] = formats
    if place.shares_steps:
        # Experts and MLPs lie in shares on all of these, whose weights all enter the namespace.
        fixed["ranks_of_mlp"] = place.num_ranks
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
    index = index_facts(live_models(runner.model, drafts), kv_pool, pool)
    if index is not None:
        fixed["index"] = index
    if snapshots is not None:
        fixed["states"] = [*snapshots.pool.describe(), snapshots.part_bytes]
    return fixed
