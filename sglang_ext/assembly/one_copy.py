"""With MLA, and with all heads on each, the ranks of a node hold the same KV: one keeps it for all.

It has the DRAM, the disk and the remote store of all of them, and does with them what a server of
one rank does. The others map its DRAM and load from there.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from dataclasses import dataclass, replace

from sglang_ext.assembly.policy_setup import placement_of
from sglang_ext.device.layout import PageLayout
from sglang_ext.ranks.rank import Exchange, RankPlace
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.disaggregation import is_disaggregated
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.shared_memory import create_shared, open_shared, path_of
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from sglang_ext.tiers.store.reader_store import ReaderStore
from sglang_ext.tiers.store.types import StoreCounters

logger = logging.getLogger(__name__)

_YES, _NO = b"1", b"0"
_NO_ROWS = 16  # of an index that stays empty


@dataclass(frozen=True)
class OneCopy:
    """How a rank takes part in keeping one copy of each page.

    Attributes:
        config: its settings: the sizes of all ranks where it keeps the pages, else without tiers
            below DRAM.
        memory: DRAM, mapped by all ranks.
        keeps: whether it is the one that keeps the pages.
    """

    config: HierKVConfig
    memory: mmap.mmap
    keeps: bool


def may_keep_one_copy(place: RankPlace, disaggregation_mode: str | None) -> bool:
    """Whether ranks that hold the same KV can keep it once; the same on all of them.

    Not over several nodes, whose ranks share no memory, and where it was not tried: with data
    parallel attention, and with prefill and decode servers.
    """
    one_node = place.num_nodes == 1 and not place.shares_steps
    return one_node and not is_disaggregated(disaggregation_mode)


def agree_on_one_copy(
    config: HierKVConfig, layout: PageLayout, place: RankPlace, exchange: Exchange
) -> OneCopy | None:
    """Maps memory for the pages of all ranks. A collective of all of them, twice.

    Args:
        config: a rank's own settings.
        layout: of pages, the same on all ranks.
        place: this rank's.
        exchange: among these ranks, in the order of their numbers.

    Returns:
        None on all ranks, with a warning, if one of them cannot map it: each keeps its own.
    """
    keeps = place.tp_rank == 0
    config = _config_of(config, place, keeps=keeps)
    num_bytes = config.host_bytes // layout.slot_bytes * layout.slot_bytes
    memory, file, sent = None, None, b"{}"
    if keeps and num_bytes:
        try:
            memory, file = create_shared(num_bytes)
            sent = json.dumps({"path": path_of(file), "num_bytes": num_bytes}).encode()
        except TierConfigError as error:
            _warn(error)
    try:
        offer = json.loads(exchange(sent)[0])
        if offer and not keeps:
            memory = _open(offer["path"], offer["num_bytes"])
        # Behind this exchange all have mapped it, and no path is needed any more.
        all_have = all(found == _YES for found in exchange(_NO if memory is None else _YES))
    finally:
        if file is not None:
            os.close(file)
    if memory is None or not all_have:
        if memory is not None:
            memory.close()
        if num_bytes:
            logger.warning(
                "hier-kv: the ranks of this server cannot map one memory, so each keeps all pages "
                "of this model for itself, in its share of DRAM and disk"
            )
        return None
    return OneCopy(config, memory, keeps)


def _config_of(config: HierKVConfig, place: RankPlace, *, keeps: bool) -> HierKVConfig:
    """The keeper has what was meant for all ranks; a reader has nothing but the keeper's DRAM."""
    if keeps:
        tp_size = place.tp_size
        return replace(
            config, host_size=config.host_size * tp_size, disk_size=config.disk_size * tp_size
        )
    return replace(config, disk_dir="", remote_url="", codec="none", level="", profile="")


def _open(path: str, num_bytes: int) -> mmap.mmap | None:
    try:
        return open_shared(path, num_bytes)
    except TierConfigError as error:
        _warn(error)
        return None


def _warn(error: TierConfigError) -> None:
    logger.warning("hier-kv: %s", error)


def reader_store(one_copy: OneCopy, layout: PageLayout, counters: StoreCounters) -> PageStore:
    """The page store of a rank that keeps no pages."""
    num_bytes = len(one_copy.memory)
    arena = HostArena(
        num_bytes // layout.slot_bytes,
        layout.slot_bytes,
        memory_limit_bytes=num_bytes,  # it is the keeper's already
        memory=one_copy.memory,
        is_borrowed=True,
    )
    config = one_copy.config
    # It looks ahead as the keeper does, as SGLang's device tree is evicted by that.
    store_config = PageStoreConfig(
        event_log=config.event_log, placement=placement_of(config, is_hybrid=False)
    )
    return ReaderStore(arena, PageIndex(_NO_ROWS), None, store_config, counters=counters)
