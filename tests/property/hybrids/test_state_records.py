"""States of a model in a store of which a part is lost, cut short, or another one: misses, counted.

One server stores what it has of two prompts; then a part of the furthest state of the first is
changed, and another server is asked for that prompt. It goes on behind the nearer state, or from
the beginning, never from what is not its own (the world compares), and leaves the store mended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.admission.miss_reasons import missed_pages
from sglang_ext.device.layout import ROPE_BOUND, write_tail
from sglang_ext.device.states.snapshots import part_hashes
from sglang_ext.device.transfers import hashes_from_hex
from sglang_ext.provenance.request_state import state_of
from sglang_ext.tiers.records.record import HEADER_BYTES, parse_header, write_meta
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig
from tests.faults.hostile_targets import DictEngine
from tests.faults.record_mutations import seal
from tests.property.worlds.state_world import StateWorld
from tests.property.worlds.window_world import PAGE, Request

pytestmark = pytest.mark.usefixtures("scheduler_waits")

NEAR, FAR = 2 * PAGE, 4 * PAGE  # where the two states are
PROMPT, OTHER = ([first + at % 50 for at in range(FAR + 2)] for first in (1, 2))
# Whatever the store is asked for anew is waited for, on any machine.
SIZES: dict[str, Any] = {"disk_bytes": 0, "host_pages": 400, "timeout_ms": 300_000.0}
Make = Callable[..., StateWorld]
Values = dict[str, bytes]
Name = Callable[[list[int], int, int], str]
"""A prompt, the tokens that a state is behind, and a part: its name in the store."""


class Change(NamedTuple):
    """What is done to the store.

    Attributes:
        do: to its values, with what names them and the number of a part.
        num_loaded: tokens that are loaded of the prompt then.
        counted: the store's counter that says so; "" where nothing is there that could be bad.
    """

    do: Callable[[Values, Name, int], None]
    num_loaded: int
    counted: str


def lost(values: Values, name: Name, part: int) -> None:
    del values[name(PROMPT, FAR, part)]


def cut_short(values: Values, name: Name, part: int) -> None:
    one = name(PROMPT, FAR, part)
    values[one] = values[one][:-64]


def bad_body(values: Values, name: Name, part: int) -> None:
    one = name(PROMPT, FAR, part)
    values[one] = values[one][:-64] + bytes(byte ^ 0xFF for byte in values[one][-64:])


def half_a_header(values: Values, name: Name, part: int) -> None:
    one = name(PROMPT, FAR, part)
    values[one] = values[one][: HEADER_BYTES // 2]


def of_another_prompt(values: Values, name: Name, part: int) -> None:
    values[name(PROMPT, FAR, part)] = values[name(OTHER, FAR, part)]


def of_another_position(values: Values, name: Name, part: int) -> None:
    values[name(PROMPT, FAR, part)] = values[name(PROMPT, NEAR, part)]


def another_part(values: Values, name: Name, part: int) -> None:
    values[name(PROMPT, FAR, part)] = values[name(PROMPT, FAR, 1)]


def of_another_length(values: Values, name: Name, part: int) -> None:
    """A forger's: the header is the part's own, but for the tokens that it is of."""
    forge(values, name(PROMPT, FAR, part), num_tokens=2 * PAGE)


def header_of_another_position(values: Values, name: Name, part: int) -> None:
    """A forger's: the page below says otherwise."""
    forge(values, name(PROMPT, FAR, part), position=PAGE)


def forge(values: Values, one: str, **fields: Any) -> None:
    slot = np.frombuffer(values[one], np.uint8).copy()
    meta, num_bytes = parse_header(slot)
    write_meta(slot, replace(meta, **fields), num_bytes)
    values[one] = seal(bytearray(slot.tobytes()))


