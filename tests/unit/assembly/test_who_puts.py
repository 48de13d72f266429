"""Which ranks put all of their pages into a remote store, and which share them out."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.assembly.remote_setup import are_alike, put_share
from sglang_ext.device.pools import DevicePool
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.tiers.store import EVERY_PAGE, PutShare


def pool(kind: str) -> DevicePool:
    rows = (torch.zeros(64, 1, 24),)
    return DevicePool(kind, torch.float32, rows, () if kind == "mla" else rows, 16, 64)


@pytest.mark.parametrize(
    ("kind", "is_alone", "tp_size", "expected"),
    [
        ("mla", True, 8, True),
        ("mla", True, 1, False),
        ("mla", False, 8, False),
        ("indexed", True, 8, True),
        ("indexed", False, 8, False),
        ("mha", True, 8, False),
    ],
)
def test_ranks_of_mla_hold_the_same(
    kind: str, is_alone: bool, tp_size: int, expected: bool
) -> None:
    place = RankPlace(0, tp_size)
    assert are_alike(pool(kind), place, is_alone=is_alone) == expected


@pytest.mark.parametrize(("cp_size", "expected"), [(1, False), (2, False), (4, True)])
def test_context_parallel_ranks_with_all_heads_hold_the_same(cp_size: int, expected: bool) -> None:
    place = RankPlace(1, 4, cp_size=cp_size)
    assert are_alike(pool("mha"), place, is_alone=True) == expected
    assert not are_alike(pool("mha"), place, is_alone=False)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (RankPlace(2, 8), PutShare(2, 8)),
        # Of 8 ranks with data parallel attention 2 share a request's.
        (RankPlace(1, 2, 3, 4, shares_steps=True), PutShare(1, 2)),
        (RankPlace(9, 16, num_nodes=2), PutShare(1, 8)),
        (RankPlace(1, 2, num_nodes=2), EVERY_PAGE),
        # A node has whole groups, one of them or two;
        (RankPlace(1, 2, 1, 2, shares_steps=True, num_nodes=2), PutShare(1, 2)),
        (RankPlace(1, 2, 3, 4, shares_steps=True, num_nodes=2), PutShare(1, 2)),
        (RankPlace(0, 1, 1, 2, shares_steps=True, num_nodes=2), EVERY_PAGE),
        # or a part of one;
        (RankPlace(2, 4, 1, 2, shares_steps=True, num_nodes=4), PutShare(0, 2)),
        (RankPlace(0, 2, 1, 2, shares_steps=True, num_nodes=4), EVERY_PAGE),
        # or, of three groups of two ranks on two nodes, one and a half.
        (RankPlace(1, 2, 0, 3, shares_steps=True, num_nodes=2), PutShare(1, 2)),
        (RankPlace(0, 2, 1, 3, shares_steps=True, num_nodes=2), EVERY_PAGE),
        (RankPlace(1, 2, 1, 3, shares_steps=True, num_nodes=2), EVERY_PAGE),
        (RankPlace(0, 2, 2, 3, shares_steps=True, num_nodes=2), PutShare(0, 2)),
    ],
)
def test_each_node_puts_every_page_once(place: RankPlace, expected: PutShare) -> None:
    assert put_share(place) == expected
