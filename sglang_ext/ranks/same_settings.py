"""Ranks on several nodes were started by several command lines: what these must have in common.

On one node all ranks have the settings of one process, pickled. Runs once, at start.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from sglang_ext.errors import HierKVConfigError
from sglang_ext.ranks.rank import Exchange
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.values import flag_name, shown

# How long a node may come later than another; SGLang brings them together when weights are loaded.
_PATIENCE_S = 300.0
# Each node has its own; that one has any must be the same on all.
_OWN = frozenset({"disk_dir", "event_log", "key_file", "remote_url"})


@dataclass(frozen=True)
class NodeSettings:
    """What a rank was started with.

    Attributes:
        node: number of its node.
        values: by the name that a message has for it.
        secret: its node's, as hex; see `truncation.secret`.
    """

    node: int
    values: dict[str, Any]
    secret: str


def settings_of(
    config: HierKVConfig, node: int, secret: str, others: dict[str, Any]
) -> NodeSettings:
    """What a node has to have in common with others.

    Args:
        config: its settings, not yet divided among ranks.
        node: its number.
        secret: its lineage secret.
        others: releases and arguments that must be the same, too, by name.
    """
    values = {
        flag_name(name): ("set" if value else "none") if name in _OWN else value
        for name, value in asdict(config).items()
    }
    return NodeSettings(node, {**others, **values}, secret)


def agree_on_settings(own: NodeSettings, exchange: Exchange) -> str:
    """Compares what all ranks were started with; returns the secret that all of them use.

    Args:
        own: this rank's.
        exchange: among all ranks of the server; a blocking collective.

    Raises:
        HierKVConfigError: on every rank, if two nodes differ.
    """
    sent = exchange(json.dumps(asdict(own)).encode())
    found = [NodeSettings(**json.loads(content)) for content in sent]
    first = found[0]
    for other in found[1:]:
        name = _first_difference(first, other)
        if name is not None:
            one, two = (shown(each.values.get(name, "none")) for each in (first, other))
            raise HierKVConfigError(
                f"--enable-hier-kv needs the same {name} on every node, got {one} on node "
                f"{first.node} and {two} on node {other.node}; start all nodes alike."
            )
    return first.secret


def await_all(group: Any) -> None:
    """Waits until all ranks of a gloo group have come here; a node without the plugin never does.

    Only the first rank's wait is bounded, by `_PATIENCE_S`; when it ends, so do the others'.

    Raises:
        HierKVConfigError: one has not come in time.
    """
    try:
        distributed.monitored_barrier(group=group, timeout=timedelta(seconds=_PATIENCE_S))
    except RuntimeError as error:
        raise HierKVConfigError(
            f"--enable-hier-kv needs to be on on every node, and not all of them have said so in "
            f"{_PATIENCE_S:g} s; start all nodes with the same flags."
        ) from error


def _first_difference(one: NodeSettings, two: NodeSettings) -> str | None:
    names = sorted({*one.values, *two.values})
    return next((name for name in names if one.values.get(name) != two.values.get(name)), None)
