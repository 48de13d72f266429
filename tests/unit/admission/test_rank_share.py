"""A rank's share of its server, and what it has in common with the others."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.model_identity import ModelIdentity
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.ranks.same_settings import NodeSettings, agree_on_settings, settings_of
from sglang_ext.settings.arguments import KNOWN, ON_ALL_NODES, on_all_nodes
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import PageStore, PageStoreConfig

CONFIG = HierKVConfig(host_size=8.0, disk_dir="/kv", disk_size=40.0, event_log="/log/a.jsonl")


def test_the_only_rank_has_the_servers_settings() -> None:
    assert RankPlace().config_of(CONFIG) == CONFIG


def test_ranks_share_sizes_and_have_folders_of_their_own() -> None:
    places = [RankPlace(tp, 2, dp, 2) for dp in range(2) for tp in range(2)]
    configs = [place.config_of(CONFIG) for place in places]
    assert {(config.host_size, config.disk_size) for config in configs} == {(2.0, 10.0)}
    assert [config.disk_dir for config in configs] == [
        "/kv/dp0-tp0-of-2", "/kv/dp0-tp1-of-2", "/kv/dp1-tp0-of-2", "/kv/dp1-tp1-of-2",
    ]  # fmt: skip
    assert len({config.event_log for config in configs}) == 4
    without = RankPlace(0, 2).config_of(HierKVConfig())
    assert without.disk_dir == without.event_log == ""


def test_stages_share_sizes_and_have_folders_of_their_own() -> None:
    places = [RankPlace(tp, 2, pp_rank=pp, pp_size=2) for pp in range(2) for tp in range(2)]
    configs = [place.config_of(CONFIG) for place in places]
    assert {(config.host_size, config.disk_size) for config in configs} == {(2.0, 10.0)}
    names = [place.name for place in places]
    assert names[0] == "dp0-tp0-of-2-pp0-of-2"
    assert len(set(names)) == 4
    # A server with as many ranks and one stage is none with two.
    assert not {RankPlace(tp, 4).name for tp in range(4)} & set(names)


def test_sizes_are_those_of_a_node() -> None:
    places = [RankPlace(tp, 4, num_nodes=2) for tp in range(4)]
    places += [
        RankPlace(tp, 2, dp, 2, shares_steps=True, num_nodes=2)
        for dp in range(2)
        for tp in range(2)
    ]
    configs = [place.config_of(CONFIG) for place in places]
    assert {(config.host_size, config.disk_size) for config in configs} == {(4.0, 20.0)}


def agree(*nodes: NodeSettings) -> list[str]:
    """What each node makes of what all of them sent."""
    sent = [json.dumps(asdict(node)).encode() for node in nodes]
    return [agree_on_settings(node, lambda _: sent) for node in nodes]


def test_nodes_that_were_started_alike_use_the_first_ones_secret() -> None:
    other = replace(CONFIG, disk_dir="/elsewhere", event_log="/log/b.jsonl")
    nodes = [settings_of(CONFIG, 0, "aa", {}), settings_of(other, 1, "bb", {})]
    assert agree(*nodes) == ["aa", "aa"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"host_size": 4.0}, "same --hier-kv-host-size on every node, got 8.0 on node 0 and 4.0"),
        ({"disk_dir": ""}, "same --hier-kv-disk-dir on every node, got 'set' on node 0 and 'none'"),
        ({"codec": "lossless"}, "same --hier-kv-codec on every node"),
    ],
)
def test_nodes_that_were_started_otherwise_are_refused_on_both(
    changed: dict[str, Any], sentence: str
) -> None:
    nodes = [settings_of(CONFIG, 0, "", {}), settings_of(replace(CONFIG, **changed), 1, "", {})]
    for own in nodes:
        with pytest.raises(HierKVConfigError, match=sentence):
            agree_on_settings(own, lambda _: [json.dumps(asdict(n)).encode() for n in nodes])


def test_nodes_with_other_releases_are_refused() -> None:
    nodes = [settings_of(CONFIG, node, "", {"release": node}) for node in range(2)]
    with pytest.raises(HierKVConfigError, match="same release on every node, got 0 on node 0"):
        agree(*nodes)


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("kv_cache_dtype", "auto", "fp8_e5m2"),
        ("schedule_policy", "fcfs", "lpm"),
        ("chunked_prefill_size", 2048, 4096),
        ("json_model_override_args", "{}", '{"rope_theta": 1}'),
        ("speculative_num_draft_tokens", None, 4),
        ("speculative_adaptive", False, True),
        ("mamba_track_interval", 256, 128),
        ("swa_full_tokens_ratio", 0.8, 0.5),
        ("attn_dp_size", 2, 4),
        ("moe_dense_tp_size", None, 1),
    ],
)
def test_nodes_with_other_arguments_of_sglang_are_refused(name: str, one: Any, two: Any) -> None:
    nodes = [
        settings_of(CONFIG, node, "", on_all_nodes({name: value}.get))
        for node, value in enumerate((one, two))
    ]
    with pytest.raises(HierKVConfigError, match=f"same --{name.replace('_', '-')} on every node"):
        agree(*nodes)


def test_nodes_that_adapt_their_guesses_by_other_files_are_refused(tmp_path: Path) -> None:
    def node(number: int, steps: list[int], name: str) -> NodeSettings:
        path = tmp_path / f"{number}-{name}"
        path.write_text(json.dumps({"1": {"candidate_steps": steps}}, indent=number))
        values = {"speculative_adaptive": True, "speculative_adaptive_config": str(path)}
        return settings_of(CONFIG, number, "", on_all_nodes(values.get))

    agree(node(0, [0, 3], "here"), node(1, [0, 3], "there"))
    with pytest.raises(HierKVConfigError, match="same --speculative-adaptive-config on every"):
        agree(node(0, [0, 3], "steps"), node(1, [0, 5], "steps"))


def test_what_nodes_may_have_of_their_own_is_not_compared() -> None:
    assert ON_ALL_NODES <= KNOWN
    own = {"host", "port", "node_rank", "model_path", "load_format", "mem_fraction_static"}
    assert not ON_ALL_NODES & own


def identity(own: torch.nn.Module, answers: list[list[bytes]]) -> ModelIdentity:
    """Of a rank whose group answers its exchanges one after the other; None is what it sent."""
    queue = iter(answers)

    def exchange(content: bytes) -> list[bytes]:
        return [answer or content for answer in next(queue)]

    return ModelIdentity(own, {}, {}, dict, exchange)


def store() -> PageStore:
    return PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())


def test_another_ranks_weights_open_another_namespace() -> None:
    """What a rank computes depends on the weights of all of them."""
    model = torch.nn.Linear(3, 3)
    found = [
        identity(model, [[b"", other], [b"", b"opened"]]).open(store())
        for other in (b"1" * 32, b"2" * 32, b"1" * 32)
    ]
    assert found[0] == found[2] != found[1]


def test_where_requests_differ_a_namespace_is_opened_by_the_change_of_weights_alone() -> None:
    """A request that only one rank has must not begin an exchange: the others would never come."""
    calls = 0

    def exchange(content: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        return [content, content]

    req, pages = SimpleNamespace(lora_id=None, extra_key=None), store()
    model = torch.nn.Linear(3, 3)
    apart = ModelIdentity(model, {}, {}, dict, exchange, serves_alike=False)
    opened = apart.open(pages)
    before = apart.space_of(req, pages)
    assert before is not None
    assert calls == 2

    def change(*, incomplete: bool) -> None:
        apart.begin_update(device_is_empty=True)
        torch.nn.init.zeros_(model.weight)
        apart.open_at_once(pages)  # a call within another one
        apart.end_update(device_is_empty=True, incomplete=incomplete)
        apart.open_at_once(pages)

    change(incomplete=True)
    assert apart.space_of(req, pages) is None
    assert calls == 2
    change(incomplete=False)
    apart.device_was_reset()
    assert calls == 4
    assert apart.open(pages) != opened
    assert apart.space_of(req, pages) not in (None, before)
    assert calls == 4


def test_no_rank_opens_a_namespace_that_another_cannot() -> None:
    requests = SimpleNamespace(lora_id=None, extra_key=None)
    failed: list[list[bytes]] = [[b"", b"1" * 32], [b"", b"?"]]
    whole = identity(torch.nn.Linear(3, 3), failed)
    assert whole.space_of(requests, store()) is not None

    def gone(content: bytes) -> list[bytes]:
        return [content, b""]

    half = ModelIdentity(torch.nn.Linear(3, 3), {}, {}, dict, gone)
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        half.open(store())
    assert half.space_of(requests, store()) is None


def test_a_namespace_that_is_final_is_not_opened_for_other_weights() -> None:
    """Not even when they come back: nobody looks at those of the other stages again."""
    model = torch.nn.Linear(2, 2)
    store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
    request: Any = SimpleNamespace(lora_id=None)
    exchanges: list[bytes] = []

    def exchange(content: bytes) -> list[bytes]:
        exchanges.append(content)
        return [content, b"another stage"]

    identity = ModelIdentity(model, {}, {}, dict, exchange, is_final=True)
    try:
        identity.open(store)
        assert identity.space_of(request, store) is not None
        num_exchanges = len(exchanges)
        for _ in range(2):
            identity.begin_update(device_is_empty=True)
            identity.end_update(device_is_empty=True)
            identity.device_was_reset()
            assert identity.space_of(request, store) is None
            assert identity.space_now(store) is None
        assert len(exchanges) == num_exchanges
    finally:
        store.close()
