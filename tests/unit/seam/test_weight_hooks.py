"""What surrounds SGLang's calls that change weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.identity.model_identity import ModelIdentity  # noqa: E402
from sglang_ext.seam.hooks import weights  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.store import PageStore, PageStoreConfig  # noqa: E402

REQUEST = SimpleNamespace(lora_id=None, extra_key=None)


class Rank:
    """One of two ranks that serve different requests, with an empty device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = torch.nn.Linear(3, 3)
        self.num_exchanges = self.num_drains = 0
        self.store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
        self.identity = ModelIdentity(self.model, {}, {}, dict, self._exchange, serves_alike=False)
        self.identity.open(self.store)
        self.num_exchanges = self.num_drains = 0
        cache = SimpleNamespace(
            identity=self.identity,
            store=self.store,
            page_size=64,
            weights_change=lambda: None,
            quiesce=self._quiesce,
        )
        monkeypatch.setattr(weights, "_cache_of", lambda scheduler: cache)
        self.updater = SimpleNamespace(
            scheduler=SimpleNamespace(
                token_to_kv_pool_allocator=SimpleNamespace(size=64, available_size=lambda: 64),
                is_fully_idle=lambda ignore_waiting: True,
            ),
            _session=None,
            offload_tags=set(),
        )

    def _exchange(self, content: bytes) -> list[bytes]:
        self.num_exchanges += 1
        return [content, content]

    def _quiesce(self) -> None:
        self.num_drains += 1

    def call(self, body: Any) -> Any:
        """Calls a method of SGLang's updater as the hook does."""
        return weights._around_weight_change(lambda updater: body(), self.updater)


def test_ranks_exchange_digests_in_a_call_that_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    assert rank.call(lambda: torch.nn.init.zeros_(rank.model.weight)) is rank.model.weight
    assert rank.num_exchanges == 2
    assert rank.identity.space_of(REQUEST, rank.store) is not None


def test_a_rank_whose_call_raised_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may stand in a barrier of the call; the error has to get out and end the server.

    `/release_memory_occupation` raises so on ranks that have requests, and on no idle one.
    """
    rank = Rank(monkeypatch)

    def fail() -> None:
        raise AssertionError("should be called only when server is idle")

    with pytest.raises(AssertionError, match="idle"):
        rank.call(fail)
    assert rank.num_exchanges == 0
    assert rank.identity.space_of(REQUEST, rank.store) is None


def test_a_flush_of_an_update_is_no_point_that_all_ranks_come_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that cannot load its part does not flush; the others must not wait for it there."""
    rank = Rank(monkeypatch)
    rank.call(lambda: weights._before_flush(rank.updater.scheduler))
    assert rank.num_drains == 0
    weights._before_flush(rank.updater.scheduler)
    assert rank.num_drains == 1
