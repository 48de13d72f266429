"""Models with window layers or states: the waiting queue decides what stays for them, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.transfers import hashes_from_hex
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store.types import READY
from tests.property.worlds.state_world import StateWorld
from tests.property.worlds.window_world import PAGE, Request, WindowWorld

pytestmark = pytest.mark.usefixtures("scheduler_waits")

NUM_PROMPTS, PROMPT_PAGES = 48, 6
HOST_PROMPTS, DISK_PROMPTS = 4, 16

Build = Callable[..., Any]


@pytest.mark.parametrize("kind", [WindowWorld, StateWorld])
def test_what_the_queue_will_come_to_stays(build: Build, kind: type[WindowWorld]) -> None:
    """All prompts come again at once; DRAM and disk have room for a part of them."""
    on, off = (_pages_hit(partial(build, kind, lookahead=each)) for each in ("on", "off"))
    print(f"pages hit: look-ahead {on}, off {off}")
    assert on >= 2 * off, (on, off)
    assert on >= DISK_PROMPTS * PROMPT_PAGES / 3


@pytest.mark.parametrize("kind", [WindowWorld, StateWorld])
def test_a_prompt_is_prefetched_and_pinned_with_what_it_is_resumed_with(
    build: Build, kind: type[WindowWorld]
) -> None:
    world = build(kind, host_pages=64, prefetch_policy="best_effort")
    world.run(_prompt(0))
    world.only_on_disk()
    space = world.identity.space_of(None, world.store)
    pages = hashes_from_hex(world.keys(_prompt(0), None, None))
    wanted = world.cache.resumable(space, pages)
    assert len(wanted) > len(pages)

    def num_in_dram() -> int:
        return int(((world.store.page_states(space, wanted)[0] & READY) != 0).sum())

    assert num_in_dram() == 0
    prefix = ReusablePrefix(space, wanted, 0, max_quality=ANY)
    assert world.cache.waiting_room.prefetch(prefix)
    world.drain()
    assert num_in_dram() == len(wanted)
    lookahead = world.store.lookahead
    assert lookahead is not None
    lookahead.pin(space, wanted, owner=0, seconds=3600.0)
    assert world.store.stats()["pinned_pages"] == len(wanted)
    number = 1
    while world.store.stats()["evicted_pages"] < 4 * world.arena.num_slots:
        world.run(_prompt(number))
        number += 1
    world.flush()
    assert num_in_dram() == len(wanted)
    assert world.run(_prompt(0)).num_loaded == PROMPT_PAGES * PAGE


def test_of_a_prompt_of_whole_pages_both_windows_are_meant(build: Build) -> None:
    """Its own again is resumed before its last page, and what goes on with it behind that."""
    world = build(WindowWorld, host_pages=64)
    prompt = _prompt(0)[: PROMPT_PAGES * PAGE]
    world.run(prompt)
    space = world.identity.space_of(None, world.store)
    pages = hashes_from_hex(world.keys(prompt, None, None))
    meant = [page.tobytes() for page in world.cache.resumable(space, pages)]
    assert len(set(meant)) == len(meant)
    layers = world.cache.linker.resumption
    assert layers is not None
    for limit in (PROMPT_PAGES - 1, PROMPT_PAGES):
        wanted, end = layers.wish(space, pages, 0, limit)
        assert end == limit
        assert {page.tobytes() for page in wanted} <= set(meant), limit


@pytest.mark.parametrize("lookahead", ["on", "off"])
@pytest.mark.parametrize("kind", [WindowWorld, StateWorld])
def test_what_is_stored_while_a_request_waits_is_reused(
    build: Build, kind: type[WindowWorld], lookahead: str
) -> None:
    """Another one computes the same prompt meanwhile, and its pages leave device and DRAM."""
    world = build(kind, host_pages=64, prefetch_policy="wait_complete", lookahead=lookahead)
    waiting, other = (Request(name, _prompt(0), 0) for name in ("waiting", "other"))
    world.enqueue(waiting)
    world.enqueue(other)
    world.wait_for(partial(world.admit, other))
    while other in world.running:
        world.go_on(other)
    assert world.cache.hier_linker.quiesce()
    world.cache.check_hicache_events()
    world.wait_for(lambda: not world.store.stats()["spill_queue_pages"])
    world.check_nothing_is_held()  # evicts all of the device
    books = world.store._books
    with books.table.lock:
        books.room.evict(world.arena.num_slots)
    world.wait_for(partial(world.admit, waiting))
    assert waiting.num_loaded == PROMPT_PAGES * PAGE
    world.drain()


def _pages_hit(make: Build) -> int:
    world = make(host_pages=1024, disk_bytes=0)
    slots = _slots_of_a_prompt(world)
    world = make(
        host_pages=HOST_PROMPTS * slots,
        disk_bytes=DISK_PROMPTS * slots * world.layout.slot_bytes,
        prefetch_policy="wait_complete",
    )
    for number in range(NUM_PROMPTS):
        world.run(_prompt(number))
    world.flush()
    requests = [Request(f"again {number}", _prompt(number), 0) for number in range(NUM_PROMPTS)]
    for req in requests:
        world.enqueue(req)
    for req in requests:
        world.cache.quiesce()  # or the device has no room, and the request ends
        world.wait_for(partial(world.admit, req))
        while req in world.running:
            world.go_on(req)
    world.drain()
    return sum(req.num_loaded for req in requests) // PAGE


def _slots_of_a_prompt(world: WindowWorld) -> int:
    """What one of them takes, with its windows or states."""
    world.run(_prompt(0))
    return world.store.stats()["host_pages"]


def _prompt(number: int) -> list[int]:
    return [100 + number, *range(1, PROMPT_PAGES * PAGE + 1)]
