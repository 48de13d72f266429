"""Images of which several go by one number, and states: see `state_media_world`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.identity.media import images_of
from sglang_ext.settings.images import STATES, WITH_STATES
from tests.long_form import count
from tests.property.media.media_world import image_item, scheduler
from tests.property.media.state_media_world import StateMediaRequest, StateMediaWorld
from tests.property.worlds.coverage import run_until_counted
from tests.property.worlds.window_world import PAGE

pytestmark = pytest.mark.usefixtures("scheduler_waits")

SEEDS = count(3, 10)  # of each kind of world in turn
ROUNDS = count(1, 8)  # and on until all is seen
TEXT = [100 + at for at in range(6 * PAGE + 1)]
SPAN = (5, 16)  # begins and ends within pages
SPAN_BEFORE = SPAN[0] // PAGE * PAGE
WHOLE = 6 * PAGE
INSIDE = 4 * PAGE  # the last place in the image for a state
Make = Callable[..., StateMediaWorld]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    worlds: list[StateMediaWorld] = []

    def build(seed: int = 1, **options: Any) -> StateMediaWorld:
        worlds.append(StateMediaWorld(tmp_path / str(len(worlds)), monkeypatch, seed, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


def ask(
    world: StateMediaWorld, *items: Any, text: list[int] = TEXT, chunk: int | None = None
) -> StateMediaRequest:
    """One request from its arrival to its end; the world checks what it goes on from."""
    req = world.run_to_end(world.make(text, list(items)), chunk)
    world.cache.matching_request = None
    return req


def conflicts(world: StateMediaWorld) -> int:
    return world.store.counters.snapshot().get("image_name_conflicts", 0)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_request_goes_on_from_the_state_of_another_image(make: Make, seed: int) -> None:
    options: list[dict[str, Any]] = [{}, {"policy": "write_back"}, {"num_states": 26}]
    world = make(seed, host_pages=200, **options[seed % 3])

    shown = (
        "image_requests",
        "unnamed_image_requests",
        "loaded_pages",
        "saved_states",
        "image_name_conflicts",
    )
    run_until_counted(world, shown, num_rounds=ROUNDS)


@pytest.mark.parametrize("where", ["dram", "disk"])
def test_a_state_behind_and_inside_of_an_image_comes_back(make: Make, where: str) -> None:
    """And of another image, by the same number, none does."""
    world = make(host_pages=200, timeout_ms=300_000.0)
    drop = world.flush if where == "dram" else world.only_on_disk
    ask(world, image_item(0, SPAN), chunk=2 * PAGE)  # as are those behind it
    drop()
    assert ask(world, image_item(0, SPAN)).num_loaded == WHOLE
    drop()
    other_end = [*TEXT[:18], *range(1, 8)]
    ask(world, image_item(0, SPAN), text=other_end)  # the state there was left out; it is kept now
    drop()
    other_end = [*TEXT[:18], *range(11, 18)]
    assert ask(world, image_item(0, SPAN), text=other_end).num_loaded == INSIDE
    drop()
    assert ask(world, image_item(2, SPAN)).num_loaded == 0
    assert not conflicts(world)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_device_has_the_state_of_another_image(make: Make, is_late: bool) -> None:
    """A match leads to it; of one that is admitted SGLang notes it before anything else is asked.

    It is there before the request comes, or while that waits.
    """
    world = make(host_pages=200)
    req = world.make(TEXT, [image_item(2, SPAN)])
    if is_late:
        world.enqueue(req)
    ask(world, image_item(0, SPAN))
    if is_late:
        world.wait_for(lambda: world.admit(req))  # the world checks that its state is empty
        world.drain()
    else:
        world.run_to_end(req)
    assert images_of(req) == ()
    assert conflicts(world) == 1
    world.check_nothing_is_held()
    assert ask(world, image_item(2, SPAN)).num_loaded == 0, "nothing was kept of it"


@pytest.mark.parametrize("proved", [True, False])
def test_an_insert_that_meets_another_image_leaves_no_state_behind(
    make: Make, proved: bool
) -> None:
    """A match ends before the image, as its state does; the insert of what ends meets its page."""
    world = make(host_pages=200)
    text = TEXT[:13]
    first, second = image_item(0, (9, 11)), image_item(2, (9, 11))
    ask(world, first, text=text, chunk=8)
    if not proved:
        second.identity = None
    saved = world.store.stats()["saved_states"]
    req = world.make(text, [second], num_new=0)
    world.run_to_end(req)
    assert images_of(req) == ()
    assert conflicts(world) == 1
    assert world.store.stats()["saved_states"] == saved
    world.check_nothing_is_held()  # no state is lost
    assert ask(world, first, text=text).num_loaded == 12


def test_a_request_that_ends_meets_another_image_on_the_page_it_filled(make: Make) -> None:
    """Its prompt ended within that page, which was in no tree yet. Its states are given back."""
    world = make(host_pages=200)
    text = TEXT[: 2 * PAGE + 3]
    req = world.make(text, [image_item(2, (9, 9))], num_new=3)
    world.enqueue(req)
    world.wait_for(lambda: world.admit(req))
    longer = [*text, *(TEXT[11:20])]
    world.rng.randrange = lambda *_: longer[len(req.tokens)]  # type: ignore[method-assign]
    ask(world, image_item(0, (9, 9)), text=longer)
    while req in world.running:
        world.go_on(req)  # checks that it gave its state back
    assert images_of(req) == ()
    assert conflicts(world) == 1
    world.settle()
    world.check_nothing_is_held()


def test_a_turn_that_met_another_image_and_found_no_room_begins_with_no_state(make: Make) -> None:
    """Its match led to the state of the other image; its slot stays with it, and is as it was."""
    world = make(host_pages=200)
    session = SimpleNamespace(session_id="s", streaming=False)
    turn = world.make(TEXT, [image_item(2, SPAN)], session=session)
    world.enqueue(turn)
    ask(world, image_item(0, SPAN))
    world.refuse(turn)
    assert turn.kv.holds_mamba
    assert conflicts(world) == 1
    world.wait_for(lambda: world.admit(turn))  # the world checks that its state is empty
    world.drain()


@pytest.mark.parametrize(
    ("architecture", "keeps"),
    [
        ("KimiK3ForConditionalGeneration", STATES),
        (WITH_STATES[0], "windows"),
    ],
)
def test_images_of_other_models_with_states_leave_nothing_and_take_nothing(
    make: Make, architecture: str, keeps: str
) -> None:
    """Texts on the same server, also one that begins as such a prompt, are stored as ever."""
    world = make(host_pages=200)
    text = [*TEXT[:SPAN_BEFORE], *range(1, 4)]
    ask(world, image_item(0, SPAN))  # named, of a server that names them
    world.flush()
    world.cache.media.begin(scheduler(architecture), keeps=keeps)
    before = {name: world.store.stats()[name] for name in ("saved_pages", "saved_states")}
    for _ in range(2):
        req = ask(world, image_item(0, SPAN), chunk=2 * PAGE)
        assert (images_of(req), req.num_loaded) == ((), 0)
    assert {name: world.store.stats()[name] for name in before} == before
    ask(world, text=text)
    world.flush()
    assert ask(world, text=text).num_loaded == SPAN_BEFORE
    world.flush()
    assert ask(world, image_item(0, SPAN)).num_loaded == 0
    assert not conflicts(world)
