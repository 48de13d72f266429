"""Of a chat that grows the windows that only earlier turns needed are the first to leave."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.transfers import Hashes, hashes_from_hex
from sglang_ext.tiers.policy.page_kernels import DEMOTED, NUM_CLASSES
from sglang_ext.tiers.store.types import ON_DISK
from tests.long_form import count
from tests.property.hybrids.cut_window_world import CutWindowWorld
from tests.property.worlds import window_world
from tests.property.worlds.window_world import PAGE, Request, WindowWorld

pytestmark = pytest.mark.usefixtures("scheduler_waits")

LONGEST = 400  # tokens
# No page leaves for lack of room.
ROOMY: dict[str, Any] = {"device_pages": 300, "window_pages": 300, "host_pages": 2000}
Make = Callable[..., WindowWorld]


@pytest.fixture
def make(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(window_world, "MAX_TOKENS", LONGEST)
    return partial(build, WindowWorld)


def _text(number: int, num_tokens: int) -> list[int]:
    return [3 + (number * 37 + at * 5) % 110 for at in range(num_tokens)]


def _ask(world: WindowWorld, tokens: list[int], num_new: int) -> Request:
    """A turn of a chat, from its arrival to its end; saves land, and what follows them."""
    return _serve(world, Request(f"turn{world._next}", list(tokens), num_new))


def _serve(world: WindowWorld, turn: Request) -> Request:
    _begin(world, turn)
    _end(world, turn)
    return turn


def _begin(world: WindowWorld, turn: Request, chunk: int | None = None) -> None:
    """Its prompt is computed, or loaded, in the tree, and it runs."""
    world._next += 1
    world.enqueue(turn)
    world.wait_for(lambda: world.admit(turn, chunk))
    while turn.prefix_len < turn.prompt_len:
        world.go_on(turn)


def _end(world: WindowWorld, turn: Request) -> None:
    """Its answer is computed; saves land, of others that run, too."""
    while not turn.done:
        world.go_on(turn)
    world.poison()
    world.settle()


def _chat(world: WindowWorld, num_turns: int, first: int = 0, num_new: int = 14) -> Request:
    tokens: list[int] = []
    for number in range(first, first + num_turns):
        turn = _ask(world, [*tokens, *_text(number, 9)], num_new)
        tokens = turn.tokens
    return turn


def _read(world: WindowWorld, ends: set[int]) -> set[int]:
    """Pages that a token behind so many pages reads in a window layer: in front of any of these."""
    found = set()
    for end in ends:
        found |= {at // PAGE for at in range(max(0, end * PAGE - world.window), end * PAGE)}
    return found


def _own_ends(turn: Request) -> set[int]:
    """Where a turn may be gone on behind, or asked again."""
    prompt = turn.prompt_len
    # The KV of an answer's last token is not computed.
    return {(prompt - 1) // PAGE, prompt // PAGE, _num_pages(turn)}


def _num_pages(turn: Request) -> int:
    return turn.prefix_len // PAGE


def _windows(world: WindowWorld, turn: Request) -> Hashes:
    """Keys of the window layers of a turn's pages, `[groups, N, 32]`."""
    keys = world.keys(turn.tokens, None, None)[: _num_pages(turn)]
    layers = world.cache.hier_linker.windows
    assert layers is not None
    return layers.entries(hashes_from_hex(keys)).reshape(layers.num_groups, -1, 32)


def _kept(world: WindowWorld, turn: Request, *, on_disk: bool = False) -> tuple[set[int], set[int]]:
    """Pages of a turn of which window layers are stored: those that stay, and the first to leave.

    It stays where all groups do.
    """
    table, stay, leave = world.store._books.table, [], []
    number = world.identity.space_of(None, world.store).number
    order = table.disk_order if on_disk else table.order
    assert order is not None
    lists = order._lists
    with table.lock:
        for group in _windows(world, turn):
            rows = table.index.lookup(group, number)
            pages = np.flatnonzero(rows >= 0)
            pages = pages[lists.has(rows[pages])]
            demoted = lists._lists.home[rows[pages]] % NUM_CLASSES == DEMOTED
            stay.append(set(pages[~demoted].tolist()))
            leave.append(set(pages[demoted].tolist()))
    return set.intersection(*stay), set.union(*leave)


