"""Puts pages into a remote store, each for the tenant whose it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sglang_ext.tiers.remote.base import Outcome
from sglang_ext.tiers.remote.items import PutItem
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import KeySpace


class TenantPuts:
    """The way of all pages into the store; without shares nothing is looked up. Thread-safe.

    Args:
        table: knows whose a page is.
        remote: the shared store.
    """

    def __init__(self, table: PageTable, remote: RemoteStore) -> None:
        self._table, self._remote = table, remote

    def put(self, space: KeySpace, items: Sequence[PutItem]) -> list[Outcome]:
        """See `RemoteStore.put`; what was kept out for its tenant's share is counted here.

        Args:
            space: where all of them belong.
            items: records of pages.
        """
        if not items or not self._remote.is_divided:
            return self._remote.put(items) if items else []
        tenants = self._tenants(space, items)
        outcomes = self._remote.put(
            [item._replace(tenant=tenant) for item, tenant in zip(items, tenants, strict=True)]
        )
        kept_out = Counter(
            tenant
            for tenant, outcome in zip(tenants, outcomes, strict=True)
            if outcome is Outcome.OVER_SHARE
        )
        for tenant, num in kept_out.items():
            self._table.counters.add(f"tenant_{tenant or 'others'}_remote_over_share_pages", num)
        self._table.counters.add("remote_over_share_pages", kept_out.total())
        return outcomes

    def _tenants(self, space: KeySpace, items: Sequence[PutItem]) -> list[int]:
        """Whose share pages count towards; of one that is nowhere here its key space says it."""
        hashes = np.frombuffer(b"".join(item.key.page_hash for item in items), np.uint8)
        tenants = np.full(len(items), space.tenant_number, np.int64)
        with self._table.lock:
            rows = self._table.index.lookup(hashes.reshape(len(items), -1), space.number)
            known = rows >= 0
            tenants[known] = self._table.policy.pages.tenant[rows[known]]
        return [int(tenant) for tenant in tenants]


def num_dropped(outcomes: Sequence[Outcome]) -> int:
    """How many pages the store was to have and has not."""
    settled = (Outcome.OK, Outcome.KEPT, Outcome.OVER_SHARE)
    return sum(outcome not in settled for outcome in outcomes)
