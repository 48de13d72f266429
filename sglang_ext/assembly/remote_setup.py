"""Opens the remote store that the settings name, and says what of it is shared by ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.assembly.key_setup import Trust
from sglang_ext.errors import HierKVConfigError
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.indexed import KIND as INDEXED
from sglang_ext.tiers.access import shown
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig, open_engine, parse_remote_url
from sglang_ext.tiers.store import PutShare

if TYPE_CHECKING:  # `hier-kv doctor` checks a URL where no torch is
    from sglang_ext.device.pools import DevicePool


def check_remote(text: str, disk_dir: str = "") -> None:
    """Checks a URL, and what it needs on this machine, without asking the store.

    Args:
        text: the URL.
        disk_dir: the disk tier's folder; empty for none.

    Raises:
        HierKVConfigError: as `open_remote`.
    """
    try:
        url = parse_remote_url(text)
        if disk_dir and url.scheme == "file":
            _refuse_nesting(url.path, disk_dir)
        config = RemoteStoreConfig.from_url(url)
        engine = open_engine(url)
        engine.close()
        config.check(engine)
    except TierConfigError as error:
        raise HierKVConfigError(f"{error}.") from error


def _refuse_nesting(shared: str, disk_dir: str) -> None:
    """Refuses folders of which one lies in the other, or is the other, by whatever names."""
    store, disk = Path(shared).resolve(), Path(disk_dir).resolve()
    if store.is_relative_to(disk) or disk.is_relative_to(store):
        raise HierKVConfigError(
            "the folders of --hier-kv-disk-dir and --hier-kv-remote-url must not lie in each other,"
            f" got {shown(disk)} and {shown(store)}; give each a folder of its own."
        )


def open_remote(text: str, trust: Trust) -> RemoteStore:
    """The store of `--hier-kv-remote-url`. It connects in the background: it may be down.

    Args:
        text: the URL.
        trust: how records are protected there.

    Raises:
        HierKVConfigError: the URL cannot work; one sentence, without the secrets in it.
    """
    try:
        url = parse_remote_url(text)
        config = RemoteStoreConfig.from_url(url)
        engine = open_engine(url)
        if trust.name_keys:
            from sglang_ext.tiers.protection import HidingEngine

            engine = HidingEngine(engine, trust.name_keys)
        return RemoteStore(engine, config, seals=trust.seals, shown=url.shown)
    except TierConfigError as error:
        raise HierKVConfigError(f"{error}.") from error


def are_alike(pool: DevicePool, place: RankPlace, *, is_alone: bool) -> bool:
    """Whether all ranks of this one's tensor parallel group hold the same KV.

    Of MLA each has the latent row of every token: it is projected from what was summed over all
    ranks, by weights that all of them have. So is the row of an index, and a draft layer's rows,
    which are of the same kind in such a pool.

    Args:
        pool: the model's, of all its layers.
        place: this rank's.
        is_alone: nothing but this pool is in a page: no windows, no states.
    """
    return pool.kind in ("mla", INDEXED) and is_alone and place.tp_size > 1 and place.pp_size == 1


def put_share(place: RankPlace) -> PutShare:
    """The pages that a rank puts into a remote store, of those that its whole group holds.

    Each node puts all of them, as the stores of two nodes need not be one.
    """
    ranks_of_node = place.tp_size // place.num_nodes
    return PutShare(place.tp_rank % ranks_of_node, ranks_of_node)


def text_time(config: HierKVConfig, cost: CostModel) -> Callable[[int, int], float | None]:
    """What fetches of coded pages take for the time to compute tokens behind others.

    It is unknown, and all that is found is fetched, unless the settings let a request compute what
    is stored: under `cost`, and where a time to the first token is to be kept.
    """
    if config.prefetch_policy == "cost" or config.slo_ms:
        return cost.prefill_s
    return lambda num_new, num_before: None
