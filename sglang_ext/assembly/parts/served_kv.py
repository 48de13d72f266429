"""What of a model's KV is served: its pools, what a page holds of them, and where K may move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.assembly.draft_setup import check_planes, kept_ropes
from sglang_ext.assembly.state_setup import snapshots_of
from sglang_ext.assembly.window_setup import bound_ropes, read_layers, ropes_of_parts
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.pools import HybridPools, describe_pools
from sglang_ext.device.rope_discovery import LayerRope, discover_ropes
from sglang_ext.device.states.snapshots import Snapshots
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.seam.hooks.loaded_models import draft_runners
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.lossless import lossy_codec


@dataclass(frozen=True)
class ServedKV:
    """The KV of one rank, as SGLang built it.

    Attributes:
        runner: SGLang's model runner of the target model.
        kv_pool: SGLang's KV pool of the target model.
        drafts: SGLang's runners of draft models, whose KV lies in the same pages.
        pools: these pools as rows: of full layers, with those of drafts, and of window layers.
        layout: of a page.
        snapshots: of layers with a state; None without such layers.
        is_bound: K of the full layers is stored with its rotation, unless windows move, too: KV of
            drafts and windows, states and an index stay at their positions. Behind a draft K is
            without its rotation all the same where a lossy codec wants it so.
    """

    runner: Any
    kv_pool: Any
    drafts: Sequence[Any]
    pools: HybridPools
    layout: PageLayout
    snapshots: Snapshots | None
    is_bound: bool

    @property
    def num_draft_layers(self) -> int:
        """Layers at the end of a page that are of draft models."""
        return self.pools.num_draft_layers

    @property
    def is_hybrid(self) -> bool:
        """Whether window layers have a pool of their own, or layers have a state."""
        return self.pools.window is not None or self.snapshots is not None


def served_kv(ctx: Any, config: HierKVConfig) -> ServedKV:
    """Looks at the pools that SGLang built.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.
        config: the settings of the server.

    Raises:
        HierKVConfigError: a pool cannot be served; one sentence.
    """
    kv_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    runner = ctx.tp_worker.model_runner
    drafts = draft_runners(runner)
    read = None
    if ctx.is_hybrid_swa:
        read = read_layers(runner.model_config.hf_text_config, runner.model)
    pools = describe_pools(kv_pool, read, [each.token_to_kv_pool for each in drafts])
    check_planes(pools, config)
    layout = pools.layout(ctx.params.page_size)
    snapshots = snapshots_of(ctx, layout)
    is_hybrid = pools.window is not None or snapshots is not None
    is_drafted = bool(drafts) and not lossy_codec(config)
    is_bound = is_drafted or is_hybrid or pools.full.has_index
    return ServedKV(runner, kv_pool, drafts, pools, layout, snapshots, is_bound)


def ropes_of(
    kv: ServedKV, config: HierKVConfig, place: RankPlace, *, has_group: bool
) -> list[list[LayerRope]]:
    """How K of each layer is stored: of the full layers, then of each group of window layers.

    Args:
        kv: what is served.
        config: the settings.
        place: this rank's.
        has_group: several ranks take the scheduler's steps together.
    """
    model, pool = kv.runner.model, kv.pools.full
    if kv.pools.window is not None:
        alone = not has_group and not place.shares_steps and not kv.drafts
        return ropes_of_parts(model, kv.pools, moves=config.truncation != "off" and alone)
    if kv.is_bound:
        return [bound_ropes(pool)]
    first = int(kv.kv_pool.start_layer) if place.pp_size > 1 else 0
    num_layers = pool.num_layers - kv.num_draft_layers
    ropes = discover_ropes(model, pool, range(first, first + num_layers))
    return [ropes + kept_ropes(kv.num_draft_layers)]
