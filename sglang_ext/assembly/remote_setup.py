"""Opens the remote store that the settings name, and says what of it is shared by ranks."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.assembly.key_setup import Trust, file_keys
from sglang_ext.errors import HierKVConfigError
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.indexed import KIND as INDEXED
from sglang_ext.settings.quotas import parse_quotas
from sglang_ext.tiers.access import shown
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig, open_engine, parse_remote_url
from sglang_ext.tiers.remote.shares.division import Division
from sglang_ext.tiers.store import PutShare
from sglang_ext.truncation.keyed_names import encode_parts

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


def division_of(config: HierKVConfig, num_putters: int) -> Division | None:
    """How `--hier-kv-quotas` divides the remote store; None without quotas.

    A tenant goes there by a digest of its salt or key, as servers may number tenants differently.
    With a key file only who has the key can tell whether a name that he guesses is the tenant's.

    Args:
        config: the settings.
        num_putters: processes of the server that upload pages, each its part. Those of all nodes,
            as nobody knows here whether their URLs lead to one store.

    Raises:
        HierKVConfigError: the key file cannot be used.
    """
    quotas = parse_quotas(config.quotas)
    if not quotas.shares:
        return None
    keys = file_keys(config) or (b"hier-kv",)
    labels = tuple(
        tuple(hmac.digest(key, encode_parts("share", *named), "sha256") for key in keys)
        for named in sorted(quotas.numbers, key=quotas.numbers.__getitem__)
    )
    return Division(quotas.shares, labels, num_putters)


def open_remote(text: str, trust: Trust, division: Division | None = None) -> RemoteStore:
    """The store of `--hier-kv-remote-url`. It connects in the background: it may be down.

    Args:
        text: the URL.
        trust: how records are protected there.
        division: shares of it that tenants have; None without any.

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
        return RemoteStore(engine, config, seals=trust.seals, shown=url.shown, division=division)
    except TierConfigError as error:
        raise HierKVConfigError(f"{error}.") from error


def are_alike(pool: DevicePool, place: RankPlace, *, is_alone: bool) -> bool:
    """Whether all ranks of this one's tensor parallel group hold the same KV.

    Of MLA each has the latent row of every token: it is projected from what was summed over all
    ranks, by weights that all of them have. So is the row of an index, and a draft layer's rows,
    which are of the same kind in such a pool. Context parallel ranks have K and V of every head.

    Args:
        pool: the model's, of all its layers.
        place: this rank's.
        is_alone: nothing but this pool is in a page: no windows, no states.
    """
    has_all = pool.kind in ("mla", INDEXED) or place.head_ranks == 1
    return has_all and is_alone and place.tp_size > 1 and place.pp_size == 1


def put_share(place: RankPlace) -> PutShare:
    """The pages that a rank puts into a remote store, of those that its whole group holds.

    Each node puts all of them, as the stores of two nodes need not be one.
    """
    return PutShare(place.beside.index(place.tp_rank), len(place.beside))


def text_time(config: HierKVConfig, cost: CostModel) -> Callable[[int, int], float | None]:
    """What fetches of coded pages take for the time to compute tokens behind others.

    It is unknown, and all that is found is fetched, unless the settings let a request compute what
    is stored: under `cost`, and where a time to the first token is to be kept.
    """
    if config.prefetch_policy == "cost" or config.slo_ms:
        return cost.prefill_s
    return lambda num_new, num_before: None
