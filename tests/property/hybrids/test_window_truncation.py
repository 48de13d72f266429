"""Conversations over their context on a model with window layers: nobody meets KV not theirs.

See `cut_window_world`. By default some of the worlds, for a round each; the long form has all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from sglang_ext.provenance.request_state import state_of
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.truncation.lineage import QuoteLineage, lineage_of
from tests.long_form import count
from tests.property.hybrids.cut_window_world import CutWindowWorld
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.hostile_engine import HostileEngine
from tests.property.worlds.truncation_world import CONTEXT
from tests.property.worlds.window_world import PAGE
from tests.tiers.protection_cases import protected_store

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(1, 20)  # of 400 steps, in each world
SEEDS = count(1, 3)

WORLDS: dict[str, dict[str, Any]] = {
    "no multiple of the page": {"window": 6},
    "write back": {"window": 8, "policy": "write_back"},
    "no look-ahead": {"window": 11, "lookahead": "off"},
    "little DRAM and a disk": {"window": 9, "host_pages": 60},
    "coded on disk": {"window": 6, "coded": "disk"},
    "one token": {"window": 1, "prefetch_policy": "wait_complete"},
}


@pytest.mark.sampled("no multiple of the page-*", "write back-*", "little DRAM and a disk-*")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", WORLDS)
def test_nobody_meets_kv_that_is_not_theirs(
    build: Callable[..., Any], name: str, seed: int
) -> None:
    world: CutWindowWorld = build(CutWindowWorld, seed, **WORLDS[name])

    def unseen() -> list[str]:
        seen = {
            **world.store.stats(), "cut": world.num_cut, "exact and cut": world.num_exact_cut,
            "quoting": world.num_quoting,
        }  # fmt: skip
        least = {
            "cut": 8, "exact and cut": 1, "quoting": 1, "moved_tokens": 40, "aliased_pages": 1,
            "saved_windows": 1, "loaded_pages": 1,
        }  # fmt: skip
        return missing(seen, least)

    run_until_all_seen(world.one_round, unseen, num_rounds=ROUNDS)
    print(world.num_cut, world.num_exact_cut, world.num_quoting, world.counts, world.store.stats())


# What a store that servers share does.
REMOTE: dict[str, dict[str, Any]] = {
    "is honest": {},
    "swaps parts": {"lies": 0.2, "dies": 0.05},
    "says that pages are not exact": {"lies": 0.2, "coarse": True},
}


@pytest.mark.sampled("swaps parts-*")
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", REMOTE)
def test_a_store_gives_no_kv_of_others_either(
    build: Callable[..., Any], name: str, seed: int
) -> None:
    behaviour = REMOTE[name]
    engine = HostileEngine(random.Random(seed + 3), **behaviour)
    config = RemoteStoreConfig(breaker=BreakerConfig(first_wait_s=0.01, max_wait_s=0.05))
    remote = RemoteStore(config=config, **protected_store(engine, "plain"))
    assert remote.wait_usable(300.0)
    world: CutWindowWorld = build(
        CutWindowWorld, seed, window=6, host_pages=60, disk_bytes=0, remote=remote
    )

    def unseen() -> list[str]:
        seen = {**world.store.stats(), "lies": engine.num_lies, "quoting": world.num_quoting}
        shown = ["remote_promoted_pages", "moved_tokens", "quoting"]
        return missing(seen, (*shown, *["lies"] * bool(behaviour)))

    run_until_all_seen(world.one_round, unseen, num_rounds=ROUNDS)
    print(name, seed, engine.num_lies, world.counts, world.store.stats())


def test_who_wants_exact_kv_computes_it_beside_what_was_moved(build: Callable[..., Any]) -> None:
    world: CutWindowWorld = build(CutWindowWorld, 1, window=6)
    tokens = [1 + at * 7 % 120 for at in range(CONTEXT + 20)]
    world.serve(tokens[: CONTEXT - 20], 2)
    world.settle()
    world.flush()
    moved = lineage_of(world.serve(tokens, 2))
    assert moved is not None
    assert moved.num_moved > 0
    # On the device now lie pages of the same prompt that were moved, and such that rest on them.
    exact = world.serve(tokens, 4, exact=True)
    assert state_of(exact).taint == Quality.EXACT
    again = world.serve(tokens, 4, exact=True)
    assert again.num_loaded == 0
    other = world.serve(tokens, 2)
    assert state_of(other).taint == Quality.APPROXIMATED
    world.drain()


@pytest.mark.parametrize("shared", [False, True])
def test_stored_text_is_found_behind_a_head_that_others_share(
    build: Callable[..., Any], shared: bool
) -> None:
    """The head's window is stored then, and so is all that a prompt needs to go on behind it."""
    world: CutWindowWorld = build(CutWindowWorld, 1, window=6, head_tokens=8)
    head = [100 + at for at in range(8)]
    text = [1 + at * 7 % 90 for at in range(50)]
    world.serve([*head, *text], 2, mode="all")
    for number in range(3 * shared):
        other = [3 + (at * 5 + number) % 90 for at in range(20)]
        world.serve([*head, *other], 2, mode="all")
    world.settle()
    world.flush()
    req = world.serve([*head, *text[27:], 5, 6, 7], 2, mode="all")
    assert isinstance(lineage_of(req), QuoteLineage)
    assert req.num_loaded >= len(head) + len(text[27:]) - 2 * PAGE
    world.drain()