@pytest.mark.parametrize("window", [1, 6, 9, 23, 60])
def test_what_stays_of_a_chat_is_what_its_last_turn_needs(make: Make, window: int) -> None:
    """In DRAM and on disk, however many turns there were."""
    world = make(window=window, **ROOMY)
    tokens: list[int] = []
    for number in range(8):
        turn = _ask(world, [*tokens, *_text(number, 9)], 14)
        tokens = turn.tokens
        for on_disk in (False, True):
            stay, leave = _kept(world, turn, on_disk=on_disk)
            assert stay == _read(world, _own_ends(turn)), (number, on_disk)
            assert bool(leave) == (number > 0 and min(stay) > 0), (number, on_disk)
    assert world.store.stats()["superseded_pages"] == 2 * len(leave) * world.num_groups
    world.flush()
    again = _ask(world, turn.tokens[: turn.prompt_len], 0)
    assert again.num_loaded == (turn.prompt_len - 1) // PAGE * PAGE


def test_windows_that_may_move_are_kept_with_the_page_more(build: Callable[..., Any]) -> None:
    world = build(CutWindowWorld, window=6)
    assert world.cache.hier_linker.movable
    tokens: list[int] = []
    for number in range(3):
        turn = world.serve([*tokens, *_text(number, 13)], 5, key=None)
        tokens = turn.tokens
        world.settle()
    ends = _own_ends(turn)
    stay, leave = _kept(world, turn)
    assert stay == _read(world, ends) | {min(_read(world, {end})) - 1 for end in ends}
    assert leave


@pytest.mark.parametrize("seed", range(count(6, 60)))
def test_what_others_go_on_behind_stays(make: Make, seed: int) -> None:
    """Chats grow, part anywhere, and are asked again; against what each that may come next reads.

    A place is needed if it is one of the last turn's of some chat, or if two paths part there.
    """
    rng = random.Random(seed)
    world = make(seed, window=rng.choice((3, 6, 9, 17)), **ROOMY)
    turns: list[Request] = []
    for number in range(14):
        turns.append(_next_turn(world, rng, turns, number))
        if rng.random() < 0.3:
            world.flush()
        _check_needed(world, turns)
    assert world.store.stats()["superseded_pages"]


def _next_turn(
    world: WindowWorld, rng: random.Random, turns: list[Request], number: int
) -> Request:
    before = rng.choice(turns) if turns and rng.random() < 0.5 else turns[-1] if turns else None
    tokens: list[int] = [] if before is None else before.tokens
    kind = rng.random()
    if before is not None and kind < 0.15:
        return _ask(world, before.tokens[: before.prompt_len], rng.randint(14, 20))
    if kind < 0.3:
        tokens = tokens[: rng.randint(0, len(tokens))]
    new = _text(number, rng.randint(8, 20))
    if len(tokens) + 40 > LONGEST:
        tokens = []
    return _ask(world, [*tokens, *new], rng.randint(10, 20))


