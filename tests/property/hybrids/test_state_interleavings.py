"""Models with a state a sequence, in random interleavings of all that a scheduler does.

By default some of the worlds, for a round each; the long form has all, for twenty.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.layout import ROPE_BOUND, write_tail
from sglang_ext.device.transfers import hashes_from_hex
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.store.types import ON_DISK, READY, WRITE_DROPPED
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.hostile_engine import HostileEngine
from tests.property.worlds.state_world import TRACK, StateWorld
from tests.property.worlds.window_world import PAGE, Request
from tests.tiers.protection_cases import protected_store

from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # isort: skip
from tests.long_form import count

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(1, 20)  # of 400 steps, in each world
SEEDS = count(1, 3)
Make = Callable[..., StateWorld]

WORLDS: dict[str, dict[str, Any]] = {
    "write through": {},
    "no look-ahead": {"lookahead": "off"},
    "write back": {"policy": "write_back"},
    "few states on the device": {"num_states": 26},
    "selective": {"policy": "selective", "host_pages": 200},
    "a full disk": {"host_pages": 32, "disk_bytes": 512 << 10},
    "coded on disk": {"coded": "disk"},
    "coded on a full disk": {
        "coded": "disk",
        "policy": "write_back",
        "host_pages": 32,
        "disk_bytes": 512 << 10,
    },
    "a full index": {"coded": "disk", "policy": "write_back", "index_pages": 160},
    "coded in DRAM alone": {"coded": "host", "disk_bytes": 0},
    "coded in DRAM and on disk": {"coded": "host", "host_pages": 40},
    "no disk": {"host_pages": 200, "disk_bytes": 0, "prefetch_policy": "wait_complete"},
}


@pytest.fixture
def make(build: Callable[..., Any]) -> Make:
    return partial(build, StateWorld)


@pytest.mark.sampled(
    "write through-*",
    "write back-*",
    "few states on the device-*",
    "selective-*",
    "coded on a full disk-*",
    "coded in DRAM and on disk-*",
    "no disk-*",
)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", WORLDS)
def test_no_request_goes_on_from_what_is_not_its_own(make: Make, name: str, seed: int) -> None:
    world = make(seed, **WORLDS[name])

    shown = ("loaded_pages", "saved_states", "evicted_pages")
    run_until_all_seen(
        world.one_round, lambda: missing(world.store.stats(), shown), num_rounds=ROUNDS
    )
    print(name, seed, world.counts, world.store.stats())


CODED = {"coded": "remote"}
# How records are protected, what the store does, and the world.
REMOTE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "honest": ("plain", {}, {}),
    "swaps parts": ("plain", {"lies": 0.2, "dies": 0.05}, {}),
    "says that pages are not exact": ("plain", {"lies": 0.2, "coarse": True}, {}),
    "forges headers": ("tag", {"lies": 0.2, "forges": True}, {}),
    "bodies that are bad": ("plain", {"lies": 0.2, "rots": True, "dies": 0.02}, {}),
    "honest, with coded parts": ("plain", {"dies": 0.05}, CODED),
    "swaps coded parts": ("plain", {"lies": 0.2, "dies": 0.05}, CODED),
    "forges headers of coded parts": ("tag", {"lies": 0.2, "forges": True}, CODED),
    "says that coded parts are not exact": ("plain", {"lies": 0.2, "coarse": True}, CODED),
    "swaps parts, some of them coded": (
        "plain", {"lies": 0.2, "dies": 0.05}, {"coded": "remote, sometimes"},
    ),
    "coded bodies that are bad": ("plain", {"lies": 0.2, "rots": True, "dies": 0.02}, CODED),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", REMOTE)
def test_a_store_that_servers_share_gives_no_other_part_of_a_state(
    make: Make, name: str, seed: int
) -> None:
    mode, behaviour, shape = REMOTE[name]
    engine = HostileEngine(random.Random(seed + 3), **behaviour)
    config = RemoteStoreConfig(breaker=BreakerConfig(first_wait_s=0.01, max_wait_s=0.05))
    remote = RemoteStore(config=config, **protected_store(engine, mode))
    assert remote.wait_usable(300.0)
    world = make(seed, host_pages=32, disk_bytes=0, remote=remote, **shape)

    def unseen() -> list[str]:
        stats = {**world.store.stats(), "lies": engine.num_lies}
        shown = ["remote_promoted_pages", "saved_states"]
        return missing(stats, tuple(shown + ["lies"] * bool(behaviour.get("lies"))))

    run_until_all_seen(world.one_round, unseen, num_rounds=ROUNDS)
    print(name, seed, engine.num_lies, world.counts, world.store.stats())


def test_what_left_of_a_state_is_saved_again_as_it_was(make: Make) -> None:
    """Some of its parts leave DRAM and are nowhere else; the tree has the state still."""
    world = make(disk_bytes=0, host_pages=200)
    tokens = [1 + at % 50 for at in range(3 * PAGE + 2)]
    world.run(tokens)
    space = world.identity.space_of(None, world.store)
    page = hashes_from_hex(world.keys(tokens, None, None)[2:3])
    entries = world.snapshots.entries(page)
    assert len(entries) > 3
    assert world.store.page_states(space, entries)[0].all()
    ticket = world.store.pin_ready(space, entries[1:4:2])
    assert ticket is not None
    world.store.drop_damaged(ticket, np.arange(2))
    world.store.release(ticket.slots)
    there = world.store.page_states(space, entries)[0] != 0
    assert np.flatnonzero(~there).tolist() == [1, 3]
    world.run([*tokens[: 3 * PAGE], 77, 78])
    assert world.store.page_states(space, entries)[0].all()
    world.flush()
    assert world.run([*tokens, 79]).num_loaded == 3 * PAGE


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_turn_that_was_refused_once_begins_with_no_state_of_others(
    make: Make, is_stored: bool
) -> None:
    """A turn of an ordinary session keeps the slot of its first match, which nobody has written.

    What it matched leaves the device while it waits; then it comes back from DRAM, or is computed.
    """
    world = make(disk_bytes=0, host_pages=200)
    tokens = [1 + at % 50 for at in range(3 * PAGE + 2)]
    first = Request("first", list(tokens), 0)
    world.enqueue(first)
    world.wait_for(lambda: world.admit(first))
    while world.running:
        world.go_on(first)
    world.settle()
    session = SimpleNamespace(session_id="s", streaming=False)
    turn = Request("turn", [*tokens, 79], 0, session=session)
    world.enqueue(turn)
    world.refuse(turn)
    assert turn.kv.holds_mamba
    world.cache.evict(EvictParams(num_tokens=1 << 20, mamba_num=1 << 20))
    world.poison()
    if not is_stored:
        world.cache.clear_storage_backend()
    world.wait_for(lambda: world.admit(turn))  # the world checks what it begins with
    assert bool(turn.num_loaded) == is_stored
    world.drain()


def test_a_part_with_another_position_is_a_miss(make: Make) -> None:
    """As memory that went wrong would have it."""
    world = make(disk_bytes=0, host_pages=200)
    tokens = [1 + at % 50 for at in range(3 * PAGE + 2)]
    world.run(tokens)
    world.flush()
    space = world.identity.space_of(None, world.store)
    page = hashes_from_hex(world.keys(tokens, None, None)[2:3])
    ticket = world.store.pin_ready(space, world.snapshots.entries(page)[2:3])
    assert ticket is not None
    (slot,) = ticket.slots.tolist()
    write_tail(world.arena.slots[slot], world.layout, rope_state=ROPE_BOUND, position=PAGE)
    world.store.release(ticket.slots)
    assert world.run([*tokens, 79]).num_loaded < 3 * PAGE
    assert world.store.stats()["load_vanished"] == 1


def _turn(world: StateWorld, tokens: list[int], num_new: int) -> Request:
    """A turn of a chat, from its arrival to its end; saves land."""
    turn = Request(f"turn{len(tokens)}", list(tokens), num_new)
    world.enqueue(turn)
    world.drain()
    world.note_pages(turn)
    world.settle()
    return turn


def test_a_growing_chat_goes_on_where_the_device_would_with_fewer_states(make: Make) -> None:
    """A turn keeps the state behind its answer, and not that behind its prompt, which is near."""
    world = make(disk_bytes=0, host_pages=600)
    tokens, last = [1 + at % 50 for at in range(2 * PAGE + 1)], 0
    for number in range(3):
        turn = _turn(world, tokens, 2 * TRACK - 1)
        assert turn.num_loaded == last
        # Where its decode came to a state last: nothing behind that can be gone on from.
        last = len(turn.tokens) // TRACK * TRACK
        tokens = [*turn.tokens, *range(60 + number, 60 + number + 6)]
        world.flush()
    counted = world.store.stats()
    assert counted["saved_states"] == 1 + 3, counted  # of the first prompt, too
    assert counted["unsaved_states"] >= 2, counted
    assert counted["superseded_pages"] >= world.snapshots.num_parts, counted
    assert world.run(tokens).num_loaded == last


def test_a_state_where_paths_part_is_kept_however_near_the_one_before_is(make: Make) -> None:
    world = make(disk_bytes=0, host_pages=600)
    shared = [1 + at % 50 for at in range(5 * PAGE)]
    for number, device_has_the_other in enumerate((True, False, False)):
        world.run([*shared[: 4 * PAGE], 100 + number, *shared[:PAGE]])
        if not device_has_the_other:
            world.flush()
    world.flush()
    assert world.run([*shared[: 4 * PAGE], 120]).num_loaded == 4 * PAGE


def test_states_stay_while_the_one_that_supersedes_them_is_not_stored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn whose saves are refused: the state of the one before is the best that is stored."""
    world = make(disk_bytes=0, host_pages=600)
    tokens, left = [1 + at % 50 for at in range(2 * PAGE + 1)], []
    for number, is_refused in enumerate((False, True, False)):
        with monkeypatch.context() as patch:
            if is_refused:
                patch.setattr(world.cache.hier_linker, "offload_state", lambda *_: False)
            turn = _turn(world, tokens, 2 * TRACK - 1)
        left.append(world.store.stats().get("superseded_pages", 0))
        tokens = [*turn.tokens, 60 + number, 70]
        world.flush()
    assert left[0] == left[1] < left[2], left


