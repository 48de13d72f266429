"""Prompts with images on two tensor parallel ranks, their page stores late, each by its own chance.

A plain server of two ranks says what is right; of the plugin's, one is killed, and another one goes
on with its disk, on a small device, where the first rank alone makes of an image what all are given
(`--enable-broadcast-mm-inputs-process`). SGLang's rank consensus checker is on: it ends the server
when ranks decide differently.

By default texts with marks of images meet servers that broadcast, and `test_image_states.py` has
images of two ranks; the long form has all of it.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.images import intern_model
from testkit.images.vision_model import picture, write_vision_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import GIB, send_in_halves, settled
from tests.e2e.images.asked_in_turn import (
    MANY,
    Plain,
    Told,
    ask_in_turn,
    ask_plain,
    asked,
    check_alike,
    check_unnamed,
)
from tests.e2e.images.image_prompts import (
    BASE,
    HEADER_BYTES,
    PAGE,
    PAGE_BYTES,
    PLUGIN,
    Prompt,
    ask,
    check_right,
    drop,
    is_refused,
    prompts,
    words,
)
from tests.e2e.models.hybrid_answers import cached, check_hits, values
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

BROADCAST = ["--enable-broadcast-mm-inputs-process"]
TWO = ["--tp-size", "2"]
NUM_AT_ONCE = 24
NUM_TOKENS = 6


@dataclass(frozen=True)
class Served:
    """What two ranks without the plugin answered, and what two with it did.

    Attributes:
        plain: without it.
        told: with it.
        from_disk: of the next server.
        at_once: what was asked of it by several at a time, and the answers.
        at_last: counters of it.
    """

    plain: Plain
    told: Told
    from_disk: list[Any]
    at_once: list[tuple[Prompt, Any]]
    at_last: dict[str, Any]


WHICH = [prompts()[at] for at in (1, 2, 4, 5)]  # short and long images, and two in one


def ranks(model: Path, *args: str, folder: Path | None = None, host_pages: int = 0) -> Server:
    """Two ranks; with a folder those of the plugin, with DRAM for so many pages each."""
    env = dict(ENVIRONMENT)
    if folder is not None:
        num_bytes = 2 * (host_pages + 0.5) * (PAGE_BYTES // 2 + HEADER_BYTES)
        tiers = ["--hier-kv-host-size", f"{num_bytes / GIB:.9f}"]
        args = (*PLUGIN, *tiers, "--hier-kv-disk-dir", str(folder / "disk"), *args)
        env[ENV_JITTER] = str(JITTER_MS)
    return Server([*BASE, *TWO, *args], model=str(model), env=env, stop="kill")


def say(server: Server, prompt: Prompt, **fields: Any) -> dict[str, Any]:
    return ask(server, prompt, NUM_TOKENS, **fields)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("image-ranks")
    model = write_vision_model(folder / "model")
    with ranks(model, "--max-total-tokens", "16384") as server:
        plain = ask_plain(server, WHICH, say)
    with ranks(model, "--max-total-tokens", "16384", folder=folder, host_pages=400) as server:
        told = ask_in_turn(server, WHICH, say)
    rng = random.Random(0)
    chosen = [rng.choice(MANY) for _ in range(NUM_AT_ONCE)]
    args = ["--max-total-tokens", "1536", *BROADCAST]
    with ranks(model, *args, folder=folder, host_pages=24) as server:
        from_disk = asked(server, WHICH, say)
        at_once = send_in_halves(server, partial(say, server), chosen)
        at_last = settled(server)
    return Served(plain, told, from_disk, list(zip(chosen, at_once, strict=True)), at_last)


@pytest.mark.long
def test_images_come_back_on_all_ranks_from_dram_and_from_disk(served: Served) -> None:
    """Bit for bit as they do from the devices of plain SGLang."""
    plain, told = served.plain, served.told
    check_right(told.found, plain.computed)
    assert values(told.again) == values(plain.hits)
    check_hits(told.from_dram, plain.hits, "host", above=700)
    check_hits(served.from_disk, plain.hits, "disk", above=700)


@pytest.mark.long
def test_another_image_in_the_same_text_is_another_prompt(served: Served) -> None:
    check_alike(served.plain, served.told, most_cached=100)


@pytest.mark.long
def test_an_unnamed_image_beside_named_ones_is_neither_stored_nor_loaded(served: Served) -> None:
    check_unnamed(served.plain, served.told)
    host = served.told.counters["host"]
    assert host["unnamed_image_requests"] == 2
    assert not host.get("image_name_conflicts")


def test_a_text_with_marks_of_images_in_it_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Each rank decides for itself, of the same tokens, and goes on with the others' requests.

    As in `test_image_models`: SGLang takes what is between `<img>` and `</img>` for the image.
    """
    model = intern_model.write_internvl(tmp_path / "model")
    image = intern_model.IMAGE
    large = ["--max-total-tokens", "16384", "--chunked-prefill-size", "4096"]
    which = [Prompt(words(1 + n, 60) + image + words(5 + n, 90), (picture(n),)) for n in range(2)]
    long = Prompt(words(3, 1500) + image, (picture(6),))
    shifting = Prompt(words(4, 8) + "<img>a</img>" + image + words(5, 4), (picture(7),))
    with ranks(model, *large) as server:
        right = asked(server, which, say)
    for way in either([BROADCAST], [[], BROADCAST]):
        folder = tmp_path / str(len(way))
        folder.mkdir()
        with ranks(model, *large, *way, folder=folder, host_pages=400) as server:
            with ThreadPoolExecutor(8) as pool:  # the first is computed, and the others together
                waits = pool.submit(say, server, long)
                wrong = [pool.submit(is_refused, server, shifting) for _ in range(3)]
                found = [pool.submit(say, server, prompt) for prompt in which]
                check_right([each.result() for each in found], right)
                assert all(each.result() for each in wrong)
                waits.result()
            drop(server)
            again = asked(server, which, say)
            check_right(again, right)
            assert min(cached(again)) > 3 * PAGE, "what was stored beside them is theirs"
            assert is_refused(server, shifting), "both ranks are there, and decide as before"


@pytest.mark.long
def test_many_at_once_on_small_devices(served: Served) -> None:
    """Images leave the devices while others come, and chunks end inside of them."""
    right = [served.plain.right[prompt] for prompt, _ in served.at_once]
    check_right([answer for _, answer in served.at_once], right)
    host = served.at_last["host"]
    assert host["loaded_pages"] > 15
    assert host["image_requests"] == len(WHICH) + NUM_AT_ONCE
    assert not host.get("unnamed_image_requests")
    assert not host.get("image_name_conflicts")
