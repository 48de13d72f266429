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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.images import intern_model
from testkit.images.vision_model import IMAGE, picture, write_vision_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import GIB, send_in_halves, settled
from tests.e2e.images.image_prompts import (
    BASE,
    HEADER_BYTES,
    PAGE,
    PAGE_BYTES,
    PLUGIN,
    TOLERANCE,
    Prompt,
    ask,
    check_right,
    drop,
    is_refused,
    prompts,
    words,
)
from tests.e2e.models.hybrid_answers import cached, check_hits, drop_device, values
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

BROADCAST = ["--enable-broadcast-mm-inputs-process"]
TWO = ["--tp-size", "2"]
NUM_AT_ONCE = 24
NUM_TOKENS = 6
ALIKE = words(100, 70) + IMAGE + words(101, 60)


@dataclass(frozen=True)
class Served:
    """What two ranks without the plugin answered, and what two with it did.

    Attributes:
        computed, hits: of plain SGLang, and the same again.
        right: of plain SGLang, to each prompt that was asked at any time.
        found, again, from_dram: of the plugin, the same again, and behind a flush.
        alike: to other images in one text, and the same again behind a flush.
        unnamed: to two images under one name, and between these to one of them without it.
        at_first: counters of that server.
        from_disk: of the next server.
        at_once: what was asked of it by several at a time, and the answers.
        at_last: counters of it.
    """

    computed: list[Any]
    hits: list[Any]
    right: dict[Prompt, Any]
    found: list[Any]
    again: list[Any]
    from_dram: list[Any]
    alike: list[Any]
    unnamed: list[Any]
    at_first: dict[str, Any]
    from_disk: list[Any]
    at_once: list[tuple[Prompt, Any]]
    at_last: dict[str, Any]


WHICH = [prompts()[at] for at in (1, 2, 4, 5)]  # short and long images, and two in one
OTHERS = [Prompt(ALIKE, (picture(seed),)) for seed in range(200, 202)]
MINE, YOURS = (Prompt(words(500, 40) + IMAGE + words(501, 80), (picture(n),)) for n in (500, 501))
MANY = [
    Prompt(words(600 + n, 30 + 17 * n) + IMAGE + words(700 + n, 50), (picture(seed, width=12),))
    for n in range(3)
    for seed in (600, 601)
]


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


def answers(server: Server, which: Sequence[Prompt]) -> list[Any]:
    return [say(server, prompt) for prompt in which]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("image-ranks")
    model = write_vision_model(folder / "model")
    with ranks(model, "--max-total-tokens", "16384") as server:
        computed, hits = answers(server, WHICH), answers(server, WHICH)
        asked = [*OTHERS, MINE, YOURS, *MANY]
        right = dict(zip(asked, answers(server, asked), strict=True))
    with ranks(model, "--max-total-tokens", "16384", folder=folder, host_pages=400) as server:
        found, again = answers(server, WHICH), answers(server, WHICH)
        drop_device(server)
        from_dram = answers(server, WHICH)
        alike = answers(server, OTHERS)
        unnamed = [
            say(server, MINE, mm_hashes=["ab12"]),
            say(server, YOURS),
            say(server, YOURS, mm_hashes=["ab12"]),
        ]
        drop_device(server)
        alike += answers(server, OTHERS[::-1])
        unnamed += answers(server, [YOURS, MINE])
        at_first = settled(server)
    rng = random.Random(0)
    chosen = [rng.choice(MANY) for _ in range(NUM_AT_ONCE)]
    args = ["--max-total-tokens", "1536", *BROADCAST]
    with ranks(model, *args, folder=folder, host_pages=24) as server:
        from_disk = answers(server, WHICH)
        at_once = send_in_halves(server, partial(say, server), chosen)
        at_last = settled(server)
    return Served(
        computed, hits, right, found, again, from_dram, alike, unnamed, at_first, from_disk,
        list(zip(chosen, at_once, strict=True)), at_last,
    )  # fmt: skip


@pytest.mark.long
def test_images_come_back_on_all_ranks_from_dram_and_from_disk(served: Served) -> None:
    """Bit for bit as they do from the devices of plain SGLang."""
    check_right(served.found, served.computed)
    assert values(served.again) == values(served.hits)
    check_hits(served.from_dram, served.hits, "host", above=700)
    check_hits(served.from_disk, served.hits, "disk", above=700)


@pytest.mark.long
def test_another_image_in_the_same_text_is_another_prompt(served: Served) -> None:
    right = [served.right[prompt] for prompt in OTHERS]
    (_, one), (_, other) = values(right)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * TOLERANCE
    check_right(served.alike, [*right, *right[::-1]])
    assert cached(served.alike[1:2])[0] < 100, "the text before the image, and no more"


@pytest.mark.long
def test_an_unnamed_image_beside_named_ones_is_neither_stored_nor_loaded(served: Served) -> None:
    """Two images under one name are one to SGLang; the store never hears of it."""
    mine, named, _, named_again, mine_again = served.unnamed
    check_right([mine, mine_again], [served.right[MINE]] * 2)
    check_right([named, named_again], [served.right[YOURS]] * 2)
    assert cached([mine_again])[0] < 64 <= cached([named_again])[0]
    host = served.at_first["host"]
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
        right = answers(server, which)
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
            again = answers(server, which)
            check_right(again, right)
            assert min(cached(again)) > 3 * PAGE, "what was stored beside them is theirs"
            assert is_refused(server, shifting), "both ranks are there, and decide as before"


@pytest.mark.long
def test_many_at_once_on_small_devices(served: Served) -> None:
    """Images leave the devices while others come, and chunks end inside of them."""
    asked = [prompt for prompt, _ in served.at_once]
    check_right([answer for _, answer in served.at_once], [served.right[each] for each in asked])
    host = served.at_last["host"]
    assert host["loaded_pages"] > 15
    assert host["image_requests"] == len(WHICH) + NUM_AT_ONCE
    assert not host.get("unnamed_image_requests")
    assert not host.get("image_name_conflicts")