def _turn_on_device(world: StateWorld, tokens: list[int]) -> Request:
    """The same with an answer, and what the device has then stays there."""
    turn = Request(f"turn{world._next}", list(tokens), 2 * TRACK - 1)
    world._next += 1
    world.enqueue(turn)
    world.wait_for(lambda: world.admit(turn))
    while world.running:
        world.go_on(turn)
    world.note_pages(turn)
    world.settle()
    return turn


def test_a_state_that_paths_part_behind_on_the_device_stays_again(make: Make) -> None:
    """It was let leave, and not written; who goes on behind it needs nothing of DRAM or disk."""
    world = make(policy="write_back", host_pages=600, device_pages=200)
    world.store._books.writing.note_full()
    turn = first = _turn_on_device(world, [1 + at % 50 for at in range(2 * PAGE + 1)])
    end = len(first.tokens) // TRACK * TRACK
    for number in range(2):
        turn = _turn_on_device(world, [*turn.tokens, *range(60 + number, 66 + number)])
    table = world.store._books.table
    page = hashes_from_hex(world.keys(first.tokens, None, None)[end // PAGE - 1 : end // PAGE])
    state, space = world.snapshots.entries(page), world.identity.space_of(None, world.store)
    rows = table.index.lookup(state, space.number)
    assert (table.index.flags[rows] == READY | WRITE_DROPPED).all()
    other = _turn_on_device(world, [*first.tokens[:end], 90, *range(70, 76)])
    assert other.num_loaded == 0
    assert (table.index.flags[rows] == READY).all()
    assert not set(rows.tolist()) & set(table.order.next_to_leave(len(rows), 0.0).tolist())
    world.store._books.writing.note_cleared()
    assert world.store.flush(300.0) == 0
    assert (table.index.flags[rows] == READY | ON_DISK).all()
