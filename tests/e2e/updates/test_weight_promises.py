"""Requests that were promised stored pages, and weights that change before they get them.

A request is held while its pages crawl from a slow disk, or is in another state; generation is
paused, the weights are replaced, with a flush or without, and generation goes on. What is answered
and what is stored afterwards must be the new weights' own.

By default what found the fault runs with one rank, one case with two, and a sample of the rest; the
long form has every way, state, pause mode and flush.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.server import TINYLM, Server
from tests.e2e.updates import weight_models
from tests.e2e.updates.weight_answers import NOISE, ROUNDING, Answer, distance
from tests.e2e.updates.weight_states import (
    BEGIN,
    MODES,
    PROMPTS,
    Case,
    Rig,
    check_tiers,
    computed,
    name_of,
    paused,
    slow_server,
    speed_file,
)
from tests.e2e.updates.weight_ways import IPC_ENVIRONMENT, WAYS
from tests.long_form import FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STATES = tuple(BEGIN)


ATTACK = Case("disk", "held", "in_place", False)
SAMPLE = [
    ATTACK,
    Case("disk", "chunked", "retract", True),
    Case("disk", "running", "retract", False),
]


def cases() -> list[Case]:
    """The matrix, or a sample of it."""
    if not FACTOR:
        return SAMPLE
    everything = itertools.starmap(Case, itertools.product(WAYS, STATES, MODES, (False, True)))
    # SGLang asserts that nothing runs when memory is released.
    return [
        case
        for case in everything
        if case.way != "release-resume" or case.state == "held" or case.mode != "in_place"
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=name_of)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("promises")
    models = {
        "first": TINYLM,
        "other": weight_models.variant(folder / "other", weight_models.strange(1)),
    }
    with slow_server(folder, request.param, env=IPC_ENVIRONMENT) as server:
        fresh = {}
        for name in ("other", "first"):
            replace(server, models[name])
            fresh[name] = [computed(server, prompt) for prompt in PROMPTS]
        yield Rig(request.param, server, speed_file(folder), models, fresh, {})


def replace(server: Server, model: Path) -> None:
    assert WAYS["disk"](server, model, True) == [(True, 200)]


def test_the_models_are_told_apart(rig: Rig) -> None:
    for one, other in zip(rig.fresh["first"], rig.fresh["other"], strict=True):
        assert distance(one, other) > NOISE


@pytest.mark.sampled("tp1-*", "tp2-disk-chunked-*")
@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_promises_do_not_outlive_their_weights(rig: Rig, case: Case) -> None:
    """One cell, on a server with what the cells before it left behind."""
    old, new = ("first", "other") if cases().index(case) % 2 == 0 else ("other", "first")
    replies = run_case(rig, case, old, new)
    if case.state == "held" and case.mode != "abort":
        # Nothing was on the device: it is what the new weights answer, whatever was promised.
        assert distance(replies[0], rig.fresh[new][0]) < ROUNDING
    check_tiers(rig, new)


def test_what_was_stored_before_is_still_right(rig: Rig) -> None:
    """Pages of both models, from before all those changes and between them."""
    for name, model in rig.models.items():
        replace(rig.server, model)
        check_tiers(rig, name)


def run_case(rig: Rig, case: Case, old: str, new: str) -> list[Answer]:
    """Takes requests to a state, replaces the weights in a pause and lets them end."""
    server = rig.server
    replace(server, rig.models[old])

    def update() -> None:
        answers = WAYS[case.way](server, rig.models[new], case.flush)
        # SGLang refuses to flush under what runs, and says so; the weights are new all the same.
        assert all(ok for ok, _ in answers) or (case.flush and case.mode == "in_place"), answers

    return paused(rig, case, update)
