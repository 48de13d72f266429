"""Prompts with images in two pipeline stages, their page stores late, each by its own chance.

Two stages of plain SGLang say what is right. SGLang's rank consensus checker is on: it ends the
server when ranks decide differently.

By default a model with states, from DRAM. The long form has one without states, too, and kills the
server: another one goes on with its disk, on a small device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.hybrids.image_model import DEEP_IMAGE_MODEL, write_image_model
from testkit.images.vision_model import write_vision_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import send_in_halves, settled
from tests.e2e.images.asked_in_turn import (
    MANY,
    Plain,
    Told,
    ask_in_turn,
    ask_plain,
    check_alike,
    check_unnamed,
)
from tests.e2e.images.image_prompts import (
    BASE,
    LARGE,
    PLUGIN,
    Prompt,
    answers,
    ask,
    check_right,
    host_size,
    prompts,
)
from tests.e2e.models.hybrid_answers import check_hits, values

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.newest_release,
    pytest.mark.sampled("states"),
]

NUM_AT_ONCE = 20


@dataclass(frozen=True)
class Kind:
    """A model in stages.

    Attributes:
        write: writes it into a new folder.
        layers: of each stage.
        large: arguments of a device that keeps all of a test's prompts.
        small: those of one that does not.
    """

    write: Callable[[Path], Path]
    layers: str
    large: tuple[str, ...]
    small: tuple[str, ...]


KINDS = {
    "plain": Kind(write_vision_model, "3,1", LARGE, ("--max-total-tokens", "1536")),
    "states": Kind(
        partial(write_image_model, kind=DEEP_IMAGE_MODEL), "4,4",
        (*LARGE, "--max-mamba-cache-size", "100"),
        ("--max-total-tokens", "3072", "--max-mamba-cache-size", "32"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What two stages without the plugin answered, and what two with it did.

    Attributes:
        plain: without it.
        told: with it.
        go_on: starts the next one.
    """

    plain: Plain
    told: Told
    go_on: Callable[[], Server]


@dataclass(frozen=True)
class ServedNext:
    """What two stages on a small device answered, with the disk of those that were killed.

    Attributes:
        from_disk: to what was asked before.
        at_once: what was asked by several at a time, and the answers.
        counters: of the server.
        log: of it.
    """

    from_disk: list[Any]
    at_once: list[tuple[Prompt, Any]]
    counters: dict[str, Any]
    log: str


def stages(
    kind: Kind, model: Path, args: Sequence[str], folder: Path | None = None, host_pages: int = 0
) -> Server:
    """Two stages; with a folder those of the plugin, with DRAM for so many pages each."""
    env = {**ENVIRONMENT, "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    env["SGLANG_PP_LAYER_PARTITION"] = kind.layers
    args = [*BASE, "--pp-size", "2", *args]
    if folder is not None:
        tiers = ["--hier-kv-host-size", host_size(2 * host_pages)]
        args = [*args, *PLUGIN, *tiers, "--hier-kv-disk-dir", str(folder / "disk")]
        env[ENV_JITTER] = str(JITTER_MS)
    return Server(args, model=str(model), env=env, stop="kill", start_timeout_s=300)


@pytest.fixture(scope="module", params=list(KINDS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, kind = tmp_path_factory.mktemp("image-stages"), KINDS[request.param]
    model, which = kind.write(folder / "model"), prompts()
    with stages(kind, model, kind.large) as server:
        plain = ask_plain(server, which, ask)
    with stages(kind, model, kind.large, folder, 400) as server:
        told = ask_in_turn(server, which, ask)
    return Served(plain, told, partial(stages, kind, model, kind.small, folder, 40))


@pytest.fixture(scope="module")
def served_next(served: Served) -> ServedNext:
    rng = random.Random(0)
    chosen = [rng.choice(MANY) for _ in range(NUM_AT_ONCE)]
    with served.go_on() as server:
        from_disk = answers(server, prompts())
        at_once = send_in_halves(server, partial(ask, server), chosen)
        counters, log = settled(server), server.log()
    return ServedNext(from_disk, list(zip(chosen, at_once, strict=True)), counters, log)


def check_counters(counters: dict[str, Any], num_unnamed: int = 0) -> None:
    host = counters["host"]
    assert host["loaded_pages"] > 10
    assert host["image_requests"] > len(prompts())
    assert host.get("unnamed_image_requests", 0) == num_unnamed
    assert not host.get("image_name_conflicts")


def test_images_come_back_in_all_stages_from_dram(served: Served) -> None:
    """Bit for bit as they do from the devices of plain SGLang."""
    plain, told = served.plain, served.told
    check_right(told.found, plain.computed)
    assert values(told.again) == values(plain.hits)
    check_hits(told.from_dram, plain.hits, "host", above=1000)
    check_counters(told.counters, num_unnamed=2)
    assert "Found rank divergence" not in told.log


def test_another_image_in_the_same_text_is_another_prompt(served: Served) -> None:
    check_alike(served.plain, served.told, most_cached=128)


def test_an_unnamed_image_beside_named_ones_is_neither_stored_nor_loaded(served: Served) -> None:
    check_unnamed(served.plain, served.told)


@pytest.mark.long
def test_images_come_back_in_all_stages_from_disk(served: Served, served_next: ServedNext) -> None:
    """Bit for bit as from DRAM, when the server was killed."""
    check_hits(served_next.from_disk, served.plain.hits, "disk", above=1000)
    check_counters(served_next.counters)
    assert "Found rank divergence" not in served_next.log


@pytest.mark.long
def test_many_at_once_on_small_devices(served: Served, served_next: ServedNext) -> None:
    """Images leave the devices while others come, and chunks end inside of them."""
    right = [served.plain.right[prompt] for prompt, _ in served_next.at_once]
    check_right([answer for _, answer in served_next.at_once], right)
