"""What decides which pages leave a tier, from the settings."""

from __future__ import annotations

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.quotas import parse_quotas
from sglang_ext.tiers.policy import PolicyConfig


def placement_of(config: HierKVConfig, *, is_hybrid: bool) -> PolicyConfig | None:
    """The placement policy's settings; None for the least recent page, and no look-ahead.

    Args:
        config: the settings.
        is_hybrid: whether the model has window layers or states. Return times are learned of pages
            that requests go through one by one; of these requests take the last ones only.
    """
    if config.lookahead == "off":
        return None
    return PolicyConfig(
        config.base_order,
        return_times=not is_hybrid,
        pin_share=config.pin_share,
        shares=parse_quotas(config.quotas).shares,
    )
