"""What a server says at start of sizes that cost something."""

from __future__ import annotations

import logging

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.store import DEFAULT_POLICY, PageStore, policy_for_sizes

logger = logging.getLogger(__name__)


def record_bytes(config: HierKVConfig) -> int:
    """Bytes below DRAM where pages lie as records: of the disk, else of coded DRAM."""
    return config.disk_bytes or config.coded_host_bytes


def advise_on_sizes(
    config: HierKVConfig, store: PageStore, page_size: int, context_tokens: int
) -> None:
    """Says at start what these sizes cost: what is of no use of a long prompt, and held twice.

    Args:
        config: the settings.
        store: with its DRAM.
        page_size: tokens of a page.
        context_tokens: of the longest prompt.
    """
    if not store.keeps_pages:
        return
    most = store.max_lone_plan_pages * page_size
    if most < context_tokens:
        logger.warning(
            "hier-kv: of a prompt of more than %d tokens (the context has %d) only so many are "
            "loaded, and the rest is computed, as no more finds room in DRAM at a time; "
            "--hier-kv-host-size %.3g times as large has room for all",
            most,
            context_tokens,
            context_tokens / most,
        )
    below = record_bytes(config)
    default = policy_for_sizes(DEFAULT_POLICY, config.host_bytes, below)
    if config.write_policy == "write_through" != default and below:
        logger.info(
            "hier-kv: what DRAM holds lies below it, too; with --hier-kv-write-policy %s both "
            "together hold up to %.0f %% more once that is full",
            DEFAULT_POLICY,
            100 * config.host_bytes / below,
        )
