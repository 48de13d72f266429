"""Nodes compare what SGLang made of their arguments, by whatever names these were given."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_ext.errors import HierKVConfigError  # noqa: E402
from sglang_ext.ranks.same_settings import agree_on_settings, settings_of  # noqa: E402
from sglang_ext.seam.start.ranks import arguments_of_nodes  # noqa: E402
from sglang_ext.settings.arguments import on_all_nodes  # noqa: E402
from sglang_ext.settings.config import HierKVConfig  # noqa: E402
from testkit.server import TINYLM  # noqa: E402

NODES = {"tp_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000"}


def agree(*of_nodes: dict[str, Any]) -> None:
    """Has the first of several nodes compare what all were started with."""
    found = []
    for node, given in enumerate(of_nodes):
        args = ServerArgs(model_path=str(TINYLM), device="cpu", node_rank=node, **NODES, **given)
        args.resolve_once()
        found.append(settings_of(HierKVConfig(), node, "", arguments_of_nodes(args)))
    agree_on_settings(found[0], lambda _: [json.dumps(asdict(each)).encode() for each in found])


@pytest.mark.parametrize("name", ["SGLANG_PP_LAYER_PARTITION", "SGLANG_MAMBA_CONV_DTYPE"])
def test_nodes_whose_stages_or_states_are_others_by_variables_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace has a rank's own layers and states; what it computes comes from the others'."""
    found = []
    for node, value in enumerate(("5,3", "4,4")):
        monkeypatch.setenv(name, value)
        found.append(settings_of(HierKVConfig(), node, "", on_all_nodes(lambda _: None)))
    sent = [json.dumps(asdict(each)).encode() for each in found]
    with pytest.raises(HierKVConfigError, match=f"same {name} on every node, got '?5,3'? on node"):
        agree_on_settings(found[0], lambda _: sent)
    agree_on_settings(found[0], lambda _: [sent[0], sent[0]])


def by_old_names(num_groups: int) -> dict[str, Any]:
    return {"dp_size": num_groups, "enable_dp_attention": True}


@pytest.mark.parametrize("other", [by_old_names(2), {}])
def test_nodes_with_other_groups_of_attention_ranks_are_refused(other: dict[str, Any]) -> None:
    """SGLang starts the first two of these, and computes with groups that do not fit together."""
    with pytest.raises(HierKVConfigError, match="same --attn-dp-size on every node, got 4 on node"):
        agree(by_old_names(4), other)


def test_older_and_newer_names_of_the_same_arguments_are_alike() -> None:
    agree(by_old_names(2), {"attn_dp_size": 2})
