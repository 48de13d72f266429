"""Which KV a decode server takes for a request's own, as it arrives."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: E402

from sglang_ext.identity.model_identity import ModelIdentity  # noqa: E402
from sglang_ext.seam.cache import HierKVRadixCache  # noqa: E402
from sglang_ext.seam.hooks import disaggregation  # noqa: E402
from sglang_ext.settings.quotas import parse_quotas  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.store import PageStore, PageStoreConfig  # noqa: E402

TOKENS = array("q", range(100))


class Cache(HierKVRadixCache):
    """A cache of no tree: what a mark is made of."""

    def __init__(self) -> None:
        store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
        transport = SimpleNamespace(store=store, wait_restored=lambda: None)
        self.linker: Any = SimpleNamespace(cache_linker=transport)
        self.identity = ModelIdentity(torch.nn.Linear(3, 3), {}, {}, dict)
        self._quotas = parse_quotas("")


def request(room: int, tokens: array[int] = TOKENS, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_room": room,
        "full_untruncated_fill_ids": tokens,
        "metadata_buffer_index": 0,
        "discard_output_reason": None,
        "skip_radix_cache_insert": False,
        **more,
    }
    return SimpleNamespace(**fields)


class Servers:
    """A prefill server and a decode server of the same weights, and one row of metadata."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.buffers = SimpleNamespace(output_ids=torch.zeros((1, 16), dtype=torch.int32))
        self.waiting: list[Any] = []

    def send(self, req: Any) -> None:
        scheduler = SimpleNamespace(tree_cache=self.cache, disagg_metadata_buffers=self.buffers)
        disaggregation._around_sending(lambda *args: None, scheduler, req, True)

    def receive(self, req: Any) -> bool:
        """Whether the decode server may store a request whose KV has arrived."""
        arrived = SimpleNamespace(req=req, metadata_buffer_index=0)
        queue = SimpleNamespace(
            scheduler=SimpleNamespace(tree_cache=self.cache),
            metadata_buffers=self.buffers,
            queue=[*(SimpleNamespace(req=each) for each in self.waiting), arrived],
        )
        disaggregation._after_arrival(None, queue, arrived)
        return not req.skip_radix_cache_insert

    @property
    def num_foreign(self) -> int:
        return int(self.cache.store.counters.snapshot().get("received_foreign_requests", 0))


def test_kv_of_the_same_tokens_is_stored_once() -> None:
    servers = Servers()
    servers.send(request(7))
    assert servers.receive(request(7))
    assert not servers.receive(request(7))  # the row was read
    assert servers.num_foreign == 1


@pytest.mark.parametrize("tokens", [TOKENS[:-1], TOKENS[:-1] + array("q", [5])])
def test_kv_of_other_tokens_is_not_stored(tokens: array[int]) -> None:
    servers = Servers()
    servers.send(request(7, tokens))
    assert not servers.receive(request(7))
    assert servers.num_foreign == 1


def test_kv_that_went_to_two_requests_of_one_room_is_not_stored() -> None:
    servers = Servers()
    servers.waiting = [request(7), request(8)]
    servers.send(request(7))
    assert not servers.receive(request(7))
    servers.send(request(9))
    assert servers.receive(request(9))
    assert servers.num_foreign == 1


def test_a_request_to_which_nothing_is_sent_is_not_stored_by_what_another_left() -> None:
    servers = Servers()
    servers.send(request(7))  # and its transfer fails: nobody reads the row
    assert not servers.receive(request(7, bootstrap_host=FAKE_BOOTSTRAP_HOST))
    assert servers.num_foreign == 0
