"""The page store with its tiers, from the settings."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Literal

from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.assembly.early_checks import check_slots
from sglang_ext.assembly.key_setup import Trust, build_trust
from sglang_ext.assembly.one_copy import OneCopy
from sglang_ext.assembly.policy_setup import placement_of
from sglang_ext.assembly.remote_setup import division_of, open_remote, text_time
from sglang_ext.assembly.size_advice import record_bytes
from sglang_ext.codec.page_codec import PageCodec
from sglang_ext.coded_remote.coded import coded_pages
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.layout import PageLayout
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import GIB, HierKVConfig
from sglang_ext.tiers.coded_host import CachedDiskTier, MemoryTier, RecordTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.folder import SharedFolderLock
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store import PageStore, PageStoreConfig, PutShare, policy_for_sizes

# Pages of other adapters and of namespaces opened later need rows too.
_INDEX_SLACK = 1.25


def build_store(
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
    """Makes DRAM, the index, what keeps records and the remote store, with their threads.

    Args:
        config: the settings.
        layout: of a page.
        page_codec: of records; None where nothing codes.
        feeds: take what is measured.
        remote_codec: of pages in a remote store; None where these travel as records.
        rules: what a page from elsewhere must be.
        share: the pages that this rank puts into a remote store.
        one_copy: how this rank keeps the pages of others, too; None: its own.
        is_hybrid: windows or states lie in slots, too.
        num_ranks: of the server, which share a remote store's connections.

    Returns:
        The store, and what keeps its records: None without.

    Raises:
        HierKVConfigError: the machine cannot give what is asked for; one sentence.
    """
    num_slots = config.host_bytes // layout.slot_bytes
    check_slots(num_slots, layout.slot_bytes, config.host_size)
    trust = build_trust(config)
    try:
        memory = None if one_copy is None else one_copy.memory
        arena = HostArena(num_slots, layout.slot_bytes, memory=memory)
        disk = _record_tier(config, trust)
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error
    keep_raw = None
    if disk is not None and config.coding == "cost":
        keep_raw = partial(feeds.keep_raw, disk)
    store = PageStore(
        arena,
        PageIndex(_num_rows(config, page_codec, num_slots, layout.slot_bytes)),
        disk,
        _store_config(config, share, is_hybrid=is_hybrid),
        page_codec,
        on_read=feeds.on_read,
        on_write=feeds.on_write,
        keep_raw=keep_raw,
        remote=_remote_store(config, trust, 1 if one_copy is not None else num_ranks),
        on_fetch=feeds.on_fetch,
        open_coded=None
        if remote_codec is None
        else coded_pages(remote_codec, text_time(config, feeds.cost), config.slo_ms / 1e3 or None),
        rules=rules,
        counters=feeds.counters,
    )
    if disk is not None:
        store.connect(disk)
    _prefault(arena)
    return store, disk


def _num_rows(
    config: HierKVConfig, page_codec: PageCodec | None, num_slots: int, slot_bytes: int
) -> int:
    """Rows of the index: as many pages as DRAM and what keeps records have room for, and more."""
    factor = page_codec.max_pages_a_slot if page_codec is not None else 1
    capacity = num_slots + factor * (record_bytes(config) // slot_bytes)
    return max(1024, int(capacity * _INDEX_SLACK))


def _remote_store(config: HierKVConfig, trust: Trust, num_ranks: int) -> RemoteStore | None:
    """The store that other servers share; so many ranks of this one share its connections."""
    if not config.remote_url:
        return None
    return open_remote(config.remote_url, trust, division_of(config, num_ranks))


def _prefault(arena: HostArena) -> None:
    """The first saves should not pay for page faults; the thread ends by itself."""
    threading.Thread(
        target=arena.prefault,
        args=(threading.Event(),),
        kwargs={"pause_s": 0.001},
        name="hier-kv-prefault",
        daemon=True,
    ).start()


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


def describe_records(config: HierKVConfig) -> str:
    """What keeps records below DRAM's slots, for the log."""
    coded = config.coded_host_bytes / GIB
    held = f"{coded:.2f} GiB of DRAM for pages coded with {config.record_codec}, "
    disk = f"disk folder {config.disk_dir}" if config.disk_dir else "no disk tier"
    return f"{held}{disk}" if coded else disk


def share_folder(folder: Path, server: str) -> None:
    """Keeps other servers out of a folder that the ranks of this one share, as long as it runs."""
    try:
        SharedFolderLock(FileIO(), folder, server)
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error
