"""Requests of a LoRA adapter that wait, run or load, and adapters that change meanwhile.

Another adapter is loaded or unloaded beside them, or theirs is replaced by one with other weights
at the same name and path, which SGLang gives the same id. What is answered is the weights' own that
the request began with, and what is stored is what the weights compute that it is asked for with.

By default a sample runs, on one rank; the long form has every way, state, pause mode and flush.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.updates import weight_models
from tests.e2e.updates.weight_answers import NOISE, ROUNDING, distance
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
from tests.e2e.updates.weight_ways import (
    LORA,
    UNPINNED,
    call,
    load_adapter,
    load_adapter_tensors,
    unload_adapter,
)
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Step = Callable[[], None]


def replaced(rig: Rig, flush: bool) -> tuple[Step, Step]:
    """SGLang lets the requests of an adapter end before it unloads it."""

    def after() -> None:
        unload_adapter(rig.server, "tone")
        weight_models.copy_adapter(rig.models["other"], rig.models["tone"])
        load_adapter(rig.server, "tone", rig.models["tone"])
        if flush:
            flush_device(rig.server)

    return lambda: None, after


def other(rig: Rig, flush: bool) -> tuple[Step, Step]:
    """Another adapter comes in the pause, from a folder, and goes when generation goes on."""
    return changed_beside(rig, flush, load_adapter)


def other_from_tensors(rig: Rig, flush: bool) -> tuple[Step, Step]:
    """The same, from memory."""
    return changed_beside(rig, flush, load_adapter_tensors)


def changed_beside(
    rig: Rig, flush: bool, load: Callable[[Server, str, Path], None]
) -> tuple[Step, Step]:
    def beside() -> None:
        load(rig.server, "beside", rig.models["other"])
        if flush:  # SGLang refuses it under what runs
            call(rig.server, "/flush_cache")

    return beside, lambda: unload_adapter(rig.server, "beside")


CHANGES: dict[str, Callable[[Rig, bool], tuple[Step, Step]]] = {
    "replace": replaced,
    "other": other,
    "other-from-tensors": other_from_tensors,
}

SAMPLE = [
    Case("replace", "held", "in_place", False),
    Case("other-from-tensors", "running", "retract", True),
]


def cases() -> list[Case]:
    """The matrix, or a sample of it."""
    everything = itertools.starmap(Case, itertools.product(CHANGES, BEGIN, MODES, (False, True)))
    return either(SAMPLE, list(everything))


@pytest.fixture(scope="module", params=either([1], [1, 2]), ids=name_of)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("adapters")
    models = {
        name: weight_models.adapter(folder / name, seed)
        for seed, name in enumerate(("tone", "first", "other"))
    }
    with slow_server(folder, request.param, *LORA, env=UNPINNED) as server:
        fresh = {"base": [computed(server, prompt) for prompt in PROMPTS]}
        flush_device(server)
        fields = {"lora_path": "tone"}
        for name in ("other", "first"):
            put(server, models, name)
            fresh[name] = [computed(server, prompt, **fields) for prompt in PROMPTS]
            unload_adapter(server, "tone")
        put(server, models, "first")
        yield Rig(request.param, server, speed_file(folder), models, fresh, fields)


def put(server: Server, models: dict[str, Path], name: str) -> None:
    """Loads the adapter "tone", always of one path, with the weights of another folder."""
    weight_models.copy_adapter(models[name], models["tone"])
    load_adapter(server, "tone", models["tone"])
    flush_device(server)


def test_the_adapters_are_told_apart(rig: Rig) -> None:
    for one, other in itertools.combinations(rig.fresh, 2):
        for a, b in zip(rig.fresh[one], rig.fresh[other], strict=True):
            assert distance(a, b) > NOISE, (one, other)


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_no_promise_is_kept_with_another_adapters_kv(rig: Rig, case: Case) -> None:
    """One cell; the adapter that is asked for is "first" before and after it."""
    beside, after = CHANGES[case.way](rig, case.flush)
    replies = paused(rig, case, beside, after)
    if case.state == "held" and case.mode != "abort":
        assert distance(replies[0], rig.fresh["first"][0]) < ROUNDING, "as it began"
    name = "other" if case.way == "replace" else "first"
    try:
        check_tiers(rig, name, **rig.fields)
        check_tiers(rig, "base")
    finally:
        if case.way == "replace":
            unload_adapter(rig.server, "tone")
            put(rig.server, rig.models, "first")
    check_tiers(rig, "first", **rig.fields)