def _check_needed(world: WindowWorld, turns: list[Request]) -> None:
    """No window that somebody may go on behind is the first to leave."""
    paths = [world.keys(turn.tokens, None, None)[: _num_pages(turn)] for turn in turns]
    # Elsewhere nobody can go on, but by the chance that two windows make up a third.
    places = {end for turn in turns for end in _own_ends(turn) | {turn.num_loaded // PAGE}}
    for number, (turn, path) in enumerate(zip(turns, paths, strict=True)):
        needed: set[int] = set()
        # Who parts from its last page goes on with it: that may be of an answer's last tokens.
        most = len(path) - 1
        if not any(other[:most] == path[:most] for other in paths[number + 1 :]):
            needed = _own_ends(turn)
        for other in paths:
            pairs = zip(path, other, strict=False)
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            # A path that ends within a page of there may be the turn before.
            if min(len(path), len(other)) >= common + 2 and common in places:
                needed.add(common)
        leave = _kept(world, turn)[1] & _read(world, needed)
        assert not leave, (number, sorted(needed), sorted(leave))


@pytest.mark.parametrize("fork", [4, 7, 11, 13])
def test_a_place_where_a_request_parted_that_still_runs_stays(make: Make, fork: int) -> None:
    """The device's tree alone tells of it: the placement policy is told of a request that ends."""
    world = make(window=9, **ROOMY)
    first = _ask(world, _text(1, 54), 14)
    other = Request("other", [*first.tokens[: fork * PAGE], *_text(9, 10)], 14)
    _begin(world, other, 8)
    turn = _ask(world, [*first.tokens, *_text(2, 9)], 14)
    assert other in world.running
    stay, leave = _kept(world, turn)
    assert stay == _read(world, _own_ends(turn) | {fork})
    assert leave == _read(world, _own_ends(first)) - stay
    world.finish(other)
    world.flush()
    again = _ask(world, [*first.tokens[: fork * PAGE], *_text(17, 10)], 0)
    assert again.num_loaded == fork * PAGE


def test_they_leave_before_the_windows_of_a_chat_that_is_older(make: Make) -> None:
    world = make(window=9, device_pages=300, window_pages=300, host_pages=90, disk_bytes=0)
    old = _chat(world, 1, first=20)
    turn, number = _chat(world, 4), 0
    num_before = len(_kept(world, turn)[1])
    assert num_before > 4
    while len(_kept(world, turn)[1]) > num_before // 2:
        _ask(world, _text(30 + number, 9), 0)
        number += 1
        assert number < 40, "they stay"
    assert _read(world, _own_ends(old)) <= _kept(world, old)[0]
    assert _read(world, _own_ends(turn)) <= _kept(world, turn)[0]
    world.flush()
    for each in (old, turn):
        asked = _ask(world, [*each.tokens, 2], 0)
        assert asked.num_loaded == _num_pages(each) * PAGE


def test_what_only_dram_has_of_them_is_not_written(make: Make) -> None:
    """Of a full disk, until somebody goes on behind them once more."""
    world = make(window=9, policy="write_back", **ROOMY)
    writing = world.store._books.writing
    writing.note_full()
    second = _chat(world, 2)
    turn = _ask(world, [*second.tokens, *_text(5, 19)], 14)
    stay, leave = _kept(world, turn)
    assert leave
    writing.note_cleared()  # now it takes all that it is offered
    assert world.store.flush(300.0) == 0
    assert _written(world, turn) == stay
    _ask(world, [*second.tokens, *_text(6, 19)], 14)
    assert world.store.flush(300.0) == 0
    assert _written(world, second) >= _read(world, {_num_pages(second)}) & leave


def _written(world: WindowWorld, turn: Request) -> set[int]:
    """Pages of a turn of which the disk has window layers."""
    space = world.identity.space_of(None, world.store)
    flags = [world.store.page_states(space, group)[0] for group in _windows(world, turn)]
    return set(np.flatnonzero(np.bitwise_and.reduce(flags) & ON_DISK).tolist())


def test_they_stay_while_the_window_that_supersedes_them_is_not_stored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn whose saves are refused: the window of the one before is the best that is stored."""
    world = make(window=9, **ROOMY)
    turn = _chat(world, 2)
    before, first = _kept(world, turn), turn
    with monkeypatch.context() as patch:
        patch.setattr(world.cache.hier_linker, "offload_windows", lambda *_: False)
        turn = _ask(world, [*turn.tokens, *_text(5, 9)], 14)
    assert _kept(world, first) == before
    world.flush()
    turn = _ask(world, [*turn.tokens, *_text(6, 9)], 14)
    assert _kept(world, turn)[0] == _read(world, _own_ends(turn))
