"""Models with window layers, in random interleavings of all that a scheduler does.

By default some of the worlds, for a round each; the long form has all, for twenty.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.transfers import Place
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig
from sglang_ext.tiers.remote.breaker import BreakerConfig
from tests.long_form import count
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.hostile_engine import HostileEngine
from tests.property.worlds.window_world import PAGE, WindowWorld
from tests.tiers.protection_cases import protected_store

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(1, 20)  # of 400 steps, in each world
SEEDS = count(1, 3)
Make = Callable[..., WindowWorld]

WORLDS: dict[str, dict[str, Any]] = {
    "no multiple of the page": {"window": 6},
    "no look-ahead": {"window": 6, "lookahead": "off"},
    "write back": {"window": 8, "policy": "write_back"},
    "selective": {"window": 7, "policy": "selective", "host_pages": 24},
    "shorter than a page": {"window": 3, "window_pages": 24},
    "a full disk": {"window": 9, "host_pages": 20, "disk_bytes": 512 << 10},
    "no disk": {"window": 5, "disk_bytes": 0},
    "two shapes": {"window": 6, "two_shapes": True},
    "two shapes, written late": {"window": 9, "two_shapes": True, "policy": "write_back"},
    "coded on disk": {"window": 6, "coded": "disk"},
    "coded on a full disk": {
        "window": 9,
        "coded": "disk",
        "policy": "write_back",
        "host_pages": 20,
        "disk_bytes": 512 << 10,
    },
    "a full index": {"window": 6, "coded": "disk", "index_pages": 120},
    "coded in DRAM alone": {"window": 6, "coded": "host", "disk_bytes": 0},
    "coded in DRAM and on disk": {"window": 6, "coded": "host", "host_pages": 24},
    "one token": {"window": 1, "window_pages": 20, "prefetch_policy": "wait_complete"},
}


@pytest.fixture
def make(build: Callable[..., Any]) -> Make:
    return partial(build, WindowWorld)


@pytest.mark.sampled(
    "no multiple of the page-*",
    "write back-*",
    "selective-*",
    "shorter than a page-*",
    "two shapes-*",
    "coded on a full disk-*",
    "coded in DRAM and on disk-*",
    "one token-*",
)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", WORLDS)
def test_no_request_attends_to_rows_that_are_not_its_own(make: Make, name: str, seed: int) -> None:
    world = make(seed, **WORLDS[name])

    shown = ("loaded_pages", "saved_windows", "evicted_pages")
    run_until_all_seen(
        world.one_round, lambda: missing(world.store.stats(), shown), num_rounds=ROUNDS
    )
    print(name, seed, world.counts, world.store.stats())


# How records are protected, what the store does, and the world.
REMOTE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "honest": ("plain", {}, {}),
    "swaps parts": ("plain", {"lies": 0.2, "dies": 0.05}, {}),
    "swaps parts of two shapes": ("plain", {"lies": 0.2, "dies": 0.05}, {"two_shapes": True}),
    "says that pages are not exact": ("plain", {"lies": 0.2, "coarse": True}, {}),
    "forges headers": ("tag", {"lies": 0.2, "forges": True}, {}),
    "honest, with coded pages": ("plain", {"dies": 0.05}, {"coded": "remote"}),
    "swaps parts of coded pages": ("plain", {"lies": 0.2, "dies": 0.05}, {"coded": "remote"}),
    "forges headers of coded pages": ("tag", {"lies": 0.2, "forges": True}, {"coded": "remote"}),
}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", REMOTE)
def test_a_store_that_servers_share_gives_no_other_part_of_a_page(
    make: Make, name: str, seed: int
) -> None:
    mode, behaviour, shape = REMOTE[name]
    engine = HostileEngine(random.Random(seed + 3), **behaviour)
    config = RemoteStoreConfig(breaker=BreakerConfig(first_wait_s=0.01, max_wait_s=0.05))
    remote = RemoteStore(config=config, **protected_store(engine, mode))
    assert remote.wait_usable(300.0)
    world = make(seed, window=6, host_pages=24, disk_bytes=0, remote=remote, **shape)

    def unseen() -> list[str]:
        stats = {**world.store.stats(), "lies": engine.num_lies}
        shown = ["remote_promoted_pages", "saved_windows"]
        return missing(stats, tuple(shown + ["lies"] * bool(behaviour.get("lies"))))

    run_until_all_seen(world.one_round, unseen, num_rounds=ROUNDS)
    print(name, seed, engine.num_lies, world.counts, world.store.stats())


def test_rows_of_the_padding_page_are_not_saved(make: Make) -> None:
    """SGLang gives them to tokens whose window left; what is in them is everybody's."""
    world = make(window=6)
    linker, hashes = world.cache.hier_linker, np.arange(64, dtype=np.uint8).reshape(2, 32)
    assert world.identity.digest not in world.store._spaces.all_and_asked_for()[1]
    space = world.identity.space_of(None, world.store)
    rows = torch.arange(2 * PAGE) + 3 * PAGE
    rows[-1] = 0
    assert linker.offload_windows(Place(space, 0, hashes), hashes, rows)
    assert linker.quiesce()
    windows = linker.windows
    assert windows is not None
    assert not world.store.page_states(space, windows.entries(hashes))[0].any()
    assert world.store.stats()["save_unplaced_pages"] == 2 * windows.num_groups


def test_a_prompt_that_dram_has_no_room_for_is_resumed_where_it_has(make: Make) -> None:
    world = make(window=6, host_pages=24, device_pages=64, window_pages=64, timeout_ms=300_000.0)
    short = [1 + at % 120 for at in range(40)]
    long = [*short, *range(100, 139)]
    for tokens in (short, long):
        world.run(tokens)
        world.only_on_disk()
    # Its 19 pages and its windows are more than a plan may pin.
    assert world.run(long).num_loaded == len(short)
