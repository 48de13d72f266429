"""What is built for a model whose window layers have a KV pool of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import LayerGroups
from sglang_ext.device.pools import DevicePool, pool_of
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.windows.layers import WindowLayers
from sglang_ext.seam.window_inquiry import Enter, WindowInquiries
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.store import PageStore

logger = logging.getLogger(__name__)

_REASON = "pages of models with window layers or states are not moved"


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


def window_layers(
    cache: Any, pool: DevicePool, groups: LayerGroups, full: PageCopier
) -> WindowLayers:
    """The window layers' groups, each with a copier into the same slots.

    Args:
        cache: SGLang's, which knows how far a window reaches.
        pool: of the window layers.
        groups: which layers they are.
        full: the copier of the full layers.
    """
    (component,) = [each for each in cache.components.values() if each.component_type.name == "SWA"]
    copiers = [
        full.for_pool(pool_of(pool, layers), bound_ropes(pool_of(pool, layers)))
        for layers in groups.groups
    ]
    return WindowLayers(
        component.full_window_pages, cache.page_size, tuple(copiers), groups.model_layers
    )


def window_inquiries(
    layers: WindowLayers | None, store: PageStore, config: HierKVConfig
) -> Callable[[Enter], WindowInquiries] | None:
    """What lets requests wait for what a remote store has of their windows; None without both."""
    if layers is None or not config.remote_url:
        return None
    longest_s = 0.0 if config.prefetch_policy == "best_effort" else config.prefetch_timeout_ms / 1e3
    return lambda enter: WindowInquiries(layers, store, enter, longest_s)
