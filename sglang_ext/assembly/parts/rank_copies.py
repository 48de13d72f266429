"""How many copies the ranks of a group keep of a page that all of them hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_ext.assembly.one_copy import OneCopy, agree_on_one_copy, may_keep_one_copy
from sglang_ext.assembly.parts.served_kv import ServedKV
from sglang_ext.assembly.remote_setup import are_alike, put_share
from sglang_ext.ranks.lockstep import exchange
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.store import EVERY_PAGE, PutShare


@dataclass(frozen=True)
class RankCopies:
    """What of its pages a rank keeps, and puts into a remote store.

    Attributes:
        are_alike: all ranks of its tensor parallel group hold the same KV.
        one_copy: how it takes part where one rank keeps the pages of all; None: it keeps its own.
        put_share: the pages that it puts.
    """

    are_alike: bool
    one_copy: OneCopy | None
    put_share: PutShare

    @property
    def is_one(self) -> bool:
        """Whether one rank keeps the pages of all."""
        return self.one_copy is not None


def agree_on_copies(
    kv: ServedKV, config: HierKVConfig, place: RankPlace, group: Any, mode: str | None
) -> RankCopies:
    """Decides it, on all ranks alike; a collective of them where they hold the same KV.

    Args:
        kv: what is served.
        config: this rank's settings.
        place: this rank's.
        group: of the ranks, None for one alone.
        mode: SGLang's `--disaggregation-mode`.
    """
    alike = are_alike(kv.pools.full, place, is_alone=not kv.is_hybrid)
    one_copy = None
    if alike and may_keep_one_copy(place, mode):
        one_copy = agree_on_one_copy(config, kv.layout, place, partial(exchange, group))
    share = put_share(place) if alike and one_copy is None else EVERY_PAGE
    return RankCopies(alike, one_copy, share)