CHANGES = [
    Change(lost, NEAR, ""),
    Change(half_a_header, NEAR, "error_rejected_bad_header"),
    Change(of_another_prompt, NEAR, "error_rejected_foreign"),
    Change(of_another_position, NEAR, "error_rejected_foreign"),
    Change(another_part, NEAR, "error_rejected_foreign"),
    Change(of_another_length, NEAR, "error_rejected_unsound"),
    # These are found out when the part is read; then the store is asked for less.
    Change(cut_short, NEAR, "error_rejected_incomplete"),
    Change(bad_body, NEAR, "error_rejected_bad_checksum"),
    Change(header_of_another_position, NEAR, "error_rejected_unsound"),
]
READ = (cut_short, bad_body, header_of_another_position)


@pytest.fixture
def make(build: Callable[..., Any]) -> Make:
    return partial(build, StateWorld)


class Stored(NamedTuple):
    """What a server left in the store.

    Attributes:
        values: by their names.
        made: what it computed, for the check of what others load.
        name: of a part.
        num_parts: of a state.
    """

    values: Values
    made: dict[Any, Any]
    name: Name
    num_parts: int


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    with pytest.MonkeyPatch.context() as patch:
        engine, remote = open_over({})
        world = StateWorld(tmp_path_factory.mktemp("first"), patch, 1, remote=remote, **SIZES)
        for tokens in (PROMPT, OTHER):
            world.run(tokens[: NEAR + 1])
            world.run(tokens)
        uploaded(world)

        def name(tokens: list[int], end: int, part: int) -> str:
            page = hashes_from_hex(world.keys(tokens, None, None)[end // PAGE - 1 :][:1])
            wanted = part_hashes(page, part).tobytes().hex()
            (found,) = (each for each in engine.values if each.split(":")[3] == wanted)
            return found

        num_parts = world.snapshots.num_parts
        names = {
            (id(tokens), end, part): name(tokens, end, part)
            for tokens in (PROMPT, OTHER)
            for end in (NEAR, FAR)
            for part in range(num_parts)
        }
        world.close()
    return Stored(
        dict(engine.values),
        dict(world.made),
        lambda tokens, end, part: names[id(tokens), end, part],
        num_parts,
    )


def open_over(values: Values) -> tuple[DictEngine, RemoteStore]:
    engine = DictEngine()
    engine.values = values
    remote = RemoteStore(engine, RemoteStoreConfig())
    assert remote.wait_usable(300.0)
    return engine, remote


def uploaded(world: StateWorld) -> None:
    def is_done() -> bool:
        stats = world.store.remote_stats()
        assert stats is not None
        return not stats["upload_queue"]

    world.wait_for(is_done)


@pytest.mark.parametrize("part", [0, -1])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.do.__name__)
def test_a_part_that_is_not_the_states_is_a_miss(
    make: Make, stored: Stored, change: Change, part: int
) -> None:
    number = range(stored.num_parts)[part]
    engine, remote = open_over(dict(stored.values))
    change.do(engine.values, stored.name, number)
    world = make(remote=remote, **SIZES)
    world.made.update(stored.made)
    assert world.run(PROMPT).num_loaded == change.num_loaded
    stats = remote.stats()
    found = {each: stats[each] for each in stats if each.startswith("error_")}
    assert found == ({change.counted: 1} if change.counted else {})
    asked_again = world.store.stats().get("remote_lookups_nearer", 0)
    assert asked_again == (change.do in READ)
    uploaded(world)
    assert engine.values == stored.values  # what is computed takes the place of what was bad


def test_a_page_that_proves_bad_has_what_is_before_it_asked_for(make: Make, stored: Stored) -> None:
    engine, remote = open_over(dict(stored.values))
    world = make(remote=remote, **SIZES)
    world.made.update(stored.made)
    pages = hashes_from_hex(world.keys(PROMPT, None, None))
    for page, num_loaded in ((NEAR // PAGE, NEAR), (NEAR // PAGE - 1, 0)):
        wanted = pages[page].tobytes().hex()
        (one,) = (each for each in engine.values if each.split(":")[3] == wanted)
        engine.values[one] = engine.values[one][:-64] + bytes(64)
        assert world.run(PROMPT).num_loaded == num_loaded
        uploaded(world)
        assert engine.values == stored.values
        world.flush()
        world.cache.clear_storage_backend()
    assert remote.stats()["error_rejected_bad_checksum"] == 2
    assert world.store.stats()["remote_lookups_nearer"] == 2


def test_states_whose_places_were_swapped_are_misses(make: Make, stored: Stored) -> None:
    engine, remote = open_over(dict(stored.values))
    for part in range(stored.num_parts):
        near, far = (stored.name(PROMPT, end, part) for end in (NEAR, FAR))
        engine.values[near], engine.values[far] = stored.values[far], stored.values[near]
    world = make(remote=remote, **SIZES)
    world.made.update(stored.made)
    assert world.run(PROMPT).num_loaded == 0
    assert remote.stats()["error_rejected_foreign"] == 2  # the first part of either
    uploaded(world)
    assert engine.values[stored.name(PROMPT, FAR, 0)] == stored.values[stored.name(PROMPT, FAR, 0)]


def test_a_part_whose_page_says_another_position_is_a_miss(make: Make, stored: Stored) -> None:
    """A forger's, with a right checksum: it is found out before it is loaded."""
    engine, remote = open_over(dict(stored.values))
    world = make(remote=remote, **SIZES)
    world.made.update(stored.made)
    one = stored.name(PROMPT, FAR, 1)
    slot = np.zeros(world.layout.slot_bytes, np.uint8)
    slot[: len(stored.values[one])] = np.frombuffer(stored.values[one], np.uint8)
    write_tail(slot, world.layout, rope_state=ROPE_BOUND, position=PAGE)
    engine.values[one] = slot[: len(stored.values[one])].tobytes()
    forge(engine.values, one, position=PAGE)
    assert world.run(PROMPT).num_loaded == 0
    assert world.store.stats()["damaged_pages"] == 1
    assert remote.stats()["error_rejected_unusable"] == 1
    uploaded(world)
    assert engine.values == stored.values


@pytest.mark.parametrize("has_page", [True, False])
@pytest.mark.parametrize("change", [bad_body, cut_short])
def test_what_proves_bad_leaves_the_state_that_is_on_disk(
    make: Make, stored: Stored, change: Callable[[Values, Name, int], None], has_page: bool
) -> None:
    """The store has nothing nearer, or there is nothing to ask it for: the disk has.

    It is not read yet when the store answers, as where others have all of DRAM's room.
    """
    near = NEAR if has_page else FAR - PAGE
    engine, remote = open_over({})
    world = make(remote=remote, **{**SIZES, "disk_bytes": 16 << 20})
    world.made.update(stored.made)
    world.run(PROMPT[: near + 1])
    uploaded(world)
    world.only_on_disk()
    engine.values.clear()
    engine.values.update(stored.values)
    for part in range(stored.num_parts):
        del engine.values[stored.name(PROMPT, NEAR, part)]
    change(engine.values, stored.name, 0)
    questions = world.cache.linker.place_questions
    assert questions is not None
    req = Request("asks", list(PROMPT), 0)
    world.enqueue(req)

    def is_answered() -> bool:
        questions.step()
        return not questions._open

    world.wait_for(is_answered)
    world.drain()
    assert req.num_loaded == near


def test_what_was_said_to_be_there_and_did_not_come_is_counted_as_failed(
    make: Make, stored: Stored
) -> None:
    """Whatever place the request was entered for last."""
    engine, remote = open_over(dict(stored.values))
    world = make(remote=remote, **SIZES)
    world.made.update(stored.made)
    for part in range(stored.num_parts):
        del engine.values[stored.name(PROMPT, NEAR, part)]
    bad_body(engine.values, stored.name, 0)
    req = Request("asks", list(PROMPT), 0)
    world.enqueue(req)
    wanted = state_of(req).wanted

    def may_run() -> bool:
        world.cache.check_hicache_events()
        return bool(world.cache.check_prefetch_progress(req.cache_request_handle))

    world.wait_for(may_run)
    space = world.identity.space_of(req, world.store)
    path = hashes_from_hex(world.keys(PROMPT, None, None))
    missed = missed_pages(world.store, space, path, 0, wanted.waiting, wanted.resumable)
    world.drain()
    assert missed == {"failed": FAR // PAGE}
