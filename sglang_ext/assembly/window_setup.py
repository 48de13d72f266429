"""What is built for a model whose window layers have a KV pool of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sglang_ext.admission.state_question import StateQuestion
from sglang_ext.admission.window_question import WindowQuestion
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import LayerGroups
from sglang_ext.device.pools import DevicePool, HybridPools
from sglang_ext.device.rope_discovery import LayerRope, discover_ropes, type_of_attention
from sglang_ext.device.states.snapshots import Snapshots
from sglang_ext.device.windows.block_groups import BlockGroups
from sglang_ext.device.windows.window_layers import WindowLayers
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.hybrids.place_questions import Enter, Find, PlaceQuestions
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.store import PageStore

logger = logging.getLogger(__name__)

_REASON = "pages of models with states, drafts or an index, or with windows here, are not moved"


def with_windows(config: HierKVConfig) -> HierKVConfig:
    """The settings that such a model runs with.

    What a window or a state is worth to the forward is no function of the number of its pages,
    which the cost model goes by, so that is off.
    """
    if config.prefetch_policy != "cost":
        return config
    logger.info(
        "hier-kv: with window layers or states it runs with --hier-kv-prefetch-policy timeout"
    )
    return replace(config, prefetch_policy="timeout")


def bound_ropes(pool: DevicePool) -> list[LayerRope]:
    """Every layer's K is stored as the engine has it."""
    return [LayerRope(None, movable=False, reason=_REASON) for _ in range(pool.num_layers)]


def ropes_of_parts(model: Any, pools: HybridPools, *, moves: bool) -> list[list[LayerRope]]:
    """How K of each layer is stored: of the full layers' part, then of each window layers' group.

    A page of the full layers and one of window layers go to another position together, or neither
    does: where one layer's K cannot be moved, none is.

    Args:
        model: SGLang's loaded model.
        pools: of its full layers and its window layers.
        moves: pages may go to other positions; else K is stored as the engine has it.
    """
    parts = [pools.full, *pools.window_parts()]
    groups = pools.groups
    if not moves or not isinstance(groups, LayerGroups):
        return [bound_ropes(part) for part in parts]
    layers = sorted({*groups.full, *groups.window})
    ropes = dict(zip(layers, discover_ropes(model, pools.full, layers), strict=True))
    if not all(rope.movable for rope in ropes.values()):
        return [bound_ropes(part) for part in parts]
    return [[ropes[layer] for layer in part] for part in groups.model_layers]


def read_layers(config: Any, model: Any) -> set[int] | None:
    """The layers whose KV some layer reads, where the last ones read that of others (Gemma 4).

    SGLang has rows for all of them. None: of a model without such layers, all.

    Args:
        config: of the model's text, as its files have it.
        model: SGLang's, with weights or without.

    Raises:
        HierKVConfigError: which layers are read is not what the model's configuration says.
    """
    num_sharing = getattr(config, "num_kv_shared_layers", None) or 0
    if not num_sharing:
        return None
    expected = set(range(config.num_hidden_layers - num_sharing))
    found = {each.layer_id for each in model.modules() if type_of_attention(each)}
    if found != expected:
        raise HierKVConfigError(
            f"--enable-hier-kv needs a model whose last {num_sharing} layers read the KV of "
            f"others, as its configuration says, got one that reads layers {sorted(found)}; leave "
            "the flag out for this model."
        )
    return expected


def window_layers(
    cache: Any, pools: HybridPools, full: PageCopier, ropes: Sequence[list[LayerRope]]
) -> WindowLayers | None:
    """The window layers' groups, each with a copier into the same slots; None without any.

    Args:
        cache: SGLang's, which knows how far a window reaches.
        pools: the full layers' and the window layers'.
        full: the copier of the full layers.
        ropes: of each group's layers.
    """
    if pools.groups is None:
        return None
    (component,) = [each for each in cache.components.values() if each.component_type.name == "SWA"]
    copiers = [
        _copier_of(part, pools.groups, full, of_layers)
        for part, of_layers in zip(pools.window_parts(), ropes, strict=True)
    ]
    return WindowLayers(
        component.full_window_pages, cache.page_size, tuple(copiers), pools.groups.model_layers
    )


def _copier_of(
    part: DevicePool,
    groups: LayerGroups | BlockGroups,
    full: PageCopier,
    ropes: list[LayerRope],
) -> PageCopier:
    layout = None
    if isinstance(groups, BlockGroups):
        layout = part.layout(full.page_size, full.layout, is_bound=True)
    return full.for_pool(part, ropes, layout)


def place_questions_of(
    layers: WindowLayers | None,
    snapshots: Snapshots | None,
    store: PageStore,
    config: HierKVConfig,
) -> Callable[[Enter, Find], PlaceQuestions] | None:
    """What lets requests wait for what a remote store has of their windows, or their states.

    None without these, or without a store.
    """
    kind, parts = (WindowQuestion, layers) if layers is not None else (StateQuestion, snapshots)
    if not config.remote_url or parts is None:
        return None
    longest_s = 0.0 if config.prefetch_policy == "best_effort" else config.prefetch_timeout_ms / 1e3
    return lambda enter, find: PlaceQuestions(kind, parts, store, enter, find, longest_s)
